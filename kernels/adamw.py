"""AdamW on flat tensors in host memory: one pass over memory, the clip coefficient fused."""

from __future__ import annotations

import torch
from torch import Tensor

# Elements handled at a time. The fp32 copy of a gradient chunk (1 MiB) stays in the cache, and calls of PyTorch's
# kernel are long enough (about 0.3 ms) to hide their launch.
CHUNK = 1 << 18


def adamw_step(
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
    stream_copy: Tensor | None = None,
) -> None:
    """One AdamW step in place, as ``torch.optim.AdamW`` computes it for the gradient ``coefficient * grad``.

    All tensors are flat, contiguous, of one length, on the CPU. ``master``, ``m`` and ``v`` are fp32; ``grad`` is fp32
    or bf16 and is left as it is; ``step`` counts from 1. ``stream_copy``, where given, receives the new weights
    in its own dtype. Uses the calling thread's PyTorch thread count and releases the GIL inside each chunk.
    """
    n = master.numel()
    for name, tensor in (("master", master), ("m", m), ("v", v)):
        if tensor.dtype is not torch.float32:
            raise ValueError(f"{name} must be fp32, is {tensor.dtype}")
    for name, other in (("grad", grad), ("m", m), ("v", v), ("stream_copy", stream_copy)):
        if other is not None and other.numel() != n:
            raise ValueError(f"{name} has {other.numel()} elements, master has {n}")
    if step < 1:
        raise ValueError(f"step counts from 1, is {step}")
    plain = grad.dtype is torch.float32 and coefficient == 1.0
    scratch = torch.empty(0 if plain else min(n, CHUNK), dtype=torch.float32)
    state_step = torch.tensor(float(step))
    for start in range(0, n, CHUNK):
        part = slice(start, min(start + CHUNK, n))
        if plain:
            scaled = grad[part]
        else:
            scaled = scratch[: part.stop - start]
            if grad.dtype is torch.float32:
                torch.mul(grad[part], coefficient, out=scaled)
            else:
                scaled.copy_(grad[part])
                if coefficient != 1.0:
                    scaled.mul_(coefficient)
        torch._fused_adamw_(
            [master[part]],
            [scaled],
            [m[part]],
            [v[part]],
            [],
            [state_step],
            lr=lr,
            beta1=beta1,
            beta2=beta2,
            weight_decay=weight_decay,
            eps=eps,
            amsgrad=False,
            maximize=False,
        )
        if stream_copy is not None:
            stream_copy[part].copy_(master[part])
