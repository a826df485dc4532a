"""Square norms of flat gradients and the clip coefficient."""

from __future__ import annotations

import math

import torch
from torch import Tensor

CHUNK = 1 << 18  # elements; the fp32 copy of a chunk (1 MiB) stays in the cache


def square_norm(grad: Tensor) -> float:
    """Sum of squares of a flat CPU tensor: chunks in fp32, their sum in float64.

    inf or nan where the gradient has them. bf16 is widened chunk by chunk first: nothing is rounded before it is
    squared.
    """
    n = grad.numel()
    widen = grad.dtype is not torch.float32
    scratch = torch.empty(min(n, CHUNK) if widen else 0, dtype=torch.float32)
    total = 0.0
    for start in range(0, n, CHUNK):
        chunk = grad[start : min(start + CHUNK, n)]
        if widen:
            chunk = scratch[: chunk.numel()].copy_(chunk)
        total += torch.dot(chunk, chunk).item()
    return total


def clip_coefficient(norm: float, max_norm: float | None) -> float:
    """PyTorch's ``clip_grad_norm_``: min(1, max_norm / (norm + 1e-6)); 1 without a limit. ``norm`` must be finite."""
    if not math.isfinite(norm):
        raise ValueError(f"gradient norm is {norm}")
    return 1.0 if max_norm is None else min(1.0, max_norm / (norm + 1e-6))
