"""Runs: a checked plan on this machine, recorded in a folder; and the record laid beside the simulation.

A run folder holds plan.json, program.json, metrics.jsonl (one object a step), intervals.json (start and end of every
operation of the last steps), trace.json (the same for Perfetto), run.json (summary, written last) and model/ (weights).
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from lazytrain.costs.table import CostTable
from lazytrain.errors import ExecutionError, FileFormatError, InputError, RefusedError
from lazytrain.executor.gate import objections
from lazytrain.files import check_destination, json_ready, read_json, write_text_atomic
from lazytrain.hwprofiles import Machine
from lazytrain.models.spec import ModelSpec
from lazytrain.schedule.build import build_program
from lazytrain.schedule.plan import Plan, Verdict, read_plan, write_plan
from lazytrain.schedule.program import Kind, Resource, StepProgram, read_program
from lazytrain.simulator import trace_events, write_trace

if TYPE_CHECKING:
    from lazytrain.executor.data import TokenData
    from lazytrain.executor.run import StepReport, TrainResult
    from lazytrain.models.architecture import Architecture

SCHEMA: Literal[1] = 1


def available_bytes(machine: Machine) -> dict[str, float]:
    """Memory free on this machine now, per tier; on a CPU device the host's free RAM stands for both."""
    free = 0.0
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            free = float(line.split()[1]) * 1024
    gpu = free
    if machine.gpu.device != "cpu":
        import torch

        gpu = float(torch.cuda.mem_get_info()[0]) if torch.cuda.is_available() else 0.0
    drive = float(machine.nvme.capacity) if machine.nvme is not None else 0.0
    return {"gpu": gpu, "host": free, "pinned": min(free, machine.pin_limit_bytes), "nvme": drive}


def check_covers(plan: Plan, model: ModelSpec, machine: Machine) -> list[str]:
    """Why the plan's verdict does not cover ``machine``, which was measured here; empty if it does."""
    drive = plan.verdict is not None and plan.verdict.peak_bytes["nvme"] > 0
    rates = CostTable(model, machine, plan.job, plan.micro_batches).assumed_rates(drive)
    return objections(plan, available_bytes(machine), rates, shared_memory=machine.gpu.device == "cpu")


def planned_program(plan: Plan, model: ModelSpec, machine: Machine) -> StepProgram:
    """The plan's step program, with the durations of ``machine``."""
    return build_program(plan, CostTable(model, machine, plan.job, plan.micro_batches))


def exported_program(path: Path, plan: Plan, model: ModelSpec, machine: Machine) -> StepProgram:
    """The step program of an export. FileFormatError when its operations are not those that the plan beside it means:
    then nothing that the verdict says holds for it."""
    program = read_program(path)
    ours = planned_program(plan, model, machine)
    if _order(program) != _order(ours):
        raise FileFormatError(
            path, "not the program of the plan beside it (changed, or another release's); export again"
        )
    return program


def _order(program: StepProgram) -> tuple[Any, ...]:
    """All of a program but durations and sizes, which depend on the machine (its attention kernel, pinned or not)."""
    ops = [op._replace(seconds=0.0, bytes=0.0, dram_bytes=0.0, workspace_bytes=0.0) for op in program.ops]
    buffers = [buffer._replace(bytes=0.0) for buffer in program.buffers]
    return ops, buffers, program.n_units, program.weight_slots, program.gradient_slots, program.passes


class RunSettings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    steps: int = Field(gt=0)
    lr: float = Field(default=1e-4, gt=0, allow_inf_nan=False)
    weight_decay: float = Field(default=0.01, ge=0, allow_inf_nan=False)
    seed: int = 0
    save_weights: bool = True


