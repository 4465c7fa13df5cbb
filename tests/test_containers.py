"""Every container gives the same masks, every malformed file is refused by name."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.ao.pruning import WeightNormSparsifier
from torch.nn.utils import prune

from starfish import containers as C
from starfish import masks as M
from starfish.core import Masks
from starfish.errors import UserError


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2)
        self.head = nn.Linear(8, 3)


def vit() -> nn.Module:
    return timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=3, num_classes=5
    )


def conv() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3, groups=8), nn.Flatten(), nn.Linear(8, 4)
    )


SCOPES: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...]]] = {
    "vit": (vit, ("blocks.0.attn.qkv.weight", "blocks.0.mlp.fc1.weight", "blocks.1.mlp.fc2.weight")),
    "attention": (Attention, ("attention.in_proj_weight", "attention.out_proj.weight")),
    "conv": (conv, ("0.weight", "2.weight", "4.weight")),
}


@dataclasses.dataclass
class Case:
    dense: nn.Module
    masks: Masks

    def pruned(self) -> nn.Module:
        model = copy.deepcopy(self.dense)
        M.apply_(model, self.masks)
        return model


@pytest.fixture(params=SCOPES)
def case(request: pytest.FixtureRequest) -> Case:
    torch.manual_seed(0)
    build, names = SCOPES[request.param]
    dense = build()
    return Case(dense, {name: torch.rand_like(dense.get_parameter(name)) > 0.4 for name in names})


def plain(case: Case) -> Any:
    return dict(case.pruned().state_dict())


def torch_prune(case: Case) -> Any:
    model = copy.deepcopy(case.dense)
    for name, mask in case.masks.items():
        module, _, leaf = name.rpartition(".")
        prune.custom_from_mask(model.get_submodule(module), leaf, mask)
    return model.state_dict()


def modelopt(case: Case) -> Any:
    return beside(case, lambda module, leaf: f"{module}._{leaf}_mask")


def suffixed(case: Case) -> Any:
    return beside(case, lambda module, leaf: f"{module}.{leaf}_mask")


def beside(case: Case, named: Callable[[str, str], str]) -> Any:
    state = dict(case.dense.state_dict())
    for name, mask in case.masks.items():
        module, _, leaf = name.rpartition(".")
        state[named(module, leaf)] = mask
    return state


def nni(case: Case) -> Any:
    nested: dict[str, dict[str, Tensor]] = {}
    for name, mask in case.masks.items():
        module, _, leaf = name.rpartition(".")
        nested.setdefault(module, {})[leaf] = mask.float()
        nested[module]["bias"] = torch.ones(len(mask))
    return nested


def parametrized(case: Case) -> Any:
    state = dict(case.dense.state_dict())
    for name, mask in case.masks.items():
        module, _, leaf = name.rpartition(".")
        state[f"{module}.parametrizations.{leaf}.original"] = state.pop(name)
        state[f"{module}.parametrizations.{leaf}.0.mask"] = mask.float()
    return state


def compiled(case: Case) -> Any:
    """As DataParallel of a compiled model saves it, in a checkpoint with the optimiser beside."""
    state = {f"module._orig_mod.{name}": value for name, value in torch_prune(case).items()}
    return {"epoch": 3, "optimizer": {"state": {}, "param_groups": []}, "state_dict": state}


CONTAINERS: dict[str, tuple[str, Callable[[Case], Any]]] = {
    "bool": ("mask dict", lambda case: case.masks),
    "uint8": ("mask dict", lambda case: {name: mask.byte() for name, mask in case.masks.items()}),
    "int64": ("mask dict", lambda case: {name: mask.long() for name, mask in case.masks.items()}),
    "float": ("mask dict", lambda case: {name: mask.float() for name, mask in case.masks.items()}),
    "half": ("mask dict", lambda case: {name: mask.half() for name, mask in case.masks.items()}),
    "sparseml": (
        "mask dict",
        lambda case: {f"{name}.sparsity_mask": mask.float() for name, mask in case.masks.items()},
    ),
    "buffers only": ("mask dict", lambda case: {f"{name}_mask": mask for name, mask in case.masks.items()}),
    "wrapped": ("mask dict", lambda case: {"masks": case.masks, "sparsity": 0.5}),
    "prefixed": ("mask dict", lambda case: {f"model.module.{name}": mask for name, mask in case.masks.items()}),
    "with weights": ("mask dict", lambda case: {"masks": case.masks, "state_dict": dict(case.dense.state_dict())}),
    "torch prune": ("torch.nn.utils.prune", torch_prune),
    "compiled": ("torch.nn.utils.prune", compiled),
    "modelopt": ("mask buffers", modelopt),
    "suffixed": ("mask buffers", suffixed),
    "nni": ("nested masks", nni),
    "parametrized": ("torch.ao.pruning", parametrized),
    "plain zeros": ("plain zeros", plain),
    "nested plain zeros": ("plain zeros", lambda case: {"model": {"params": plain(case)}, "epoch": 1}),
    "prefixed plain zeros": (
        "plain zeros",
        lambda case: {f"module.{name}": value for name, value in plain(case).items()},
    ),
}
NO_WEIGHTS = {"mask dict", "nested masks"}


def save(path: Path, value: Any) -> Path:
    torch.save(value, path)
    return path


@pytest.mark.parametrize("kind", CONTAINERS)
def test_every_container_gives_the_same_masks(case: Case, kind: str, tmp_path: Path) -> None:
    """Masks, their order, the container's name, and weights that are the masked dense ones, exactly."""
    container, make = CONTAINERS[kind]
    file = C.read(save(tmp_path / "file.pt", make(case)), case.dense)
    assert file.container == container
    assert list(file.masks) == list(case.masks)
    assert M.digest(file.masks) == M.digest(case.masks)
    assert all(mask.dtype == torch.bool for mask in file.masks.values())
    if container in NO_WEIGHTS and kind != "with weights":
        assert file.weights is None
    else:
        expected = case.pruned().state_dict()
        assert file.weights is not None
        assert file.weights.keys() == expected.keys()
        assert all(torch.equal(file.weights[name], expected[name]) for name in expected)


