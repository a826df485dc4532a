"""The dynamic buffers of a program at run time: which operation means which buffer, and when each one ends."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from typing import Any

from lazytrain.errors import ExecutionError
from lazytrain.schedule.program import StepProgram


class Buffers:
    """Live GPU buffers by id. An operation that names (kind, unit, micro) means the last one opened before it."""

    def __init__(self, program: StepProgram):
        self._opened: dict[tuple[str, int, int], list[tuple[int, int]]] = defaultdict(list)  # -> (alloc op, buffer)
        self._ended_by: dict[int, list[int]] = defaultdict(list)
        self._uses = {b.id: len(b.release) for b in program.buffers}
        self._release_ops = {b.id: b.release for b in program.buffers}
        for buffer in program.buffers:
            if buffer.tier != "gpu":
                continue
            if not buffer.release:
                raise ExecutionError(f"buffer {buffer.id} ({buffer.kind} of unit {buffer.unit}) is never released")
            self._opened[buffer.kind, buffer.unit, buffer.micro].append((buffer.alloc, buffer.id))
            for op in buffer.release:
                self._ended_by[op].append(buffer.id)
        for opened in self._opened.values():
            opened.sort()
        self._left = dict(self._uses)
        self._live: dict[int, Any] = {}

    def _id(self, kind: str, unit: int, micro: int, op: int) -> int:
        opened = self._opened.get((kind, unit, micro), [])
        position = bisect_left(opened, (op, -1))
        if position == 0:
            raise ExecutionError(f"operation {op} reads the {kind} of unit {unit}, m{micro}, before it exists")
        return opened[position - 1][1]

    def get(self, kind: str, unit: int, micro: int, op: int) -> Any:
        """What ``op`` reads under this name."""
        buffer = self._id(kind, unit, micro, op)
        if buffer not in self._live:
            raise ExecutionError(f"operation {op} reads the {kind} of unit {unit}, m{micro}, which is not there")
        return self._live[buffer]

    def put(self, kind: str, unit: int, micro: int, op: int, payload: Any) -> None:
        """Stores what ``op`` made; nothing happens where the program opens no such buffer (a result nobody reads)."""
        for alloc, buffer in self._opened.get((kind, unit, micro), []):
            if alloc == op:
                if buffer in self._live:
                    raise ExecutionError(f"buffer {buffer} ({kind} of unit {unit}) is made again before its release")
                self._live[buffer] = payload
                return

    def ended(self, op: int) -> list[tuple[Any, tuple[int, ...]]]:
        """Buffers that end with ``op``: their payloads (no longer held here) and all their release operations."""
        finished = []
        for buffer in self._ended_by.get(op, ()):
            self._left[buffer] -= 1
            if self._left[buffer] == 0:
                self._left[buffer] = self._uses[buffer]
                finished.append((self._live.pop(buffer, None), self._release_ops[buffer]))
        return finished

    def count(self) -> int:
        return len(self._live)
