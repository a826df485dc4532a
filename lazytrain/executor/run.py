"""Training: a plan's StepProgram, a model and batches in; losses, measured times and weights out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lazytrain.errors import ExecutionError, InputError, RefusedError
from lazytrain.executor.capabilities import unsupported
from lazytrain.executor.data import StepBatch
from lazytrain.executor.device import DeviceMemory
from lazytrain.executor.engine import Engine, Interval
from lazytrain.executor.layout import DTYPES
from lazytrain.executor.model import Network
from lazytrain.executor.operations import DeviceBatch, Operations
from lazytrain.executor.peak import peak_bytes, reset_peak, resident_bytes, steady_allocator, warm_up
from lazytrain.executor.runtime import Runtime, make_runtime
from lazytrain.executor.settings import OptimizerSettings
from lazytrain.executor.store import HostStore
from lazytrain.models.architecture import Architecture
from lazytrain.schedule.plan import Plan
from lazytrain.schedule.program import Kind, Resource, StepProgram


@dataclass(frozen=True)
class StepReport:
    """One finished step. ``seconds``: from the end of the compute of the step before to the end of this one's."""

    step: int
    loss: float
    norm: float
    coefficient: float
    skipped: bool
    lr: float
    tokens: int
    valid_tokens: int
    seconds: float


@dataclass(frozen=True)
class ResumeState:
    """What continues a run besides weights: moments by weight name, and AdamW's step count."""

    m: Mapping[str, Tensor]
    v: Mapping[str, Tensor]
    applied_updates: int
    step: int = 0  # steps already done, skipped ones included


@dataclass
class TrainResult:
    steps: list[StepReport] = field(default_factory=list)
    setup_seconds: float = 0.0
    total_seconds: float = 0.0  # of all steps, the last update included
    intervals: dict[int, list[Interval]] = field(default_factory=dict)  # the last few steps
    moved_bytes: dict[Resource, int] = field(default_factory=dict)  # h2d and d2h, all steps together
    baseline_bytes: int = 0  # resident before the run
    peak_bytes: int = 0  # highest resident memory of the run, less the baseline
    device_peak_bytes: int = 0  # CUDA: highest allocated GPU memory
    device_static_bytes: int = 0
    store: HostStore | None = None

    @property
    def losses(self) -> list[float]:
        return [s.loss for s in self.steps]

    @property
    def norms(self) -> list[float]:
        return [s.norm for s in self.steps]

    @property
    def coefficients(self) -> list[float]:
        return [s.coefficient for s in self.steps]

    @property
    def step_seconds(self) -> list[float]:
        return [s.seconds for s in self.steps]

    @property
    def skipped(self) -> int:
        return sum(s.skipped for s in self.steps)

    def weights(self) -> dict[str, Tensor]:
        """Master weights by their Hugging Face names: fp32, not copied; a tied head is under the embedding's name."""
        assert self.store is not None
        return self.store.weights()


def train(
    plan: Plan,
    program: StepProgram,
    architecture: Architecture,
    batches: Iterator[StepBatch],
    steps: int,
    *,
    optimizer: OptimizerSettings | None = None,
    seed: int = 0,
    initial_state: Mapping[str, Tensor] | None = None,
    resume: ResumeState | None = None,
    device: str = "cpu",
    on_step: Callable[[StepReport], None] | None = None,
    compute_threads: int | None = None,
    cpu_threads: int | None = None,
) -> TrainResult:
    """Runs ``steps`` optimizer steps of ``program`` (built from ``plan``), and returns once the last update is done.

    ``initial_state``: weights by Hugging Face name; without it the architecture's own initialisation from ``seed``.
    ``on_step`` is called in this thread after each step. RefusedError when the plan needs what the executor lacks;
    ExecutionError with the first cause when anything fails; KeyboardInterrupt stops all workers first.
    """
    if missing := unsupported(plan):
        raise RefusedError(f"the executor cannot run this plan: {'; '.join(missing)}")
    began = time.perf_counter()
    if device == "cpu":
        steady_allocator()
        warm_up()
    reset_peak()
    result = TrainResult(baseline_bytes=resident_bytes())
    runtime = make_runtime(device, compute_threads, cpu_threads)
    threads_before = torch.get_num_threads()
    try:
        run = _Run(plan, program, architecture, runtime, optimizer or OptimizerSettings(), seed, initial_state, resume)
        result.store = run.operations.store
        result.device_static_bytes = run.memory.nbytes()
        result.setup_seconds = time.perf_counter() - began
        run.loop(batches, steps, result, on_step)
        result.peak_bytes = max(0, peak_bytes() - result.baseline_bytes)
        if runtime.device.type == "cuda":
            result.device_peak_bytes = torch.cuda.max_memory_allocated(runtime.device)
    finally:
        runtime.close()
        torch.set_num_threads(threads_before)
    return result


