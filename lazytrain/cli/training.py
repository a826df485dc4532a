"""`run`, `report`, `demo`: training by a checked plan, and prediction beside measurement."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from lazytrain.cli.common import (
    JsonOption,
    console,
    make_table,
    note,
    out,
    outcome_json,
    positive,
    print_json,
    progress,
    show_outcome,
)
from lazytrain.cli.planning import (
    load_planned_machine,
    load_planned_model,
    policies_json,
    read_plan_or_folder,
    show_policies,
)
from lazytrain.errors import InputError, RefusedError
from lazytrain.files import check_destination
from lazytrain.units import format_bytes, format_rate, format_seconds, plural

if TYPE_CHECKING:
    from collections.abc import Callable

    from lazytrain.executor.run import StepReport
    from lazytrain.hwprofiles import Machine
    from lazytrain.runs import Report, RunSummary


def register(app: typer.Typer) -> None:
    app.command("run")(run)
    app.command("report")(report)
    app.command("demo")(demo)


def run(
    plan_file: Annotated[Path, typer.Argument(metavar="PLAN_OR_DIR", help="A folder from `export`, or a plan.json.")],
    data: Annotated[Path, typer.Option("--data", "-d", help="Text file, or JSONL of text or prompt/response rows.")],
    steps: Annotated[int, typer.Option("--steps", "-n", help="Optimizer steps.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="New folder for the run's record and weights.")],
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="Folder with config.json and safetensors, if not where the plan says."),
    ] = None,
    tokenizer: Annotated[Path | None, typer.Option("--tokenizer", help="Tokenizer folder; bytes if not given.")] = None,
    machine_file: Annotated[
        Path | None, typer.Option("--machine", help="This machine's file from `calibrate`; measured now if not given.")
    ] = None,
    lr: Annotated[float, typer.Option("--lr", help="Learning rate.")] = 1e-4,
    weight_decay: Annotated[float, typer.Option("--weight-decay", help="AdamW decay of matrices.")] = 0.01,
    seed: Annotated[int, typer.Option("--seed", help="Initial weights and data order.")] = 0,
    force: Annotated[
        bool, typer.Option("--force", help="Run although the verdict does not cover this machine.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Train by a plan that passed and that covers this machine."""
    positive("--steps", steps)
    positive("--lr", lr)
    if not (weight_decay >= 0 and math.isfinite(weight_decay)):
        raise InputError(f"--weight-decay must be at least 0 (got {weight_decay})")

    from lazytrain.executor.capabilities import unsupported
    from lazytrain.executor.data import load_data, load_tokenizer
    from lazytrain.models import load_config
    from lazytrain.models.architecture import Architecture
    from lazytrain.runs import RunSettings, check_covers, execute, exported_program, planned_program

    settings = RunSettings(steps=steps, lr=lr, weight_decay=weight_decay, seed=seed)
    chosen = read_plan_or_folder(plan_file)
    spec = load_planned_model(chosen, model)
    if lacking := unsupported(chosen):
        raise RefusedError(f"{plan_file}: the executor cannot run it: {'; '.join(lacking)}")
    check_destination(output, folder=True, needed_bytes=4.0 * spec.parameter_count)  # the weights at its end, fp32
    architecture = Architecture(load_config(model or chosen.model))
    words = load_tokenizer(tokenizer, architecture.vocab_size)
    tokens = load_data(data, words, chosen.job.seq_len, architecture.vocab_size)
    origin, weights = _weights(model, chosen.model)
    machine = _this_machine(machine_file, as_json)
    if plan_file.is_dir():
        program = exported_program(plan_file / "program.json", chosen, spec, machine)
    else:
        program = planned_program(chosen, spec, load_planned_machine(chosen, None))
    problems = check_covers(chosen, spec, machine)
    if problems and not force:
        raise RefusedError(f"{plan_file} may not run here: {'; '.join(problems)} (--force runs it all the same)")
    if problems:
        note(f"forced: {'; '.join(problems)}", "yellow")
    if not as_json:
        note(f"weights: {origin or f'fresh, from seed {seed}'}")
    with StepsBar(steps, as_json) as on_step:
        summary = execute(
            chosen, program, architecture, tokens, machine, output, settings, weights=weights, weights_from=origin,
            forced=problems, on_step=on_step,
        )  # fmt: skip
    if as_json:
        print_json(summary.model_dump(mode="json"))
    else:
        show_summary(summary, f"`lazytrain report {output}` compares with the plan")


