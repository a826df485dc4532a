"""Plain PyTorch versions of the kernels, for tests: slow, obvious, one formula a line."""

from __future__ import annotations

import torch
from torch import Tensor


def adamw_reference(
    master: Tensor,
    grad: Tensor,
    m: Tensor,
    v: Tensor,
    *,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    coefficient: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """New (master, m, v) in float64 arithmetic; the inputs are left as they are."""
    g = grad.double() * coefficient
    m_new = beta1 * m.double() + (1 - beta1) * g
    v_new = beta2 * v.double() + (1 - beta2) * g * g
    m_hat = m_new / (1 - beta1**step)
    v_hat = v_new / (1 - beta2**step)
    weights = master.double() * (1 - lr * weight_decay)
    return weights - lr * m_hat / (v_hat.sqrt() + eps), m_new, v_new


def square_norm_reference(grad: Tensor) -> float:
    return float(grad.double().pow(2).sum())


def clip_reference(grads: list[Tensor], max_norm: float) -> tuple[float, float]:
    """(norm, coefficient) as ``torch.nn.utils.clip_grad_norm_`` defines them."""
    norm = float(torch.stack([g.double().norm() for g in grads]).norm())
    return norm, min(1.0, max_norm / (norm + 1e-6))
