"""The one place that knows how to build and run a Hugging Face decoder piece by piece.

``embed`` -> ``run_block`` of every layer -> ``run_head`` computes what the full model computes, bit for bit, for
right-padded batches: there causal attention needs no mask. Works on CPU, CUDA and under ``FakeTensorMode``.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig

from lazytrain.errors import ModelError
from lazytrain.models.configs import checked, text_config
from lazytrain.models.initial import FreshState

# model_type -> (module of transformers.models, prefix of its classes, prefix of its configuration and rotary classes)
_CLASSES = {
    "llama": ("llama", "Llama", "Llama"),
    "qwen2": ("qwen2", "Qwen2", "Qwen2"),
    "qwen3": ("qwen3", "Qwen3", "Qwen3"),
    "qwen3_5_text": ("qwen3_5", "Qwen3_5", "Qwen3_5Text"),
}


@dataclass(frozen=True)
class Context:
    """What every layer call of a (sequence length, dtype, device) shares; read only, holds for any batch size."""

    cos: Tensor  # [1, seq_len, rotary_dim]
    sin: Tensor  # [1, seq_len, rotary_dim]
    position_ids: Tensor  # [1, seq_len]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Constants of the step: where autograd saves one, nothing is kept per layer."""
        return self.cos, self.sin, self.position_ids


