"""What the loop of align.py can minimise: pure functions (student, teacher) → scalar, always in float32.

B images, P positions (tokens or pixels), C channels, K classes. Block outputs arrive as x_BPC.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

Granularity = str  # "token" (= "channel-position" in a convolutional network) or "sample"
NORM_FLOOR = 1e-12  # below this a vector counts as zero


def cosine_loss(student_BPC: Tensor, dense_BPC: Tensor, granularity: Granularity) -> Tensor:
    """1 − cosine: over channels at every position, or over the whole vectorised output of an image (eq. 1)."""
    if granularity == "sample":
        student_BPC, dense_BPC = student_BPC.flatten(1), dense_BPC.flatten(1)
    return 1 - cosine(student_BPC, dense_BPC).mean()


def cosine(a: Tensor, b: Tensor) -> Tensor:
    """Cosine over the last dimension; 0, with no gradient, where either vector is zero."""
    a, b = a.float(), b.float()
    return (a * b).sum(-1) * _inverse_norm(a) * _inverse_norm(b)


def _inverse_norm(x: Tensor) -> Tensor:
    square = (x * x).sum(-1)
    there = square > NORM_FLOOR**2
    return torch.where(there, square, 1.0).rsqrt() * there


def mse_loss(student_BPC: Tensor, dense_BPC: Tensor, granularity: Granularity = "token") -> Tensor:
    """Mean squared difference of block outputs, which is the same in every granularity."""
    return F.mse_loss(student_BPC.float(), dense_BPC.float())


def relative_mse_loss(student_BPC: Tensor, dense_BPC: Tensor, granularity: Granularity = "sample") -> Tensor:
    """Squared difference over squared size of the dense output, for each position or image."""
    student, dense = student_BPC.float(), dense_BPC.float()
    if granularity == "sample":
        student, dense = student.flatten(1), dense.flatten(1)
    return ((student - dense).square().sum(-1) / dense.square().sum(-1).clamp_min(NORM_FLOOR)).mean()


BLOCK_LOSSES = {"cosine": cosine_loss, "mse": mse_loss, "relative_mse": relative_mse_loss}


def kl_loss(student_BK: Tensor, dense_BK: Tensor, temperature: float = 1.0) -> Tensor:
    """KL(dense ‖ student) of the class probabilities, averaged over images, times temperature²."""
    student, dense = (F.log_softmax(x.float() / temperature, dim=-1) for x in (student_BK, dense_BK))
    return F.kl_div(student, dense, reduction="batchmean", log_target=True) * temperature**2


def ce_loss(student_BK: Tensor, labels_B: Tensor) -> Tensor:
    """Cross-entropy with the labels."""
    return F.cross_entropy(student_BK.float(), labels_B)
