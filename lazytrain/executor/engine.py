"""Serves a program's operations: one worker thread a resource, in list order, waiting for dependencies only.

Knows nothing of what operations do. ``execute`` does them; ``release`` is called when one has ended (or, on CUDA, was
issued), before anything that depends on it may start.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from lazytrain.errors import ExecutionError
from lazytrain.executor.runtime import Runtime, Token
from lazytrain.schedule.program import Op, Resource, StepProgram

KEPT_STEPS = 4  # steps whose tokens stay: dependencies look one step back, reports a few


class Interval(NamedTuple):
    """When an operation ran, s since the runtime was made."""

    op: int
    start: float
    end: float


class _Stopped(Exception):
    """Raised in a worker when another part of the run has failed or stopped."""


class Engine:
    """Runs steps of a program. ``start`` once, ``wait`` as often as wanted, ``stop`` always, also after a failure."""

    def __init__(
        self,
        program: StepProgram,
        runtime: Runtime,
        execute: Callable[[Op, int], None],
        release: Callable[[Op, Mapping[int, Token]], None],
    ):
        self.program, self.runtime = program, runtime
        self._execute, self._release = execute, release
        self._queues = {r: list(program.on(r)) for r in Resource}
        self._done = [0] * len(program.ops)  # steps in which the operation has ended (CUDA: was issued)
        self._tokens: dict[int, dict[int, Token]] = {}
        self._changed = threading.Condition()
        self._failure: BaseException | None = None
        self._failed_op = ""
        self._halt = False
        self._threads: list[threading.Thread] = []

    # --- the caller's side -----------------------------------------------------------------------------------------
    def start(self, steps: int) -> None:
        for resource, ops in self._queues.items():
            if ops:
                thread = threading.Thread(
                    target=self._serve, args=(resource, ops, steps), name=f"lazytrain {resource}", daemon=True
                )
                self._threads.append(thread)
                thread.start()

    def wait(self, ready: Callable[[], bool]) -> None:
        """Blocks until ``ready()``; raises the first cause when the run has failed."""
        with self._changed:
            while not ready() and self._failure is None:
                self._changed.wait()
        if self._failure is not None:
            if isinstance(self._failure, (ExecutionError, KeyboardInterrupt)):
                raise self._failure
            raise ExecutionError(
                f"{self._failed_op} failed: {type(self._failure).__name__}: {self._failure}"
            ) from self._failure

    def wait_op(self, op: int, step: int) -> None:
        self.wait(lambda: self._done[op] > step)

    def wait_all(self, steps: int) -> None:
        self.wait(lambda: min(self._done, default=steps) >= steps)

    def notify(self) -> None:
        """Wakes workers that wait for something the caller has just provided."""
        with self._changed:
            self._changed.notify_all()

    def stop(self) -> None:
        """Ends all workers after the operation each is in, and waits for them."""
        with self._changed:
            self._halt = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def intervals(self, step: int) -> list[Interval]:
        """What was recorded of a step, by operation id; empty once it is too old."""
        tokens = self._tokens.get(step, {})
        return [Interval(op, *self.runtime.seconds(tokens[op])) for op in sorted(tokens)]

    def interval(self, op: int, step: int) -> Interval:
        """When one operation of a recent step ran."""
        return Interval(op, *self.runtime.seconds(self._tokens[step][op]))

    def recorded_steps(self) -> list[int]:
        return sorted(self._tokens)

    # --- the workers' side -----------------------------------------------------------------------------------------
    def until(self, ready: Callable[[], bool]) -> None:
        """Blocks a worker until ``ready()``; leaves the worker when the run ends before that."""
        with self._changed:
            while not self._halt and self._failure is None and not ready():
                self._changed.wait()
            if self._halt or self._failure is not None:
                raise _Stopped

    def _serve(self, resource: Resource, ops: Sequence[Op], steps: int) -> None:
        label = f"worker of {resource}"
        try:
            with self.runtime.worker(resource):
                for step in range(steps):
                    for op in ops:
                        label = f"step {step}: {op.label}"
                        self._one(op, step)
        except _Stopped:
            pass
        except BaseException as error:  # whatever it is, the run must end with it as its first cause
            with self._changed:
                if self._failure is None:
                    self._failure, self._failed_op = error, label
                self._changed.notify_all()

    def _one(self, op: Op, step: int) -> None:
        done = self._done
        self.until(lambda: all(done[d] > step - lag for d, lag in op.deps))
        waits = [token for d, lag in op.deps if (token := self._tokens.get(step - lag, {}).get(d)) is not None]
        token = self.runtime.run(op, waits, lambda: self._execute(op, step))
        with self._changed:
            of_step = self._tokens.setdefault(step, {})
            of_step[op.id] = token
            for old in [s for s in self._tokens if s <= step - KEPT_STEPS]:
                del self._tokens[old]
        self._release(op, of_step)
        with self._changed:
            done[op.id] = step + 1
            self._changed.notify_all()
