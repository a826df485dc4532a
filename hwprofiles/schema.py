"""What a hardware profile holds: GPU, link, host and NVMe parts, and the machine that combines them.

Every number is a ``Quantity`` (or a ``RateTable``) with its provenance; plain integers only count structure
(drives, NUMA nodes, threads).
"""

from __future__ import annotations

import datetime
import hashlib
import json
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from lazytrain.hwprofiles.quantity import (
    ByteRate,
    Bytes,
    Count,
    EfficiencyTable,
    FlopRate,
    FlopRateTable,
    Fraction,
    Frozen,
    MoneyRate,
    ParamRate,
    Quantity,
    RateTable,
    Ratio,
    Seconds,
    Watts,
)

# One drive on four PCIe 5 lanes moves at most 15.75 GB/s: a probe above this has measured the page cache.
DRIVE_LINK_BYTES_PER_S = 16e9

Name = Annotated[str, Field(min_length=1)]
Dtype = Literal["bf16", "fp16", "fp32", "fp16_fp16acc", "fp8"]


def _full_compute() -> Quantity:
    return Quantity.of(
        "100 %",
        "fraction",
        kind="assumed",
        source="no fit: rates as the tables give them",
        date=datetime.date(2026, 8, 1),
    )


class Gpu(Frozen):
    """The compute device: a CUDA or HIP GPU, or the CPU itself (``device: cpu``)."""

    name: Name
    vendor: str
    device: Literal["cuda", "cpu", "hip"] = "cuda"
    memory: Bytes = Field(description="as the driver reports it")
    reserved: Bytes = Field(description="not for a plan: context, cuBLAS workspace, allocator slack")
    memory_bandwidth: ByteRate = Field(description="peak of the device memory")
    memory_efficiency: Fraction = Field(description="share of memory_bandwidth that elementwise kernels reach")
    peak_flops: dict[Dtype, FlopRate] = Field(
        description="dense, fp32 accumulate. fp32 = without TF32 (torch's default precision 'highest')"
    )
    matmul_efficiency: EfficiencyTable = Field(description="FLOPs of one product -> share of peak_flops")
    attention_efficiency: EfficiencyTable = Field(
        description="FLOPs of one attention call -> share of peak_flops; FLOPs count the full square of scores, "
        "as torch's flop counter does, so a causal kernel that skips half looks twice as fast"
    )
    compute_efficiency: Fraction = Field(default_factory=_full_compute, description="one multiplier on all compute")
    layer_rate_forward: dict[Dtype, FlopRateTable] | None = Field(
        default=None, description="forward FLOPs of one decoder-layer call, attention included -> FLOP/s of forward"
    )
    layer_rate_backward: dict[Dtype, FlopRateTable] | None = Field(
        default=None, description="forward FLOPs of the call -> FLOP/s of backward, counted as twice the forward FLOPs"
    )
    kernel_latency: Seconds = Field(description="seconds to launch one kernel")
    compute_threads: int | None = Field(default=None, gt=0, description="torch threads that compute (cpu device only)")
    attention_backend: Literal["flash", "efficient", "math"] = "flash"
    linear_attention_backend: Literal["fla", "torch"] = Field(default="torch", description="gated-delta-net kernels")
    power: Watts | None = Field(default=None, description="board power limit")
    price: MoneyRate | None = Field(default=None, description="USD/h in files, USD/s in code")

    @model_validator(mode="before")
    @classmethod
    def _linear_backend_of_device(cls, data: Any) -> Any:
        if isinstance(data, dict) and "linear_attention_backend" not in data:
            return {**data, "linear_attention_backend": "fla" if data.get("device", "cuda") == "cuda" else "torch"}
        return data

    @model_validator(mode="after")
    def _possible(self) -> Gpu:
        if self.reserved.si >= self.memory.si:
            raise ValueError(f"reserved ({self.reserved}) leaves nothing of memory ({self.memory})")
        if not self.peak_flops:
            raise ValueError("peak_flops names no dtype")
        if (self.compute_threads is not None) != (self.device == "cpu"):
            raise ValueError("compute_threads belongs to device cpu, and only there")
        if (self.layer_rate_forward is None) != (self.layer_rate_backward is None):
            raise ValueError("layer_rate_forward and layer_rate_backward come together")
        return self

    @property
    def usable_bytes(self) -> float:
        """Memory a plan may use."""
        return self.memory.si - self.reserved.si


class Link(Frozen):
    """Copies between host and device. On a cpu device: copies between two buffers in RAM."""

    name: Name
    h2d: ByteRate = Field(description="pinned host to device, alone")
    d2h: ByteRate = Field(description="device to pinned host, alone")
    duplex: Ratio = Field(description="both directions at once, total over the faster one alone (1 x to 2 x)")
    pageable: ByteRate = Field(description="from memory that is not pinned")
    latency: Seconds = Field(description="seconds each copy costs beside its bytes")


