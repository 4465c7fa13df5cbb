"""The one way in: wrappers, shapes of input, results, refusals."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import starfish
from cases import CASES, Case, quick, tiny_vit
from starfish.cache import Cache
from starfish.core import Job, finish
from starfish.data import as_images
from starfish.heal import healing_, job_of
from starfish.methods import default_methods
from starfish.methods.align import Starfish
from starfish.methods.corp import foldable
from starfish.runs import Run

QUICK = quick(Starfish())


def healed(model: nn.Module, dense: nn.Module, masks: starfish.Masks, images: Tensor) -> list[float]:
    result = starfish.heal_(model, dense, masks, images, QUICK)
    return [float(row["loss"]) for row in result.rows]


def test_wrapped_models_heal_as_bare_ones(images: Tensor) -> None:
    """DataParallel and torch.compile put a prefix before every name; the loss is the same, never silently zero."""
    case = Case("starfish", "vit-unstructured")
    model, dense, masks, _ = case.build(images)
    expected = healed(model, dense, masks, images)
    for wrap in (nn.DataParallel, torch.compile):
        model, dense, masks, _ = case.build(images)
        assert healed(wrap(model), wrap(dense), masks, images) == expected


def test_batches_and_tensors_are_the_same_images(images: Tensor) -> None:
    """A tensor, a list of batches and a list of single images give the same heal."""
    losses = []
    for given in (images, list(images.split(5)), list(images)):
        model, dense, masks, _ = Case("starfish", "vit-unstructured").build(images)
        losses.append(healed(model, dense, masks, given))  # type: ignore[arg-type]
    assert losses[0] == losses[1] == losses[2]


def test_result_has_the_keys_of_the_contract(images: Tensor, labels: Tensor) -> None:
    """result.json: what docs/reference.md promises, with labels and without."""
    model, dense, masks, _ = Case("starfish", "vit-unstructured").build(images)
    facts = starfish.heal_(model, dense, masks, images, QUICK, evaluation=[(images[:6], labels[:6])]).facts()
    assert {"accuracy", "fidelity", "sparsity", "mask_intact", "frozen_intact", "images", "epochs", "seconds",
            "peak_rss_mb", "method", "settings", "versions", "seed"} <= facts.keys()  # fmt: skip
    assert facts["accuracy"].keys() == {"dense", "pruned", "healed"}
    assert all(0 <= value <= 100 for value in facts["accuracy"].values())
    assert facts["fidelity"].keys() == {"agreement", "kl", "cosine", "blocks"}
    assert all(facts["fidelity"][key].keys() == {"pruned", "healed"} for key in ("agreement", "kl", "cosine"))
    assert facts["seconds"].keys() == {"targets", "fit", "total"}
    assert facts["sparsity"] == pytest.approx(0.6, abs=1e-3)
    assert facts["method"] == "starfish"
    assert facts["evaluation"] == {"images": 6, "labels": True, "held_out": True}
    assert "rows" not in facts
    model, dense, masks, _ = Case("starfish", "vit-unstructured").build(images)
    facts = starfish.heal_(model, dense, masks, images, QUICK).facts()
    assert facts["accuracy"] == {"dense": None, "pruned": None, "healed": None}
    assert facts["evaluation"]["held_out"] is False


def test_healing_brings_the_model_closer(images: Tensor) -> None:
    """Cosine rises and KL falls from pruned to healed, on the healing images."""
    model, dense, masks, _ = Case("starfish", "vit-unstructured").build(images)
    fidelity = starfish.heal_(model, dense, masks, images, QUICK).fidelity
    assert fidelity["cosine"]["healed"] > fidelity["cosine"]["pruned"]
    assert fidelity["kl"]["healed"] < fidelity["kl"]["pruned"]
    assert fidelity["blocks"].keys() == {"blocks.0", "blocks.1"}


def test_sequence_first_models_heal(labels: Tensor) -> None:
    """nn.TransformerEncoder with batch_first=False: tokens first, images second."""

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=False)
            self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
            self.head = nn.Linear(16, 5)

        def forward(self, x_BTC: Tensor) -> Tensor:
            return self.head(self.encoder(x_BTC.transpose(0, 1)).mean(0))

    inputs = torch.randn(12, 7, 16)
    dense = Encoder().eval()
    masks = starfish.prune(dense, starfish.Magnitude(0.6), list(inputs.split(4)))
    model = deepcopy(dense)
    result = starfish.heal_(model, dense, masks, list(inputs.split(4)), QUICK)
    assert result.loss["last"] < result.loss["first"]  # type: ignore[operator]
    assert len(result.fidelity["blocks"]) == 3


def test_blocks_by_regex(images: Tensor) -> None:
    """The user says which modules to align."""
    model, dense, masks, _ = Case("starfish", "vit-unstructured").build(images)
    result = starfish.heal_(model, dense, masks, images, QUICK, blocks=r"blocks\.1")
    assert list(result.fidelity["blocks"]) == ["blocks.1"]


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (lambda masks: {}, "no masks"),
        (lambda masks: {"blocks.9.x": next(iter(masks.values()))}, "no parameter `blocks.9.x`"),
        (lambda masks: {name: mask[:1] for name, mask in masks.items()}, "has shape"),
        (lambda masks: {name: mask.float() for name, mask in masks.items()}, "not torch.bool"),
    ],
)
def test_bad_masks_are_refused(spoil, complaint: str, images: Tensor) -> None:  # type: ignore[no-untyped-def]
    """Before anything changes, in one sentence."""
    model, dense, masks, _ = Case("starfish", "vit-unstructured").build(images)
    before = deepcopy(model.state_dict())
    with pytest.raises(starfish.UserError, match=complaint):
        starfish.heal_(model, dense, spoil(masks), images, QUICK)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_tied_weights_do_not_count_as_moved(images: Tensor) -> None:
    """A weight under two names is masked under one; the other name moves with it and that is no breach."""
    dense = tiny_vit()
    dense.blocks[1].mlp.fc1.weight = dense.blocks[0].mlp.fc1.weight
    masks = {"blocks.0.mlp.fc1.weight": dense.blocks[0].mlp.fc1.weight.detach().abs() > 0.01}
    model = deepcopy(dense)
    assert starfish.heal_(model, dense, masks, images, QUICK).frozen_intact


def test_closing_the_generator_restores_flags(images: Tensor) -> None:
    """Whoever stops between two rows gets a model whose parameters can be trained as before."""
    model, dense, masks, _ = CASES[0].build(images)
    work = healing_(job_of(model, dense, masks, images), QUICK, as_images(images))
    while "loss" not in next(work):
        pass
    work.close()
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_default_method_suits_the_masks(images: Tensor) -> None:
    """The closed form first where units went on purpose, and where nobody has made anything of the survivors yet."""

    def chosen(masks: str, change: float = 1.0) -> list[str]:
        model, dense, found, _ = Case("starfish", masks).build(images)
        with torch.no_grad():
            model.get_parameter(next(iter(found))).mul_(change)
        return default_methods(job_of(model, dense, found, images))

    assert chosen("vit-neurons+qk") == chosen("cnn-channels") == ["corp", "starfish"]
    assert chosen("vit-neurons+qk", change=1.01) == ["starfish"]
    assert chosen("vit-unstructured") == ["starfish"]


def test_unit_that_died_by_chance_makes_no_mask_structured(images: Tensor) -> None:
    """One neuron of many is gone whole in an unstructured mask."""
    model, dense, masks, _ = Case("starfish", "vit-unstructured").build(images)
    masks["blocks.0.mlp.fc1.weight"][3] = False
    masks["blocks.0.mlp.fc2.weight"][:, 3] = False
    job = job_of(model, dense, masks, images)
    assert foldable(job)
    assert default_methods(job) == ["starfish"]


def test_method_that_starts_from_the_dense_weights_comes_first(images: Tensor) -> None:
    """What starfish did would be lost on corp."""
    model, dense, masks, _ = Case("starfish", "vit-neurons").build(images)
    with pytest.raises(starfish.UserError, match="`corp` starts from the dense weights"):
        starfish.heal_(model, dense, masks, images, [QUICK, starfish.Corp()])


def test_chain_reports_every_stage(images: Tensor, labels: Tensor) -> None:
    """Each method starts from what the one before it left; the last stage is the result."""
    model, dense, masks, _ = Case("starfish", "vit-neurons+qk").build(images)
    result = starfish.heal_(model, dense, masks, [(images, labels)], [starfish.Corp(), QUICK], seed=1)
    assert result.method == "corp,starfish"
    assert [stage["method"] for stage in result.stages] == ["corp", "starfish"]
    assert result.stages[-1]["accuracy"] == result.accuracy["healed"]
    assert result.settings.keys() == {"corp", "starfish"}
    alone = Case("corp", "vit-neurons+qk").build(images)
    corp = starfish.heal_(alone[0], alone[1], alone[2], [(images, labels)], starfish.Corp(), seed=1)
    assert result.stages[0]["kl"] == corp.fidelity["kl"]["healed"]
    assert result.fidelity["kl"]["healed"] < corp.fidelity["kl"]["healed"]
    assert {row["method"] for row in result.rows} == {"corp", "starfish"}


def test_smaller_model_whose_layers_do_not_fit_is_refused(images: Tensor) -> None:
    """One error that says so, and not what torch says in the depth of a layer."""
    model, dense, _, _ = Case("starfish", "vit-neurons").build(images)
    layer = model.get_submodule("blocks.0.mlp.fc2")
    layer.weight = nn.Parameter(layer.get_parameter("weight")[:, :50].detach())
    with pytest.raises(starfish.UserError, match="the smaller model does not run"):
        starfish.heal_(model, dense, starfish.remaining(model, dense), images, QUICK)


@pytest.mark.parametrize("rows_seen", [1, 3, 6])
def test_chain_that_was_stopped_goes_on_in_its_stage(rows_seen: int, images: Tensor, tmp_path: Path) -> None:
    """Stopped in the closed form or in the loop after it, resumed, it ends in the bits of one that never stopped."""

    def run(folder: str) -> tuple[Job, Run]:
        model, dense, masks, _ = Case("starfish", "vit-neurons+qk").build(images)
        opened = Run.open(tmp_path / folder, {"starfish": {}}, resume=True)
        cache = Cache(tmp_path / folder / "state")
        return job_of(model, dense, masks, images, seed=3, cache=cache), opened

    chain = [starfish.Corp(), QUICK]
    job, folder = run("whole")
    whole = finish(healing_(job, chain, job.images, folder))
    expected = job.model.state_dict()
    job, folder = run("stopped")
    work = healing_(job, chain, job.images, folder)
    while rows_seen:
        rows_seen -= "stage" not in next(work)
    work.close()
    job, folder = run("stopped")
    result = finish(healing_(job, chain, job.images, folder))
    assert result.rows == whole.rows
    assert [stage["kl"] for stage in result.stages] == [stage["kl"] for stage in whole.stages]
    assert all(torch.equal(expected[name], tensor) for name, tensor in job.model.state_dict().items())
    assert not any((tmp_path / "stopped" / "state").iterdir())
