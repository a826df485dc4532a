"""What the operating system says: RAM and its limits, cores, NUMA nodes, file systems. No torch here."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from pathlib import Path

_CGROUPS = (
    # (limit, current, file with the reclaimable page cache as "inactive_file" or "total_inactive_file")
    ("memory.max", "memory.current", "memory.stat"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
)


@dataclass(frozen=True)
class Memory:
    """Bytes of RAM: all that this process could ever use, and what is free for it now."""

    limit: float
    available: float
    source: str


def memory(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> Memory:
    """RAM from ``/proc/meminfo``, lowered to the control group's limit where there is one."""
    fields = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines() if ":" in line)
    limit, available = (float(fields[key].split()[0]) * 1024 for key in ("MemTotal", "MemAvailable"))
    for maximum, current, statistics in _CGROUPS:
        bound = _number(cgroup / maximum)
        if bound is not None and bound < limit:
            used = (_number(cgroup / current) or 0.0) - _reclaimable(cgroup / statistics)
            return Memory(bound, min(available, max(0.0, bound - used)), f"control group limit {maximum}")
    return Memory(limit, available, "/proc/meminfo")


def resident_bytes() -> float:
    """Resident memory of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return float(line.split()[1]) * 1024
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * 1024


def core_count(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Cores this process may use: its affinity mask, lowered to the control group's CPU quota."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
        if quota != "max":
            cores = min(cores, max(1, round(float(quota) / float(period))))
    except (OSError, ValueError):
        pass
    return cores


def other_load() -> float:
    """Processes that wanted a core over the last minute, by the kernel's load average."""
    return os.getloadavg()[0]


def numa_nodes() -> int:
    """NUMA nodes of the machine (1 where the kernel does not say)."""
    return max(1, len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))))


def memlock_limit() -> float | None:
    """RLIMIT_MEMLOCK in bytes, or None where it is unlimited."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else float(soft)


def cpu_name() -> tuple[str, str]:
    """(model name, vendor) of the CPU, as the kernel prints them."""
    fields = {"model name": "CPU", "vendor_id": "unknown"}
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() in fields and value.strip():
                fields[key.strip()] = value.strip()
    except OSError:
        pass
    return fields["model name"], fields["vendor_id"]


def file_system(directory: Path) -> str:
    """Type of the file system that holds ``directory``, such as ``ext4`` or ``tmpfs``."""
    found, kind = "", "unknown"
    try:
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return kind
    real = directory.resolve()
    for line in mounts:
        left, _, right = line.partition(" - ")
        point = left.split()[4].replace("\\040", " ")
        if len(point) >= len(found) and real.is_relative_to(point):
            found, kind = point, right.split()[0]
    return kind


def _number(path: Path) -> float | None:
    try:
        return float(path.read_text())
    except (OSError, ValueError):  # absent, or "max"
        return None


def _reclaimable(path: Path) -> float:
    try:
        fields = dict(line.split() for line in path.read_text().splitlines() if len(line.split()) == 2)
    except OSError:
        return 0.0
    return float(fields.get("inactive_file", fields.get("total_inactive_file", 0)))
