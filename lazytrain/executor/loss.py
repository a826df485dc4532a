"""Head and loss of one micro-batch, forward and backward, a chunk of tokens at a time.

Per logit of a chunk: the logits in compute dtype and, in bf16, their fp32 copy are alive at once (4 bytes in fp32, 6 in
bf16). The probabilities overwrite the logits, and the weight gradient is added in place by the matrix product itself.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lazytrain.executor.data import IGNORE


def head_loss(
    hidden: Tensor,
    labels: Tensor,
    norm: Callable[[Tensor], Tensor],
    weight: Tensor,
    weight_gradient: Tensor,
    valid_tokens: int,
    chunk_tokens: int,
) -> tuple[Tensor, Tensor]:
    """Cross entropy of the labelled tokens, summed and divided by ``valid_tokens`` (of the whole step).

    ``hidden`` [b, S, d] enters the final norm; ``labels`` int64 [b, S] on the CPU, IGNORE where there is no loss. Adds
    the gradient of ``weight`` [V, d] into ``weight_gradient``, and those of the norm's parameters into their ``.grad``.
    Tokens without a label are never projected. Returns the loss (fp32 scalar) and the gradient of ``hidden``.
    """
    d = hidden.shape[-1]
    rows, flat_labels = hidden.reshape(-1, d), labels.reshape(-1)
    device = hidden.device
    picked = (flat_labels != IGNORE).nonzero().flatten()
    every = picked.numel() == flat_labels.numel()
    gradient = torch.empty_like(rows) if every else torch.zeros_like(rows)
    total = torch.zeros((), dtype=torch.float32, device=device)
    for start in range(0, picked.numel(), chunk_tokens):
        chosen = picked[start : start + chunk_tokens]
        targets = flat_labels[chosen].to(device)
        index = None if every else chosen.to(device)
        x = rows[start : start + chunk_tokens] if index is None else rows.index_select(0, index)
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            y = norm(x)
        summed, d_y = _chunk(y.detach(), targets, weight, weight_gradient, 1.0 / valid_tokens)
        total += summed / valid_tokens
        y.backward(d_y)
        assert x.grad is not None
        if index is None:
            gradient[start : start + chunk_tokens] = x.grad
        else:
            gradient.index_copy_(0, index, x.grad)
    return total, gradient.view_as(hidden)


def _chunk(y: Tensor, targets: Tensor, weight: Tensor, weight_gradient: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Summed cross entropy of [n, d] normed hidden states, and the gradient of ``y`` times ``scale``."""
    logits = y @ weight.t()
    wide = logits if logits.dtype is torch.float32 else logits.float()
    torch.log_softmax(wide, dim=-1, out=wide)
    column = targets[:, None]
    summed = -wide.gather(1, column).sum()
    wide.exp_()
    wide.scatter_add_(1, column, wide.new_full((), -1.0).expand(column.shape))
    d_logits = wide.mul_(scale) if wide is logits else logits.copy_(wide.mul_(scale))
    weight_gradient.addmm_(d_logits.t(), y)
    return summed, d_logits @ weight
