"""Measuring a drive: burst and sustained write, read, latency, past the page cache (O_DIRECT).

A probe that is faster than the drive's link or than RAM itself has measured a cache and is refused.
"""

from __future__ import annotations

import errno
import mmap
import os
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from lazytrain.errors import ProfileError
from lazytrain.hwprofiles.probes_system import file_system
from lazytrain.hwprofiles.schema import DRIVE_LINK_BYTES_PER_S
from lazytrain.units import format_bytes, format_rate

BLOCK = 8 << 20  # bytes of one request: large enough to reach a drive's rate, aligned to any sector
SMALL = 4096
QUICK_BYTES = 256 << 20
FULL_BYTES = 4 << 30
DEPTH = 4  # requests in flight
WRITE_LIMIT_S = 40.0  # a slow drive is written for this long at most
_IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")


class ProbeRefused(ProfileError):
    """A probe could not measure what it should, or measured something else (a cache)."""


@dataclass(frozen=True)
class DiskRates:
    """Rates in bytes/s, latency in seconds, capacity in free bytes, and how they were taken."""

    read: float
    write: float
    sustained_write: float
    latency: float
    capacity: float
    source: str
    sustained_source: str


class BlockFile(Protocol):
    """What a probe needs of a file: blocks written and read by index, past the page cache if ``direct``."""

    direct: bool

    def write(self, index: int) -> None: ...
    def read(self, index: int) -> None: ...
    def read_small(self, index: int) -> None: ...
    def finish(self) -> None: ...
    def close(self) -> None: ...


class DirectFile:
    """A probe file that has no name from the start, so that it vanishes however the process ends."""

    def __init__(self, directory: Path):
        path = directory / f".lazytrain-probe-{os.getpid()}-{threading.get_ident()}"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
        try:
            self._fd, self.direct = os.open(path, flags | os.O_DIRECT, 0o600), True
        except OSError as problem:
            if problem.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise
            path.unlink(missing_ok=True)  # some file systems create the file before they refuse O_DIRECT
            self._fd, self.direct = os.open(path, flags, 0o600), False
        os.unlink(path)
        self._local = threading.local()
        self._pattern = os.urandom(1 << 20) * (BLOCK >> 20)  # not compressible, unlike zeros

    def _buffer(self) -> mmap.mmap:
        """A page-aligned block of this thread."""
        if not hasattr(self._local, "buffer"):
            self._local.buffer = mmap.mmap(-1, BLOCK)
            self._local.buffer.write(self._pattern)
        buffer: mmap.mmap = self._local.buffer
        return buffer

    def write(self, index: int) -> None:
        if os.pwritev(self._fd, [self._buffer()], index * BLOCK) != BLOCK:
            raise OSError(errno.ENOSPC, "short write")

    def read(self, index: int) -> None:
        if os.preadv(self._fd, [self._buffer()], index * BLOCK) != BLOCK:
            raise OSError(errno.EIO, "short read")

    def read_small(self, index: int) -> None:
        with memoryview(self._buffer()) as view, view[:SMALL] as part:
            os.preadv(self._fd, [part], index * BLOCK)

    def finish(self) -> None:
        """Everything written is on the drive, and none of it in the page cache."""
        os.fdatasync(self._fd)
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        os.close(self._fd)


