"""`plan`, `simulate`, `policies`, `export`: from a job to a checked plan."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lazytrain.cli.common import (
    AccumulationOption,
    BatchOption,
    GapOption,
    HardwareOption,
    JsonOption,
    MicroOption,
    ModelOption,
    SeqOption,
    TimeLimitOption,
    WhatIfOption,
    make_table,
    note,
    out,
    outcome_json,
    positive,
    print_json,
    progress,
    resolve_path,
    show_outcome,
)
from lazytrain.errors import InputError, RefusedError
from lazytrain.files import check_destination
from lazytrain.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from lazytrain.hwprofiles import Machine
    from lazytrain.loop import Outcome, Planner, Progress
    from lazytrain.models.spec import ModelSpec
    from lazytrain.schedule.plan import Plan


def register(app: typer.Typer) -> None:
    app.command("plan")(plan)
    app.command("simulate")(simulate)
    app.command("policies")(policies)
    app.command("export")(export)


def _planner(
    model: str, hardware: str, batch: int, seq: int, accumulation: int, micro: int | None, what_if: bool, tell: Progress
) -> Planner:
    from lazytrain.costs.job import default_job
    from lazytrain.hwprofiles import load_machine
    from lazytrain.loop import Planner
    from lazytrain.models import load_model

    for name, value in (("--batch-size", batch), ("--seq-len", seq), ("--accumulation", accumulation)):
        positive(name, value)
    machine = load_machine(hardware)
    tell(f"reading {model}")
    spec = load_model(model)
    homes = ("host", "nvme") if what_if and machine.nvme is not None else ("host",)
    job = default_job(machine.gpu.device, seq, batch, accumulation)
    return Planner(spec, machine, job, homes=homes, micro_batches=micro, progress=tell)


def _check_search(time_limit: float, gap: float) -> None:
    positive("--time-limit", time_limit)
    if not 0 <= gap < 1:
        raise InputError(f"--gap must be at least 0 and below 1 (got {gap})")


def plan(
    model: ModelOption,
    hardware: HardwareOption,
    batch_size: BatchOption,
    seq_len: SeqOption,
    accumulation: AccumulationOption = 1,
    micro_batches: MicroOption = None,
    time_limit: TimeLimitOption = 60.0,
    gap: GapOption = 0.01,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Plan file to write (JSON).")] = None,
    trace: Annotated[Path | None, typer.Option("--trace", help="Write the simulated step for Perfetto.")] = None,
    what_if: WhatIfOption = False,
    as_json: JsonOption = False,
) -> None:
    """Solve for the fastest step that fits, and simulate it."""
    from lazytrain.schedule.plan import write_plan

    _check_search(time_limit, gap)
    _check_files(output, trace)
    with progress(as_json) as tell:
        planner = _planner(model, hardware, batch_size, seq_len, accumulation, micro_batches, what_if, tell)
        outcome = planner.plan(time_limit_s=time_limit, gap=gap)
    written = []
    if output is not None and outcome.feasible:
        write_plan(outcome.plan.model_copy(update=_origin(model, hardware)), output)
        written.append(f"wrote {output}")
    elif output is not None and output.exists():
        written.append(f"{output} is left as it was: it is another plan")
    if trace is not None:
        written.append(_write_trace(outcome, trace))
    _show(outcome, written, as_json)


def _check_files(*files: Path | None) -> None:
    for file in files:
        if file is not None:
            check_destination(file)


def _origin(model: str, hardware: str) -> dict[str, str]:
    """What a plan records of where it comes from: catalogue names, or absolute paths."""
    from lazytrain.hwprofiles import list_machines
    from lazytrain.models import list_models

    return {"model": resolve_path(model, list_models()), "hardware": resolve_path(hardware, list_machines())}


def _show(outcome: Outcome, written: list[str], as_json: bool) -> None:
    """The last thing a command does: everything else that could fail has been done."""
    if as_json:
        print_json(outcome_json(outcome))
    else:
        show_outcome(outcome)
        for line in written:
            note(line)
    if not outcome.feasible:
        raise typer.Exit(1)


def simulate(
    plan_file: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan.json, or a folder from `export`.")],
    hardware: Annotated[
        str | None, typer.Option("--hardware", "-H", help="Check on this machine instead of the plan's own.")
    ] = None,
    model: Annotated[str | None, typer.Option("--model", "-m", help="Where the model is now, if it has moved.")] = None,
    trace: Annotated[Path | None, typer.Option("--trace", help="Write the simulated step for Perfetto.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Check a plan again, on its own or on other hardware."""
    _check_files(trace)
    outcome = check(read_plan_or_folder(plan_file), hardware, model)
    _show(outcome, [] if trace is None else [_write_trace(outcome, trace)], as_json)


