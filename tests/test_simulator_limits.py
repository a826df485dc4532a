"""What the simulator refuses, and how it says so: programs that cannot run, limits that break."""

from __future__ import annotations

import pytest

from lazytrain.errors import DeadlockError, InputError
from lazytrain.schedule.program import Buffer, Dep, Kind, Op, Resource, StaticItem, StepProgram
from lazytrain.simulator import ProgramError, judge, simulate

C, H2D, D2H, CPU = Resource.COMPUTE, Resource.H2D, Resource.D2H, Resource.CPU
KIND = {C: Kind.FORWARD, H2D: Kind.LOAD_WEIGHTS, D2H: Kind.SEND_GRADIENT, CPU: Kind.UPDATE}


def op(i, resource, seconds, *deps, **fields):
    """An operation of unit i with same-step dependencies."""
    return Op(i, KIND[resource], resource, i, deps=tuple(Dep(d) for d in deps), seconds=seconds, **fields)


def program(*ops, buffers=(), static=()):
    return StepProgram(
        n_units=3, micro_batches=1, passes=1, weight_slots=1, gradient_slots=1,
        ops=ops, buffers=tuple(buffers), static=tuple(static),
    )  # fmt: skip


# Programs that cannot run


def test_deadlock_names_the_cycle():
    p = program(op(0, H2D, 1.0, 2), op(1, H2D, 1.0), op(3, CPU, 1.0), op(2, C, 1.0, 1), op(4, C, 1.0, 3))
    with pytest.raises(DeadlockError) as raised:
        simulate(p)
    text = str(raised.value)
    assert "load_weights unit 1 (h2d, id 1) is queued on h2d behind load_weights unit 0" in text
    assert "load_weights unit 0 (h2d, id 0) waits for forward unit 2" in text
    assert "forward unit 2 (compute, id 2) waits for load_weights unit 1" in text
    assert "update" not in text


def test_a_long_deadlock_is_named_in_short():
    lanes = [C, H2D] * 10
    p = program(*(op(i, r, 1.0, (i + 1) % 20) for i, r in enumerate(lanes[::-1])))
    with pytest.raises(DeadlockError) as raised:
        simulate(p)
    assert str(raised.value).count(", id ") <= 8
    queue = program(*(op(i, H2D, 1.0) for i in range(30)), op(30, C, 1.0, 29), *(op(i, C, 1.0) for i in range(31, 60)))
    blocked = (queue.ops[0]._replace(deps=(Dep(59),)), *queue.ops[1:])
    with pytest.raises(DeadlockError) as raised:
        simulate(queue.model_copy(update={"ops": blocked}))
    assert str(raised.value).count(", id ") == 4


@pytest.mark.parametrize(
    ("ops", "buffers", "message"),
    [
        ((), (), "no operations"),
        ((op(0, C, 1.0, 7),), (), "depends on operation 7, which does not exist"),
        ((op(0, C, 1.0)._replace(deps=(Dep(0, 2),)),), (), "lag 2"),
        ((op(0, C, 1.0), op(0, H2D, 1.0)), (), "id 0 .* used by two"),
        ((op(0, C, -1.0),), (), "seconds = -1"),
        ((op(0, C, 1.0),), (Buffer(0, "saved", "gpu", 1.0, 0, ()),), "never released"),
        ((op(0, C, 1.0),), (Buffer(0, "saved", "gpu", 1.0, 3, (0,)),), "operation 3, which does not exist"),
        ((op(0, C, 1.0), op(1, C, 1.0)), (Buffer(0, "saved", "gpu", 1.0, 1, (0,)),), "nothing orders"),
        ((op(0, C, 1.0), op(1, D2H, 1.0)), (Buffer(0, "saved", "gpu", 1.0, 0, (1,)),), "nothing orders"),
    ],
)
def test_broken_programs_are_refused(ops, buffers, message):
    with pytest.raises(ProgramError, match=message):
        simulate(program(*ops, buffers=buffers))


def test_an_operation_that_waits_for_itself():
    with pytest.raises(DeadlockError, match=r"unit 0 \(compute, id 0\) waits for forward unit 0"):
        simulate(program(op(0, C, 1.0, 0)))


def test_unusable_arguments_are_refused():
    p = program(op(0, C, 1.0))
    with pytest.raises(InputError, match="at least 2 steps"):
        simulate(p, max_steps=1)
    with pytest.raises(InputError, match="dram_bandwidth"):
        simulate(p, dram_bandwidth=0.0)
    with pytest.raises(InputError, match="durations"):
        simulate(p, durations=lambda o: float("nan"))


# Verdict


def test_verdict_lists_every_violated_limit():
    gi = 2.0**30
    p = program(
        op(0, C, 2.0, workspace_bytes=2 * gi),
        buffers=[Buffer(0, "boundary_gradient", "gpu", 4 * gi, 0, (0,))],
        static=[StaticItem("host", "parked gradients", 41 * gi, True), StaticItem("gpu", "weight slots", 20 * gi)],
    )
    s = simulate(p)
    v = judge(s, p, {"gpu": 24 * gi, "host": 64 * gi, "pinned": 32 * gi, "nvme": 0.0}, {"h2d": 12e9})
    assert not v.feasible
    assert [x.message for x in v.violations] == [
        "GPU memory: needs 26 GiB, has 24 GiB (weight slots 20 GiB, boundary gradient 4 GiB, workspace 2 GiB)",
        "pinned host memory: needs 41 GiB, has 32 GiB (parked gradients 41 GiB)",
    ]
    assert v.assumed_rates == {"h2d": 12e9}
    assert v.step_seconds == pytest.approx(2.0)
    fits = judge(s, p, {"gpu": 26 * gi, "host": 64 * gi, "pinned": 41 * gi, "nvme": 0.0}, {})
    assert fits.feasible
    assert fits.peak_bytes == {"gpu": 26 * gi, "host": 41 * gi, "pinned": 41 * gi, "nvme": 0.0}
    nearly = judge(s, p, {"gpu": 26 * gi - 1e6, "host": 64 * gi, "pinned": 41 * gi, "nvme": 0.0}, {})
    assert "needs 26 GiB, has 26 GiB, 976.6 KiB too little" in nearly.violations[0].message
    with pytest.raises(InputError, match="nvme missing"):
        judge(s, p, {"gpu": gi, "host": gi, "pinned": gi}, {})
