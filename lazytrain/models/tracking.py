"""What the kernels of a call do: bytes alive over time, FLOPs, bytes moved. For real and for fake tensors alike."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_aten = torch.ops.aten
_ALLOCATIONS = {_aten.empty, _aten.empty_like, _aten.new_empty, _aten.empty_strided, _aten.new_empty_strided}
_DEVICE = torch.ops.prim.device.default
_MATMULS = {_aten.mm, _aten.addmm}
_SDPA = {
    _aten._scaled_dot_product_flash_attention_for_cpu,
    _aten._scaled_dot_product_flash_attention,
    _aten._scaled_dot_product_efficient_attention,
    _aten._scaled_dot_product_cudnn_attention,
}


def extent_bytes(tensor: Tensor) -> int:
    """Bytes of the elements a tensor really has: a broadcast dimension (stride 0) counts once."""
    elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        elements *= size if stride else min(size, 1)
    return elements * tensor.element_size()


def storages(tensors: Iterable[Tensor]) -> dict[int, torch.UntypedStorage]:
    """Distinct storages by identity, which stays valid while the result is held."""
    found = (tensor.untyped_storage() for tensor in tensors)
    return {storage._cdata: storage for storage in found}


class Ledger(TorchDispatchMode):
    """Records the storages that operations make (and when they die), the FLOPs and the memory traffic.

    Matrix products with a weight (``mm``, ``addmm``) are ``matmul_flops``; batched products, attention kernels and
    triangular solves are ``attention_flops``. Everything else but views and allocations adds the bytes of its tensor
    arguments and results to ``memory_bytes``. A multiply-add is two FLOPs; attention counts the whole square.

    With ``engine_adds``, an ``add`` whose first argument dies at once takes that argument's place: so the autograd
    engine sums two gradients when no dispatch mode watches it.
    """

    def __init__(self, engine_adds: bool = False) -> None:
        super().__init__()
        self.matmul_flops = 0.0
        self.attention_flops = 0.0
        self.memory_bytes = 0.0
        self.kernels = 0
        self._engine_adds = engine_adds
        self._ids: dict[int, int] = {}  # storage identity -> record number, while it lives
        self._sizes: list[int] = []
        self._events: list[int] = []  # n: record n is born, ~n: it dies
        self._adds: dict[int, int] = {}  # record of a sum -> record of its first argument
        self._watch: list[weakref.ref[Any]] = []

    # --- what the caller reads --------------------------------------------------------------------------------------
    def record_of(self, tensor: Tensor) -> int | None:
        """The record of the storage a live tensor has, None where no recorded operation made it."""
        return self._ids.get(tensor.untyped_storage()._cdata)

    def live_bytes(self, result: Tensor, without: Iterable[Tensor | None] = ()) -> list[int]:
        """Bytes alive after each birth beyond ``result``'s, whose place counts as taken from the start.

        The storages of ``without`` are not counted at all.
        """
        left_out = {self.record_of(t) for t in without if t is not None}
        events = self._events
        replaced = self._replaced()
        live, timeline = -result.untyped_storage().nbytes(), [0]
        for event in events:
            record = event if event >= 0 else ~event
            if record in left_out or (event >= 0 and record in replaced) or (event < 0 and record in replaced.values()):
                size = 0
            else:
                size = self._sizes[record]
            live += size if event >= 0 else -size
            if event >= 0:
                timeline.append(max(live, 0))
        return timeline

    def _replaced(self) -> dict[int, int]:
        """Sums that in truth were written into their first argument: the argument died before the next birth."""
        found: dict[int, int] = {}
        born: int | None = None
        for event in self._events:
            if event >= 0:
                born = event
            elif born is not None and self._adds.get(born) == ~event and self._sizes[born] == self._sizes[~event]:
                found[born] = ~event
        return found

    # --- recording ----------------------------------------------------------------------------------------------------
    def __enter__(self) -> Any:
        _active.append(self)
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        _active.remove(self)
        super().__exit__(*exception)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is _DEVICE:  # asked for all the time, does nothing
            return out
        outputs = list(_tensors(out))
        if not outputs:
            return out
        inputs = list(_tensors((args, kwargs)))
        given = {t.untyped_storage()._cdata for t in inputs}
        packet = func.overloadpacket
        if all(t.untyped_storage()._cdata in given for t in outputs) and not func._schema.is_mutable:
            return out  # a view
        for tensor in outputs:
            if tensor.untyped_storage()._cdata not in given:
                self._born(tensor)
        if self._engine_adds and packet is _aten.add and isinstance(args[0], Tensor) and isinstance(args[1], Tensor):
            first, total = self.record_of(args[0]), self.record_of(out)
            if first is not None and total is not None:
                self._adds[total] = first
        if packet not in _ALLOCATIONS:
            self._work(packet, inputs, outputs)
        return out

    def _born(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._ids:
            return
        record = len(self._sizes)
        self._ids[key] = record
        self._sizes.append(storage.nbytes())
        self._events.append(record)

        def died(_: Any, key: int = key, record: int = record) -> None:
            self._events.append(~record)
            if self._ids.get(key) == record:
                del self._ids[key]

        self._watch.append(weakref.ref(storage, died))

    def _work(self, packet: Any, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        self.kernels += 1
        if packet in _MATMULS:
            a, b = inputs[-2:]
            self.matmul_flops += 2 * a.shape[0] * a.shape[1] * b.shape[1]
        elif packet is _aten.bmm or packet is _aten.baddbmm:
            a, b = inputs[-2:]
            self.attention_flops += 2 * a.shape[0] * a.shape[1] * a.shape[2] * b.shape[2]
        elif packet in _SDPA:
            q, k, v = inputs[:3]
            batch, heads, queries, width = q.shape
            self.attention_flops += 2 * batch * heads * queries * k.shape[2] * (width + v.shape[3])
        elif packet is _aten.linalg_solve_triangular:
            system, right = inputs[:2]
            self.attention_flops += right.numel() * system.shape[-1]
        else:
            self.memory_bytes += sum(map(extent_bytes, inputs)) + sum(map(extent_bytes, outputs))


_active: list[Ledger] = []


def declare(attention_flops: float = 0.0, memory_bytes: float = 0.0, kernels: int = 1) -> None:
    """Adds the work of a kernel that cannot run here to the ledger in use, where there is one."""
    if _active:
        _active[-1].attention_flops += attention_flops
        _active[-1].memory_bytes += memory_bytes
        _active[-1].kernels += kernels


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))