class Architecture:
    """A dense decoder-only architecture. Raises ModelError for others, naming them."""

    def __init__(self, config: Mapping[str, Any] | PretrainedConfig):
        data = config.to_dict() if isinstance(config, PretrainedConfig) else dict(config)
        data = checked(text_config(data), "model configuration")
        self.source: dict[str, Any] = copy.deepcopy(data)  # as given, to be written beside weights
        module, prefix, config_prefix = _CLASSES[data["model_type"]]
        self._modeling = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
        self._prefix, self._config_prefix = prefix, config_prefix
        configuration = importlib.import_module(f"transformers.models.{module}.configuration_{module}")
        try:
            self.config: PretrainedConfig = getattr(configuration, f"{config_prefix}Config")(**copy.deepcopy(data))
        except Exception as error:  # transformers raises many kinds here
            raise ModelError(f"model configuration: {' '.join(str(error).split())}") from error
        self.config._attn_implementation = "sdpa"
        self.config.attention_dropout = 0.0
        self.config.use_cache = False
        self.n_layers: int = self.config.num_hidden_layers
        self.hidden_size: int = self.config.hidden_size
        self.vocab_size: int = self.config.vocab_size
        self.max_seq_len: int = self.config.max_position_embeddings
        self.tied = bool(self.config.tie_word_embeddings)

    # --- layers -----------------------------------------------------------------------------------------------------
    def kind_of(self, layer: int) -> str:
        """``full_attention`` or ``linear_attention``. Layers of one kind have equal shapes."""
        types = getattr(self.config, "layer_types", None)
        return str(types[layer]) if types else "full_attention"

    def build_block(self, layer: int, dtype: torch.dtype, device: torch.device | str) -> nn.Module:
        """The decoder layer with uninitialised parameters. Dropout is off; the module has no buffers."""
        with torch.device("meta"):
            block: nn.Module = self._class("DecoderLayer")(self.config, layer)
        return _materialise(block, dtype, device)

    def run_block(self, block: nn.Module, hidden: Tensor, context: Context) -> Tensor:
        """One layer: [batch, seq_len, hidden_size] -> the same shape."""
        output: Tensor = block(
            hidden,
            attention_mask=None,
            position_ids=context.position_ids,
            position_embeddings=(context.cos, context.sin),
        )
        return output

    def build_rotary(self, device: torch.device | str) -> nn.Module:
        """The module that makes position embeddings; its frequencies are computed on the CPU, as transformers does."""
        name = f"{self._config_prefix}RotaryEmbedding"
        with torch.device("cpu"):
            rotary: nn.Module = getattr(self._modeling, name)(config=self.config)
        return rotary.to(device)

    def context(self, batch: int, seq_len: int, device: torch.device | str, dtype: torch.dtype) -> Context:
        """Position embeddings of positions 0..seq_len-1. Compute once a shape; all ``batch`` rows share it."""
        with torch.no_grad():
            positions = torch.arange(seq_len, device=device).unsqueeze(0)
            cos, sin = self.build_rotary(device)(torch.empty(0, dtype=dtype, device=device), positions)
        return Context(cos, sin, positions)

    # --- both ends ----------------------------------------------------------------------------------------------------
    @property
    def padding_id(self) -> int | None:
        """Row of the embedding that gets no gradient from lookups: ``pad_token_id``, where there is one."""
        return self.config.pad_token_id

    def embed(self, input_ids: Tensor, table: Tensor) -> Tensor:
        """[batch, seq_len] token ids and the [vocab_size, hidden_size] table -> [batch, seq_len, hidden_size]."""
        return F.embedding(input_ids, table, self.padding_id)

    def build_embedding(self, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> nn.Module:
        """The embedding table, uninitialised: ``weight`` [vocab_size, hidden_size]."""
        with torch.device("meta"):
            embedding = nn.Embedding(self.vocab_size, self.hidden_size, self.padding_id)
        return _materialise(embedding, dtype, device)

    def build_head(self, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> nn.Module:
        """The LM head, uninitialised: ``weight`` [vocab_size, hidden_size], no bias."""
        with torch.device("meta"):
            head = nn.Linear(self.hidden_size, self.vocab_size, bias=False)
        return _materialise(head, dtype, device)

    def build_final_norm(self, dtype: torch.dtype, device: torch.device | str) -> nn.Module:
        """The norm before the LM head, its weight uninitialised."""
        with torch.device("meta"):
            norm: nn.Module = self._class("RMSNorm")(self.hidden_size, eps=self.config.rms_norm_eps)
        return _materialise(norm, dtype, device)

    def run_head(self, norm: nn.Module, weight: Tensor, hidden: Tensor) -> Tensor:
        """Logits: final norm, then [..., hidden_size] times the [vocab_size, hidden_size] weight, no bias."""
        return F.linear(norm(hidden), weight)

    # --- names --------------------------------------------------------------------------------------------------------
    embedding_name = "model.embed_tokens.weight"
    head_name = "lm_head.weight"

    def parameter_shapes(self, layer: int) -> dict[str, tuple[int, ...]]:
        """Name inside the layer -> shape, in the module's order."""
        return dict(self._shapes_of_kind[self.kind_of(layer)])

    @cached_property
    def _shapes_of_kind(self) -> dict[str, dict[str, tuple[int, ...]]]:
        first = {self.kind_of(i): i for i in reversed(range(self.n_layers))}
        return {
            kind: {name: tuple(p.shape) for name, p in self.build_block(i, torch.float32, "meta").named_parameters()}
            for kind, i in first.items()
        }

    def parameter_names(self, layer: int) -> dict[str, str]:
        """Name inside the layer -> name in the full model's state dict."""
        return {name: f"model.layers.{layer}.{name}" for name in self.parameter_shapes(layer)}

    def norm_parameter_names(self) -> dict[str, str]:
        """Name inside the final norm -> name in the full model's state dict."""
        return {"weight": "model.norm.weight"}

    def state_names(self) -> list[str]:
        """All names of the full model's state dict, in order; a tied LM head has none of its own."""
        layers = [name for i in range(self.n_layers) for name in self.parameter_names(i).values()]
        head = [] if self.tied else [self.head_name]
        return [self.embedding_name, *layers, *self.norm_parameter_names().values(), *head]

    # --- whole models -------------------------------------------------------------------------------------------------
    def build_reference_model(self, dtype: torch.dtype) -> nn.Module:
        """The full transformers model (``...ForCausalLM``, sdpa attention, on the CPU), freshly initialised."""
        model: nn.Module = self._class("ForCausalLM")._from_config(copy.deepcopy(self.config), dtype=dtype)
        return model

    def init_state(self, seed: int) -> FreshState:
        """All weights by state-dict name, fp32, with transformers' own initialisation, made one layer at a time."""
        return FreshState(self, seed)

    @property
    def pretrained_class(self) -> Any:
        """The family's ``...PreTrainedModel``: it knows how weights are initialised."""
        return self._class("PreTrainedModel")

    def _class(self, name: str) -> Any:
        return getattr(self._modeling, self._prefix + name)


def checkpoint_names(name: str) -> tuple[str, ...]:
    """Names under which checkpoints hold a parameter: as in the text model, or as inside multimodal wrappers."""
    inner = name.removeprefix("model.")
    if inner == name:
        return name, f"language_model.{name}"
    return name, f"model.language_model.{inner}", f"language_model.model.{inner}"


def _materialise(module: nn.Module, dtype: torch.dtype, device: torch.device | str) -> nn.Module:
    """Gives a module built on ``meta`` uninitialised parameters of a dtype on a device (fake ones in a fake mode)."""
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                fresh = torch.empty(parameter.shape, dtype=dtype, device=device)
                part._parameters[name] = nn.Parameter(fresh)
    return module