def show_summary(summary: RunSummary, next_step: str) -> None:
    losses = [f"{x:.4f}" if x is not None else "not finite" for x in (summary.first_loss, summary.last_loss)]
    seconds = format_seconds(summary.step_seconds or 0.0)
    line = f"{plural(summary.steps, 'step')}, loss {losses[0]} -> {losses[1]}, {seconds} a step; {next_step}"
    out.print(line, markup=False, highlight=False)
    if summary.skipped:
        text = f"{summary.skipped} of {plural(summary.steps, 'step')} skipped: the gradient was not finite"
        note(text, "yellow")


def _this_machine(path: Path | None, quiet: bool) -> Machine:
    """Its profile, or what it is measured to be now (without a drive: no plan that runs uses one yet)."""
    from lazytrain.executor.peak import steady_allocator
    from lazytrain.hwprofiles import load_machine
    from lazytrain.hwprofiles.calibrate import calibrate

    steady_allocator()  # as the run will have it
    if path is not None:
        return load_machine(path)
    with progress(quiet) as tell:
        return calibrate(None, quick=True, progress=lambda text, _: tell(f"measuring this machine: {text}"))


def _weights(given: str | None, planned: str) -> tuple[str, dict[str, Any]] | tuple[None, None]:
    """Where the weights of the model's folder lie, and the weights; None where the run starts from its seed.

    InputError for a folder that was given to start from and holds none.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    from lazytrain.errors import FileFormatError
    from lazytrain.models import local_folder

    folder = local_folder(given or planned)
    files = sorted(folder.glob("*.safetensors")) if folder is not None else []
    if folder is None or not files:
        if folder is not None and given is not None:
            hint = f"give {folder / 'config.json'} to start from the seed"
            raise InputError(f"--model {given}: no *.safetensors in it to start from; {hint}")
        return None, None
    state: dict[str, Any] = {}
    for file in files:
        try:
            state.update(load_file(file))
        except (SafetensorError, OSError) as error:
            raise FileFormatError(file, f"not a safetensors file, or truncated: {error}") from error
    return str(folder.resolve()), state


class StepsBar:
    """A progress bar with the loss and the time left; silent with --json."""

    def __init__(self, steps: int, quiet: bool):
        self._bar = Progress(
            TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
            TextColumn("{task.fields[loss]}"), console=console, disable=quiet,
        )  # fmt: skip
        self._task = self._bar.add_task("training", total=steps, loss="")

    def __enter__(self) -> Callable[[StepReport], None]:
        self._bar.start()
        return lambda s: self._bar.update(self._task, advance=1, loss=f"loss {s.loss:.4f}, {format_seconds(s.seconds)}")

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


def report(
    folder: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="A folder from `run`.")], as_json: JsonOption = False
) -> None:
    """Lay measured beside simulated, per kind of operation."""
    from lazytrain.runs import read_report

    found = read_report(folder)
    if as_json:
        print_json(report_json(found))
    else:
        show_report(found)


def report_json(found: Report) -> dict[str, Any]:
    return {
        "step_seconds": {"simulated": found.step.simulated, "measured": found.step.measured, "error": found.step.error},
        "peak_bytes": {
            "predicted": found.predicted_peak_bytes, "measured": found.measured_peak_bytes, "error": found.peak_error,
        },
        "kinds": [
            {
                "kind": k.name, "operations": k.count, "simulated_s": k.simulated, "measured_s": k.measured,
                "error": k.error,
            }
            for k in found.kinds
        ],
        "moved_bytes": {"planned": found.planned_moved_bytes, "measured": found.measured_moved_bytes},
        "run": found.run.model_dump(mode="json"),
    }  # fmt: skip


def show_report(found: Report) -> None:
    table = make_table(
        "operations", "count", "simulated", "measured", "error", left=("operations",),
        title="one step, simulated beside measured",
    )  # fmt: skip
    for line in found.kinds:
        table.add_row(
            line.name,
            str(line.count),
            format_seconds(line.simulated),
            format_seconds(line.measured),
            f"{line.error:+.1%}",
        )
    table.add_section()
    table.add_row(
        "whole step", str(found.step.count), format_seconds(found.step.simulated), format_seconds(found.step.measured),
        f"{found.step.error:+.1%}", style="bold",
    )  # fmt: skip
    table.add_row(
        "peak memory", "", format_bytes(found.predicted_peak_bytes), format_bytes(found.measured_peak_bytes),
        f"{found.peak_error:+.1%}", style="bold",
    )  # fmt: skip
    out.print(table)
    where = "device and host share this machine's RAM" if found.run.device == "cpu" else "host memory"
    out.print(
        f"measured: {_sample(found.run.steps)}; peak = the process's VmHWM less its resident memory before the run "
        f"({where})", style="dim", markup=False, highlight=False,
    )  # fmt: skip
    for resource, planned in found.planned_moved_bytes.items():
        moved = found.measured_moved_bytes[resource]
        out.print(f"{resource}: planned {format_bytes(planned)} a step, moved {format_bytes(moved)}", highlight=False)


def _sample(steps: int) -> str:
    """What the measured step time is the median of."""
    return f"median of {plural(steps - 1, 'step')}, the first left out" if steps > 2 else f"step {steps} alone"


def demo(
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Keep the run in this new folder instead of a temporary one.")
    ] = None,
    steps: Annotated[int, typer.Option("--steps", "-n", help="Training steps.")] = 15,
    as_json: JsonOption = False,
) -> None:
    """Calibrate, plan, compare, simulate, train, and report: all once."""
    positive("--steps", steps)
    if output is not None:
        check_destination(output, folder=True)
    with tempfile.TemporaryDirectory() as temporary:
        _demo(output or Path(temporary) / "run", steps, as_json)


def _demo(folder: Path, steps: int, quiet: bool) -> None:
    from lazytrain import demo as parts
    from lazytrain.executor.data import ByteTokenizer, load_data
    from lazytrain.executor.peak import steady_allocator
    from lazytrain.models import load_model
    from lazytrain.models.architecture import Architecture
    from lazytrain.runs import RunSettings, check_covers, execute, read_report

    def heading(text: str) -> None:
        if not quiet:
            out.rule(f"[bold]{text}[/bold]", align="left")

    steady_allocator()
    heading("1. Measure this machine (`lazytrain calibrate`)")
    with progress(quiet) as tell:
        measured = parts.measure(tell)
    model = load_model(parts.MODEL)
    machine = parts.limited(measured, model)
    if not quiet:
        show_machine(machine)
    heading("2. Plan a step under a memory limit that forces a choice (`lazytrain plan`)")
    with progress(quiet) as tell:
        ours, outcomes = parts.solve(machine, model, tell)
    if not quiet:
        show_outcome(ours)
    if not ours.feasible:
        raise typer.Exit(1)
    heading("3. Beside other policies, on the same simulator (`lazytrain policies`)")
    if not quiet:
        show_policies(outcomes)
    heading(f"4. Train {steps} real steps by that plan (`lazytrain run`)")
    problems = check_covers(ours.plan, model, machine)
    if problems:
        note(f"note: {'; '.join(problems)}", "yellow")
    architecture = Architecture(parts.config())
    words = ByteTokenizer(architecture.vocab_size)
    tokens = load_data(parts.TEXT, words, parts.SEQ, architecture.vocab_size)
    with StepsBar(steps, quiet) as on_step:
        summary = execute(
            ours.plan, ours.program, architecture, tokens, machine, folder,
            RunSettings(steps=steps, lr=parts.LEARNING_RATE), forced=problems, on_step=on_step,
        )  # fmt: skip
    found = read_report(folder)
    if quiet:
        print_json({"plan": outcome_json(ours), "policies": policies_json(outcomes), "report": report_json(found)})
        return
    show_summary(summary, f"on {parts.TEXT.name}")
    heading("5. Predicted beside measured (`lazytrain report`)")
    show_report(found)


def show_machine(machine: Machine) -> None:
    gpu, host, link = machine.gpu, machine.host, machine.link
    text = (
        f"{gpu.name}, {gpu.compute_threads or 0} compute threads; {format_bytes(float(gpu.memory))} of device "
        f"and {format_bytes(float(host.memory))} of host memory; copies {format_rate(float(link.h2d))} in, "
        f"{format_rate(float(link.d2h))} out; "
        f"CPU AdamW {float(host.adamw['fp32']) / 1e9:.2f} G params/s; DRAM {format_rate(float(host.dram_bandwidth))}"
    )
    out.print(text, markup=False, highlight=False)
