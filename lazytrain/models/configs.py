"""Hugging Face configurations as data: read, unwrapped from multimodal wrappers, checked. No torch."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from lazytrain.errors import ModelError

SUPPORTED = ("llama", "qwen2", "qwen3", "qwen3_5_text")
_SIZES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size",
    "max_position_embeddings",
)  # fmt: skip
_LINEAR_SIZES = (
    "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim",
    "linear_conv_kernel_dim",
)  # fmt: skip
_LAYER_TYPES = {"full_attention", "linear_attention"}
# What says nothing about shapes or numbers of the model.
_NOT_ARCHITECTURE = {
    "_name_or_path", "architectures", "auto_map", "bos_token_id", "dtype", "eos_token_id", "torch_dtype",
    "transformers_version", "use_cache",
}  # fmt: skip


def read_config(path: Path) -> dict[str, Any]:
    """The text configuration in a ``config.json`` or in a directory that has one, checked."""
    file = path / "config.json" if path.is_dir() else path
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path}: no config.json there") from None
    except json.JSONDecodeError as error:
        raise ModelError(f"{file}:{error.lineno}: not valid JSON: {error.msg}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{file}: cannot be read: {error}") from None
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
    if types is not None and len(types) != layers:
        raise ModelError(f"{where}: layer_types has {len(types)} entries for num_hidden_layers {layers}")
    other = sorted(set(types or ()) - _LAYER_TYPES)
    if config.get("use_sliding_window") or other:
        raise ModelError(f"{where}: {other[0] if other else 'sliding_attention'} layers are not supported")


def _positive(config: dict[str, Any], field: str, where: str) -> None:
    value = config.get(field)
    if value is None:
        raise ModelError(f"{where}: field '{field}' is missing")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"{where}: field '{field}' is {value!r}; a positive whole number is needed")


def config_digest(config: dict[str, Any]) -> str:
    """Short digest of the fields that decide shapes and numbers."""
    relevant = {key: value for key, value in config.items() if key not in _NOT_ARCHITECTURE}
    return hashlib.sha256(json.dumps(relevant, sort_keys=True).encode()).hexdigest()[:16]