def policies(
    model: ModelOption,
    hardware: HardwareOption,
    batch_size: BatchOption,
    seq_len: SeqOption,
    accumulation: AccumulationOption = 1,
    micro_batches: MicroOption = None,
    time_limit: TimeLimitOption = 60.0,
    gap: GapOption = 0.01,
    what_if: WhatIfOption = False,
    as_json: JsonOption = False,
) -> None:
    """Lay our plan beside published policies, on the same simulator."""
    _check_search(time_limit, gap)
    with progress(as_json) as tell:
        planner = _planner(model, hardware, batch_size, seq_len, accumulation, micro_batches, what_if, tell)
        ours = planner.plan(time_limit_s=time_limit, gap=gap)
        outcomes = [ours, *planner.rivals(ours.plan.micro_batches)]
    if as_json:
        print_json({"policies": policies_json(outcomes)})
    else:
        show_policies(outcomes)
    if not ours.feasible:
        raise typer.Exit(1)


def policies_json(outcomes: list[Outcome]) -> list[dict[str, Any]]:
    """One object a policy; the first is ours."""
    return [
        {
            "policy": "lazytrain" if k == 0 else o.plan.policy,
            "feasible": o.feasible,
            "step_seconds": o.step_seconds,
            "tokens_per_second": o.tokens_per_second,
            "model_tflops": o.model_tflops,
            "peak_bytes": o.verdict.peak_bytes,
            "micro_batches": o.plan.micro_batches,
            "violations": [v.model_dump() for v in o.verdict.violations],
        }
        for k, o in enumerate(outcomes)
    ]


def show_policies(outcomes: list[Outcome]) -> None:
    """One row a policy; the first is ours."""
    table = make_table(
        "policy", "step", "tokens/s", "vs ours", "GPU peak", "host peak", "M", "fits", left=("policy", "fits")
    )
    ours = outcomes[0]
    for o in outcomes:
        peaks = o.verdict.peak_bytes
        broken = ", ".join(v.limit for v in o.verdict.violations)
        table.add_row(
            "lazytrain" if o is ours else o.plan.policy, format_seconds(o.step_seconds), f"{o.tokens_per_second:,.0f}",
            f"{o.step_seconds / ours.step_seconds:.2f}x", format_bytes(peaks["gpu"]), format_bytes(peaks["host"]),
            str(o.plan.micro_batches), "yes" if o.feasible else f"no: {broken}", style="bold" if o is ours else "",
        )  # fmt: skip
    out.print(table)


