"""Peak memory of a whole run against the plan's own figure, in a process of its own (peaks belong to processes)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
import torch
from lazytrain.costs.job import TrainingJob
from lazytrain.costs.table import CostTable
from lazytrain.executor.data import StepBatch
from lazytrain.executor.run import train
from lazytrain.hwprofiles import load_machine
from lazytrain.models.architecture import Architecture
from lazytrain.models.trace import trace_model
from lazytrain.schedule.build import build_program
from lazytrain.schedule.plan import LayerDecision, Plan
from lazytrain.simulator import simulate

config = dict(model_type="llama", architectures=["LlamaForCausalLM"], hidden_size=384, intermediate_size=1024,
              num_hidden_layers=4, num_attention_heads=6, num_key_value_heads=6, vocab_size=4096,
              max_position_embeddings=512, tie_word_embeddings=False, rms_norm_eps=1e-6)
job = TrainingJob(seq_len=256, batch_size=8, compute_dtype="fp32", stream_dtype="fp32", gradient_dtype="fp32",
                  loss_chunk_tokens=256)
plan = Plan(model="m", hardware="h", model_digest="0", hardware_digest="0", job=job, micro_batches=4,
            layers=tuple(LayerDecision(**{sys.argv[1]: 4}) for _ in range(4)))
program = build_program(plan, CostTable(trace_model("m", config), load_machine("rtx-3090-desktop"), job, 4))
peaks = simulate(program).peak_bytes
ids = torch.randint(0, 4096, (1, 8, 256))
result = train(plan, program, Architecture(config), iter([StepBatch.of(ids, ids)] * 2), 2)
for resource, planned in program.moved_bytes().items():
    if resource in result.moved_bytes:
        print(resource, result.moved_bytes[resource] / 2 / planned)
print("peak", result.peak_bytes / (peaks["gpu"] + peaks["host"]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("action", ["keep_host", "keep_gpu", "boundary_host"])
def test_peak_and_moved_bytes_follow_the_plan(action: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, action], capture_output=True, text=True, timeout=300, check=False,
        cwd=Path(__file__).parent.parent,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = {line.split()[0]: float(line.split()[1]) for line in done.stdout.splitlines()}
    assert found["h2d"] == pytest.approx(1, abs=0.02), found
    assert found["d2h"] == pytest.approx(1, abs=0.02), found
    assert 0.8 <= found["peak"] <= 1.25, found
