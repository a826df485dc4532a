"""Timelines as Chrome trace events, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

Simulated and measured intervals go through the same function, so the two line up operation by operation.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lazytrain.files import write_text_atomic
from lazytrain.schedule.program import Resource, StepProgram
from lazytrain.simulator.memory import Curve
from lazytrain.simulator.result import Simulation

LANES = {
    Resource.COMPUTE: "compute",
    Resource.H2D: "H2D",
    Resource.D2H: "D2H",
    Resource.NVME_READ: "NVMe read",
    Resource.NVME_WRITE: "NVMe write",
    Resource.CPU: "CPU",
}
THREAD = {resource: k for k, resource in enumerate(LANES, start=1)}
COUNTERS = {"gpu": "GPU bytes", "host": "host bytes", "pinned": "pinned bytes"}


def _us(seconds: float) -> float:
    """Microseconds, to the nanosecond: trace times are decimal text."""
    return round(seconds * 1e6, 3)


def trace_events(
    program: StepProgram,
    intervals: Sequence[tuple[int, float, float]],
    memory: Mapping[str, Curve] | None = None,
    name: str = "simulated",
    pid: int = 1,
) -> dict[str, Any]:
    """The trace of (operation id, start s, end s) intervals: a lane a resource, arrows for waits between lanes.

    The n-th interval of an operation belongs to the n-th step shown. ``memory`` gives counters by tier, in the same
    time. Traces with different ``pid`` can be shown together (``write_trace``).
    """
    by_id = {op.id: op for op in program.ops}
    events: list[dict[str, Any]] = [_meta("process_name", pid, 0, name=name)]
    for resource, lane in LANES.items():
        events.append(_meta("thread_name", pid, THREAD[resource], name=lane))
        events.append(_meta("thread_sort_index", pid, THREAD[resource], sort_index=THREAD[resource]))

    runs: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for i, start, end in intervals:
        op = by_id[i]
        step = len(runs[i])
        runs[i].append((_us(start), _us(end)))
        ts, until = runs[i][-1]
        args = {"id": i, "unit": op.unit, "step": step, "planned_us": _us(op.seconds)}
        args |= {k: getattr(op, k) for k in ("micro", "slot") if getattr(op, k) >= 0}
        args |= {k: getattr(op, k) for k in ("bytes", "pass_index") if getattr(op, k)}
        events.append(
            {"ph": "X", "name": op.label, "cat": str(op.kind), "pid": pid, "tid": THREAD[op.resource],
             "ts": ts, "dur": round(until - ts, 3), "args": args}
        )  # fmt: skip
    events += _arrows(program, runs, pid)
    for tier, curve in (memory or {}).items():
        if tier in COUNTERS:
            events += [
                {"ph": "C", "name": COUNTERS[tier], "pid": pid, "ts": _us(float(t)), "args": {"bytes": float(b)}}
                for t, b in zip(curve.times, curve.bytes, strict=True)
            ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _meta(what: str, pid: int, tid: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": args}


def _arrows(program: StepProgram, runs: Mapping[int, list[tuple[float, float]]], pid: int) -> list[dict[str, Any]]:
    """Flow events from the end of a dependency to the start of what waits for it, between lanes."""
    by_id = {op.id: op for op in program.ops}
    events: list[dict[str, Any]] = []
    for op in program.ops:
        for dep in op.deps:
            source = by_id[dep.op]
            if source.resource is op.resource:
                continue
            for step, (ts, _) in enumerate(runs.get(op.id, ())):
                if not 0 <= step - dep.lag < len(runs.get(dep.op, ())):
                    continue
                begun, ended = runs[dep.op][step - dep.lag]
                flow = {"name": "dependency", "cat": "dependency", "id": f"{pid}.{len(events) // 2}", "pid": pid}
                # An arrow belongs to the span around its time: just before the end, as the next span may start at it.
                leaves = round(max(begun, ended - 1e-3), 3)
                events.append(flow | {"ph": "s", "tid": THREAD[source.resource], "ts": leaves})
                events.append(flow | {"ph": "f", "bp": "e", "tid": THREAD[op.resource], "ts": ts})
    return events


def simulated_trace(
    program: StepProgram, simulation: Simulation, name: str = "simulated", pid: int = 1
) -> dict[str, Any]:
    """Two steady steps of a simulation, with the memory of both (of one, if steps do not repeat)."""
    memory = simulation.memory
    if simulation.steady and simulation.cycle == 1:
        memory = {
            tier: Curve(np.append(c.times, c.times + simulation.window_seconds), np.append(c.bytes, c.bytes))
            for tier, c in memory.items()
        }
    return trace_events(program, simulation.intervals(steps=2), memory, name, pid)


def write_trace(path: Path, *traces: Mapping[str, Any]) -> None:
    """Writes one or more traces (of different ``pid``) into one file; InputError when it cannot be written."""
    events = [event for trace in traces for event in trace["traceEvents"]]
    text = json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, separators=(",", ":"), allow_nan=False)
    write_text_atomic(path, text + "\n")
