"""Memory that exists during the whole run of a plan, itemised by tier."""

from __future__ import annotations

from typing import Literal

from lazytrain.costs.table import ADAM_MOMENT_BYTES, CostTable
from lazytrain.models.spec import DTYPE_BYTES
from lazytrain.schedule.plan import Plan
from lazytrain.schedule.program import StaticItem

STAGING_SLOTS = 2  # host slots in which the gradients of a later pass wait to be added


def is_resident(plan: Plan, unit: int, *, tied: bool) -> bool:
    """Whether a unit's weights stay on the GPU. A tied table serves both ends of the model, so it always does."""
    if unit == 0:
        return plan.embedding_resident or tied
    if unit == len(plan.layers) + 1:
        return plan.head_resident or tied
    return plan.layers[unit - 1].resident


def weight_slots(plan: Plan) -> int:
    """Slots of streamed layer weights: no more than there are streamed layers."""
    return min(plan.weight_buffers, sum(not layer.resident for layer in plan.layers))


def static_memory(plan: Plan, costs: CostTable) -> tuple[StaticItem, ...]:
    """What a plan holds always. Pinned: what crosses the link, unless the device is the CPU."""
    pinned = costs.machine.gpu.device != "cpu"
    items = [*_gpu(plan, costs), *_host(plan, costs, pinned)]
    homes: tuple[tuple[Literal["host", "nvme"], bool], ...] = (("host", pinned), ("nvme", False))
    for home, is_pinned in homes:
        items.append(StaticItem(home, "saved tensors and boundaries", _stored(plan, costs, home), is_pinned))
    return tuple(item for item in items if item.bytes > 0)


def _stored(plan: Plan, costs: CostTable, home: str) -> float:
    """Bytes of one pass's activations homed in a tier."""
    return sum(
        cost.saved_bytes if action.keeps else costs.boundary_bytes
        for layer, cost in zip(plan.layers, costs.layers, strict=True)
        for action in layer.actions()
        if action.home == home
    )


def _gpu(plan: Plan, costs: CostTable) -> list[StaticItem]:
    units, tied = costs.units, costs.model.tied
    head = len(units) - 1
    resident = {u for u in range(len(units)) if is_resident(plan, u, tied=tied)}
    streamed = max((units[u].weight_bytes for u in range(1, head) if u not in resident), default=0.0)
    vocabulary = max((units[u].weight_bytes for u in (0, head) if u not in resident), default=0.0)
    slots = min(plan.gradient_buffers, len(plan.layers))
    vocabulary_gradient = max(units[0].gradient_bytes, units[head].gradient_bytes)
    if tied:  # the table's gradient stays while the norm's is sent
        vocabulary_gradient = units[0].gradient_bytes + units[head].gradient_bytes
    return [
        StaticItem("gpu", "weight slots", weight_slots(plan) * streamed),
        StaticItem("gpu", "vocabulary weights", vocabulary),
        StaticItem("gpu", "resident weights", sum(units[u].weight_bytes for u in resident)),
        StaticItem("gpu", "gradient slots", slots * max(c.gradient_bytes for c in costs.layers)),
        StaticItem("gpu", "vocabulary gradient", vocabulary_gradient),
    ]


def _host(plan: Plan, costs: CostTable, pinned: bool) -> list[StaticItem]:
    parameters = sum(u.parameters for u in costs.units)
    masters = float(parameters * DTYPE_BYTES[plan.style.master_dtype])  # the device reads them if there is no copy
    items = [
        StaticItem("host", "master weights", masters, pinned and costs.stream_copy_bytes == 0),
        StaticItem("host", "moments", float(parameters * ADAM_MOMENT_BYTES)),
        StaticItem("host", "streamed weights", float(parameters * costs.stream_copy_bytes), pinned),
        StaticItem("host", "parked gradients", sum(u.parked_bytes for u in costs.units), pinned),
    ]
    if plan.job.accumulation > 1:
        staging = STAGING_SLOTS * max(u.parked_bytes for u in costs.units)
        items.append(StaticItem("host", "gradient staging", staging, pinned))
    return items
