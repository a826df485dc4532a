"""Reading and writing profiles: shipped parts and machines by name, or a machine file by path.

A machine file names its parts (``gpu: rtx-3090``) or holds them inline, and may override any number of a named part::

    name: my-desktop
    gpu: rtx-3090
    link: pcie4-x16
    host: desktop-ddr4-2ch
    override:
      link:
        h2d: {value: "13 GB/s", kind: measured, source: "x8 slot, bandwidthTest", date: 2026-08-01}
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError

from lazytrain.errors import ProfileError
from lazytrain.files import write_text_atomic
from lazytrain.hwprofiles.schema import PART_TYPES, Frozen, Gpu, Host, Link, Machine, Nvme

DATA = Path(__file__).parent / "data"
_FOLDERS = {"gpu": "gpus", "link": "links", "host": "hosts", "nvme": "nvme"}
_PartT = TypeVar("_PartT", bound=Frozen)


def load_machine(name_or_path: str | Path) -> Machine:
    """A shipped machine by name, or any machine file by path (something with a slash or ``.yaml``, or a file).

    Raises ProfileError: unknown names list close ones; a bad file is named with the field and what is wrong.
    """
    path = _machine_path(name_or_path)
    return _load_machine(path, _stamp(path))


def list_machines() -> list[str]:
    """Names of the shipped machines, sorted."""
    return _names(DATA / "machines")


def list_parts(kind: str) -> list[str]:
    """Names of the shipped parts of a kind: ``gpu``, ``link``, ``host`` or ``nvme``."""
    if kind not in _FOLDERS:
        raise ProfileError(f"no kind of part '{kind}'; there are {', '.join(_FOLDERS)}")
    return _names(DATA / _FOLDERS[kind])


def load_gpu(name: str) -> Gpu:
    """A shipped GPU by name."""
    return _load_part("gpu", name, Gpu)


def load_link(name: str) -> Link:
    """A shipped link by name."""
    return _load_part("link", name, Link)


def load_host(name: str) -> Host:
    """A shipped host by name."""
    return _load_part("host", name, Host)


def load_nvme(name: str) -> Nvme:
    """A shipped NVMe drive or stripe by name."""
    return _load_part("nvme", name, Nvme)


def save_machine(machine: Machine, path: str | Path) -> None:
    """Write a self-contained machine file that ``load_machine`` reads back with an equal digest.

    Atomic: the file appears whole or not at all. InputError when it cannot be written.
    """
    write_text_atomic(Path(path), dump_machine(machine))


def dump_machine(machine: Machine) -> str:
    """The text of a self-contained machine file, one number a line."""
    return yaml.dump(_flow(machine.to_data()), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10_000)


# --- reading -----------------------------------------------------------------------------------------------------
def _machine_path(name_or_path: str | Path) -> Path:
    text = str(name_or_path)
    path = Path(name_or_path)
    if isinstance(name_or_path, Path) or os.sep in text or path.suffix in (".yaml", ".yml"):
        if not path.is_file():
            raise ProfileError(f"{path}: no such machine file")
        return path
    shipped = DATA / "machines" / f"{text}.yaml"
    if text in list_machines():
        return shipped
    if path.is_file():
        return path
    raise ProfileError(_unknown("machine", text, list_machines()))


def _unknown(what: str, name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=4, cutoff=0.4)
    close += [k for k in known if name and name.lower() in k and k not in close]
    if close:
        return f"no {what} profile '{name}'; did you mean {', '.join(close[:6])}?"
    return f"no {what} profile '{name}'; there are {', '.join(known)}"


def _names(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.glob("*.yaml"))


def _stamp(path: Path) -> tuple[int, int]:
    """Changes when the file does, so that a cached reading of it is not used again."""
    status = path.stat()
    return status.st_mtime_ns, status.st_size


@lru_cache(maxsize=64)
def _load_machine(path: Path, stamp: tuple[int, int]) -> Machine:
    data = dict(_read_yaml(path))
    override = data.pop("override", None) or {}
    if not isinstance(override, Mapping):
        raise ProfileError(f"{path}: override: is not a mapping of parts")
    data.setdefault("name", path.stem)
    for part in override:
        if part not in _FOLDERS:
            raise ProfileError(f"{path}: override.{part}: no such part; there are {', '.join(_FOLDERS)}")
    for part, kind in PART_TYPES.items():
        if data.get(part) is not None:
            data[part] = _part_of(path, part, kind, data[part], override.get(part))
        elif part in override:
            raise ProfileError(f"{path}: override.{part}: the machine has no {part}")
    return _validated(Machine, data, str(path))


def _part_of(path: Path, part: str, kind: type[Frozen], raw: Any, override: Any) -> Any:
    """The part of a machine: named or inline, with the machine's overrides laid over it."""
    if isinstance(raw, str):
        if override is None:
            try:
                return _load_part(part, raw, kind)
            except ProfileError as problem:
                raise ProfileError(f"{path}: {part}: {problem}") from None
        base = _read_yaml(_part_path(part, raw, prefix=f"{path}: {part}: "))
    elif isinstance(raw, Mapping):
        base = raw
        if override is None:
            return raw  # validated with the machine, so that the message names the field from the top
    else:
        raise ProfileError(f"{path}: {part}: is neither the name of a part nor the part itself")
    if not isinstance(override, Mapping):
        raise ProfileError(f"{path}: override.{part}: is not a mapping of fields")
    return _validated(kind, _overlay(base, override), str(path), prefix=f"override.{part}.")


