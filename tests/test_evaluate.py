"""Every figure against a calculation by hand."""

from __future__ import annotations

import math
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cases import MODELS, tiny_vit
from starfish import evaluate
from starfish.anatomy import find
from starfish.core import finish
from starfish.data import Preprocess, StoredImages, as_images

ANSWERS = torch.tensor(
    [
        [9.0, 1, 2, 3, 4, 5, 6],  # ranks: 0 6 5 4 3 2 1
        [0.0, 1, 2, 3, 4, 5, 6],  # ranks: 6 5 4 3 2 1 0
        [3.0, 9, 1, 0, 2, 4, 5],  # ranks: 1 6 5 0 4 2 3
        [1.0, 2, 3, 9, 0, -1, -2],  # ranks: 3 2 1 0 4 5 6
    ]
)


@pytest.mark.parametrize(
    ("labels", "top1", "top5"),
    [([0, 6, 1, 3], 100, 100), ([0, 5, 0, 2], 25, 100), ([1, 0, 3, 6], 0, 0), ([0, 2, 3, 5], 25, 50)],
)
def test_accuracy_by_hand(labels: list[int], top1: float, top5: float) -> None:
    assert evaluate.accuracy(ANSWERS, torch.tensor(labels)) == top1
    assert evaluate.accuracy(ANSWERS, torch.tensor(labels), top=5) == top5


def test_no_accuracy_without_labels_and_no_top5_of_fewer_classes() -> None:
    assert evaluate.accuracy(ANSWERS, None) is None
    assert evaluate.accuracy(ANSWERS[:, :4], torch.zeros(4).long(), top=5) is None
    assert evaluate.accuracy(ANSWERS[:, :4], torch.tensor([0, 3, 1, 3])) == 100
    assert evaluate.accuracy(ANSWERS[:, :5], torch.zeros(4).long(), top=5) == 100


@pytest.mark.parametrize(
    ("percent", "count", "error"), [(50.0, 100, 5.0), (72.0, 1000, 1.419859), (0.0, 9, 0.0), (100.0, 9, 0.0)]
)
def test_the_standard_error_is_that_of_a_proportion(percent: float, count: int, error: float) -> None:
    assert evaluate.standard_error(percent, count) == pytest.approx(error, rel=1e-5)


def test_no_standard_error_of_nothing() -> None:
    assert evaluate.standard_error(None, 5) is None


def test_agreement_by_hand() -> None:
    other = ANSWERS.clone()
    other[2, 6] = 10
    assert evaluate.agreement(ANSWERS, ANSWERS) == 100
    assert evaluate.agreement(other, ANSWERS) == 75


def changed(model: nn.Module) -> nn.Module:
    other = deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            if parameter.ndim > 1:
                parameter.mul_(torch.rand(parameter.shape) > 0.3)
    return other


def measured(model: nn.Module, dense: nn.Module, images: Any) -> evaluate.Measured:
    dense_BK = finish(evaluate.predict(dense, images, "dense"))
    anatomy = find(dense, images.batch([0, 1]))
    return finish(evaluate.measure(model, dense, dense_BK, images, anatomy, "evaluate"))


@pytest.mark.parametrize("kind", MODELS)
def test_a_model_is_like_itself(kind: str, images: Tensor) -> None:
    model = MODELS[kind]()
    found = measured(deepcopy(model), model, as_images(images))
    assert found.cosines == pytest.approx([1.0] * len(found.cosines), abs=1e-6)
    assert len(found.cosines) == {"vit": 2, "cnn": 3}[kind]
    assert found.agreement == 100
    assert found.kl == pytest.approx(0, abs=1e-6)
    assert found.top1 is None


