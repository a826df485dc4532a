"""Memory of the program: what must fit on the GPU at every compute operation, and in every other tier."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyomo.environ as pyo

from lazytrain.costs.table import ADAM_MOMENT_BYTES
from lazytrain.models.spec import DTYPE_BYTES
from lazytrain.schedule.memory import STAGING_SLOTS
from lazytrain.schedule.plan import Action

if TYPE_CHECKING:
    from lazytrain.planner.program import StepModel

GB = 1e9


def _gpu_static(model: StepModel) -> Any:
    """Slots, vocabulary and resident weights, gradient slots (GB)."""
    costs, m, L = model.costs, model.m, model.L
    units = costs.units
    m.all_resident = pyo.Var(domain=pyo.Binary)
    m.all_resident_rule = pyo.Constraint(range(L), rule=lambda m, i: m.all_resident <= m.resident[i])
    m.vocabulary_slot = pyo.Var(bounds=(0, None))
    embedding, head = units[0].weight_bytes / GB, units[L + 1].weight_bytes / GB
    m.vocabulary_embedding = pyo.Constraint(expr=m.vocabulary_slot >= embedding * (1 - m.embedding_resident))
    m.vocabulary_head = pyo.Constraint(expr=m.vocabulary_slot >= head * (1 - m.head_resident))
    largest = max(c.weight_bytes for c in costs.layers) / GB
    gradients = min(model.shape.gradient_buffers, L) * max(c.gradient_bytes for c in costs.layers) / GB
    vocabulary_gradient = max(units[0].gradient_bytes, units[L + 1].gradient_bytes) / GB
    if model.tied:
        vocabulary_gradient += units[L + 1].gradient_bytes / GB
    return (
        min(model.shape.weight_buffers, L) * largest * (1 - m.all_resident)
        + m.vocabulary_slot
        + embedding * m.embedding_resident
        + head * m.head_resident
        + sum(c.weight_bytes / GB * m.resident[i] for i, c in enumerate(costs.layers))
        + gradients
        + vocabulary_gradient
    )


def gpu_memory(model: StepModel) -> None:
    """At each layer's forward, at the loss and at each backward: static + kept + in flight + working set <= GPU."""
    costs, m, L, M, W = model.costs, model.m, model.L, model.M, model.shape.transfer_window
    boundary = costs.boundary_bytes / GB
    capacity = model.capacities["gpu"] / GB
    static = _gpu_static(model)
    m.static = pyo.Var(bounds=(0, None))
    m.static_rule = pyo.Constraint(expr=m.static == static)
    m.kept = pyo.Var(range(L), bounds=(0, None))
    m.kept_rule = pyo.Constraint(
        range(L), rule=lambda m, i: m.kept[i] == (m.kept[i - 1] if i else 0) + model.stored(i, "gpu")
    )
    away = model.away()
    m.gpu = pyo.ConstraintList()
    for i in range(L):
        layer = costs.layers[i]
        # Outputs of this layer and the inputs it has not used yet: never more than M + 1 boundaries.
        hidden = (M + 1) * boundary
        for last in (i, i - 1):
            leaving = sum(_bytes_made(model, u, away) for u in range(max(0, last - W + 1), last + 1))
            working = layer.forward_workspace_bytes / GB
            m.gpu.add(m.static + m.kept[i] + hidden + leaving + working <= capacity)
        # Backward: at its first micro-batch everything of the layer is still there, and what a recomputed one saves is
        # made then; kept ones come first, so that the place of the first of them is free by then.
        working = max(layer.backward_workspace_bytes, layer.forward_workspace_bytes + costs.boundary_bytes) / GB
        made = layer.saved_bytes / GB * (1 - m.n[i, Action.KEEP_GPU.value])
        for first in (i, i - 1):
            arriving = sum(model.stored(j, *away) for j in range(max(0, first - W + 1), first + 1))
            restored = M * boundary * m.run[i]
            there = m.static + m.kept[i] + hidden + arriving + restored + working
            m.gpu.add(there <= capacity)
            m.gpu.add(there + made <= capacity)
    head = (costs.head.forward_workspace_bytes + (M + 1) * costs.boundary_bytes) / GB
    leaving = sum(_bytes_made(model, u, away) for u in range(max(0, L - W + 1), L + 1))
    m.gpu.add(m.static + m.kept[L - 1] + leaving + head <= capacity)


def _bytes_made(model: StepModel, unit: int, away: tuple[str, ...]) -> Any:
    """Bytes (GB) that leave after the forward of a unit."""
    total: Any = 0
    for a in model.actions:
        if a.home in away and a.keeps and unit >= 1:
            total += model.size(unit - 1, a) / GB * model.m.n[unit - 1, a.value]
        if a.home in away and not a.keeps and unit < model.L:
            total += model.size(unit, a) / GB * model.m.n[unit, a.value]
    return total


def tier_capacity(model: StepModel) -> None:
    """Host, pinned and drive bytes of everything homed there fit."""
    costs, m = model.costs, model.m
    parameters = sum(u.parameters for u in costs.units)
    parked = sum(u.parked_bytes for u in costs.units)
    streamed = parameters * costs.stream_copy_bytes
    streamed_masters = 0 if costs.stream_copy_bytes else parameters * DTYPE_BYTES["fp32"]
    staging = STAGING_SLOTS * max(u.parked_bytes for u in costs.units) if model.A > 1 else 0.0
    stored = sum(model.stored(i, "host") for i in range(model.L))
    pinned = (parked + streamed + staging) / GB + stored
    if model.nvme:  # staging of at most one window in each direction
        window = model.shape.transfer_window * model.M * max(c.saved_bytes for c in costs.layers)
        pinned += 2 * min(window, model.M * costs.boundary_bytes) / GB
    state = parameters * (DTYPE_BYTES["fp32"] + ADAM_MOMENT_BYTES) / GB
    m.host = pyo.Constraint(expr=state + pinned <= model.capacities["host"] / GB)
    if costs.machine.gpu.device != "cpu":
        m.pinned = pyo.Constraint(expr=pinned + streamed_masters / GB <= model.capacities["pinned"] / GB)
    if model.nvme:
        m.drive = pyo.Constraint(
            expr=sum(model.stored(i, "nvme") for i in range(model.L)) <= model.capacities["nvme"] / GB
        )
