"""What several test files share and what is dear to make: a profile of this machine, a plan for it, some text."""

from __future__ import annotations

from pathlib import Path

import pytest

from lazytrain.hwprofiles import save_machine
from tests.cli_support import as_json


@pytest.fixture(scope="session")
def cpu_machine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What this machine was measured to be, quickly."""
    from lazytrain.hwprofiles.calibrate import calibrate

    folder = tmp_path_factory.mktemp("machine")
    path = folder / "here.yaml"
    save_machine(calibrate(folder, quick=True), path)
    return path


@pytest.fixture(scope="session")
def cpu_plan(cpu_machine: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    as_json("plan", "-m", "tiny-qwen3", "-H", str(cpu_machine), "-b", "4", "-s", "32", "-M", "2", "-o", str(path))
    return path


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("All work and no play makes a dull boy. " * 200)
    return path