@pytest.mark.filterwarnings("ignore:Validating sparse tensor")
def test_masks_in_torchs_sparse_layout_are_read(case: Case, tmp_path: Path) -> None:
    """A layout is not a pattern."""
    sparse = {name: mask.float().to_sparse() for name, mask in case.masks.items()}
    assert M.digest(C.read(save(tmp_path / "file.pt", sparse), case.dense).masks) == M.digest(case.masks)


@pytest.mark.parametrize("kind", ["bool", "uint8", "float", "torch prune", "suffixed", "modelopt", "prefixed"])
def test_masks_are_the_same_without_the_dense_model(case: Case, kind: str, tmp_path: Path) -> None:
    """`inspect FILE` alone can read all but plain zeros."""
    file = C.read(save(tmp_path / "file.pt", CONTAINERS[kind][1](case)), None)
    assert M.digest(file.masks) == M.digest(case.masks)


@pytest.mark.parametrize("kind", ["bool", "uint8", "float", "torch prune", "suffixed", "modelopt", "plain zeros"])
def test_safetensors_is_read_as_pt_is(case: Case, kind: str, tmp_path: Path) -> None:
    """The container is told by its entries, not by the file's type."""
    container, make = CONTAINERS[kind]
    save_file({name: value.clone() for name, value in make(case).items()}, tmp_path / "file.safetensors")
    file = C.read(tmp_path / "file.safetensors", case.dense)
    assert (file.container, M.digest(file.masks)) == (container, M.digest(case.masks))


def test_own_container_round_trips(case: Case, tmp_path: Path) -> None:
    """What is written is read again, marked as our own."""
    M.write(tmp_path / "masks.safetensors", case.masks)
    file = C.read(tmp_path / "masks.safetensors", case.dense)
    assert (file.container, file.weights, file.notes) == ("starfish", None, [])
    assert M.digest(file.masks) == M.digest(case.masks)


