"""Memory over time: static items, workspaces, buffers from the start of ``alloc`` to the end of all ``release``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from lazytrain.schedule.program import StepProgram
from lazytrain.simulator.graph import Graph


@dataclass(frozen=True)
class Curve:
    """Bytes from ``times[k]`` (s) until ``times[k + 1]``."""

    times: np.ndarray
    bytes: np.ndarray


@dataclass(frozen=True)
class Peak:
    """The most memory of a tier, when (s), and what it consists of then, largest first."""

    bytes: float
    at: float
    items: Mapping[str, float]

    def largest(self, n: int = 3) -> list[tuple[str, float]]:
        return list(self.items.items())[:n]


class MemoryRecord:
    """One tier's pieces of memory during a whole run: bytes from ``born`` to ``dies`` (s), not including ``dies``."""

    def __init__(self, program: StepProgram, graph: Graph, tier: str, start: np.ndarray, end: np.ndarray):
        memory, pinned = ("host", True) if tier == "pinned" else (tier, False)
        self.static: dict[str, float] = defaultdict(float)
        for item in program.static:
            if item.tier == memory and (item.pinned or not pinned):
                self.static[item.name] += item.bytes

        buffers = [b for b in program.buffers if b.tier == memory and b.bytes]
        names: list[str] = [b.kind for b in buffers]
        size = [b.bytes for b in buffers]
        born = start[:, [graph.position[b.alloc] for b in buffers]]
        dies = np.empty_like(born)
        if buffers:
            releases = [graph.position[r] for b in buffers for r in b.release]
            first = np.cumsum([0, *(len(b.release) for b in buffers[:-1])])
            dies = np.maximum.reduceat(end[:, releases], first, axis=1)
        if tier == "gpu" and (working := [i for i, op in enumerate(graph.ops) if op.workspace_bytes]):
            names += ["workspace"] * len(working)
            size += [graph.ops[i].workspace_bytes for i in working]
            born = np.concatenate([born, start[:, working]], axis=1)
            dies = np.concatenate([dies, end[:, working]], axis=1)

        self.names = sorted(set(names))
        label = np.array([self.names.index(n) for n in names], dtype=int)
        steps = len(start)
        alive = np.isfinite(born).ravel()  # the last steps of a run are incomplete: some operations have not started,
        self.born = born.ravel()[alive]
        self.dies = np.nan_to_num(dies.ravel()[alive], nan=np.inf)  # and some not ended
        self.size = np.tile(np.array(size, dtype=float), steps)[alive]
        self.label = np.tile(label, steps)[alive]

    def curve(self) -> Curve:
        """The tier's bytes over the whole run. What ends at a moment makes room for what begins at it."""
        times = np.concatenate([[0.0], self.born, self.dies])
        change = np.concatenate([[sum(self.static.values())], self.size, -self.size])
        keep = np.isfinite(times)
        times, change = times[keep], change[keep]
        order = np.argsort(times, kind="stable")
        times, level = times[order], np.cumsum(change[order])
        last = np.append(times[1:] != times[:-1], True)  # only the level after all changes of a moment exists
        return Curve(times[last], level[last])

    def peak(self, curve: Curve, begin: float = 0.0, end: float = np.inf) -> Peak:
        """The first maximum of ``curve`` between two moments of the run, its time counted from ``begin``."""
        first, last = _within(curve, begin, end)
        k = first + int(np.argmax(curve.bytes[first:last]))
        at = max(begin, float(curve.times[k]))
        return Peak(float(curve.bytes[k]), at - begin, self.composition(at))

    def composition(self, t: float) -> dict[str, float]:
        """Bytes by static item and buffer kind at a moment of the run, largest first."""
        now = (self.born <= t) & (t < self.dies)
        dynamic = np.bincount(self.label[now], weights=self.size[now], minlength=len(self.names))
        items: dict[str, float] = defaultdict(float, self.static)
        for name, size in zip(self.names, dynamic, strict=True):
            items[name] += float(size)
        return dict(sorted(((n, b) for n, b in items.items() if b > 0), key=lambda item: -item[1]))


def _within(curve: Curve, begin: float, end: float) -> tuple[int, int]:
    """Which points of a curve tell its levels from ``begin`` to ``end``."""
    first = max(0, int(np.searchsorted(curve.times, begin, side="right")) - 1)
    return first, max(first + 1, int(np.searchsorted(curve.times, end, side="left")))


def cut(curve: Curve, begin: float, end: float) -> Curve:
    """The part of a curve from ``begin`` to ``end`` (s), in time since ``begin``."""
    first, last = _within(curve, begin, end)
    return Curve(np.maximum(curve.times[first:last], begin) - begin, curve.bytes[first:last])
