"""From measurements at a few shapes to terms in tokens and sequence length."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lazytrain.models.spec import Largest, Terms

Shape = tuple[int, int]  # batch, seq_len
# Shapes at which two peaks are compared: one sequence to many, short to long.
_GRID = [(batch, seq) for batch in (1, 2, 8, 64) for seq in (64, 256, 1024, 4096, 16384, 131072)]
_NEARLY = 1e-3


class Basis:
    """The functions of a shape that a quantity is a sum of, and the terms they stand for.

    What a call has once whatever its batch has no term of its own: ``positions`` (seq_len: the position embeddings
    read) and ``mask`` (seq_len squared) are counted as if for one sequence a call, the most they can be.
    """

    COLUMNS = {  # noqa: RUF012
        "fixed": lambda batch, seq: 1.0,
        "per_token": lambda batch, seq: float(batch * seq),
        "per_token_seq": lambda batch, seq: float(batch * seq * seq),
        "per_sequence": lambda batch, seq: float(batch),
        "positions": lambda batch, seq: float(seq),
        "mask": lambda batch, seq: float(seq * seq),
    }

    def __init__(self, *names: str):
        self.names = names

    def matrix(self, shapes: Sequence[Shape]) -> np.ndarray:
        return np.array([[self.COLUMNS[name](*shape) for name in self.names] for shape in shapes])

    def solve(self, shapes: Sequence[Shape], values: np.ndarray) -> np.ndarray:
        """Coefficients [names, quantities] of ``values`` [shapes, quantities], noise removed."""
        matrix = self.matrix(shapes)
        scale = np.abs(matrix).max(axis=0)
        coefficients = np.linalg.lstsq(matrix / scale, values, rcond=None)[0] / scale[:, None]
        size = np.abs(coefficients) * scale[:, None]
        coefficients[size <= 1e-7 * np.maximum(np.abs(values).max(axis=0), 1.0)] = 0.0
        whole = np.round(coefficients)
        return np.where(np.abs(coefficients - whole) <= 1e-4 + 1e-10 * np.abs(whole), whole, np.round(coefficients, 6))

    def terms(self, coefficients: np.ndarray) -> Terms:
        named = {name: float(value) for name, value in zip(self.names, coefficients, strict=True) if value}
        for once, term in (("positions", "per_token"), ("mask", "per_token_seq")):
            named[term] = named.get(term, 0.0) + max(named.pop(once, 0.0), 0.0)
        return Terms(**named)


def fit(basis: Basis, shapes: Sequence[Shape], values: Sequence[float]) -> Terms:
    """Terms of one quantity."""
    return basis.terms(basis.solve(shapes, np.array(values, dtype=float)[:, None])[:, 0])


def fit_peak(basis: Basis, shapes: Sequence[Shape], timelines: Sequence[Sequence[float]]) -> Terms | Largest:
    """Terms of the largest value of a timeline. Where all have the same events, each event is fitted alone."""
    if len({len(timeline) for timeline in timelines}) > 1:
        timelines = [[max(timeline)] for timeline in timelines]
    coefficients = basis.solve(shapes, np.array(timelines, dtype=float))
    at_grid = basis.matrix(_GRID) @ coefficients  # [grid, events]
    kept: list[int] = []
    for row in np.argsort(-at_grid.max(axis=1)):
        if not kept or at_grid[row, kept].max() < at_grid[row].max() * (1 - _NEARLY):
            kept.append(int(at_grid[row].argmax()))
    terms = tuple(basis.terms(coefficients[:, event]) for event in kept)
    return terms[0] if len(terms) == 1 else Largest(of=terms)
