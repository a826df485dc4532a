"""Kernels that a trace cannot run, declared: what flash-linear-attention and causal-conv1d keep, allocate and compute.

Stand-ins for the two kernels that transformers calls in a gated-delta-net layer on a GPU. Each allocates and saves the
tensors its original does, so the rest of the layer is traced around it as it is. Read from public source:

``chunk_gated_delta_rule`` (fla/ops/gated_delta_rule/chunk.py, chunk_fwd.py; chunks of 64 positions; k heads HK of width
K, value heads HV of width V; e = bytes of the compute dtype). It normalises q and k, sums the log decay within chunks,
solves the triangular system A, and builds w = A(beta k), u = A(beta v), chunk states h, new values and the output.
It saves, per token: q and k (normalised) 2 HK K e, their inverse norms 2 HK 4, v HV V e, decay HV 4, beta HV e,
A HV 64 e. w, u, h and the new values are computed again in backward; no initial or final state is kept in training.
Products per token and value head: 64 (K [k k^T] + 64/3 [solve] + K [w] + V [u] + K [q k^T] + V [scores v]) and
3 K V [w h, k^T v, q h] multiply-adds. Its arguments are made contiguous first (slices of the convolution's output).

``causal_conv1d_fn`` (causal_conv1d_interface.py; depthwise, with SiLU inside): saves its input and the weight only, and
computes the activation again in backward, where the torch fallback keeps the convolution's output, too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lazytrain.models.tracking import declare, extent_bytes

CHUNK = 64


def _kernel(reads: tuple[Tensor, ...], writes: tuple[Tensor, ...]) -> None:
    declare(memory_bytes=float(sum(map(extent_bytes, reads + writes))))


class _GatedDeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        q, k, v, g, beta = (x.contiguous() for x in (q, k, v, g, beta))
        raw_q, raw_k = q, k
        q, k = torch.empty_like(q), torch.empty_like(k)
        q_norm, k_norm = (x.new_empty(x.shape[:-1], dtype=torch.float32) for x in (q, k))
        _kernel((raw_q,), (q, q_norm))
        _kernel((raw_k,), (k, k_norm))
        decay = g.new_empty(g.shape, dtype=torch.float32)
        _kernel((g,), (decay,))
        batch, tokens, heads, width = v.shape
        system = k.new_empty(batch, tokens, heads, CHUNK)
        _kernel((k, decay, beta), (system,))
        states = _states(k, v, decay, beta, system)  # all alive until the end, as in the original
        h, v_new = states[2:]
        out = torch.empty_like(v)
        _kernel((q, k, v_new, h, decay), (out,))
        K, V = k.shape[-1], width
        multiply_adds = CHUNK * (3 * K + 2 * V + CHUNK / 3) + 3 * K * V
        declare(attention_flops=2.0 * batch * tokens * heads * multiply_adds, kernels=0)
        ctx.save_for_backward(q, q_norm, k, k_norm, v, decay, beta, system)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, _, k, _, v, decay, beta, system = ctx.saved_tensors
        states = _states(k, v, decay, beta, system)
        h = states[2]
        dv = torch.empty_like(v)  # within chunks
        dh = torch.empty_like(h)
        dv = torch.empty_like(dv)  # across chunks
        dq, dk, dw = (k.new_empty(*v.shape[:3], k.shape[-1]) for _ in range(3))
        dg = torch.empty_like(decay)
        dk2, dv2, db, dg2 = torch.empty_like(dk), torch.empty_like(v), torch.empty_like(decay), torch.empty_like(decay)
        del states, h, dw, dk2, dg2, dv, dh
        dq, dk = torch.empty_like(q), torch.empty_like(k)  # summed over the value heads of a key head
        dq, dk = torch.empty_like(q), torch.empty_like(k)  # through the normalisation
        return dq, dk, dv2, dg, db.to(beta.dtype)


def _states(k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, system: Tensor) -> tuple[Tensor, ...]:
    """w, u, chunk states h and new values: made in forward, and again in backward."""
    batch, tokens, heads, width = v.shape
    w = k.new_empty(batch, tokens, heads, k.shape[-1])
    u = torch.empty_like(v)
    _kernel((k, v, beta, decay, system), (w, u))
    h = k.new_empty(batch, -(-tokens // CHUNK), heads, k.shape[-1], width)
    v_new = torch.empty_like(u)
    _kernel((k, w, u, decay), (h, v_new))
    return w, u, h, v_new


def chunk_gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **_: Any
) -> tuple[Tensor, None]:
    """Query and key [batch, seq_len, HK, K], value [batch, seq_len, HV, V], g and beta [batch, seq_len, HV]."""
    return _GatedDeltaRule.apply(query, key, value, g, beta), None


class _CausalConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        out = torch.empty_like(x)
        _kernel((x, weight), (out,))
        ctx.save_for_backward(x, weight)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight, dtype=torch.float32).to(weight.dtype)


def causal_conv1d_fn(hidden_states: Tensor, weight: Tensor, *_: Any, **__: Any) -> Tensor:
    """Hidden states [batch, channels, seq_len], weight [channels, width]."""
    out: Tensor = _CausalConv.apply(hidden_states, weight)
    return out