def test_a_later_version_of_our_own_container_is_refused(case: Case, tmp_path: Path) -> None:
    """Half understanding a file is worse than refusing it."""
    save_file(case.masks, tmp_path / "masks.safetensors", {"starfish-masks": "2"})
    assert "version 2" in refusal(tmp_path / "masks.safetensors", case.dense).message


def test_a_pickled_module_is_read_when_allowed(tmp_path: Path) -> None:
    """Without --allow-pickle refused with that hint; with it, read through its state dict."""
    dense = conv()
    model = copy.deepcopy(dense)
    prune.l1_unstructured(model[0], "weight", 0.5)
    path = save(tmp_path / "model.pt", model)
    assert "--allow-pickle" in refusal(path, dense).hint
    file = C.read(path, dense, allow_pickle=True)
    assert file.container == "torch.nn.utils.prune"
    assert torch.equal(file.masks["0.weight"], model[0].weight_mask.bool())


def test_the_masks_of_a_sparsifier_are_read(tmp_path: Path) -> None:
    """Its model's state dict alone is refused and explained; the sparsifier's own state holds the masks."""
    dense = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    model = copy.deepcopy(dense)
    sparsifier = WeightNormSparsifier(sparsity_level=0.5)
    sparsifier.prepare(model, [{"tensor_fqn": "0.weight"}])
    sparsifier.step()
    error = refusal(save(tmp_path / "model.pt", model.state_dict()), dense)
    assert "0.parametrizations.weight.original" in error.message
    assert "squash_mask" in error.hint
    state = save(tmp_path / "sparsifier.pt", sparsifier.state_dict())
    mask = C.read(state, dense, allow_pickle=True).masks["0.weight"]
    sparsifier.squash_mask()
    squashed = C.read(save(tmp_path / "squashed.pt", model.state_dict()), dense)
    assert squashed.container == "plain zeros"
    assert torch.equal(squashed.masks["0.weight"], mask)
    assert int(mask.sum()) == 32


def test_fasterai_filters_are_spread_over_their_weights(tmp_path: Path) -> None:
    """Its `_mask` may be (o, 1, 1, 1), and the copies it keeps of the first weights are not the model's."""
    dense = conv()
    mask = (torch.arange(8) % 2 == 0).float().view(8, 1, 1, 1)
    state = dict(dense.state_dict()) | {
        "0._mask": mask,
        "0._init_weights": dense[0].weight,
        "4._init_biases": torch.ones(4),
    }
    file = C.read(save(tmp_path / "file.pt", state), dense)
    assert (file.container, file.masks["0.weight"].shape) == ("mask buffers", (8, 3, 3, 3))
    assert file.masks["0.weight"].flatten(1).all(1).tolist() == [True, False] * 4
    assert file.weights is not None
    assert file.weights.keys() == dense.state_dict().keys()


def test_a_mask_that_the_model_itself_has_is_no_pruning(tmp_path: Path) -> None:
    """A masked convolution's own buffer stays a weight; the zeros are found beside it."""
    dense = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    dense[0].register_buffer("mask", torch.tril(torch.ones(4, 4)))
    pruned = {name: value.clone() for name, value in dense.state_dict().items()}
    pruned["1.weight"][0] = 0
    file = C.read(save(tmp_path / "file.pt", pruned), dense)
    assert (file.container, list(file.masks)) == ("plain zeros", ["1.weight"])


def test_zeros_of_the_dense_model_are_kept(tmp_path: Path) -> None:
    """Plain zeros: pruned is what is zero in the file and not in the dense model; biases and norms never are."""
    dense = conv()
    with torch.no_grad():
        dense[4].weight[0] = 0
    pruned = {name: value.clone() for name, value in dense.state_dict().items()}
    pruned["4.weight"][1] = 0
    pruned["4.bias"][2] = 0
    pruned["1.weight"][3] = 0
    file = C.read(save(tmp_path / "file.pt", pruned), dense)
    assert list(file.masks) == ["4.weight"]
    assert file.masks["4.weight"].all(1).tolist() == [True, False, True, True]


