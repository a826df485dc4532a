"""Where operations run: one small interface, a CPU device and a CUDA device behind it.

A *token* is what a runtime returns for an operation: its start and end. On a CPU device an operation has ended when its
body returns. On CUDA the operations of the GPU's resources have then only been issued: others wait for them by events.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from lazytrain.errors import InputError
from lazytrain.executor.saved import Box
from lazytrain.schedule.program import Op, Resource

Token = tuple[Any, Any]
AHEAD = 3  # CUDA: operations a stream may have issued but not finished, so that memory follows the program


class Runtime(Protocol):
    device: torch.device
    non_blocking: bool

    def worker(self, resource: Resource) -> AbstractContextManager[None]:
        """Set-up of the thread that serves a resource."""

    def run(self, op: Op, waits: Sequence[Token], body: Callable[[], None]) -> Token:
        """Runs an operation after the operations of ``waits`` have ended."""

    def retire(self, payload: Any, releases: Sequence[Token]) -> None:
        """Frees a buffer's payload when the operations that release it have really ended."""

    def seconds(self, token: Token) -> tuple[float, float]:
        """Start and end, s since the runtime was made."""

    def now(self) -> float:
        """s since the runtime was made."""

    def host_empty(self, nbytes: int) -> Tensor:
        """Host memory (uint8) that the device can copy from and to."""

    def upload(self, tensor: Tensor) -> Tensor:
        """A small tensor on the device, ready for use by any stream."""

    def close(self) -> None:
        """Waits for the device and gives back what the runtime holds."""


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _drop(payload: Any) -> None:
    if isinstance(payload, Box):
        payload.storages = None


class CpuRuntime:
    """The CPU as a device. PyTorch's thread count is per calling thread (OpenMP), so each worker sets its own."""

    non_blocking = False

    def __init__(self, compute_threads: int | None = None, cpu_threads: int | None = None):
        self.device = torch.device("cpu")
        compute = compute_threads or max(1, cores() - 1)
        self._threads = {Resource.COMPUTE: compute, Resource.CPU: cpu_threads or max(1, cores() - compute)}
        self._origin = time.perf_counter()

    @contextmanager
    def worker(self, resource: Resource) -> Iterator[None]:
        torch.set_num_threads(self._threads.get(resource, 1))
        yield

    def run(self, op: Op, waits: Sequence[Token], body: Callable[[], None]) -> Token:
        start = time.perf_counter()
        body()
        return start, time.perf_counter()

    def retire(self, payload: Any, releases: Sequence[Token]) -> None:
        _drop(payload)

    def seconds(self, token: Token) -> tuple[float, float]:
        return token[0] - self._origin, token[1] - self._origin

    def now(self) -> float:
        return time.perf_counter() - self._origin

    def host_empty(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def upload(self, tensor: Tensor) -> Tensor:
        return tensor

    def close(self) -> None:
        pass


class CudaRuntime:
    """A CUDA GPU: a stream each for compute, H2D and D2H; CPU operations wait for events; host slabs are pinned."""

    non_blocking = True

    def __init__(self, device: torch.device, cpu_threads: int | None = None):
        self.device = device
        self._cpu_threads = cpu_threads or max(1, cores() - 3)
        self._streams = {r: torch.cuda.Stream(device) for r in (Resource.COMPUTE, Resource.H2D, Resource.D2H)}
        self._issued: dict[Resource, deque[Any]] = {r: deque() for r in self._streams}
        self._retired: deque[tuple[Any, list[Any]]] = deque()
        self._pinned: list[Tensor] = []
        self._first = torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        self._first.record(torch.cuda.current_stream(device))
        self._first.synchronize()
        self._origin = time.perf_counter()

    @contextmanager
    def worker(self, resource: Resource) -> Iterator[None]:
        torch.cuda.set_device(self.device)
        torch.set_num_threads(self._cpu_threads if resource is Resource.CPU else 1)
        stream = self._streams.get(resource)
        with torch.cuda.stream(stream) if stream is not None else nullcontext():
            yield

    def run(self, op: Op, waits: Sequence[Token], body: Callable[[], None]) -> Token:
        events = [token[1] for token in waits if isinstance(token[1], torch.cuda.Event)]
        stream = self._streams.get(op.resource)
        if stream is None:
            for event in events:
                event.synchronize()
            began = time.perf_counter()
            body()
            return began, time.perf_counter()
        issued = self._issued[op.resource]
        if len(issued) >= AHEAD:
            issued.popleft().synchronize()
        self._reap()
        for event in events:
            stream.wait_event(event)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record(stream)
        body()
        end.record(stream)
        issued.append(end)
        return start, end

    def retire(self, payload: Any, releases: Sequence[Token]) -> None:
        self._retired.append((payload, [t[1] for t in releases if isinstance(t[1], torch.cuda.Event)]))

    def _reap(self) -> None:
        for _ in range(len(self._retired)):
            try:
                payload, events = self._retired.popleft()
            except IndexError:  # another stream's thread was here
                return
            if all(event.query() for event in events):
                _drop(payload)
            else:
                self._retired.append((payload, events))

    def seconds(self, token: Token) -> tuple[float, float]:
        start, end = token
        if isinstance(start, float):
            return start - self._origin, end - self._origin
        end.synchronize()
        return self._first.elapsed_time(start) / 1e3, self._first.elapsed_time(end) / 1e3

    def now(self) -> float:
        return time.perf_counter() - self._origin

    def host_empty(self, nbytes: int) -> Tensor:
        """Registered, not allocated, as page-locked memory: PyTorch's own allocator rounds up to powers of two."""
        slab = torch.empty(max(nbytes, 1), dtype=torch.uint8)
        error = torch.cuda.cudart().cudaHostRegister(slab.data_ptr(), slab.numel(), 0)
        if int(error) != 0:
            raise InputError(f"{nbytes / 2**30:.2f} GiB of host memory cannot be page-locked (CUDA error {int(error)})")
        self._pinned.append(slab)
        return slab[:nbytes]

    def upload(self, tensor: Tensor) -> Tensor:
        moved = tensor.to(self.device)
        torch.cuda.current_stream(self.device).synchronize()
        return moved

    def close(self) -> None:
        torch.cuda.synchronize(self.device)
        self._retired.clear()
        for slab in self._pinned:
            torch.cuda.cudart().cudaHostUnregister(slab.data_ptr())
        self._pinned.clear()


def make_runtime(device: str, compute_threads: int | None = None, cpu_threads: int | None = None) -> Runtime:
    """The runtime of ``cpu``, ``cuda`` or ``cuda:N``; InputError where there is no such device."""
    kind = device.split(":")[0]
    if kind == "cpu":
        return CpuRuntime(compute_threads, cpu_threads)
    if kind != "cuda":
        raise InputError(f"device '{device}': the executor runs on cpu or cuda")
    if not torch.cuda.is_available():
        raise InputError(f"device '{device}': PyTorch finds no CUDA GPU here")
    index = torch.device(device).index
    return CudaRuntime(torch.device("cuda", torch.cuda.current_device() if index is None else index), cpu_threads)
