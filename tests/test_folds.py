"""The closed forms, against least squares and linear systems worked out in another way."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from cases import IMAGES, tiny_vit
from starfish.anatomy import find
from starfish.core import Anatomy, Part, Row, Unit
from starfish.data import Preprocess, StoredImages
from starfish.methods import folds
from starfish.methods.folds import ColumnFold, PerImage, Pooled, QueryKeyFold, rank_bound, solved, symmetrized
from starfish.statistics import Moments, QueryKeys, Statistic, gathering

NOTHING = Anatomy((), {}, {}, (), (), {})
HIDDEN = Unit("neuron", "", 10, 1, (Part("fc1.weight", 0), Part("fc1.bias", 0), Part("fc2.weight", 1)))
DEAD = torch.tensor([0, 1, 0, 0, 1, 1, 0, 0, 1, 0], dtype=torch.bool)
SHIFTS = {"fc2.weight": ("fc2.bias", 1)}
TOKENS = torch.randn(8, 15, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
PIXELS = IMAGES.double()
RIDGES = (0.0, 1e-6, 1e-4, 1e-2, 1.0, 100.0)


class Mlp(nn.Module):
    """Of ten neurons; as a whole linear where there is no activation."""

    def __init__(self, *, active: bool = True, bias: bool = True) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(6, 10), nn.Linear(10, 4, bias=bias)
        self.active = active

    def hidden(self, x: Tensor) -> Tensor:
        return nn.functional.gelu(self.fc1(x)) if self.active else self.fc1(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.hidden(x))


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def filled(model: nn.Module, statistic: Statistic, images: Tensor) -> None:
    list(gathering(model, NOTHING, StoredImages(images, Preprocess()), [statistic], None, "statistics"))


def folded(
    dense: Mlp, fold: str = "affine", *, shrinkage: bool = False, tokens: Tensor = TOKENS
) -> tuple[Mlp, Row]:  # fmt: skip
    """The model without its dead neurons, and the row."""
    one = ColumnFold(
        dense, HIDDEN, DEAD, Moments(HIDDEN), fold, shrinkage, SHIFTS if dense.fc2.bias is not None else {}
    )
    filled(dense, one.statistic, tokens)
    row, model = one.solve(), deepcopy(dense)
    one.write_(model)
    return model, row


def hidden(dense: Mlp, tokens: Tensor = TOKENS) -> tuple[np.ndarray, np.ndarray]:
    """x_NS and x_NP."""
    x = dense.hidden(tokens).flatten(0, 1).numpy()
    return x[:, ~DEAD], x[:, DEAD]


def new_columns(dense: Mlp, ridge: float, second: bool = False) -> np.ndarray:
    """W_S + W_P B with B of the given ridge, by a direct inverse."""
    x_S, x_P = hidden(dense)
    if not second:
        x_S, x_P = x_S - x_S.mean(0), x_P - x_P.mean(0)
    B = x_P.T @ x_S / len(x_S) @ np.linalg.inv(x_S.T @ x_S / len(x_S) + ridge * np.eye(x_S.shape[1]))
    W = dense.fc2.weight.numpy()
    return W[:, ~DEAD] + W[:, DEAD] @ B


def test_without_ridge_it_is_the_direct_least_squares_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the dense output on the survivors and a constant; the columns of the dead are zero, and fc1 is left alone."""
    monkeypatch.setattr(folds, "SCALED", 0.0)
    dense = Mlp().double()
    model, row = folded(dense)
    x_S, _ = hidden(dense)
    y = dense(TOKENS).flatten(0, 1).numpy()
    found, *_ = np.linalg.lstsq(np.c_[x_S, np.ones(len(x_S))], y, rcond=None)
    assert np.allclose(model.fc2.weight[:, ~DEAD], found[:-1].T, atol=1e-9)
    assert np.allclose(model.fc2.bias, found[-1], atol=1e-9)
    assert not model.fc2.weight[:, DEAD].any()
    assert torch.equal(model.fc1.weight, dense.fc1.weight)
    assert torch.equal(model.fc1.bias, dense.fc1.bias)
    assert 0 < row["folded"] < row["plain"]  # type: ignore[operator]


