"""Operations that run at once and slow each other down, as fluid flows: no events per chunk.

``Rates`` is the one place where the speed of a running operation is decided. It sees all operations that run at this
moment and answers with a factor for each: 1 means its own duration. Full fidelity (links slower when both directions
run, DRAM, a drive's cache) grows here as more functions of this type, multiplied with each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import simpy

from lazytrain.schedule.program import Op


@dataclass(slots=True, eq=False)
class Job:
    """An operation being served. ``left`` is what remains of its duration alone (s), as of time ``since``."""

    op: Op
    demand: float  # DRAM bytes/s at full speed
    left: float
    since: float
    done: simpy.Event
    speed: float = 0.0
    timer: simpy.Event | None = None


Rates = Callable[[Sequence[Job]], Sequence[float]]


def dram_rates(bandwidth: float) -> Rates:
    """Host DRAM of ``bandwidth`` bytes/s: when more is demanded, all that use it slow down by the same factor."""

    def rates(running: Sequence[Job]) -> list[float]:
        total = sum(job.demand for job in running)
        if total <= bandwidth:
            return [1.0] * len(running)
        return [bandwidth / total if job.demand else 1.0 for job in running]

    return rates


class Shared:
    """Serves any number of operations at once, each at the speed that ``rates`` gives it at every moment."""

    def __init__(self, env: simpy.Environment, rates: Rates):
        self.env, self.rates = env, rates
        self.running: list[Job] = []

    def run(self, op: Op, seconds: float) -> simpy.Event:
        """Starts an operation that takes ``seconds`` alone; the event fires at its end."""
        demand = op.dram_bytes / seconds if seconds > 0 else 0.0
        job = Job(op, demand, seconds, self.env.now, self.env.event())
        self.running.append(job)
        self._respeed()
        return job.done

    def _respeed(self) -> None:
        now = self.env.now
        for job, speed in zip(self.running, self.rates(self.running), strict=True):
            if speed != job.speed:
                job.left = max(0.0, job.left - job.speed * (now - job.since))
                job.since, job.speed = now, speed
                job.timer = timer = self.env.timeout(job.left / speed)
                assert timer.callbacks is not None
                timer.callbacks.append(partial(self._finish, job))

    def _finish(self, job: Job, event: simpy.Event) -> None:
        if event is job.timer:  # else the speed has changed since: a newer timer runs
            self.running.remove(job)
            job.done.succeed()
            self._respeed()
