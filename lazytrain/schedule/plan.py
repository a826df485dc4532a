"""Plan: the decisions of one training step, with their certificate and verdict, as versioned JSON."""

from __future__ import annotations

import math
from enum import StrEnum
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from lazytrain.costs.job import TrainingJob
from lazytrain.errors import FileFormatError
from lazytrain.files import read_json, write_text_atomic

PLAN_VERSION: Literal[1] = 1


class Action(StrEnum):
    """What happens to one micro-batch of a layer between forward and backward.

    ``keep_*``: all saved tensors stay, nothing is recomputed. ``boundary_*``: only the layer's input stays, the layer
    is recomputed. The suffix is the home. ``dropped``: not even the input; it is recomputed from an earlier boundary.
    """

    KEEP_GPU = "keep_gpu"
    KEEP_HOST = "keep_host"
    KEEP_NVME = "keep_nvme"
    BOUNDARY_GPU = "boundary_gpu"
    BOUNDARY_HOST = "boundary_host"
    BOUNDARY_NVME = "boundary_nvme"
    DROPPED = "dropped"

    @property
    def keeps(self) -> bool:
        return self.value.startswith("keep")

    @property
    def home(self) -> str:
        """``gpu``, ``host``, ``nvme``, or ``none`` where nothing is stored."""
        return "none" if self is Action.DROPPED else self.value.rsplit("_", 1)[1]


# Micro-batches 0.. take the first action of this order that has a count, the next ones the second, and so on. Backward
# takes them in the same order, so what must come back goes last: its transfers run while the others compute.
ACTION_ORDER: tuple[Action, ...] = (
    Action.KEEP_GPU,
    Action.BOUNDARY_GPU,
    Action.BOUNDARY_HOST,
    Action.KEEP_HOST,
    Action.BOUNDARY_NVME,
    Action.KEEP_NVME,
    Action.DROPPED,
)


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class LayerDecision(_Frozen):
    """Micro-batch counts per action for one decoder layer, and where its weights live."""

    keep_gpu: int = Field(default=0, ge=0)
    keep_host: int = Field(default=0, ge=0)
    keep_nvme: int = Field(default=0, ge=0)
    boundary_gpu: int = Field(default=0, ge=0)
    boundary_host: int = Field(default=0, ge=0)
    boundary_nvme: int = Field(default=0, ge=0)
    dropped: int = Field(default=0, ge=0)
    resident: bool = Field(default=False, description="weights stay on the GPU; loaded once a step, after their update")

    def count(self, action: Action) -> int:
        return int(getattr(self, action.value))

    def actions(self) -> list[Action]:
        """The action of micro-batch 0, 1, ... in ACTION_ORDER."""
        return [action for action in ACTION_ORDER for _ in range(self.count(action))]


class Style(_Frozen):
    """How a step is executed around the decisions. The defaults are ours; published systems differ (see policies)."""

    update: Literal["lazy", "serial"] = Field(
        default="lazy",
        description="lazy: exact, in forward order while the next forward runs; serial: the GPU waits for all of it",
    )
    backward_prefetch: bool = Field(
        default=True,
        description="backward loads run ahead of compute and reuse what is still there; false: each waits and reloads",
    )
    recompute_whole_segment: bool = Field(
        default=False, description="the no-grad recompute of a segment also runs its last layer, whose result is unused"
    )
    keep_all_logits: bool = Field(default=False, description="logits of all chunks stay alive until one backward")
    master_dtype: Literal["fp32", "bf16"] = "fp32"

    @property
    def executable(self) -> bool:
        """Whether the executor runs this style; the others exist to be judged by the simulator."""
        return self == Style()


class Certificate(_Frozen):
    """What the solver proved, for the operation order and buffer counts of the plan."""

    status: str
    objective: float = Field(description="period of the returned plan in the program's own model, s")
    bound: float = Field(description="no plan of this order, buffers and micro-batch count has a shorter period, s")
    gap: float = Field(description="(objective - bound) / objective")
    seconds: float = Field(description="time spent in planning, s")
    note: str = ""


class Violation(_Frozen):
    """A limit that a plan breaks, in user words."""

    limit: str
    needed_bytes: float
    available_bytes: float
    message: str


# Where a plan puts bytes, and what people call it; pinned is a part of host.
TIERS = {"gpu": "GPU memory", "host": "host memory", "pinned": "pinned host memory", "nvme": "NVMe space"}


