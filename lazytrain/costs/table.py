"""CostTable: seconds and bytes of every operation of a (model, machine, job) with M micro-batches a pass.

One formula in one place: the planner, the policies and the StepProgram all read costs here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from lazytrain.costs.job import TrainingJob
from lazytrain.errors import InputError, ModelError
from lazytrain.hwprofiles import Gpu, Machine
from lazytrain.models.spec import DTYPE_BYTES, LayerKind, LayerTrace, ModelSpec

# FLOPs of an attention backward over its forward: flash kernels recompute the scores, five products against two.
ATTENTION_BACKWARD = 2.5
# Bytes that the loss reads and writes per logit, by compute dtype, counted over the passes of executor/loss.py: logits
# out, fp32 copy (bf16 only), log-softmax (two reads, one write), exponential, scale, copy back (bf16), two products.
LOSS_BYTES_PER_LOGIT = {"bf16": 46.0, "fp32": 40.0}
# Bytes alive at once per logit of the chunk in flight: the logits and, in bf16, their fp32 copy.
LOSS_LIVE_BYTES_PER_LOGIT = {"bf16": 6.0, "fp32": 4.0}
ADAM_MOMENT_BYTES = 8  # two fp32 moments


@dataclass(frozen=True)
class UnitCost:
    """Costs of one unit (embedding, a decoder layer, or the head). Times and activations are per micro-batch."""

    name: str
    parameters: int
    weight_bytes: float
    gradient_bytes: float
    parked_bytes: float
    forward_s: float
    backward_s: float
    saved_bytes: float
    forward_workspace_bytes: float
    backward_workspace_bytes: float
    model_flops: float


class CostTable:
    """All costs for ``micro_batches`` micro-batches a pass. Raises InputError when M does not divide the batch."""

    def __init__(self, model: ModelSpec, machine: Machine, job: TrainingJob, micro_batches: int):
        if micro_batches < 1 or job.batch_size % micro_batches:
            raise InputError(f"--micro-batches {micro_batches} does not divide --batch-size {job.batch_size}")
        if job.seq_len > model.max_seq_len:
            raise InputError(f"--seq-len {job.seq_len} is beyond {model.name}'s limit of {model.max_seq_len}")
        self.model, self.machine, self.job, self.micro_batches = model, machine, job, micro_batches
        self.element_bytes = DTYPE_BYTES[job.compute_dtype]
        self.parked_element_bytes = DTYPE_BYTES[job.gradient_dtype]
        self.tokens = job.batch_size // micro_batches * job.seq_len
        self.boundary_bytes = float(self.tokens * model.hidden_size * self.element_bytes)

    # --- units -----------------------------------------------------------------------------------------------------
    @cached_property
    def layers(self) -> tuple[UnitCost, ...]:
        by_kind = {name: self._layer(kind) for name, kind in self.model.kinds.items()}
        return tuple(by_kind[name] for name in self.model.layers)

    @cached_property
    def units(self) -> tuple[UnitCost, ...]:
        """Embedding, the decoder layers, head: the numbering of StepProgram."""
        return (self.embedding, *self.layers, self.head)

    @cached_property
    def embedding(self) -> UnitCost:
        d, e = self.model.hidden_size, self.element_bytes
        rate = self._memory_rate()
        table = self.model.vocabulary_parameters
        return self._unit(
            "embedding", table, forward_s=self.tokens * d * 2 * e / rate, backward_s=self.tokens * d * 3 * e / rate
        )

    @cached_property
    def head(self) -> UnitCost:
        """Final norm, LM head and loss, forward and backward together in ``forward_s``."""
        model, job = self.model, self.job
        parameters = model.final_norm_parameters + (0 if model.tied else model.vocabulary_parameters)
        chunk = min(job.loss_chunk_tokens, self.tokens)
        flops = 6.0 * self.tokens * model.vocabulary_parameters
        seconds = self._matmul_s(flops, flops / (3 * math.ceil(self.tokens / chunk)))
        seconds += self.tokens * model.vocab_size * LOSS_BYTES_PER_LOGIT[job.compute_dtype] / self._memory_rate()
        logits = chunk * model.vocab_size * LOSS_LIVE_BYTES_PER_LOGIT[job.compute_dtype]
        # Beside the chunk's logits: the chunk's normed input, its fp32 copies and the gradients of both.
        hidden = chunk * model.hidden_size * (2 * self.element_bytes + 3 * 4)
        return self._unit(
            "head", parameters, forward_s=seconds, forward_workspace_bytes=logits + hidden, model_flops=flops
        )

    @property
    def all_logits_bytes(self) -> float:
        """Logits of a whole micro-batch: what a loss that keeps every chunk's graph holds."""
        return float(self.tokens * self.model.vocab_size * self.element_bytes)

    def _layer(self, kind: LayerKind) -> UnitCost:
        trace = self._trace(kind)
        # Kernels that work in chunks of positions pad each sequence to a whole number of them.
        s = math.ceil(self.job.seq_len / trace.sequence_multiple) * trace.sequence_multiple
        t = self.tokens // self.job.seq_len * s
        matmul, attention = trace.matmul_flops.at(t, s), trace.attention_flops.at(t, s)
        forward_s, backward_s = self._layer_seconds(kind, matmul, attention, trace.memory_bytes.at(t, s))
        largest_weight = max(math.prod(shape) for shape in kind.parameters.values())
        return self._unit(
            kind.name,
            kind.parameter_count,
            forward_s=forward_s,
            backward_s=backward_s,
            saved_bytes=trace.saved_bytes.at(t, s),
            forward_workspace_bytes=trace.forward_peak_bytes.at(t, s),
            backward_workspace_bytes=trace.backward_peak_bytes.at(t, s) + largest_weight * self.element_bytes,
            model_flops=3 * (matmul + attention),
        )

    def _unit(
        self,
        name: str,
        parameters: int,
        *,
        forward_s: float,
        backward_s: float = 0.0,
        saved_bytes: float = 0.0,
        forward_workspace_bytes: float = 0.0,
        backward_workspace_bytes: float = 0.0,
        model_flops: float = 0.0,
    ) -> UnitCost:
        return UnitCost(
            name,
            parameters,
            float(parameters * self.element_bytes),
            float(parameters * self.element_bytes),
            float(parameters * self.parked_element_bytes),
            forward_s,
            backward_s,
            saved_bytes,
            forward_workspace_bytes,
            backward_workspace_bytes,
            model_flops,
        )

    def _trace(self, kind: LayerKind) -> LayerTrace:
        gpu, dtype = self.machine.gpu, self.job.compute_dtype
        for backend in (gpu.attention_backend, gpu.linear_attention_backend):
            if f"{dtype}/{backend}" in kind.traces:
                return kind.trace(dtype, backend)
        raise ModelError(
            f"{self.model.name}: layer kind '{kind.name}' has no trace for {dtype} with "
            f"{gpu.attention_backend} or {gpu.linear_attention_backend} kernels"
        )

    # --- compute ---------------------------------------------------------------------------------------------------
    def _layer_seconds(
        self, kind: LayerKind, matmul: float, attention: float, memory_bytes: float
    ) -> tuple[float, float]:
        """Forward and backward seconds of a layer call: whole-layer rates where measured, else the sum of its parts."""
        gpu, dtype = self.machine.gpu, self.job.compute_dtype
        total = matmul + attention
        if gpu.layer_rate_forward and dtype in gpu.layer_rate_forward and gpu.layer_rate_backward:
            scale = float(gpu.compute_efficiency)
            forward = total / (gpu.layer_rate_forward[dtype].at(total) * scale)
            return forward, 2 * total / (gpu.layer_rate_backward[dtype].at(total) * scale)
        products = sum(1 for shape in kind.parameters.values() if len(shape) == 2)
        memory_s = memory_bytes / self._memory_rate()
        matmul_s = self._matmul_s(matmul, matmul / max(products, 1))
        attention_s = self._attention_s(attention)
        return matmul_s + attention_s + memory_s, 2 * matmul_s + ATTENTION_BACKWARD * attention_s + 2 * memory_s

    def _peak(self) -> float:
        gpu: Gpu = self.machine.gpu
        if self.job.compute_dtype not in gpu.peak_flops:
            raise InputError(f"{gpu.name} has no peak rate for {self.job.compute_dtype}")
        return float(gpu.peak_flops[self.job.compute_dtype]) * float(gpu.compute_efficiency)

    def _matmul_s(self, flops: float, flops_per_product: float) -> float:
        return flops / (self._peak() * self.machine.gpu.matmul_efficiency.at(flops_per_product))

    def _attention_s(self, flops: float) -> float:
        return flops / (self._peak() * self.machine.gpu.attention_efficiency.at(flops)) if flops else 0.0

    def _memory_rate(self) -> float:
        gpu = self.machine.gpu
        return float(gpu.memory_bandwidth) * float(gpu.memory_efficiency) * float(gpu.compute_efficiency)

    # --- transfers, drive, CPU -------------------------------------------------------------------------------------
    def h2d_s(self, n: float) -> float:
        return float(self.machine.link.latency) + n / float(self.machine.link.h2d) if n else 0.0

    def d2h_s(self, n: float) -> float:
        return float(self.machine.link.latency) + n / float(self.machine.link.d2h) if n else 0.0

    def nvme_read_s(self, n: float) -> float:
        nvme = self.machine.nvme
        return math.inf if nvme is None else float(nvme.latency) + n / float(nvme.read)

    def nvme_write_s(self, n: float) -> float:
        """At the sustained rate: training writes every step, so the drive's cache is soon full."""
        nvme = self.machine.nvme
        return math.inf if nvme is None else float(nvme.latency) + n / float(nvme.sustained_write)

    def norm_s(self, unit: UnitCost) -> float:
        host = self.machine.host
        return unit.parked_bytes / float(host.norm_bandwidth or host.dram_bandwidth)

    def accumulate_s(self, unit: UnitCost) -> float:
        return self.accumulate_dram_bytes(unit) / float(self.machine.host.dram_bandwidth)

    def update_s(self, unit: UnitCost) -> float:
        return unit.parameters / float(self.machine.host.adamw["fp32"])

    def accumulate_dram_bytes(self, unit: UnitCost) -> float:
        return 3 * unit.parked_bytes

    def update_dram_bytes(self, unit: UnitCost, master_bytes: int) -> float:
        """Read and write master and moments, read the gradient, write the streamed copy."""
        return unit.parameters * (
            2 * (master_bytes + ADAM_MOMENT_BYTES) + self.parked_element_bytes + self.stream_copy_bytes
        )

    @property
    def stream_copy_bytes(self) -> int:
        """Bytes per parameter of the copy that is streamed; none where the fp32 master itself is."""
        return 0 if self.job.stream_dtype == "fp32" else DTYPE_BYTES[self.job.stream_dtype]

    # --- limits and rates ------------------------------------------------------------------------------------------
    def capacities(self) -> dict[str, float]:
        """Bytes a plan may use per tier; ``pinned`` is the part of ``host`` that may be page-locked."""
        machine = self.machine
        host = machine.usable_host_bytes - float(machine.host.baseline)
        return {
            "gpu": float(machine.gpu.memory) - float(machine.gpu.reserved),
            "host": host,
            "pinned": min(machine.pin_limit_bytes, host),
            "nvme": float(machine.nvme.capacity) if machine.nvme else 0.0,
        }

    def assumed_rates(self, drive: bool) -> dict[str, float]:
        """The rates (SI) that a plan's step time rests on; a verdict carries them. ``drive``: it uses one."""
        layer = max(self.layers, key=lambda unit: unit.parameters)
        rates = {
            "layer_forward_flops": layer.model_flops / 3 / layer.forward_s,
            "layer_backward_flops": layer.model_flops * 2 / 3 / layer.backward_s,
            "h2d": float(self.machine.link.h2d),
            "d2h": float(self.machine.link.d2h),
            "adamw_params": float(self.machine.host.adamw["fp32"]),
        }
        if drive and self.machine.nvme is not None:
            rates["nvme_read"] = float(self.machine.nvme.read)
            rates["nvme_write"] = float(self.machine.nvme.sustained_write)
        return rates

    def model_flops_per_step(self) -> float:
        """6 * N * tokens, as the field prints model TFLOPS."""
        return 6.0 * self.model.parameter_count * self.job.tokens_per_step
