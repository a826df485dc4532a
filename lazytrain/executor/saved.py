"""What autograd keeps between a layer's forward and its backward, in a form that can move between tiers.

A layer's graph is built under ``saved_tensors_hooks``. A saved tensor is packed as one of

* a reference into the unit's flat weights (offset and geometry), rebound at backward to wherever the weights are then;
* the tensor itself, for what lives as long as the run (position embeddings, masks);
* a place in one of the set's storages, which move GPU -> host -> GPU as a whole.

The graph itself holds neither the layer's input (``_Entry``), nor its output (a ``GradientEdge``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from lazytrain.errors import ExecutionError

ALIGN = 64  # bytes between storages in a host slab


@dataclass
class Box:
    """The storages of one saved set on the compute device; emptied when the program releases the buffer."""

    storages: list[torch.UntypedStorage] | None = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return sum(s.nbytes() for s in self.storages or ())


@dataclass(frozen=True)
class _WeightRef:
    offset: int
    size: torch.Size
    stride: tuple[int, ...]


@dataclass(frozen=True)
class _StorageRef:
    index: int
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]


class SavedSet:
    """Saved tensors of one (layer, micro-batch). ``weights`` is the unit's flat weights, set again before backward."""

    def __init__(self, weights: Tensor, constants: Collection[int]):
        self.weights: Tensor | None = weights
        self.box = Box()
        self._weights_pointer = weights.untyped_storage().data_ptr()
        self._constants = constants
        self._index: dict[int, int] = {}

    def pack(self, tensor: Tensor) -> Any:
        storage = tensor.untyped_storage()
        pointer = storage.data_ptr()
        if self.weights is not None and pointer == self._weights_pointer and tensor.dtype == self.weights.dtype:
            return _WeightRef(int(tensor.storage_offset()), tensor.size(), tensor.stride())
        if pointer in self._constants or tensor.numel() == 0 or tensor.device != self._device:
            return tensor.detach()
        assert self.box.storages is not None
        if pointer not in self._index:
            self._index[pointer] = len(self.box.storages)
            self.box.storages.append(storage)
        return _StorageRef(
            self._index[pointer], tensor.dtype, int(tensor.storage_offset()), tensor.size(), tensor.stride()
        )

    @property
    def _device(self) -> torch.device:
        assert self.weights is not None
        return self.weights.device

    def unpack(self, handle: Any) -> Tensor:
        if isinstance(handle, Tensor):
            return handle
        if self.weights is None:
            raise ExecutionError("a layer's backward ran before its weights were bound")
        if isinstance(handle, _WeightRef):
            return torch.empty(0, dtype=self.weights.dtype, device=self.weights.device).set_(
                self.weights.untyped_storage(), handle.offset, handle.size, handle.stride
            )
        if self.box.storages is None:
            raise ExecutionError("a layer's backward ran after its saved tensors were released")
        storage = self.box.storages[handle.index]
        return torch.empty(0, dtype=handle.dtype, device=storage.device).set_(
            storage, handle.offset, handle.size, handle.stride
        )

    def sealed(self) -> None:
        """Ends packing: the graph is complete and no longer tied to the weights it was built with."""
        self._index.clear()
        self.weights = None

    # --- between tiers ---------------------------------------------------------------------------------------------
    def slab_bytes(self) -> int:
        return sum(_aligned(s.nbytes()) for s in self.box.storages or ())

    def send(self, slab: Tensor, non_blocking: bool) -> int:
        """Copies all storages into a host slab (uint8); returns the bytes moved."""
        if self.box.storages is None:
            raise ExecutionError("saved tensors were released before they were sent")
        offset = 0
        for storage in self.box.storages:
            n = storage.nbytes()
            slab[offset : offset + n].copy_(_as_bytes(storage), non_blocking=non_blocking)
            offset += _aligned(n)
        self._sizes = [s.nbytes() for s in self.box.storages]
        return sum(self._sizes)

    def load(self, slab: Tensor, device: torch.device, non_blocking: bool) -> int:
        """New storages on the device, filled from the slab; returns the bytes moved."""
        offset, storages = 0, []
        for n in self._sizes:
            fresh = torch.empty(n, dtype=torch.uint8, device=device)
            fresh.copy_(slab[offset : offset + n], non_blocking=non_blocking)
            storages.append(fresh.untyped_storage())
            offset += _aligned(n)
        self.box = Box(storages)
        return sum(self._sizes)


def _aligned(n: int) -> int:
    return -(-n // ALIGN) * ALIGN


def _as_bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))


class _Entry(torch.autograd.Function):
    """The start of a layer's graph: passes the input on without holding it, and puts its gradient into ``sink``."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x: Tensor, sink: list[Tensor]) -> Tensor:
        ctx.sink = sink
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.sink.append(grads[0])
        return None, None, None


@dataclass
class Graph:
    """A layer's autograd graph, ready for backward. Holds no tensor but what its saved set says."""

    edge: GradientEdge
    saved: SavedSet
    sink: list[Tensor]
    leaves: list[Tensor]

    def backward(self, gradient: Tensor, weights: Tensor, accumulators: list[Tensor]) -> Tensor:
        """Gradient of the layer's input; adds the parameters' gradients into ``accumulators``."""
        self.saved.weights = weights
        for leaf, accumulator in zip(self.leaves, accumulators, strict=True):
            leaf.grad = accumulator
        try:
            torch.autograd.backward([self.edge], [gradient])
            for leaf, accumulator in zip(self.leaves, accumulators, strict=True):
                if leaf.grad is not accumulator and leaf.grad.data_ptr() != accumulator.data_ptr():  # type: ignore[union-attr]
                    raise ExecutionError("autograd replaced a gradient buffer instead of adding into it")
        finally:
            for leaf in self.leaves:
                leaf.grad = None
            self.saved.weights = None
        return self.sink.pop()


def record(
    call: Callable[[Tensor], Tensor], x: Tensor, weights: Tensor, leaves: list[Tensor], constants: Collection[int]
) -> tuple[Tensor, Graph]:
    """Runs ``call(x)`` with its graph; returns the output without graph, and the graph without output.

    ``constants`` are the data pointers of storages that outlive the graph.
    """
    saved = SavedSet(weights, constants)
    sink: list[Tensor] = []
    with torch.enable_grad(), saved_tensors_hooks(saved.pack, saved.unpack):
        anchor = torch.empty(0, requires_grad=True)
        y = call(_Entry.apply(anchor, x, sink))
    edge = get_gradient_edge(y)
    saved.sealed()
    return y.detach(), Graph(edge, saved, sink, leaves)
