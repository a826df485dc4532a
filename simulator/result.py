"""What a simulated run tells: the period, who works and who waits for whom, memory, phases."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lazytrain.schedule.plan import TIERS
from lazytrain.schedule.program import Kind, Resource, StepProgram
from lazytrain.simulator.graph import Graph
from lazytrain.simulator.memory import Curve, MemoryRecord, Peak, cut

Interval = tuple[int, float, float]  # operation id, start, end (s)

PHASE = {
    Kind.FORWARD: "forward",
    Kind.LOSS: "loss",
    Kind.RECOMPUTE_BOUNDARY: "backward",
    Kind.RECOMPUTE: "backward",
    Kind.BACKWARD: "backward",
}


@dataclass(frozen=True)
class Steadiness:
    """How steps repeat: every ``cycle`` steps, after ``steps`` simulated ones; ``period`` is the mean of a step (s).

    ``drift``: how differently operations moved on from step to step, relative to the period; 0 when steady.
    """

    steady: bool
    cycle: int
    steps: int
    period: float
    drift: float


@dataclass(frozen=True, eq=False)
class Simulation:
    """One simulated run of a program. All times in seconds, all memory in bytes.

    A step begins when its first compute operation starts; loads may start before that (a negative time), updates end
    after the next step has begun. "The steady step" is the last one whose successor was simulated, too.
    ``step_seconds = busy[compute] + exposed_seconds`` when steady.
    """

    step_seconds: float  # the period: mean of a repeated step
    first_step_seconds: float  # from the start of the run to the begin of the second step
    steady: bool
    cycle: int  # the pattern repeats every so many steps
    steps: int  # simulated steps
    drift: float  # 0 when steady; else the relative uncertainty of the period
    window_seconds: float  # from the steady step's begin to its successor's; step_seconds if steady and cycle is 1
    op_ids: np.ndarray
    start: np.ndarray  # [2, operations]: the steady step and its successor, since the steady step's begin
    end: np.ndarray
    busy: dict[Resource, float]  # a step's occupancy of each resource (longer than its work where operations contend)
    idle: dict[Resource, float]
    exposed: dict[Resource, float]  # compute's idle time, by the resource it waits for
    drain_seconds: float  # from the end of a step's last compute operation to the end of all its operations
    phases: dict[str, float]  # forward, loss, backward, tail (until the next step begins); they sum to a step
    memory: dict[str, Curve]  # by tier, over the steady step
    peaks: dict[str, Peak]  # by tier, within the steady step, times since its begin
    run_peaks: dict[str, Peak]  # by tier, from the run's start on, first steps included

    @property
    def exposed_seconds(self) -> float:
        """Time of a step in which compute waits."""
        return sum(self.exposed.values())

    @property
    def peak_bytes(self) -> dict[str, float]:
        return {tier: peak.bytes for tier, peak in self.run_peaks.items()}

    def intervals(self, steps: int = 1) -> list[Interval]:
        """(id, start, end) of every operation of the steady step, or of it and its successor (``steps=2``)."""
        return [
            (int(i), float(s), float(e))
            for k in range(steps)
            for i, s, e in zip(self.op_ids, self.start[k], self.end[k], strict=True)
        ]


def summarise(program: StepProgram, graph: Graph, found: Steadiness, start: np.ndarray, end: np.ndarray) -> Simulation:
    """The result of a run from the start and end (s) of every operation of every step (NaN where not reached)."""
    anchor, last = graph.anchor, found.steps - 1
    begin = [float(t) for t in start[: found.steps, anchor]]
    here = last - 1  # the steady step
    first = last - found.cycle  # one whole cycle of steps, ending with it
    window = begin[last] - begin[first]
    busy = {
        r: _overlap(start[:, lane], end[:, lane], begin[first], begin[last]) / found.cycle
        for r, lane in graph.lanes.items()
    }
    exposed = _exposed(graph, range(first, last), start, end)
    records = {tier: MemoryRecord(program, graph, tier, start, end) for tier in TIERS}
    curves = {tier: record.curve() for tier, record in records.items()}
    memory = {tier: cut(curve, begin[here], begin[last]) for tier, curve in curves.items()}
    return Simulation(
        step_seconds=found.period,
        first_step_seconds=begin[1],
        steady=found.steady,
        cycle=found.cycle,
        steps=found.steps,
        drift=found.drift,
        window_seconds=begin[last] - begin[here],
        op_ids=np.array([op.id for op in graph.ops]),
        start=start[here : last + 1] - begin[here],
        end=end[here : last + 1] - begin[here],
        busy={r: busy.get(r, 0.0) for r in Resource},
        idle={r: max(0.0, window / found.cycle - busy.get(r, 0.0)) for r in Resource},
        exposed={r: t / found.cycle for r, t in sorted(exposed.items(), key=lambda item: -item[1])},
        drain_seconds=float(end[here].max() - end[here, graph.anchor_lane[-1]]),
        phases=_phases(graph, here, start, end),
        memory=memory,
        peaks={tier: record.peak(curves[tier], begin[here], begin[last]) for tier, record in records.items()},
        run_peaks={tier: record.peak(curves[tier]) for tier, record in records.items()},
    )


def _overlap(start: np.ndarray, end: np.ndarray, begin: float, until: float) -> float:
    """Seconds of the intervals within [begin, until]; an operation that has started and not ended counts as running."""
    seen = np.isfinite(start)
    ends = np.where(np.isfinite(end[seen]), end[seen], np.inf)
    return float(np.clip(np.minimum(ends, until) - np.maximum(start[seen], begin), 0.0, None).sum())


def _exposed(graph: Graph, steps: range, start: np.ndarray, end: np.ndarray) -> dict[Resource, float]:
    """Compute's idle seconds during ``steps``, by the resource it waits for.

    A wait ends with the binding dependency, which itself started when *its* binding dependency ended, and so on back to
    an operation of compute: a chain of work elsewhere that took longer than what compute had to do meanwhile. The wait
    is shared out in proportion to the time that each resource works on that chain. So loads that keep coming late
    because each waits for its update are the CPU's fault, not the link's.
    """
    lane, none = graph.anchor_lane, np.zeros(len(Resource))
    known: dict[tuple[int, int], np.ndarray] = {}

    def chain(step: int, i: int) -> np.ndarray:
        """Seconds of each resource on the binding chain that ends with operation i, since it left compute."""
        path, here = [], (step, i)
        while here not in known and graph.ops[here[1]].resource is not graph.ops[lane[0]].resource:
            path.append(here)
            causes = list(graph.causes(*here))
            if not causes:
                break
            here = max(causes, key=lambda c: end[c])
        seconds = known.get(here, none)
        for here in reversed(path):
            seconds = seconds.copy()
            seconds[list(Resource).index(graph.ops[here[1]].resource)] += end[here] - start[here]
            known[here] = seconds
        return seconds

    total = none.copy()
    for step in steps:
        following = [*((step, i) for i in lane[1:]), (step + 1, lane[0])]
        for earlier, here in zip(lane, following, strict=True):
            wait = start[here] - end[step, earlier]
            if wait > 0:
                seconds = chain(*max(graph.causes(*here), key=lambda c: end[c]))
                total += wait * seconds / seconds.sum()
    return {r: float(t) for r, t in zip(Resource, total, strict=True) if t > 0}


def _phases(graph: Graph, step: int, start: np.ndarray, end: np.ndarray) -> dict[str, float]:
    """Seconds of each phase of a step: an operation's time and the wait after it belong to its phase.

    So forward lasts from the first forward's start to the first loss's, and so on; what comes after the last compute
    operation, until the next step begins, is the tail. Several passes add up.
    """
    phases = {"forward": 0.0, "loss": 0.0, "backward": 0.0, "tail": 0.0}
    lane = graph.anchor_lane
    limits = [*(float(start[step, i]) for i in lane), float(end[step, lane[-1]])]
    for i, a, b in zip(lane, limits[:-1], limits[1:], strict=True):
        name = PHASE.get(graph.ops[i].kind, "tail")
        phases[name] += b - a
    phases["tail"] += float(start[step + 1, lane[0]]) - limits[-1]
    return phases
