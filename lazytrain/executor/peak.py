"""Peak memory of this process, and allocator settings under which it follows what is really in use."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")

# <malloc.h>
_M_MMAP_THRESHOLD = -3


def _field(name: str) -> int:
    """A `kB` line of /proc/self/status in bytes; 0 where the system has none."""
    try:
        for line in _STATUS.read_text().splitlines():
            if line.startswith(name + ":"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return 0


def resident_bytes() -> int:
    """Resident memory of the process now."""
    return _field("VmRSS")


def peak_bytes() -> int:
    """Highest resident memory since the start of the process or the last ``reset_peak``."""
    return _field("VmHWM")


def reset_peak() -> bool:
    """Makes ``peak_bytes`` count from now; False where the system forbids it."""
    try:
        _CLEAR.write_text("5")
    except OSError:
        return False
    return True


_steady = False


def steady_allocator(mmap_threshold: int = 1 << 20) -> bool:
    """Fixes glibc's mmap threshold, so that freed tensors go back to the system; False where there is no glibc.

    By default the threshold grows to 32 MiB with the blocks that are freed, and freed activations stay in the heaps.
    Measured (40 M parameters, 8 layers, 512-token micro-batches, fp32, peak over plan with host / GPU homes): default
    1.14 / 1.08, 2 MiB 1.10 / 1.09, 1 MiB 1.02 / 1.05, for 7 % more CPU time; 256 KiB costs a third more and gains little.
    """
    global _steady
    if _steady or not sys.platform.startswith("linux"):
        return _steady
    try:
        _steady = bool(ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, mmap_threshold))
    except (OSError, AttributeError):
        return False
    return _steady
