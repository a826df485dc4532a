"""Plan + CostTable -> StepProgram: the only place that knows in which order a step runs and what waits for what."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict

from lazytrain.costs.table import CostTable
from lazytrain.errors import InputError
from lazytrain.models.spec import DTYPE_BYTES
from lazytrain.schedule.memory import STAGING_SLOTS, is_resident, static_memory, weight_slots
from lazytrain.schedule.plan import Action, Plan
from lazytrain.schedule.program import Buffer, BufferKind, Dep, Kind, Op, Resource, StepProgram
from lazytrain.schedule.slots import WeightSlots


def build_program(plan: Plan, costs: CostTable) -> StepProgram:
    """The StepProgram of a plan. InputError when plan and costs are not of one model and batch split."""
    if len(plan.layers) != costs.model.n_layers or plan.micro_batches != costs.micro_batches or plan.job != costs.job:
        raise InputError(
            f"the plan ({len(plan.layers)} layers, M={plan.micro_batches}) is not of these costs "
            f"({costs.model.n_layers} layers, M={costs.micro_batches})"
        )
    return _Builder(plan, costs).build()


class _Builder:
    def __init__(self, plan: Plan, costs: CostTable):
        self.plan, self.costs = plan, costs
        self.M, self.L, self.passes = plan.micro_batches, len(plan.layers), plan.job.accumulation
        self.head = self.L + 1
        self.tied = costs.model.tied
        self.actions = [layer.actions() for layer in plan.layers]
        self.ops: list[Op] = []
        self.buffer_of: dict[tuple[str, int, int], int] = {}  # live buffer of (kind, unit, micro)
        self.buffers: list[tuple[BufferKind, str, float, int, list[int], int, int]] = []
        self.slots = WeightSlots(weight_slots(plan), self.visits())
        self.loaded: dict[int, int] = {}  # resident unit -> its load
        self.vocabulary_user = -1  # last compute op that used the shared vocabulary weights
        self.vocabulary_first_load = -1
        self.gradient_sent: dict[int, int] = {}  # gradient slot -> last send from it
        self.vocabulary_gradient_sent = -1
        self.sends: list[tuple[int, int]] = []  # (forward position, last op that empties the GPU)
        self.writes: list[tuple[int, int]] = []  # (forward position, drive write)
        self.send_of: dict[tuple[str, int, int], int] = {}
        self.backward_at: dict[int, int] = {}  # backward position -> backward op
        self.staged: list[int] = []  # accumulate ops of the step, in order
        self.lagged: list[tuple[int, int]] = []  # (op, op of the step before that it waits for)

    # --- helpers ---------------------------------------------------------------------------------------------------
    def add(
        self,
        kind: Kind,
        resource: Resource,
        unit: int,
        *,
        micro: int = -1,
        pass_index: int = 0,
        after: list[int] | None = None,
        seconds: float = 0.0,
        moved: float = 0.0,
        dram: float = 0.0,
        workspace: float = 0.0,
        slot: int = -1,
        gradient_slot: int = -1,
        keep: bool = False,
    ) -> int:
        op = len(self.ops)
        deps = tuple(Dep(d) for d in sorted({d for d in after or [] if d >= 0}))
        self.ops.append(
            Op(
                op,
                kind,
                resource,
                unit,
                micro,
                pass_index,
                deps,
                seconds,
                moved,
                dram,
                workspace,
                slot,
                gradient_slot,
                keep,
            )
        )
        return op

    def open(self, kind: BufferKind, unit: int, micro: int, size: float, op: int, tier: str = "gpu") -> None:
        self.buffer_of[kind if tier == "gpu" else "host " + kind, unit, micro] = len(self.buffers)
        self.buffers.append((kind, tier, size, op, [], unit, micro))

    def release(self, kind: str, unit: int, micro: int, *ops: int) -> None:
        """The live buffer of this name ends once these operations have ended too."""
        self.buffers[self.buffer_of[kind, unit, micro]][4].extend(ops)

    def resident(self, unit: int) -> bool:
        return is_resident(self.plan, unit, tied=self.tied)

    def action(self, unit: int, micro: int) -> Action:
        return self.actions[unit - 1][micro]

    # --- weights ---------------------------------------------------------------------------------------------------
    def visits(self) -> list[int]:
        """Streamed layers in the order in which a step uses their weights."""
        one_pass = list(range(1, self.L + 1))
        for start, end in reversed(self.plan.segments()):
            one_pass += self.restoring(start + 1, end)
            one_pass += range(end, start, -1)
        return [unit for unit in one_pass * self.passes if not self.resident(unit)]

    def restoring(self, first: int, last: int) -> range:
        """The layers of a segment that run again without gradients to restore its dropped boundaries."""
        if first == last:
            return range(0)
        return range(first, last + 1 if self.plan.style.recompute_whole_segment else last)

    def load(
        self, unit: int, p: int, extra: list[int] | None = None, *, reuse: bool = True, forward: bool = False
    ) -> tuple[int, int]:
        """The operation that brings a unit's weights, and their slot; with ``reuse`` an earlier load if still there."""
        size = self.costs.units[unit].weight_bytes
        seconds = self.costs.h2d_s(size)
        if self.resident(unit):
            if unit not in self.loaded:
                self.loaded[unit] = self.add(
                    Kind.LOAD_WEIGHTS, Resource.H2D, unit, seconds=seconds, moved=size, dram=size
                )
            return self.loaded[unit], -1
        after = list(extra or [])
        if unit in (0, self.head):  # one place holds the embedding first and the head later
            op = self.add(
                Kind.LOAD_WEIGHTS,
                Resource.H2D,
                unit,
                pass_index=p,
                after=[*after, self.vocabulary_user],
                seconds=seconds,
                moved=size,
                dram=size,
            )
            if self.vocabulary_first_load < 0:
                self.vocabulary_first_load = op
            return op, -1
        slots = self.slots
        slot = slots.visit(unit)
        if reuse and slot >= 0:
            return slots.load[slot], slot
        if slot < 0:
            slot = slots.victim(forward=forward)
        op = self.add(
            Kind.LOAD_WEIGHTS,
            Resource.H2D,
            unit,
            pass_index=p,
            after=[*after, slots.last_user[slot]],
            slot=slot,
            seconds=seconds,
            moved=size,
            dram=size,
        )
        slots.fill(slot, unit, op)
        return op, slot

    def used(self, unit: int, slot: int, op: int) -> None:
        if slot >= 0:
            self.slots.last_user[slot] = op
        elif unit in (0, self.head) and not self.resident(unit):
            self.vocabulary_user = op

    # --- one pass --------------------------------------------------------------------------------------------------
    def forward(self, p: int) -> None:
        costs, M = self.costs, self.M
        for unit in range(self.L + 1):
            weights, slot = self.load(unit, p, forward=True)
            cost = costs.units[unit]
            for m in range(M):
                keep = unit > 0 and self.action(unit, m).keeps
                position = unit * M + m
                op = self.add(
                    Kind.FORWARD,
                    Resource.COMPUTE,
                    unit,
                    micro=m,
                    pass_index=p,
                    after=[weights, *self.left_before(self.sends, position)],
                    seconds=cost.forward_s,
                    workspace=cost.forward_workspace_bytes,
                    slot=slot,
                    keep=keep,
                )
                self.used(unit, slot, op)
                self.open("boundary", unit + 1, m, costs.boundary_bytes, op)
                if unit > 0:
                    action = self.action(unit, m)
                    if action is not Action.BOUNDARY_GPU:
                        self.release("boundary", unit, m, op)
                    if keep:
                        self.open("saved", unit, m, cost.saved_bytes, op)
                        if action.home != "gpu":
                            self.send("saved", unit, m, p, op, position, cost.saved_bytes, action.home)
                if unit < self.L:
                    action = self.action(unit + 1, m)
                    if action in (Action.BOUNDARY_HOST, Action.BOUNDARY_NVME):
                        self.send("boundary", unit + 1, m, p, op, position, costs.boundary_bytes, action.home)

    def left_before(self, transfers: list[tuple[int, int]], position: int) -> list[int]:
        """The last transfer out that must be over at a forward position: what is under way fits the window."""
        limit = position - self.plan.transfer_window * self.M
        found = bisect_right(transfers, (limit, len(self.ops)))
        return [transfers[found - 1][1]] if found else []

    def send(
        self, kind: BufferKind, unit: int, m: int, p: int, producer: int, position: int, size: float, home: str
    ) -> None:
        costs = self.costs
        after = [producer]
        if home == "nvme":
            after += self.left_before(self.writes, position)
        op = self.add(
            Kind(f"send_{kind}"),
            Resource.D2H,
            unit,
            micro=m,
            pass_index=p,
            after=after,
            seconds=costs.d2h_s(size),
            moved=size,
            dram=size,
        )
        self.release(kind, unit, m, op)
        self.sends.append((position, op))
        self.send_of[kind, unit, m] = op
        if home == "nvme":
            write = self.add(
                Kind(f"write_{kind}"),
                Resource.NVME_WRITE,
                unit,
                micro=m,
                pass_index=p,
                after=[op],
                seconds=costs.nvme_write_s(size),
                moved=size,
                dram=size,
            )
            self.open("staging", unit, m, size, op, tier="host")
            self.release("host staging", unit, m, write)
            self.writes.append((position, write))
            self.send_of[kind, unit, m] = write

    def fetch(self, kind: BufferKind, unit: int, m: int, p: int, position: int, gate: list[int]) -> int:
        """Brings an offloaded tensor back for the backward at ``position``; -1 if it never left."""
        action = self.action(unit, m)
        if action.home not in ("host", "nvme") or action.keeps != (kind == "saved"):
            return -1
        costs = self.costs
        size = costs.units[unit].saved_bytes if kind == "saved" else costs.boundary_bytes
        after = [
            self.send_of[kind, unit, m],
            self.backward_at.get(position - self.plan.transfer_window * self.M, -1),
            *gate,
        ]
        if action.home == "nvme":
            read = self.add(
                Kind(f"read_{kind}"),
                Resource.NVME_READ,
                unit,
                micro=m,
                pass_index=p,
                after=after,
                seconds=costs.nvme_read_s(size),
                moved=size,
                dram=size,
            )
            self.open("staging", unit, m, size, read, tier="host")
            after = [read]
        op = self.add(
            Kind(f"load_{kind}"),
            Resource.H2D,
            unit,
            micro=m,
            pass_index=p,
            after=after,
            seconds=costs.h2d_s(size),
            moved=size,
            dram=size,
        )
        if action.home == "nvme":
            self.release("host staging", unit, m, op)
        self.open(kind, unit, m, size, op)
        return op

    def loss(self, p: int) -> None:
        weights, slot = self.load(self.head, p)
        cost = self.costs.head
        workspace = cost.forward_workspace_bytes
        if self.plan.style.keep_all_logits:
            workspace += self.costs.all_logits_bytes
        table = self.loaded[0] if self.tied else -1
        for m in range(self.M):
            op = self.add(
                Kind.LOSS,
                Resource.COMPUTE,
                self.head,
                micro=m,
                pass_index=p,
                after=[weights, table, self.vocabulary_gradient_sent],
                seconds=cost.forward_s,
                workspace=workspace,
                slot=slot,
            )
            self.used(self.head, slot, op)
            self.release("boundary", self.head, m, op)
            self.open("boundary_gradient", self.head, m, self.costs.boundary_bytes, op)
        self.send_gradient(self.head, p, op, -1)

    def backward(self, p: int) -> None:
        self.backward_at = {}
        for start, end in reversed(self.plan.segments()):
            self.recompute_segment(start + 1, end, p)
            for unit in range(end, start, -1):
                self.backward_unit(unit, p)
        for m in range(self.M):  # embedding: adds rows into the table's gradient
            op = self.add(
                Kind.BACKWARD,
                Resource.COMPUTE,
                0,
                micro=m,
                pass_index=p,
                after=[self.vocabulary_gradient_sent],
                seconds=self.costs.embedding.backward_s,
            )
            self.release("boundary_gradient", 1, m, op)
        self.send_gradient(0, p, op, -1)

    def last_compute(self) -> int:
        return next(op.id for op in reversed(self.ops) if op.resource is Resource.COMPUTE)

    def recompute_segment(self, first: int, last: int, p: int) -> None:
        """No-grad forward of units first..last-1, which brings the dropped boundaries first+1..last back."""
        costs = self.costs
        gate = [] if self.plan.style.backward_prefetch else [self.last_compute()]
        for unit in self.restoring(first, last):
            weights, slot = self.load(unit, p, gate, reuse=self.plan.style.backward_prefetch)
            for m in range(self.M):
                after = [weights]
                if unit == first:
                    after.append(self.fetch("boundary", unit, m, p, (self.L - last) * self.M + m, gate))
                op = self.add(
                    Kind.RECOMPUTE_BOUNDARY,
                    Resource.COMPUTE,
                    unit,
                    micro=m,
                    pass_index=p,
                    after=after,
                    seconds=costs.units[unit].forward_s,
                    slot=slot,
                    workspace=costs.units[unit].forward_workspace_bytes
                    + (costs.boundary_bytes if unit == last else 0.0),
                )
                self.used(unit, slot, op)
                if unit < last:
                    self.open("boundary", unit + 1, m, costs.boundary_bytes, op)
            if not self.plan.style.backward_prefetch:
                gate = [op]

    def backward_unit(self, unit: int, p: int) -> None:
        costs, plan, M = self.costs, self.plan, self.M
        cost = costs.units[unit]
        in_segment = unit < self.L and bool(plan.layers[unit].dropped)  # boundary already fetched for the layers above
        gate = [] if plan.style.backward_prefetch else [self.last_compute()]
        weights, slot = self.load(unit, p, gate, reuse=plan.style.backward_prefetch)
        gradient_slot = (self.L - unit) % plan.gradient_buffers
        op = -1
        for m in range(M):
            action, position = self.action(unit, m), (self.L - unit) * M + m
            fetched = -1
            if not (in_segment and not action.keeps):
                fetched = self.fetch("saved" if action.keeps else "boundary", unit, m, p, position, gate)
            after = [weights, fetched]
            if not action.keeps:
                recompute = self.add(
                    Kind.RECOMPUTE,
                    Resource.COMPUTE,
                    unit,
                    micro=m,
                    pass_index=p,
                    after=after,
                    seconds=cost.forward_s,
                    workspace=cost.forward_workspace_bytes + costs.boundary_bytes,
                    slot=slot,
                    keep=True,
                )
                self.open("saved", unit, m, cost.saved_bytes, recompute)
                after = [recompute]
            if m == 0:
                after.append(self.gradient_sent.get(gradient_slot, -1))
            op = self.add(
                Kind.BACKWARD,
                Resource.COMPUTE,
                unit,
                micro=m,
                pass_index=p,
                after=after,
                seconds=cost.backward_s,
                workspace=cost.backward_workspace_bytes,
                slot=slot,
                gradient_slot=gradient_slot,
            )
            self.used(unit, slot, op)
            self.backward_at[position] = op
            self.release("saved", unit, m, op)
            if not action.keeps:
                self.release("boundary", unit, m, op)
            self.release("boundary_gradient", unit + 1, m, op)
            self.open("boundary_gradient", unit, m, costs.boundary_bytes, op)
        self.gradient_sent[gradient_slot] = self.send_gradient(unit, p, op, gradient_slot)

    # --- gradients and update --------------------------------------------------------------------------------------
    def send_gradient(self, unit: int, p: int, producer: int, gradient_slot: int) -> int:
        """Gradient to host memory once a pass; later passes go through staging and are added on the CPU."""
        costs, cost = self.costs, self.costs.units[unit]
        after, staging = [producer], -1
        if p > 0:
            staging = len(self.staged) % STAGING_SLOTS
            after += self.staged[-STAGING_SLOTS : -STAGING_SLOTS + 1] if len(self.staged) >= STAGING_SLOTS else []
        send = self.add(
            Kind.SEND_GRADIENT,
            Resource.D2H,
            unit,
            pass_index=p,
            after=after,
            seconds=costs.d2h_s(cost.parked_bytes),
            moved=cost.parked_bytes,
            dram=cost.parked_bytes,
            slot=staging,
            gradient_slot=gradient_slot,
        )
        ready = send
        if p > 0:
            ready = self.add(
                Kind.ACCUMULATE,
                Resource.CPU,
                unit,
                pass_index=p,
                after=[send],
                seconds=costs.accumulate_s(cost),
                moved=cost.parked_bytes,
                dram=costs.accumulate_dram_bytes(cost),
                slot=staging,
            )
            self.staged.append(ready)
        if p == self.passes - 1:
            self.add(
                Kind.NORM,
                Resource.CPU,
                unit,
                pass_index=p,
                after=[ready],
                seconds=costs.norm_s(cost),
                moved=cost.parked_bytes,
                dram=cost.parked_bytes,
            )
        if unit in (0, self.head):
            self.vocabulary_gradient_sent = send
        return send

    def update(self) -> None:
        costs = self.costs
        master = DTYPE_BYTES[self.plan.style.master_dtype]
        last_norm = self.ops[-1].id
        clip = self.add(Kind.CLIP, Resource.CPU, -1, pass_index=self.passes - 1, after=[last_norm])
        updates = []
        for unit, cost in enumerate(costs.units):
            op = self.add(
                Kind.UPDATE,
                Resource.CPU,
                unit,
                pass_index=self.passes - 1,
                after=[clip],
                seconds=costs.update_s(cost),
                moved=costs.update_dram_bytes(cost, master),
                dram=costs.update_dram_bytes(cost, master),
            )
            updates.append(op)
        serial = self.plan.style.update == "serial"
        first_load: dict[int, int] = {}
        for load in self.ops:
            if load.kind is Kind.LOAD_WEIGHTS:
                first_load.setdefault(load.unit, load.id)
        for unit, first in first_load.items():
            self.lagged.append((first, updates[-1] if serial else updates[unit]))

    def tie_to_previous_step(self) -> None:
        """Slots are reused across steps too: their first users wait for the last ones of the step before."""
        for slot, load in self.slots.first_load.items():
            self.lagged.append((load, self.slots.last_user[slot]))
        if self.vocabulary_first_load >= 0:
            self.lagged.append((self.vocabulary_first_load, self.vocabulary_user))
        extra: dict[int, set[int]] = defaultdict(set)
        for waiting, previous in self.lagged:
            extra[waiting].add(previous)
        for waiting, previous_ops in extra.items():
            op = self.ops[waiting]
            self.ops[waiting] = op._replace(deps=op.deps + tuple(Dep(o, 1) for o in sorted(previous_ops)))

    def build(self) -> StepProgram:
        for p in range(self.passes):
            self.sends, self.writes, self.send_of = [], [], {}
            self.forward(p)
            self.loss(p)
            self.backward(p)
        self.update()
        self.tie_to_previous_step()
        return StepProgram(
            n_units=self.head + 1,
            micro_batches=self.M,
            passes=self.passes,
            weight_slots=self.slots.count,
            gradient_slots=min(self.plan.gradient_buffers, self.L),
            ops=tuple(self.ops),
            buffers=tuple(
                Buffer(i, kind, tier, size, alloc, tuple(release), unit, micro)  # type: ignore[arg-type]
                for i, (kind, tier, size, alloc, release, unit, micro) in enumerate(self.buffers)
            ),
            static=static_memory(self.plan, costs=self.costs),
        )
