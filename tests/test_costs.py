"""Costs: closed forms, and what is refused."""

from __future__ import annotations

import pytest

from lazytrain.costs.job import TrainingJob, default_job
from lazytrain.costs.table import CostTable
from lazytrain.errors import InputError
from tests import builders


def test_transfers_are_latency_plus_bytes_over_rate() -> None:
    machine = builders.machine(link__h2d=("20 GB/s", "byte_rate"), link__latency=("10 us", "time"))
    costs = CostTable(builders.model(), machine, builders.job(), 2)
    assert costs.h2d_s(2e9) == pytest.approx(0.1 + 1e-5)
    assert costs.h2d_s(0) == 0
    assert costs.boundary_bytes == 4 / 2 * 128 * 64 * 2


def test_layer_seconds_are_flops_over_achieved_rate() -> None:
    machine = builders.machine()
    costs = CostTable(builders.model(parameters=50_000_000), machine, builders.job(batch=16, seq=2048), 1)
    gpu, layer, tokens = machine.gpu, costs.layers[0], 16 * 2048
    flops = 2 * 50_000_000 * tokens
    rate = float(gpu.peak_flops["bf16"]) * gpu.matmul_efficiency.at(flops)
    memory = 8 * 64 * tokens / (float(gpu.memory_bandwidth) * float(gpu.memory_efficiency))
    assert layer.forward_s == pytest.approx(flops / rate + memory)
    assert layer.backward_s == pytest.approx(2 * layer.forward_s)


def test_one_efficiency_number_scales_all_compute() -> None:
    slow = builders.machine(gpu__compute_efficiency=("50 %", "fraction"))
    job, spec = builders.job(), builders.model()
    fast, half = CostTable(spec, builders.machine(), job, 1), CostTable(spec, slow, job, 1)
    for a, b in zip(fast.units, half.units, strict=True):
        assert b.forward_s == pytest.approx(2 * a.forward_s)
        assert b.backward_s == pytest.approx(2 * a.backward_s)
    assert half.h2d_s(1e6) == fast.h2d_s(1e6)


def test_larger_micro_batches_are_never_slower_in_sum() -> None:
    spec, machine, job = builders.model(), builders.machine(), builders.job(batch=8)
    sums = [m * CostTable(spec, machine, job, m).layers[0].forward_s for m in (1, 2, 4, 8)]
    assert sums == sorted(sums)


@pytest.mark.parametrize(
    ("fields", "M", "problem"), [({"batch": 4}, 3, "does not divide"), ({"seq": 8192}, 1, "beyond toy's limit of 4096")]
)
def test_impossible_jobs(fields: dict[str, int], M: int, problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        CostTable(builders.model(), builders.machine(), builders.job(**fields), M)


def test_default_dtypes_follow_the_device() -> None:
    assert default_job("cpu", 128, 4).compute_dtype == "fp32"
    assert default_job("cuda", 128, 4).gradient_dtype == "bf16"
    with pytest.raises(ValueError, match="differs from compute_dtype"):
        TrainingJob(seq_len=1, batch_size=1, compute_dtype="bf16", stream_dtype="fp32")
