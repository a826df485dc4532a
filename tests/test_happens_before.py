"""No two operations touch the same memory unordered, whatever durations they have.

Three steps of a random plan are unrolled; "before" is the transitive closure of dependencies and resource order. For
each piece of memory that is used again and again (weight places, gradient slots, parked gradients, staging, host homes
of activations) every write must be ordered against every other access, and a reader must see this step's weights.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lazytrain.costs.table import CostTable
from lazytrain.planner.policies import MEGATRAIN_STYLE
from lazytrain.schedule.build import build_program
from lazytrain.schedule.memory import is_resident
from lazytrain.schedule.plan import Plan
from lazytrain.schedule.program import Kind, Op, Resource, StepProgram
from tests import builders
from tests.strategies import ALL_HOMES, plans

STEPS = 3
Instance = tuple[int, Op]  # step, operation
Before = Callable[[Instance, Instance], bool]


def happens_before(program: StepProgram) -> Before:
    """Whether an operation of a step has always ended before another starts."""
    n = len(program.ops)
    predecessors: list[list[int]] = [[] for _ in range(n * STEPS)]
    for resource in Resource:
        order = [op.id for op in program.on(resource)]
        for a, b in itertools.pairwise([step * n + i for step in range(STEPS) for i in order]):
            predecessors[b].append(a)
    for step in range(STEPS):
        for op in program.ops:
            predecessors[step * n + op.id] += [(step - d.lag) * n + d.op for d in op.deps if d.lag <= step]
    ancestors = [0] * (n * STEPS)  # bit sets; ids rise along every edge, so one sweep closes them
    for node, before in enumerate(predecessors):
        for p in before:
            assert p < node
            ancestors[node] |= ancestors[p] | 1 << p
    return lambda a, b: bool(ancestors[b[0] * n + b[1].id] >> (a[0] * n + a[1].id) & 1)


def accesses(program: StepProgram, plan: Plan, tied: bool) -> Iterator[tuple[Hashable, Instance, bool]]:
    """(place, operation of a step, whether it writes) for all memory that is used step after step."""
    head = program.n_units - 1

    def weights(unit: int, slot: int) -> Hashable:
        if is_resident(plan, unit, tied=tied):
            return "resident weights", unit
        return ("vocabulary weights",) if unit in (0, head) else ("weight slot", slot)

    def gradient(op: Op) -> list[Hashable]:
        if 0 < op.unit < head:
            return [("gradient slot", op.gradient_slot)]
        if not tied:
            return [("vocabulary gradient",)]
        return [("table gradient",)] if op.unit == 0 else [("norm gradient",)]

    for step, op in itertools.product(range(STEPS), program.ops):
        here: list[tuple[Hashable, bool]] = []
        if op.kind is Kind.LOAD_WEIGHTS:
            here += [(weights(op.unit, op.slot), True), (("host weights", op.unit), False)]
        elif op.resource is Resource.COMPUTE and not (op.kind is Kind.BACKWARD and op.unit == 0):
            here.append((weights(op.unit, op.slot), False))
        if op.kind is Kind.LOSS and tied:
            here += [(weights(0, -1), False), (("table gradient",), True)]
        if op.kind in (Kind.BACKWARD, Kind.LOSS):
            here += [(place, True) for place in gradient(op)]
        if op.kind is Kind.SEND_GRADIENT:
            here += [(place, False) for place in gradient(op)]
            here.append((("parked", op.unit) if op.pass_index == 0 else ("staging", op.slot), True))
        if op.kind is Kind.ACCUMULATE:
            here += [(("staging", op.slot), False), (("parked", op.unit), True)]
        if op.kind in (Kind.NORM, Kind.UPDATE):
            here.append((("parked", op.unit), False))
        if op.kind is Kind.UPDATE:
            here.append((("host weights", op.unit), True))
        verb, _, what = op.kind.value.partition("_")
        if what in ("saved", "boundary") and verb in ("send", "write", "read", "load"):
            here.append(((what, op.unit, op.micro), verb in ("send", "write")))
        for place, writes in here:
            yield place, (step, op), writes


@given(
    data=st.data(), M=st.sampled_from([1, 2, 4]), layers=st.integers(1, 5), passes=st.integers(1, 3),
    tied=st.booleans(), megatrain=st.booleans(),
)  # fmt: skip
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_shared_memory_is_never_raced_for(
    data: st.DataObject, M: int, layers: int, passes: int, tied: bool, megatrain: bool
) -> None:
    job = builders.job(accumulation=passes)
    plan = data.draw(plans(job, layers, M, ALL_HOMES))
    if megatrain:
        plan = plan.model_copy(update={"style": MEGATRAIN_STYLE})
    program = build_program(plan, CostTable(builders.model(layers, tied=tied), builders.machine(), job, M))
    before = happens_before(program)
    by_place: dict[Hashable, list[tuple[Instance, bool]]] = defaultdict(list)
    for place, instance, writes in accesses(program, plan, tied):
        by_place[place].append((instance, writes))
    for place, found in by_place.items():
        for (a, a_writes), (b, b_writes) in itertools.combinations(found, 2):
            if (a_writes or b_writes) and a[1].resource is not b[1].resource:
                ordered = before(a, b) or before(b, a)
                assert ordered, f"{place}: step {a[0]} {a[1].label} and step {b[0]} {b[1].label} are unordered"
        if isinstance(place, tuple) and "weight" in str(place[0]) and place[0] != "host weights":
            loads = [i for i, writes in found if writes]
            for reader in (i for i, writes in found if not writes):
                seen = max((load for load in loads if before(load, reader)), key=lambda i: (i[0], i[1].id))
                stale = f"{place}: step {reader[0]} {reader[1].label} reads step {seen[0]} {seen[1].label}"
                assert seen[0] == reader[0], stale
                shared_table = reader[1].kind is Kind.LOSS and tied
                assert seen[1].unit == (0 if shared_table and place[1:] == (0,) else reader[1].unit), stale
