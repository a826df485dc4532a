"""Traces: fake against real layers, against closed forms, and the shipped data against a new trace."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lazytrain.models import Largest, ModelSpec, Terms, load_config, load_model
from lazytrain.models.architecture import Architecture
from lazytrain.models.catalogue import library_versions
from lazytrain.models.fit import Basis, fit, fit_peak
from lazytrain.models.regenerate import to_text
from lazytrain.models.trace import DTYPES, kernels_of, measure, trace_layer, trace_model
from lazytrain.models.tracking import Ledger
from tests.test_models import TINY_LLAMA

_traced: dict[str, ModelSpec] = {}


def config_of(name: str) -> dict[str, Any]:
    """Of the catalogue, or the tiny Llama of the tests."""
    return TINY_LLAMA if name == "tiny-llama" else load_config(name)


def traced(name: str) -> ModelSpec:
    """A trace made here; the shipped one where a test above has found it current."""
    if name in ("tiny-qwen3", "tiny-qwen35"):
        return load_model(name)
    if name not in _traced:
        _traced[name] = trace_model(name, config_of(name))
    return _traced[name]


def same(spec: ModelSpec, shipped: ModelSpec) -> None:
    if shipped.versions != library_versions():
        pytest.skip(f"the shipped traces are of {shipped.versions}")
    assert spec == shipped, f"{spec.name}: run python -m lazytrain.models.regenerate"


# --- shipped data ----------------------------------------------------------------------------------------------------
def test_a_shipped_spec_is_reproduced() -> None:
    same(traced("tiny-qwen2"), load_model("tiny-qwen2"))


@pytest.mark.parametrize(
    ("name", "layer", "dtype", "backend"),
    [
        ("qwen2.5-7b", 0, "bf16", "flash"), ("qwen3-32b", 9, "fp32", "flash"), ("llama-3.2-1b", 0, "bf16", "math"),
        ("qwen3.6-27b", 0, "bf16", "fla"), ("qwen3.6-27b", 3, "bf16", "flash"), ("tiny-qwen35", 1, "fp32", "torch"),
    ],
)  # fmt: skip
def test_shipped_traces_are_reproduced(name: str, layer: int, dtype: str, backend: str) -> None:
    shipped = load_model(name)
    if shipped.versions != library_versions():
        pytest.skip(f"the shipped traces are of {shipped.versions}")
    again = trace_layer(Architecture(load_config(name)), layer, dtype, backend)
    assert again == shipped.kind(layer).trace(dtype, backend), "run python -m lazytrain.models.regenerate"


def test_shipped_text_reads_back() -> None:
    spec = load_model("qwen3.6-27b")
    assert ModelSpec.model_validate_json(to_text(spec)) == spec
    assert max(map(len, to_text(spec).splitlines())) <= 130


# --- fake equals real ------------------------------------------------------------------------------------------------
CASES = [
    ("tiny-qwen2", 0, "flash"), ("tiny-qwen2", 0, "math"), ("tiny-qwen3", 0, "flash"), ("tiny-llama", 0, "flash"),
    ("tiny-llama", 0, "math"), ("tiny-qwen35", 0, "torch"), ("tiny-qwen35", 3, "flash"), ("tiny-qwen35", 3, "math"),
]  # fmt: skip


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("name", "layer", "backend"), CASES)
def test_traces_equal_real_layers(name: str, layer: int, backend: str, dtype: str) -> None:
    """To the byte, at shapes that were not traced: odd lengths and one sequence included."""
    architecture = Architecture(config_of(name))
    block = architecture.build_block(layer, DTYPES[dtype], "cpu")
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.fill_(0.01)
    spec = traced(name)
    trace = spec.kind(layer).trace(dtype, backend)
    shapes = [(2, 128), (3, 192)] if backend == "torch" else [(2, 48), (1, 37), (1, 12), (3, 130)]
    for batch, seq_len in shapes:
        with kernels_of(backend):
            real = measure(architecture, block, DTYPES[dtype], (batch, seq_len))
        tokens = batch * seq_len
        assert trace.saved_bytes.at(tokens, seq_len) == real.saved_bytes
        assert trace.matmul_flops.at(tokens, seq_len) == real.matmul_flops
        assert trace.attention_flops.at(tokens, seq_len) == real.attention_flops
        if backend == "flash":
            assert trace.forward_peak_bytes.at(tokens, seq_len) == max(real.forward_live)
            assert trace.backward_peak_bytes.at(tokens, seq_len) == max(real.backward_live)
            assert trace.kernels == real.kernels
            # What a call reads once whatever its batch counts once a sequence.
            assert 0.999 * real.memory_bytes <= trace.memory_bytes.at(tokens, seq_len) <= 1.04 * real.memory_bytes


def test_one_sequence_through_the_torch_recurrence() -> None:
    """With one sequence a call autograd shares one chunk-sized tensor less in fp32: known, and below a percent."""
    architecture = Architecture(load_config("tiny-qwen35"))
    block = architecture.build_block(0, torch.float32, "cpu")
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.fill_(0.01)
    with kernels_of("torch"):
        real = measure(architecture, block, torch.float32, (1, 256))
    trace = traced("tiny-qwen35").kind(0).trace("fp32", "torch")
    assert trace.saved_bytes.at(256, 256) == pytest.approx(real.saved_bytes, rel=0.005)


def _allocator_peak(run: Any) -> tuple[int, Any]:
    """Peak bytes of torch's CPU allocator while ``run()`` runs, beyond what was there before; and the result."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = run()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak, result


