"""Weights and gradients on the compute device: preallocated flat slots, and the parameters as views of them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from lazytrain.errors import ExecutionError
from lazytrain.executor.layout import Layout
from lazytrain.schedule.program import Kind, StepProgram


class DeviceMemory:
    """The static GPU memory of a program, in the compute dtype.

    Streamed layers share ``weight_slots`` buffers; a streamed embedding and head share one place; every other unit has
    its own. Gradients of layers share ``gradient_slots`` buffers; embedding and head share one (tied: two).
    """

    def __init__(
        self,
        program: StepProgram,
        layouts: list[Layout],
        tied: bool,
        shared: set[int],
        dtype: torch.dtype,
        device: torch.device,
    ):
        """``shared``: which of embedding and head are streamed through the one place (none where tied)."""
        self._layouts, self._head = layouts, len(layouts) - 1

        def empty(sizes: Iterable[int]) -> Tensor:
            return torch.zeros(max(sizes, default=0), dtype=dtype, device=device)

        loads: dict[int, set[int]] = {}
        for op in program.ops:
            if op.kind is Kind.LOAD_WEIGHTS:
                loads.setdefault(op.unit, set()).add(op.slot)
        streamed = [u for u, slots in loads.items() if slots != {-1}]
        self._slots = [empty(layouts[u].size for u in streamed) for _ in range(program.weight_slots)]
        place = empty(layouts[u].size for u in shared)
        self._own = {
            u: place if u in shared else empty([layouts[u].size]) for u in range(len(layouts)) if u not in streamed
        }
        layers = range(1, self._head)
        self._gradient_slots = [empty(layouts[u].size for u in layers) for _ in range(program.gradient_slots)]
        if tied:
            self._vocabulary_gradient = {0: empty([layouts[0].size]), self._head: empty([layouts[self._head].size])}
        else:
            both = empty([max(layouts[0].size, layouts[self._head].size)])
            self._vocabulary_gradient = {0: both, self._head: both}
        self._leaves: dict[tuple[int, int], list[Tensor]] = {}
        self._views: dict[tuple[int, int], list[Tensor]] = {}

    def weights(self, unit: int, slot: int) -> Tensor:
        """The unit's flat weights, [layout.size], in ``slot`` (-1: the unit's own or the shared place)."""
        flat = self._slots[slot] if slot >= 0 else self._own[unit]
        return flat[: self._layouts[unit].size]

    def gradient(self, unit: int, gradient_slot: int) -> Tensor:
        """The unit's flat gradient accumulator, [layout.size]."""
        flat = self._gradient_slots[gradient_slot] if gradient_slot >= 0 else self._vocabulary_gradient[unit]
        return flat[: self._layouts[unit].size]

    def leaves(self, unit: int, slot: int) -> list[Tensor]:
        """Parameters that require gradients: views of the weights in layout order, shared by units of one layout."""
        flat, layout = self.weights(unit, slot), self._layouts[unit]
        key = (flat.data_ptr(), id(layout))
        if key not in self._leaves:
            # Parameter() gives each view its own version counter: a later load into the slot is no in-place change.
            self._leaves[key] = [nn.Parameter(view) for view in layout.views(flat)]
        return self._leaves[key]

    def gradient_views(self, unit: int, gradient_slot: int) -> list[Tensor]:
        flat, layout = self.gradient(unit, gradient_slot), self._layouts[unit]
        key = (flat.data_ptr(), id(layout))
        if key not in self._views:
            self._views[key] = layout.views(flat)
        return self._views[key]

    def nbytes(self) -> int:
        """All of it, each storage once."""
        tensors = [*self._slots, *self._own.values(), *self._gradient_slots, *self._vocabulary_gradient.values()]
        return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


class Template:
    """A module without weights of its own: parameters are bound to a unit's leaves before each call.

    ``locals_`` names the module's parameter for each leaf of the layout, None for leaves that are not the module's.
    """

    def __init__(self, module: nn.Module, locals_: list[str | None]):
        self.module = module
        self._homes: list[tuple[dict[str, Tensor | None], str] | None] = []
        for local in locals_:
            if local is None:
                self._homes.append(None)
                continue
            *path, name = local.split(".")
            owner = module.get_submodule(".".join(path))
            if name not in owner._parameters:
                raise ExecutionError(f"the module has no parameter {local}")
            self._homes.append((owner._parameters, name))  # type: ignore[arg-type]
        self._bound: list[Tensor] | None = None

    def bind(self, leaves: list[Tensor]) -> nn.Module:
        if self._bound is not leaves:
            for home, leaf in zip(self._homes, leaves, strict=True):
                if home is not None:
                    home[0][home[1]] = leaf
            self._bound = leaves
        return self.module
