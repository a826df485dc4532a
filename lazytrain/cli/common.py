"""What the commands share: output, options, loading."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from lazytrain.errors import InputError
from lazytrain.files import json_ready
from lazytrain.units import format_bytes, format_seconds, plural

if TYPE_CHECKING:
    from lazytrain.loop import Outcome, Progress

console = Console(stderr=True)
# A pipe or file has no width of its own: give tables room instead of rich's 80 columns.
out = Console(width=None if sys.stdout.isatty() else 130)

ModelOption = Annotated[
    str, typer.Option("--model", "-m", help="Model of the catalogue (see `models`), a config.json or its folder.")
]
HardwareOption = Annotated[
    str, typer.Option("--hardware", "-H", help="Machine profile (see `hardware`) or a file from `calibrate`.")
]
BatchOption = Annotated[int, typer.Option("--batch-size", "-b", help="B: sequences a pass.")]
SeqOption = Annotated[int, typer.Option("--seq-len", "-s", help="Tokens a sequence.")]
AccumulationOption = Annotated[int, typer.Option("--accumulation", "-a", help="A: passes an optimizer step.")]
MicroOption = Annotated[
    int | None, typer.Option("--micro-batches", "-M", help="M: micro-batches a pass; searched if not given.")
]
TimeLimitOption = Annotated[
    float, typer.Option("--time-limit", help="Seconds for the solver; policies and simulation come on top.")
]
GapOption = Annotated[float, typer.Option("--gap", help="Relative distance to the bound at which it may stop.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
WhatIfOption = Annotated[
    bool, typer.Option("--what-if", help="Also plan what the executor cannot run yet (activations on NVMe).")
]


def print_json(data: dict[str, Any]) -> None:
    """One object on stdout; not-a-number and infinity become null, which is what JSON has."""
    print(json.dumps(json_ready(data), indent=1, default=str))


def note(text: str, style: str | None = None) -> None:
    """A line on stderr, not broken at the terminal's width: paths in it can be copied."""
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def progress(quiet: bool) -> Iterator[Progress]:
    """A status line on stderr that says what long work is doing."""
    if quiet or not console.is_terminal:
        yield (lambda _: None) if quiet else (lambda text: console.print(text, style="dim", highlight=False))
        return
    with console.status("starting", spinner="dots") as status:
        yield lambda text: status.update(text)


def make_table(*columns: str, left: tuple[str, ...] = (), title: str | None = None) -> Table:
    """A plain table that fits 80 columns; numbers to the right, the columns in ``left`` to the left."""
    table = Table(
        box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), collapse_padding=True, title=title, title_justify="left"
    )
    for column in columns:
        words = column in left
        table.add_column(column, justify="left" if words else "right", no_wrap=not words, overflow="fold")
    return table


def positive(name: str, value: float) -> None:
    if not (value > 0 and math.isfinite(value)):
        raise InputError(f"{name} must be positive (got {value})")


def outcome_json(outcome: Outcome) -> dict[str, Any]:
    """What ``plan --json`` and ``simulate --json`` print."""
    plan, verdict = outcome.plan, outcome.verdict
    certificate = plan.certificate
    simulation = outcome.simulation
    return {
        "feasible": verdict.feasible,
        "violations": [v.model_dump() for v in verdict.violations],
        "advice": list(outcome.advice),
        "step_seconds": verdict.step_seconds,
        "first_step_seconds": verdict.first_step_seconds,
        "tokens_per_second": outcome.tokens_per_second,
        "model_tflops": outcome.model_tflops,
        "peak_bytes": verdict.peak_bytes,
        "capacity_bytes": verdict.capacity_bytes,
        "solver": {
            "status": "infeasible" if not verdict.feasible else "not solved for this machine",
            **dict.fromkeys(("objective", "bound", "gap", "seconds")), "note": "",
        } if certificate is None else certificate.model_dump(),
        "model": plan.model,
        "hardware": plan.hardware,
        "policy": plan.policy,
        "batch_size": plan.job.batch_size,
        "seq_len": plan.job.seq_len,
        "accumulation": plan.job.accumulation,
        "micro_batches": plan.micro_batches,
        "busy_seconds": {r.value: s for r, s in simulation.busy.items()},
        "exposed_seconds": {r.value: s for r, s in simulation.exposed.items()},
        "phases": simulation.phases,
        "fidelity": verdict.fidelity,
    }  # fmt: skip


