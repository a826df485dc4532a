"""Measuring copies between host and device, DRAM, the CPU optimizer, and the sum of squares.

On a cpu device, host and device are two buffers in the same RAM, copied by worker threads. torch is imported inside.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lazytrain.hwprofiles.probes_timing import median_seconds, torch_threads

if TYPE_CHECKING:
    import torch

MIB = 1 << 20
# A moment codec -> a function that, for a number of parameters, prepares one AdamW step and returns it.
AdamwSteps = Mapping[str, Callable[[int], Callable[[], object]]]


@dataclass(frozen=True)
class Copies:
    """Bytes/s of copies one way (each direction), both at once (total) and unpinned; seconds a copy costs."""

    h2d: float
    d2h: float
    both: float
    pageable: float
    latency: float


def fused_adamw_step(parameters: int) -> Callable[[], object]:
    """One fp32 AdamW step of torch's fused CPU kernel: parameters, gradients and both moments in fp32."""
    import torch

    param, grad, m, v = (torch.full((parameters,), 1e-3) for _ in range(4))
    step = torch.ones(())

    def update() -> object:
        return torch._fused_adamw_(
            [param],
            [grad],
            [m],
            [v],
            [],
            [step],
            lr=1e-4,
            beta1=0.9,
            beta2=0.999,
            weight_decay=0.01,
            eps=1e-8,
            amsgrad=False,
            maximize=False,
        )

    return update


# The one place that says which update is timed when the caller names none (this package may not import kernels).
DEFAULT_ADAMW: AdamwSteps = {"fp32": fused_adamw_step}


def measure_copies(device: str, size: int, threads: int, budget_s: float) -> Copies:
    """Copies of ``size`` bytes with ``threads`` torch threads each (only a cpu device uses threads to copy)."""
    return _cuda_copies(size, budget_s) if device != "cpu" else _ram_copies(size, threads, budget_s)


def _ram_copies(size: int, threads: int, budget_s: float) -> Copies:
    import torch

    host, device, out, back = (torch.full((size // 4,), 1.0) for _ in range(4))
    with torch_threads(threads):
        h2d = size / median_seconds(lambda: device.copy_(host), budget_s=budget_s)
        d2h = size / median_seconds(lambda: out.copy_(back), budget_s=budget_s)
        both = _both_at_once([(device, host), (out, back)], threads, size, budget_s)
        small, target = torch.ones(1), torch.ones(1)
        latency = median_seconds(lambda: target.copy_(small), budget_s=budget_s / 4, minimum_s=2e-3)
    return Copies(h2d, d2h, both, h2d, latency)


def _both_at_once(pairs: list[tuple[torch.Tensor, torch.Tensor]], threads: int, size: int, budget_s: float) -> float:
    """Total bytes/s of copies that run in two threads at the same time."""
    import torch

    one = median_seconds(lambda: pairs[0][0].copy_(pairs[0][1]), budget_s=budget_s / 4)
    rounds = max(3, int(budget_s / 2 / one / 2))
    gate = threading.Barrier(len(pairs) + 1)

    def copy(target: torch.Tensor, source: torch.Tensor) -> None:
        torch.set_num_threads(threads)
        gate.wait()
        for _ in range(rounds):
            target.copy_(source)

    workers = [threading.Thread(target=copy, args=pair) for pair in pairs]
    for worker in workers:
        worker.start()
    gate.wait()
    begin = time.perf_counter()
    for worker in workers:
        worker.join()
    return len(pairs) * rounds * size / (time.perf_counter() - begin)


def _cuda_copies(size: int, budget_s: float) -> Copies:
    import torch

    pinned, pinned_out = (torch.ones(size, dtype=torch.uint8, pin_memory=True) for _ in range(2))
    pageable = torch.ones(size, dtype=torch.uint8)
    device, device_out = (torch.ones(size, dtype=torch.uint8, device="cuda") for _ in range(2))
    up, down = torch.cuda.Stream(), torch.cuda.Stream()

    def both() -> None:
        with torch.cuda.stream(up):
            device.copy_(pinned, non_blocking=True)
        with torch.cuda.stream(down):
            pinned_out.copy_(device_out, non_blocking=True)

    def rate(act: Callable[[], object], moved: int) -> float:
        return moved / median_seconds(act, budget_s=budget_s, sync=torch.cuda.synchronize)

    tiny, tiny_device = torch.ones(1, pin_memory=True), torch.ones(1, device="cuda")
    return Copies(
        h2d=rate(lambda: device.copy_(pinned, non_blocking=True), size),
        d2h=rate(lambda: pinned_out.copy_(device_out, non_blocking=True), size),
        both=rate(both, 2 * size),
        pageable=rate(lambda: device.copy_(pageable), size),
        latency=median_seconds(
            lambda: tiny_device.copy_(tiny, non_blocking=True),
            budget_s=budget_s / 4,
            sync=torch.cuda.synchronize,
            minimum_s=2e-3,
        ),
    )


def pin_limit(memlock: float | None) -> float | None:
    """Bytes that can be page-locked, or None for no limit: RLIMIT_MEMLOCK counts only if pinning more than it fails.

    Native drivers pin past the limit; WSL and some containers do not.
    """
    if memlock is None:
        return None
    import torch

    try:
        torch.empty(int(memlock) + 64 * MIB, dtype=torch.uint8, pin_memory=True)
    except RuntimeError:
        return memlock
    return None


def triad_rate(size: int, threads: int, budget_s: float) -> float:
    """Bytes/s of ``a = b + s * c`` over three arrays of ``size`` bytes: two reads and one write counted."""
    import torch

    a, b, c = (torch.full((size // 4,), 1.0) for _ in range(3))
    with torch_threads(threads):
        return 3 * size / median_seconds(lambda: torch.add(b, c, alpha=3.0, out=a), budget_s=budget_s)


def adamw_rate(prepare: Callable[[int], Callable[[], object]], parameters: int, threads: int, budget_s: float) -> float:
    """Parameters updated per second by ``threads`` threads."""
    with torch_threads(threads):
        return parameters / median_seconds(prepare(parameters), budget_s=budget_s)


def sum_of_squares_rate(size: int, threads: int, budget_s: float) -> float:
    """Bytes/s at which a norm of fp32 numbers is taken."""
    import torch

    x = torch.full((size // 4,), 0.5)
    with torch_threads(threads):
        return size / median_seconds(lambda: torch.linalg.vector_norm(x), budget_s=budget_s)
