"""Scopes: which rows of which weights, by the words of the papers."""

from __future__ import annotations

import pytest

from starfish.errors import UserError
from starfish.scopes import scope, scope_names
from test_anatomy import CLASSES, built


def test_scopes_of_a_fused_tensor_are_rows() -> None:
    """[Q; K; V]: qk is the first two thirds, v the last, and together they are the whole."""
    model, _, anatomy = built("timm vit")
    key = "blocks.0.attn.qkv.weight"
    wanted = {"q": (0, 16), "k": (16, 32), "v": (32, 48), "qk": (0, 32), "qk+v": (0, 48), "k, v": (16, 48)}
    for part, (start, stop) in (wanted | {"qkv": (0, 48), "QKV+out": (0, 48)}).items():
        assert scope(anatomy, model, part)[key] == slice(start, stop)
    assert set(scope(anatomy, model, "mlp+qk")) == {
        f"blocks.{i}.{name}.weight" for i in range(2) for name in ("attn.qkv", "mlp.fc1", "mlp.fc2")
    }
    with pytest.raises(UserError, match="do not touch"):
        scope(anatomy, model, "q+v")


def test_scopes_of_separate_and_of_half_fused_tensors() -> None:
    """Separate projections are chosen whole, a fused kv by halves."""
    model, _, anatomy = built("transformers vit")
    assert [key.split(".")[-2] for key in scope(anatomy, model, "qk")] == ["q_proj", "k_proj"] * 2
    model, _, anatomy = built("timm pvt v2, fused kv")
    rows = model.get_parameter("stages.0.blocks.0.attn.kv.weight").shape[0]
    assert scope(anatomy, model, "qk")["stages.0.blocks.0.attn.kv.weight"] == slice(0, rows // 2)
    assert scope(anatomy, model, "qk")["stages.0.blocks.0.attn.q.weight"] == slice(0, rows // 2)


def test_scopes_of_mobilenet_count_the_weights_of_the_paper() -> None:
    """MobileNetV1: stem and pointwise, depthwise, and their unions; see the methods' table of model facts."""
    model, _, anatomy = built("timm mobilenetv1")

    def count(part: str) -> int:
        return sum(model.get_parameter(key).numel() for key in scope(anatomy, model, part))

    head = 1024 * CLASSES
    assert count("depthwise") == count("dw") == 44_640
    assert count("conv_only") == 864 + 3_139_584
    assert count("fc_only") == count("head") == head
    assert count("conv_fc") == 864 + 3_139_584 + head
    assert count("conv_dw") == 864 + 3_139_584 + 44_640
    assert count("all") == 864 + 3_139_584 + 44_640 + head


@pytest.mark.parametrize(("wrong", "says"), [("conv", "qkv"), ("nonsense", "mlp"), ("", "mlp"), ("qkv+", "mlp")])
def test_a_scope_that_is_not_there_is_refused(wrong: str, says: str) -> None:
    """With those that are."""
    model, _, anatomy = built("timm vit")
    with pytest.raises(UserError, match=f"scope `{wrong}`".replace("+", "[+]")) as error:
        scope(anatomy, model, wrong)
    assert f"`{says}`" in error.value.hint


def test_the_scopes_of_a_model_are_listed() -> None:
    """Those, and only those, that choose something."""
    for name in ("timm vit", "timm mobilenetv1"):
        model, _, anatomy = built(name)
        assert all(scope(anatomy, model, part) for part in scope_names(anatomy, model))
    assert "depthwise" in scope_names(anatomy, model)
    assert "qkv" not in scope_names(anatomy, model)
