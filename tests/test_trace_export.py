"""Timelines as Chrome trace events."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict

import pytest

from lazytrain.errors import InputError
from lazytrain.schedule.program import Buffer, Dep, Kind, Op, Resource, StaticItem, StepProgram
from lazytrain.simulator import simulate, simulated_trace, trace_events, write_trace


@pytest.fixture
def program():
    """Four layers: load, forward, send; updates that the next step's loads wait for. Awkward durations on purpose."""
    ops, buffers = [], []
    for u in range(4):
        load, compute, send, update = (4 * u + k for k in range(4))
        slot = (Dep(compute - 8),) if u >= 2 else (Dep(compute + 8, 1),)
        ops += [
            Op(
                load,
                Kind.LOAD_WEIGHTS,
                Resource.H2D,
                u,
                deps=(*slot, Dep(update, 1)),
                seconds=0.1 / 3,
                bytes=1e6,
                slot=u % 2,
            ),
            Op(compute, Kind.FORWARD, Resource.COMPUTE, u, 0, deps=(Dep(load),), seconds=0.2 / 7),
            Op(send, Kind.SEND_GRADIENT, Resource.D2H, u, deps=(Dep(compute),), seconds=0.1 / 11),
            Op(update, Kind.UPDATE, Resource.CPU, u, deps=(Dep(send),), seconds=0.1 / 13),
        ]
        buffers.append(Buffer(u, "saved", "gpu", 1e6, compute, (send,), u, 0))
    return StepProgram(
        n_units=6, micro_batches=1, passes=1, weight_slots=2, gradient_slots=1,
        ops=tuple(ops), buffers=tuple(buffers), static=(StaticItem("host", "weights", 4e6, True),),
    )  # fmt: skip


def test_file_is_valid_and_complete(tmp_path, program):
    path = tmp_path / "trace.json"
    write_trace(path, simulated_trace(program, simulate(program)))
    events = json.loads(path.read_text())["traceEvents"]
    spans = [e for e in events if e["ph"] == "X"]
    assert len(spans) == 2 * len(program.ops)
    assert all(e["dur"] >= 0 for e in spans)
    lanes = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert lanes == {"compute", "H2D", "D2H", "NVMe read", "NVMe write", "CPU"}
    assert {e["name"] for e in events if e["ph"] == "C"} == {"GPU bytes", "host bytes", "pinned bytes"}
    first = next(e for e in spans if e["name"] == "load_weights unit 1")
    assert first["args"] == {"id": 4, "unit": 1, "step": 0, "planned_us": 33333.333, "slot": 1, "bytes": 1e6}


def test_spans_never_overlap_on_a_lane(program):
    lanes = defaultdict(list)
    for e in simulated_trace(program, simulate(program))["traceEvents"]:
        if e["ph"] == "X":
            lanes[e["tid"]].append((round(e["ts"] * 1000), round((e["ts"] + e["dur"]) * 1000)))
    assert len(lanes) == 4
    for spans in lanes.values():
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(sorted(spans)))


def test_arrows_join_dependencies_between_lanes(program):
    events = simulated_trace(program, simulate(program))["traceEvents"]
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    between = [d for op in program.ops for d in op.deps if program.ops[d.op].resource is not op.resource]
    assert starts.keys() == ends.keys()
    assert len(starts) == sum(2 - d.lag for d in between)  # the first step shown has no predecessor in the trace
    spans = [e for e in events if e["ph"] == "X"]
    for key, s in starts.items():
        assert s["ts"] <= ends[key]["ts"]
        assert s["tid"] != ends[key]["tid"]
        assert any(x["tid"] == s["tid"] and x["ts"] <= s["ts"] < x["ts"] + x["dur"] for x in spans)
        assert any(x["tid"] == ends[key]["tid"] and x["ts"] == ends[key]["ts"] for x in spans)


def test_measured_intervals_go_through_the_same_function(tmp_path, program):
    measured = [(op.id, 0.5 + i, 0.75 + i) for i, op in enumerate(program.ops)]
    trace = trace_events(program, measured, name="measured", pid=2)
    spans = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert [(e["args"]["id"], e["ts"], e["dur"]) for e in spans] == [(i, s * 1e6, 250000.0) for i, s, _ in measured]
    path = tmp_path / "both.json"
    write_trace(path, simulated_trace(program, simulate(program)), trace)
    events = json.loads(path.read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {1: "simulated", 2: "measured"}


def test_a_place_that_cannot_be_written(tmp_path, program):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written"):
        write_trace(tmp_path / "file" / "trace.json", trace_events(program, []))
