"""Numbers with their unit and provenance: a ``Quantity``, and a ``RateTable`` of values by operation size.

A file writes ``{value: "24 GiB", kind: datasheet, source: "...", date: 2026-08-01}``; code reads ``float(q)`` in SI
(bytes, seconds, bytes/s, FLOP/s, params/s, W, USD/s).
"""

from __future__ import annotations

import bisect
import datetime
import itertools
import math
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from lazytrain import units

Kind = Literal["datasheet", "measured", "published", "assumed", "fitted"]

# Units that only profiles use, beside those of lazytrain.units: a plain ratio such as duplex "1.6 x".
_RATIO = re.compile(r"^\s*([-+]?(?:\d+(?:\.\d*)?|\.\d+))\s*x\s*$")
# Closed upper ends of dimensions that have one.
_UPPER = {"fraction": 1.0, "ratio": 2.0}
_LOWER = {"ratio": 1.0}
_COMPUTED = ("dimension", "si", "sizes", "values")


class Frozen(BaseModel):
    """Base of every profile model: immutable, and a field it does not know is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)


class _Provenance(Frozen):
    kind: Kind = Field(description="how the number is known")
    source: str = Field(min_length=3, description="where it comes from: a document, a URL, a probe with its versions")
    date: datetime.date = Field(description="when it was looked up or measured")
    spread: float | None = Field(default=None, gt=0, le=1, allow_inf_nan=False, description="relative uncertainty")


class Quantity(_Provenance):
    """One number: its text for display, its SI value for code, and where it comes from."""

    value: str
    dimension: str = Field(repr=False)
    si: float = Field(repr=False)

    @classmethod
    def of(
        cls, value: str, dimension: str, *, kind: Kind, source: str, date: datetime.date, spread: float | None = None
    ) -> Quantity:
        """A quantity from its text; raises ValueError when text and dimension do not fit."""
        return cls(
            value=value,
            dimension=dimension,
            si=parse_si(value, dimension),
            kind=kind,
            source=source,
            date=date,
            spread=spread,
        )

    def __float__(self) -> float:
        return self.si

    def __str__(self) -> str:
        return self.value


class RatePoint(Frozen):
    """One point of a table, as written: ``{size: "34 GFLOP", value: "0.60 fraction"}``."""

    size: str
    value: str


class RateTable(_Provenance):
    """A rate or fraction by operation size (FLOPs of the call), linear in the logarithm of the size."""

    points: tuple[RatePoint, ...]
    dimension: str = Field(repr=False)
    sizes: tuple[float, ...] = Field(repr=False, description="FLOP, rising")
    values: tuple[float, ...] = Field(repr=False, description="SI values, one a size")

    @classmethod
    def of(
        cls,
        points: list[tuple[str, str]],
        dimension: str,
        *,
        kind: Kind,
        source: str,
        date: datetime.date,
        spread: float | None = None,
    ) -> RateTable:
        """A table from (size, value) texts; raises ValueError when one does not parse."""
        data = {
            "points": [{"size": s, "value": v} for s, v in points],
            "kind": kind,
            "source": source,
            "date": date,
            "spread": spread,
        }
        return cls.model_validate(_table_data(data, dimension))

    def at(self, size: float) -> float:
        """The value for a call of ``size`` FLOPs: interpolated in log(size), clamped at both ends."""
        if not size > self.sizes[0]:
            return self.values[0]
        if size >= self.sizes[-1]:
            return self.values[-1]
        i = bisect.bisect_right(self.sizes, size)
        low, high = self.sizes[i - 1], self.sizes[i]
        share = math.log(size / low) / math.log(high / low)
        return self.values[i - 1] + share * (self.values[i] - self.values[i - 1])


def parse_si(text: Any, dimension: str) -> float:
    """SI value of ``text``; ValueError unless it is a positive finite number with a unit of ``dimension``."""
    if not isinstance(text, str):
        raise ValueError(f"'{text}' has no unit (expected one for {dimension.replace('_', ' ')})")
    if dimension == "ratio":
        match = _RATIO.match(text)
        if match is None:
            raise ValueError(f"'{text}' is not a ratio such as '1.6 x'")
        si = float(match.group(1))
    else:
        si = units.parse(text, dimension)
    if not si > 0 or not math.isfinite(si):
        raise ValueError(f"'{text}' must be positive")
    upper, lower = _UPPER.get(dimension, math.inf), _LOWER.get(dimension, 0.0)
    if not lower <= si <= upper:
        raise ValueError(f"'{text}' must lie between {lower:g} and {upper:g}")
    return si


def _quantity_data(raw: Any, dimension: str) -> Any:
    if isinstance(raw, Quantity):
        if raw.dimension != dimension:
            raise ValueError(f"'{raw.value}' is a {raw.dimension}, expected {dimension.replace('_', ' ')}")
        return raw
    data = _mapping(raw, 'a number needs its provenance: {value: "...", kind: ..., source: ..., date: ...}')
    if "value" not in data:
        raise ValueError("has no 'value'")
    return {**data, "dimension": dimension, "si": parse_si(data["value"], dimension)}


def _table_data(raw: Any, dimension: str) -> Any:
    if isinstance(raw, RateTable):
        if raw.dimension != dimension:
            raise ValueError(f"table of {raw.dimension}, expected {dimension.replace('_', ' ')}")
        return raw
    data = _mapping(raw, "a table is {points: [{size: ..., value: ...}], kind: ..., source: ..., date: ...}")
    points = data.get("points")
    if not isinstance(points, list | tuple) or not points:
        raise ValueError("a table needs at least one point {size: ..., value: ...}")
    sizes, values = [], []
    for i, point in enumerate(points):
        if not isinstance(point, Mapping) or set(point) != {"size", "value"}:
            raise ValueError(f"points[{i}] is not {{size: ..., value: ...}}")
        try:
            sizes.append(parse_si(point["size"], "flop"))
            values.append(parse_si(point["value"], dimension))
        except ValueError as problem:
            raise ValueError(f"points[{i}]: {problem}") from None
    if any(b <= a for a, b in itertools.pairwise(sizes)):
        raise ValueError("sizes of the points must rise")
    return {**data, "dimension": dimension, "sizes": tuple(sizes), "values": tuple(values)}


def _mapping(raw: Any, expected: str) -> dict[str, Any]:
    if not isinstance(raw, Mapping):
        raise ValueError(f"'{raw}': {expected}")
    unknown = [key for key in raw if key in _COMPUTED]
    if unknown:
        raise ValueError(f"unknown field '{unknown[0]}'")
    return dict(raw)


def _of(read: Callable[[Any, str], Any], dimension: str) -> BeforeValidator:
    return BeforeValidator(lambda raw: read(raw, dimension))


# Fields of a profile, by dimension. Code sees a Quantity (or RateTable); files must use a unit of that dimension.
Bytes = Annotated[Quantity, _of(_quantity_data, "bytes")]
ByteRate = Annotated[Quantity, _of(_quantity_data, "byte_rate")]
FlopRate = Annotated[Quantity, _of(_quantity_data, "flop_rate")]
ParamRate = Annotated[Quantity, _of(_quantity_data, "param_rate")]
Seconds = Annotated[Quantity, _of(_quantity_data, "time")]
Fraction = Annotated[Quantity, _of(_quantity_data, "fraction")]
Ratio = Annotated[Quantity, _of(_quantity_data, "ratio")]
Count = Annotated[Quantity, _of(_quantity_data, "count")]
Watts = Annotated[Quantity, _of(_quantity_data, "power")]
MoneyRate = Annotated[Quantity, _of(_quantity_data, "money_rate")]
EfficiencyTable = Annotated[RateTable, _of(_table_data, "fraction")]
FlopRateTable = Annotated[RateTable, _of(_table_data, "flop_rate")]
