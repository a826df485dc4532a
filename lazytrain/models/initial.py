"""Freshly initialised weights of a model, made unit by unit when they are asked for."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator, MutableMapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from lazytrain.models.architecture import Architecture


class FreshState(MutableMapping[str, Tensor]):
    """State-dict name -> fp32 CPU tensor, with transformers' own initialisation rules.

    Every unit (embedding, layer, final norm, head) has a random stream of its own, so a seed gives the same weights in
    any order of access. Only the unit last asked for is in memory, less what was popped: take the tensors in order.
    """

    def __init__(self, architecture: Architecture, seed: int):
        self._architecture, self._seed = architecture, seed
        self._units: dict[str, tuple[str, str]] = {}  # state-dict name -> (unit, name inside it)
        self._build: dict[str, Callable[[], nn.Module]] = {}
        self._given: dict[str, Tensor] = {}
        self._unit, self._values = "", dict[str, Tensor]()
        a = architecture
        self._add("embedding", a.build_embedding, {"weight": a.embedding_name})
        for layer in range(a.n_layers):
            self._add(f"layer {layer}", partial(a.build_block, layer, torch.float32, "cpu"), a.parameter_names(layer))
        self._add("final norm", partial(a.build_final_norm, torch.float32, "cpu"), a.norm_parameter_names())
        if not a.tied:
            self._add("head", a.build_head, {"weight": a.head_name})

    def _add(self, unit: str, build: Callable[[], nn.Module], names: dict[str, str]) -> None:
        self._build[unit] = build
        self._units.update({full: (unit, local) for local, full in names.items()})

    def __getitem__(self, name: str) -> Tensor:
        if name in self._given:
            return self._given[name]
        unit, local = self._units[name]
        if unit != self._unit:
            self._values = initialise(self._architecture, self._build[unit](), f"{self._seed}/{unit}")
            self._unit = unit
        return self._values[local]

    def __setitem__(self, name: str, value: Tensor) -> None:
        self._units.setdefault(name, ("", ""))
        self._given[name] = value

    def __delitem__(self, name: str) -> None:
        unit, local = self._units.pop(name)
        self._given.pop(name, None)
        if unit == self._unit:
            self._values.pop(local, None)

    def __iter__(self) -> Iterator[str]:
        return iter(tuple(self._units))

    def __len__(self) -> int:
        return len(self._units)


def initialise(architecture: Architecture, module: nn.Module, stream: str) -> dict[str, Tensor]:
    """Initialises a module's parameters as transformers does; ``stream`` names the random numbers."""
    seed = int.from_bytes(hashlib.sha256(stream.encode()).digest()[:8], "big") >> 1
    rule: Any = architecture.pretrained_class(copy.deepcopy(architecture.config))._init_weights
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        module.apply(rule)
    return {name: parameter.detach() for name, parameter in module.named_parameters()}
