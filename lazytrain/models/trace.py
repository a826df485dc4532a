"""Traces one layer of each kind of an architecture in ``FakeTensorMode`` on a cpu device: nothing is allocated.

Not on ``meta``: there scaled-dot-product attention takes its math path, and saves the square of the sequence length.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel

from lazytrain.errors import ModelError
from lazytrain.models import declared
from lazytrain.models.architecture import Architecture
from lazytrain.models.configs import checked, config_digest, text_config
from lazytrain.models.fit import Basis, Shape, fit, fit_peak
from lazytrain.models.spec import LayerKind, LayerTrace, ModelSpec
from lazytrain.models.tracking import Ledger, storages

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
MISFIT_LIMIT = 0.01
EXACT = ("matmul_flops", "attention_flops", "saved_bytes")


@dataclass(frozen=True)
class _Backend:
    """How a kind of layer is traced: at which shapes, as a sum of what. The last shape is held out, to check."""

    name: str
    kind: str
    basis: Basis
    shapes: tuple[Shape, ...]
    origin: Literal["traced", "declared"] = "traced"
    chunk: int = 1  # positions a loop takes at once


# The torch fallback of the recurrence pads to chunks of 64 and loops over them: its peak is that of long sequences only
# once there are several.
BACKENDS = (
    _Backend(
        "flash", "full_attention", Basis("fixed", "per_token", "per_token_seq", "positions"),
        ((2, 128), (4, 128), (2, 256), (4, 192), (3, 320)),
    ),
    _Backend(
        "math", "full_attention", Basis("fixed", "per_token", "per_token_seq", "positions", "mask"),
        ((2, 128), (4, 128), (2, 256), (4, 192), (2, 320), (1, 320)),
    ),
    _Backend(
        "fla", "linear_attention", Basis("fixed", "per_token", "per_token_seq"),
        ((2, 128), (4, 128), (2, 256), (3, 320)), origin="declared", chunk=declared.CHUNK,
    ),
    _Backend(
        "torch", "linear_attention", Basis("fixed", "per_token", "per_sequence"),
        ((2, 512), (4, 512), (2, 640), (3, 576)), chunk=declared.CHUNK,
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Measured:
    """One call of one layer at one shape."""

    matmul_flops: float
    attention_flops: float
    memory_bytes: float
    saved_bytes: float
    forward_live: list[int]  # bytes alive after each allocation, beyond input, weights and output
    backward_live: list[int]  # beyond weights, saved tensors, gradients of output, input and weights
    kernels: int


def trace_model(name: str, config: Mapping[str, Any]) -> ModelSpec:
    """The ModelSpec of a Hugging Face configuration, in a few seconds and without memory for the model."""
    data = checked(text_config(dict(config)), name)
    architecture = Architecture(data)
    layers = tuple(architecture.kind_of(i) for i in range(architecture.n_layers))
    kinds = {kind: _trace_kind(architecture, kind, layers.index(kind)) for kind in dict.fromkeys(layers)}
    return ModelSpec(
        name=name,
        config_digest=config_digest(data),
        versions={package: importlib.metadata.version(package) for package in ("torch", "transformers")},
        hidden_size=architecture.hidden_size,
        vocab_size=architecture.vocab_size,
        max_seq_len=architecture.max_seq_len,
        tied=architecture.tied,
        kinds=kinds,
        layers=layers,
        final_norm_parameters=architecture.hidden_size,
    )


def _trace_kind(architecture: Architecture, kind: str, layer: int) -> LayerKind:
    traces = {
        f"{dtype}/{backend.name}": trace_layer(architecture, layer, dtype, backend.name)
        for dtype in DTYPES
        for backend in BACKENDS
        if backend.kind == kind
    }
    return LayerKind(name=kind, parameters=architecture.parameter_shapes(layer), traces=traces)


def trace_layer(architecture: Architecture, layer: int, dtype_name: str, backend_name: str) -> LayerTrace:
    """One layer in one compute dtype ("bf16", "fp32") with the kernels of one backend."""
    backend = next(b for b in BACKENDS if b.name == backend_name)
    dtype, shapes = DTYPES[dtype_name], backend.shapes
    with FakeTensorMode(), kernels_of(backend.name):
        block = architecture.build_block(layer, dtype, "cpu")
        calls = [measure(architecture, block, dtype, shape) for shape in shapes]
    fitted, basis = shapes[:-1], backend.basis
    terms = {
        field: fit(basis, fitted, [getattr(call, field) for call in calls[:-1]])
        for field in ("matmul_flops", "attention_flops", "memory_bytes", "saved_bytes")
    }
    peaks = {
        phase: fit_peak(basis, fitted, [getattr(call, f"{phase}_live") for call in calls[:-1]])
        for phase in ("forward", "backward")
    }
    batch, seq_len = shapes[-1]
    check = calls[-1]
    truth: dict[str, float] = {field: getattr(check, field) for field in terms}
    truth |= {"forward": max(check.forward_live), "backward": max(check.backward_live)}
    misfits = {
        field: abs(term.at(batch * seq_len, seq_len) - truth[field]) / max(truth[field], 1.0)
        for field, term in {**terms, **peaks}.items()
    }
    for field in EXACT:
        if misfits[field] > MISFIT_LIMIT:
            raise ModelError(
                f"layers with {backend.name} kernels: {field} is not a sum of terms in tokens and sequence length "
                f"({misfits[field]:.1%} off at batch {batch}, sequence {seq_len})"
            )
    kernels, per_position = _kernel_counts(fitted, calls[:-1])
    return LayerTrace(
        origin=backend.origin,
        **terms,
        forward_peak_bytes=peaks["forward"],
        backward_peak_bytes=peaks["backward"],
        kernels=kernels,
        kernels_per_position=per_position,
        sequence_multiple=backend.chunk,
        misfit=round(max(misfits.values()), 6),
    )


def _kernel_counts(shapes: tuple[Shape, ...], calls: list[Measured]) -> tuple[int, float]:
    """Kernels of a call: a number, and one per position where a loop runs over the sequence."""
    (short, few), (long, many) = min(_by_seq(shapes, calls)), max(_by_seq(shapes, calls))
    slope = (many - few) / (long - short)
    return round(few - slope * short), slope


def _by_seq(shapes: tuple[Shape, ...], calls: list[Measured]) -> list[tuple[int, int]]:
    return [(seq, call.kernels) for (_, seq), call in zip(shapes, calls, strict=True)]


def measure(architecture: Architecture, block: nn.Module, dtype: torch.dtype, shape: Shape) -> Measured:
    """Runs one layer forward without and with gradients, and backward; real or fake, as the block's parameters are.

    ``saved_bytes`` are the storages autograd packs, each once; the layer's input counts if it is kept, its parameters
    and the position embeddings do not.
    """
    batch, seq_len = shape
    device = next(block.parameters()).device
    context = architecture.context(batch, seq_len, device, dtype)
    x = torch.zeros(batch, seq_len, architecture.hidden_size, dtype=dtype, device=device)
    with torch.no_grad(), Ledger() as forward:
        y = architecture.run_block(block, x, context)
    forward_live = forward.live_bytes(y)
    x.requires_grad_()
    kept, y = run_saving(architecture, block, x, context)
    saved_bytes = sum(storage.nbytes() for storage in kept.values())
    gradient = torch.zeros_like(y)
    with Ledger(engine_adds=True) as backward:
        torch.autograd.backward([y], [gradient])
    assert x.grad is not None
    backward_live = backward.live_bytes(x.grad, without=[p.grad for p in block.parameters()])
    block.zero_grad()
    return Measured(
        forward.matmul_flops, forward.attention_flops, forward.memory_bytes, saved_bytes, forward_live, backward_live,
        forward.kernels,
    )  # fmt: skip


def run_saving(
    architecture: Architecture, block: nn.Module, x: Tensor, context: Any
) -> tuple[dict[int, torch.UntypedStorage], Tensor]:
    """A forward with gradients: the storages it keeps for backward, and its output."""
    constants = storages([*block.parameters(), *context.tensors])
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in constants:
            kept[storage._cdata] = storage
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        y = architecture.run_block(block, x, context)
    return kept, y


@contextmanager
def kernels_of(backend: str) -> Iterator[None]:
    """Makes layers take the kernels of a backend, whatever is installed here."""
    with ExitStack() as stack:
        if backend in ("flash", "math"):
            stack.enter_context(sdpa_kernel(SDPBackend.MATH if backend == "math" else SDPBackend.FLASH_ATTENTION))
        else:
            from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling

            rule, conv = declared.chunk_gated_delta_rule, declared.causal_conv1d_fn
            if backend == "torch":
                rule = modeling.torch_chunk_gated_delta_rule.__wrapped__
                conv = modeling.causal_conv1d_fn.__wrapped__
            stack.enter_context(patch.object(modeling, "torch_chunk_gated_delta_rule", rule))
            stack.enter_context(patch.object(modeling, "causal_conv1d_fn", conv))
        yield