def test_everything_measured_by_hand(images: Tensor, labels: Tensor) -> None:
    dense = tiny_vit()
    model = changed(dense)
    found = measured(model, dense, StoredImages(images, Preprocess(), labels))
    with torch.no_grad():
        ours, theirs = model(images), dense(images)
    p, q = theirs.softmax(-1), ours.softmax(-1)
    assert found.kl == pytest.approx(float((p * (p / q).log()).sum(-1).mean()), rel=1e-4)
    assert found.top1 == pytest.approx(100 * float((ours.argmax(-1) == labels).float().mean()))
    assert found.agreement == pytest.approx(100 * float((ours.argmax(-1) == theirs.argmax(-1)).float().mean()))
    outputs: list[list[Tensor]] = []
    for net in (model, dense):
        outputs.append([])
        hooks = [block.register_forward_hook(lambda *seen: outputs[-1].append(seen[2])) for block in net.blocks]
        with torch.no_grad():
            net(images)
        for hook in hooks:
            hook.remove()
    expected = [float(nn.functional.cosine_similarity(a, b, dim=-1).mean()) for a, b in zip(*outputs, strict=True)]
    assert found.cosines == pytest.approx(expected, rel=1e-4)
    assert max(found.cosines) < 0.999


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("batch", [1, 5, 12])
def test_no_figure_depends_on_the_batch_size(
    kind: str, batch: int, images: Tensor, labels: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    dense = MODELS[kind]()
    model, stored = changed(dense), StoredImages(images, Preprocess(), labels)
    expected = measured(model, dense, stored)
    monkeypatch.setattr(evaluate, "BATCH", batch)
    found = measured(model, dense, stored)
    assert (found.top1, found.top5, found.agreement) == (expected.top1, expected.top5, expected.agreement)
    assert found.kl == pytest.approx(expected.kl, rel=1e-4)
    assert found.cosines == pytest.approx(expected.cosines, abs=1e-5)


def test_block_cosines_are_taken_over_at_most_so_many_images(images: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    dense = tiny_vit()
    model = changed(dense)
    monkeypatch.setattr(evaluate, "COSINE_IMAGES", 6)
    assert measured(model, dense, as_images(images)).cosines == pytest.approx(
        measured(model, dense, as_images(images[:6])).cosines, abs=1e-6
    )


def test_predict_is_the_model_in_evaluation_mode(images: Tensor) -> None:
    model = MODELS["cnn"]()
    expected = model(images)
    model.train()
    rows = list(evaluate.predict(model, as_images(images), "look"))
    assert rows == [{"stage": "look", "done": 12, "total": 12}]
    model.train()
    torch.testing.assert_close(finish(evaluate.predict(model, as_images(images), "look")), expected)
    assert not model.training


@pytest.mark.parametrize(("kind", "sizes"), [("vit", [24, 24]), ("cnn", [16, 32, 64])])
def test_how_many_channels_the_blocks_put_out(kind: str, sizes: list[int], images: Tensor) -> None:
    """Those of the layout's channel dimension, in the order of the blocks; also of a model in training."""
    model = MODELS[kind]().train()
    anatomy = find(model, images[:2])
    assert list(evaluate.output_sizes(model, anatomy, images[:2]).items()) == list(
        zip(anatomy.blocks, sizes, strict=True)
    )


def test_scores_are_the_keys_of_the_result() -> None:
    before = evaluate.Measured(10.0, 30.0, 20.0, 2.0, [0.5, 0.3])
    after = evaluate.Measured(64.0, None, 70.0, 0.5, [0.9, 0.7])
    found = evaluate.scores((72.0, 91.0), before, after, ("a", "b"), 100)
    assert found["accuracy"] == {"dense": 72.0, "pruned": 10.0, "healed": 64.0}
    assert found["accuracy_top5"] == {"dense": 91.0, "pruned": 30.0, "healed": None}
    assert found["accuracy_standard_error"]["healed"] == pytest.approx(100 * math.sqrt(0.64 * 0.36 / 100))
    assert found["fidelity"]["cosine"] == pytest.approx({"pruned": 0.4, "healed": 0.8})
    assert found["fidelity"]["agreement"] == {"pruned": 20.0, "healed": 70.0}
    assert found["fidelity"]["kl"] == {"pruned": 2.0, "healed": 0.5}
    assert found["fidelity"]["blocks"] == {"a": {"pruned": 0.5, "healed": 0.9}, "b": {"pruned": 0.3, "healed": 0.7}}