class RunSummary(BaseModel):
    """What run.json holds. Seconds and bytes; null where a run ended before the number was known, or it is not finite.

    ``step_seconds``: median of the steps without the first. ``moved_bytes``: of all steps together.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Literal[1] = SCHEMA
    status: Literal["finished", "interrupted", "failed"]
    device: str
    machine: str
    weights: str = Field(description="where the first weights came from")
    forced: list[str]
    settings: RunSettings
    steps: int = Field(ge=0)
    skipped: int = Field(ge=0, description="steps whose gradient was not finite: no update")
    first_loss: float | None
    last_loss: float | None
    first_step_seconds: float | None
    step_seconds: float | None
    tokens_per_second: float | None
    useful_fraction: float
    setup_seconds: float | None = None
    peak_bytes: int | None = None
    baseline_bytes: int | None = None
    device_peak_bytes: int | None = None
    moved_bytes: dict[Resource, int] = {}


def execute(
    plan: Plan,
    program: StepProgram,
    architecture: Architecture,
    tokens: TokenData,
    machine: Machine,
    folder: Path,
    settings: RunSettings,
    *,
    weights: Mapping[str, Any] | None = None,
    weights_from: str | None = None,
    forced: Sequence[str] = (),
    on_step: Callable[[StepReport], None] | None = None,
) -> RunSummary:
    """Trains and records; returns what run.json holds.

    ``weights``: by Hugging Face name, come from ``weights_from``; without them the run starts from its seed.
    Raises InputError for a folder in use, ExecutionError when the run fails. Interrupted or failed, the folder keeps
    the metrics so far and a run.json that says how it ended; a run that did not do a step leaves nothing.
    """
    from lazytrain.executor.run import train
    from lazytrain.executor.settings import OptimizerSettings

    check_destination(folder, folder=True)
    made = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    job = plan.job
    done: list[StepReport] = []

    def summary(status: Literal["finished", "interrupted", "failed"], result: TrainResult | None) -> RunSummary:
        origin = weights_from if weights is not None and weights_from else f"seed {settings.seed}"
        return _summary(status, plan, machine, settings, done, result, tokens.useful_fraction, forced, origin)

    try:
        write_plan(plan, folder / "plan.json")
        write_text_atomic(folder / "program.json", program.model_dump_json() + "\n")
        with (folder / "metrics.jsonl").open("w") as metrics:

            def record(step: StepReport) -> None:
                done.append(step)
                metrics.write(json.dumps(json_ready(step.__dict__)) + "\n")
                metrics.flush()
                if on_step is not None:
                    on_step(step)

            result = train(
                plan, program, architecture, tokens.batches(job.batch_size, job.accumulation, settings.seed),
                settings.steps, optimizer=OptimizerSettings(lr=settings.lr, weight_decay=settings.weight_decay),
                seed=settings.seed, initial_state=weights, on_step=record,
                device="cpu" if machine.gpu.device == "cpu" else "cuda", compute_threads=machine.gpu.compute_threads,
            )  # fmt: skip
        _write_intervals(result, program, folder)
        if settings.save_weights:
            save_weights(result, architecture, folder / "model")
        found = summary("finished", result)
        write_text_atomic(folder / "run.json", found.model_dump_json(indent=1) + "\n")
        return found
    except BaseException as error:
        if done:
            how = summary("interrupted" if isinstance(error, KeyboardInterrupt) else "failed", None)
            with suppress(InputError):  # where the drive is full, the first error is the one to tell
                write_text_atomic(folder / "run.json", how.model_dump_json(indent=1) + "\n")
        else:
            for name in ("plan.json", "program.json", "metrics.jsonl"):
                (folder / name).unlink(missing_ok=True)
            if made:
                folder.rmdir()
        if isinstance(error, OSError):
            raise ExecutionError(f"{folder}: cannot be written: {error.strerror or error}") from error
        raise


def _summary(
    status: Literal["finished", "interrupted", "failed"], plan: Plan, machine: Machine, settings: RunSettings,
    steps: Sequence[StepReport], result: TrainResult | None, useful: float, forced: Sequence[str], weights: str,
) -> RunSummary:  # fmt: skip
    seconds = [s.seconds for s in steps]
    steady = statistics.median(seconds[1:] or seconds) if seconds else None
    measured: dict[str, Any] = {}
    if result is not None:
        measured = {
            "setup_seconds": result.setup_seconds, "peak_bytes": result.peak_bytes,
            "baseline_bytes": result.baseline_bytes, "device_peak_bytes": result.device_peak_bytes,
            "moved_bytes": result.moved_bytes,
        }  # fmt: skip
    return RunSummary(
        status=status, device=machine.gpu.device, machine=machine.name, weights=weights, forced=list(forced),
        settings=settings, steps=len(steps), skipped=sum(s.skipped for s in steps),
        first_loss=json_ready(steps[0].loss) if steps else None,
        last_loss=json_ready(steps[-1].loss) if steps else None,
        first_step_seconds=seconds[0] if seconds else None, step_seconds=steady,
        tokens_per_second=plan.job.tokens_per_step / steady if steady else None, useful_fraction=useful, **measured,
    )  # fmt: skip


def _write_intervals(result: TrainResult, program: StepProgram, folder: Path) -> None:
    recorded = {str(step): [list(interval) for interval in found] for step, found in result.intervals.items()}
    write_text_atomic(folder / "intervals.json", json.dumps(recorded) + "\n")
    if result.intervals:
        last = result.intervals[max(result.intervals)]
        begin = min(start for _, start, _ in last)
        shifted = [(op, start - begin, end - begin) for op, start, end in last]
        write_trace(folder / "trace.json", trace_events(program, shifted, name="measured"))


def save_weights(result: TrainResult, architecture: Architecture, folder: Path) -> None:
    """Master weights (fp32) as transformers reads them; the file appears complete or not at all."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    folder.mkdir(exist_ok=True)
    partial = folder / ".model.safetensors.partial"
    try:
        save_file({name: tensor.contiguous() for name, tensor in result.weights().items()}, partial, {"format": "pt"})
        os.chmod(partial, 0o644)
        os.replace(partial, folder / "model.safetensors")
    except (SafetensorError, OSError) as error:
        raise ExecutionError(f"{folder}: the weights cannot be saved: {error}") from error
    finally:
        partial.unlink(missing_ok=True)
    write_text_atomic(folder / "config.json", json.dumps(architecture.source, indent=1) + "\n")


