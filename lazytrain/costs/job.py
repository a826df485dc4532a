"""TrainingJob: what one optimizer step must compute, independent of how."""

from __future__ import annotations

import hashlib
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Dtype = Literal["fp32", "bf16"]


class TrainingJob(BaseModel):
    """One optimizer step is ``accumulation`` passes over ``batch_size`` sequences of ``seq_len`` tokens each.

    A pass runs each layer over its sequences in micro-batches; how many is a decision of the plan, not of the job.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    seq_len: int = Field(gt=0, le=2**22)
    batch_size: int = Field(gt=0, le=2**20, description="B: sequences a pass")
    accumulation: int = Field(default=1, gt=0, le=4096, description="A: passes a step")
    compute_dtype: Dtype = "bf16"
    stream_dtype: Dtype = Field(default="bf16", description="dtype in which weights cross the link")
    gradient_dtype: Dtype = Field(default="bf16", description="dtype of gradients parked in host memory")
    loss_chunk_tokens: int = Field(default=1024, gt=0, description="tokens whose logits exist at one time")
    max_norm: float | None = Field(default=1.0, gt=0, description="global gradient norm limit; None = no clipping")

    @model_validator(mode="after")
    def _streams_what_it_computes(self) -> TrainingJob:
        if self.stream_dtype != self.compute_dtype:
            raise ValueError(
                f"stream_dtype {self.stream_dtype} differs from compute_dtype {self.compute_dtype}: "
                "weights are used where they land, so both must be equal"
            )
        return self

    @property
    def tokens_per_step(self) -> int:
        return self.seq_len * self.batch_size * self.accumulation

    def digest(self) -> str:
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:16]


def default_job(device: str, seq_len: int, batch_size: int, accumulation: int = 1) -> TrainingJob:
    """The usual job on a device: bf16 throughout on a GPU, fp32 on a CPU (its bf16 products are ~200x slower)."""
    dtype: Dtype = "fp32" if device == "cpu" else "bf16"
    return TrainingJob(
        seq_len=seq_len,
        batch_size=batch_size,
        accumulation=accumulation,
        compute_dtype=dtype,
        stream_dtype=dtype,
        gradient_dtype=dtype,
    )
