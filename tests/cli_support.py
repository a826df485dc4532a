"""Runs commands as people do."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from lazytrain.cli.main import main

PLAN = ["--model", "tiny-qwen3", "--hardware", "rtx-3090-desktop", "--batch-size", "4", "--seq-len", "64"]


def lazytrain(*args: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "lazytrain", *args], capture_output=True, text=True, cwd=cwd, timeout=300
    )


def as_json(*args: str, code: int = 0) -> dict[str, Any]:
    """The one object that a command prints; nothing else may be on stdout."""
    found = lazytrain(*args, "--json")
    assert found.returncode == code, found.stderr
    data = json.loads(found.stdout)
    assert isinstance(data, dict)
    return data


def refused(*args: str, code: int = 2) -> str:
    """The one line that a command prints when it cannot do what is asked."""
    found = lazytrain(*args)
    return _only_line(found.returncode, found.stderr, code)


def refused_here(*args: str, code: int = 2) -> str:
    """The same within this process: for commands that take seconds to import what they need."""
    stderr = io.StringIO()
    handlers = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)}
    with patch.object(sys, "argv", ["lazytrain", *args]), redirect_stderr(stderr), pytest.raises(SystemExit) as ended:
        main()
    for which, handler in handlers.items():
        signal.signal(which, handler)
    return _only_line(ended.value.code, stderr.getvalue(), code)


def _only_line(found: object, stderr: str, code: int) -> str:
    assert found == code, stderr
    assert "Traceback" not in stderr
    lines = [line for line in stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, stderr
    return lines[0]
