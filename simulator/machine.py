"""The machine as SimPy processes: one process a resource, serving its operations in list order, step after step."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import replace

import numpy as np
import simpy

from lazytrain.errors import InputError
from lazytrain.schedule.program import Op, StepProgram
from lazytrain.simulator.graph import Graph, check
from lazytrain.simulator.result import Simulation, Steadiness, summarise
from lazytrain.simulator.sharing import Rates, Shared, dram_rates

LONGEST_CYCLE = 8  # steps after which a repeating pattern of steps is still recognised
SETTLING = 8  # more steps that may run, once steps repeat, until the earlier ones have ended


class Machine:
    """Runs steps until they repeat, at most ``max_steps``, and records every start and end (s since the run began)."""

    def __init__(self, graph: Graph, seconds: list[float], max_steps: int, rates: Rates | None):
        self.graph, self.seconds, self.max_steps = graph, seconds, max_steps
        self.env = simpy.Environment()
        self.shared = Shared(self.env, rates) if rates else None
        self.start: list[list[float]] = []
        self.end: list[list[float]] = []
        self.ended: list[dict[int, simpy.Event]] = []  # by step: the operations that another resource waits for
        self.finished: list[list[simpy.Event]] = []  # by step: one event a resource
        self.same = [self._elsewhere(i, deps) for i, deps in enumerate(graph.same)]
        self.previous = [self._elsewhere(i, deps) for i, deps in enumerate(graph.previous)]
        self.watched = sorted({d for deps in (*self.same, *self.previous) for d in deps})

    def _elsewhere(self, i: int, deps: tuple[int, ...]) -> list[int]:
        """The dependencies on other resources; those on its own hold by its order."""
        ops = self.graph.ops
        return [d for d in deps if ops[d].resource is not ops[i].resource]

    def _open(self, step: int) -> None:
        """Makes the records of a step when the first resource reaches it."""
        if step == len(self.start):
            n, env = len(self.graph.ops), self.env
            self.start.append([float("nan")] * n)
            self.end.append([float("nan")] * n)
            self.ended.append({i: env.event() for i in self.watched})
            self.finished.append([env.event() for _ in self.graph.lanes])

    def serve(self, number: int, lane: list[int]) -> Generator[simpy.Event, None, None]:
        """The process of one resource."""
        env, ops, seconds, shared = self.env, self.graph.ops, self.seconds, self.shared
        for step in range(self.max_steps + SETTLING):
            self._open(step)
            start, end, ended = self.start[step], self.end[step], self.ended[step]
            for i in lane:
                for d in self.same[i]:
                    if not ended[d].processed:
                        yield ended[d]
                if step:
                    for d in self.previous[i]:
                        if not self.ended[step - 1][d].processed:
                            yield self.ended[step - 1][d]
                start[i] = env.now
                yield env.timeout(seconds[i]) if shared is None else shared.run(ops[i], seconds[i])
                end[i] = env.now
                if i in ended:
                    ended[i].succeed()
            self.finished[step][number].succeed()

    def watch(self, min_steps: int, tolerance: float) -> Generator[simpy.Event, None, Steadiness]:
        """Waits for whole steps until they repeat, and on until nothing of the steps before still runs."""
        marks: list[np.ndarray] = []  # by step: all starts and ends
        anchor = self.graph.anchor
        while len(marks) < self.max_steps:
            yield from self._whole_step(marks)
            if len(marks) >= min_steps and (found := steadiness(marks, anchor, tolerance)).steady:
                break
        else:
            return steadiness(marks, anchor, tolerance)
        # The last step repeats the one ``cycle`` earlier, and so will all that follow. What ran before that one has
        # other times: it must have ended, as it really did and as it would have, had the pattern always been there.
        cycle = found.cycle
        settled = max(float(m.max()) for m in marks[-1 - cycle : -1]) - cycle * found.period
        settled = max(settled, *(float(m.max()) for m in marks[: -1 - cycle]), 0.0)
        while marks[-1 - cycle][anchor] < settled and len(marks) < self.max_steps + SETTLING:
            yield from self._whole_step(marks)
        return replace(found, steps=len(marks))

    def _whole_step(self, marks: list[np.ndarray]) -> Generator[simpy.Event, None, None]:
        step = len(marks)
        self._open(step)
        for event in self.finished[step]:
            if not event.processed:
                yield event
        marks.append(np.array(self.start[step] + self.end[step]))

    def run(self, min_steps: int, tolerance: float) -> Steadiness:
        for number, lane in enumerate(self.graph.lanes.values()):
            self.env.process(self.serve(number, lane))
        found = self.env.run(self.env.process(self.watch(min_steps, tolerance)))
        assert isinstance(found, Steadiness)
        return found


def steadiness(marks: list[np.ndarray], anchor: int, tolerance: float) -> Steadiness:
    """Whether the last step repeats an earlier one: every start and end later by the same time.

    The start of one operation is not enough: a resource that is slower than the others may be hidden by slack for
    many steps before anything waits for it. Since the whole next step follows from the whole last one, a uniform shift
    repeats forever. Without one, the fastest-growing operation over the last half of the steps tells the period:
    no operation can fall behind by more than that in the long run (an upper bound, when nothing contends).
    """
    last = len(marks) - 1
    for cycle in range(1, min(LONGEST_CYCLE, last) + 1):
        shift = marks[last] - marks[last - cycle]
        if np.ptp(shift) <= tolerance * max(shift[anchor], 1e-12):
            return Steadiness(True, cycle, len(marks), float(shift[anchor]) / cycle, 0.0)
    half = max(1, len(marks) // 2)
    growth = (marks[last] - marks[last - half]) / half
    high, low = float(growth.max()), float(growth.min())
    return Steadiness(False, 1, len(marks), high, (high - low) / high if high else 0.0)


def contention(graph: Graph, seconds: list[float], bandwidth: float | None) -> Rates | None:
    """The DRAM's rates, or None when even the hungriest operation of every resource at once leaves some over."""
    if bandwidth is None:
        return None
    if not bandwidth > 0:
        raise InputError(f"dram_bandwidth: {bandwidth} bytes/s is not positive")
    demand = [op.dram_bytes / s if s > 0 else 0.0 for op, s in zip(graph.ops, seconds, strict=True)]
    most = sum(max(demand[i] for i in lane) for lane in graph.lanes.values())
    return dram_rates(bandwidth) if most > bandwidth else None