class _Run:
    def __init__(
        self,
        plan: Plan,
        program: StepProgram,
        architecture: Architecture,
        runtime: Runtime,
        optimizer: OptimizerSettings,
        seed: int,
        initial_state: Mapping[str, Tensor] | None,
        resume: ResumeState | None,
    ):
        job = plan.job
        self.plan, self.program, self.runtime = plan, program, runtime
        self.network = Network(architecture)
        if program.n_units != len(self.network.layouts) or program.micro_batches != plan.micro_batches:
            raise InputError(
                f"the program ({program.n_units - 2} layers, M={program.micro_batches}) is not of this plan and model "
                f"({len(self.network.layouts) - 2} layers, M={plan.micro_batches})"
            )
        state = self.network.own(architecture.init_state(seed) if initial_state is None else initial_state)
        store = HostStore.create(
            self.network.layouts,
            self.network.names,
            state,
            DTYPES[job.stream_dtype],
            DTYPES[job.gradient_dtype],
            runtime.host_empty,
            device_reads_master=runtime.device.type == "cuda",
        )
        if resume is not None:
            store.load_moments(resume.m, resume.v, resume.applied_updates)
        head = program.n_units - 1
        resident = {0: plan.embedding_resident, head: plan.head_resident}
        shared = set() if self.network.tied else {unit for unit, stays in resident.items() if not stays}
        self.memory = DeviceMemory(
            program, self.network.layouts, self.network.tied, shared, DTYPES[job.compute_dtype], runtime.device
        )
        self._batches: dict[int, DeviceBatch] = {}
        self._first_step = resume.step if resume is not None else 0
        self.operations = Operations(
            program, job, self.network, store, self.memory, runtime, optimizer, self._batch_of, self._first_step
        )
        self.engine = Engine(program, runtime, self.operations.execute, self.operations.release)

    def _batch_of(self, step: int) -> DeviceBatch:
        """Called by the compute worker; waits for the caller's thread to provide the batch."""
        self.engine.until(lambda: step in self._batches)
        return self._batches[step]

    def _fetch(self, batches: Iterator[StepBatch], step: int, steps: int) -> None:
        try:
            batch = next(batches)
        except StopIteration:
            raise ExecutionError(f"the data ended at step {step} of {steps}") from None
        job = self.plan.job
        shape = (job.accumulation, job.batch_size, job.seq_len)
        if tuple(batch.input_ids.shape) != shape or tuple(batch.labels.shape) != shape:
            raise InputError(f"a batch has shape {tuple(batch.input_ids.shape)}, the plan needs {shape}")
        if batch.valid_tokens < 1:
            raise InputError(f"the batch of step {step} has no token to learn from")
        low, high = int(batch.input_ids.min()), int(max(batch.input_ids.max(), batch.labels.max()))
        if low < 0 or high >= self.network.vocab_size:
            top = self.network.vocab_size - 1
            raise InputError(f"the batch of step {step} has token ids {low}..{high}, the model 0..{top}")
        self._batches[step] = DeviceBatch(batch, self.runtime.upload(batch.input_ids))
        self.engine.notify()

    def loop(
        self,
        batches: Iterator[StepBatch],
        steps: int,
        result: TrainResult,
        on_step: Callable[[StepReport], None] | None,
    ) -> None:
        engine, program, job = self.engine, self.program, self.plan.job
        if steps < 1:
            return
        clip = next(op.id for op in program.ops if op.kind is Kind.CLIP)
        last_compute = [op.id for op in program.on(Resource.COMPUTE)][-1]
        began = ended = time.perf_counter()
        try:
            self._fetch(batches, 0, steps)
            engine.start(steps)
            previous = self.runtime.now()
            for step in range(steps):
                if step + 1 < steps:
                    self._fetch(batches, step + 1, steps)
                engine.wait_op(clip, step)
                batch = self._batches.pop(step).batch
                values = self.operations.values.pop(step)
                end = engine.interval(last_compute, step).end
                report = StepReport(
                    self._first_step + step,
                    values.loss,
                    values.norm,
                    values.coefficient,
                    values.skipped,
                    values.lr,
                    job.tokens_per_step,
                    batch.valid_tokens,
                    end - previous,
                )
                previous = end
                result.steps.append(report)
                if on_step is not None:
                    on_step(report)
            engine.wait_all(steps)
            ended = time.perf_counter()
        finally:
            engine.stop()
        result.total_seconds = ended - began
        result.moved_bytes = dict(self.operations.moved)
        result.intervals = {step: engine.intervals(step) for step in engine.recorded_steps()}
