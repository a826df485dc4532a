"""The engine with sleeping operations: its overlap against the simulator's, without a model or a device."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lazytrain.executor.engine import Engine, Interval
from lazytrain.executor.runtime import Token
from lazytrain.schedule.program import Op, Resource, StepProgram


class EmulatedRuntime:
    """Every operation takes ``seconds * scale``, however long the Python around it took."""

    non_blocking = False

    def __init__(self, scale: float):
        self.device, self._scale = torch.device("cpu"), scale
        self._origin = time.perf_counter()

    @contextmanager
    def worker(self, resource: Resource) -> Iterator[None]:
        yield

    def run(self, op: Op, waits: Sequence[Token], body: Callable[[], None]) -> Token:
        start = time.perf_counter()
        body()
        end = start + op.seconds * self._scale
        while (left := end - time.perf_counter()) > 0:
            time.sleep(left)
        return start, time.perf_counter()

    def retire(self, payload: Any, releases: Sequence[Token]) -> None:
        pass

    def seconds(self, token: Token) -> tuple[float, float]:
        return (token[0] - self._origin) / self._scale, (token[1] - self._origin) / self._scale

    def now(self) -> float:
        return (time.perf_counter() - self._origin) / self._scale

    def host_empty(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def upload(self, tensor: Tensor) -> Tensor:
        return tensor

    def close(self) -> None:
        pass


def emulate(program: StepProgram, steps: int, scale: float = 1.0) -> dict[int, list[Interval]]:
    """Intervals of the last few steps, in program seconds, when each operation sleeps for its duration times ``scale``.

    Sleeping is exact to about 0.1 ms: choose ``scale`` so that operations take several milliseconds.
    """
    engine = Engine(program, EmulatedRuntime(scale), lambda op, step: None, lambda op, tokens: None)
    try:
        engine.start(steps)
        engine.wait_all(steps)
    finally:
        engine.stop()
    return {step: engine.intervals(step) for step in engine.recorded_steps()}