def test_errors_are_ordered_and_grow_with_the_ridge(monkeypatch: pytest.MonkeyPatch) -> None:
    """Output error: affine ≤ bias alone ≤ nothing, for every ridge; larger for larger ridges; and as the rows say."""
    dense = Mlp().double()
    dense_out = dense(TOKENS)
    whole = (dense_out - dense.fc2.bias).square().mean()

    def error(fold: str, **settings: bool) -> float:
        model, row = folded(dense, fold, **settings)
        found = float((model(TOKENS) - dense_out).square().mean() / whole)
        assert row["folded"] == pytest.approx(found, rel=1e-8, abs=1e-14)
        assert row["plain"] == pytest.approx(plain, rel=1e-8)
        return found

    masked = deepcopy(dense)
    masked.fc2.weight[:, DEAD] = 0
    plain = float((masked(TOKENS) - dense_out).square().mean() / whole)
    bias = error("bias")
    affine = []
    for ridge in RIDGES:
        monkeypatch.setattr(folds, "SCALED", ridge)
        affine.append(error("affine"))
    assert error("none") == pytest.approx(plain, rel=1e-12)
    assert affine == sorted(affine)
    assert affine[0] < 0.9 * bias
    assert affine[-1] < bias < plain
    assert affine[0] < error("affine", shrinkage=True) < bias


