"""How long a person waits: `lazytrain plan --help`, and simulating a 64-layer, M = 8 program to its steady period.

python benchmarks/responsiveness.py
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

from lazytrain.costs.job import TrainingJob
from lazytrain.costs.table import CostTable
from lazytrain.hwprofiles import load_machine
from lazytrain.models import load_model
from lazytrain.planner.policies import PolicyMaker
from lazytrain.schedule.build import build_program
from lazytrain.schedule.plan import LayerDecision
from lazytrain.simulator import simulate


def main() -> None:
    times = []
    for _ in range(5):
        started = time.perf_counter()
        subprocess.run([sys.executable, "-m", "lazytrain", "plan", "--help"], check=True, capture_output=True)
        times.append(time.perf_counter() - started)
    print(f"lazytrain plan --help: median {statistics.median(times):.2f} s of {len(times)} (limit 1 s)")

    model, machine = load_model("qwen3.6-27b"), load_machine("h800-sxm")
    job = TrainingJob(seq_len=1024, batch_size=72)
    layer = LayerDecision(keep_host=2, boundary_host=2, boundary_gpu=4)
    plan = PolicyMaker(model, machine, job).plan("mixed", 8, [layer] * model.n_layers)
    program = build_program(plan, CostTable(model, machine, job, 8))
    for name, bandwidth in (("fixed rates", None), ("shared DRAM", float(machine.host.dram_bandwidth))):
        times = []
        for _ in range(5):
            started = time.perf_counter()
            found = simulate(program, dram_bandwidth=bandwidth)
            times.append(time.perf_counter() - started)
        print(
            f"simulate 64 layers, M=8, {len(program.ops)} operations, {name}: median {statistics.median(times):.2f} s "
            f"of {len(times)}, steady {found.steady} after {found.steps} steps (limit 2 s)"
        )


if __name__ == "__main__":
    main()
