"""What this executor can run, as data, and what a plan asks beyond it. Imports no torch."""

from __future__ import annotations

from typing import TypedDict

from lazytrain.schedule.plan import Action, Plan


class Capabilities(TypedDict):
    devices: tuple[str, ...]
    homes: tuple[str, ...]  # tiers where saved tensors and boundaries may live
    actions: tuple[str, ...]
    update_styles: tuple[str, ...]
    master_dtypes: tuple[str, ...]
    compute_dtypes: tuple[str, ...]
    gradient_dtypes: tuple[str, ...]
    moment_codecs: tuple[str, ...]
    optimizers: tuple[str, ...]
    recompute_levels: tuple[str, ...]  # what of a layer may be kept
    keep_all_logits: bool
    accumulation: bool
    tied_weights: bool


CAPABILITIES: Capabilities = {
    "devices": ("cpu", "cuda"),
    "homes": ("gpu", "host"),
    "actions": tuple(a.value for a in Action if a.home != "nvme"),
    "update_styles": ("lazy", "serial"),
    "master_dtypes": ("fp32",),
    "compute_dtypes": ("fp32", "bf16"),
    "gradient_dtypes": ("fp32", "bf16"),
    "moment_codecs": ("fp32",),
    "optimizers": ("adamw",),
    "recompute_levels": ("all", "boundary", "none"),
    "keep_all_logits": False,
    "accumulation": True,
    "tied_weights": True,
}


def unsupported(plan: Plan) -> list[str]:
    """What the plan needs that the executor lacks, in user words; empty when it can run."""
    missing = []
    for action in Action:
        layers = [i for i, layer in enumerate(plan.layers) if layer.count(action)]
        if layers and action.value not in CAPABILITIES["actions"]:
            shown = ", ".join(map(str, layers[:4])) + (", ..." if len(layers) > 4 else "")
            homes = ", ".join(CAPABILITIES["homes"])
            missing.append(f"layers {shown}: action {action.value} (the executor has homes {homes})")
    style, job = plan.style, plan.job
    if style.update not in CAPABILITIES["update_styles"]:
        missing.append(f"update style {style.update}")
    if style.keep_all_logits and not CAPABILITIES["keep_all_logits"]:
        missing.append("logits of all chunks alive at once (style keep_all_logits)")
    if style.master_dtype not in CAPABILITIES["master_dtypes"]:
        missing.append(f"master weights in {style.master_dtype}")
    if job.compute_dtype not in CAPABILITIES["compute_dtypes"]:
        missing.append(f"compute dtype {job.compute_dtype}")
    if job.gradient_dtype not in CAPABILITIES["gradient_dtypes"]:
        missing.append(f"gradient dtype {job.gradient_dtype}")
    return missing
