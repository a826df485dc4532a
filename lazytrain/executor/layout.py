"""Flat layouts: where each parameter of a unit lies in the unit's flat tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ALIGN = 8  # elements: 16 bytes in bf16, what vector loads of matrix kernels want


class Place(NamedTuple):
    """One parameter: its name inside the unit, shape, and offset in elements."""

    local: str
    shape: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def decays(self) -> bool:
        """Weight decay applies to matrices; norm weights and biases have one dimension."""
        return len(self.shape) >= 2


class Layout:
    """Matrices first, then vectors, each in the given order: weight decay then covers one contiguous range."""

    def __init__(self, shapes: Mapping[str, Iterable[int]]):
        sizes = {name: tuple(shape) for name, shape in shapes.items()}
        places, offset = [], 0
        for name in sorted(sizes, key=lambda n: len(sizes[n]) < 2):  # stable
            places.append(Place(name, sizes[name], offset))
            offset += -(-math.prod(sizes[name]) // ALIGN) * ALIGN
        self.places = tuple(places)
        self.size = offset  # elements, padding included
        self.decay_end = next((p.offset for p in places if not p.decays), offset)

    def views(self, flat: Tensor) -> list[Tensor]:
        """Each parameter as a view of ``flat``, in the order of ``places``."""
        return [flat[p.offset : p.offset + p.numel].view(p.shape) for p in self.places]

    def ranges(self) -> list[tuple[slice, bool]]:
        """Contiguous ranges with one answer to: does weight decay apply?"""
        parts = [(slice(0, self.decay_end), True), (slice(self.decay_end, self.size), False)]
        return [(part, decays) for part, decays in parts if part.stop > part.start]
