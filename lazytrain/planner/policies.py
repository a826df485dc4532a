"""Published and simple policies as plans, so that one simulator judges them all."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from lazytrain.costs.job import TrainingJob
from lazytrain.hwprofiles import Machine
from lazytrain.models.spec import ModelSpec
from lazytrain.schedule.plan import LayerDecision, Plan, Style

Fits = Callable[[Plan], bool]

# MegaTrain's public code (arXiv 2604.05091): checkpoints every K layers, each block recomputed twice, the last
# recompute of a block unused, no prefetch in backward, clip + Adam + refresh while the GPU waits, bf16 weights without
# a fp32 master, logits of all chunks alive until one backward.
MEGATRAIN_K = 4
MEGATRAIN_STYLE = Style(
    update="serial", backward_prefetch=False, recompute_whole_segment=True, keep_all_logits=True, master_dtype="bf16"
)


class PolicyMaker:
    """Makes plans of each policy for one (model, machine, job)."""

    def __init__(self, model: ModelSpec, machine: Machine, job: TrainingJob):
        self.model, self.machine, self.job = model, machine, job
        self.L = model.n_layers

    def plan(self, policy: str, micro_batches: int, layers: Iterable[LayerDecision], **choices: object) -> Plan:
        return Plan(
            policy=policy,
            model=self.model.name,
            hardware=self.machine.name,
            model_digest=self.model.digest(),
            hardware_digest=self.machine.digest(),
            job=self.job,
            micro_batches=micro_batches,
            layers=tuple(layers),
            **choices,  # type: ignore[arg-type]
        )

    def every_k(self, k: int, home: str, M: int) -> list[LayerDecision]:
        """A boundary stored every k layers, those between dropped."""
        stored = LayerDecision.model_validate({f"boundary_{home}": M})
        return [stored if i % k == 0 else LayerDecision(dropped=M) for i in range(self.L)]

    def megatrain(self) -> Plan:
        """MegaTrain as coded: K = 4, whole batch at once, embedding and head resident."""
        layers = self.every_k(MEGATRAIN_K, "gpu", 1)
        return self.plan("megatrain", 1, layers, embedding_resident=True, head_resident=True, style=MEGATRAIN_STYLE)

    def uniform(self, M: int) -> list[Plan]:
        """One boundary every K layers on the GPU or in host memory, ours otherwise; the caller takes the best."""
        ks = [k for k in (1, 2, 3, 4, 6, 8, 12, 16) if k <= self.L]
        return [self.plan("uniform-k", M, self.every_k(k, home, M)) for k in ks for home in ("gpu", "host")]

    def store_all_that_fits(self, M: int, fits: Fits) -> Plan | None:
        """Saved tensors stay on the GPU for as many of the last layers as fit; then boundaries on the GPU, then host.

        ``fits`` says whether a plan keeps within every limit. None when not even all boundaries in host memory do.
        """

        def filled(kept: int, on_gpu: int) -> Plan:
            away = self.L - kept - on_gpu
            layers = [LayerDecision(boundary_host=M)] * away + [LayerDecision(boundary_gpu=M)] * on_gpu
            return self.plan("store-all-that-fits", M, [*layers, *[LayerDecision(keep_gpu=M)] * kept])

        if not fits(filled(0, 0)):
            return None
        boundaries = _largest(self.L, lambda n: fits(filled(0, n)))
        kept = _largest(self.L, lambda n: fits(filled(n, self.L - n))) if boundaries == self.L else 0
        return filled(kept, self.L - kept) if boundaries == self.L else filled(0, boundaries)

    def frugal(self, M: int) -> list[Plan]:
        """Plans that need least memory: one weight slot, boundaries in host memory or mostly dropped."""
        sparse = max(1, round(self.L**0.5))
        choices = {"weight_buffers": 1, "gradient_buffers": 1, "transfer_window": 1}
        return [
            self.plan("frugal", M, self.every_k(1, "host", M), **choices),
            self.plan("frugal", M, self.every_k(sparse, "gpu", M), **choices),
        ]


def _largest(n: int, holds: Callable[[int], bool]) -> int:
    """The largest k in 0..n for which ``holds`` (true up to some k, false beyond; holds(0) is known)."""
    low, high = 0, n
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low
