"""Measuring the compute device: products, whole decoder layers, attention, elementwise kernels, launches.

FLOPs count a multiply-add as two and attention as the full square of scores. torch and transformers are imported
inside.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lazytrain.hwprofiles.probes_timing import median_pair, median_seconds

if TYPE_CHECKING:
    import torch

Points = list[tuple[float, float]]  # (FLOPs of the call, FLOP/s)


@dataclass(frozen=True)
class LayerCase:
    """One decoder layer and its input: a Qwen2-shaped layer, ``batch`` sequences of ``seq`` tokens."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    batch: int
    seq: int

    @property
    def forward_flops(self) -> float:
        """Products of the forward pass plus attention over the full square."""
        kv = self.hidden // self.heads * self.kv_heads
        weights = 2 * self.hidden * self.hidden + 2 * self.hidden * kv + 3 * self.hidden * self.intermediate
        tokens = self.batch * self.seq
        return 2.0 * tokens * weights + 4.0 * tokens * self.seq * self.hidden


CPU_PRODUCTS = {True: (64, 128, 256, 512, 1024), False: (64, 128, 256, 512, 1024, 2048)}
GPU_PRODUCTS = {True: (256, 1024, 4096, 8192), False: (256, 512, 1024, 2048, 4096, 8192, 12288)}
_CPU_LAYERS = (
    LayerCase(64, 192, 4, 2, 1, 64),  # 6 MFLOP: what a demo's layer is
    LayerCase(128, 384, 4, 2, 1, 128),  # 0.06 GFLOP
    LayerCase(256, 768, 4, 2, 1, 128),  # 0.2
    LayerCase(512, 1536, 8, 4, 1, 160),  # 1
    LayerCase(512, 1536, 8, 4, 5, 160),  # 5
    LayerCase(896, 4864, 14, 2, 1, 640),  # 20
)
CPU_LAYERS = {True: _CPU_LAYERS, False: (*_CPU_LAYERS, LayerCase(896, 4864, 14, 2, 2, 1024))}
_GPU_LAYERS = (
    LayerCase(896, 4864, 14, 2, 1, 1024),  # 0.03 TFLOP
    LayerCase(2048, 11008, 16, 2, 1, 1024),  # 0.2
    LayerCase(3584, 18944, 28, 4, 1, 1024),  # 0.5
    LayerCase(3584, 18944, 28, 4, 4, 1024),  # 2
)
GPU_LAYERS = {True: _GPU_LAYERS, False: (*_GPU_LAYERS, LayerCase(5120, 27648, 40, 8, 8, 1024))}
# (batch, heads, sequence, head size)
CPU_ATTENTION = ((1, 8, 128, 64), (1, 8, 512, 64), (2, 8, 1024, 64))
GPU_ATTENTION = ((1, 16, 512, 128), (1, 16, 2048, 128), (4, 32, 4096, 128))


class ComputeProbe:
    """Probes of one device; every method returns FLOP/s, bytes/s or seconds."""

    def __init__(self, device: str, budget_s: float):
        import torch

        self.device, self.budget_s = device, budget_s
        self.sync: Callable[[], None] | None = None if device == "cpu" else torch.cuda.synchronize

    def _tensor(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        import torch

        return torch.randn(*shape, device=self.device).mul_(0.1).to(dtype)

    def _seconds(self, act: Callable[[], object]) -> float:
        return median_seconds(act, budget_s=self.budget_s, sync=self.sync)

    def products(self, dtype: torch.dtype, sizes: tuple[int, ...]) -> Points:
        """FLOP/s of square products ``n x n x n``."""
        import torch

        points = []
        for n in sizes:
            a, b = self._tensor(n, n, dtype=dtype), self._tensor(n, n, dtype=dtype)
            out = torch.empty(n, n, dtype=dtype, device=self.device)
            flops = 2.0 * n**3
            points.append((flops, flops / self._seconds(functools.partial(torch.mm, a, b, out=out))))
        return points

    def attention(self, dtype: torch.dtype, cases: tuple[tuple[int, int, int, int], ...]) -> Points:
        """FLOP/s of causal attention, forward and backward together (backward counts 2.5 times the forward)."""
        import torch

        points = []
        for batch, heads, seq, size in cases:
            q, k, v = (self._tensor(batch, heads, seq, size, dtype=dtype).requires_grad_() for _ in range(3))
            gradient = self._tensor(batch, heads, seq, size, dtype=dtype)

            def both(q: Any = q, k: Any = k, v: Any = v, gradient: Any = gradient) -> None:
                out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
                torch.autograd.grad(out, (q, k, v), gradient)

            flops = 4.0 * batch * heads * seq * seq * size
            points.append((flops, 3.5 * flops / self._seconds(both)))
        return points

    def layers(self, dtype: torch.dtype, cases: tuple[LayerCase, ...]) -> tuple[Points, Points]:
        """FLOP/s of whole decoder layers: forward (with autograd recording), and backward at twice the FLOPs."""
        forward, backward = [], []
        for case in cases:
            forward_s, backward_s = self._layer_seconds(case, dtype)
            forward.append((case.forward_flops, case.forward_flops / forward_s))
            backward.append((case.forward_flops, 2 * case.forward_flops / backward_s))
        return forward, backward

    def _layer_seconds(self, case: LayerCase, dtype: torch.dtype) -> tuple[float, float]:
        import torch
        from transformers import Qwen2Config
        from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RotaryEmbedding

        config = Qwen2Config(
            hidden_size=case.hidden,
            intermediate_size=case.intermediate,
            num_attention_heads=case.heads,
            num_key_value_heads=case.kv_heads,
            num_hidden_layers=1,
            vocab_size=16,
            max_position_embeddings=case.seq,
            attn_implementation="sdpa",
        )
        layer = Qwen2DecoderLayer(config, 0).to(self.device, dtype)
        x = self._tensor(case.batch, case.seq, case.hidden, dtype=dtype).requires_grad_()
        gradient = self._tensor(case.batch, case.seq, case.hidden, dtype=dtype)
        position = Qwen2RotaryEmbedding(config).to(self.device)(x, torch.arange(case.seq, device=self.device)[None])
        output: list[torch.Tensor] = []

        def forward() -> None:
            out = layer(x, position_embeddings=position)
            output[:] = [out[0] if isinstance(out, tuple) else out]

        def backward() -> None:
            x.grad = None
            layer.zero_grad(set_to_none=True)
            output[0].backward(gradient)

        return median_pair(forward, backward, budget_s=self.budget_s, sync=self.sync)

    def memory(self, size: int) -> tuple[float, float]:
        """(bytes/s of a triad, share of it that a mix of a layer's elementwise kernels reaches)."""
        import torch

        a, b, c = (self._tensor(size // 4, dtype=torch.float32) for _ in range(3))
        triad = 3 * size / self._seconds(lambda: torch.add(b, c, alpha=3.0, out=a))

        def mix() -> None:
            torch.add(b, c, out=a)
            torch.mul(a, b, out=c)
            torch.sigmoid(b, out=a)
            torch.exp(b, out=a)

        elementwise = (3 + 3 + 2 + 2) * size / self._seconds(mix)
        return triad, min(1.0, elementwise / triad)

    def launch(self) -> float:
        """Seconds that one tiny kernel costs in a row of them."""
        import torch

        x = self._tensor(16, dtype=torch.float32)
        return median_seconds(lambda: x.add_(1.0), budget_s=self.budget_s / 4, sync=self.sync, minimum_s=5e-3)
