"""The host store: master weights, moments, streamed copies and parked gradients of every unit, as flat tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lazytrain.errors import InputError
from lazytrain.executor.layout import Layout


@dataclass
class HostUnit:
    """Everything the host holds of one unit; all tensors have ``layout.size`` elements."""

    layout: Layout
    names: dict[str, str]  # name inside the unit -> name in the model's state dict
    master: Tensor  # fp32
    m: Tensor  # fp32
    v: Tensor  # fp32
    parked: Tensor  # gradient of the step, in the job's gradient dtype
    stream: Tensor  # what is streamed: a copy in the stream dtype, or the master itself where that is fp32

    @property
    def has_copy(self) -> bool:
        return self.stream.data_ptr() != self.master.data_ptr()


# Other dtypes hold codes or scaled values: as numbers they would be wrong.
_FULL = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
HostEmpty = Callable[[int], Tensor]  # bytes -> uint8 tensor that the device can copy from and to


def typed(host_empty: HostEmpty, elements: int, dtype: torch.dtype) -> Tensor:
    return host_empty(elements * dtype.itemsize).view(dtype)


class HostStore:
    def __init__(self, units: list[HostUnit], applied_updates: int = 0):
        self.units = units
        self.applied_updates = applied_updates  # AdamW's step count: skipped steps are not in it

    @classmethod
    def create(
        cls,
        layouts: list[Layout],
        names: list[dict[str, str]],
        state: Iterable[tuple[str, Tensor]],
        stream_dtype: torch.dtype,
        gradient_dtype: torch.dtype,
        host_empty: HostEmpty,
        device_reads_master: bool,
    ) -> HostStore:
        """Takes the weights from ``state`` one by one, so that a generator's and our copy never both exist whole.

        ``device_reads_master``: fp32 masters that are streamed themselves must lie in memory that the device reads.
        """
        units = []
        streams_master = stream_dtype is torch.float32
        for layout, unit_names in zip(layouts, names, strict=True):
            n = layout.size
            pinned_master = streams_master and device_reads_master
            master = typed(host_empty, n, torch.float32).zero_() if pinned_master else torch.zeros(n)
            stream = master if streams_master else typed(host_empty, n, stream_dtype)
            parked = typed(host_empty, n, gradient_dtype)
            units.append(HostUnit(layout, unit_names, master, torch.zeros(n), torch.zeros(n), parked, stream))
        store = cls(units)
        _fill(store.weights(), state, "initial state")
        for unit in units:
            if unit.has_copy:
                unit.stream.copy_(unit.master)
        return store

    def _named(self, pick: Callable[[HostUnit], Tensor]) -> dict[str, Tensor]:
        return {
            unit.names[place.local]: view
            for unit in self.units
            for place, view in zip(unit.layout.places, unit.layout.views(pick(unit)), strict=True)
        }

    def weights(self) -> dict[str, Tensor]:
        """Master weights by their names in the model's state dict: fp32 views, not copies; a tied weight once."""
        return self._named(lambda unit: unit.master)

    def moments(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """First and second moments by weight name: fp32 views."""
        return self._named(lambda unit: unit.m), self._named(lambda unit: unit.v)

    def gradients(self) -> dict[str, Tensor]:
        """The last step's summed gradients, before clipping, by weight name: views in the parked dtype."""
        return self._named(lambda unit: unit.parked)

    def load_moments(self, m: Mapping[str, Tensor], v: Mapping[str, Tensor], applied_updates: int) -> None:
        """Continues from saved moments; InputError when they are not of this model."""
        for what, mine, given in zip(("first moments", "second moments"), self.moments(), (m, v), strict=True):
            _fill(mine, given.items(), what)
        self.applied_updates = applied_updates


def _fill(places: dict[str, Tensor], given: Iterable[tuple[str, Tensor]], what: str) -> None:
    """Copies named tensors into their places; InputError unless the two match exactly."""
    left = dict(places)
    for name, tensor in given:
        place = left.pop(name, None)
        if place is None:
            raise InputError(f"{what}: the model has no {name}, or it came twice")
        if tensor.shape != place.shape:
            raise InputError(f"{what}: {name} has shape {tuple(tensor.shape)}, the model needs {tuple(place.shape)}")
        if tensor.dtype not in _FULL:
            dtype = str(tensor.dtype).removeprefix("torch.")
            raise InputError(f"{what}: {name} is {dtype}; training needs full weights")
        place.copy_(tensor)
    if left:
        raise InputError(f"{what}: {len(left)} tensors are missing, for example {next(iter(left))}")
