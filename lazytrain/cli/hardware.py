"""`models`, `hardware`, `calibrate`: what can be planned with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lazytrain.cli.common import JsonOption, make_table, out, print_json, progress
from lazytrain.errors import InputError
from lazytrain.files import check_destination
from lazytrain.units import format_bytes, format_params, format_rate


def register(app: typer.Typer) -> None:
    app.command("models")(models)
    app.command("hardware")(hardware)
    app.command("calibrate")(calibrate)


def models(
    name: Annotated[str | None, typer.Argument(help="Show one model (catalogue name or path) layer by layer.")] = None,
    as_json: JsonOption = False,
) -> None:
    """List the models of the catalogue, or show one layer by layer."""
    from lazytrain.models import list_models, load_model

    specs = [load_model(name)] if name else [load_model(n) for n in list_models()]
    if as_json:
        rows = [
            {
                "name": s.name, "parameters": s.parameter_count, "layers": s.n_layers, "hidden_size": s.hidden_size,
                "vocab_size": s.vocab_size, "tied": s.tied, "max_seq_len": s.max_seq_len,
                "layer_kinds": {
                    k: {"layers": s.layers.count(k), "parameters": v.parameter_count} for k, v in s.kinds.items()
                },
            }
            for s in specs
        ]  # fmt: skip
        print_json({"models": rows})
        return
    if name:
        spec = specs[0]
        table = make_table(
            "kind", "layers", "parameters", "compute", "origin", "saved B/tok", "fwd MFLOP/tok",
            left=("kind", "compute", "origin"),
            title=f"{spec.name}: {format_params(spec.parameter_count)} parameters, {spec.n_layers} layers",
        )  # fmt: skip
        seq = min(2048, spec.max_seq_len)
        for kind in spec.kinds.values():
            for key, trace in kind.traces.items():
                flops = trace.matmul_flops.at(seq, seq) + trace.attention_flops.at(seq, seq)
                table.add_row(
                    kind.name, str(spec.layers.count(kind.name)), format_params(kind.parameter_count), key,
                    trace.origin, f"{trace.saved_bytes.at(seq, seq) / seq:,.0f}", f"{flops / seq / 1e6:,.1f}",
                )  # fmt: skip
        out.print(table)
        out.print(f"per token of a {seq}-token sequence", style="dim")
        return
    table = make_table("model", "parameters", "layers", "hidden", "vocabulary", "tied", left=("model", "tied"))
    for s in specs:
        table.add_row(
            s.name, format_params(s.parameter_count), str(s.n_layers), str(s.hidden_size), str(s.vocab_size),
            "yes" if s.tied else "",
        )  # fmt: skip
    out.print(table)


def hardware(
    name: Annotated[str | None, typer.Argument(help="Show one machine (name or file), number by number.")] = None,
    as_json: JsonOption = False,
) -> None:
    """List the machine profiles, or show one with all its sources."""
    from lazytrain.hwprofiles import dump_machine, list_machines, load_machine

    machines = [load_machine(name)] if name else [load_machine(n) for n in list_machines()]
    if as_json:
        print_json(
            {"machines": [m.to_data() if name else {"name": m.name, "description": m.description} for m in machines]}
        )
        return
    if name:
        out.print(dump_machine(machines[0]), markup=False, highlight=False, soft_wrap=True)
        return
    table = make_table("machine", "GPU", "bf16", "h2d", "RAM", "AdamW", "NVMe", left=("machine",))
    for m in machines:
        peak = m.gpu.peak_flops.get("bf16")
        table.add_row(
            m.name, format_bytes(float(m.gpu.memory), 3), f"{float(peak) / 1e12:.0f}" if peak else "",
            format_rate(float(m.link.h2d)), format_bytes(float(m.host.memory), 3),
            f"{float(m.host.adamw['fp32']) / 1e9:.3g}",
            format_rate(float(m.nvme.sustained_write)) if m.nvme else "",
        )  # fmt: skip
    out.print(table)
    out.print("bf16: peak TFLOPS; AdamW: 1e9 parameters a second on the CPU; NVMe: sustained writes", style="dim")


def calibrate(
    output: Annotated[Path, typer.Option("--output", "-o", help="Profile to write (YAML).")],
    directory: Annotated[Path, typer.Option("--directory", "-d", help="Where to probe the drive.")] = Path(),
    quick: Annotated[bool, typer.Option("--quick", help="Fewer sizes, less writing: under a minute.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Measure this machine: compute, link, memory, optimizer, drive."""
    from lazytrain.executor.peak import steady_allocator
    from lazytrain.hwprofiles import save_machine
    from lazytrain.hwprofiles.calibrate import calibrate as measure

    if not directory.is_dir():
        raise InputError(f"--directory {directory}: not a folder")
    check_destination(output)
    steady_allocator()  # the executor's allocator settings, so that rates are those of a run
    with progress(as_json) as tell:
        machine = measure(directory, quick=quick, progress=lambda text, done: tell(f"{done:4.0%} {text}"))
    save_machine(machine, output)
    if as_json:
        print_json(machine.to_data())
    else:
        out.print(f"wrote {output}: `lazytrain hardware {output}` shows it", markup=False, highlight=False)