def simulate(
    program: StepProgram,
    *,
    dram_bandwidth: float | None = None,
    max_steps: int = 8,
    min_steps: int = 3,
    tolerance: float = 1e-6,
    durations: Callable[[Op], float] | None = None,
) -> Simulation:
    """Runs a program until its steps repeat within the relative ``tolerance``, or for ``max_steps`` steps.

    ``dram_bandwidth`` (bytes/s) is shared by the operations with ``dram_bytes``; None means that it never limits.
    ``durations`` gives an operation's seconds alone on its resource instead of ``op.seconds``.
    Raises DeadlockError or ProgramError for a program that cannot run.
    """
    if max_steps < 2 or min_steps < 2:
        raise InputError(f"max_steps {max_steps}, min_steps {min_steps}: a period needs at least 2 steps")
    graph = check(program)
    seconds = [op.seconds if durations is None else durations(op) for op in graph.ops]
    for op, value in zip(graph.ops, seconds, strict=True):
        if not 0 <= value < float("inf"):
            raise InputError(f"durations: {op.label} (id {op.id}) takes {value} s")
    machine = Machine(graph, seconds, max_steps, contention(graph, seconds, dram_bandwidth))
    found = machine.run(min_steps, tolerance)
    return summarise(program, graph, found, np.array(machine.start), np.array(machine.end))
