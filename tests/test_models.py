"""The catalogue, configurations and the pieces of an architecture against transformers' own model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lazytrain.errors import FileFormatError, ModelError
from lazytrain.models import list_models, load_config, load_model
from lazytrain.models.architecture import Architecture, checkpoint_names
from lazytrain.models.configs import config_digest

# Billions of parameters (the models' cards).
TOTALS = {
    "qwen2.5-0.5b": 0.49, "qwen2.5-1.5b": 1.54, "qwen2.5-3b": 3.09, "qwen2.5-7b": 7.62, "qwen2.5-14b": 14.77,
    "qwen2.5-32b": 32.76, "qwen2.5-72b": 72.71, "qwen3-0.6b": 0.60, "qwen3-1.7b": 1.72, "qwen3-4b": 4.02,
    "qwen3-8b": 8.19, "qwen3-14b": 14.77, "qwen3-32b": 32.76, "llama-2-7b": 6.74, "llama-3.1-8b": 8.03,
    "llama-3.2-1b": 1.24, "llama-3.2-3b": 3.21, "qwen3.5-27b": 26.90, "qwen3.6-27b": 26.90,
}  # fmt: skip

TINY_LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 320, "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": True, "pad_token_id": 3,
    "attention_bias": True, "mlp_bias": True,
    "rope_scaling": {
        "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
}  # fmt: skip


# --- catalogue -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", sorted(TOTALS))
def test_totals(name: str) -> None:
    assert load_model(name).parameter_count / 1e9 == pytest.approx(TOTALS[name], abs=0.0051)


def test_layer_kinds_of_the_hybrid() -> None:
    spec = load_model("qwen3.6-27b")
    assert spec.parameter_count == 26_895_998_464
    assert spec.kinds["linear_attention"].parameter_count == 383_273_184
    assert spec.kinds["full_attention"].parameter_count == 372_255_232
    assert spec.layers.count("full_attention") == 16
    assert load_model("qwen2.5-7b").parameter_count == 7_615_616_512


def test_every_model_has_a_current_trace() -> None:
    for name in list_models():
        spec = load_model(name)
        assert spec.name == name
        assert spec.config_digest == config_digest(load_config(name)), f"{name}: run lazytrain.models.regenerate"
        assert spec.n_layers == load_config(name)["num_hidden_layers"]


def test_tied_weights_count_once() -> None:
    spec = load_model("tiny-qwen3")
    body = sum(spec.kind(i).parameter_count for i in range(spec.n_layers)) + spec.final_norm_parameters
    assert spec.parameter_count == body + spec.vocab_size * spec.hidden_size
    assert spec.tied
    assert not load_model("tiny-qwen2").tied


def test_no_torch_until_a_trace_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAZYTRAIN_CACHE", str(tmp_path / "cache"))
    local = tmp_path / "mine"
    local.mkdir()
    (local / "config.json").write_text(json.dumps(load_config("tiny-qwen2")))
    with monkeypatch.context() as patch:
        patch.setattr("lazytrain.models.trace.trace_model", lambda name, config: load_model("tiny-qwen2"))
        traced = load_model(local)
    traced = load_model(local)
    assert traced.name == "mine"
    code = (
        "import sys; from lazytrain.models import list_models, load_model\n"
        f"specs = [load_model(list_models()[0]), load_model({str(local)!r})]\n"
        "print(specs[1].digest(), {'torch', 'transformers', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"{traced.digest()} set()"


def test_damaged_cache_entries_are_traced_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAZYTRAIN_CACHE", str(tmp_path / "cache"))
    shipped = load_model("tiny-qwen2")
    calls = []

    def trace(name: str, config: dict[str, Any]) -> Any:
        calls.append(name)
        return shipped.model_copy(update={"name": name})

    monkeypatch.setattr("lazytrain.models.trace.trace_model", trace)
    file = tmp_path / "other.json"
    file.write_text(json.dumps(load_config("tiny-qwen2")))
    assert load_model(file).name == "other"
    load_model(file)
    (entry,) = (tmp_path / "cache" / "traces").iterdir()
    entry.write_text(entry.read_text()[:100])
    assert load_model(file).digest() == shipped.model_copy(update={"name": "other"}).digest()
    assert calls == ["other", "other"]
    assert [entry.suffix for entry in (tmp_path / "cache" / "traces").iterdir()] == [".json"]


def test_an_unwritable_cache_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").write_text("a file where a directory should be")
    monkeypatch.setenv("LAZYTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("lazytrain.models.trace.trace_model", lambda name, config: load_model("tiny-qwen2"))
    file = tmp_path / "config.json"
    file.write_text(json.dumps(load_config("tiny-qwen2")))
    assert load_model(file).n_layers == 4


# --- configurations --------------------------------------------------------------------------------------------------
def test_unknown_model_names_close_ones() -> None:
    with pytest.raises(ModelError, match=r"no model 'qwen2\.5-7'.*did you mean qwen2\.5-7b"):
        load_model("qwen2.5-7")
    with pytest.raises(ModelError, match="known: demo-qwen3, llama"):
        load_model("zzz")


def test_names_ignore_case() -> None:
    assert load_model("Qwen2.5-7B").name == "qwen2.5-7b"


def write(tmp_path: Path, **changes: Any) -> Path:
    config = {**load_config("tiny-qwen2"), **changes}
    file = tmp_path / "config.json"
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return file


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": None}, "'model_type' is missing"),
        ({"hidden_size": None}, "'hidden_size' is missing"),
        ({"vocab_size": "many"}, "'vocab_size' is 'many'"),
        ({"num_hidden_layers": 0}, "'num_hidden_layers' is 0"),
        ({"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]}, "'MixtralForCausalLM' .*not supported"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple"),
        ({"hidden_size": 66}, "hidden_size 66 is not a multiple of 4 heads"),
        ({"use_sliding_window": True}, "sliding_attention layers are not supported"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries"),
        ({"layer_types": 5}, "'layer_types' is not a list"),
        ({"layer_types": [["full_attention"]] * 4}, "'layer_types' is not a list"),
        ({"num_key_value_heads": -2}, "'num_key_value_heads' is -2"),
        ({"num_key_value_heads": "2"}, "'num_key_value_heads' is '2'"),
        ({"head_dim": 0}, "'head_dim' is 0"),
        ({"num_hidden_layers": 10**9}, "'num_hidden_layers' is 1000000000"),
        ({"rope_scaling": "yarn"}, "'rope_scaling' is 'yarn'"),
        ({"quantization_config": {"bits": 4}}, "quantized"),
    ],
)
def test_bad_configurations(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    file = write(tmp_path, **changes)
    with pytest.raises(ModelError, match=message) as caught:
        load_config(file)
    assert "\n" not in str(caught.value)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize("changes", [{"hidden_act": "no-such"}, {"rope_parameters": {"rope_type": "no-such"}}])
def test_what_no_layer_can_be_built_from_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    monkeypatch.setenv("LAZYTRAIN_CACHE", str(tmp_path / "cache"))
    file = write(tmp_path, **changes)
    with pytest.raises(ModelError, match="no-such") as caught:
        load_model(file)
    assert "\n" not in str(caught.value)
    assert str(file) in str(caught.value)


def test_malformed_json_names_the_line(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text('{\n "hidden_size": 64,\n oops\n}')
    with pytest.raises(FileFormatError, match=r"config\.json:3: not a model configuration"):
        load_config(tmp_path)
    file.write_text("[1]")
    with pytest.raises(ModelError, match="a JSON object"):
        load_config(tmp_path)
    file.unlink()
    with pytest.raises(ModelError, match=r"no config\.json"):
        load_config(tmp_path)


def test_transformers_own_complaints_are_one_line() -> None:
    with pytest.raises(ModelError) as caught:
        Architecture({**TINY_LLAMA, "rms_norm_eps": "small"})
    assert "\n" not in str(caught.value)


def test_multimodal_wrappers_are_unwrapped(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    inner = load_config("tiny-qwen35")
    del inner["tie_word_embeddings"]
    file.write_text(json.dumps({"model_type": "qwen3_5", "text_config": inner, "tie_word_embeddings": True}))
    assert load_config(file) == {**inner, "tie_word_embeddings": True}


# --- architecture ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", ["tiny-qwen2", "tiny-qwen3", "tiny-qwen35", "llama"])
def test_pieces_equal_the_whole_model(name: str, dtype: torch.dtype) -> None:
    architecture = Architecture(TINY_LLAMA if name == "llama" else load_config(name))
    reference = architecture.build_reference_model(dtype)
    state = dict(architecture.init_state(5))
    assert architecture.state_names() == list(state)
    own_head = {} if not architecture.tied else {architecture.head_name: state[architecture.embedding_name]}
    reference.load_state_dict({**state, **own_head}, strict=True)

    seq_len = 70  # not a multiple of the recurrence's chunk
    ids = torch.randint(0, architecture.vocab_size, (2, seq_len), generator=torch.Generator().manual_seed(1))
    ids[0, 60:] = 3
    table = state[architecture.embedding_name].to(dtype).requires_grad_()
    head = table if architecture.tied else state[architecture.head_name].to(dtype).requires_grad_()
    context = architecture.context(2, seq_len, "cpu", dtype)
    hidden = architecture.embed(ids, table)
    gradients = {architecture.embedding_name: table, architecture.head_name: head}
    for layer in range(architecture.n_layers):
        block = architecture.build_block(layer, dtype, "cpu")
        names = architecture.parameter_names(layer)
        block.load_state_dict({local: state[full] for local, full in names.items()})
        gradients.update({names[local]: parameter for local, parameter in block.named_parameters()})
        hidden = architecture.run_block(block, hidden, context)
    norm = architecture.build_final_norm(dtype, "cpu")
    norm.load_state_dict({local: state[full] for local, full in architecture.norm_parameter_names().items()})
    gradients["model.norm.weight"] = norm.weight
    logits = architecture.run_head(norm, head, hidden)

    expected = reference(ids).logits
    assert torch.equal(logits, expected)
    direction = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2)).to(dtype)
    logits.backward(direction)
    expected.backward(direction)
    for full, parameter in reference.named_parameters():
        assert torch.equal(gradients[full].grad, parameter.grad), full


def test_initial_state_is_reproducible_and_lazy() -> None:
    architecture = Architecture(load_config("tiny-qwen35"))
    before = torch.get_rng_state()
    first, second = architecture.init_state(0), architecture.init_state(0)
    name = "model.layers.2.mlp.up_proj.weight"
    assert torch.equal(first[name], dict(second)[name])  # alone, and after all others
    assert not torch.equal(first[name], architecture.init_state(1)[name])
    assert torch.equal(torch.get_rng_state(), before)
    names = list(first)
    for key in names:
        assert first.pop(key).dtype == torch.float32
    assert not first
    assert first.pop(name, None) is None


def test_initial_state_follows_transformers_rules() -> None:
    architecture = Architecture({**TINY_LLAMA, "vocab_size": 4000, "initializer_range": 0.05})
    state = architecture.init_state(0)
    table = state["model.embed_tokens.weight"]
    assert table[3].abs().max() == 0  # padding
    assert table.std().item() == pytest.approx(0.05, rel=0.02)
    assert state["model.layers.0.self_attn.q_proj.weight"].std().item() == pytest.approx(0.05, rel=0.05)
    assert state["model.layers.0.self_attn.q_proj.bias"].abs().max() == 0
    assert torch.equal(state["model.norm.weight"], torch.ones(64))
    hybrid = Architecture(load_config("tiny-qwen35")).init_state(0)
    decay = hybrid["model.layers.0.linear_attn.A_log"].exp()
    assert (decay >= 0.01).all()
    assert (decay <= 16).all()
    assert hybrid["model.norm.weight"].abs().max() == 0  # that norm adds one


def test_blocks_are_fake_in_a_fake_mode() -> None:
    architecture = Architecture(load_config("qwen2.5-72b"))
    with FakeTensorMode():
        block = architecture.build_block(0, torch.bfloat16, "cpu")
        context = architecture.context(1, 4096, "cpu", torch.bfloat16)
        y = architecture.run_block(block, torch.empty(1, 4096, 8192, dtype=torch.bfloat16), context)
    assert y.shape == (1, 4096, 8192)
    assert y.device.type == "cpu"


def test_unsupported_architectures_are_named() -> None:
    with pytest.raises(ModelError, match="qwen3_moe"):
        Architecture({**TINY_LLAMA, "model_type": "qwen3_moe"})


def test_checkpoint_names() -> None:
    assert "model.language_model.layers.0.mlp.up_proj.weight" in checkpoint_names("model.layers.0.mlp.up_proj.weight")
    assert checkpoint_names("lm_head.weight") == ("lm_head.weight", "language_model.lm_head.weight")
