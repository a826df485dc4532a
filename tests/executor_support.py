"""Tiny models, plans and the plain PyTorch training that the executor must equal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import LlamaConfig, Qwen2Config

from lazytrain.costs.job import TrainingJob
from lazytrain.costs.table import CostTable
from lazytrain.executor.data import IGNORE, StepBatch
from lazytrain.executor.run import TrainResult, train
from lazytrain.executor.settings import OptimizerSettings
from lazytrain.hwprofiles import load_machine
from lazytrain.models.architecture import Architecture
from lazytrain.models.spec import LayerKind, LayerTrace, ModelSpec, Terms
from lazytrain.schedule.build import build_program
from lazytrain.schedule.plan import LayerDecision, Plan, Style
from lazytrain.schedule.program import StepProgram

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def tiny_config(tied: bool = False, layers: int = 3, vocab: int = 96, family: str = "llama", hidden: int = 32):  # type: ignore[no-untyped-def]
    common = {
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 256,
        "initializer_range": 0.15,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return LlamaConfig(**common, pad_token_id=3) if family == "llama" else Qwen2Config(**common)


def spec_of(architecture: Architecture, name: str = "tiny") -> ModelSpec:
    """A ModelSpec with the real shapes and invented costs: enough for the order of operations."""
    one = Terms(per_token=100.0)
    trace = LayerTrace(
        matmul_flops=one,
        attention_flops=one,
        memory_bytes=one,
        saved_bytes=one,
        forward_peak_bytes=one,
        backward_peak_bytes=one,
        kernels=10,
    )
    kinds = {}
    layers = tuple(architecture.kind_of(i) for i in range(architecture.n_layers))
    for i, kind in enumerate(layers):
        if kind not in kinds:
            traces = {f"{d}/{b}": trace for d in ("fp32", "bf16") for b in ("flash", "math", "torch", "efficient")}
            kinds[kind] = LayerKind(name=kind, parameters=architecture.parameter_shapes(i), traces=traces)
    return ModelSpec(
        name=name,
        config_digest="0",
        hidden_size=architecture.hidden_size,
        vocab_size=architecture.vocab_size,
        max_seq_len=4096,
        tied=architecture.tied,
        kinds=kinds,
        layers=layers,
        final_norm_parameters=architecture.hidden_size,
    )


@dataclass
class Case:
    """A job on a tiny model, with data, and its plain PyTorch result."""

    tied: bool = False
    layers: int = 3
    vocab: int = 96
    family: str = "llama"
    M: int = 2
    B: int = 4
    A: int = 1
    S: int = 12
    dtype: str = "fp32"
    parked: str | None = None
    chunk: int = 7
    max_norm: float | None = 1.0
    padded: bool = False
    steps: int = 3
    optimizer: OptimizerSettings = field(default_factory=lambda: OptimizerSettings(lr=1e-2, weight_decay=0.1, eps=1e-3))

    def __post_init__(self) -> None:
        self.architecture = Architecture(tiny_config(self.tied, self.layers, self.vocab, self.family))
        self.job = TrainingJob(
            seq_len=self.S,
            batch_size=self.B,
            accumulation=self.A,
            compute_dtype=self.dtype,
            stream_dtype=self.dtype,
            gradient_dtype=self.parked or self.dtype,
            loss_chunk_tokens=self.chunk,
            max_norm=self.max_norm,
        )

    def state(self) -> dict[str, Tensor]:
        return dict(self.architecture.init_state(7))

    def batches(self) -> Iterator[StepBatch]:
        generator = torch.Generator().manual_seed(11)
        while True:
            shape = (self.A, self.B, self.S)
            ids = torch.randint(4, self.vocab, shape, generator=generator)
            labels = torch.randint(4, self.vocab, shape, generator=generator)
            if self.padded:  # prompts without loss, rows of unequal length padded on the right
                lengths = torch.randint(4, self.S + 1, shape[:2], generator=generator)
                prompts = torch.randint(0, 3, shape[:2], generator=generator)
                where = torch.arange(self.S)
                labels[(where < prompts[..., None]) | (where >= lengths[..., None])] = IGNORE
                ids[where >= lengths[..., None]] = 3
            yield StepBatch.of(ids, labels)

    def plan(self, decisions: list[LayerDecision] | None = None, style: Style | None = None, **extra: object) -> Plan:
        decisions = decisions or [LayerDecision(keep_gpu=self.M)] * self.layers
        return Plan(
            model="tiny",
            hardware="test",
            model_digest="0",
            hardware_digest="0",
            job=self.job,
            micro_batches=self.M,
            layers=tuple(decisions),
            style=style or Style(),
            **extra,  # type: ignore[arg-type]
        )

    def program(self, plan: Plan) -> StepProgram:
        machine = load_machine("rtx-3090-desktop")
        return build_program(plan, CostTable(spec_of(self.architecture), machine, self.job, self.M))

    def run(self, plan: Plan | None = None, **extra: object) -> TrainResult:
        plan = plan or self.plan()
        arguments = {"optimizer": self.optimizer, "initial_state": self.state(), **extra}
        batches = arguments.pop("batches", None) or self.batches()
        return train(plan, self.program(plan), self.architecture, batches, self.steps, **arguments)  # type: ignore[arg-type]

    def reference(self) -> Reference:
        return plain_training(self)


@dataclass
class Reference:
    losses: list[float]
    norms: list[float]
    gradients: dict[str, Tensor]  # of the last step, before clipping
    weights: dict[str, Tensor]


def plain_training(case: Case) -> Reference:
    """Hugging Face model, micro-batch by micro-batch, loss sum over the step's valid tokens, clip, torch's AdamW.

    In bf16: a bf16 model computes, fp32 masters are updated, as the streamed run does.
    """
    model = case.architecture.build_reference_model(DTYPES[case.dtype])
    model.load_state_dict({k: v.to(DTYPES[case.dtype]) for k, v in case.state().items()}, strict=False)
    if case.tied:
        model.tie_weights()
    model.train()
    parameters = dict(model.named_parameters())
    masters = {n: p.detach().float().clone().requires_grad_() for n, p in parameters.items()}
    if case.dtype != "fp32":  # masters keep the full initial precision
        for name, value in case.state().items():
            if name in masters:
                masters[name].data.copy_(value)
    settings = case.optimizer
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in masters.values() if p.dim() >= 2], "weight_decay": settings.weight_decay},
            {"params": [p for p in masters.values() if p.dim() < 2], "weight_decay": 0.0},
        ],
        lr=1.0,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
    )
    losses, norms, gradients = [], [], {}
    size = case.B // case.M
    batches = case.batches()
    for step in range(case.steps):
        batch = next(batches)
        total = 0.0
        model.zero_grad(set_to_none=True)
        for a in range(case.A):
            for m in range(case.M):
                rows = slice(m * size, (m + 1) * size)
                logits = model(input_ids=batch.input_ids[a, rows]).logits.float()
                loss = (
                    torch.nn.functional.cross_entropy(
                        logits.flatten(0, 1), batch.labels[a, rows].flatten(), ignore_index=IGNORE, reduction="sum"
                    )
                    / batch.valid_tokens
                )
                loss.backward()
                total += loss.item()
        losses.append(total)
        for name, parameter in parameters.items():
            assert parameter.grad is not None
            masters[name].grad = parameter.grad.to(DTYPES[case.job.gradient_dtype]).float()
        gradients = {n: p.grad.clone() for n, p in masters.items() if p.grad is not None}
        limit = case.max_norm if case.max_norm is not None else float("inf")
        norms.append(float(torch.nn.utils.clip_grad_norm_(masters.values(), limit)))
        for group in optimizer.param_groups:
            group["lr"] = settings.lr_at(step)
        optimizer.step()
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(masters[name])
    return Reference(losses, norms, gradients, {n: p.detach().clone() for n, p in masters.items()})


def relative(mine: Tensor, theirs: Tensor) -> float:
    """Largest difference over the largest value."""
    return float((mine.float() - theirs.float()).abs().max() / theirs.float().abs().max().clamp_min(1e-12))


def errors(result: TrainResult, reference: Reference) -> dict[str, float]:
    """Largest relative differences from plain PyTorch: of losses, norms, last gradients (to the largest), weights."""

    def of(mine: list[float], theirs: list[float]) -> float:
        assert len(mine) == len(theirs)
        return max(abs(a - b) / max(abs(b), 1e-9) for a, b in zip(mine, theirs, strict=True))

    assert result.store is not None
    weights, gradients = result.weights(), result.store.gradients()
    assert weights.keys() == reference.weights.keys() == gradients.keys()
    largest = max(float(g.abs().max()) for g in reference.gradients.values())
    return {
        "loss": of(result.losses, reference.losses),
        "norm": of(result.norms, reference.norms),
        "gradient": max(
            float((gradients[n].float() - g).abs().max()) / largest for n, g in reference.gradients.items()
        ),
        "weight": max(relative(weights[n], w) for n, w in reference.weights.items()),
    }


def check(result: TrainResult, reference: Reference, **limits: float) -> None:
    found = errors(result, reference)
    assert all(found[name] <= limit for name, limit in limits.items()), found


FP32 = {"loss": 1e-6, "norm": 1e-6, "gradient": 5e-6, "weight": 2e-5}
BF16 = {"loss": 1e-3, "norm": 1e-2, "weight": 3e-2}
