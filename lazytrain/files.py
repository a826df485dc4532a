"""Files people and programs share: written whole or not at all, read with errors that name file and line."""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from lazytrain.errors import FileFormatError, InputError
from lazytrain.units import format_bytes


def write_text_atomic(path: Path, text: str) -> None:
    """Writes a file completely or not at all; InputError when the place cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror or error}") from error


def check_destination(path: Path, *, folder: bool = False, needed_bytes: float = 0.0) -> None:
    """InputError when a file (or a new folder) could not be made at ``path``: asked before long work, not after it."""
    if path.is_dir() and not folder:
        raise InputError(f"{path}: is a folder; give a file name")
    if folder and path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise InputError(f"{path}: exists and is not an empty folder; give another name")
    place = path.absolute() if path.is_dir() else next(p for p in path.absolute().parents if p.exists())
    if not place.is_dir():
        raise InputError(f"{path}: cannot be written: {place} is not a folder")
    if not os.access(place, os.W_OK | os.X_OK):
        raise InputError(f"{path}: cannot be written: no permission in {place}")
    free = shutil.disk_usage(place).free
    if needed_bytes > free:
        raise InputError(f"{path}: needs {format_bytes(needed_bytes)}, its drive has {format_bytes(free)} free")


def read_json(path: Path, what: str) -> Any:
    """The content of a JSON file; FileFormatError says that it is not ``what``, where, and why."""
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise FileFormatError(path, f"cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise FileFormatError(path, f"not {what}: not UTF-8 text (byte {error.start})") from error
    except json.JSONDecodeError as error:
        raise FileFormatError(path, f"not {what}, or truncated: {error.msg}", error.lineno) from error
    except (RecursionError, ValueError) as error:  # nested too deep; a number of thousands of digits
        reason = "nested too deep" if isinstance(error, RecursionError) else str(error)
        raise FileFormatError(path, f"not {what}: {reason}") from error


def json_ready(value: Any) -> Any:
    """``value`` with not-a-number and infinity as None, which is what JSON has for them."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {k: json_ready(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [json_ready(v) for v in value]
    return value
