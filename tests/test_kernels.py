"""Host kernels against plain PyTorch and float64 references."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lazytrain.kernels import adamw, adamw_step, clip_coefficient, norms, square_norm
from lazytrain.kernels.reference import adamw_reference, clip_reference, square_norm_reference

SETTINGS = {"lr": 3e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1}


def _state(n: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    master, grad, m = (torch.randn(n, generator=generator) for _ in range(3))
    return master, (grad * 0.1).to(dtype), m * 0.01, torch.rand(n, generator=generator) * 1e-3


def test_equals_torch_adamw_to_the_bit_over_steps() -> None:
    master, *_ = _state(5000)
    m, v = torch.zeros(5000), torch.zeros(5000)
    theirs = master.clone().requires_grad_()
    optimizer = torch.optim.AdamW([theirs], lr=3e-3, weight_decay=0.1, fused=True)
    for step in range(1, 6):
        grad = _state(5000, seed=step)[1]
        theirs.grad = grad.clone()
        optimizer.step()
        adamw_step(master, grad, m, v, step=step, coefficient=1.0, **SETTINGS)
    assert torch.equal(master, theirs.detach())


def test_equals_clip_grad_norm_and_the_unfused_optimizer() -> None:
    shapes = [(40, 30), (30,), (700,)]
    masters = [torch.randn(s, generator=torch.Generator().manual_seed(i)) for i, s in enumerate(shapes)]
    theirs = [p.clone().requires_grad_() for p in masters]
    optimizer = torch.optim.AdamW(theirs, lr=3e-3, weight_decay=0.1, foreach=False, fused=False)
    moments = [(torch.zeros(p.numel()), torch.zeros(p.numel())) for p in masters]
    for step in range(1, 5):
        grads = [torch.randn(s, generator=torch.Generator().manual_seed(100 * step + i)) for i, s in enumerate(shapes)]
        for p, g in zip(theirs, grads, strict=True):
            p.grad = g.clone()
        norm = float(torch.nn.utils.clip_grad_norm_(theirs, 1.0))
        optimizer.step()
        mine = math.sqrt(sum(square_norm(g.flatten()) for g in grads))
        assert mine == pytest.approx(norm, rel=1e-6)
        for p, g, (m, v) in zip(masters, grads, moments, strict=True):
            coefficient = clip_coefficient(mine, 1.0)
            adamw_step(p.view(-1), g.flatten(), m, v, step=step, coefficient=coefficient, **SETTINGS)
    for p, q in zip(masters, theirs, strict=True):
        torch.testing.assert_close(p, q.detach(), rtol=2e-6, atol=1e-7)


@settings(max_examples=25, deadline=None)
@given(
    n=st.integers(1, 300),
    chunk=st.sampled_from([16, 64, 1 << 18]),
    step=st.integers(1, 1000),
    coefficient=st.sampled_from([1.0, 0.37, 1e-3]),
    bf16=st.booleans(),
    copy=st.sampled_from([None, torch.bfloat16]),
)
def test_any_length_chunk_and_dtype(n, chunk, step, coefficient, bf16, copy) -> None:  # type: ignore[no-untyped-def]
    master, grad, m, v = _state(n, torch.bfloat16 if bf16 else torch.float32, seed=n)
    expected = adamw_reference(master, grad, m, v, step=step, coefficient=coefficient, **SETTINGS)
    before, stream = grad.clone(), None if copy is None else torch.zeros(n, dtype=copy)
    old, adamw.CHUNK = adamw.CHUNK, chunk
    try:
        adamw_step(master, grad, m, v, step=step, coefficient=coefficient, stream_copy=stream, **SETTINGS)
    finally:
        adamw.CHUNK = old
    for mine, theirs in zip((master, m, v), expected, strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-5, atol=1e-7)
    assert torch.equal(grad, before)
    if stream is not None:
        assert torch.equal(stream, master.to(stream.dtype))


def test_zero_gradient_moves_nothing_but_decay() -> None:
    master, _, _, _ = _state(64)
    before, zero = master.clone(), torch.zeros(64)
    adamw_step(master, zero, zero.clone(), zero.clone(), step=1, coefficient=1.0, **{**SETTINGS, "weight_decay": 0.0})
    assert torch.equal(master, before)


def test_refuses_wrong_lengths_and_dtypes() -> None:
    master, grad, m, v = _state(8)
    with pytest.raises(ValueError, match="grad has 7"):
        adamw_step(master, grad[:7], m, v, step=1, coefficient=1.0, **SETTINGS)
    with pytest.raises(ValueError, match="m must be fp32"):
        adamw_step(master, grad, m.bfloat16(), v, step=1, coefficient=1.0, **SETTINGS)
    with pytest.raises(ValueError, match="counts from 1"):
        adamw_step(master, grad, m, v, step=0, coefficient=1.0, **SETTINGS)


@settings(max_examples=25, deadline=None)
@given(n=st.integers(0, 400), bf16=st.booleans(), chunk=st.sampled_from([16, 1 << 18]))
def test_square_norm(n, bf16, chunk) -> None:  # type: ignore[no-untyped-def]
    grad = _state(n, torch.bfloat16 if bf16 else torch.float32, seed=n)[1]
    old, norms.CHUNK = norms.CHUNK, chunk
    try:
        assert square_norm(grad) == pytest.approx(square_norm_reference(grad), rel=1e-5)
    finally:
        norms.CHUNK = old


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_square_norm_shows_what_is_not_finite(bad: float) -> None:
    grad = torch.ones(1000, dtype=torch.bfloat16)
    grad[777] = bad
    assert not math.isfinite(square_norm(grad))


def test_clip_coefficient() -> None:
    grads = [torch.randn(100), torch.randn(50)]
    norm, coefficient = clip_reference(grads, 0.5)
    assert clip_coefficient(norm, 0.5) == pytest.approx(coefficient)
    assert clip_coefficient(0.1, 1.0) == 1.0
    assert clip_coefficient(1e9, None) == 1.0
    with pytest.raises(ValueError, match="nan"):
        clip_coefficient(math.nan, 1.0)
