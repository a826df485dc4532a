"""Measuring the machine this runs on, as a profile like any other.

Every number says ``measured`` with the probe and torch version it came from. On a machine without a CUDA device the
CPU is the device: of n cores n-1 (at least one) compute and the rest copy and update, and its "GPU memory" is a share
of RAM. Run it on an otherwise idle machine; probes run one after the other.
"""

from __future__ import annotations

import datetime
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lazytrain.errors import InputError
from lazytrain.hwprofiles import probes_system as system
from lazytrain.hwprofiles.probes_compute import (
    CPU_ATTENTION,
    CPU_LAYERS,
    CPU_PRODUCTS,
    GPU_ATTENTION,
    GPU_LAYERS,
    GPU_PRODUCTS,
    ComputeProbe,
    Points,
)
from lazytrain.hwprofiles.probes_disk import ProbeRefused, measure_disk
from lazytrain.hwprofiles.probes_memory import (
    DEFAULT_ADAMW,
    MIB,
    AdamwSteps,
    adamw_rate,
    measure_copies,
    pin_limit,
    sum_of_squares_rate,
    triad_rate,
)
from lazytrain.hwprofiles.probes_timing import torch_threads
from lazytrain.hwprofiles.quantity import Kind, Quantity, RateTable
from lazytrain.hwprofiles.schema import Dtype, Gpu, Host, Link, Machine, Nvme

__all__ = ["ProbeRefused", "calibrate"]

# Unit of each dimension in a written profile, with its factor.
_UNITS = {
    "bytes": ("MiB", 2.0**20),
    "byte_rate": ("GB/s", 1e9),
    "flop_rate": ("GFLOPS", 1e9),
    "flop": ("MFLOP", 1e6),
    "param_rate": ("Gparams/s", 1e9),
    "time": ("us", 1e-6),
    "fraction": ("fraction", 1.0),
    "ratio": ("x", 1.0),
    "count": ("cores", 1.0),
}
_SMALLEST_SHARE = 1e-6  # of the peak, so that a table holds no zero


@dataclass(frozen=True)
class _Writer:
    """Makes quantities of one day and torch version."""

    torch_version: str
    date: datetime.date

    def number(self, si: float, dimension: str, source: str, kind: Kind = "measured") -> Quantity:
        unit, factor = _UNITS[dimension]
        return Quantity.of(
            f"{si / factor:.6g} {unit}", dimension, kind=kind, source=self._source(source, kind), date=self.date
        )

    def table(self, points: Points, dimension: str, source: str) -> RateTable:
        unit, factor = _UNITS[dimension]
        rows = [(f"{size / 1e6:.6g} MFLOP", f"{value / factor:.6g} {unit}") for size, value in sorted(points)]
        return RateTable.of(rows, dimension, kind="measured", source=self._source(source, "measured"), date=self.date)

    def _source(self, source: str, kind: Kind) -> str:
        return f"lazytrain calibrate: {source}; torch {self.torch_version}" if kind == "measured" else source


def calibrate(
    directory: Path | None,
    *,
    quick: bool = False,
    progress: Callable[[str, float], None] | None = None,
    device: str | None = None,
    name: str = "this-machine",
    gpu_share: float = 0.25,
    host_share: float = 0.5,
    adamw_steps: AdamwSteps | None = None,
) -> Machine:
    """Measure this machine; the drive is the one that holds ``directory``, and none is measured without it.

    ``quick`` takes under 40 s, the full run up to 3 minutes. ``progress`` is told each probe and the share done.
    ``device`` is "cuda" or "cpu" (default: CUDA where there is one). On a cpu device ``gpu_share`` and ``host_share``
    split the available RAM. ``adamw_steps`` gives per moment codec the update to time (default: torch's fused fp32).
    When the drive's probe is refused, the machine has no ``nvme`` part and its description says why.
    """
    import torch

    if directory is not None and not directory.is_dir():
        raise InputError(f"{directory}: no such directory")
    if not (gpu_share > 0 and host_share > 0 and gpu_share + host_share <= 1):
        raise InputError(f"gpu_share {gpu_share} and host_share {host_share} must be positive and at most 1 together")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device not in ("cpu", "cuda") or (device == "cuda" and not torch.cuda.is_available()):
        raise InputError(f"no device '{device}' on this machine")
    run = _Calibration(
        device,
        quick,
        progress or (lambda probe, share: None),
        adamw_steps or DEFAULT_ADAMW,
        _Writer(torch.__version__, datetime.date.today()),
    )
    return run.machine(directory, name, gpu_share, host_share)