@pytest.mark.parametrize(("name", "layer"), [("tiny-qwen2", 0), ("tiny-qwen35", 0)])
def test_peaks_are_those_of_the_real_allocator(name: str, layer: int) -> None:
    architecture = Architecture(load_config(name))
    block = architecture.build_block(layer, torch.float32, "cpu")
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.fill_(0.01)
    batch, seq_len = 2, 256
    spec = load_model(name)
    backend = "torch" if "linear" in spec.layers[layer] else "flash"
    trace = spec.kind(layer).trace("fp32", backend)
    context = architecture.context(batch, seq_len, "cpu", torch.float32)
    x = torch.ones(batch, seq_len, architecture.hidden_size)

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return architecture.run_block(block, x, context)

    with kernels_of(backend):
        forward()  # what is made once
        peak, y = _allocator_peak(forward)
        x.requires_grad_()
        loss_of = architecture.run_block(block, x, context)
    assert trace.forward_peak_bytes.at(batch * seq_len, seq_len) == pytest.approx(peak - y.nbytes, rel=0.03)
    for parameter in block.parameters():
        parameter.grad = torch.zeros_like(parameter)
    held: list[Any] = []  # saved tensors stay until the end, as the executor keeps them
    with kernels_of(backend), torch.autograd.graph.saved_tensors_hooks(lambda t: held.append(t) or t, lambda t: t):
        loss_of = architecture.run_block(block, x, context)
    gradient = torch.ones_like(loss_of)
    peak, _ = _allocator_peak(lambda: torch.autograd.backward([loss_of], [gradient]))
    largest_weight = max(parameter.nbytes for parameter in block.parameters())
    expected = trace.backward_peak_bytes.at(batch * seq_len, seq_len)
    assert expected * 0.97 <= peak - x.nbytes <= expected * 1.03 + largest_weight


# --- closed forms ----------------------------------------------------------------------------------------------------
def test_flash_saves_nothing_quadratic() -> None:
    """The design's figure: a 512-wide Qwen layer saves 51 KB a token at any length."""
    trace = load_model("demo-qwen3").kind(0).trace("fp32", "flash")
    assert trace.saved_bytes.per_token_seq == 0
    assert load_model("demo-qwen3").kind(0).trace("fp32", "math").saved_bytes.per_token_seq == 4 * 8  # scores, fp32


@pytest.mark.parametrize("name", ["qwen2.5-7b", "qwen3-8b", "llama-3.1-8b", "qwen3.6-27b"])
def test_flops_are_two_per_matrix_element_and_token(name: str) -> None:
    spec = load_model(name)
    for kind in spec.kinds.values():
        elements = sum(shape[0] * shape[1] for shape in kind.parameters.values() if len(shape) == 2)
        for trace in kind.traces.values():
            assert trace.matmul_flops == Terms(per_token=2.0 * elements)
    config = load_config(name)
    heads = config["num_attention_heads"]
    width = heads * config.get("head_dim", config["hidden_size"] // heads)
    attention = spec.kinds["full_attention"].trace("bf16", "flash").attention_flops
    assert attention == Terms(per_token_seq=4.0 * width)


def test_declared_kernels_save_what_their_source_saves() -> None:
    """Per token of a 27B linear layer, from the recurrence and the convolution (see models/declared.py)."""
    spec = load_model("qwen3.6-27b")
    linear = spec.kinds["linear_attention"]
    declared, fallback = linear.trace("bf16", "fla"), linear.trace("bf16", "torch")
    assert declared.origin == "declared"
    assert fallback.origin == "traced"
    hk, hv, k, v, e = 16, 48, 128, 128, 2
    rule = 2 * hk * (k * e + 4) + hv * (v * e + 4 + e + 64 * e)
    convolution = (2 * hk * k + hv * v) * e
    assert rule + convolution < declared.saved_bytes.per_token < fallback.saved_bytes.per_token
    assert declared.kernels < fallback.kernels
    flops = 2 * hv * (64 * (3 * k + 2 * v + 64 / 3) + 3 * k * v)
    assert declared.attention_flops.per_token == pytest.approx(flops)


# --- the tools -------------------------------------------------------------------------------------------------------
def test_ledger_counts_work_and_life() -> None:
    a, b = torch.ones(4, 8), torch.ones(8, 16)
    with Ledger() as ledger:
        c = a @ b  # 2*4*8*16 FLOPs
        d = c.t()[1:]  # views are free
        e = d + 1
        del c, d
        f = e * 2
        del e
    assert ledger.matmul_flops == 1024
    assert ledger.kernels == 3
    assert ledger.memory_bytes == 4 * 15 * 4 * 4
    assert ledger.live_bytes(f) == [0, 256 - 240, 256, 240]


def test_ledger_counts_broadcast_extents_once() -> None:
    with Ledger() as ledger:
        row = torch.ones(1, 1000).expand(50, 1000)
        row + 1
    ones = 4000
    assert ledger.memory_bytes == ones + 4000 + 50 * 4000


def test_fit_separates_terms() -> None:
    basis = Basis("fixed", "per_token", "per_token_seq")
    truth = Terms(fixed=100, per_token=7, per_token_seq=0.5)
    shapes = [(2, 128), (4, 128), (2, 256)]
    assert fit(basis, shapes, [truth.at(b * s, s) for b, s in shapes]) == truth


def test_peaks_of_several_operations() -> None:
    basis = Basis("fixed", "per_token", "per_token_seq")
    short, long, never = Terms(per_token=1000), Terms(per_token=100, per_token_seq=1), Terms(per_token=50)
    shapes = [(2, 128), (4, 128), (2, 256)]
    timelines = [[term.at(b * s, s) for term in (short, never, long)] for b, s in shapes]
    peak = fit_peak(basis, shapes, timelines)
    assert isinstance(peak, Largest)
    assert set(peak.of) == {short, long}
    assert peak.at(4096, 4096) == long.at(4096, 4096)