@pytest.mark.parametrize("ridge", [*RIDGES, None])
def test_the_mean_output_is_that_of_the_dense_layer(ridge: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The residual has mean zero for every ridge, that of the shrinkage formula (None) included."""
    if ridge is not None:
        monkeypatch.setattr(folds, "SCALED", ridge)
    dense = Mlp().double()
    model, _ = folded(dense, shrinkage=ridge is None)
    assert (model(TOKENS) - dense(TOKENS)).mean((0, 1)).abs().max() < 1e-12
    assert (model(TOKENS) - dense(TOKENS)).abs().max() > 1e-3


def test_affine_functions_of_survivors_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Duplicates, mixtures and constants: the outputs are those of the dense layer, on other inputs too."""
    dense = Mlp(active=False).double()
    mixture = torch.randn(int(DEAD.sum()), int((~DEAD).sum()), dtype=torch.float64)
    mixture[0], mixture[1] = torch.eye(6)[2], 0  # a duplicate, and a constant
    dense.fc1.weight[~DEAD] = torch.linalg.qr(torch.randn(6, 6, dtype=torch.float64)).Q
    dense.fc1.weight[DEAD] = mixture @ dense.fc1.weight[~DEAD]
    tokens = torch.randn(4, 9, 6, dtype=torch.float64)
    model, row = folded(dense)
    assert (model(tokens) - dense(tokens)).abs().max() < 1e-2  # a ten-thousandth of ridge
    assert float(row["folded"]) < 1e-5
    monkeypatch.setattr(folds, "SCALED", 1e-9)
    model, _ = folded(dense)
    assert (model(tokens) - dense(tokens)).abs().max() < 1e-5


def test_the_scaled_ridge_is_a_share_of_the_mean_variance() -> None:
    dense = Mlp().double()
    x_S, _ = hidden(dense)
    model, _ = folded(dense)
    assert np.allclose(model.fc2.weight[:, ~DEAD], new_columns(dense, 1e-6 * x_S.var(0).mean()), atol=1e-12)
    twice = deepcopy(dense)
    twice.fc2.weight *= 2
    assert torch.allclose(folded(twice)[0].fc2.weight, 2 * model.fc2.weight, atol=1e-12)


def shrinkage_by_hand(x_S: np.ndarray) -> float:
    """Oracle-approximating shrinkage, entry by entry, and the floor."""
    n, p = x_S.shape
    C = np.cov(x_S.T, bias=True)
    trace = sum(C[i, i] for i in range(p))
    square = sum(C[i, j] * C[j, i] for i in range(p) for j in range(p))
    rho = ((1 - 2 / p) * square + trace**2) / ((n + 1 - 2 / p) * (square - trace**2 / p))
    return max(1e-3, min(1.0, rho) * trace / p)


@pytest.mark.parametrize(("size", "tokens"), [(1.0, 120), (0.05, 120), (3.0, 6)])
def test_the_shrinkage_ridge_is_that_of_the_formula(size: float, tokens: int) -> None:
    """Above its floor, at the floor of a thousandth, and with hardly any tokens."""
    dense = Mlp().double()
    dense.fc1.weight *= size
    seen = TOKENS.flatten(0, 1)[:tokens].view(3, -1, 6)
    x_S, x_P = hidden(dense, seen)
    ridge = shrinkage_by_hand(x_S)
    assert (ridge == 1e-3) == (size == 0.05)
    centred_S, centred_P = x_S - x_S.mean(0), x_P - x_P.mean(0)
    B = centred_P.T @ centred_S @ np.linalg.inv(centred_S.T @ centred_S + len(x_S) * ridge * np.eye(6))
    W = dense.fc2.weight.numpy()
    model, _ = folded(dense, shrinkage=True, tokens=seen)
    assert np.allclose(model.fc2.weight[:, ~DEAD], W[:, ~DEAD] + W[:, DEAD] @ B, atol=1e-10)


def test_survivors_of_no_direction_shrink_all_the_way() -> None:
    """Where no direction differs from another, the ridge is the variance itself: half of the fit is left."""
    dense = Mlp(active=False).double()
    dense.fc1.weight[~DEAD], dense.fc1.bias[~DEAD] = torch.eye(6, dtype=torch.float64), 0
    white = torch.linalg.qr(torch.randn(24, 6, dtype=torch.float64) - 0.5).Q
    white = torch.cat([white, -white]).view(4, 12, 6) * 48**0.5 / 2**0.5
    model, _ = folded(dense, shrinkage=True, tokens=white)
    expected = dense.fc2.weight[:, ~DEAD] + dense.fc2.weight[:, DEAD] @ dense.fc1.weight[DEAD] / 2
    assert torch.allclose(model.fc2.weight[:, ~DEAD], expected, atol=1e-9)


def test_without_a_place_for_a_constant_means_are_fitted_too() -> None:
    """A layer without bias: the moment is not centred, and the error is still no larger than without the fold."""
    dense = Mlp(bias=False).double()
    model, row = folded(dense)
    ridge = 1e-6 * (hidden(dense)[0] ** 2).mean()
    assert np.allclose(model.fc2.weight[:, ~DEAD], new_columns(dense, ridge, second=True), atol=1e-12)
    found = (model(TOKENS) - dense(TOKENS)).square().mean() / dense(TOKENS).square().mean()
    assert row["folded"] == pytest.approx(float(found), rel=1e-8)
    assert row["folded"] < row["plain"]  # type: ignore[operator]
    only_means, row = folded(dense, "bias")
    assert row["folded"] == row["plain"]
    assert torch.equal(only_means.fc2.weight[:, ~DEAD], dense.fc2.weight[:, ~DEAD])


def test_silent_survivors_give_nothing_and_break_nothing() -> None:
    """Survivors that are always zero, or all the same: finite weights, and what they cannot tell goes into the bias."""
    dense = Mlp(active=False).double()
    dense.fc1.weight[~DEAD], dense.fc1.bias[~DEAD] = 0, 0
    model, row = folded(dense)
    assert torch.equal(model.fc2.weight[:, ~DEAD], dense.fc2.weight[:, ~DEAD])
    assert torch.allclose(model.fc2.bias, dense(TOKENS).mean((0, 1)))
    assert row["folded"] < row["plain"]  # type: ignore[operator]


def test_what_is_singular_is_solved_by_least_squares() -> None:
    """Where Cholesky fails the answer is the shortest of the best ones."""
    A = torch.diag(torch.tensor([4.0, 0.0, 1.0], dtype=torch.float64))
    right = torch.tensor([[8.0], [3.0], [5.0]], dtype=torch.float64)
    assert torch.allclose(solved(A, right, 0.0), torch.tensor([[2.0], [0.0], [5.0]], dtype=torch.float64))
    assert torch.allclose(solved(A, right, 1.0), torch.tensor([[1.6], [3.0], [2.5]], dtype=torch.float64))


# ---- queries and keys -----------------------------------------------------------------------------------------------


KEPT = ((0, 2, 3, 6), (1, 2, 3), (0, 1, 4, 5, 7))


def attention(**settings: bool) -> tuple[QueryKeyFold, nn.Module]:
    """A fold of the three heads of the second block, filled; and the dense model."""
    dense = deepcopy(tiny_dense())
    unit = [unit for unit in find(dense, PIXELS).units if unit.kind == "qk"][1]
    dead = torch.ones(3, 8, dtype=torch.bool)
    for head, kept in enumerate(KEPT):
        dead[head, list(kept)] = False
    given = {"per_image": True, "center": True, "fitted": True, "symmetrize": False, "reduced": False} | settings
    statistic = QueryKeys(unit, kept=KEPT, per_image=given.pop("per_image"), center=given.pop("center"))
    filled(dense, statistic, PIXELS)
    return QueryKeyFold(dense, unit, dead.flatten(), statistic, **given), dense


def queries_keys(model: nn.Module, center: bool) -> tuple[Tensor, Tensor]:
    """x_BHND of the second block, from what its attention reads in the dense model."""
    seen: list[Tensor] = []
    with tiny_dense().blocks[1].attn.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0])):
        tiny_dense()(PIXELS)
    qkv = model.blocks[1].attn.qkv
    q, k, _ = (seen[0] @ qkv.weight.T + qkv.bias).view(12, 17, 3, 3, 8).permute(2, 0, 3, 1, 4)
    return q, k - k.mean(2, keepdim=True) if center else k


