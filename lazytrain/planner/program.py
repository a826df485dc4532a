"""The mixed-integer program of one periodic training step (Pyomo).

Start times of every layer's operations are continuous, durations are linear in the decisions, and each resource serves
in a fixed order, so timing is precedences; big-M terms only waive those that residency or a dropped boundary removes.
Decisions are counts of micro-batches per layer and action, dropped boundaries, and resident weights. Time is in units
of ``time_unit_s``, memory in GB.

Each constraint family is one function; its docstring states the inequality in words. The rules mirror those by which
``lazytrain.schedule.build`` orders a StepProgram; within a layer, micro-batches are taken as a stream.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pyomo.environ as pyo

from lazytrain.costs.table import CostTable
from lazytrain.planner.limits import GB, gpu_memory, tier_capacity
from lazytrain.schedule.memory import STAGING_SLOTS
from lazytrain.schedule.plan import Action

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
        self.horizon = self._t(sum(self._serial_s(u) for u in range(self.L + 2)))
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
        gpu_memory(self)
        tier_capacity(self)
        self.m.step = pyo.Expression(expr=period)
        self.max_penalty = self._max_penalty()
        self.m.objective = pyo.Objective(expr=period + TIE_BREAK * self.penalty)

    # --- durations and sizes as expressions -------------------------------------------------------------------------
    def _t(self, seconds: float) -> float:
        return seconds / self.time_unit_s

    def _serial_s(self, unit: int) -> float:
        """Seconds of all work of a unit, done serially: no start time can lie further from another than their sum."""
        costs, cost = self.costs, self.costs.units[unit]
        moved = max(cost.saved_bytes, costs.boundary_bytes)
        away = costs.h2d_s(moved) + costs.d2h_s(moved)
        if self.nvme:
            away += costs.nvme_read_s(moved) + costs.nvme_write_s(moved)
        gradient = costs.d2h_s(cost.parked_bytes) + costs.norm_s(cost) + costs.accumulate_s(cost)
        compute = 2 * cost.forward_s + cost.backward_s
        return self.M * (compute + away) + 2 * costs.h2d_s(cost.weight_bytes) + gradient + costs.update_s(cost)

    def size(self, layer: int, action: Action) -> float:
        """Bytes of what one micro-batch of a layer stores under an action."""
        return self.costs.layers[layer].saved_bytes if action.keeps else self.costs.boundary_bytes

    def _count(self, layer: int, *homes: str, keeps: bool | None = None) -> Any:
        chosen = [a for a in self.actions if a.home in homes and (keeps is None or a.keeps == keeps)]
        return sum(self.m.n[layer, a.value] for a in chosen)

    def _transfer(self, layer: int, seconds: Any, homes: tuple[str, ...]) -> Any:
        """Time to move what a layer stores in these homes; ``seconds(bytes)`` is the cost of one copy."""
        return sum(
            self._t(seconds(self.size(layer, a))) * self.m.n[layer, a.value] for a in self.actions if a.home in homes
        )

    def _sent_after(self, unit: int, seconds: Any, homes: tuple[str, ...]) -> Any:
        """The same for what leaves after the forward of a unit: its saved tensors and its output boundary."""
        total: Any = 0
        for a in self.actions:
            if a.home not in homes:
                continue
            if a.keeps and unit >= 1:
                total += self._t(seconds(self.size(unit - 1, a))) * self.m.n[unit - 1, a.value]
            if not a.keeps and unit < self.L:
                total += self._t(seconds(self.size(unit, a))) * self.m.n[unit, a.value]
        return total

    def stored(self, layer: int, *homes: str) -> Any:
        return sum(self.size(layer, a) / GB * self.m.n[layer, a.value] for a in self.actions if a.home in homes)

    def away(self) -> tuple[str, ...]:
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
            rule=lambda m, i, keeps: M * m.leaves[i, keeps] >= self._count(i, *self.away(), keeps=keeps),
        )
        m.sends = pyo.Var(range(L + 1 if self.A > 1 else 0), domain=pyo.Binary)
        m.sends_rule = pyo.Constraint(m.sends.index_set(), rule=lambda m, u: 2 * M * m.sends[u] >= self._sends(u))
        self._loads()
        m.moved = pyo.Var(range(1, L), bounds=(0, 1))
        m.moved_rule = pyo.ConstraintList()
        for i in range(1, L):  # share of the source's boundaries below i that come back when its segment is restored
            away = self._count(i - 1, *self.away(), keeps=False) / M
            m.moved_rule.add(m.moved[i] >= away + m.drop[i] - 1)
            m.moved_rule.add(m.moved[i] <= away)
            m.moved_rule.add(m.moved[i] <= m.drop[i])
        below = self.costs.layers[: L - 1]
        self._at_segment_top("restoring", [self._t(M * c.forward_s) for c in below], m.drop)
        self._at_segment_top(
            "restoring_loads", [self._t(self.costs.h2d_s(c.weight_bytes)) for c in below], m.load_restore
        )
        self._at_segment_top("restoring_fetches", [self._boundaries_time()] * (L - 1), m.moved)

    def _boundaries_time(self) -> float:
        """Time to fetch the boundaries of all of a layer's micro-batches."""
        return self._t(self.M * self.costs.h2d_s(self.costs.boundary_bytes))

    def _at_segment_top(self, name: str, times: list[float], share: Any) -> None:
        """Variable ``name``: the sum over a segment of ``times[i-1] * share[i]`` of its dropped boundaries i, which
        its uppermost layer takes before its backward; 0 at other layers.

        Backward goes down with a store: the uppermost layer fills it, every layer takes what is its own, the segment's
        source finds it empty.
        """
        m, L = self.m, self.L
        most = (self.shape.max_segment - 1) * max(times, default=0.0)
        made, store = pyo.Var(range(L), bounds=(0, most)), pyo.Var(range(L), bounds=(0, most))
        rules = pyo.ConstraintList()
        m.add_component(name, made)
        m.add_component(f"{name}_store", store)
        m.add_component(f"{name}_rules", rules)
        for i in range(L):
            above = store[i + 1] if i + 1 < L else 0
            rules.add(store[i] == above + made[i] - (times[i - 1] * share[i] if i else 0))
            rules.add(store[i] <= most * m.drop[i])
            if i + 1 < L:
                rules.add(made[i] <= most * (1 - m.drop[i + 1]))

    def _loads(self) -> None:
        """Which loads a pass makes: shares, 0 where the weights are resident or still in a slot.

        A turn of the pass finds in the slots the D streamed layers used last: of the D layers next to the turn those
        that are not resident, and one more beyond for each that is. A segment leaves its uppermost D - 1 restored
        layers there, and a segment longer than D at the very top takes the topmost layer's slot.
        """
        m, L, D = self.m, self.L, min(self.shape.weight_buffers, self.L)
        m.found_back = pyo.Var(range(L - D), domain=pyo.Binary)  # streamed, in a slot when backward begins
        m.found_next = pyo.Var(range(D, L), domain=pyo.Binary)  # the same when the forward of another pass begins
        m.found_rule = pyo.ConstraintList()
        for found, turn in ((m.found_back, range(L - 1, -1, -1)), (m.found_next, range(L))):
            for k in range(D, L):
                resident = sum(m.resident[j] for j in turn[:k])
                m.found_rule.add(found[turn[k]] * (k - D + 1) <= resident)
                m.found_rule.add(found[turn[k]] <= 1 - m.resident[turn[k]])
        m.restored = pyo.Var(range(L - D), bounds=(0, 1))  # in a slot since its segment was restored
        m.restored_rule = pyo.ConstraintList()
        for i in range(L - D):
            m.restored_rule.add(m.restored[i] <= m.drop[i + 1])
            m.restored_rule.add(m.restored[i] <= D - self._in_segment(range(i + 1, i + D + 1)))
        m.load_back = pyo.Var(range(L), bounds=(0, 1))
        m.load_back_rule = pyo.Constraint(range(L), rule=self._load_back)
        m.load_restore = pyo.Var(range(L), bounds=(0, 1))
        m.load_restore_rule = pyo.Constraint(range(1, L), rule=self._load_restore)

    def _in_segment(self, layers: range) -> Any:
        """Streamed layers among these whose input is dropped."""
        return sum(self.m.drop[i] - self.m.resident[i] for i in layers)

    def _load_back(self, m: Any, i: int) -> Any:
        """load_back(i) >= 1 where a layer is neither resident nor in a slot when its backward comes."""
        D = min(self.shape.weight_buffers, self.L)
        if i < self.L - D:
            return m.load_back[i] >= 1 - m.resident[i] - m.found_back[i] - m.restored[i]
        if i == self.L - 1:
            below = m.resident[i - D] if i >= D else 0
            return m.load_back[i] >= self._in_segment(range(self.L - D, self.L)) - D + 1 - below
        return pyo.Constraint.Skip

    def _load_restore(self, m: Any, i: int) -> Any:
        """load_restore(i) >= 1 where boundary i is dropped and the layer below is neither resident nor in a slot."""
        if i - 1 >= self.L - self.shape.weight_buffers:
            return pyo.Constraint.Skip
        return m.load_restore[i] >= m.drop[i] - m.resident[i - 1] - m.found_back[i - 1]

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
        self._gradient_chain(block, period, last=last)
        if self.nvme:
            self._drive_chain(block, period)
        self._cpu_chain(block, period, last=last)
        self._bandwidth(block, period, last=last)

    def _forward_time(self, unit: int) -> float:
        return self._t(self.M * self.costs.units[unit].forward_s)

    def _backward_time(self, i: int) -> Any:
        """Backward of a layer, its recomputation, and first the forwards that restore its segment's boundaries."""
        costs, m = self.costs, self.m
        layer = costs.layers[i]
        time = self._t(self.M * layer.backward_s)
        recomputed = self.M - self._count(i, "gpu", "host", "nvme", keeps=True)
        time += self._t(layer.forward_s) * recomputed
        return time + m.restoring[i]

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

    def _load_time(self, unit: int, *, last: bool) -> Any:
        """Forward load of a unit: once a pass when streamed, once a step when resident."""
        costs, m = self.costs, self.m
        time = self._t(costs.h2d_s(costs.units[unit].weight_bytes))
        if last:
            return time
        if unit == 0:
            return time * (1 - m.embedding_resident)
        if unit == self.L + 1:
            return time * (1 - m.head_resident)
        if unit <= min(self.shape.weight_buffers, self.L):
            return 0.0  # still in its slot from the backward of the pass before
        return time * (1 - m.resident[unit - 1] - m.found_next[unit - 1])

    def _reload_time(self, i: int) -> Any:
        """Backward load of a layer, after what its segment needs to restore its boundaries: weights, and the source's
        boundaries where they were offloaded.
        """
        own = self._t(self.costs.h2d_s(self.costs.layers[i].weight_bytes)) * self.m.load_back[i]
        return own + self.m.restoring_loads[i] + self.m.restoring_fetches[i]

    def _if_resident(self, layers: range) -> Any:
        """Large where one of the layers is resident: a slot is then free earlier, and the rule is waived."""
        return self.horizon * sum(self.m.resident[i] for i in layers) if self.allow_resident else 0

    def _load_chain(self, b: Any, period: Any, *, last: bool) -> None:
        """Weight loads go in order, each before its layer computes and after its slot's previous user."""
        L, D = self.L, min(self.shape.weight_buffers, self.L)
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
                if not last:  # the pass begins with full slots
                    first_user = b.forward[1] + self._forward_time(1)
                    none = self.m.resident[u - 1] + self.m.found_next[u - 1]
                    b.rules.add(b.load[u] >= first_user - self._if_resident(range(1)) - self.horizon * none)
        if not self.tied:  # embedding and head share one place
            b.rules.add(b.load[L + 1] >= b.forward[0] + self._forward_time(0))
        for i in range(L - 1, -1, -1):
            end = b.reload[i] + self._reload_time(i)
            b.rules.add(b.backward[i] + self.m.restoring[i] >= end)
            b.rules.add(b.fetch[i] >= end)
            topmost = min(i + D, L - 1)  # until it is done, all slots hold what is still needed
            if i < topmost:
                freed = b.backward[topmost] + self._backward_time(topmost)
                kept = self._if_resident(range(i + 1, topmost + 1) if i + D < L else range(L - 1, L))
                # Restoring loads nothing where its layers are all among those.
                nothing = self.horizon * sum(1 - self.m.drop[j] for j in range(min(i, L - D), i + 1))
                loads = b.reload[i] + self.m.restoring_fetches[i]  # fetches need no slot
                b.rules.add(loads >= freed - kept - nothing)
                if i + D < L:
                    none = self.horizon * (1 - self.m.load_back[i])
                    first_freed = b.backward[L - 1] + self._backward_time(L - 1)
                    b.rules.add(loads >= freed - kept - none)
                    b.rules.add(loads >= first_freed - self._if_resident(range(L - 1, L)) - none)
            if i == L - 2:  # one slot for the restoring layers: loads and forwards take turns
                waived = self._if_resident(range(max(0, i - self.shape.max_segment), L))
                b.rules.add(b.backward[i] >= end - self.m.restoring_fetches[i] - waived)
            b.rules.add((b.reload[i - 1] if i else b.load[0] + period) >= b.fetched[i])

    def _fetch_chain(self, b: Any, period: Any) -> None:
        """Offloaded tensors come back in order of need, after their window's previous user, before their backward."""
        costs, L, M, W = self.costs, self.L, self.M, self.shape.transfer_window
        away = self.away()
        for i in range(L):
            layer = costs.layers[i]
            time = self._transfer(i, costs.h2d_s, away)
            count = self._count(i, *away)
            self.penalty += time
            if i + 1 < L:
                time -= self._boundaries_time() * self.m.moved[i + 1]
                count -= M * self.m.moved[i + 1]
            b.rules.add(b.fetched[i] >= b.fetch[i] + time)
            # The micro-batches that never left come first, and cover the first fetch; the last one ends with the layer.
            backward = self._t(layer.backward_s)
            there = backward * (M - count) + self._t(layer.forward_s) * self._count(i, "gpu", keeps=False)
            b.rules.add(b.backward[i] + self.m.restoring[i] + there >= b.fetch[i] + time / M)
            b.rules.add(b.backward[i] + self._backward_time(i) >= b.fetched[i] + backward)
            if i + W < L:
                window = b.backward[i + W] + self._t(costs.layers[i + W].backward_s) * (M - count)
                source = self.horizon * self.m.drop[i + 1]  # its boundaries come when its segment is restored
                b.rules.add(b.fetch[i] >= window - source)
                b.rules.add(b.fetched[i] >= b.backward[i + W] + self._backward_time(i + W) + time / M - source)
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

    def _sends(self, unit: int) -> Any:
        """Tensors that leave after the forward of a unit: its saved ones, and boundaries of the layer above."""
        away = self.away()
        saved = self._count(unit - 1, *away, keeps=True) if unit >= 1 else 0
        return saved + (self._count(unit, *away, keeps=False) if unit < self.L else 0)

    def _boundary_sends(self, i: int) -> Any:
        """Time in which the offloaded input boundaries of a layer leave the GPU."""
        if i >= self.L:
            return 0
        return self._t(self.costs.d2h_s(self.costs.boundary_bytes)) * self._count(i, *self.away(), keeps=False)

    def _send_chain(self, b: Any) -> None:
        """What leaves goes in order of its making, starts after it is made, and is gone before the window moves on."""
        costs, L, M, W = self.costs, self.L, self.M, self.shape.transfer_window
        away = self.away()
        for u in range(L + 1):
            time = self._sent_after(u, costs.d2h_s, away)
            self.penalty += time
            one = self._t(costs.units[u].forward_s)
            sends = self._sends(u)
            # Micro-batches whose tensors leave come last in the layer.
            b.rules.add(b.send[u] >= b.forward[u] + one)
            b.rules.add(b.send[u] >= b.forward[u] + one * (M - sends + sends / M))
            b.rules.add(b.sent[u] >= b.send[u] + time)
            b.rules.add(b.sent[u] >= b.forward[u] + self._forward_time(u) + time / M)
            if u < L:
                b.rules.add(b.send[u + 1] >= b.sent[u])
            if u + W <= L:
                end = b.forward[u + W] + self._forward_time(u + W)
                b.rules.add(end >= b.sent[u] + self._t(costs.units[u + W].forward_s))
        b.rules.add(b.gradient[L + 1] >= b.sent[L])

    def _gradient_chain(self, b: Any, period: Any, *, last: bool) -> None:
        """Gradients leave in backward order; a layer's backward waits for its gradient slot to be empty. What the next
        pass sends waits for them; after the last pass its forward already waits for their norms.
        """
        costs, L, G = self.costs, self.L, self.shape.gradient_buffers
        end = {u: b.gradient[u] + self._t(costs.d2h_s(costs.units[u].parked_bytes)) for u in range(L + 2)}
        b.rules.add(b.gradient[L + 1] >= b.loss + self._t(self.M * costs.head.forward_s))
        for u in range(L + 1, 0, -1):
            b.rules.add(b.gradient[u - 1] >= end[u])
        for i in range(L):
            b.rules.add(b.gradient[i + 1] >= b.backward[i] + self._backward_time(i))
            if i + G < L:
                # What runs again before the layer's first backward needs no slot yet.
                again = self._t(costs.layers[i].forward_s) * (1 - self._count(i, "gpu", keeps=True) / self.M)
                b.rules.add(b.backward[i] + self.m.restoring[i] + again >= end[i + G + 1])
        b.rules.add(b.gradient[0] >= b.embedding_backward + self._t(self.M * costs.embedding.backward_s))
        b.rules.add(b.embedding_backward >= end[L + 1])
        if last:
            return
        b.rules.add(b.loss + period >= end[0])  # embedding and head gradients share one place
        for u in range(L + 1):
            b.rules.add(b.send[u] + period >= end[0] - self.horizon * (1 - self.m.sends[u]))

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
                source = self.horizon * self.m.drop[i + 1]
                b.rules.add(b.drive_read[i] >= b.backward[i + W] + self._t(costs.layers[i + W].backward_s) - source)

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
        away = self.away()
        traffic: Any = 0
        for u, cost in enumerate(costs.units):
            traffic += cost.weight_bytes + cost.parked_bytes
            if last:
                traffic += cost.parked_bytes + costs.update_dram_bytes(cost, 4)
            if self.A > 1:
                traffic += self._adding(last) * costs.accumulate_dram_bytes(cost)
            if 1 <= u <= L:
                traffic += cost.weight_bytes * (self.m.load_back[u - 1] + (self.m.load_restore[u] if u < L else 0))
                traffic += 2 * GB * self.stored(u - 1, *away) + 2 * GB * self.stored(u - 1, "nvme")
        bandwidth = float(costs.machine.host.dram_bandwidth) * self.time_unit_s
        b.dram = pyo.Constraint(expr=traffic / bandwidth <= period)

    def _max_penalty(self) -> float:
        """The largest value the tie-break term can take, in time units."""
        costs, away = self.costs, [a for a in self.actions if a.home != "gpu"]
        total = 0.0
        for i, layer in enumerate(costs.layers):
            most = max((costs.h2d_s(self.size(i, a)) + costs.d2h_s(self.size(i, a)) for a in away), default=0.0)
            if self.nvme:
                most += max(costs.nvme_write_s(self.size(i, a)) for a in away if a.home == "nvme")
            total += self._t(self.M * (most + layer.forward_s))
        return total * (2 if self.A > 1 else 1)
