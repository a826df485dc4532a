"""What each operation does to weights, activations and gradients. Order and waiting are the engine's."""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lazytrain.costs.job import TrainingJob
from lazytrain.errors import ExecutionError
from lazytrain.executor.buffers import Buffers
from lazytrain.executor.data import StepBatch
from lazytrain.executor.device import DeviceMemory
from lazytrain.executor.layout import DTYPES
from lazytrain.executor.loss import head_loss
from lazytrain.executor.model import Network
from lazytrain.executor.runtime import Runtime, Token
from lazytrain.executor.saved import Graph, record
from lazytrain.executor.settings import OptimizerSettings
from lazytrain.executor.store import HostStore, typed
from lazytrain.kernels import adamw_step, clip_coefficient, square_norm
from lazytrain.schedule.program import Kind, Op, Resource, StepProgram

MAX_SKIPPED = 3  # steps in a row with a non-finite gradient after which a run gives up


@dataclass
class DeviceBatch:
    """One step's data: labels stay on the CPU, where tokens without loss are picked out."""

    batch: StepBatch
    input_ids: Tensor  # int64 [A, B, S] on the device


@dataclass
class StepValues:
    """What one step found out."""

    loss: float = math.nan
    norm: float = math.nan
    coefficient: float = 1.0
    skipped: bool = False
    lr: float = 0.0


@dataclass
class _Running:
    """A step whose norm is not known yet."""

    losses: list[Tensor] = field(default_factory=list)
    squares: dict[int, float] = field(default_factory=dict)