def export(
    plan_file: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan.json that passed.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to make for the executor.")],
    model: Annotated[str | None, typer.Option("--model", "-m", help="Where the model is now, if it has moved.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Write what the executor runs: plan, step program and verdict."""
    from lazytrain.executor.capabilities import unsupported

    _check_export(output)
    chosen = read_plan_or_folder(plan_file)
    if chosen.verdict is None or not chosen.verdict.feasible:
        raise RefusedError(f"{plan_file}: the plan has no passed verdict; plan it again or see `lazytrain simulate`")
    lacking = unsupported(chosen)
    if lacking:
        raise RefusedError(f"{plan_file}: the executor cannot run it: {'; '.join(lacking)}")
    outcome = check(chosen, None, model)
    if not outcome.feasible:
        raise RefusedError(f"{plan_file}: {'; '.join(v.message for v in outcome.verdict.violations)}")
    write_export(outcome.plan, outcome, output)
    if as_json:
        print_json(
            {"output": str(output), "files": ["plan.json", "program.json", "verdict.json"], **outcome_json(outcome)}
        )
    else:
        hint = f"run it with `lazytrain run {output} --data FILE --steps N --output NEW_FOLDER`"
        out.print(f"wrote {output}: {hint}", markup=False, highlight=False)


EXPORTED = {"plan.json", "program.json", "verdict.json"}


def write_export(plan: Plan, outcome: Outcome, folder: Path) -> None:
    """The folder appears complete or not at all, in place of an older export if there is one."""
    place = folder.absolute()
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(dir=place.parent, prefix=f".{place.name}."))
        old = fresh.with_name(f"{fresh.name}.old")
        try:
            (fresh / "plan.json").write_text(plan.model_dump_json(indent=1) + "\n")
            (fresh / "program.json").write_text(outcome.program.model_dump_json() + "\n")
            (fresh / "verdict.json").write_text(outcome.verdict.model_dump_json(indent=1) + "\n")
            fresh.chmod(0o755)
            if place.is_dir():
                place.rename(old)
            fresh.rename(place)
        except BaseException:
            if old.is_dir() and not place.exists():
                old.rename(place)
            raise
        finally:
            shutil.rmtree(old, ignore_errors=True)
            shutil.rmtree(fresh, ignore_errors=True)
    except OSError as error:
        raise InputError(f"{folder}: cannot be written: {error.strerror or error}") from error


def _check_export(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder}: exists and is not a folder")
    if folder.is_dir() and not {entry.name for entry in folder.iterdir()} <= EXPORTED:
        raise InputError(f"{folder}: is a folder with other things in it")


def read_plan_or_folder(path: Path) -> Plan:
    """A plan file, or the plan inside an export."""
    from lazytrain.schedule.plan import read_plan

    return read_plan(path / "plan.json" if path.is_dir() else path)


def check(chosen: Plan, hardware: str | None, model: str | None) -> Outcome:
    """Simulates a plan again. InputError when its model or machine profile is not what it was planned for."""
    from lazytrain.hwprofiles import list_machines
    from lazytrain.loop import evaluate

    spec = load_planned_model(chosen, model)
    machine = load_planned_machine(chosen, hardware)
    if machine.digest() != chosen.hardware_digest:  # then what was proven does not hold
        other = {"hardware": resolve_path(hardware or chosen.hardware, list_machines()), "certificate": None}
        chosen = chosen.model_copy(update={**other, "hardware_digest": machine.digest()})
    return evaluate(chosen, spec, machine)


def load_planned_model(chosen: Plan, model: str | None) -> ModelSpec:
    from lazytrain.models import load_model

    spec = load_model(model or chosen.model)
    if spec.digest() != chosen.model_digest:
        raise InputError(
            f"the plan is for another model: '{model or chosen.model}' has digest {spec.digest()}, the plan's has "
            f"{chosen.model_digest}; plan again"
        )
    return spec


def load_planned_machine(chosen: Plan, hardware: str | None) -> Machine:
    from lazytrain.hwprofiles import load_machine

    machine = load_machine(hardware or chosen.hardware)
    if hardware is None and machine.digest() != chosen.hardware_digest:
        raise InputError(
            f"profile '{chosen.hardware}' has changed since the plan (digest {machine.digest()}, then "
            f"{chosen.hardware_digest}); give --hardware {chosen.hardware} to check on it as it is now, or plan again"
        )
    return machine


def _write_trace(outcome: Outcome, path: Path) -> str:
    from lazytrain.simulator import simulated_trace, write_trace

    write_trace(path, simulated_trace(outcome.program, outcome.simulation))
    return f"wrote {path}: open it at ui.perfetto.dev"
