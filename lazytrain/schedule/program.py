"""StepProgram: one optimizer step as operations. The simulator and the executor interpret the same program.

Rules both follow:

* Each resource serves its operations in list order, one at a time, step after step.
* An operation starts when its resource is free and every dependency has ended. A dependency ``(op, lag)`` means the
  operation ``op`` of the same step (lag 0) or of the previous step (lag 1; absent in the first step).
* A buffer exists from the start of its ``alloc`` operation until all its ``release`` operations have ended.
  ``workspace_bytes`` of GPU memory exist while their operation runs. ``static`` memory exists always.
* Weights and gradients live in preallocated slots (part of ``static``); dependencies keep a slot's users apart.

Units are numbered 0 = embedding, 1..L = decoder layers 0..L-1, L+1 = head (final norm, LM head, loss).
Boundary j (0..L) is the hidden state that enters decoder layer j; boundary L enters the head.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, ValidationError

from lazytrain.errors import FileFormatError


class Resource(StrEnum):
    COMPUTE = "compute"
    H2D = "h2d"
    D2H = "d2h"
    NVME_READ = "nvme_read"
    NVME_WRITE = "nvme_write"
    CPU = "cpu"


class Kind(StrEnum):
    """What an operation does; its ``unit`` and ``micro`` say to what."""

    LOAD_WEIGHTS = "load_weights"  # h2d: unit's weights from their host copy into `slot` (or its resident place)
    FORWARD = "forward"  # compute: boundary in -> boundary out; keeps saved tensors if `keep`
    LOSS = "loss"  # compute: head forward and backward of one micro-batch -> gradient of boundary L
    RECOMPUTE_BOUNDARY = "recompute_boundary"  # compute: no-grad forward again, to get a dropped boundary back
    RECOMPUTE = "recompute"  # compute: forward again with its saved tensors, just before backward
    BACKWARD = "backward"  # compute: boundary gradient out -> in, adds into the unit's gradient slot
    SEND_SAVED = "send_saved"  # d2h: saved tensors to host memory
    SEND_BOUNDARY = "send_boundary"  # d2h: the boundary that enters `unit`
    LOAD_SAVED = "load_saved"  # h2d
    LOAD_BOUNDARY = "load_boundary"  # h2d
    WRITE_SAVED = "write_saved"  # nvme_write: host staging to drive
    WRITE_BOUNDARY = "write_boundary"
    READ_SAVED = "read_saved"  # nvme_read: drive to host staging
    READ_BOUNDARY = "read_boundary"
    SEND_GRADIENT = "send_gradient"  # d2h: the unit's gradient of this pass to where gradients are parked
    ACCUMULATE = "accumulate"  # cpu: adds the staged gradient of a later pass to the parked one
    NORM = "norm"  # cpu: square norm of the unit's final parked gradient
    CLIP = "clip"  # cpu: the step's clip coefficient from all norms
    UPDATE = "update"  # cpu: optimizer update of the unit, coefficient fused; refreshes the copy that is streamed


class Dep(NamedTuple):
    op: int
    lag: int = 0


class Op(NamedTuple):
    """One operation. ``seconds`` is its duration alone on its resource at planner fidelity."""

    id: int
    kind: Kind
    resource: Resource
    unit: int
    micro: int = -1
    pass_index: int = 0
    deps: tuple[Dep, ...] = ()
    seconds: float = 0.0
    bytes: float = 0.0
    dram_bytes: float = 0.0
    workspace_bytes: float = 0.0
    slot: int = -1  # weights: slot of the streamed weights it loads or uses, -1 = resident; send_gradient: staging slot
    gradient_slot: int = -1  # slot that a layer's backward adds into and send_gradient empties; -1 = vocabulary's own
    keep: bool = False  # forward / recompute_boundary / recompute: saved tensors are kept for backward

    @property
    def label(self) -> str:
        micro = f" m{self.micro}" if self.micro >= 0 else ""
        passed = f" pass {self.pass_index}" if self.pass_index else ""
        return f"{self.kind} unit {self.unit}{micro}{passed}"


BufferKind = Literal["boundary", "saved", "boundary_gradient", "staging"]


class Buffer(NamedTuple):
    """A dynamic piece of memory of one tier; ``unit`` and ``micro`` name what it holds."""

    id: int
    kind: BufferKind
    tier: Literal["gpu", "host"]
    bytes: float
    alloc: int
    release: tuple[int, ...]
    unit: int = -1
    micro: int = -1


class StaticItem(NamedTuple):
    """Memory that exists during the whole run, itemised: ``host  parked gradients  53.8 GB``."""

    tier: Literal["gpu", "host", "nvme"]
    name: str
    bytes: float
    pinned: bool = False


class StepProgram(BaseModel):
    """The operations of one steady optimizer step, plus what exists always."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Literal[1] = 1
    n_units: int
    micro_batches: int
    passes: int
    weight_slots: int
    gradient_slots: int
    ops: tuple[Op, ...]
    buffers: tuple[Buffer, ...]
    static: tuple[StaticItem, ...]

    def on(self, resource: Resource) -> Iterator[Op]:
        """The operations of a resource in the order it serves them."""
        return (op for op in self.ops if op.resource is resource)

    def static_bytes(self, tier: str, *, pinned_only: bool = False) -> float:
        return sum(s.bytes for s in self.static if s.tier == tier and (s.pinned or not pinned_only))

    def busy_seconds(self) -> dict[Resource, float]:
        """Work of each resource in one step; no step can be shorter than the largest."""
        busy = dict.fromkeys(Resource, 0.0)
        for op in self.ops:
            busy[op.resource] += op.seconds
        return busy

    def moved_bytes(self) -> dict[Resource, float]:
        moved = dict.fromkeys(Resource, 0.0)
        for op in self.ops:
            moved[op.resource] += op.bytes
        return moved


def read_program(path: Path) -> StepProgram:
    """Reads a program written with ``model_dump_json``; FileFormatError when it is damaged."""
    try:
        return StepProgram.model_validate_json(path.read_bytes())
    except OSError as error:
        raise FileFormatError(path, f"cannot be read: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise FileFormatError(path, f"not a step program: {where}: {first['msg']}") from error
