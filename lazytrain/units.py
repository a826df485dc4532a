"""Human units in files and on screen, SI (bytes, seconds, per second) in code."""

from __future__ import annotations

import math
import re

_PREFIX = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}

# Every unit a profile may use, as (dimension, factor to SI). Bytes and rates get their prefixes below.
_UNITS: dict[str, tuple[str, float]] = {
    "s": ("time", 1.0),
    "ms": ("time", 1e-3),
    "us": ("time", 1e-6),
    "ns": ("time", 1e-9),
    "W": ("power", 1.0),
    "kW": ("power", 1e3),
    "USD": ("money", 1.0),
    "USD/h": ("money_rate", 1.0 / 3600.0),
    "cores": ("count", 1.0),
    "drives": ("count", 1.0),
    "lanes": ("count", 1.0),
    "fraction": ("fraction", 1.0),
    "%": ("fraction", 1e-2),
}
for _p, _f in {**_PREFIX, **_BINARY}.items():
    _UNITS[f"{_p}B"] = ("bytes", _f)
    _UNITS[f"{_p}B/s"] = ("byte_rate", _f)
for _p, _f in _PREFIX.items():
    _UNITS[f"{_p}FLOPS"] = ("flop_rate", _f)
    _UNITS[f"{_p}FLOP/s"] = ("flop_rate", _f)
    _UNITS[f"{_p}params/s"] = ("param_rate", _f)
    _UNITS[f"{_p}FLOP"] = ("flop", _f)
    _UNITS[f"{_p}IOPS"] = ("io_rate", _f)
_UNITS["TBW"] = ("bytes", 1e12)

_NUMBER = re.compile(r"^\s*([-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?|[-+]?nan|[-+]?inf)\s*(.*?)\s*$", re.I)


def parse(text: str, dimension: str) -> float:
    """The SI value of a quantity such as ``"24 GiB"`` or ``"12 GB/s"``.

    Raises ValueError when the number or its unit is missing, the unit is unknown or of another dimension,
    or the number is not finite.
    """
    match = _NUMBER.match(text)
    if match is None:
        raise ValueError(f"'{text}' is not a number with a unit")
    number, unit = float(match.group(1)), match.group(2)
    if not math.isfinite(number):
        raise ValueError(f"'{text}' is not a finite number")
    if not unit:
        raise ValueError(f"'{text}' has no unit (expected one for {dimension.replace('_', ' ')})")
    if unit not in _UNITS:
        raise ValueError(f"'{text}': unknown unit '{unit}'")
    found, factor = _UNITS[unit]
    if found != dimension:
        wanted = dimension.replace("_", " ")
        raise ValueError(f"'{text}': '{unit}' is a unit of {found.replace('_', ' ')}, expected {wanted}")
    return number * factor


def format_bytes(n: float, digits: int = 4) -> str:
    """Bytes in binary units, as people compare them with a card's memory: ``"41.3 GiB"``."""
    for unit, size in (("TiB", 2.0**40), ("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10)):
        if abs(n) >= size:
            return f"{n / size:.{digits}g} {unit}" if abs(n) / size < 1000 else f"{n / size:.0f} {unit}"
    return f"{n:.0f} B"


def format_rate(n: float) -> str:
    """Bytes per second in decimal units, as links are sold: ``"12 GB/s"``."""
    for unit, size in (("TB/s", 1e12), ("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3)):
        if abs(n) >= size:
            return f"{n / size:.4g} {unit}"
    return f"{n:.0f} B/s"


def format_seconds(s: float) -> str:
    """Seconds with a readable unit: ``"24.45 s"``, ``"310 ms"``."""
    if abs(s) >= 7200:
        return f"{s / 3600:.2f} h"
    if abs(s) >= 1:
        return f"{s:.2f} s"
    if abs(s) >= 1e-3:
        return f"{s * 1e3:.1f} ms"
    return f"{s * 1e6:.1f} us"


def plural(n: int, noun: str) -> str:
    """``1 step``, ``2 steps``, ``2 passes``."""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}{'es' if noun.endswith(('s', 'ch')) else 's'}"


def format_params(n: float) -> str:
    """A parameter count: ``"26.90 B"``, ``"3.1 M"``."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(n) >= size:
            return f"{n / size:.2f} {unit}"
    return f"{n:.0f}"