# --- predicted beside measured ---------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Line:
    """One row of a report: a kind of operation, or a total. Seconds a step."""

    name: str
    count: int
    simulated: float
    measured: float

    @property
    def error(self) -> float:
        """Simulated over measured, less one; 0 where nothing was measured."""
        return self.simulated / self.measured - 1 if self.measured > 0 else 0.0


@dataclass(frozen=True)
class Report:
    run: RunSummary
    plan: Plan
    verdict: Verdict
    kinds: list[Line]
    step: Line
    predicted_peak_bytes: float
    measured_peak_bytes: float
    planned_moved_bytes: dict[str, float]
    measured_moved_bytes: dict[str, float]

    @property
    def peak_error(self) -> float:
        return self.predicted_peak_bytes / self.measured_peak_bytes - 1 if self.measured_peak_bytes else 0.0


Recorded = TypeAdapter(dict[int, list[tuple[int, float, float]]])


def read_report(folder: Path) -> Report:
    """A run folder's record beside what was simulated. FileFormatError names a missing or damaged file."""
    run = _read(folder / "run.json", TypeAdapter(RunSummary))
    if run.status != "finished":
        steps = f"{run.steps} step{'s' if run.steps != 1 else ''}"
        raise RefusedError(f"{folder}: the run {_ENDED[run.status]} after {steps}; there is nothing to compare")
    if run.step_seconds is None or run.peak_bytes is None:
        raise FileFormatError(folder / "run.json", "a finished run must have step_seconds and peak_bytes")
    plan, program = read_plan(folder / "plan.json"), read_program(folder / "program.json")
    if plan.verdict is None:
        raise RefusedError(f"{folder}: its plan was never simulated")
    measured: dict[int, list[float]] = {}
    for step in _read(folder / "intervals.json", Recorded).values():
        for op, start, end in step:
            measured.setdefault(op, []).append(end - start)
    if lacking := [op.id for op in program.ops if op.id not in measured]:
        raise FileFormatError(folder / "intervals.json", f"operation {lacking[0]} of program.json was not recorded")
    lines = []
    for kind in Kind:
        ops = [op for op in program.ops if op.kind is kind]
        if ops:
            seconds = sum(statistics.fmean(measured[op.id]) for op in ops)
            lines.append(Line(kind.value.replace("_", " "), len(ops), sum(op.seconds for op in ops), seconds))
    shared = run.device == "cpu"
    peaks = plan.verdict.peak_bytes
    return Report(
        run=run, plan=plan, verdict=plan.verdict, kinds=lines,
        step=Line("step", len(program.ops), plan.verdict.step_seconds, run.step_seconds),
        predicted_peak_bytes=peaks["host"] + (peaks["gpu"] if shared else 0.0), measured_peak_bytes=run.peak_bytes,
        planned_moved_bytes={r.value: n for r, n in program.moved_bytes().items() if r in run.moved_bytes},
        measured_moved_bytes={r.value: n / run.steps for r, n in run.moved_bytes.items()},
    )  # fmt: skip


_ENDED = {"failed": "failed", "interrupted": "was interrupted"}
_T = TypeVar("_T")


def _read(path: Path, shape: TypeAdapter[_T]) -> _T:
    data = read_json(path, "a run's record")
    try:
        return shape.validate_python(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or path.stem
        raise FileFormatError(path, f"{where}: {first['msg']}") from error
