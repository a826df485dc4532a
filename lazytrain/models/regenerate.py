"""Traces the catalogue again and rewrites the shipped specs: ``python -m lazytrain.models.regenerate [NAME ...]``."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from lazytrain.models.catalogue import DATA, list_models, load_config
from lazytrain.models.configs import config_digest
from lazytrain.models.spec import ModelSpec

_WIDTH = 118


def to_text(spec: ModelSpec) -> str:
    """A spec as JSON for people: what fits on a line stands on one, defaults left out."""
    data = {"schema_version": spec.schema_version, **spec.model_dump(mode="json", exclude_defaults=True)}
    return _pretty(data) + "\n"


def _pretty(value: Any, indent: str = "") -> str:
    flat = json.dumps(value)
    if not isinstance(value, (dict, list)) or len(indent) + len(flat) <= _WIDTH - 24:  # room for a key
        return flat
    inner = indent + " "
    if isinstance(value, dict):
        items = [f"{inner}{json.dumps(key)}: {_pretty(item, inner)}" for key, item in value.items()]
        return "{\n" + ",\n".join(items) + f"\n{indent}}}"
    if isinstance(value[0], dict):
        return "[\n" + ",\n".join(inner + _pretty(item, inner) for item in value) + f"\n{indent}]"
    lines, line = [], inner
    for item in value:
        text = json.dumps(item)
        if len(line) + len(text) + 2 > _WIDTH and line.strip():
            lines.append(line.rstrip())
            line = inner
        line += text + ", "
    lines.append(line.rstrip().removesuffix(","))
    return "[\n" + "\n".join(lines) + f"\n{indent}]"


def main(names: list[str]) -> None:
    from lazytrain.models.trace import trace_model

    done: dict[str, ModelSpec] = {}
    for name in names or list_models():
        start = time.perf_counter()
        config = load_config(name)
        digest = config_digest(config)
        if digest not in done:
            done[digest] = trace_model(name, config)
        spec = done[digest].model_copy(update={"name": name})
        (DATA / "traces" / f"{name}.json").write_text(to_text(spec), encoding="utf-8")
        seconds = time.perf_counter() - start
        print(f"{name:16} {spec.parameter_count / 1e9:8.3f} B parameters  {seconds:5.1f} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