def test_plain_zeros_are_known_by_covering_the_model(tmp_path: Path) -> None:
    """A network without biases and norms has nothing but matrices, as a mask file has."""
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    pruned = {name: value.clone() for name, value in dense.state_dict().items()}
    pruned["1.weight"][:, 2] = 0
    file = C.read(save(tmp_path / "file.pt", pruned), dense)
    assert (file.container, M.sparsity(file.masks)) == ("plain zeros", 1 / 8)


def test_zeros_in_attention_biases_are_no_pruning(tmp_path: Path) -> None:
    """`bias_k` has three dimensions and is no weight."""
    torch.manual_seed(0)
    dense = nn.MultiheadAttention(8, 2, add_bias_kv=True)
    pruned = {name: value.clone() for name, value in dense.state_dict().items()}
    pruned["bias_k"][0, 0, :4] = 0
    pruned["in_proj_weight"][:2] = 0
    assert set(C.read(save(tmp_path / "file.pt", pruned), dense).masks) == {"in_proj_weight"}


def test_masks_come_in_the_models_order_and_tied_ones_are_kept(tmp_path: Path) -> None:
    """A file's order is chance; a parameter with two names may be masked under either."""
    dense = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    dense[2].weight = dense[0].weight
    masks = {"2.weight": torch.eye(4), "1.weight": torch.eye(4)}
    assert list(C.read(save(tmp_path / "file.pt", masks), dense).masks) == ["1.weight", "2.weight"]


def test_weights_masked_in_full_stay_in_the_scope(tmp_path: Path) -> None:
    """A mask of ones is dropped for a bias only: sparsity counts every weight of the scope."""
    masks = {"0.weight": torch.ones(8, 3, 3, 3), "4.weight": torch.eye(4, 8), "4.bias": torch.ones(4)}
    assert set(C.read(save(tmp_path / "file.pt", masks), conv()).masks) == {"0.weight", "4.weight"}


def refusal(path: Path, dense: nn.Module | None, **options: bool) -> UserError:
    with pytest.raises(UserError) as caught:
        C.read(path, dense, **options)
    assert caught.value.hint
    return caught.value


def ones() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {"0.weight": torch.rand(8, 3, 3, 3) > 0.5, "4.weight": torch.rand(4, 8) > 0.5}


def with_value(value: float) -> dict[str, Tensor]:
    masks = {name: mask.float() for name, mask in ones().items()}
    masks["4.weight"][1, 2] = value
    return masks


def state(**changes: Tensor) -> dict[str, Tensor]:
    """A pruned state dict of conv() with some entries changed; underscores for dots, which names cannot hold."""
    torch.manual_seed(0)
    found = {name: value.clone() for name, value in conv().state_dict().items()}
    found["4.weight"][0] = 0
    return found | {name.replace("_", ".").removeprefix("."): value for name, value in changes.items()}


def lacking(name: str) -> dict[str, Tensor]:
    return {key: value for key, value in state().items() if key != name}


