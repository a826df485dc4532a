"""Plans as data, and the programs built from them."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from lazytrain.costs.table import CostTable
from lazytrain.errors import FileFormatError, InputError
from lazytrain.schedule.build import build_program
from lazytrain.schedule.plan import ACTION_ORDER, Action, LayerDecision, Plan, read_plan, write_plan
from lazytrain.schedule.program import Kind, Resource, StepProgram, read_program
from lazytrain.simulator import simulate
from tests import builders
from tests.strategies import ALL_HOMES, plans


def plan_of(layers: list[LayerDecision], M: int, **fields: object) -> Plan:
    job = fields.pop("job", None) or builders.job()
    return Plan(
        model="toy", hardware="toy", model_digest="", hardware_digest="", job=job, micro_batches=M,
        layers=tuple(layers), **fields,
    )  # fmt: skip


def test_two_layers_by_hand() -> None:
    """Two layers, one micro-batch, everything kept on the GPU: the period by a written-out recursion.

    After the embedding's backward (time 0): its gradient leaves, its norm closes the clip, and updates start in forward
    order. Unit k's load waits for its update and for the load before; its forward for its load and the forward before.
    Both layers are still in their two slots at the turn, so backward loads nothing.
    """
    spec = builders.model(2, kinds=2, hidden=512)
    costs = CostTable(spec, builders.machine(), builders.job(), 1)
    program = build_program(plan_of([LayerDecision(keep_gpu=1)] * 2, 1), costs)
    units = costs.units
    send = [costs.d2h_s(u.parked_bytes) for u in units]
    load = [costs.h2d_s(u.weight_bytes) for u in units]
    norm = [costs.norm_s(u) for u in units]
    update = [costs.update_s(u) for u in units]

    period, begin = 0.0, 0.0
    sent_before, norm_done = 0.0, 0.0  # when the gradient of unit 0 had left, relative to the end of all compute
    for _ in range(6):  # from one end of compute to the next until it repeats
        clip = max(sent_before, 0.0) + norm[0] if norm_done <= sent_before else norm_done + norm[0]
        updated, at = [], clip
        for u in update:
            at += u
            updated.append(at)
        loaded = forward = 0.0
        starts = []
        for unit in range(3):
            loaded = max(loaded, updated[unit]) + load[unit]
            start = max(forward, loaded)
            starts.append(start)
            forward = start + units[unit].forward_s
        # the head shares the embedding's place, free since the embedding's forward
        loaded = max(loaded, updated[3], starts[0] + units[0].forward_s) + load[3]
        loss = max(forward, loaded) + units[3].forward_s
        sent = loss + send[3]
        normed = max(sent, updated[3]) + norm[3]
        at, head_sent = loss, sent
        for unit in (2, 1):
            at += units[unit].backward_s
            sent = max(sent, at) + send[unit]
            normed = max(normed, sent) + norm[unit]
        end = max(at, head_sent) + units[0].backward_s
        sent = max(sent, end) + send[0]
        period, begin = end - begin, 0.0
        sent_before, norm_done = sent - end, normed - end
    assert simulate(program).step_seconds == pytest.approx(period, rel=1e-9)


@given(data=st.data(), M=st.sampled_from([1, 2, 4]), layers=st.integers(1, 5), passes=st.integers(1, 2))
@settings(max_examples=60, deadline=None)
def test_random_plans_build_programs_that_conserve(data: st.DataObject, M: int, layers: int, passes: int) -> None:
    tied = data.draw(st.booleans())
    job = builders.job(accumulation=passes)
    plan = data.draw(plans(job, layers, M, ALL_HOMES))
    costs = CostTable(builders.model(layers, tied=tied), builders.machine(), job, M)
    program = build_program(plan, costs)

    assert [op.id for op in program.ops] == list(range(len(program.ops)))
    counts = Counter((op.kind, op.pass_index) for op in program.ops)
    for p in range(passes):
        assert counts[Kind.FORWARD, p] == M * (layers + 1)
        assert counts[Kind.BACKWARD, p] == M * (layers + 1)
        assert counts[Kind.LOSS, p] == M
        assert counts[Kind.SEND_GRADIENT, p] == layers + 2
        recomputed = sum(not a.keeps for layer in plan.layers for a in layer.actions())
        assert counts[Kind.RECOMPUTE, p] == recomputed
        for kind in ("saved", "boundary"):  # what leaves comes back, over the link and over the drive
            assert counts[Kind(f"send_{kind}"), p] == counts[Kind(f"load_{kind}"), p]
            assert counts[Kind(f"write_{kind}"), p] == counts[Kind(f"read_{kind}"), p]
    assert counts[Kind.UPDATE, passes - 1] == counts[Kind.NORM, passes - 1] == layers + 2
    assert sum(counts[Kind.ACCUMULATE, p] for p in range(passes)) == (passes - 1) * (layers + 2)

    for buffer in program.buffers:
        assert buffer.release, f"{buffer} is never released"
        assert all(op > buffer.alloc or op == buffer.alloc for op in buffer.release)
    for op in program.ops:
        assert all(dep.op < op.id for dep in op.deps if dep.lag == 0), "same-step dependencies point backwards"
    simulation = simulate(program, max_steps=4)
    assert simulation.step_seconds >= max(program.busy_seconds().values()) * (1 - 1e-9)
    assert program == StepProgram.model_validate_json(program.model_dump_json())


@given(data=st.data(), M=st.sampled_from([1, 2]), layers=st.integers(2, 5))
@settings(max_examples=40, deadline=None)
def test_weight_slots_are_never_overwritten_in_use(data: st.DataObject, M: int, layers: int) -> None:
    """Replay of a simulated run: between a load into a slot and each use of it no other load touches that slot."""
    job = builders.job(accumulation=2)
    plan = data.draw(plans(job, layers, M))
    costs = CostTable(builders.model(layers), builders.machine(), job, M)
    program = build_program(plan, costs)
    intervals = {op: (a, b) for op, a, b in simulate(program, max_steps=4).intervals()}
    loads = [op for op in program.ops if op.kind is Kind.LOAD_WEIGHTS and op.slot >= 0]
    for op in program.ops:
        if op.resource is not Resource.COMPUTE or op.slot < 0:
            continue
        start, end = intervals[op.id]
        there = [load for load in loads if load.slot == op.slot and intervals[load.id][1] <= start + 1e-12]
        last = max(there, key=lambda load: intervals[load.id][1])
        assert last.unit == op.unit
        for load in loads:
            if load.slot == op.slot and load is not last:
                assert intervals[load.id][1] <= intervals[last.id][0] + 1e-12 or intervals[load.id][0] >= end - 1e-12


@pytest.mark.parametrize(
    ("dropped", "reloaded"),
    [
        ([], [4, 3, 2, 1]),  # of six layers the topmost two are still in the two slots at the turn
        ([6], [4, 3, 2, 1]),  # layers 5 and 6 as one segment at the top: both are there
        ([3, 4], [2, 3, 4, 2, 1]),  # segment 2..4: restoring needs 2 and 3, then 4; 3 is still there, 2 is not
        ([2, 3, 4], [1, 2, 3, 4, 2, 1]),
    ],
)
def test_backward_loads_as_few_weights_as_two_slots_allow(dropped: list[int], reloaded: list[int]) -> None:
    layers = [LayerDecision(dropped=2) if u in dropped else LayerDecision(boundary_gpu=2) for u in range(1, 7)]
    costs = CostTable(builders.model(6), builders.machine(), builders.job(), 2)
    program = build_program(plan_of(layers, 2, weight_buffers=2), costs)
    loads = [op.unit for op in program.ops if op.kind is Kind.LOAD_WEIGHTS and 1 <= op.unit <= 6]
    assert loads[:6] == [1, 2, 3, 4, 5, 6]
    assert loads[6:] == reloaded


def test_actions_follow_the_fixed_order() -> None:
    layer = LayerDecision(keep_gpu=1, keep_host=2, boundary_gpu=1)
    assert layer.actions() == [Action.KEEP_GPU, Action.BOUNDARY_GPU, Action.KEEP_HOST, Action.KEEP_HOST]
    assert set(ACTION_ORDER) == set(Action)


@pytest.mark.parametrize(
    ("layers", "M", "problem"),
    [
        ([LayerDecision(keep_gpu=1)], 2, "1 micro-batches have an action"),
        ([LayerDecision(dropped=2)], 2, "cannot be dropped"),
        ([LayerDecision(boundary_gpu=2), LayerDecision(dropped=1, keep_gpu=1)], 2, "for all micro-batches or none"),
        ([LayerDecision(keep_gpu=2), LayerDecision(dropped=2)], 2, "must then keep boundaries only"),
        ([LayerDecision(keep_gpu=3)], 3, "does not divide"),
    ],
)
def test_contradictory_plans_are_refused(layers: list[LayerDecision], M: int, problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        plan_of(layers, M)


def test_plan_file_round_trip_and_damage(tmp_path: Path) -> None:
    plan = plan_of([LayerDecision(keep_gpu=2), LayerDecision(boundary_host=2)], 2)
    path = tmp_path / "plan.json"
    write_plan(plan, path)
    assert read_plan(path) == plan
    assert list(tmp_path.iterdir()) == [path], "no temporary file is left"

    text = path.read_text()
    cases = {
        "truncated": (text[: len(text) // 2], "truncated"),
        "foreign": ("{}", "no 'version'"),
        "list": ("[1]", "not a plan"),
        "newer": (json.dumps({**json.loads(text), "version": 2}), "version 2 is not supported"),
        "field": (json.dumps({**json.loads(text), "colour": 1}), "colour"),
        "binary": ("\x00\x01", "not a plan"),
    }
    for name, (content, problem) in cases.items():
        broken = tmp_path / f"{name}.json"
        broken.write_text(content)
        with pytest.raises(FileFormatError, match=problem) as caught:
            read_plan(broken)
        assert str(broken) in str(caught.value)
    with pytest.raises(FileFormatError, match="cannot be read"):
        read_plan(tmp_path / "absent.json")


def test_program_file_damage(tmp_path: Path) -> None:
    path = tmp_path / "program.json"
    path.write_text('{"version": 1')
    with pytest.raises(FileFormatError, match="not a step program"):
        read_program(path)


def test_unwritable_place_is_an_input_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written"):
        write_plan(plan_of([LayerDecision(keep_gpu=1)], 1), tmp_path / "file" / "plan.json")


def test_costs_of_another_model_are_refused() -> None:
    costs = CostTable(builders.model(3), builders.machine(), builders.job(), 1)
    with pytest.raises(InputError, match="not of these costs"):
        build_program(plan_of([LayerDecision(keep_gpu=1)] * 2, 1), costs)