class Operations:
    """Executes operations, each in the worker of its resource; the program's dependencies keep them apart."""

    def __init__(
        self,
        program: StepProgram,
        job: TrainingJob,
        network: Network,
        store: HostStore,
        memory: DeviceMemory,
        runtime: Runtime,
        optimizer: OptimizerSettings,
        batch_of: Callable[[int], DeviceBatch],
        first_step: int = 0,
    ):
        self.program, self.job, self.network, self.optimizer = program, job, network, optimizer
        self.store, self.memory, self.runtime = store, memory, runtime
        self.buffers = Buffers(program)
        self.graphs: dict[tuple[int, int], Graph] = {}
        self.values: dict[int, StepValues] = {}
        self.moved: dict[Resource, int] = defaultdict(int)  # bytes that crossed the link, by direction
        self._batch_of, self._first_step = batch_of, first_step
        self._micro_size = job.batch_size // program.micro_batches
        self._context = network.context(self._micro_size, job.seq_len, DTYPES[job.compute_dtype], runtime.device)
        self._constants = frozenset(t.untyped_storage().data_ptr() for t in self._context.tensors)
        self._templates = network.templates(DTYPES[job.compute_dtype])
        self._host: dict[tuple[str, int, int], Tensor] = {}
        self._staging: dict[int, Tensor] = {}
        self._running: dict[int, _Running] = defaultdict(_Running)
        self._clipped = StepValues()  # of the step whose updates run
        self._skipped_in_a_row = 0
        self._release_lock = threading.Lock()
        self._do: dict[Kind, Callable[[Op, int], None]] = {
            Kind.LOAD_WEIGHTS: self._load_weights,
            Kind.FORWARD: self._forward,
            Kind.LOSS: self._loss,
            Kind.RECOMPUTE_BOUNDARY: self._recompute_boundary,
            Kind.RECOMPUTE: self._recompute,
            Kind.BACKWARD: self._backward,
            Kind.SEND_SAVED: self._send_saved,
            Kind.SEND_BOUNDARY: self._send_boundary,
            Kind.LOAD_SAVED: self._load_saved,
            Kind.LOAD_BOUNDARY: self._load_boundary,
            Kind.SEND_GRADIENT: self._send_gradient,
            Kind.ACCUMULATE: self._accumulate,
            Kind.NORM: self._norm,
            Kind.CLIP: self._clip,
            Kind.UPDATE: self._update,
        }
        lacking = {op.kind for op in program.ops} - self._do.keys()
        if lacking:
            raise ExecutionError(f"the executor cannot run operations of kind {', '.join(sorted(lacking))}")

    def execute(self, op: Op, step: int) -> None:
        with torch.no_grad():  # per thread; graphs are built where enable_grad says so
            self._do[op.kind](op, step)

    def release(self, op: Op, tokens: Mapping[int, Token]) -> None:
        """Ends the buffers whose last user ``op`` was."""
        with self._release_lock:
            ended = self.buffers.ended(op.id)
        for payload, releases in ended:
            self.runtime.retire(payload, [tokens[r] for r in releases])

    # --- weights ---------------------------------------------------------------------------------------------------
    def _load_weights(self, op: Op, step: int) -> None:
        target, source = self.memory.weights(op.unit, op.slot), self.store.units[op.unit].stream
        target.copy_(source, non_blocking=self.runtime.non_blocking)
        self.moved[op.resource] += source.nbytes

    def _bound(self, op: Op) -> torch.nn.Module:
        return self._templates[op.unit].bind(self.memory.leaves(op.unit, op.slot))

    # --- forward ---------------------------------------------------------------------------------------------------
    def _rows(self, op: Op) -> slice:
        return slice(op.micro * self._micro_size, (op.micro + 1) * self._micro_size)

    def _run(self, op: Op, x: Tensor) -> Tensor:
        return self.network.run_block(self._bound(op), x, self._context)

    def _run_recorded(self, op: Op, x: Tensor) -> Tensor:
        block = self._bound(op)
        y, graph = record(
            lambda entered: self.network.run_block(block, entered, self._context),
            x,
            self.memory.weights(op.unit, op.slot),
            self.memory.leaves(op.unit, op.slot),
            self._constants,
        )
        self.graphs[op.unit, op.micro] = graph
        self.buffers.put("saved", op.unit, op.micro, op.id, graph.saved.box)
        return y

    def _forward(self, op: Op, step: int) -> None:
        if op.unit == 0:
            ids = self._batch_of(step).input_ids[op.pass_index, self._rows(op)]
            y = self.network.embed(self.memory.leaves(0, op.slot)[0], ids)
        else:
            x = self.buffers.get("boundary", op.unit, op.micro, op.id)
            y = self._run_recorded(op, x) if op.keep else self._run(op, x)
        self.buffers.put("boundary", op.unit + 1, op.micro, op.id, y)

    def _recompute_boundary(self, op: Op, step: int) -> None:
        x = self.buffers.get("boundary", op.unit, op.micro, op.id)
        self.buffers.put("boundary", op.unit + 1, op.micro, op.id, self._run(op, x))

    def _recompute(self, op: Op, step: int) -> None:
        self._run_recorded(op, self.buffers.get("boundary", op.unit, op.micro, op.id))

    # --- loss and backward -----------------------------------------------------------------------------------------
    def _loss(self, op: Op, step: int) -> None:
        batch, head, tied = self._batch_of(step).batch, op.unit, self.network.tied
        first = op.micro == 0
        if first:
            self.memory.gradient(head, -1).zero_()
            if tied:
                self.memory.gradient(0, -1).zero_()
        leaves, views = self.memory.leaves(head, op.slot), self.memory.gradient_views(head, -1)
        for leaf, view in zip(leaves, views, strict=True):
            leaf.grad = view
        source = 0 if tied else head
        loss, gradient = head_loss(
            self.buffers.get("boundary", head, op.micro, op.id),
            batch.labels[op.pass_index, self._rows(op)],
            self._bound(op),
            self.memory.leaves(source, -1)[0],
            self.memory.gradient_views(source, -1)[0],
            batch.valid_tokens,
            self.job.loss_chunk_tokens,
        )
        self._running[step].losses.append(loss)
        self.buffers.put("boundary_gradient", head, op.micro, op.id, gradient)

    def _backward(self, op: Op, step: int) -> None:
        gradient = self.buffers.get("boundary_gradient", op.unit + 1, op.micro, op.id)
        if op.unit == 0:
            if op.micro == 0 and not self.network.tied:
                self.memory.gradient(0, -1).zero_()
            ids = self._batch_of(step).batch.input_ids[op.pass_index, self._rows(op)]
            self.network.embed_backward(self.memory.gradient_views(0, -1)[0], ids, gradient)
            return
        if op.micro == 0:
            self.memory.gradient(op.unit, op.gradient_slot).zero_()
        graph = self.graphs.pop((op.unit, op.micro))
        entering = graph.backward(
            gradient, self.memory.weights(op.unit, op.slot), self.memory.gradient_views(op.unit, op.gradient_slot)
        )
        self.buffers.put("boundary_gradient", op.unit, op.micro, op.id, entering)

    # --- activations between tiers -----------------------------------------------------------------------------------
    def _slab(self, kind: str, op: Op, nbytes: int) -> Tensor:
        """Host memory for what is offloaded under this name: kept for the whole run, as the program accounts for it."""
        key = (kind, op.unit, op.micro)
        if key not in self._host or self._host[key].numel() < nbytes:
            self._host[key] = self.runtime.host_empty(nbytes)
        return self._host[key]

    def _send_saved(self, op: Op, step: int) -> None:
        saved = self.graphs[op.unit, op.micro].saved
        slab = self._slab("saved", op, saved.slab_bytes())
        self.moved[op.resource] += saved.send(slab, self.runtime.non_blocking)

    def _load_saved(self, op: Op, step: int) -> None:
        saved = self.graphs[op.unit, op.micro].saved
        slab = self._host["saved", op.unit, op.micro]
        self.moved[op.resource] += saved.load(slab, self.runtime.device, self.runtime.non_blocking)
        self.buffers.put("saved", op.unit, op.micro, op.id, saved.box)

    def _boundary_slab(self, op: Op) -> Tensor:
        shape = (self._micro_size, self.job.seq_len, self.network.hidden_size)
        dtype = DTYPES[self.job.compute_dtype]
        return self._slab("boundary", op, math.prod(shape) * dtype.itemsize).view(dtype).view(shape)

    def _send_boundary(self, op: Op, step: int) -> None:
        boundary: Tensor = self.buffers.get("boundary", op.unit, op.micro, op.id)
        self._boundary_slab(op).copy_(boundary, non_blocking=self.runtime.non_blocking)
        self.moved[op.resource] += boundary.nbytes

    def _load_boundary(self, op: Op, step: int) -> None:
        slab = self._boundary_slab(op)
        boundary = torch.empty(slab.shape, dtype=slab.dtype, device=self.runtime.device)
        boundary.copy_(slab, non_blocking=self.runtime.non_blocking)
        self.moved[op.resource] += boundary.nbytes
        self.buffers.put("boundary", op.unit, op.micro, op.id, boundary)

    # --- gradients and update ----------------------------------------------------------------------------------------
    def _stage(self, op: Op) -> Tensor:
        if op.slot not in self._staging:
            largest = max(unit.layout.size for unit in self.store.units)
            self._staging[op.slot] = typed(self.runtime.host_empty, largest, DTYPES[self.job.gradient_dtype])
        return self._staging[op.slot][: self.store.units[op.unit].layout.size]

    def _send_gradient(self, op: Op, step: int) -> None:
        target = self.store.units[op.unit].parked if op.pass_index == 0 else self._stage(op)
        target.copy_(self.memory.gradient(op.unit, op.gradient_slot), non_blocking=self.runtime.non_blocking)
        self.moved[op.resource] += target.nbytes

    def _accumulate(self, op: Op, step: int) -> None:
        self.store.units[op.unit].parked.add_(self._stage(op))

    def _norm(self, op: Op, step: int) -> None:
        self._running[step].squares[op.unit] = square_norm(self.store.units[op.unit].parked)

    def _clip(self, op: Op, step: int) -> None:
        running, values = self._running.pop(step), StepValues()
        self.values[step] = self._clipped = values
        values.loss = math.fsum(float(loss) for loss in running.losses)
        values.norm = math.sqrt(math.fsum(running.squares[unit] for unit in sorted(running.squares)))
        values.lr = self.optimizer.lr_at(self._first_step + step)
        if math.isfinite(values.norm) and math.isfinite(values.loss):
            values.coefficient = clip_coefficient(values.norm, self.job.max_norm)
            self.store.applied_updates += 1
            self._skipped_in_a_row = 0
            return
        values.skipped, values.coefficient = True, 0.0
        self._skipped_in_a_row += 1
        if self._skipped_in_a_row >= MAX_SKIPPED:
            raise ExecutionError(
                f"step {step}: the gradient was not finite in {MAX_SKIPPED} steps in a row (loss {values.loss}, norm "
                f"{values.norm}); lower the learning rate or check the data"
            )

    def _update(self, op: Op, step: int) -> None:
        values = self._clipped
        if values.skipped:
            return
        unit, settings = self.store.units[op.unit], self.optimizer
        for part, decays in unit.layout.ranges():
            adamw_step(
                unit.master[part],
                unit.parked[part],
                unit.m[part],
                unit.v[part],
                step=self.store.applied_updates,
                lr=values.lr,
                beta1=settings.beta1,
                beta2=settings.beta2,
                eps=settings.eps,
                weight_decay=settings.weight_decay if decays else 0.0,
                coefficient=values.coefficient,
                stream_copy=unit.stream[part] if unit.has_copy else None,
            )
