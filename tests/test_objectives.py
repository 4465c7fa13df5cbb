"""The losses: values, invariances, gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from starfish.methods.objectives import ce_loss, cosine, cosine_loss, kl_loss, mse_loss, relative_mse_loss


@pytest.fixture
def pair() -> tuple[Tensor, Tensor]:
    return torch.randn(4, 6, 8), torch.randn(4, 6, 8)


@pytest.mark.parametrize("granularity", ["token", "sample"])
def test_cosine_against_torch(pair: tuple[Tensor, Tensor], granularity: str) -> None:
    """Equal to torch's own cosine over the last dimension, or over the flattened image."""
    a, b = pair
    flat = (a, b) if granularity == "token" else (a.flatten(1), b.flatten(1))
    expected = 1 - torch.nn.functional.cosine_similarity(*flat, dim=-1).mean()
    assert torch.allclose(cosine_loss(a, b, granularity), expected, atol=1e-6)


def test_token_and_sample_differ(pair: tuple[Tensor, Tensor]) -> None:
    """Tokens of large norm weigh more in the vectorised loss."""
    a, b = pair
    a = a * torch.linspace(0.1, 5, 6)[:, None]
    assert abs(float(cosine_loss(a, b, "token") - cosine_loss(a, b, "sample"))) > 1e-3


@pytest.mark.parametrize("granularity", ["token", "sample"])
@pytest.mark.parametrize("scale", [1e-3, 0.5, 7.0, 1e4])
def test_cosine_ignores_scale_and_stays_in_range(pair: tuple[Tensor, Tensor], granularity: str, scale: float) -> None:
    """Positive rescaling of the student changes nothing; MSE sees it."""
    a, b = pair
    loss = cosine_loss(a, b, granularity)
    assert 0 <= float(loss) <= 2
    assert torch.allclose(cosine_loss(scale * a, b, granularity), loss, atol=1e-5)
    assert not torch.allclose(mse_loss(scale * a, b), mse_loss(a, b))


def test_zero_vector_gives_loss_one_and_no_gradient() -> None:
    """A dead token costs 1 and pulls at nothing, and never makes nan."""
    a, b = torch.zeros(1, 2, 3, requires_grad=True), torch.ones(1, 2, 3)
    loss = cosine_loss(a, b, "token")
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss.item() == 1
    assert torch.equal(a.grad, torch.zeros(1, 2, 3))


def test_small_errors_cost_their_orthogonal_part(pair: tuple[Tensor, Tensor]) -> None:
    """1 − cos ≈ ‖δ⊥‖²/(2‖r‖²) (methods.md 12.6)."""
    _, r = pair
    delta = 1e-2 * torch.randn_like(r)
    orthogonal = delta - (delta * r).sum(-1, keepdim=True) / r.square().sum(-1, keepdim=True) * r
    expected = (orthogonal.square().sum(-1) / (2 * r.square().sum(-1))).mean()
    assert torch.allclose(cosine_loss((r + delta).double(), r.double(), "token"), expected, rtol=2e-2)


def test_loss_is_float32_whatever_comes_in(pair: tuple[Tensor, Tensor]) -> None:
    """bf16 activations and fp16 targets give a float32 loss."""
    a, b = pair
    for loss in (cosine_loss(a.bfloat16(), b.half(), "token"), mse_loss(a.bfloat16(), b.half()),
                 relative_mse_loss(a.bfloat16(), b.half()), kl_loss(a[:, 0].bfloat16(), b[:, 0].half())):  # fmt: skip
        assert loss.dtype == torch.float32


def test_kl_against_the_definition_and_its_invariance() -> None:
    """Σ p log(p/q) averaged over images; a constant added to the logits changes nothing."""
    student, dense = torch.randn(5, 7), torch.randn(5, 7)
    p, q = dense.softmax(-1), student.softmax(-1)
    expected = (p * (p / q).log()).sum(-1).mean()
    assert torch.allclose(kl_loss(student, dense), expected, atol=1e-6)
    assert torch.allclose(kl_loss(student + 3, dense - 5), expected, atol=1e-5)
    assert float(kl_loss(dense, dense)) == pytest.approx(0, abs=1e-7)


def test_kl_temperature() -> None:
    """Softened by τ and multiplied by τ²."""
    student, dense = torch.randn(5, 7), torch.randn(5, 7)
    assert torch.allclose(kl_loss(student, dense, 2.0), 4 * kl_loss(student / 2, dense / 2), atol=1e-6)


@pytest.mark.parametrize("loss", [mse_loss, relative_mse_loss, lambda a, b: cosine_loss(a, b, "sample")])
def test_gradients_equal_finite_differences(loss) -> None:  # type: ignore[no-untyped-def]
    """Checked in float64 through a float32 loss, so to three digits."""
    a, b = torch.randn(2, 3, 4, requires_grad=True), torch.randn(2, 3, 4)
    (gradient,) = torch.autograd.grad(loss(a, b), a)
    direction = torch.randn_like(a)
    step = 1e-2
    slope = (loss(a + step * direction, b) - loss(a - step * direction, b)) / (2 * step)
    assert torch.allclose((gradient * direction).sum(), slope, rtol=1e-2, atol=1e-3)


def test_relative_mse_ignores_a_common_scale(pair: tuple[Tensor, Tensor]) -> None:
    a, b = pair
    assert torch.allclose(relative_mse_loss(10 * a, 10 * b), relative_mse_loss(a, b), rtol=1e-5)


def test_ce_against_the_definition() -> None:
    logits, labels = torch.randn(5, 7), torch.tensor([0, 3, 6, 1, 1])
    expected = -logits.log_softmax(-1)[torch.arange(5), labels].mean()
    assert torch.allclose(ce_loss(logits, labels), expected)


def test_cosine_of_parallel_and_opposite() -> None:
    x = torch.randn(3, 4)
    assert torch.allclose(cosine(x, 2 * x), torch.ones(3))
    assert torch.allclose(cosine(x, -x), -torch.ones(3))
