"""Which streamed layer sits in which weight slot as a step goes on."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence


class WeightSlots:
    """Slots that streamed layers share. ``visits``: streamed units in the order in which a step uses their weights.

    Forward gives up the slot used longest ago, so that the turn always finds the topmost layers. Backward gives up the
    one whose unit is needed again last (Belady's rule, which makes the fewest loads: a step's visits are known
    beforehand), and among such the one used longest ago.
    """

    def __init__(self, count: int, visits: Sequence[int]):
        self.count = count
        self.unit = [-1] * count
        self.load = [-1] * count  # operation that filled the slot
        self.last_user = [-1] * count  # last operation that read it
        self.first_load: dict[int, int] = {}  # slot -> its first load of the step, to tie to the step before
        self._visits = tuple(visits)
        self._now = -1
        self._at: dict[int, list[int]] = defaultdict(list)
        for position, unit in enumerate(visits):
            self._at[unit].append(position)

    def visit(self, unit: int) -> int:
        """Goes on to the next visit, which must be of this unit; its slot, or -1 if it is in none."""
        self._now += 1
        assert self._visits[self._now] == unit, f"visit {self._now} is of unit {self._visits[self._now]}, not {unit}"
        return self.unit.index(unit) if unit in self.unit else -1

    def victim(self, *, forward: bool) -> int:
        """The slot to fill next."""
        if forward:
            return min(range(self.count), key=lambda s: self.last_user[s])
        return max(range(self.count), key=lambda s: (self._next_use(self.unit[s]), -self.last_user[s]))

    def fill(self, slot: int, unit: int, load: int) -> None:
        self.first_load.setdefault(slot, load)
        self.unit[slot], self.load[slot], self.last_user[slot] = unit, load, load

    def _next_use(self, unit: int) -> float:
        positions = self._at[unit]
        k = bisect_right(positions, self._now)
        return positions[k] if k < len(positions) else math.inf
