"""Hypothesis strategies over valid plans."""

from __future__ import annotations

from hypothesis import strategies as st

from lazytrain.costs.job import TrainingJob
from lazytrain.schedule.plan import Action, LayerDecision, Plan

HOMES_GPU_HOST = (Action.KEEP_GPU, Action.KEEP_HOST, Action.BOUNDARY_GPU, Action.BOUNDARY_HOST)
ALL_HOMES = (*HOMES_GPU_HOST, Action.KEEP_NVME, Action.BOUNDARY_NVME)


@st.composite
def decisions(
    draw: st.DrawFn, layers: int, M: int, actions: tuple[Action, ...] = HOMES_GPU_HOST
) -> tuple[LayerDecision, ...]:
    """Decisions of every layer: random counts, dropped boundaries over layers that keep boundaries only, residency."""
    dropped = [False] + [draw(st.booleans()) for _ in range(layers - 1)]
    found = []
    for i in range(layers):
        resident = draw(st.booleans())
        if dropped[i]:
            found.append(LayerDecision(dropped=M, resident=resident))
            continue
        source = i + 1 < layers and dropped[i + 1]
        allowed = [a for a in actions if not (source and a.keeps)]
        counts: dict[str, int] = {}
        for _ in range(M):
            action = draw(st.sampled_from(allowed))
            counts[action.value] = counts.get(action.value, 0) + 1
        found.append(LayerDecision(**counts, resident=resident))
    return tuple(found)


@st.composite
def plans(draw: st.DrawFn, job: TrainingJob, layers: int, M: int, actions: tuple[Action, ...] = HOMES_GPU_HOST) -> Plan:
    """A valid plan of a job; model and hardware are placeholders."""
    return Plan(
        model="toy", hardware="toy", model_digest="", hardware_digest="", job=job, micro_batches=M,
        layers=draw(decisions(layers, M, actions)), weight_buffers=draw(st.integers(1, 3)),
        gradient_buffers=draw(st.integers(1, 3)), transfer_window=draw(st.integers(1, 3)),
        embedding_resident=draw(st.booleans()), head_resident=draw(st.booleans()),
    )  # fmt: skip