def _overlay(base: Mapping[str, Any], override: Mapping[str, Any]) -> dict[str, Any]:
    """``base`` with the fields of ``override``: numbers and tables replaced whole, mappings of them merged."""
    merged = dict(base)
    for key, value in override.items():
        old = merged.get(key)
        whole = not isinstance(value, Mapping) or not isinstance(old, Mapping) or {"value", "points"} & set(value)
        merged[key] = value if whole else _overlay(old, value)  # type: ignore[arg-type]
    return merged


def _part_path(part: str, name: str, prefix: str = "") -> Path:
    known = list_parts(part)
    if name not in known:
        raise ProfileError(prefix + _unknown(part, name, known))
    return DATA / _FOLDERS[part] / f"{name}.yaml"


def _load_part(part: str, name: str, kind: type[_PartT]) -> _PartT:
    path = _part_path(part, name)
    loaded = _cached_part(path, kind, _stamp(path))
    assert isinstance(loaded, kind)
    return loaded


@lru_cache(maxsize=256)
def _cached_part(path: Path, kind: type[Frozen], stamp: tuple[int, int]) -> Frozen:
    return _validated(kind, _read_yaml(path), str(path))


def _read_yaml(path: Path) -> Mapping[str, Any]:
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except OSError as problem:
        raise ProfileError(f"{path}: cannot be read: {problem.strerror}") from None
    except _TwiceError as problem:
        raise ProfileError(f"{path}: {problem}") from None
    except (yaml.YAMLError, UnicodeDecodeError, ValueError) as problem:
        raise ProfileError(f"{path}: not a YAML file: {' '.join(str(problem).split())}") from None
    if not isinstance(data, Mapping):
        raise ProfileError(f"{path}: is not a mapping of fields")
    return data


def _validated(kind: type[_PartT], data: Mapping[str, Any], where: str, prefix: str = "") -> _PartT:
    try:
        return kind.model_validate(dict(data))
    except ValidationError as problems:
        raise ProfileError(f"{where}: {_one_line(problems, kind, prefix)}") from None


def _one_line(problems: ValidationError, kind: type[Frozen], prefix: str) -> str:
    errors = problems.errors(include_url=False)
    first = errors[0]
    path = (prefix + ".".join(str(step) for step in first["loc"])).rstrip(".")
    text = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        close = difflib.get_close_matches(str(first["loc"][-1]), _fields_at(kind, first["loc"][:-1]), n=1)
        text = "unknown field" + (f"; did you mean {close[0]}?" if close else "")
    elif first["type"] == "missing":
        text = "is missing"
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    return f"{path}: {text}{more}" if path else f"{text}{more}"


def _fields_at(kind: type[Frozen], loc: tuple[int | str, ...]) -> list[str]:
    """Fields of the model at a place of an error: of the machine, or of one of its parts."""
    if not loc:
        return list(kind.model_fields)
    if kind is Machine and len(loc) == 1:
        return list(PART_TYPES[str(loc[0])].model_fields)
    return []


class _TwiceError(Exception):
    """A field stands twice in one mapping."""


_BaseLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_BaseDumper: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


class _Loader(_BaseLoader):
    """Safe loader that refuses a field given twice instead of keeping the last."""


def _unique_mapping(loader: Any, node: yaml.MappingNode) -> dict[Any, Any]:
    seen = set()
    for key, _ in node.value:
        if key.value in seen:
            raise _TwiceError(f"field '{key.value}' is given twice (line {key.start_mark.line + 1})")
        seen.add(key.value)
    loader.flatten_mapping(node)
    mapping: dict[Any, Any] = loader.construct_mapping(node, deep=True)
    return mapping


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _unique_mapping)


# --- writing -----------------------------------------------------------------------------------------------------
class _Line(dict[str, Any]):
    """A mapping written on one line."""


class _Dumper(_BaseDumper):
    """Safe dumper that knows one-line mappings."""

    def ignore_aliases(self, data: Any) -> bool:
        """A date used twice is written twice: no anchors in files for people."""
        return True


def _represent_line(dumper: Any, data: _Line) -> Any:
    return dumper.represent_mapping(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, data.items(), flow_style=True)


_Dumper.add_representer(_Line, _represent_line)


def _flow(value: Any) -> Any:
    if isinstance(value, dict):
        if "value" in value:
            return _Line({k: value[k] for k in ("size", "value", *value) if k in value})
        return {k: _flow(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_flow(v) for v in value]
    return value