class Host(Frozen):
    """CPU and RAM."""

    name: Name
    memory: Bytes = Field(description="RAM that this process may fill")
    usable: Fraction = Field(description="share of memory a plan may fill, baseline included")
    pin_limit: Bytes | None = Field(default=None, description="bytes that may be page-locked; absent = all usable")
    dram_bandwidth: ByteRate = Field(description="achieved by a triad on all cores, reads and writes counted")
    cores: Count = Field(description="physical cores")
    adamw: dict[str, ParamRate] = Field(description="moment codec -> parameters updated per second, all workers")
    norm_bandwidth: ByteRate | None = Field(default=None, description="bytes per second of a sum of squares")
    numa_nodes: int = Field(default=1, gt=0)
    baseline: Bytes = Field(description="used before a plan: OS, and a Python process with torch imported")

    @model_validator(mode="after")
    def _possible(self) -> Host:
        if "fp32" not in self.adamw:
            raise ValueError("adamw.fp32 is missing: the rate of the CPU's AdamW with fp32 moments")
        if self.baseline.si >= self.usable_bytes:
            raise ValueError(f"baseline ({self.baseline}) leaves nothing of {self.usable} of memory ({self.memory})")
        if self.pin_limit is not None and self.pin_limit.si > self.memory.si:
            raise ValueError(f"pin_limit ({self.pin_limit}) is above memory ({self.memory})")
        return self

    @property
    def usable_bytes(self) -> float:
        """Bytes that plan and baseline may fill together."""
        return self.memory.si * self.usable.si

    @property
    def pin_limit_bytes(self) -> float:
        """Bytes that may be page-locked, never more than the usable ones."""
        return self.usable_bytes if self.pin_limit is None else min(self.pin_limit.si, self.usable_bytes)


class Nvme(Frozen):
    """A drive, or several striped as one: rates and sizes are those of the stripe."""

    name: Name
    capacity: Bytes
    read: ByteRate
    write: ByteRate = Field(description="burst: while the drive's cache takes it")
    sustained_write: ByteRate = Field(description="after the cache is full")
    cache: Bytes | None = Field(default=None, description="bytes written at the burst rate; absent = no cliff known")
    latency: Seconds = Field(description="one small read")
    endurance: Bytes | None = Field(default=None, description="bytes that may be written over the drive's life (TBW)")
    drives: int = Field(default=1, gt=0)

    @model_validator(mode="after")
    def _possible(self) -> Nvme:
        if self.sustained_write.si > self.write.si:
            raise ValueError(f"sustained_write ({self.sustained_write}) is above write ({self.write})")
        limit = DRIVE_LINK_BYTES_PER_S * self.drives
        for field, rate in (("read", self.read), ("write", self.write)):
            if rate.si > limit:
                raise ValueError(
                    f"{field} ({rate}) is above the link of {self.drives} drive(s), {limit / 1e9:g} GB/s: page cache?"
                )
        return self


class Machine(Frozen):
    """One GPU, its link, the host, and perhaps a drive."""

    name: Name
    description: str = ""
    gpu: Gpu
    link: Link
    host: Host
    nvme: Nvme | None = None

    @property
    def usable_gpu_bytes(self) -> float:
        """Device memory a plan may use."""
        return self.gpu.usable_bytes

    @property
    def usable_host_bytes(self) -> float:
        """RAM that plan and ``host.baseline`` may fill together."""
        return self.host.usable_bytes

    @property
    def pin_limit_bytes(self) -> float:
        """Bytes that may be page-locked, never more than the usable ones."""
        return self.host.pin_limit_bytes

    def digest(self) -> str:
        """Short digest of all that changes costs: every SI number, count and backend; not names or provenance."""
        text = json.dumps(_numbers(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def to_data(self) -> dict[str, Any]:
        """Plain data with inline parts, as ``save_machine`` writes it and ``load_machine`` reads it."""
        data: dict[str, Any] = _plain(self)
        return data


_TEXT_FIELDS = {"name", "description", "vendor"}
_COMPUTED_FIELDS = {"dimension", "si", "sizes", "values"}


def _numbers(value: Any) -> Any:
    """The SI content of a model, without text and provenance."""
    if isinstance(value, Quantity):
        return value.si
    if isinstance(value, RateTable):
        return [value.sizes, value.values]
    if isinstance(value, Frozen):
        fields = {k: v for k, v in value if k not in _TEXT_FIELDS}
        return {k: _numbers(v) for k, v in fields.items()}
    if isinstance(value, dict):
        return {k: _numbers(v) for k, v in value.items()}
    return value


def _plain(value: Any) -> Any:
    """YAML-ready data: fields as written, computed and absent ones left out."""
    if isinstance(value, Frozen):
        return {k: _plain(v) for k, v in value if k not in _COMPUTED_FIELDS and v is not None}
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, tuple):
        return [_plain(v) for v in value]
    return value


PART_TYPES: dict[str, type[Gpu | Link | Host | Nvme]] = {"gpu": Gpu, "link": Link, "host": Host, "nvme": Nvme}
