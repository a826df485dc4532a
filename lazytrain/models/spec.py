"""ModelSpec: what each layer of a model holds, computes and saves, as data.

Nothing here imports torch. Numbers come from a trace of the real architecture (`lazytrain.models.trace`), or are
declared for a kernel that the trace cannot run (and then say so).
"""

from __future__ import annotations

import hashlib
import math
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

DTYPE_BYTES: dict[str, int] = {"fp32": 4, "bf16": 2, "fp16": 2}


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Terms(_Frozen):
    """A quantity of one layer call as a function of its tokens and their sequence length.

    ``at(tokens, seq_len) = fixed + per_token * tokens + per_token_seq * tokens * seq_len
    + per_sequence * tokens / seq_len``
    """

    fixed: float = 0.0
    per_token: float = 0.0
    per_token_seq: float = 0.0
    per_sequence: float = 0.0

    def at(self, tokens: float, seq_len: float) -> float:
        linear = self.fixed + self.per_token * tokens + self.per_token_seq * tokens * seq_len
        return linear + self.per_sequence * tokens / seq_len


class Largest(_Frozen):
    """The largest of several quantities: a peak is at another operation for short sequences than for long ones."""

    of: tuple[Terms, ...]

    def at(self, tokens: float, seq_len: float) -> float:
        return max(terms.at(tokens, seq_len) for terms in self.of)


class LayerTrace(_Frozen):
    """One forward call of a layer kind in one compute dtype with one attention backend.

    FLOPs count a multiply-add as two. Bytes are those of the compute dtype's run (fp32 copies included).
    """

    origin: Literal["traced", "declared"] = "traced"
    matmul_flops: Terms = Field(description="matrix products of the forward pass, attention excluded")
    attention_flops: Terms = Field(description="score and value products of attention (or of the recurrence)")
    memory_bytes: Terms = Field(description="bytes that all other forward kernels read and write")
    saved_bytes: Terms = Field(
        description="storages autograd keeps for backward, shared ones once, parameters excluded"
    )
    forward_peak_bytes: Terms | Largest = Field(
        description="largest extra live bytes of a no-grad forward, beyond its input, weights and output"
    )
    backward_peak_bytes: Terms | Largest = Field(
        description="largest extra live bytes of backward beyond weights, saved tensors, output gradient, "
        "input gradient and weight gradients"
    )
    kernels: int = Field(description="kernels one forward call launches")
    kernels_per_position: float = Field(
        default=0.0, description="and these for each position of the sequence, where a recurrence loops over chunks"
    )
    sequence_multiple: int = Field(
        default=1, description="the terms hold for multiples of this sequence length; others cost as the next multiple"
    )
    misfit: float = Field(default=0.0, description="largest relative error of these terms at a shape not fitted")


class LayerKind(_Frozen):
    """A kind of decoder layer: layers of one kind have equal shapes and so equal costs."""

    name: str
    parameters: dict[str, tuple[int, ...]] = Field(description="parameter name inside the layer -> shape")
    traces: dict[str, LayerTrace] = Field(description="'<dtype>/<backend>' -> trace, for example 'bf16/flash'")

    @property
    def parameter_count(self) -> int:
        return sum(math.prod(shape) for shape in self.parameters.values())

    def trace(self, dtype: str, backend: str) -> LayerTrace:
        """The trace for a compute dtype and attention backend; KeyError names what there is."""
        key = f"{dtype}/{backend}"
        if key not in self.traces:
            raise KeyError(f"layer kind '{self.name}' has no trace for {key}; it has {', '.join(sorted(self.traces))}")
        return self.traces[key]


class ModelSpec(_Frozen):
    """A decoder-only language model as the planner sees it."""

    schema_version: Literal[1] = 1
    name: str
    config_digest: str = Field(description="digest of the Hugging Face configuration the spec was traced from")
    versions: dict[str, str] = Field(default_factory=dict, description="library versions of the trace")
    hidden_size: int
    vocab_size: int
    max_seq_len: int
    tied: bool = Field(description="embedding and LM head share one weight")
    kinds: dict[str, LayerKind]
    layers: tuple[str, ...] = Field(description="kind of each decoder layer, in order")
    final_norm_parameters: int = Field(description="elements of the norm before the LM head")

    @property
    def n_layers(self) -> int:
        return len(self.layers)

    def kind(self, layer: int) -> LayerKind:
        return self.kinds[self.layers[layer]]

    @property
    def vocabulary_parameters(self) -> int:
        """Elements of the embedding table (and, where untied, of the LM head)."""
        return self.vocab_size * self.hidden_size

    @property
    def parameter_count(self) -> int:
        """All parameters, a tied weight counted once."""
        body = sum(self.kind(i).parameter_count for i in range(self.n_layers))
        return body + self.vocabulary_parameters * (1 if self.tied else 2) + self.final_norm_parameters

    def digest(self) -> str:
        """Short digest of everything the planner reads (not of names and file digests); plans carry it."""
        data = self.model_dump_json(exclude={"name", "config_digest", "versions"})
        return hashlib.sha256(data.encode()).hexdigest()[:16]
