"""The simulator against closed forms, hand-solved steps and independent brute force."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from lazytrain.schedule.program import Buffer, Dep, Kind, Op, Resource, StaticItem, StepProgram
from lazytrain.simulator import judge, simulate

C, H2D, D2H, CPU = Resource.COMPUTE, Resource.H2D, Resource.D2H, Resource.CPU
KIND = {
    C: Kind.FORWARD,
    H2D: Kind.LOAD_WEIGHTS,
    D2H: Kind.SEND_GRADIENT,
    CPU: Kind.UPDATE,
    Resource.NVME_READ: Kind.READ_SAVED,
    Resource.NVME_WRITE: Kind.WRITE_SAVED,
}


def op(i, resource, seconds, *deps, **fields):
    """An operation; a dependency is an id (same step) or ("previous", id)."""
    made = tuple(Dep(d[1], 1) if isinstance(d, tuple) else Dep(d) for d in deps)
    fields = {"kind": KIND[resource], "unit": i} | fields
    return Op(id=i, resource=resource, seconds=seconds, deps=made, **fields)


def program(*ops, buffers=(), static=()):
    return StepProgram(
        n_units=3, micro_batches=1, passes=1, weight_slots=1, gradient_slots=1,
        ops=ops, buffers=tuple(buffers), static=tuple(static),
    )  # fmt: skip


def previous(i):
    return ("previous", i)


# Closed forms


def test_a_serial_chain_takes_the_sum():
    p = program(op(0, H2D, 2.0, previous(3)), op(1, C, 3.0, 0), op(2, D2H, 1.0, 1), op(3, CPU, 4.0, 2))
    s = simulate(p)
    assert s.steady
    assert s.step_seconds == pytest.approx(10.0)
    assert s.exposed == {CPU: pytest.approx(4.0), H2D: pytest.approx(2.0), D2H: pytest.approx(1.0)}
    assert s.first_step_seconds == pytest.approx(12.0)  # 2 + 3 + 1 + 4, and the second step's load
    assert s.drain_seconds == pytest.approx(5.0)


def test_perfect_overlap_takes_the_maximum():
    # Two slots: the load may run while the other slot computes.
    loads = [op(0, H2D, 2.0, previous(1)), op(2, H2D, 2.0, previous(3))]
    s = simulate(program(*loads, op(1, C, 3.0, 0), op(3, C, 3.0, 2)))
    assert s.steady
    assert s.step_seconds == pytest.approx(6.0)
    assert s.exposed_seconds == 0.0
    assert s.idle[H2D] == pytest.approx(2.0)
    slow = simulate(program(*(o._replace(seconds=5.0) for o in loads), op(1, C, 3.0, 0), op(3, C, 3.0, 2)))
    assert slow.step_seconds == pytest.approx(10.0)
    assert slow.exposed == {H2D: pytest.approx(4.0)}


def two_layers():
    return program(
        op(0, H2D, 2.0, previous(6), previous(11)),  # load layer 0: slot free after backward 0, weights updated
        op(1, H2D, 2.0, 2, previous(12)),  # load layer 1 into the same slot: after forward 0
        op(2, C, 1.0, 0),  # forward 0
        op(3, C, 1.0, 1),  # forward 1
        op(4, C, 1.0, 3, kind=Kind.LOSS),
        op(5, C, 2.0, 4, kind=Kind.BACKWARD),  # backward 1, its weights are still there
        op(7, H2D, 2.0, 5),  # load layer 0 again
        op(6, C, 2.0, 7, kind=Kind.BACKWARD),  # backward 0
        op(8, D2H, 1.0, 5),  # gradient 1
        op(9, D2H, 1.0, 6),  # gradient 0
        op(10, CPU, 0.0, 8, 9, kind=Kind.CLIP),
        op(11, CPU, 3.0, 10),  # update 0
        op(12, CPU, 6.0, 10),  # update 1
    )


def test_two_layers_one_slot_lazy_update_by_hand():
    """A step begins (forward 0 starts) at 0. Forward 0 ends 1; load 1 needs that and the previous step's update 1.
    The previous step: let its backward 0 end at -x. gradient 0 ends 1-x, update 0 4-x, load 0 6-x = 0 -> x = 6.
    Update 1 follows update 0: ends 4-6+6 = 4. Load 1 from max(1, 4) to 6. Forward 1 6-7, loss 7-8, backward 1 8-10,
    load 0 again 10-12, backward 0 12-14. Then 6 s until the next step: the period is 20.
    Compute works 1+1+1+2+2 = 7, waits 13: before forward 1 5 s (chain from backward 0: d2h 1, cpu 3+6, load 2 of 12),
    before backward 0 2 s (h2d), before forward 0 6 s (d2h 1, cpu 3, h2d 2).
    """
    s = simulate(two_layers())
    assert s.steady
    assert s.step_seconds == pytest.approx(20.0)
    times = {i: (a, b) for i, a, b in s.intervals()}
    expected = {0: (-2, 0), 1: (4, 6), 2: (0, 1), 3: (6, 7), 4: (7, 8), 5: (8, 10), 7: (10, 12), 6: (12, 14),
                8: (10, 11), 9: (14, 15), 10: (15, 15), 11: (15, 18), 12: (18, 24)}  # fmt: skip
    assert times == {i: pytest.approx(t) for i, t in expected.items()}
    assert s.busy[C] == pytest.approx(7.0)
    assert s.busy[CPU] == pytest.approx(9.0)
    assert s.exposed[CPU] == pytest.approx(5 * 9 / 12 + 3)
    assert s.exposed[H2D] == pytest.approx(5 * 2 / 12 + 2 + 2)
    assert s.exposed[D2H] == pytest.approx(5 * 1 / 12 + 1)
    # forward 0 to loss 7; loss to backward 1's start 8; backward to 14; tail until 20.
    assert s.phases == {k: pytest.approx(v) for k, v in {"forward": 7, "loss": 1, "backward": 6, "tail": 6}.items()}


def test_a_slower_resource_behind_slack_is_not_mistaken_for_steady():
    """The write takes 11 s a step, compute 10; compute waits for the write of the previous step only at its end.

    Write k ends at 11(k+1)+1, compute's last operation of step k+1 could start at 10(k+1)+9.5: the first eight steps of
    compute are 10 s apart, the long run is 11.
    """
    p = program(op(0, C, 1.0), op(1, C, 8.5), op(2, C, 0.5, previous(3)), op(3, Resource.NVME_WRITE, 11.0, 0))
    s = simulate(p)
    assert not s.steady
    assert s.drift == pytest.approx(1 / 11)
    assert s.step_seconds == pytest.approx(11.0)
    long = simulate(p, max_steps=40)
    assert long.steady
    assert long.step_seconds == pytest.approx(11.0)


@pytest.mark.parametrize(
    "ops",
    [
        (op(0, C, 1.0), op(1, C, 0.0, previous(2), previous(3)), op(2, H2D, 2.0, 0), op(3, CPU, 3.0, previous(0))),
        (op(0, C, 1.0), op(1, C, 3.0, previous(2), previous(3)), op(2, H2D, 1.0, 0), op(3, CPU, 4.0, 2)),
    ],
)
def test_what_is_left_of_the_first_steps_is_not_counted_as_steady(ops):
    # Both repeat at once, while an operation of an earlier step, at another time than a steady one, still runs.
    p = program(*ops)
    s = simulate(p)
    assert s.steady
    assert s.busy == {r: pytest.approx(t) for r, t in p.busy_seconds().items()}


def test_durations_override_the_program():
    s = simulate(program(op(0, H2D, 1.0, previous(1)), op(1, C, 1.0, 0)), durations=lambda o: 2 * o.seconds)
    assert s.step_seconds == pytest.approx(4.0)


# Random programs


@st.composite
def programs(draw, most=7, resources=(C, H2D, CPU), memory=False):
    """Random strongly coupled programs: same-step dependencies point back in the list, each lane is tied to compute."""
    n = draw(st.integers(3, most))
    lanes = [C, *draw(st.lists(st.sampled_from(resources), min_size=n - 1, max_size=n - 1))]
    first = {r: lanes.index(r) for r in set(lanes)}
    last = {r: max(i for i in range(n) if lanes[i] is r) for r in set(lanes)}
    ops = []
    for i, r in enumerate(lanes):
        deps = {Dep(draw(st.integers(0, i - 1))) for _ in range(draw(st.integers(0, 2))) if i}
        deps |= {Dep(draw(st.integers(0, n - 1)), 1) for _ in range(draw(st.integers(0, 1)))}
        if r is not C and i == first[r]:
            deps.add(Dep(first[C], 1))
        if i == last[C]:
            deps |= {Dep(k, 1) for k in last.values()}
        extra = {"workspace_bytes": float(draw(st.integers(0, 50)))} if memory else {}
        ops.append(op(i, r, float(draw(st.integers(0 if i else 1, 9))), **extra)._replace(deps=tuple(sorted(deps))))
    return program(*ops)


def edges(p):
    """(from, to, lag) of everything that orders two starts."""
    found = [(d.op, o.id, d.lag) for o in p.ops for d in o.deps]
    for r in Resource:
        lane = [o.id for o in p.on(r)]
        found += [(a, b, 0) for a, b in itertools.pairwise(lane)]
        found += [(lane[-1], lane[0], 1)] if lane else []
    return found


def max_cycle_ratio(p):
    """The exact period: the largest (seconds / steps) of all simple cycles, each enumerated."""
    out = {o.id: [(v, lag) for u, v, lag in edges(p) if u == o.id] for o in p.ops}
    best = 0.0

    def walk(start, here, seconds, lags, seen):
        nonlocal best
        for v, lag in out[here]:
            if v == start and lags + lag:
                best = max(best, seconds / (lags + lag))
            elif v > start and v not in seen:
                walk(start, v, seconds + p.ops[v].seconds, lags + lag, seen | {v})

    for o in p.ops:
        walk(o.id, o.id, o.seconds, 0, {o.id})
    return best


@settings(deadline=None, max_examples=150)
@given(programs())
def test_period_is_the_maximum_cycle_ratio(p):
    exact = max_cycle_ratio(p)
    s = simulate(p, max_steps=60)
    event(f"steady {s.steady}")
    if s.steady:
        assert s.step_seconds == pytest.approx(exact)
    else:
        assert exact <= s.step_seconds + 1e-9 <= exact + sum(o.seconds for o in p.ops) / 10
    short = simulate(p, max_steps=4)
    assert short.step_seconds >= exact - 1e-9  # never too optimistic


@settings(deadline=None, max_examples=60)
@given(programs(), st.data())
def test_a_longer_operation_never_shortens_the_period(p, data):
    i = data.draw(st.integers(0, len(p.ops) - 1))
    before = simulate(p, max_steps=60)
    after = simulate(p, max_steps=60, durations=lambda o: o.seconds + (2.5 if o.id == i else 0.0))
    if before.steady and after.steady:
        assert after.step_seconds >= before.step_seconds - 1e-9


@settings(deadline=None, max_examples=60)
@given(programs())
def test_work_is_conserved_and_rules_are_kept(p):
    s = simulate(p, max_steps=60)
    if not s.steady:
        return
    for r, seconds in p.busy_seconds().items():
        assert s.busy[r] == pytest.approx(seconds)
        assert s.busy[r] + s.idle[r] == pytest.approx(s.step_seconds)
    assert s.exposed_seconds == pytest.approx(s.idle[C])
    if s.cycle == 1:
        assert sum(s.phases.values()) == pytest.approx(s.step_seconds)
    for u, v, lag in edges(p):  # the successor step against its own and the steady step
        assert s.start[1, v] >= s.end[1 - lag, u] - 1e-9
    assert np.allclose(s.end - s.start, [o.seconds for o in p.ops])


# DRAM


def test_two_flows_share_and_the_longer_one_speeds_up():
    """Bandwidth 10. A: 2 s at 10 B/s, B: 3 s at 10 B/s, together 20: both at half speed.

    A ends at 4; B has 1 s left, alone at full speed: ends at 5. 50 bytes by then: 10 B/s all the time.
    """
    p = program(
        op(0, C, 1.0, previous(1), previous(2)),
        op(1, H2D, 2.0, 0, dram_bytes=20.0),
        op(2, D2H, 3.0, 0, dram_bytes=30.0),
        op(3, CPU, 4.0, 0),
    )
    s = simulate(p, dram_bandwidth=10.0)
    times = {i: (a, b) for i, a, b in s.intervals()}
    assert times == {0: (0, 1), 1: (1, 5), 2: (1, 6), 3: (1, 5)}  # without DRAM bytes: not slowed
    assert s.step_seconds == pytest.approx(6.0)
    assert s.busy[H2D] == pytest.approx(4.0)
    assert simulate(p, dram_bandwidth=20.0).step_seconds == pytest.approx(4.0)
    assert simulate(p).step_seconds == pytest.approx(4.0)


def test_one_flow_faster_than_dram_takes_its_bytes_at_dram_speed():
    s = simulate(program(op(0, C, 1.0, previous(1)), op(1, CPU, 2.0, 0, dram_bytes=100.0)), dram_bandwidth=20.0)
    assert s.step_seconds == pytest.approx(1 + 100 / 20)


def test_flows_that_never_meet_do_not_contend():
    p = program(op(0, H2D, 2.0, previous(2), dram_bytes=20.0), op(1, C, 1.0, 0), op(2, CPU, 3.0, 1, dram_bytes=30.0))
    assert simulate(p, dram_bandwidth=10.0).step_seconds == simulate(p).step_seconds == 6.0


@settings(deadline=None, max_examples=60)
@given(programs(), st.floats(0.2, 3.0))
def test_dram_never_moves_more_than_its_bandwidth(p, bandwidth):
    p = p.model_copy(update={"ops": tuple(o._replace(dram_bytes=o.seconds) for o in p.ops)})  # 1 B/s each
    s = simulate(p, dram_bandwidth=bandwidth, max_steps=40)
    assert s.step_seconds >= sum(o.dram_bytes for o in p.ops) / bandwidth * (1 - 1e-9)
    if s.steady:
        assert s.step_seconds >= max_cycle_ratio(p) - 1e-6
        assert np.all(s.end - s.start >= np.array([o.seconds for o in p.ops]) - 1e-9)


# Memory


def test_peak_is_itemised():
    p = program(
        op(0, H2D, 2.0, previous(3), workspace_bytes=1.0),
        op(1, C, 3.0, 0, workspace_bytes=5.0),
        op(2, D2H, 1.0, 1),
        op(3, CPU, 4.0, 2),
        buffers=[
            Buffer(0, "boundary", "gpu", 10.0, 0, (1,)),
            Buffer(1, "saved", "gpu", 20.0, 1, (1, 2)),
            Buffer(2, "staging", "host", 7.0, 2, (3,)),
        ],
        static=[StaticItem("gpu", "weight slots", 100.0), StaticItem("host", "parked gradients", 50.0, True),
                StaticItem("host", "masters", 200.0), StaticItem("nvme", "moments", 400.0)],
    )  # fmt: skip
    s = simulate(p)
    # load 0-2: 100+10+1; compute 2-5: 100+10+20+5; send 5-6: 100+20 (+7 host); update 6-10: 100 (+7 host).
    assert s.peaks["gpu"].bytes == 135.0
    assert s.peaks["gpu"].at == pytest.approx(0.0)
    assert s.peaks["gpu"].items == {"weight slots": 100.0, "saved": 20.0, "boundary": 10.0, "workspace": 5.0}
    assert list(s.memory["gpu"].times) == pytest.approx([0, 3, 4, 8])
    assert list(s.memory["gpu"].bytes) == [135.0, 120.0, 100.0, 111.0]
    assert s.peaks["host"].bytes == 257.0
    assert s.peaks["host"].at == pytest.approx(3.0)
    assert s.peaks["pinned"].items == {"parked gradients": 50.0, "staging": 7.0}
    assert s.peak_bytes == {"gpu": 135.0, "host": 257.0, "pinned": 57.0, "nvme": 400.0}


def test_a_peak_in_the_first_step_counts():
    # First step: load 0-5, send 1-4. Later the load waits for the update: load 24-29, send 20-23, and so on by 10.
    p = program(
        op(0, C, 1.0, previous(1)),
        op(1, H2D, 5.0, previous(3)),
        op(2, D2H, 3.0, 0),
        op(3, CPU, 10.0, 2),
        buffers=[Buffer(0, "saved", "gpu", 10.0, 1, (1,)), Buffer(1, "saved", "gpu", 10.0, 2, (2,))],
    )
    s = simulate(p)
    assert s.peaks["gpu"].bytes == 10.0
    assert (s.run_peaks["gpu"].bytes, s.run_peaks["gpu"].at) == (20.0, 1.0)
    assert not judge(s, p, {"gpu": 15.0, "host": 0.0, "pinned": 0.0, "nvme": 0.0}, {}).feasible


@settings(deadline=None, max_examples=100)
@given(programs(memory=True), st.data())
def test_peak_against_an_independent_sweep(p, data):
    """A steady step's memory at time t: every piece, shifted by whole periods, that is alive then."""
    reach = {o.id: {o.id} for o in p.ops}  # same-step happens-after, by closure over list order
    for u, v, lag in sorted(edges(p), key=lambda e: e[1]):
        if not lag:
            for ancestors in reach.values():
                if u in ancestors:
                    ancestors.add(v)
    buffers = []
    for k in range(data.draw(st.integers(0, 5))):
        alloc = data.draw(st.integers(0, len(p.ops) - 1))
        release = data.draw(st.sets(st.sampled_from(sorted(reach[alloc])), min_size=1, max_size=3))
        buffers.append(Buffer(k, "saved", "gpu", float(data.draw(st.integers(1, 99))), alloc, tuple(release)))
    p = p.model_copy(update={"buffers": tuple(buffers), "static": (StaticItem("gpu", "slots", 11.0),)})
    s = simulate(p, max_steps=60)
    if not s.steady or s.cycle != 1:
        return
    t = {i: (a, b) for i, a, b in s.intervals()}
    pieces = [(t[b.alloc][0], max(t[r][1] for r in b.release), b.bytes) for b in buffers]
    pieces += [(*t[o.id], o.workspace_bytes) for o in p.ops]
    period = s.step_seconds
    span = int(max(max(abs(a), abs(b)) for a, b, _ in pieces) / period) + 2
    pieces = [(a + k * period, b + k * period, size) for a, b, size in pieces for k in range(-span, span + 1)]
    marks = sorted({0.0, period, *(x for a, b, _ in pieces for x in (a, b) if 0 < x < period)})
    middles = [(a + b) / 2 for a, b in itertools.pairwise(marks) if b - a > 1e-6]
    levels = [11.0 + sum(size for a, b, size in pieces if a <= m < b) for m in middles]
    assert s.peaks["gpu"].bytes == pytest.approx(max(levels))
    assert sum(s.peaks["gpu"].items.values()) == pytest.approx(max(levels))
    curve = s.memory["gpu"]
    assert [curve.bytes[np.searchsorted(curve.times, m, side="right") - 1] for m in middles] == pytest.approx(levels)
    assert s.run_peaks["gpu"].bytes >= s.peaks["gpu"].bytes
