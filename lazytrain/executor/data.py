"""Training text to batches: JSONL or plain text, one tokenizer, deterministic order."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from lazytrain.errors import FileFormatError, InputError
from lazytrain.files import read_json

IGNORE = -100  # label of a position without loss, as in PyTorch's cross entropy
_PAIRS = (("prompt", "response"), ("query", "response"))


@dataclass(frozen=True)
class StepBatch:
    """One optimizer step of data. ``labels[.., i]`` is the token after ``input_ids[.., i]``, or IGNORE."""

    input_ids: Tensor  # int64 [A, B, S]
    labels: Tensor  # int64 [A, B, S]
    valid_tokens: int

    @classmethod
    def of(cls, input_ids: Tensor, labels: Tensor) -> StepBatch:
        return cls(input_ids, labels, int((labels != IGNORE).sum()))


# --- tokenizers ------------------------------------------------------------------------------------------------------
class Tokenizer(Protocol):
    name: str
    eos_id: int | None
    bos_id: int | None
    pad_id: int

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Token ids of each text, without special tokens."""


class ByteTokenizer:
    """UTF-8 bytes as ids 0-255; end, begin and padding take the next ids, as far as the vocabulary goes."""

    name = "bytes"

    def __init__(self, vocab_size: int):
        special = list(range(256, min(vocab_size, 259)))
        self.eos_id = special[0] if special else None
        self.bos_id = special[1] if len(special) > 1 else None
        self.pad_id = special[2] if len(special) > 2 else 0

    def encode(self, texts: list[str]) -> list[list[int]]:
        return [list(text.encode()) for text in texts]


class HuggingFaceTokenizer:
    """A tokenizer directory on this machine; nothing is downloaded."""

    def __init__(self, path: Path):
        from transformers import AutoTokenizer

        if not path.is_dir():
            raise InputError(f"tokenizer {path}: not a directory")
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
        except Exception as error:  # transformers raises many kinds here
            reason = " ".join(str(error).split()) or type(error).__name__
            raise InputError(f"tokenizer {path}: cannot be loaded: {reason}") from error
        self.name = str(path)
        self.eos_id, self.bos_id = self._tokenizer.eos_token_id, self._tokenizer.bos_token_id
        pad = self._tokenizer.pad_token_id
        self.pad_id = pad if pad is not None else (self.eos_id or 0)

    def encode(self, texts: list[str]) -> list[list[int]]:
        return self._tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else []


def load_tokenizer(path: Path | str | None, vocab_size: int) -> Tokenizer:
    """The tokenizer in a directory, or bytes where ``path`` is None."""
    return ByteTokenizer(vocab_size) if path is None else HuggingFaceTokenizer(Path(path))


# --- data set --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class TokenData:
    """Rows of up to S + 1 tokens, as slices of one flat tensor; the first ``masked`` labels of a row have no loss."""

    tokens: Tensor  # int32 [total]
    starts: Tensor  # int64 [rows]
    lengths: Tensor  # int64 [rows], 2 .. S + 1
    masked: Tensor  # int64 [rows]
    seq_len: int
    pad_id: int
    skipped: int = 0  # rows without any token to learn from within the sequence length

    @property
    def rows(self) -> int:
        return self.starts.numel()

    @property
    def useful_fraction(self) -> float:
        """Share of the positions of a batch that carry loss."""
        return float((self.lengths - 1 - self.masked).sum()) / (self.rows * self.seq_len)

    def row(self, index: int) -> tuple[Tensor, Tensor]:
        """(input_ids, labels), int64 [S] each, padded on the right."""
        start, length = int(self.starts[index]), int(self.lengths[index])
        ids = self.tokens[start : start + length].long()
        input_ids = torch.full((self.seq_len,), self.pad_id, dtype=torch.int64)
        labels = torch.full((self.seq_len,), IGNORE, dtype=torch.int64)
        input_ids[: length - 1] = ids[:-1]
        masked = int(self.masked[index])
        labels[masked : length - 1] = ids[1 + masked :]
        return input_ids, labels

    def batches(self, batch_size: int, accumulation: int, seed: int, start_step: int = 0) -> Iterator[StepBatch]:
        """Endless steps of A x B rows: each epoch is one permutation of all rows, drawn from (seed, epoch)."""
        need = batch_size * accumulation
        position = start_step * need
        epoch, order = -1, torch.empty(0, dtype=torch.int64)
        while True:
            rows = []
            for i in range(position, position + need):
                if i // self.rows != epoch:
                    epoch = i // self.rows
                    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
                    order = torch.randperm(self.rows, generator=generator)
                rows.append(self.row(int(order[i % self.rows])))
            position += need
            shape = (accumulation, batch_size, self.seq_len)
            yield StepBatch.of(
                torch.stack([r[0] for r in rows]).view(shape), torch.stack([r[1] for r in rows]).view(shape)
            )