class _Calibration:
    def __init__(
        self, device: str, quick: bool, progress: Callable[[str, float], None], adamw: AdamwSteps, writer: _Writer
    ):
        self.device, self.quick, self.progress, self.adamw, self.w = device, quick, progress, adamw, writer
        self.cpu = device == "cpu"
        self.cores = system.core_count()
        self.compute_threads = max(1, self.cores - 1)
        self.workers = max(1, self.cores - self.compute_threads) if self.cpu else max(1, self.cores - 1)
        self.budget_s = 0.4 if quick else 1.5
        self.ram = system.memory()
        self.resident = system.resident_bytes()
        self.load = system.other_load()
        self.dram = 0.0  # bytes/s, known after the triads

    def machine(self, directory: Path | None, name: str, gpu_share: float, host_share: float) -> Machine:
        gpu = self._gpu(gpu_share)
        self.progress("copies", 0.65)
        link, copy_rate = self._link()
        host = self._host(host_share)
        self.progress("drive", 0.85)
        busy = self.load > self.cores / 2
        problem = f"; the machine was busy (load {self.load:.1f} on {self.cores} cores)" if busy else ""
        nvme = None
        try:
            if directory is not None:
                nvme = self._nvme(directory, copy_rate)
        except ProbeRefused as refused:
            problem += f"; no drive: {refused}"
        self.progress("done", 1.0)
        how = "quick" if self.quick else "full"
        return Machine(
            name=name,
            description=f"calibrated ({how}) on {self.w.date}: {gpu.name}{problem}",
            gpu=gpu,
            link=link,
            host=host,
            nvme=nvme,
        )

    # --- device ------------------------------------------------------------------------------------------------------
    def _gpu(self, share: float) -> Gpu:
        import torch

        probe = ComputeProbe(self.device, self.budget_s)
        threads = self.compute_threads if self.cpu else torch.get_num_threads()
        label: Dtype = "fp32" if self.cpu else "bf16"
        dtype = torch.float32 if self.cpu else torch.bfloat16
        with torch_threads(threads):
            self.progress("matrix products", 0.0)
            products = probe.products(dtype, (CPU_PRODUCTS if self.cpu else GPU_PRODUCTS)[self.quick])
            peaks: dict[Dtype, float] = {label: max(rate for _, rate in products), **self._other_peaks(probe, label)}
            self.progress("attention", 0.15)
            attention = probe.attention(dtype, CPU_ATTENTION if self.cpu else GPU_ATTENTION)
            self.progress("decoder layers", 0.2)
            forward, backward = probe.layers(dtype, (CPU_LAYERS if self.cpu else GPU_LAYERS)[self.quick])
            self.progress("device memory", 0.6)
            bandwidth, share_reached = probe.memory((64 if self.cpu else 512) * MIB)
            launch = probe.launch()
        if self.cpu:
            self.dram = bandwidth
        on = f"{threads} torch thread(s)" if self.cpu else "torch.cuda"
        peak = peaks[label]
        w = self.w
        return Gpu(
            **self._identity(share),
            memory_bandwidth=w.number(bandwidth, "byte_rate", f"triad on the device, {on}"),
            memory_efficiency=w.number(share_reached, "fraction", f"add, mul, sigmoid, exp over the triad, {on}"),
            peak_flops={
                kind: w.number(rate, "flop_rate", f"best square {kind} product, {on}") for kind, rate in peaks.items()
            },
            matmul_efficiency=w.table(
                _shares(products, peak), "fraction", f"square {label} products over the best one, {on}"
            ),
            attention_efficiency=w.table(
                _shares(attention, peak),
                "fraction",
                f"causal {label} attention, both passes, full-square FLOPs over the best product, at most 1, {on}",
            ),
            layer_rate_forward={label: w.table(forward, "flop_rate", f"Qwen2 decoder layers, sdpa, forward, {on}")},
            layer_rate_backward={label: w.table(backward, "flop_rate", f"Qwen2 decoder layers, sdpa, backward, {on}")},
            kernel_latency=w.number(launch, "time", f"tiny in-place additions, {on}"),
        )

    def _other_peaks(self, probe: ComputeProbe, label: Dtype) -> dict[Dtype, float]:
        """Rates of the other dtypes; a CPU's 16-bit products are so slow that one tiny size is enough."""
        import torch

        dtypes: dict[Dtype, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
        sizes = (128,) if self.cpu else (4096,)
        return {kind: probe.products(dtype, sizes)[0][1] for kind, dtype in dtypes.items() if kind != label}

    def _identity(self, share: float) -> dict[str, Any]:
        w = self.w
        if self.cpu:
            model, vendor = system.cpu_name()
            return {
                "name": f"{model} ({self.compute_threads} of {self.cores} cores)",
                "vendor": vendor,
                "device": "cpu",
                "memory": w.number(
                    share * self.ram.available, "bytes", f"{share:g} of the available RAM ({self.ram.source})"
                ),
                "reserved": w.number(16 * MIB, "bytes", "slack of the allocator on a cpu device", "assumed"),
                "compute_threads": self.compute_threads,
                "linear_attention_backend": "torch",
            }
        import torch

        free, total = torch.cuda.mem_get_info()
        context = total - free - torch.cuda.memory_reserved()
        fla = importlib.util.find_spec("fla") is not None
        return {
            "name": torch.cuda.get_device_name(),
            "vendor": "AMD" if torch.version.hip else "NVIDIA",
            "device": "hip" if torch.version.hip else "cuda",
            "memory": w.number(total, "bytes", "cudaMemGetInfo, total"),
            "reserved": w.number(
                context + 256 * MIB, "bytes", "in use outside torch's allocator after the probes, plus 256 MiB of slack"
            ),
            "linear_attention_backend": "fla" if fla else "torch",
        }

    # --- link, host, drive -------------------------------------------------------------------------------------------
    def _link(self) -> tuple[Link, float]:
        copies = measure_copies(self.device, (64 if self.cpu else 256) * MIB, self.workers, self.budget_s)
        how = f"copy_ in RAM, {self.workers} thread(s)" if self.cpu else "copy_ of 256 MiB"
        w = self.w
        duplex = min(2.0, max(1.0, copies.both / max(copies.h2d, copies.d2h)))
        pageable = "host memory of a cpu device is not pinned: as h2d" if self.cpu else f"{how} from pageable memory"
        link = Link(
            name="copies in RAM" if self.cpu else "host link",
            h2d=w.number(copies.h2d, "byte_rate", f"{how}, host to device"),
            d2h=w.number(copies.d2h, "byte_rate", f"{how}, device to host"),
            duplex=w.number(duplex, "ratio", f"{how}, both at once over the faster way, kept within 1 and 2"),
            pageable=w.number(copies.pageable, "byte_rate", pageable),
            latency=w.number(copies.latency, "time", "copies of four bytes"),
        )
        return link, max(copies.h2d, copies.d2h) if self.cpu else 0.0

    def _host(self, share: float) -> Host:
        size = (64 if self.quick else 256) * MIB
        w = self.w
        ram = self.ram
        self.progress("DRAM", 0.72)
        self.dram = max(self.dram, triad_rate(size, self.cores, self.budget_s))
        norm = sum_of_squares_rate(size, self.workers, self.budget_s)
        self.progress("optimizer", 0.78)
        parameters = (8 if self.quick else 32) * 10**6
        adamw = {codec: adamw_rate(step, parameters, self.workers, self.budget_s) for codec, step in self.adamw.items()}
        with_workers = f"{self.workers} thread(s)"
        if self.cpu:
            memory = w.number(share * ram.available, "bytes", f"{share:g} of the available RAM ({ram.source})")
            baseline = w.number(self.resident, "bytes", "resident memory of this process with torch imported")
        else:
            memory = w.number(ram.limit, "bytes", ram.source)
            used = max(ram.limit - ram.available, self.resident)
            baseline = w.number(used, "bytes", "RAM in use with this process and torch imported")
        pinned = None if self.cpu else pin_limit(system.memlock_limit())
        return Host(
            name=f"{system.cpu_name()[0]}, {self.cores} cores",
            memory=memory,
            usable=w.number(0.95, "fraction", "margin for the OS and the page cache", "assumed"),
            pin_limit=None if pinned is None else w.number(pinned, "bytes", "RLIMIT_MEMLOCK, pinning more failed"),
            dram_bandwidth=w.number(self.dram, "byte_rate", f"best triad in RAM, up to {self.cores} thread(s)"),
            cores=w.number(self.cores, "count", "affinity mask and CPU quota"),
            adamw={
                codec: w.number(rate, "param_rate", f"AdamW on {parameters / 1e6:g} M parameters, {with_workers}")
                for codec, rate in adamw.items()
            },
            norm_bandwidth=w.number(norm, "byte_rate", f"fp32 vector_norm, {with_workers}"),
            numa_nodes=system.numa_nodes(),
            baseline=baseline,
        )

    def _nvme(self, directory: Path, copy_rate: float) -> Nvme:
        # A copy reads and writes each byte; on a GPU machine it is inferred from the triad, two of three arrays.
        bound = max(copy_rate, self.dram / 2)
        rates = measure_disk(directory, quick=self.quick, memory_copy_rate=bound)
        w = self.w
        return Nvme(
            name=f"drive of {directory}",
            capacity=w.number(rates.capacity, "bytes", "free bytes of the file system"),
            read=w.number(rates.read, "byte_rate", rates.source),
            write=w.number(rates.write, "byte_rate", rates.source),
            sustained_write=w.number(rates.sustained_write, "byte_rate", rates.sustained_source),
            latency=w.number(rates.latency, "time", "reads of 4 KiB, one at a time"),
        )


def _shares(points: Points, peak: float) -> Points:
    return [(size, min(1.0, max(_SMALLEST_SHARE, rate / peak))) for size, rate in points]