@cache
def tiny_dense() -> nn.Module:
    """With biases, which new models have not."""
    model = tiny_vit().double()
    for block in model.blocks:
        block.attn.qkv.bias.copy_(torch.randn(72, generator=torch.Generator().manual_seed(3)))
    return model


def maps_of(model: nn.Module, dense: nn.Module, head: int) -> tuple[np.ndarray, np.ndarray]:
    """U and V of a head, from the weights: rows of the new are mixtures of the surviving rows of the old."""
    found = []
    for start in (8 * head, 24 + 8 * head):
        rows = [torch.cat([net.blocks[1].attn.qkv.weight, net.blocks[1].attn.qkv.bias[:, None]], 1)[start : start + 8]
                for net in (model, dense)]  # fmt: skip
        new, old = (one[list(KEPT[head])].numpy() for one in rows)
        mixture, residual, *_ = np.linalg.lstsq(old.T, new.T, rcond=None)
        assert (residual < 1e-20).all()
        found.append(mixture)
    return found[0], found[1]


def parts_of(head: int, center: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """q_S, q_P, k_S, k_P of one head, image by image."""
    q, k = (x[:, head].numpy() for x in queries_keys(tiny_dense(), center))
    rest = [place for place in range(8) if place not in KEPT[head]]
    return q[..., list(KEPT[head])], q[..., rest], k[..., list(KEPT[head])], k[..., rest]


def written(fold: QueryKeyFold, dense: nn.Module) -> tuple[nn.Module, Row]:
    row, model = fold.solve(), deepcopy(dense)
    fold.write_(model)
    return model, row


@pytest.mark.parametrize("center", [True, False])
def test_per_image_fit_is_least_squares_over_pairs_of_one_image(center: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every pair of tokens of one image is one equation for the entries of M; U Vᵀ is I + M."""
    monkeypatch.setattr(folds, "SCALED", 1e-13)
    model, _ = written(*attention(center=center))
    for head, kept in enumerate(KEPT):
        q_S, q_P, k_S, k_P = parts_of(head, center)
        terms = np.einsum("bni,bmj->bnmij", q_S, k_S).reshape(-1, len(kept) ** 2)
        found, *_ = np.linalg.lstsq(terms, (q_P @ k_P.transpose(0, 2, 1)).ravel(), rcond=None)
        U, V = maps_of(model, tiny_dense(), head)
        assert np.allclose(U @ V.T, np.eye(len(kept)) + found.reshape(len(kept), -1), atol=1e-7)
        assert np.allclose(U.T @ U, V.T @ V, atol=1e-9)  # singular values shared out evenly


def test_centred_keys_fit_centred_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys less their mean give the fit of logits that are each less the mean of their row, which softmax ignores."""
    monkeypatch.setattr(folds, "SCALED", 1e-13)
    model, row = written(*attention(center=True))
    left = whole = 0.0
    for head, kept in enumerate(KEPT):
        q_S, q_P, k_S, k_P = parts_of(head, center=False)
        terms = np.einsum("bni,bmj->bnmij", q_S, k_S)
        wanted = q_P @ k_P.transpose(0, 2, 1)
        terms, wanted = terms - terms.mean(2, keepdims=True), wanted - wanted.mean(2, keepdims=True)
        found, left_here, *_ = np.linalg.lstsq(terms.reshape(-1, len(kept) ** 2), wanted.ravel(), rcond=None)
        U, V = maps_of(model, tiny_dense(), head)
        assert np.allclose(U @ V.T, np.eye(len(kept)) + found.reshape(len(kept), -1), atol=1e-7)
        left += float(left_here[0])
        logits = np.concatenate([q_S, q_P], -1) @ np.concatenate([k_S, k_P], -1).transpose(0, 2, 1)
        whole += float(np.square(logits - logits.mean(2, keepdims=True)).sum())
    assert row["folded"] == pytest.approx(left / whole, rel=1e-8)


@pytest.mark.parametrize("per_image", [True, False])
@pytest.mark.parametrize("center", [True, False])
def test_rows_tell_the_errors_of_the_logits(per_image: bool, center: bool) -> None:
    """Plain, folded, pooled and the bound of the rank, from the logits themselves; each in its order."""
    model, row = written(*attention(per_image=per_image, center=center))
    q, k = queries_keys(tiny_dense(), center)
    new_q, new_k = queries_keys(model, center)
    masked_q, masked_k = torch.zeros_like(q), torch.zeros_like(k)
    for head, kept in enumerate(KEPT):
        masked_q[:, head, :, list(kept)], masked_k[:, head, :, list(kept)] = (
            x[:, head][..., list(kept)] for x in (q, k)
        )

    def errors(q_new: Tensor, k_new: Tensor, pooled: bool) -> float:
        (a, b), (c, d) = ((x.transpose(0, 1).flatten(1, 2) if pooled else x for x in pair)
                          for pair in ((q, k), (q_new, k_new)))  # fmt: skip
        wanted = a @ b.transpose(-1, -2)
        return float((wanted - c @ d.transpose(-1, -2)).square().sum() / wanted.square().sum())

    assert row["plain"] == pytest.approx(errors(masked_q, masked_k, not per_image), rel=1e-8)
    assert row["folded"] == pytest.approx(errors(new_q, new_k, not per_image), rel=1e-8)
    assert row["pooled"] == pytest.approx(errors(new_q, new_k, True), rel=1e-8)
    assert row["folded"] < row["plain"]  # type: ignore[operator]
    logits = (q.transpose(0, 1).flatten(1, 2) @ k.transpose(0, 1).flatten(1, 2).transpose(1, 2)).numpy()
    rest = sum(np.square(np.linalg.svd(logits[head], compute_uv=False)[len(kept):]).sum()
               for head, kept in enumerate(KEPT))  # fmt: skip
    assert row["bound"] == pytest.approx(rest / np.square(logits).sum(), rel=1e-6)
    assert row["bound"] < row["pooled"]  # type: ignore[operator]


def test_pooled_fit_is_better_on_all_pairs_and_per_image_on_those_that_meet() -> None:
    """Each is the best at what it fits."""
    q, k = queries_keys(tiny_dense(), center=True)
    wanted, rows, errors = q @ k.transpose(-1, -2), {}, {}
    for per_image in (True, False):
        model, rows[per_image] = written(*attention(per_image=per_image))
        new_q, new_k = queries_keys(model, center=True)
        errors[per_image] = float((wanted - new_q @ new_k.transpose(-1, -2)).square().sum())
    assert errors[True] < errors[False]
    assert rows[False]["pooled"] < rows[True]["pooled"]  # type: ignore[operator]
    assert rows[False]["pooled"] == rows[False]["folded"]


def random_system(size: int, pruned: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(size)
    q, k = (generator.standard_normal((6, 20, size + pruned)) @ generator.standard_normal((size + pruned,) * 2)
            for _ in range(2))  # fmt: skip
    return q, k


@pytest.mark.parametrize("size", [1, 3, 5])
def test_eigendecompositions_solve_the_kronecker_system(size: int) -> None:
    """(G_K ⊗ G_Q + λ) vec M = vec C_Q C_K, of pooled pairs, at the ridge of the mean eigenvalues."""
    q, k = (x.reshape(-1, size + 2) for x in random_system(size, 2))
    G_Q, G_K = q[:, :size].T @ q[:, :size], k[:, :size].T @ k[:, :size]
    right = q[:, :size].T @ q[:, size:] @ k[:, size:].T @ k[:, :size]
    plain = np.square(q[:, size:] @ k[:, size:].T).sum()
    system = Pooled(*(torch.from_numpy(x) for x in (G_Q, G_K, right)), torch.tensor(plain))
    ridge = 1e-6 * np.trace(G_Q) / size * np.trace(G_K) / size
    vec = np.linalg.solve(np.kron(G_K, G_Q) + ridge * np.eye(size**2), right.ravel(order="F"))
    M = system.solve()
    assert np.allclose(M, vec.reshape(size, size, order="F"), rtol=1e-9, atol=1e-12)
    error = np.square(q[:, size:] @ k[:, size:].T - q[:, :size] @ M.numpy() @ k[:, :size].T).sum()
    assert float(system.error(M)) == pytest.approx(error, rel=1e-9)
    assert error < plain


@pytest.mark.parametrize("size", [1, 3, 5])
def test_per_image_solve_is_the_sum_of_kronecker_systems(size: int) -> None:
    """Σ over images of K_SᵀK_S ⊗ Q_SᵀQ_S, entry by entry, and its error."""
    q, k = random_system(size, 2)
    q_S, k_S = q[..., :size], k[..., :size]
    normal = np.einsum("bnj,bnl,bmi,bmk->jlik", k_S, k_S, q_S, q_S).reshape(size**2, size**2)
    wanted = q[..., size:] @ k[..., size:].transpose(0, 2, 1)
    right = np.einsum("bni,bnm,bmj->ij", q_S, wanted, k_S)
    system = PerImage(torch.from_numpy(normal), torch.from_numpy(right), torch.tensor(np.square(wanted).sum()))
    kron = sum(np.kron(k_b.T @ k_b, q_b.T @ q_b) for q_b, k_b in zip(q_S, k_S, strict=True))
    ridge = 1e-6 * np.trace(kron) / size**2
    vec = np.linalg.solve(kron + ridge * np.eye(size**2), right.ravel(order="F"))
    M = system.solve()
    assert np.allclose(M, vec.reshape(size, size, order="F"), rtol=1e-9, atol=1e-12)
    error = np.square(wanted - q_S @ M.numpy() @ k_S.transpose(0, 2, 1)).sum()
    assert float(system.error(M)) == pytest.approx(error, rel=1e-9)


@pytest.mark.parametrize("rank", [0, 2, 5])
def test_no_map_of_this_rank_is_better_than_the_bound(rank: int) -> None:
    """The singular values of the logits beyond the rank; tokens by the hundred are never multiplied out."""
    q, k = (torch.from_numpy(x).flatten(0, 1) for x in random_system(3, 2))
    values = torch.linalg.svdvals(q @ k.T)[rank:]
    assert float(rank_bound(q.T @ q, k.T @ k, rank)) == pytest.approx(
        float(values[: 5 - rank].square().sum()), abs=1e-6
    )


def test_symmetrised_maps_are_symmetric_and_as_released() -> None:
    """I + M becomes its symmetric part, with singular values of a millionth at least; the fit gets worse by it."""
    model, row = written(*attention(symmetrize=True))
    free, free_row = written(*attention())
    for head in range(3):
        U, V = maps_of(model, tiny_dense(), head)
        other_U, other_V = maps_of(free, tiny_dense(), head)
        product = other_U @ other_V.T
        assert np.allclose(U @ V.T, (product + product.T) / 2, atol=1e-8)
        assert not np.allclose(product, product.T, atol=1e-3)
    assert row["folded"] > free_row["folded"]  # type: ignore[operator]
    flat = symmetrized(torch.tensor([[0.0, 1.0], [-1.0, -1.0]], dtype=torch.float64))  # I + M has a zero, symmetrised
    assert torch.allclose(flat, torch.diag(torch.tensor([0.0, -1 + 1e-6], dtype=torch.float64)), rtol=0, atol=1e-12)


def test_reduced_scale_lengthens_logits() -> None:
    """By √(width / new width), head by head, as if the softmax divided by the root of the new width."""
    (plain, _), (longer, _) = written(*attention()), written(*attention(reduced=True))
    one, other = (torch.matmul(q, k.transpose(-1, -2)) for q, k in
                  (queries_keys(net, center=False) for net in (plain, longer)))  # fmt: skip
    for head, kept in enumerate(KEPT):
        assert torch.allclose(other[:, head], (8 / len(kept)) ** 0.5 * one[:, head], atol=1e-9)


@pytest.mark.parametrize("fitted", [True, False])
def test_only_rows_of_queries_and_keys_change(fitted: bool) -> None:
    """Values stay bit for bit; the dead have no weight and no bias; without a fit survivors stay bit for bit."""
    model, row = written(*attention(fitted=fitted))
    dense = tiny_dense()
    new, old = model.blocks[1].attn.qkv, dense.blocks[1].attn.qkv
    for name in ("weight", "bias"):
        one, other = getattr(new, name), getattr(old, name)
        assert torch.equal(one[48:], other[48:])
        for side in (0, 24):
            for head, kept in enumerate(KEPT):
                rows = torch.arange(8 * head, 8 * head + 8) + side
                alive = torch.zeros(8, dtype=torch.bool)
                alive[list(kept)] = True
                assert not one[rows[~alive]].any()
                assert torch.equal(one[rows[alive]], other[rows[alive]]) != fitted
    changed = {key for key, tensor in model.state_dict().items() if not torch.equal(tensor, dense.state_dict()[key])}
    assert changed == {"blocks.1.attn.qkv.weight", "blocks.1.attn.qkv.bias"}
    assert (row["folded"] == row["plain"]) != fitted


@pytest.mark.parametrize("per_image", [True, False])
@pytest.mark.parametrize("reduced", [True, False])
def test_heads_that_lose_all_or_nothing(per_image: bool, reduced: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A head that keeps every dimension stays as it is, one that loses all has none left; the third is fitted."""
    monkeypatch.setitem(globals(), "KEPT", (tuple(range(8)), (), (0, 1)))
    model, row = written(*attention(per_image=per_image, reduced=reduced))
    new, old = model.blocks[1].attn.qkv.weight, tiny_dense().blocks[1].attn.qkv.weight
    assert torch.equal(new[:8], old[:8])
    assert torch.equal(new[24:32], old[24:32])
    assert not new[8:16].any()
    assert not torch.equal(new[16:18], old[16:18])
    assert row["folded"] < row["plain"]  # type: ignore[operator]


def test_statistics_are_let_go() -> None:
    """A fold that is done holds no sums: those of all blocks do not fit in memory at once."""
    fold, _ = attention()
    fold.solve()
    fold.forget()
    assert not fold.statistic.sums
    assert not fold._found
