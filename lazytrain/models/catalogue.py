"""Models by name or path: shipped traces, and a cache of traces of local ones. Imports torch only to trace."""

from __future__ import annotations

import contextlib
import difflib
import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from lazytrain.errors import InputError, LazyTrainError, ModelError
from lazytrain.files import write_text_atomic
from lazytrain.models.configs import config_digest, read_config
from lazytrain.models.spec import ModelSpec

DATA = Path(__file__).parent / "data"
TRACE_VERSION = 1  # raise when the trace of an unchanged configuration changes
_LIBRARIES = ("torch", "transformers")


def list_models() -> list[str]:
    """Names of the catalogue, sorted."""
    return sorted(file.stem for file in (DATA / "configs").glob("*.json"))


def load_config(name_or_path: str | Path) -> dict[str, Any]:
    """The text configuration of a catalogue name, a ``config.json`` or a directory that has one."""
    return read_config(_locate(name_or_path)[0])


def load_model(name_or_path: str | Path) -> ModelSpec:
    """The ModelSpec of a catalogue name (shipped), or of a local configuration (traced once, then from the cache)."""
    file, name = _locate(name_or_path)
    if file.parent == DATA / "configs":
        return ModelSpec.model_validate_json((DATA / "traces" / file.name).read_bytes())
    config = read_config(file)
    entry = cache_directory() / f"{config_digest(config)}-{'-'.join(library_versions().values())}-{TRACE_VERSION}.json"
    try:
        return ModelSpec.model_validate_json(entry.read_bytes()).model_copy(update={"name": name})
    except (OSError, ValidationError):
        pass  # not there, or damaged: trace again
    from lazytrain.models.trace import trace_model

    try:
        spec = trace_model(name, config)
    except LazyTrainError:
        raise
    except Exception as error:  # transformers and torch raise many kinds for fields that do not go together
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(f"{file}: no layer can be built from it: {reason}") from error
    _write(entry, spec)
    return spec


def local_folder(name_or_path: str | Path) -> Path | None:
    """The folder of a local model; None for a name of the catalogue, or the path of a file."""
    file, _ = _locate(name_or_path)
    return None if file.parent == DATA / "configs" or Path(name_or_path).expanduser().is_file() else file.parent


def cache_directory() -> Path:
    """``$LAZYTRAIN_CACHE/traces``, by default ``~/.cache/lazytrain/traces``."""
    root = os.environ.get("LAZYTRAIN_CACHE")
    return (Path(root) if root else Path.home() / ".cache" / "lazytrain") / "traces"


def library_versions() -> dict[str, str]:
    """Installed versions of the libraries a trace depends on, found without importing them."""
    found = {}
    for library in _LIBRARIES:
        try:
            found[library] = version(library)
        except PackageNotFoundError:
            found[library] = "none"
    return found


def _locate(name_or_path: str | Path) -> tuple[Path, str]:
    """The configuration's file and the model's name."""
    shipped = DATA / "configs" / f"{str(name_or_path).lower()}.json"
    if not any(sep in str(name_or_path) for sep in ("/", os.sep)) and shipped.is_file():
        return shipped, shipped.stem
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return path / "config.json", path.resolve().name
    if path.is_file():
        return path, path.resolve().parent.name if path.name == "config.json" else path.stem
    known = list_models()
    close = difflib.get_close_matches(str(name_or_path).lower(), known, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(known)}"
    raise ModelError(f"no model '{name_or_path}', and no such config.json or directory; {hint}")


def _write(entry: Path, spec: ModelSpec) -> None:
    """Atomically; a cache that cannot be written costs a trace next time, nothing else."""
    with contextlib.suppress(InputError):
        write_text_atomic(entry, spec.model_dump_json())