def show_outcome(outcome: Outcome) -> None:
    """The same for a person."""
    plan, verdict, simulation = outcome.plan, outcome.verdict, outcome.simulation
    job = plan.job
    style, word = ("green", "fits") if verdict.feasible else ("red", "does not fit")
    out.print(
        f"[bold]{plan.model}[/bold] on [bold]{plan.hardware}[/bold], batch {job.batch_size}"
        + (f" x {job.accumulation} passes" if job.accumulation > 1 else "")
        + f", {job.seq_len} tokens a sequence: [bold {style}]{word}[/bold {style}]",
        highlight=False,
    )
    for violation in verdict.violations:
        out.print(f"  {violation.message}", style="red", markup=False, highlight=False)
    for text in outcome.advice:
        out.print(f"  what would fit: {text}", style="yellow", markup=False, highlight=False)
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_row(
        "step",
        f"{format_seconds(verdict.step_seconds)}  ({outcome.tokens_per_second:,.0f} tokens/s, "
        f"{outcome.model_tflops:.4g} model TFLOPS; first step {format_seconds(verdict.first_step_seconds)})",
    )
    if plan.certificate is None and verdict.feasible:
        table.add_row("proof", "none: not solved for this machine")
    if plan.certificate is not None:
        c = plan.certificate
        table.add_row(
            "proof",
            f"program {format_seconds(c.objective)}, bound {format_seconds(c.bound)}, gap {c.gap:.2%}, "
            f"{c.seconds:.1f} s of planning: {c.status}",
        )
    waits = ", ".join(
        f"{r.value} {format_seconds(s)}" for r, s in simulation.exposed.items() if s > 1e-4 * verdict.step_seconds
    )
    table.add_row("GPU waits for", waits or "nothing")
    table.add_row(
        "busy", ", ".join(f"{r.value} {s / verdict.step_seconds:.0%}" for r, s in simulation.busy.items() if s > 0)
    )
    for tier, name in (("gpu", "GPU memory"), ("host", "host memory"), ("pinned", "  of it pinned"), ("nvme", "NVMe")):
        peak, capacity = verdict.peak_bytes[tier], verdict.capacity_bytes[tier]
        if peak > 0:
            items = ", ".join(f"{n} {format_bytes(b)}" for n, b in simulation.run_peaks[tier].largest())
            table.add_row(name, f"{format_bytes(peak)} of {format_bytes(capacity)}  ({items})")
    table.add_row("decisions", summarise(outcome))
    out.print(table, highlight=False)


def summarise(outcome: Outcome) -> str:
    """How many (layer, micro-batch) pairs take each action."""
    plan = outcome.plan
    total = plan.micro_batches * len(plan.layers)
    counts: dict[str, int] = {}
    for layer in plan.layers:
        for action in layer.actions():
            counts[action.value] = counts.get(action.value, 0) + 1
    words = {
        "keep_gpu": "kept on GPU", "keep_host": "kept in host memory", "keep_nvme": "kept on NVMe",
        "boundary_gpu": "recomputed from GPU", "boundary_host": "recomputed from host memory",
        "boundary_nvme": "recomputed from NVMe", "dropped": "recomputed from an earlier layer",
    }  # fmt: skip
    parts = [f"{n / total:.0%} {words[name]}" for name, n in sorted(counts.items(), key=lambda item: -item[1])]
    resident = sum(layer.resident for layer in plan.layers)
    return (
        f"{plural(plan.micro_batches, 'micro-batch')} of {plan.micro_batch_size}; {', '.join(parts)}; "
        f"{resident} of {len(plan.layers)} layers resident, {plural(plan.weight_buffers, 'weight slot')}"
    )


def resolve_path(name: str, known: list[str]) -> str:
    """A path as an absolute one, one of the ``known`` names as it is."""
    path = Path(name).expanduser()
    return str(path.resolve()) if name.lower() not in known and path.exists() else name