def load_data(path: Path | str, tokenizer: Tokenizer, seq_len: int, vocab_size: int) -> TokenData:
    """Reads training text.

    ``.jsonl`` / ``.json``: objects with ``text``, or ``prompt`` and ``response``, or ``query`` and ``response``; any
    other file is plain text. Texts are joined (end token between them) and cut into windows of ``seq_len`` predictions;
    pairs are one row each, with loss on the response only. FileFormatError names file and line.
    """
    path = Path(path)
    try:
        raw = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise FileFormatError(path, f"cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise FileFormatError(path, f"not UTF-8 text (byte {error.start})") from error
    if not raw.strip():
        raise FileFormatError(path, "empty")
    if path.suffix.lower() not in (".jsonl", ".json"):
        data = _windows(path, [raw], tokenizer, seq_len)
    else:
        records = _array(path) if raw.lstrip()[0] == "[" else _lines(path, raw)
        keys = _keys(path, *records[0])
        texts = [[_text(path, record, line, key) for key in keys] for record, line in records]
        if len(keys) == 1:
            data = _windows(path, [t[0] for t in texts], tokenizer, seq_len)
        else:
            data = _pairs(path, texts, tokenizer, seq_len)
    top = int(data.tokens.max())
    if max(top, data.pad_id) >= vocab_size:
        raise InputError(
            f"{path}: token id {max(top, data.pad_id)} of tokenizer '{tokenizer.name}' is beyond the model's "
            f"vocabulary of {vocab_size}; use the model's own tokenizer"
        )
    return data


Record = tuple[dict[str, object], int | None]


def _lines(path: Path, raw: str) -> list[Record]:
    records: list[Record] = []
    for number, line in enumerate(raw.split("\n"), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise FileFormatError(path, f"not a JSON object: {error.msg} (column {error.colno})", number) from error
        except RecursionError as error:
            raise FileFormatError(path, "nested too deep", number) from error
        if not isinstance(record, dict):
            raise FileFormatError(path, "not a JSON object", number)
        records.append((record, number))
    return records


def _array(path: Path) -> list[Record]:
    items = read_json(path, "a list of JSON objects")
    if not items or not all(isinstance(item, dict) for item in items):
        raise FileFormatError(path, "not a list of JSON objects, or empty")
    return [(item, None) for item in items]


def _keys(path: Path, record: dict[str, object], line: int | None) -> tuple[str, ...]:
    for keys in (*_PAIRS, ("text",)):
        if all(key in record for key in keys):
            return keys
    raise FileFormatError(path, "needs 'text', or 'prompt' and 'response', or 'query' and 'response'", line)


def _text(path: Path, record: dict[str, object], line: int | None, key: str) -> str:
    value = record.get(key)
    if not isinstance(value, str):
        raise FileFormatError(path, f"'{key}' is {'missing' if value is None else 'not a string'}", line)
    try:
        value.encode()
    except UnicodeEncodeError as error:  # half of a pair, written as an escape: no tokenizer takes it
        found = f"the lone surrogate \\u{ord(value[error.start]):04x} at character {error.start}"
        raise FileFormatError(path, f"'{key}' has {found}", line) from error
    return value


def _windows(path: Path, texts: list[str], tokenizer: Tokenizer, seq_len: int) -> TokenData:
    end = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
    flat = [token for ids in tokenizer.encode(texts) for token in (*ids, *end)]
    if len(flat) < 2:
        raise FileFormatError(path, f"{len(flat)} tokens: nothing to predict")
    starts = torch.arange(0, len(flat) - 1, seq_len)
    lengths = torch.clamp(len(flat) - starts, max=seq_len + 1)
    return TokenData(
        torch.tensor(flat, dtype=torch.int32), starts, lengths, torch.zeros_like(starts), seq_len, tokenizer.pad_id
    )


def _pairs(path: Path, texts: list[list[str]], tokenizer: Tokenizer, seq_len: int) -> TokenData:
    prompts = tokenizer.encode([prompt + "\n" for prompt, _ in texts])
    responses = tokenizer.encode([response for _, response in texts])
    begin = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    end = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
    flat: list[int] = []
    starts, lengths, masked = [], [], []
    for prompt, response in zip(prompts, responses, strict=True):
        ids = [*begin, *prompt, *response, *end][: seq_len + 1]
        unlearned = len(begin) + len(prompt) - 1  # labels that are prompt tokens
        if len(ids) - 1 <= unlearned or len(ids) < 2:
            continue
        starts.append(len(flat))
        lengths.append(len(ids))
        masked.append(max(unlearned, 0))
        flat.extend(ids)
    if not starts:
        raise FileFormatError(path, f"no row has a response token within {seq_len} tokens")
    return TokenData(
        torch.tensor(flat, dtype=torch.int32),
        torch.tensor(starts),
        torch.tensor(lengths),
        torch.tensor(masked),
        seq_len,
        tokenizer.pad_id,
        skipped=len(texts) - len(starts),
    )
