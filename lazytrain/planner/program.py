"""The mixed-integer program of one periodic training step (Pyomo).

Start times of every layer's operations are continuous, durations are linear in the decisions, and each resource serves
in a fixed order, so all timing is precedences without big-M. Decisions are counts of micro-batches per layer and
action, dropped boundaries, and resident weights. Time is in units of ``time_unit_s``, memory in GB.

Each constraint family is one function; its docstring states the inequality in words. The rules mirror those by which
``lazytrain.schedule.build`` orders a StepProgram; within a layer, micro-batches are taken as a stream.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pyomo.environ as pyo

from lazytrain.costs.table import ADAM_MOMENT_BYTES, CostTable
from lazytrain.models.spec import DTYPE_BYTES
from lazytrain.schedule.memory import STAGING_SLOTS
from lazytrain.schedule.plan import Action

GB = 1e9
# Weight of total recompute and transfer time in the objective: enough to break ties towards less traffic, and small
# beside the gap that is proven (the reported bound is lowered by its largest possible value).
TIE_BREAK = 2e-4


@dataclass(frozen=True)
class Shape:
    """What is fixed before the program is solved; the search tries several."""

    weight_buffers: int = 2
    gradient_buffers: int = 2
    transfer_window: int = 3
    max_segment: int = 8


class StepModel:
    """Builds the program for a CostTable; ``homes`` are the tiers that may hold activations besides the GPU."""

    def __init__(
        self,
        costs: CostTable,
        shape: Shape,
        *,
        homes: tuple[str, ...] = ("host",),
        capacities: dict[str, float] | None = None,
        allow_drop: bool = True,
        allow_resident: bool = True,
    ):
        self.costs, self.shape = costs, shape
        self.M, self.L, self.A = costs.micro_batches, costs.model.n_layers, costs.job.accumulation
        self.capacities = capacities or costs.capacities()
        self.tied = costs.model.tied
        self.actions = [a for a in Action if a is not Action.DROPPED and a.home in ("gpu", *homes)]
        self.allow_drop, self.allow_resident = allow_drop, allow_resident
        self.nvme = "nvme" in homes
        compute = self.M * sum(2 * c.forward_s + c.backward_s for c in costs.units)
        self.time_unit_s = max(compute, sum(costs.update_s(c) for c in costs.units)) / 10
        # No start time can lie further from another than all work of a step done serially.
        self.horizon = self._t(
            sum(
                self.M * (2 * c.forward_s + c.backward_s)
                + 2 * costs.h2d_s(c.weight_bytes)
                + costs.d2h_s(c.parked_bytes)
                + costs.update_s(c)
                for c in costs.units
            )
        )
        self.m = pyo.ConcreteModel()
        self.penalty: Any = 0
        self._decisions()
        plain = self.A > 1
        self.m.period_last = pyo.Var(bounds=(0, None))
        self._timing("last", self.m.period_last, last=True)
        period = self.m.period_last
        if plain:
            self.m.period_plain = pyo.Var(bounds=(0, None))
            self._timing("plain", self.m.period_plain, last=False)
            period = period + (self.A - 1) * self.m.period_plain
        self._gpu_memory()
        self._capacity()
        self.m.step = pyo.Expression(expr=period)
        self.max_penalty = self._max_penalty()
        self.m.objective = pyo.Objective(expr=period + TIE_BREAK * self.penalty)

    # --- durations and sizes as expressions -------------------------------------------------------------------------
    def _t(self, seconds: float) -> float:
        return seconds / self.time_unit_s

    def _size(self, layer: int, action: Action) -> float:
        """Bytes of what one micro-batch of a layer stores under an action."""
        return self.costs.layers[layer].saved_bytes if action.keeps else self.costs.boundary_bytes

    def _count(self, layer: int, *homes: str, keeps: bool | None = None) -> Any:
        chosen = [a for a in self.actions if a.home in homes and (keeps is None or a.keeps == keeps)]
        return sum(self.m.n[layer, a.value] for a in chosen)

    def _transfer(self, layer: int, seconds: Any, homes: tuple[str, ...]) -> Any:
        """Time to move what a layer stores in these homes; ``seconds(bytes)`` is the cost of one copy."""
        return sum(
            self._t(seconds(self._size(layer, a))) * self.m.n[layer, a.value] for a in self.actions if a.home in homes
        )

    def _sent_after(self, unit: int, seconds: Any, homes: tuple[str, ...]) -> Any:
        """The same for what leaves after the forward of a unit: its saved tensors and its output boundary."""
        total: Any = 0
        for a in self.actions:
            if a.home not in homes:
                continue
            if a.keeps and unit >= 1:
                total += self._t(seconds(self._size(unit - 1, a))) * self.m.n[unit - 1, a.value]
            if not a.keeps and unit < self.L:
                total += self._t(seconds(self._size(unit, a))) * self.m.n[unit, a.value]
        return total

    def _bytes(self, layer: int, *homes: str) -> Any:
        return sum(self._size(layer, a) / GB * self.m.n[layer, a.value] for a in self.actions if a.home in homes)

    def _away(self) -> tuple[str, ...]:
        """Homes off the GPU that the program may use."""
        return ("host", "nvme") if self.nvme else ("host",)

    # --- decisions -------------------------------------------------------------------------------------------------
    def _decisions(self) -> None:
        m, M, L = self.m, self.M, self.L
        m.n = pyo.Var(range(L), [a.value for a in self.actions], domain=pyo.NonNegativeIntegers, bounds=(0, M))
        m.drop = pyo.Var(range(L), domain=pyo.Binary)
        m.resident = pyo.Var(range(L), domain=pyo.Binary)
        m.embedding_resident = pyo.Var(domain=pyo.Binary)
        m.head_resident = pyo.Var(domain=pyo.Binary)
        m.drop[0].fix(0)
        for i in range(L):
            if not self.allow_drop or self.shape.max_segment < 2:
                m.drop[i].fix(0)
            if not self.allow_resident:
                m.resident[i].fix(0)
        # With one pass a step the vocabulary's weights are loaded once anyway; tied weights are always resident.
        if self.tied or self.A == 1 or not self.allow_resident:
            m.embedding_resident.fix(1 if self.tied else 0)
            m.head_resident.fix(1 if self.tied else 0)
        m.every_micro_batch = pyo.Constraint(range(L), rule=self._every_micro_batch)
        m.source_keeps_boundary = pyo.Constraint(range(1, L), rule=self._source_keeps_boundary)
        m.run = pyo.Var(range(L), bounds=(0, self.shape.max_segment))
        m.segment_length = pyo.Constraint(range(1, L), rule=self._segment_length)
        top = range(max(0, L - 1 - self.shape.transfer_window), L)
        m.leaves = pyo.Var(top, (False, True), domain=pyo.Binary)
        m.leaves_rule = pyo.Constraint(
            top,
            (False, True),
            rule=lambda m, i, keeps: M * m.leaves[i, keeps] >= self._count(i, *self._away(), keeps=keeps),
        )
        m.reload = pyo.Var(range(L), bounds=(0, 1))
        m.segment_reload = pyo.Constraint(range(1, L), rule=lambda m, i: m.reload[i] >= m.drop[i] - m.resident[i - 1])

    def _every_micro_batch(self, m: Any, i: int) -> Any:
        """Each micro-batch of a layer has exactly one action, or the layer's boundary is dropped for all of them."""
        return sum(m.n[i, a.value] for a in self.actions) + self.M * m.drop[i] == self.M

    def _source_keeps_boundary(self, m: Any, i: int) -> Any:
        """A dropped boundary is recomputed from the layer below, which then keeps boundaries only."""
        return self._count(i - 1, "gpu", "host", "nvme", keeps=True) <= self.M * (1 - m.drop[i])

    def _segment_length(self, m: Any, i: int) -> Any:
        """run(i) >= run(i-1) + 1 where boundary i is dropped: boundaries alive again at layer i's backward."""
        k = self.shape.max_segment
        return m.run[i] >= m.run[i - 1] + 1 - k * (1 - m.drop[i])

    # --- time ------------------------------------------------------------------------------------------------------
    def _timing(self, tag: str, period: Any, *, last: bool) -> None:
        """All start times of one pass. ``last`` passes carry norm and update, and the next forward waits for those."""
        m, L = self.m, self.L
        block = pyo.Block()
        m.add_component(tag, block)
        units = range(L + 2)
        for name, index in (
            ("forward", range(L + 1)), ("backward", range(L)), ("load", units), ("reload", range(L)),
            ("fetch", range(L)), ("fetched", range(L)), ("send", range(L + 1)), ("sent", range(L + 1)),
            ("gradient", units),
        ):  # fmt: skip
            block.add_component(name, pyo.Var(index, bounds=(0, None)))
        for name in ("loss", "embedding_backward"):
            block.add_component(name, pyo.Var(bounds=(0, None)))
        block.rules = pyo.ConstraintList()
        self._compute_chain(block, period)
        self._load_chain(block, period, last=last)
        self._fetch_chain(block, period)
        self._send_chain(block)
        self._gradient_chain(block, period)
        if self.nvme:
            self._drive_chain(block, period)
        self._cpu_chain(block, period, last=last)
        self._bandwidth(block, period, last=last)

    def _forward_time(self, unit: int) -> float:
        return self._t(self.M * self.costs.units[unit].forward_s)

    def _backward_time(self, i: int) -> Any:
        """Backward of a layer, its recomputation, and the no-grad forward that restores its dropped input."""
        costs, m = self.costs, self.m
        layer = costs.layers[i]
        time = self._t(self.M * layer.backward_s)
        recomputed = self.M - self._count(i, "gpu", "host", "nvme", keeps=True)
        time += self._t(layer.forward_s) * recomputed
        if i > 0:
            time += self._t(self.M * costs.layers[i - 1].forward_s) * m.drop[i]
        return time

    def _compute_chain(self, b: Any, period: Any) -> None:
        """Compute runs one operation at a time in step order, and the next step starts after the last one."""
        L = self.L
        for u in range(L):
            b.rules.add(b.forward[u + 1] >= b.forward[u] + self._forward_time(u))
        b.rules.add(b.loss >= b.forward[L] + self._forward_time(L))
        loss_time = self._t(self.M * self.costs.head.forward_s)
        b.rules.add(b.backward[L - 1] >= b.loss + loss_time)
        for i in range(L - 1, -1, -1):
            end = b.backward[i] + self._backward_time(i)
            b.rules.add((b.backward[i - 1] if i else b.embedding_backward) >= end)
            self.penalty += self._t(self.costs.layers[i].forward_s) * (
                self.M - self._count(i, "gpu", "host", "nvme", keeps=True)
            )
        end = b.embedding_backward + self._t(self.M * self.costs.embedding.backward_s)
        b.rules.add(b.forward[0] + period >= end)

    def _streams_back(self, i: int) -> bool:
        """Whether a streamed layer must be loaded again for backward: the topmost ones are still in their slots."""
        return i < self.L - self.shape.weight_buffers

    def _load_time(self, unit: int, *, last: bool) -> Any:
        """Forward load of a unit: once a pass when streamed, once a step when resident."""
        costs, m = self.costs, self.m
        time = self._t(costs.h2d_s(costs.units[unit].weight_bytes))
        if last:
            return time
        if unit == 0:
            return time * (1 - m.embedding_resident)
        if unit <= min(self.shape.weight_buffers, self.L):
            return 0.0  # still in its slot from the backward of the pass before
        return time * (1 - (m.head_resident if unit == self.L + 1 else m.resident[unit - 1]))

    def _reload_time(self, i: int) -> Any:
        """Backward load of a streamed layer, plus that of the layer below if it runs again to restore a boundary."""
        costs, m = self.costs, self.m
        time: Any = 0
        if self._streams_back(i):
            time += self._t(costs.h2d_s(costs.layers[i].weight_bytes)) * (1 - m.resident[i])
        if i > 0:
            time += self._t(costs.h2d_s(costs.layers[i - 1].weight_bytes)) * m.reload[i]
        return time

    def _if_resident(self, layers: range) -> Any:
        """Large where one of the layers is resident: a slot is then free earlier, and the rule is waived."""
        return self.horizon * sum(self.m.resident[i] for i in layers) if self.allow_resident else 0

    def _load_chain(self, b: Any, period: Any, *, last: bool) -> None:
        """Weight loads go in order, each before its layer computes and after its slot's previous user."""
        L, D = self.L, self.shape.weight_buffers
        for u in range(L + 2):
            end = b.load[u] + self._load_time(u, last=last)
            if u <= L:
                b.rules.add(b.load[u + 1] >= end)
                b.rules.add(b.forward[u] >= end)
            else:
                b.rules.add(b.loss >= end)
                b.rules.add(b.reload[L - 1] >= end)
            if D < u <= L:
                previous_user = b.forward[u - D] + self._forward_time(u - D)
                b.rules.add(b.load[u] >= previous_user - self._if_resident(range(u - D - 1, u)))
        if not self.tied:  # embedding and head share one place
            b.rules.add(b.load[L + 1] >= b.forward[0] + self._forward_time(0))
        for i in range(L - 1, -1, -1):
            end = b.reload[i] + self._reload_time(i)
            b.rules.add(b.backward[i] >= end)
            b.rules.add(b.fetch[i] >= end)
            if i + D < L:
                previous_user = b.backward[i + D] + self._backward_time(i + D)
                b.rules.add(b.reload[i] >= previous_user - self._if_resident(range(i, i + D + 1)))
            b.rules.add((b.reload[i - 1] if i else b.load[0] + period) >= b.fetched[i])

    def _fetch_chain(self, b: Any, period: Any) -> None:
        """Offloaded tensors come back in order of need, after their window's previous user, before their backward."""
        costs, L, M, W = self.costs, self.L, self.M, self.shape.transfer_window
        away = self._away()
        for i in range(L):
            layer = costs.layers[i]
            time = self._transfer(i, costs.h2d_s, away)
            count = self._count(i, *away)
            self.penalty += time
            b.rules.add(b.fetched[i] >= b.fetch[i] + time)
            # The micro-batches that never left come first, and cover the first fetch; the last one ends with the layer.
            backward = self._t(layer.backward_s)
            there = backward * (M - count) + self._t(layer.forward_s) * self._count(i, "gpu", keeps=False)
            b.rules.add(b.backward[i] + there >= b.fetch[i] + time / M)
            b.rules.add(b.backward[i] + self._backward_time(i) >= b.fetched[i] + backward)
            if i + W < L:
                window = b.backward[i + W] + self._t(costs.layers[i + W].backward_s) * (M - count)
                b.rules.add(b.fetch[i] >= window)
                b.rules.add(b.fetched[i] >= b.backward[i + W] + self._backward_time(i + W) + time / M)
            if i > L - 2 - W:
                self._after_sends(b, i, time)

    def _after_sends(self, b: Any, i: int, fetch_time: Any) -> None:
        """What a layer homes away comes back only after it has left: boundaries after the forward of the unit below,
        saved tensors after the layer's own, where the next layer's boundaries leave among them. Waived, by a binary,
        where there is nothing of the sort. Below the topmost layers the transfer window says so already.
        """
        m = self.m
        for keeps, left in ((False, b.sent[i]), (True, b.sent[i + 1] - self._boundary_sends(i + 1))):
            waived = self.horizon * (1 - m.leaves[i, keeps])
            b.rules.add(b.fetched[i] >= left + fetch_time / self.M - waived)

    def _boundary_sends(self, i: int) -> Any:
        """Time in which the offloaded input boundaries of a layer leave the GPU."""
        if i >= self.L:
            return 0
        return self._t(self.costs.d2h_s(self.costs.boundary_bytes)) * self._count(i, *self._away(), keeps=False)

    def _send_chain(self, b: Any) -> None:
        """What leaves goes in order of its making, starts after it is made, and is gone before the window moves on."""
        costs, L, M, W = self.costs, self.L, self.M, self.shape.transfer_window
        away = self._away()
        for u in range(L + 1):
            time = self._sent_after(u, costs.d2h_s, away)
            self.penalty += time
            one = self._t(costs.units[u].forward_s)
            saved = self._count(u - 1, *away, keeps=True) if u >= 1 else 0
            boundaries = self._count(u, *away, keeps=False) if u < L else 0
            # Micro-batches whose tensors leave come last in the layer.
            b.rules.add(b.send[u] >= b.forward[u] + one)
            b.rules.add(b.send[u] >= b.forward[u] + one * (M - saved - boundaries + 1))
            b.rules.add(b.sent[u] >= b.send[u] + time)
            b.rules.add(b.sent[u] >= b.forward[u] + self._forward_time(u) + time / M)
            if u < L:
                b.rules.add(b.send[u + 1] >= b.sent[u])
            if u + W <= L:
                end = b.forward[u + W] + self._forward_time(u + W)
                b.rules.add(end >= b.sent[u] + self._t(costs.units[u + W].forward_s))
        b.rules.add(b.gradient[L + 1] >= b.sent[L])

    def _gradient_chain(self, b: Any, period: Any) -> None:
        """Gradients leave in backward order; a layer's backward waits for its gradient slot to be empty."""
        costs, L, G = self.costs, self.L, self.shape.gradient_buffers
        end = {u: b.gradient[u] + self._t(costs.d2h_s(costs.units[u].parked_bytes)) for u in range(L + 2)}
        b.rules.add(b.gradient[L + 1] >= b.loss + self._t(self.M * costs.head.forward_s))
        for u in range(L + 1, 0, -1):
            b.rules.add(b.gradient[u - 1] >= end[u])
        for i in range(L):
            b.rules.add(b.gradient[i + 1] >= b.backward[i] + self._backward_time(i))
            if i + G < L:
                b.rules.add(b.backward[i] >= end[i + G + 1])
        b.rules.add(b.gradient[0] >= b.embedding_backward + self._t(self.M * costs.embedding.backward_s))
        b.rules.add(b.embedding_backward >= end[L + 1])
        b.rules.add(b.send[0] + period >= end[0])

    def _drive_chain(self, b: Any, period: Any) -> None:
        """Drive writes follow their sends, reads precede their fetches; staging in host memory fits the window."""
        costs, L, M, W = self.costs, self.L, self.M, self.shape.transfer_window
        for name, n in (("drive_write", L + 1), ("drive_written", L + 1), ("drive_read", L), ("drive_did_read", L)):
            b.add_component(name, pyo.Var(range(n), bounds=(0, None)))
        for u in range(L + 1):
            time = self._sent_after(u, costs.nvme_write_s, ("nvme",))
            one_send = self._sent_after(u, costs.d2h_s, ("nvme",)) / M
            self.penalty += time
            b.rules.add(b.drive_write[u] >= b.send[u] + one_send)
            b.rules.add(b.drive_written[u] >= b.drive_write[u] + time)
            b.rules.add((b.drive_write[u + 1] if u < L else b.drive_write[0] + period) >= b.drive_written[u])
            if u + W <= L:
                b.rules.add(b.sent[u + W] >= b.drive_written[u])
        for i in range(L):
            time = self._transfer(i, costs.nvme_read_s, ("nvme",))
            b.rules.add(b.drive_did_read[i] >= b.drive_read[i] + time)
            b.rules.add(b.drive_read[i] >= b.drive_written[i])
            b.rules.add(b.fetched[i] >= b.drive_did_read[i] + self._transfer(i, costs.h2d_s, ("nvme",)) / M)
            b.rules.add((b.drive_read[i - 1] if i else b.drive_read[L - 1] + period) >= b.drive_did_read[i])
            if i + W < L:
                b.rules.add(b.drive_read[i] >= b.backward[i + W] + self._t(costs.layers[i + W].backward_s))

    def _adding(self, last: bool) -> float:
        """Share of passes of this sort whose gradients are added to parked ones: all but the step's first."""
        if self.A == 1:
            return 0.0
        return 1.0 if last else (self.A - 2) / (self.A - 1)

    def _cpu_chain(self, b: Any, period: Any, *, last: bool) -> None:
        """Norms follow gradients; after the last one updates run in forward order, each before its unit is loaded."""
        costs, L = self.costs, self.L
        adding = self._adding(last)
        units = range(L + 2)
        b.cpu = pyo.Var(units, bounds=(0, None))
        for u in units:
            cost = costs.units[u]
            b.rules.add(b.cpu[u] >= b.gradient[u] + self._t(costs.d2h_s(cost.parked_bytes)))
            time = (costs.norm_s(cost) if last else 0.0) + adding * costs.accumulate_s(cost)
            if u > 0:
                b.rules.add(b.cpu[u - 1] >= b.cpu[u] + self._t(time))
            elif not last:
                b.rules.add(b.cpu[L + 1] + period >= b.cpu[0] + self._t(time))
            if self.A > 1 and u + STAGING_SLOTS < L + 2:
                behind = costs.units[u + STAGING_SLOTS]
                b.rules.add(b.gradient[u] >= b.cpu[u + STAGING_SLOTS] + self._t(adding * costs.accumulate_s(behind)))
        if not last:
            return
        b.update = pyo.Var(units, bounds=(0, None))
        first = costs.embedding
        norms = costs.norm_s(first) + adding * costs.accumulate_s(first)
        b.rules.add(b.update[0] >= b.cpu[0] + self._t(norms))
        for u in units:
            end = b.update[u] + self._t(costs.update_s(costs.units[u]))
            b.rules.add((b.update[u + 1] if u <= L else b.cpu[L + 1] + period) >= end)
            b.rules.add(b.load[u] + period >= end)

    def _bandwidth(self, b: Any, period: Any, *, last: bool) -> None:
        """Host memory traffic of links, drive and CPU fits the DRAM bandwidth over the period."""
        costs, L = self.costs, self.L
        away = self._away()
        traffic: Any = 0
        for u, cost in enumerate(costs.units):
            traffic += cost.weight_bytes + cost.parked_bytes
            if last:
                traffic += cost.parked_bytes + costs.update_dram_bytes(cost, 4)
            if self.A > 1:
                traffic += self._adding(last) * costs.accumulate_dram_bytes(cost)
            if 1 <= u <= L:
                traffic += cost.weight_bytes * (1 - self.m.resident[u - 1]) if self._streams_back(u - 1) else 0.0
                traffic += 2 * GB * self._bytes(u - 1, *away) + 2 * GB * self._bytes(u - 1, "nvme")
        bandwidth = float(costs.machine.host.dram_bandwidth) * self.time_unit_s
        b.dram = pyo.Constraint(expr=traffic / bandwidth <= period)

    # --- memory ----------------------------------------------------------------------------------------------------
    def _gpu_static(self) -> Any:
        """Slots, vocabulary and resident weights, gradient slots (GB)."""
        costs, m, L = self.costs, self.m, self.L
        units = costs.units
        m.all_resident = pyo.Var(domain=pyo.Binary)
        m.all_resident_rule = pyo.Constraint(range(L), rule=lambda m, i: m.all_resident <= m.resident[i])
        m.vocabulary_slot = pyo.Var(bounds=(0, None))
        embedding, head = units[0].weight_bytes / GB, units[L + 1].weight_bytes / GB
        m.vocabulary_embedding = pyo.Constraint(expr=m.vocabulary_slot >= embedding * (1 - m.embedding_resident))
        m.vocabulary_head = pyo.Constraint(expr=m.vocabulary_slot >= head * (1 - m.head_resident))
        largest = max(c.weight_bytes for c in costs.layers) / GB
        gradients = min(self.shape.gradient_buffers, L) * max(c.gradient_bytes for c in costs.layers) / GB
        vocabulary_gradient = max(units[0].gradient_bytes, units[L + 1].gradient_bytes) / GB
        if self.tied:
            vocabulary_gradient += units[L + 1].gradient_bytes / GB
        return (
            min(self.shape.weight_buffers, L) * largest * (1 - m.all_resident)
            + m.vocabulary_slot
            + embedding * m.embedding_resident
            + head * m.head_resident
            + sum(c.weight_bytes / GB * m.resident[i] for i, c in enumerate(costs.layers))
            + gradients
            + vocabulary_gradient
        )

    def _gpu_memory(self) -> None:
        """At each layer's forward, at the loss and at each backward: static + kept + in flight + working set <= GPU."""
        costs, m, L, M, W = self.costs, self.m, self.L, self.M, self.shape.transfer_window
        boundary = costs.boundary_bytes / GB
        capacity = self.capacities["gpu"] / GB
        static = self._gpu_static()
        m.static = pyo.Var(bounds=(0, None))
        m.static_rule = pyo.Constraint(expr=m.static == static)
        m.kept = pyo.Var(range(L), bounds=(0, None))
        m.kept_rule = pyo.Constraint(
            range(L), rule=lambda m, i: m.kept[i] == (m.kept[i - 1] if i else 0) + self._bytes(i, "gpu")
        )
        away = self._away()
        m.gpu = pyo.ConstraintList()
        for i in range(L):
            layer = costs.layers[i]
            # Outputs of this layer and the inputs it has not used yet: never more than M + 1 boundaries.
            hidden = (M + 1) * boundary
            for last in (i, i - 1):
                leaving = sum(self._bytes_made(u, away) for u in range(max(0, last - W + 1), last + 1))
                working = layer.forward_workspace_bytes / GB
                m.gpu.add(m.static + m.kept[i] + hidden + leaving + working <= capacity)
            # Backward: at its first micro-batch everything of the layer is still there.
            working = (
                max(layer.backward_workspace_bytes, layer.forward_workspace_bytes + costs.boundary_bytes) / GB
                + layer.saved_bytes / GB
            )
            for first in (i, i - 1):
                arriving = sum(self._bytes(j, *away) for j in range(max(0, first - W + 1), first + 1))
                restored = M * boundary * m.run[i]
                m.gpu.add(m.static + m.kept[i] + hidden + arriving + restored + working <= capacity)
        head = (costs.head.forward_workspace_bytes + (M + 1) * costs.boundary_bytes) / GB
        leaving = sum(self._bytes_made(u, away) for u in range(max(0, L - W + 1), L + 1))
        m.gpu.add(m.static + m.kept[L - 1] + leaving + head <= capacity)

    def _bytes_made(self, unit: int, away: tuple[str, ...]) -> Any:
        """Bytes (GB) that leave after the forward of a unit."""
        total: Any = 0
        for a in self.actions:
            if a.home in away and a.keeps and unit >= 1:
                total += self._size(unit - 1, a) / GB * self.m.n[unit - 1, a.value]
            if a.home in away and not a.keeps and unit < self.L:
                total += self._size(unit, a) / GB * self.m.n[unit, a.value]
        return total

    def _capacity(self) -> None:
        """Host, pinned and drive bytes of everything homed there fit."""
        costs, m = self.costs, self.m
        parameters = sum(u.parameters for u in costs.units)
        parked = sum(u.parked_bytes for u in costs.units)
        streamed = parameters * costs.stream_copy_bytes
        staging = STAGING_SLOTS * max(u.parked_bytes for u in costs.units) if self.A > 1 else 0.0
        stored = sum(self._bytes(i, "host") for i in range(self.L))
        pinned = (parked + streamed + staging) / GB + stored
        if self.nvme:  # staging of at most one window in each direction
            window = self.shape.transfer_window * self.M * max(c.saved_bytes for c in costs.layers)
            pinned += 2 * min(window, self.M * costs.boundary_bytes) / GB
        state = parameters * (DTYPE_BYTES["fp32"] + ADAM_MOMENT_BYTES) / GB
        m.host = pyo.Constraint(expr=state + pinned <= self.capacities["host"] / GB)
        if costs.machine.gpu.device != "cpu":
            m.pinned = pyo.Constraint(expr=pinned <= self.capacities["pinned"] / GB)
        if self.nvme:
            m.drive = pyo.Constraint(
                expr=sum(self._bytes(i, "nvme") for i in range(self.L)) <= self.capacities["nvme"] / GB
            )

    def _max_penalty(self) -> float:
        """The largest value the tie-break term can take, in time units."""
        costs, away = self.costs, [a for a in self.actions if a.home != "gpu"]
        total = 0.0
        for i, layer in enumerate(costs.layers):
            most = max((costs.h2d_s(self._size(i, a)) + costs.d2h_s(self._size(i, a)) for a in away), default=0.0)
            if self.nvme:
                most += max(costs.nvme_write_s(self._size(i, a)) for a in away if a.home == "nvme")
            total += self._t(self.M * (most + layer.forward_s))
        return total * (2 if self.A > 1 else 1)
