"""The attentions that stand in for the library's: the same answers at full width, whatever is passed to them."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
import transformers
from timm.layers.attention import Attention
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers.models.vit.modeling_vit import ViTAttention

from starfish.anatomy import attention
from starfish.anatomy.attention import attend, is_narrow, narrow_attention, narrowable
from starfish.errors import UserError

TOKENS = torch.randn(2, 5, 24, generator=torch.Generator().manual_seed(3))
LOOK = torch.rand(5, 5, generator=torch.Generator().manual_seed(4)) > 0.4
LOOK.fill_diagonal_(True)
ADDED = torch.randn(5, 5, generator=torch.Generator().manual_seed(5))


def fused(**settings: Any) -> nn.Module:
    return Attention(24, num_heads=3, norm_layer=nn.LayerNorm, **settings)


def multihead(**settings: Any) -> nn.Module:
    return nn.MultiheadAttention(24, 3, **{"batch_first": True, **settings})


def separate() -> nn.Module:
    config = transformers.ViTConfig(hidden_size=24, num_attention_heads=3, attn_implementation="sdpa")
    return ViTAttention(config)


def answer(module: nn.Module, x: Tensor, **arguments: Any) -> Tensor:
    """Of either kind of signature."""
    if "in_proj_weight" in dict(module.named_parameters()):
        found = module(x, x, x, need_weights=False, **arguments)
    else:
        found = module(x, **arguments)
    tensor: Tensor = found[0] if isinstance(found, tuple) else found
    return tensor


SAME: dict[str, tuple[nn.Module, dict[str, Any]]] = {
    "timm": (fused(qkv_bias=True), {}),
    "timm, no bias": (fused(), {}),
    "timm, a norm and a gate after it": (fused(qkv_bias=True, scale_norm=True, gated=True), {}),
    "timm, some tokens only": (fused(), {"attn_mask": LOOK}),
    "timm, something added": (fused(), {"attn_mask": ADDED}),
    "timm, causal": (fused(), {"is_causal": True}),
    "torch": (multihead(), {}),
    "torch, no bias": (multihead(bias=False), {}),
    "torch, some tokens only": (multihead(), {"attn_mask": ~LOOK}),
    "torch, something added": (multihead(), {"attn_mask": ADDED}),
    "torch, padding": (multihead(), {"key_padding_mask": torch.tensor([[False] * 5, [False] * 3 + [True] * 2])}),
    "torch, both": (multihead(), {"attn_mask": ~LOOK, "key_padding_mask": torch.tensor([[False] * 5] * 2)}),
    "transformers": (separate(), {}),
    "transformers, some tokens only": (separate(), {"attention_mask": LOOK}),
    "transformers, something added": (separate(), {"attention_mask": ADDED[None, None]}),
}


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("name", SAME)
def test_at_full_width_it_is_the_librarys(name: str, grad: bool) -> None:
    """With every mask that the library takes, in the kernels with gradients and without."""
    module, arguments = SAME[name]
    narrow = narrow_attention("here", module.eval())
    with torch.set_grad_enabled(grad):
        torch.testing.assert_close(
            answer(narrow, TOKENS, **arguments), answer(module, TOKENS, **arguments), rtol=1e-5, atol=1e-6
        )


def test_tokens_may_come_first() -> None:
    """As nn.MultiheadAttention has it where it is not told otherwise."""
    module = multihead(batch_first=False).eval()
    x = TOKENS.transpose(0, 1).contiguous()
    torch.testing.assert_close(answer(narrow_attention("here", module), x), answer(module, x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["timm", "torch", "transformers"])
def test_it_holds_the_very_parameters_under_their_names(name: str) -> None:
    """So that state dicts fit; it is in the mode that the other was in, and once is enough."""
    module = SAME[name][0].train()
    narrow = narrow_attention("here", module)
    ours, theirs = dict(narrow.named_parameters()), dict(module.named_parameters())
    assert ours.keys() == theirs.keys()
    assert all(ours[key] is theirs[key] for key in ours)
    assert narrow.training
    assert is_narrow(narrow)
    assert narrowable(narrow)
    assert narrow_attention("here", narrow) is narrow
    module.eval()


def test_encoder_layers_of_torch_call_it() -> None:
    """They have a kernel of their own for inference, which knows nothing of narrow queries."""
    layer = nn.TransformerEncoderLayer(24, 3, 32, batch_first=True).eval()
    with torch.no_grad():
        expected = layer(TOKENS)
        layer.self_attn = narrow_attention("self_attn", layer.self_attn)
        heard: list[int] = []
        layer.self_attn.queries.register_forward_hook(lambda *seen: heard.append(seen[2].shape[-1]))
        torch.testing.assert_close(layer(TOKENS), expected, rtol=1e-4, atol=1e-5)
    assert heard == [24]


class Attention2(Attention):
    """Of a user who may have changed anything."""


@pytest.mark.parametrize(
    ("module", "kind"),
    [
        (nn.Linear(24, 24), "Linear"),
        (Attention2(24, 3), "Attention2"),
        (fused(qk_norm=True), "Attention"),
        (multihead(kdim=12, vdim=12), "MultiheadAttention"),
        (multihead(add_bias_kv=True), "MultiheadAttention"),
        (timm.create_model("eva02_tiny_patch14_224", img_size=28, depth=1).blocks[0].attn, "EvaAttention"),
    ],
)
def test_what_it_cannot_stand_in_for_is_refused_by_name(module: nn.Module, kind: str) -> None:
    """Other classes, and those of the library that do more than a product."""
    assert not narrowable(module)
    with pytest.raises(UserError, match=f"`blocks.3.attn` is a `{kind}`, whose queries and keys"):
        narrow_attention("blocks.3.attn", module)


@pytest.mark.parametrize("width", [1, 5, 8])
@pytest.mark.parametrize("mask", [None, ADDED])
def test_both_kernels_are_the_formula(width: int, mask: Tensor | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """softmax(q kᵀ · scale) v, head by head, however wide a query is; the fused one is fed zeros beside them."""
    qkv = [torch.randn(2, 5, 3 * size, requires_grad=True) for size in (width, width, 8)]
    by_head = [x.unflatten(-1, (3, -1)).transpose(1, 2) for x in qkv]
    expected = scaled_dot_product_attention(*by_head, attn_mask=mask, scale=0.3).transpose(1, 2).flatten(2)
    slopes = torch.autograd.grad(expected.square().sum(), qkv)
    for most in (2**25, 0):
        monkeypatch.setattr(attention, "PLAIN", most)
        found = attend(*qkv, 3, 0.3, mask, 0.0)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        for ours, theirs in zip(torch.autograd.grad(found.square().sum(), qkv), slopes, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
        with torch.no_grad():
            torch.testing.assert_close(attend(*qkv, 3, 0.3, mask, 0.0), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["timm", "torch"])
def test_dropout_acts_in_training_alone(name: str) -> None:
    """With the probability that the library's had."""
    module = fused(attn_drop=0.9) if name == "timm" else multihead(dropout=0.9)
    narrow = narrow_attention("here", module.eval())
    torch.testing.assert_close(answer(narrow, TOKENS), answer(module, TOKENS), rtol=1e-5, atol=1e-6)
    narrow.train()
    assert (answer(narrow, TOKENS) - answer(narrow, TOKENS)).abs().max() > 1e-2


def test_queries_and_keys_can_be_listened_to() -> None:
    """What passes is as wide as they are, the heads side by side."""
    module = fused()
    narrow = narrow_attention("here", module)
    heard: dict[str, Tensor] = {}
    for side in ("queries", "keys"):
        child = narrow.get_submodule(side)
        child.register_forward_hook(lambda _m, _i, out, side=side: heard.update({side: out}))
    narrow(TOKENS)
    q, k, _ = module.qkv(TOKENS).chunk(3, -1)
    assert torch.equal(heard["queries"], q)
    assert torch.equal(heard["keys"], k)
