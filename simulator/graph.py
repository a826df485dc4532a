"""The static side of a StepProgram: who waits for whom, and whether that can work at all."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from lazytrain.errors import DeadlockError, LazyTrainError
from lazytrain.schedule.program import Op, Resource, StepProgram

NAMED_AT_MOST = 8  # operations of a deadlock that a message names


class ProgramError(LazyTrainError):
    """A step program contradicts itself: a dangling dependency, a buffer released before it exists, a negative time."""


@dataclass(frozen=True)
class Graph:
    """A checked program by position in ``program.ops`` (its ids may be any distinct numbers)."""

    ops: tuple[Op, ...]
    lanes: dict[Resource, list[int]]  # positions in the order each resource serves them
    same: list[tuple[int, ...]]  # dependencies with lag 0
    previous: list[tuple[int, ...]]  # dependencies with lag 1
    before: list[int]  # the operation served just before on the same resource, -1 for its first of a step
    position: dict[int, int]  # id -> position
    topological: list[int]

    @property
    def anchor(self) -> int:
        """The operation whose start begins a step: the first of compute (of any resource if nothing computes)."""
        return self.lanes.get(Resource.COMPUTE, next(iter(self.lanes.values())))[0]

    @property
    def anchor_lane(self) -> list[int]:
        return self.lanes[self.ops[self.anchor].resource]

    def waits_for(self, i: int) -> Iterator[int]:
        """Operations of the same step that must have ended before operation i starts."""
        yield from self.same[i]
        if self.before[i] >= 0:
            yield self.before[i]

    def causes(self, step: int, i: int) -> Iterator[tuple[int, int]]:
        """(step, operation) pairs whose ends decide when operation i of a step starts."""
        yield from ((step, d) for d in self.same[i])
        if step:
            yield from ((step - 1, d) for d in self.previous[i])
        if self.before[i] >= 0:
            yield step, self.before[i]
        elif step:
            yield step - 1, self.lanes[self.ops[i].resource][-1]


def check(program: StepProgram) -> Graph:
    """The program as a graph; ProgramError or DeadlockError, with names, when it can never run."""
    ops = program.ops
    if not ops:
        raise ProgramError("step program: it has no operations")
    position = {op.id: i for i, op in enumerate(ops)}
    if len(position) < len(ops):
        twice = next(op for i, op in enumerate(ops) if position[op.id] != i)
        raise ProgramError(f"step program: id {twice.id} ({twice.label}) is used by two operations")

    lanes: dict[Resource, list[int]] = {}
    same, previous, before = [], [], []
    for i, op in enumerate(ops):
        name = f"step program: {op.label} (id {op.id})"
        for what in ("seconds", "bytes", "dram_bytes", "workspace_bytes"):
            value = getattr(op, what)
            if not (math.isfinite(value) and value >= 0):
                raise ProgramError(f"{name} has {what} = {value}")
        for dep in op.deps:
            if dep.lag not in (0, 1):
                raise ProgramError(f"{name} has a dependency with lag {dep.lag}, not 0 or 1")
            if dep.op not in position:
                raise ProgramError(f"{name} depends on operation {dep.op}, which does not exist")
        same.append(tuple(position[d.op] for d in op.deps if d.lag == 0))
        previous.append(tuple(position[d.op] for d in op.deps if d.lag == 1))
        lane = lanes.setdefault(op.resource, [])
        before.append(lane[-1] if lane else -1)
        lane.append(i)
    lanes = {r: lanes[r] for r in Resource if r in lanes}
    graph = Graph(ops, lanes, same, previous, before, position, [])
    graph.topological.extend(_topological(graph))
    _check_buffers(program, graph)
    return graph


def _topological(graph: Graph) -> list[int]:
    n = len(graph.ops)
    after: list[list[int]] = [[] for _ in range(n)]
    missing = [0] * n
    for i in range(n):
        for d in graph.waits_for(i):
            after[d].append(i)
            missing[i] += 1
    order = [i for i in range(n) if not missing[i]]
    for i in order:
        for j in after[i]:
            missing[j] -= 1
            if not missing[j]:
                order.append(j)
    if len(order) < n:
        raise DeadlockError(_describe(graph, _short_cycle(graph, {i for i in range(n) if missing[i]})))
    return order


def _short_cycle(graph: Graph, stuck: set[int]) -> list[int]:
    """A cycle among stuck operations, in waiting order: each waits for the next, the last for the first."""
    # Every stuck operation waits for a stuck one, so walking on must come back to where it has been.
    walk, seen = [min(stuck)], {min(stuck): 0}
    while True:
        here = next(d for d in graph.waits_for(walk[-1]) if d in stuck)
        if here in seen:
            found = walk[seen[here] :]
            break
        seen[here] = len(walk)
        walk.append(here)
    candidates = [found]
    for start in found[:64]:
        parent = {start: start}
        queue = deque([start])
        while queue:
            i = queue.popleft()
            for d in graph.waits_for(i):
                if d == start:
                    path = [i]
                    while path[-1] != start:
                        path.append(parent[path[-1]])
                    candidates.append(path[::-1])
                    queue.clear()
                    break
                if d in stuck and d not in parent:
                    parent[d] = i
                    queue.append(d)
    return min((_corners(graph, c) for c in candidates), key=len)


def _corners(graph: Graph, cycle: list[int]) -> list[int]:
    """The cycle without operations that only stand between two others in one resource's queue."""

    def queued(i: int, j: int) -> bool:
        return graph.before[i] == j and j not in graph.same[i]

    n = len(cycle)
    kept = [c for k, c in enumerate(cycle) if not (queued(cycle[k - 1], c) and queued(c, cycle[(k + 1) % n]))]
    return kept or cycle


