"""Timing: medians within a time budget, and torch's thread count set for a while."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator


def median_seconds(
    act: Callable[[], object],
    *,
    budget_s: float,
    repeats: int = 15,
    sync: Callable[[], None] | None = None,
    minimum_s: float = 2e-4,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Median seconds of one ``act()``: one warm-up, then at least three samples and no more than the budget allows.

    Short acts are repeated inside a sample until it lasts ``minimum_s``. ``sync`` waits for the device.
    """

    def sample(times: int) -> float:
        if sync is not None:
            sync()
        begin = clock()
        for _ in range(times):
            act()
        if sync is not None:
            sync()
        return (clock() - begin) / times

    sample(1)
    samples = [sample(1)]
    spent = samples[0]
    times = max(1, min(100_000, round(minimum_s / max(spent, 1e-9))))
    if times > 1:
        samples, spent = [], 0.0
    while len(samples) < 3 or (len(samples) < repeats and spent < budget_s):
        samples.append(sample(times))
        spent += samples[-1] * times
    return statistics.median(samples)


def median_pair(
    first: Callable[[], object],
    second: Callable[[], object],
    *,
    budget_s: float,
    repeats: int = 15,
    sync: Callable[[], None] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[float, float]:
    """Median seconds of two acts of which the second needs the first, one after the other.

    One warm-up round, then rounds while the budget lasts: at least three, or two where they are far beyond it.
    """

    def timed(act: Callable[[], object]) -> float:
        begin = clock()
        act()
        if sync is not None:
            sync()
        return clock() - begin

    timed(first)
    timed(second)
    samples: list[tuple[float, float]] = []
    spent = 0.0
    while (
        len(samples) < 2 or (len(samples) < 3 and spent < 4 * budget_s) or (len(samples) < repeats and spent < budget_s)
    ):
        samples.append((timed(first), timed(second)))
        spent += sum(samples[-1])
    return statistics.median(a for a, _ in samples), statistics.median(b for _, b in samples)


@contextlib.contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """torch computes with ``count`` threads inside; the earlier number afterwards."""
    import torch

    earlier = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(earlier)
