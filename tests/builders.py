"""Small models and machines with round numbers, for tests that need exact arithmetic."""

from __future__ import annotations

import datetime
from typing import Any

from lazytrain.costs.job import TrainingJob
from lazytrain.hwprofiles import Machine, load_machine
from lazytrain.hwprofiles.quantity import Quantity
from lazytrain.models.spec import LayerKind, LayerTrace, ModelSpec, Terms


def quantity(text: str, dimension: str) -> Quantity:
    return Quantity.of(text, dimension, kind="assumed", source="made for a test", date=datetime.date(2026, 1, 1))


def machine(base: str = "rtx-3090-desktop", **changes: tuple[str, str]) -> Machine:
    """A shipped machine with some numbers changed: ``gpu__memory=("3 GB", "bytes")``."""
    found = load_machine(base)
    parts: dict[str, dict[str, Any]] = {}
    for path, (text, dimension) in changes.items():
        part, field = path.split("__")
        if field == "adamw":
            parts.setdefault(part, {})[field] = {"fp32": quantity(text, dimension)}
        else:
            parts.setdefault(part, {})[field] = quantity(text, dimension)
    update = {name: getattr(found, name).model_copy(update=fields) for name, fields in parts.items()}
    return found.model_copy(update=update)


def model(
    layers: int = 4, *, hidden: int = 64, vocabulary: int = 1000, parameters: int = 1_000_000,
    saved_per_token: int = 2000, tied: bool = False, kinds: int = 1,
) -> ModelSpec:  # fmt: skip
    """A synthetic decoder; with ``kinds`` = 2 every other layer is half again as large."""

    def kind(name: str, scale: float) -> LayerKind:
        n = int(parameters * scale)
        trace = LayerTrace(
            matmul_flops=Terms(per_token=2 * n), attention_flops=Terms(), memory_bytes=Terms(per_token=8 * hidden),
            saved_bytes=Terms(per_token=saved_per_token * scale), forward_peak_bytes=Terms(per_token=4 * hidden),
            backward_peak_bytes=Terms(per_token=6 * hidden), kernels=10,
        )  # fmt: skip
        return LayerKind(name=name, parameters={"w": (n // 10, 10)}, traces={"bf16/flash": trace, "fp32/flash": trace})

    made = {"a": kind("a", 1.0)}
    if kinds == 2:
        made["b"] = kind("b", 1.5)
    order = tuple("ab"[i % kinds] for i in range(layers))
    return ModelSpec(
        name="toy", config_digest="toy", hidden_size=hidden, vocab_size=vocabulary, max_seq_len=4096, tied=tied,
        kinds=made, layers=order, final_norm_parameters=hidden,
    )  # fmt: skip


def job(batch: int = 4, seq: int = 128, **fields: Any) -> TrainingJob:
    return TrainingJob(seq_len=seq, batch_size=batch, **fields)
