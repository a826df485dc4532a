"""Optimizer settings of a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lazytrain.errors import InputError


@dataclass(frozen=True)
class OptimizerSettings:
    """AdamW. ``lr`` is a number, or a function of the step (counted from 0, skipped steps included)."""

    lr: float | Callable[[int], float] = 1e-5
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.01  # of matrices; norm weights and biases have none

    def __post_init__(self) -> None:
        if not callable(self.lr) and not self.lr >= 0:
            raise InputError(f"lr {self.lr}: must be zero or more")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise InputError(f"{name} {getattr(self, name)}: must be at least 0 and below 1")
        if not self.eps > 0:
            raise InputError(f"eps {self.eps}: must be positive")
        if not self.weight_decay >= 0:
            raise InputError(f"weight_decay {self.weight_decay}: must be zero or more")

    def lr_at(self, step: int) -> float:
        return float(self.lr(step)) if callable(self.lr) else self.lr
