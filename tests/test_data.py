"""Text files to batches."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import pytest
import torch

from lazytrain.errors import FileFormatError, InputError
from lazytrain.executor.data import IGNORE, ByteTokenizer, TokenData, load_data, load_tokenizer


def _write(path: Path, rows: list[object]) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return path


def _load(path: Path, seq_len: int = 16, vocab: int = 300) -> TokenData:
    return load_data(path, ByteTokenizer(vocab), seq_len, vocab)


def test_plain_text_predicts_every_token_once(tmp_path: Path) -> None:
    text = "".join(chr(97 + i % 26) for i in range(50))
    (tmp_path / "a.txt").write_text(text)
    data = _load(tmp_path / "a.txt", seq_len=8)
    predicted = []
    for i in range(data.rows):
        ids, labels = data.row(i)
        keep = labels != IGNORE
        predicted += labels[keep].tolist()
        assert torch.equal(labels[:-1][keep[1:]], ids[1:][keep[1:]])  # labels are the inputs shifted by one
    assert bytes(predicted[:-1]).decode() == text[1:]
    assert predicted[-1] == 256  # end of text
    assert data.rows == 7
    assert data.useful_fraction == pytest.approx(50 / 56)


@pytest.mark.parametrize("keys", [("prompt", "response"), ("query", "response")])
def test_pairs_learn_the_response_only(tmp_path: Path, keys: tuple[str, str]) -> None:
    path = _write(tmp_path / "a.jsonl", [{keys[0]: "12?", keys[1]: "ab", "type": "x"}])
    ids, labels = _load(path).row(0)
    assert ids.tolist() == [257, *b"12?\nab", *[258] * 9]
    assert labels.tolist() == [*[IGNORE] * 4, *b"ab", 256, *[IGNORE] * 9]


def test_truncated_rows_and_rows_without_room_for_a_response(tmp_path: Path) -> None:
    rows = [{"prompt": "p", "response": "r" * 50}, {"prompt": "p" * 50, "response": "r"}]
    data = _load(_write(tmp_path / "a.jsonl", rows))
    assert (data.rows, data.skipped) == (1, 1)
    ids, labels = data.row(0)
    assert ids.numel() == labels.numel() == 16
    assert int((labels != IGNORE).sum()) == 14
    with pytest.raises(FileFormatError, match="no row has a response"):
        _load(_write(tmp_path / "b.jsonl", rows[1:]))


def test_json_text_and_array(tmp_path: Path) -> None:
    data = _load(_write(tmp_path / "a.jsonl", [{"text": "ab"}, {"text": "cd"}]), seq_len=8)
    assert data.tokens.tolist() == [*b"ab", 256, *b"cd", 256]
    (tmp_path / "b.json").write_text(json.dumps([{"query": "q", "response": "r"}], indent=1))
    assert _load(tmp_path / "b.json").rows == 1


def test_batches_repeat_by_seed_and_cover_every_epoch(tmp_path: Path) -> None:
    path = _write(tmp_path / "a.jsonl", [{"prompt": "", "response": chr(97 + i)} for i in range(6)])
    data = _load(path, seq_len=4)

    def first(seed: int, n: int, start: int = 0) -> list[list[int]]:
        return [b.labels[..., 1].flatten().tolist() for b in islice(data.batches(2, 2, seed, start), n)]

    steps = first(3, 6)
    assert steps == first(3, 6)
    assert steps[2:] == first(3, 4, start=2)  # resume
    assert steps != first(4, 6)
    seen = [x for step in steps for x in step]
    for epoch in range(4):
        assert sorted(seen[6 * epoch : 6 * epoch + 6]) == list(range(97, 103))
    assert seen[:6] != seen[6:12]
    batch = next(data.batches(2, 2, 0))
    assert batch.input_ids.shape == batch.labels.shape == (2, 2, 4)
    assert batch.valid_tokens == int((batch.labels != IGNORE).sum()) == 8


@pytest.mark.parametrize(
    ("content", "line", "message"),
    [
        ('{"text": "a"}\n{"text": \n', 2, "not a JSON object"),
        ('{"text": "a"}\n\n[1]\n', 3, "not a JSON object"),
        ('{"body": "a"}\n', 1, "needs 'text'"),
        ('{"text": "a"}\n{"text": 3}\n', 2, "not a string"),
        ('{"prompt": "a", "response": "b"}\n{"prompt": "a"}\n', 2, "'response' is missing"),
        ('{"text": "a"}\n{"text": "a \\ud800"}\n', 2, "lone surrogate .ud800 at character 2"),
        ('{"text": "a"}\n' + "[" * 100_000 + "\n", 2, "nested too deep"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, content: str, line: int, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(content)
    with pytest.raises(FileFormatError, match=message) as caught:
        _load(path)
    assert caught.value.line == line
    assert f"a.jsonl:{line}" in str(caught.value)


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match="cannot be read"):
        _load(tmp_path / "none.txt")
    (tmp_path / "empty.jsonl").write_text("\n \n")
    with pytest.raises(FileFormatError, match="empty"):
        _load(tmp_path / "empty.jsonl")
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(FileFormatError, match="UTF-8"):
        _load(tmp_path / "binary.txt")
    (tmp_path / "list.json").write_text("[1, 2]")
    with pytest.raises(FileFormatError, match="list of JSON objects"):
        _load(tmp_path / "list.json")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    with pytest.raises(FileFormatError, match="nested too deep"):
        _load(tmp_path / "deep.json")


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    plain, marked = tmp_path / "plain.txt", tmp_path / "marked.txt"
    plain.write_text("abcdef")
    marked.write_text("abcdef", encoding="utf-8-sig")
    assert torch.equal(_load(plain).tokens, _load(marked).tokens)
    (tmp_path / "marked.jsonl").write_text('{"text": "abcdef"}\n', encoding="utf-8-sig")
    assert torch.equal(_load(plain).tokens, _load(tmp_path / "marked.jsonl").tokens)


def test_tokens_beyond_the_vocabulary_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abcz")
    with pytest.raises(InputError, match="beyond the model's vocabulary of 100"):
        _load(tmp_path / "a.txt", vocab=100)
    assert _load(tmp_path / "a.txt", vocab=123).pad_id == 0  # bytes fit, no room for special tokens


def test_hugging_face_tokenizer_directory(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<unk>": 0, "<eos>": 1, "a": 2, "b": 3}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="<eos>")
    fast.save_pretrained(tmp_path / "t")
    tokenizer = load_tokenizer(tmp_path / "t", 10)
    (tmp_path / "a.txt").write_text("a b a")
    data = load_data(tmp_path / "a.txt", tokenizer, 4, 10)
    assert data.tokens.tolist() == [2, 3, 2, 1]
    assert data.pad_id == 1
    with pytest.raises(InputError, match="not a directory"):
        load_tokenizer(tmp_path / "nothing", 10)
    (tmp_path / "broken").mkdir()
    with pytest.raises(InputError, match="cannot be loaded"):
        load_tokenizer(tmp_path / "broken", 10)
