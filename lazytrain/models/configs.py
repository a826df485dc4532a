"""Hugging Face configurations as data: read, unwrapped from multimodal wrappers, checked. No torch."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from lazytrain.errors import ModelError
from lazytrain.files import read_json

SUPPORTED = ("llama", "qwen2", "qwen3", "qwen3_5_text")
_SIZES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size",
    "max_position_embeddings",
)  # fmt: skip
_LINEAR_SIZES = (
    "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim",
    "linear_conv_kernel_dim",
)  # fmt: skip
_LARGEST = {"num_hidden_layers": 4096}  # beyond it something is wrong, and lists of layers fill the memory
_LAYER_TYPES = {"full_attention", "linear_attention"}
# What says nothing about shapes or numbers of the model.
_NOT_ARCHITECTURE = {
    "_name_or_path", "architectures", "auto_map", "bos_token_id", "dtype", "eos_token_id", "torch_dtype",
    "transformers_version", "use_cache",
}  # fmt: skip


def read_config(path: Path) -> dict[str, Any]:
    """The text configuration in a ``config.json`` or in a directory that has one, checked."""
    file = path / "config.json" if path.is_dir() else path
    if not file.exists():
        raise ModelError(f"{path}: no config.json there")
    data = read_json(file, "a model configuration")
    if not isinstance(data, dict):
        raise ModelError(f"{file}: a model configuration is a JSON object, this is a {type(data).__name__}")
    return checked(text_config(data), str(file))


def text_config(data: dict[str, Any]) -> dict[str, Any]:
    """The language model's part of a configuration: itself, or ``text_config`` of a multimodal wrapper."""
    inner = data.get("text_config")
    if not isinstance(inner, dict):
        return dict(data)
    inherited = {key: data[key] for key in ("tie_word_embeddings", "quantization_config") if key in data}
    return {**inherited, **inner}


def checked(config: dict[str, Any], where: str) -> dict[str, Any]:
    """``config`` itself; ModelError where LazyTrain cannot run it. ``where`` starts the message."""
    family = config.get("model_type")
    if family is None:
        raise ModelError(f"{where}: field 'model_type' is missing")
    if family not in SUPPORTED:
        classes = config.get("architectures") or [family]
        raise ModelError(
            f"{where}: architecture '{classes[0]}' (model_type '{family}') is not supported; "
            f"supported model types: {', '.join(SUPPORTED)}"
        )
    for field in _SIZES + (_LINEAR_SIZES if family == "qwen3_5_text" else ()):
        _positive(config, field, where)
    for field in ("num_key_value_heads", "head_dim"):
        if config.get(field) is not None:
            _positive(config, field, where)
    for field in ("rope_scaling", "rope_parameters"):
        if not isinstance(config.get(field) or {}, dict):
            raise ModelError(f"{where}: field '{field}' is {config[field]!r}; an object is needed")
    if config.get("quantization_config"):
        raise ModelError(f"{where}: the weights are quantized ('quantization_config'); training needs full weights")
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    if heads % kv_heads:
        raise ModelError(f"{where}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    if not config.get("head_dim") and config["hidden_size"] % heads:
        raise ModelError(f"{where}: hidden_size {config['hidden_size']} is not a multiple of {heads} heads")
    _check_layers(config, where)
    return config


def _check_layers(config: dict[str, Any], where: str) -> None:
    types, layers = config.get("layer_types"), config["num_hidden_layers"]
    if types is not None and not (isinstance(types, list) and all(isinstance(t, str) for t in types)):
        raise ModelError(f"{where}: field 'layer_types' is not a list of names")
    if types is not None and len(types) != layers:
        raise ModelError(f"{where}: layer_types has {len(types)} entries for num_hidden_layers {layers}")
    other = sorted(set(types or ()) - _LAYER_TYPES)
    if config.get("use_sliding_window") or other:
        raise ModelError(f"{where}: {other[0] if other else 'sliding_attention'} layers are not supported")


def _positive(config: dict[str, Any], field: str, where: str) -> None:
    value = config.get(field)
    if value is None:
        raise ModelError(f"{where}: field '{field}' is missing")
    largest = _LARGEST.get(field, 2**31)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= largest:
        raise ModelError(f"{where}: field '{field}' is {value!r}; a whole number from 1 to {largest} is needed")


def config_digest(config: dict[str, Any]) -> str:
    """Short digest of the fields that decide shapes and numbers."""
    relevant = {key: value for key, value in config.items() if key not in _NOT_ARCHITECTURE}
    return hashlib.sha256(json.dumps(relevant, sort_keys=True).encode()).hexdigest()[:16]