class Verdict(_Frozen):
    """What the simulator found, and what it assumed of the machine."""

    feasible: bool
    violations: tuple[Violation, ...] = ()
    step_seconds: float
    first_step_seconds: float
    peak_bytes: dict[str, float] = Field(description="of gpu, host, pinned and nvme")
    capacity_bytes: dict[str, float]
    assumed_rates: dict[str, float] = Field(description="the machine's rates that the step time rests on, SI")
    rate_margin: float = Field(default=0.25, description="relative shortfall of measured rates that is tolerated")
    fidelity: str = "planner"

    @model_validator(mode="after")
    def _says_all(self) -> Verdict:
        for field, found in (("peak_bytes", self.peak_bytes), ("capacity_bytes", self.capacity_bytes)):
            if set(found) != set(TIERS):
                raise ValueError(f"{field} has {', '.join(found) or 'nothing'}; it must have {', '.join(TIERS)}")
        if not self.feasible:
            return self  # a plan that needs a drive where there is none takes for ever
        numbers = {
            "step_seconds": self.step_seconds, "first_step_seconds": self.first_step_seconds,
            **{f"assumed_rates.{name}": rate for name, rate in self.assumed_rates.items()},
            **{f"peak_bytes.{tier}": peak + 1 for tier, peak in self.peak_bytes.items()},
        }  # fmt: skip
        for field, value in numbers.items():
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{field} of a verdict that passed must be positive and finite")
        return self


class Plan(_Frozen):
    """All decisions of one step of one (model, hardware, job)."""

    version: Literal[1] = PLAN_VERSION
    policy: str = "lazytrain"
    model: str
    hardware: str
    model_digest: str
    hardware_digest: str
    job: TrainingJob
    micro_batches: int = Field(gt=0, description="M: micro-batches a pass")
    weight_buffers: int = Field(default=2, ge=1, description="slots for streamed layer weights")
    gradient_buffers: int = Field(default=2, ge=1, description="slots for layer gradients")
    transfer_window: int = Field(
        default=3,
        ge=1,
        description="layers whose offloaded tensors may be on their way out, or back in early, at a time",
    )
    embedding_resident: bool = False
    head_resident: bool = False
    layers: tuple[LayerDecision, ...]
    style: Style = Style()
    certificate: Certificate | None = None
    verdict: Verdict | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Plan:
        if self.job.batch_size % self.micro_batches:
            raise ValueError(f"micro_batches {self.micro_batches} does not divide batch size {self.job.batch_size}")
        # A batch runs whole through each layer, so its actions must cover every micro-batch exactly once.
        for i, layer in enumerate(self.layers):
            total = sum(layer.count(a) for a in Action)
            if total != self.micro_batches:
                raise ValueError(f"layers.{i}: {total} micro-batches have an action, the plan has {self.micro_batches}")
            if layer.dropped not in (0, self.micro_batches):
                raise ValueError(f"layers.{i}: a boundary is dropped for all micro-batches or none")
            if layer.dropped and i == 0:
                raise ValueError("layers.0: the first boundary starts a segment and cannot be dropped")
            if layer.dropped and any(self.layers[i - 1].count(a) for a in Action if a.keeps):
                raise ValueError(f"layers.{i}: recomputed from layer {i - 1}, which must then keep boundaries only")
        return self

    def segments(self) -> list[tuple[int, int]]:
        """Segments (s, e): boundaries s and e stored (or e = L), all between dropped."""
        starts = [i for i, layer in enumerate(self.layers) if not layer.dropped]
        return list(zip(starts, [*starts[1:], len(self.layers)], strict=True))

    @property
    def micro_batch_size(self) -> int:
        return self.job.batch_size // self.micro_batches


def write_plan(plan: Plan, path: Path) -> None:
    write_text_atomic(path, plan.model_dump_json(indent=1) + "\n")


def read_plan(path: Path) -> Plan:
    """Reads a plan; FileFormatError names what is wrong with a truncated, foreign or newer file."""
    data = read_json(path, "a plan")
    if not isinstance(data, dict) or "version" not in data:
        raise FileFormatError(path, "not a plan: no 'version' field")
    if type(data["version"]) is not int or data["version"] != PLAN_VERSION:
        raise FileFormatError(
            path, f"plan version {data['version']!r} is not supported (this release reads {PLAN_VERSION}); plan again"
        )
    try:
        return Plan.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "plan"
        raise FileFormatError(path, f"{where}: {first['msg']}") from error