MALFORMED: dict[str, tuple[Any, list[str]]] = {
    "unknown name": (lambda: ones() | {"4.wieght": torch.zeros(4, 8)}, ["`4.wieght`", "`4.weight`"]),
    "unknown module": (lambda: {"far.away": torch.zeros(2)}, ["`far.away`", "nothing in the model"]),
    "wrong shape": (lambda: {"4.weight": torch.zeros(8, 4)}, ["`4.weight`", "(8, 4)", "(4, 8)"]),
    "a row too few": (lambda: {"4.weight": torch.zeros(3, 8).byte()}, ["`4.weight`", "(3, 8)", "(4, 8)"]),
    "one half": (lambda: with_value(0.5), ["mask of `4.weight` holds 0.5;"]),
    "negative": (lambda: with_value(-1), ["mask of `4.weight` holds -1;"]),
    "nan": (lambda: with_value(float("nan")), ["mask of `4.weight` holds nan;"]),
    "integers": (lambda: {"4.weight": torch.full((4, 8), 255, dtype=torch.uint8)}, ["`4.weight`", "255"]),
    "empty": (dict, ["no masks", "right file"]),
    "no tensors": (lambda: {"epoch": 3}, ["no masks", "dict"]),
    "a list": (lambda: [torch.zeros(3)], ["no masks", "list"]),
    "no zeros": (lambda: {"4.weight": torch.ones(4, 8)}, ["nothing is pruned"]),
    "idle biases only": (lambda: {"4.bias": torch.ones(4)}, ["nothing is pruned"]),
    "the dense weights": (lambda: state(_4_weight=torch.ones(4, 8)), ["nothing is pruned"]),
    "weights alone": (lambda: {"4.weight": torch.full((4, 8), 0.25)}, ["`4.weight`", "0.25", "neither"]),
    "twice": (lambda: ones() | {"module.4.weight": torch.zeros(4, 8)}, ["`4.weight`", "twice"]),
    "missing weight": (lambda: lacking("1.running_var"), ["lacks `1.running_var`"]),
    "unexpected weight": (lambda: state(_9_bias=torch.rand(4)), ["`9.bias`", "unknown to the model"]),
    "larger in one": (lambda: state(_4_weight=torch.rand(5, 6)), ["`4.weight`", "(5, 6)", "(4, 8)", "architecture"]),
    "larger model": (lambda: state(_4_bias=torch.rand(9)), ["`4.bias`", "(9,)", "(4,)", "architecture"]),
    "nan weight": (lambda: state(_4_bias=torch.full((4,), float("nan"))), ["nan", "`4.bias`"]),
    "odd key": (lambda: {"net": state()}, ["`net`", "`state_dict`"]),
}


@pytest.mark.parametrize("kind", MALFORMED)
def test_malformed_files_are_refused_by_name(kind: str, tmp_path: Path) -> None:
    """The error names the tensor, what is wrong with it and the way out."""
    make, words = MALFORMED[kind]
    torch.manual_seed(0)
    dense = conv()
    error = refusal(save(tmp_path / "file.pt", make()), dense)
    missing = [word for word in words if word not in f"{error.message} {error.hint}"]
    assert not missing, (missing, error.message, error.hint)


def test_smaller_model_is_healed_in_its_shape(tmp_path: Path) -> None:
    """Its masks keep all of the weights that became smaller, and its weights are as they are in the file."""
    weights = state(_4_weight=torch.rand(4, 6))
    found = C.read(save(tmp_path / "file.pt", weights), conv())
    assert found.container == "smaller model"
    assert found.masks.keys() == {"4.weight"}
    assert found.masks["4.weight"].shape == (4, 6)
    assert bool(found.masks["4.weight"].all())
    assert found.weights is not None
    assert torch.equal(found.weights["4.weight"], weights["4.weight"])
    assert "healed in the shape it has" in found.notes[-1]


@pytest.mark.parametrize("name", ["masks.safetensors", "masks.pt"])
def test_truncated_files_are_refused(name: str, tmp_path: Path) -> None:
    """A half file is named, not half read."""
    path = tmp_path / name
    M.write(path, ones()) if name.endswith("safetensors") else save(path, ones())
    path.write_bytes(path.read_bytes()[:-40])
    assert name in refusal(path, conv()).message


def test_plain_zeros_need_the_dense_model(tmp_path: Path) -> None:
    """Without a reference a trained zero looks like a pruned one."""
    error = refusal(save(tmp_path / "file.pt", state()), None)
    assert "plain state dict" in error.message
    assert "--model" in error.hint


def test_a_stored_weight_must_have_its_masks_shape(tmp_path: Path) -> None:
    """Also without a dense model to compare with."""
    pair = {"weight_orig": torch.rand(4, 4), "weight_mask": torch.zeros(4, 3)}
    assert all(
        word in refusal(save(tmp_path / "file.pt", pair), None).message for word in ("`weight`", "(4, 3)", "(4, 4)")
    )


