"""The whole loop once, on this machine: what `lazytrain demo` and `make demo` run."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lazytrain.costs.job import default_job
from lazytrain.hwprofiles import Machine, Quantity
from lazytrain.hwprofiles.calibrate import calibrate
from lazytrain.loop import Outcome, Planner, evaluate
from lazytrain.models import load_config
from lazytrain.models.spec import ModelSpec
from lazytrain.planner.policies import PolicyMaker
from lazytrain.schedule.plan import LayerDecision

MODEL = "demo-qwen3"
TEXT = Path(__file__).parent / "data" / "us_founding_documents.txt"
BATCH, SEQ, MICRO_BATCHES = 16, 128, 4
LEARNING_RATE = 1e-3
# Shares of the memory between "recompute everything" and "keep everything" that the demo's device and host get: enough
# for some layers and not for all, so that the planner has to choose what to keep, move and recompute.
DEVICE_SHARE, HOST_SHARE = 0.4, 0.35


def limited(machine: Machine, model: ModelSpec) -> Machine:
    """The machine with so little memory that neither device nor host can hold every saved tensor."""
    job = default_job(machine.gpu.device, SEQ, BATCH)
    maker = PolicyMaker(model, machine, job)

    def peaks(decision: LayerDecision) -> dict[str, float]:
        plan = maker.plan("probe", MICRO_BATCHES, [decision] * model.n_layers)
        return evaluate(plan, model, machine).verdict.peak_bytes

    least, on_host = peaks(LayerDecision(boundary_host=MICRO_BATCHES)), peaks(LayerDecision(keep_host=MICRO_BATCHES))
    on_gpu = peaks(LayerDecision(keep_gpu=MICRO_BATCHES))
    gpu, host = machine.gpu, machine.host
    device = least["gpu"] + DEVICE_SHARE * (on_gpu["gpu"] - least["gpu"]) + float(gpu.reserved)
    ram = least["host"] + HOST_SHARE * (on_host["host"] - least["host"]) + float(host.baseline)

    def limit(size: float) -> Quantity:
        return Quantity.of(
            f"{size / 2**20:.0f} MiB", "bytes", kind="assumed", date=gpu.memory.date,
            source="the demo's limit, so that the planner has to choose",
        )  # fmt: skip

    return machine.model_copy(
        update={
            "gpu": gpu.model_copy(update={"memory": limit(device)}),
            "host": host.model_copy(update={"memory": limit(ram / float(host.usable))}),
        }
    )


def measure(tell: Callable[[str], None]) -> Machine:
    """A quick calibration of this machine."""
    with tempfile.TemporaryDirectory() as folder:
        return calibrate(Path(folder), quick=True, progress=lambda text, done: tell(f"{done:4.0%} {text}"))


def solve(machine: Machine, model: ModelSpec, tell: Callable[[str], None]) -> tuple[Outcome, list[Outcome]]:
    """The demo's plan, and the same again first in a list with its rivals."""
    job = default_job(machine.gpu.device, SEQ, BATCH)
    planner = Planner(model, machine, job, micro_batches=MICRO_BATCHES, progress=tell)
    ours = planner.plan(time_limit_s=20, gap=0.005)
    return ours, [ours, *planner.rivals(MICRO_BATCHES)]


def config() -> dict[str, Any]:
    return dict(load_config(MODEL))