def _describe(graph: Graph, cycle: list[int]) -> str:
    text = []
    for k, i in enumerate(cycle):
        op, following = graph.ops[i], cycle[(k + 1) % len(cycle)]
        how = "waits for" if following in graph.same[i] else f"is queued on {op.resource} behind"
        text.append(f"{op.label} ({op.resource}, id {op.id}) {how} ")
    shown = text[:NAMED_AT_MOST]
    if len(text) > NAMED_AT_MOST:
        shown = [*text[: NAMED_AT_MOST - 1], f"... {len(text) - NAMED_AT_MOST} more ... ", text[-1]]
    first = graph.ops[cycle[0]]
    return "step program: operations wait for each other: " + "".join(shown) + f"{first.label} (id {first.id})"


def _check_buffers(program: StepProgram, graph: Graph) -> None:
    """Every buffer has releases, and each of them comes after the allocation in any possible timing."""
    # The predecessors of an operation on one resource are a prefix of its queue, so six numbers describe them all.
    resources = list(graph.lanes)
    rank = {i: k for lane in graph.lanes.values() for k, i in enumerate(lane)}
    clock: list[list[int]] = [[]] * len(graph.ops)
    for i in graph.topological:
        mine = [-1] * len(resources)
        for d in graph.waits_for(i):
            mine = [a if a > b else b for a, b in zip(mine, clock[d], strict=True)]
        mine[resources.index(graph.ops[i].resource)] = rank[i]
        clock[i] = mine
    for b in program.buffers:
        name = f"step program: {b.kind} buffer {b.id} of unit {b.unit}" + (f" m{b.micro}" if b.micro >= 0 else "")
        if not b.release:
            raise ProgramError(f"{name} is never released")
        for op in (b.alloc, *b.release):
            if op not in graph.position:
                raise ProgramError(f"{name} refers to operation {op}, which does not exist")
        if not (math.isfinite(b.bytes) and b.bytes >= 0):
            raise ProgramError(f"{name} has bytes = {b.bytes}")
        alloc = graph.position[b.alloc]
        lane = resources.index(graph.ops[alloc].resource)
        for release in b.release:
            if clock[graph.position[release]][lane] < rank[alloc]:
                raise ProgramError(
                    f"{name} can be released by {graph.ops[graph.position[release]].label} (id {release}) "
                    f"before {graph.ops[alloc].label} (id {b.alloc}) allocates it: nothing orders the two"
                )