def measure_disk(
    directory: Path,
    *,
    quick: bool,
    memory_copy_rate: float,
    drives: int = 1,
    open_file: Callable[[Path], BlockFile] = DirectFile,
    clock: Callable[[], float] = time.perf_counter,
    depth: int = DEPTH,
) -> DiskRates:
    """Write and read a probe file in ``directory``; it is gone afterwards, whatever happens.

    ``memory_copy_rate`` (bytes/s of a copy in RAM) bounds what a drive can be. Raises ProbeRefused when the directory
    is in memory, the drive is full, or a rate can only come from a cache.
    """
    kind = file_system(directory)
    if kind in _IN_MEMORY:
        raise ProbeRefused(f"{directory} is on {kind}, which is RAM: choose a directory on the drive")
    size = QUICK_BYTES if quick else FULL_BYTES
    free = _free_bytes(directory)
    if not quick:
        size = int(min(size, max(QUICK_BYTES, free / 10 // BLOCK * BLOCK)))
    if free < size + BLOCK:
        raise ProbeRefused(f"{directory}: {format_bytes(free)} free, the probe writes {format_bytes(size)}")
    try:
        file = open_file(directory)
    except OSError as problem:
        raise ProbeRefused(f"{directory}: cannot write a probe file: {problem.strerror}") from None
    try:
        return _measure(file, directory, size, quick, free, memory_copy_rate, drives, clock, depth)
    except OSError as problem:
        if problem.errno == errno.ENOSPC:
            raise ProbeRefused(f"{directory}: the drive filled up during the probe of {format_bytes(size)}") from None
        raise ProbeRefused(f"{directory}: the probe failed: {problem.strerror or problem}") from None
    finally:
        file.close()


def _measure(
    file: BlockFile,
    directory: Path,
    size: int,
    quick: bool,
    free: float,
    memory_copy_rate: float,
    drives: int,
    clock: Callable[[], float],
    depth: int,
) -> DiskRates:
    count = size // BLOCK
    start = clock()
    ends = _run(file.write, count, depth, clock, start + WRITE_LIMIT_S)
    file.finish()
    ends[-1] = clock()
    written = len(ends)
    window = max(1, written // 4) if quick else max(1, min(QUICK_BYTES // BLOCK, written // 4))
    slowest = min(_window_rates(start, ends, window))
    burst = written * BLOCK / (ends[-1] - start) if quick else window * BLOCK / (ends[window - 1] - start)
    reads = min(written, QUICK_BYTES // BLOCK)
    start = clock()
    read_ends = _run(file.read, reads, depth, clock, start + WRITE_LIMIT_S)
    read = len(read_ends) * BLOCK / (read_ends[-1] - start)
    small = []
    for i in range(64):
        begin = clock()
        file.read_small((i * 7919) % written)
        small.append(clock() - begin)
    for name, rate in (("read", read), ("write", burst)):
        check_plausible(name, rate, directory, memory_copy_rate, drives)
    how = "O_DIRECT" if file.direct else "buffered with fdatasync, O_DIRECT refused by the file system"
    source = f"{how}, {written * BLOCK >> 20} MiB in blocks of {BLOCK >> 20} MiB, {depth} in flight, {directory}"
    part = "quarter" if quick else f"window of {window * BLOCK >> 20} MiB"
    note = f"slowest {part} of one write ({source}); a drive's cache may be larger than that"
    return DiskRates(read, burst, min(slowest, burst), statistics.median(small), free, source, note)


def check_plausible(name: str, rate: float, directory: Path, memory_copy_rate: float, drives: int = 1) -> None:
    """Refuse a rate (bytes/s) above the drives' PCIe link or above a copy in RAM: it comes from the page cache."""
    link = DRIVE_LINK_BYTES_PER_S * drives
    if rate > link:
        bound, what = link, f"{drives} drive(s) on PCIe 5 x4 can move"
    elif rate > memory_copy_rate:
        bound, what = memory_copy_rate, "a copy in RAM reaches"
    else:
        return
    raise ProbeRefused(
        f"{directory}: {name} measured {format_rate(rate)}, more than {what} ({format_rate(bound)}): "
        "this is the page cache, not the drive"
    )


def _run(
    act: Callable[[int], None], count: int, depth: int, clock: Callable[[], float], deadline: float
) -> list[float]:
    """Act on blocks 0.., ``depth`` at a time, until done or past the deadline; times at which each ended, rising."""
    ends: list[float] = []
    errors: list[BaseException] = []
    lock = threading.Lock()
    position = 0

    def work() -> None:
        nonlocal position
        while True:
            with lock:
                index = position
                if index >= count or errors or (index >= 4 and ends and ends[-1] > deadline):
                    return
                position += 1
            try:
                act(index)
            except BaseException as problem:  # handed to the caller's thread below
                with lock:
                    errors.append(problem)
                return
            with lock:
                ends.append(clock())

    if depth == 1:
        work()
    else:
        threads = [threading.Thread(target=work, name=f"probe-{i}") for i in range(depth)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]
    return ends


def _window_rates(start: float, ends: list[float], window: int) -> list[float]:
    """Bytes/s of consecutive windows of blocks; a shorter rest at the end joins the last window."""
    rates, begin, first = [], start, 0
    while first < len(ends):
        last = first + window if len(ends) - first >= 2 * window else len(ends)
        rates.append((last - first) * BLOCK / (ends[last - 1] - begin))
        begin, first = ends[last - 1], last
    return rates


def _free_bytes(directory: Path) -> float:
    try:
        status = os.statvfs(directory)
    except OSError as problem:
        raise ProbeRefused(f"{directory}: {problem.strerror}") from None
    return float(status.f_bavail * status.f_frsize)