def test_shared_prefixes_only_are_stripped_without_a_model(tmp_path: Path) -> None:
    """One name without the prefix and none loses it."""
    both = {"model.a.weight": torch.zeros(2, 2), "head.weight": torch.zeros(2, 2)}
    assert set(C.read(save(tmp_path / "file.pt", both), None).masks) == set(both)


def test_a_child_called_model_keeps_its_name(tmp_path: Path) -> None:
    """Prefixes are stripped only where the dense model needs it."""
    dense = nn.ModuleDict({"model": nn.Linear(2, 2)})
    masks = {"module.model.weight": torch.eye(2)}
    assert set(C.read(save(tmp_path / "file.pt", masks), dense).masks) == {"model.weight"}


def test_notes_tell_what_is_odd(tmp_path: Path) -> None:
    """Accidental zeros, whole tensors, values under the mask, zeros above it, changed frozen tensors, several keys."""
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4), nn.Linear(4, 4))
    pruned = {name: value.clone() for name, value in dense.state_dict().items()}
    pruned["0.weight"][3, 3] = 0
    pruned["1.weight"][:] = 0
    pruned["2.bias"] += 1
    notes = C.read(save(tmp_path / "a.pt", {"state_dict": pruned, "model_ema": pruned}), dense).notes
    assert [note.split("`")[1] for note in notes] == ["state_dict", "1.weight", "0.weight", "2.bias"]
    assert all(word in note for word, note in zip(("several", "every", "accident", "1 tensors"), notes, strict=True))

    masks = {"0.weight": torch.ones(16, 16), "0.bias": torch.ones(16), "2.bias": torch.tensor([0, 1, 1, 1])}
    masks["0.weight"][0] = 0
    weights = {name: value.clone() for name, value in dense.state_dict().items()}
    weights["0.weight"][:2] = 0
    file = C.read(save(tmp_path / "b.pt", {"masks": masks, "state_dict": weights}), dense)
    assert set(file.masks) == {"0.weight", "2.bias"}
    assert "`0.bias`" in file.notes[0]
    assert "left out" in file.notes[0]
    assert file.notes[1].startswith("the file stores 1 values")
    assert file.notes[2].startswith("16 weights are zero")
    assert len(file.notes) == 3
    assert file.weights is not None
    assert file.weights["2.bias"][0] == 0


def test_half_precision_is_no_change_of_frozen_tensors(tmp_path: Path) -> None:
    """Rounding to the file's precision is not reported as a difference."""
    torch.manual_seed(0)
    dense = conv()
    pruned = {name: value.half() if value.is_floating_point() else value for name, value in dense.state_dict().items()}
    pruned["4.weight"][0] = 0
    assert C.read(save(tmp_path / "file.pt", pruned), dense).notes == []


def test_the_weights_in_a_checkpoint_are_found() -> None:
    """Beside masks, under a key, within a module or bare; named as the model names them."""
    model = conv()
    bare = dict(model.state_dict())
    prefixed = {f"module.{name}": value for name, value in bare.items()}
    held = [bare, prefixed, {"model": prefixed, "epoch": 1}, {"model": model}, {"masks": ones(), "state_dict": bare}]
    for found in (C.weights_of(value, model) for value in held):
        assert found.keys() == bare.keys()
        assert all(torch.equal(found[name], bare[name]) for name in bare)


def test_old_state_dicts_without_batch_counts_are_read(tmp_path: Path) -> None:
    """`num_batches_tracked` came late to BatchNorm, and torch fills it in."""
    dense = conv()
    weights = {name: value for name, value in dense.state_dict().items() if not name.endswith("num_batches_tracked")}
    assert len(weights) < len(dense.state_dict())
    weights["4.weight"] = weights["4.weight"].clone()
    weights["4.weight"][0] = 0
    found = C.read(save(tmp_path / "file.pt", weights), dense)
    assert list(found.masks) == ["4.weight"]
    assert found.weights is not None
    dense.load_state_dict(found.weights)
    assert not dense[4].weight[0].any()
