"""Plans of the headline jobs: proven gap, planning time, and the simulated period beside the program's objective.

    python benchmarks/plans.py [--time-limit 60] [--all]

One row a job. ``deviation`` compares objective and simulated period at planner fidelity (no DRAM contention);
``verdict`` is the period with DRAM contention.
"""

from __future__ import annotations

import argparse
import time

from lazytrain.costs.job import default_job
from lazytrain.hwprofiles import load_machine
from lazytrain.loop import Planner, evaluate
from lazytrain.models import load_model

JOBS = [
    ("qwen3.6-27b", "h800-sxm", 72, 1024),
    ("qwen3.6-27b", "h800-lazytrain-paper", 72, 1024),
    ("qwen2.5-7b", "rtx-3090-desktop", 8, 2048),
]
MORE = [
    ("qwen2.5-3b", "h800-sxm", 192, 1024),
    ("qwen2.5-7b", "h800-sxm", 144, 1024),
    ("qwen2.5-14b", "h800-sxm", 96, 1024),
    ("qwen2.5-32b", "h800-sxm", 64, 1024),
    ("qwen2.5-3b", "rtx-4090-desktop", 16, 2048),
    ("qwen3-8b", "rtx-4090-desktop", 8, 2048),
    ("qwen2.5-14b", "rtx-3090-server", 4, 2048),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--time-limit", type=float, default=60.0)
    parser.add_argument("--gap", type=float, default=0.01)
    parser.add_argument("--all", action="store_true", help="the longer list of jobs")
    options = parser.parse_args()
    print(
        "| model | machine | batch x seq | M | objective s | gap | planning s | simulated s | deviation | verdict s "
        "| vs megatrain |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for name, hardware, batch, seq in JOBS + (MORE if options.all else []):
        model, machine = load_model(name), load_machine(hardware)
        planner = Planner(model, machine, default_job(machine.gpu.device, seq, batch))
        started = time.perf_counter()
        outcome = planner.plan(time_limit_s=options.time_limit, gap=options.gap)
        seconds = time.perf_counter() - started
        label = f"| {name} | {hardware} | {batch} x {seq} | {outcome.plan.micro_batches} |"
        certificate = outcome.plan.certificate
        if not outcome.feasible or certificate is None:
            print(f"{label} does not fit: {'; '.join(v.message for v in outcome.verdict.violations)} |")
            continue
        fixed = evaluate(outcome.plan, model, machine, dram_sharing=False).step_seconds
        megatrain = next(o for o in planner.rivals(outcome.plan.micro_batches) if o.plan.policy == "megatrain")
        fits = "" if megatrain.feasible else " (breaks memory)"
        print(
            f"{label} {certificate.objective:.2f} | {certificate.gap:.2%} | {seconds:.1f} | {fixed:.2f} | "
            f"{fixed / certificate.objective - 1:+.2%} | {outcome.step_seconds:.2f} | "
            f"{megatrain.step_seconds / outcome.step_seconds:.2f}x{fits} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
