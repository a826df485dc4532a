"""Runs: a checked plan on this machine, recorded in a folder; and the record laid beside the simulation.

A run folder holds plan.json, program.json, metrics.jsonl (one object a step), intervals.json (start and end of every
operation of the last steps), trace.json (the same for Perfetto), run.json (summary, written last) and model/ (weights).
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lazytrain.costs.table import CostTable
from lazytrain.errors import FileFormatError, InputError, RefusedError
from lazytrain.executor.gate import objections
from lazytrain.hwprofiles import Machine
from lazytrain.models.spec import ModelSpec
from lazytrain.schedule.plan import Plan, Verdict, read_plan, write_plan, write_text_atomic
from lazytrain.schedule.program import Kind, StepProgram, read_program
from lazytrain.simulator import trace_events, write_trace

if TYPE_CHECKING:
    from lazytrain.executor.run import StepReport, TrainResult

SCHEMA = 1


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
    rates = CostTable(model, machine, plan.job, plan.micro_batches).assumed_rates()
    return objections(plan, available_bytes(machine), rates, shared_memory=machine.gpu.device == "cpu")


@dataclass(frozen=True)
class RunSettings:
    steps: int
    lr: float = 1e-4
    weight_decay: float = 0.01
    seed: int = 0
    save_weights: bool = True


def execute(
    plan: Plan,
    program: StepProgram,
    model_config: Mapping[str, Any],
    machine: Machine,
    data: Path,
    folder: Path,
    settings: RunSettings,
    *,
    tokenizer: Path | None = None,
    weights: Mapping[str, Any] | None = None,
    forced: list[str] | None = None,
    on_step: Callable[[StepReport], None] | None = None,
) -> dict[str, Any]:
    """Trains and records; returns the summary that run.json holds.

    Raises InputError for a folder in use, ExecutionError when the run fails. Interrupted or failed, the folder keeps
    the metrics so far and a run.json that says how it ended.
    """
    from lazytrain.executor.data import load_data, load_tokenizer
    from lazytrain.executor.run import train
    from lazytrain.executor.settings import OptimizerSettings
    from lazytrain.models.architecture import Architecture

    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder}: exists and is not an empty folder; give another --output")
    architecture = Architecture(dict(model_config))
    job = plan.job
    tokens = load_data(data, load_tokenizer(tokenizer, architecture.vocab_size), job.seq_len, architecture.vocab_size)
    folder.mkdir(parents=True, exist_ok=True)
    write_plan(plan, folder / "plan.json")
    write_text_atomic(folder / "program.json", program.model_dump_json() + "\n")
    status, result = "failed", None
    done: list[StepReport] = []
    try:
        with (folder / "metrics.jsonl").open("w") as metrics:

            def record(step: StepReport) -> None:
                done.append(step)
                metrics.write(json.dumps(step.__dict__) + "\n")
                metrics.flush()
                if on_step is not None:
                    on_step(step)

            result = train(
                plan, program, architecture, tokens.batches(job.batch_size, job.accumulation, settings.seed),
                settings.steps, optimizer=OptimizerSettings(lr=settings.lr, weight_decay=settings.weight_decay),
                seed=settings.seed, initial_state=weights, on_step=record,
                device="cpu" if machine.gpu.device == "cpu" else "cuda", compute_threads=machine.gpu.compute_threads,
            )  # fmt: skip
        status = "finished"
    except KeyboardInterrupt:
        status = "interrupted"
        raise
    finally:
        summary = _summary(status, plan, machine, settings, done, result, tokens.useful_fraction, forced or [])
        write_text_atomic(folder / "run.json", json.dumps(summary, indent=1) + "\n")
    _write_intervals(result, program, folder)
    if settings.save_weights:
        save_weights(result, model_config, folder / "model")
    return summary


def _summary(
    status: str, plan: Plan, machine: Machine, settings: RunSettings, steps: list[StepReport],
    result: TrainResult | None, useful: float, forced: list[str],
) -> dict[str, Any]:  # fmt: skip
    seconds = [s.seconds for s in steps]
    steady = seconds[1:] or seconds
    summary: dict[str, Any] = {
        "version": SCHEMA,
        "status": status,
        "device": machine.gpu.device,
        "machine": machine.name,
        "forced": forced,
        "settings": settings.__dict__,
        "steps": len(steps),
        "skipped": sum(s.skipped for s in steps),
        "first_loss": steps[0].loss if steps else None,
        "last_loss": steps[-1].loss if steps else None,
        "first_step_seconds": seconds[0] if seconds else None,
        "step_seconds": statistics.median(steady) if steady else None,
        "tokens_per_second": plan.job.tokens_per_step / statistics.median(steady) if steady else None,
        "useful_fraction": useful,
    }
    if result is not None:
        summary["setup_seconds"] = result.setup_seconds
        summary["peak_bytes"] = result.peak_bytes
        summary["baseline_bytes"] = result.baseline_bytes
        summary["device_peak_bytes"] = result.device_peak_bytes
        summary["moved_bytes"] = {r.value: n for r, n in result.moved_bytes.items()}
    return summary


def _write_intervals(result: TrainResult, program: StepProgram, folder: Path) -> None:
    recorded = {str(step): [list(interval) for interval in found] for step, found in result.intervals.items()}
    write_text_atomic(folder / "intervals.json", json.dumps(recorded) + "\n")
    if result.intervals:
        last = result.intervals[max(result.intervals)]
        begin = min(start for _, start, _ in last)
        shifted = [(op, start - begin, end - begin) for op, start, end in last]
        write_trace(folder / "trace.json", trace_events(program, shifted, name="measured"))


def save_weights(result: TrainResult, model_config: Mapping[str, Any], folder: Path) -> None:
    """Master weights (fp32) as transformers reads them; the file appears complete or not at all."""
    from safetensors.torch import save_file

    folder.mkdir(exist_ok=True)
    partial = folder / ".model.safetensors.partial"
    try:
        save_file({name: tensor.contiguous() for name, tensor in result.weights().items()}, partial, {"format": "pt"})
        os.replace(partial, folder / "model.safetensors")
    finally:
        partial.unlink(missing_ok=True)
    write_text_atomic(folder / "config.json", json.dumps(dict(model_config), indent=1) + "\n")


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
    run: Mapping[str, Any]
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


def read_report(folder: Path) -> Report:
    """A run folder's record beside what was simulated. FileFormatError names a missing or damaged file."""
    run = _read_json(folder / "run.json")
    if run.get("version") != SCHEMA:
        raise FileFormatError(folder / "run.json", f"version {run.get('version')} is not supported")
    if run["status"] != "finished":
        raise RefusedError(f"{folder}: the run {run['status']} after {run['steps']} steps; there is nothing to compare")
    plan, program = read_plan(folder / "plan.json"), read_program(folder / "program.json")
    if plan.verdict is None:
        raise RefusedError(f"{folder}: its plan was never simulated")
    steps = list(_read_json(folder / "intervals.json").values())
    measured: dict[int, list[float]] = {}
    for step in steps:
        for op, start, end in step:
            measured.setdefault(op, []).append(end - start)
    lines = []
    for kind in Kind:
        ops = [op for op in program.ops if op.kind is kind]
        if ops:
            seconds = sum(statistics.fmean(measured[op.id]) for op in ops if op.id in measured)
            lines.append(Line(kind.value.replace("_", " "), len(ops), sum(op.seconds for op in ops), seconds))
    shared = run["device"] == "cpu"
    peaks = plan.verdict.peak_bytes
    return Report(
        run=run, plan=plan, verdict=plan.verdict, kinds=lines,
        step=Line("step", len(program.ops), plan.verdict.step_seconds, run["step_seconds"]),
        predicted_peak_bytes=peaks["host"] + (peaks["gpu"] if shared else 0.0), measured_peak_bytes=run["peak_bytes"],
        planned_moved_bytes={r.value: n for r, n in program.moved_bytes().items() if r.value in run["moved_bytes"]},
        measured_moved_bytes={r: n / run["steps"] for r, n in run["moved_bytes"].items()},
    )  # fmt: skip


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text())
    except OSError as error:
        raise FileFormatError(path, f"cannot be read: {error.strerror}; is this a run folder?") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise FileFormatError(path, f"not JSON, or truncated: {error}") from error
    if not isinstance(data, dict):
        raise FileFormatError(path, "not a JSON object")
    return data
