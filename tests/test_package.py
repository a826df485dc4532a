"""The wheel: one import name, all data, console script."""

from __future__ import annotations

import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from this tree, without a network."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    (found,) = folder.glob("*.whl")
    return found


def test_wheel_installs_exactly_one_top_level_name(wheel: Path, tmp_path: Path) -> None:
    """A top-level `kernels` would shadow Hugging Face's package of that name, which transformers imports."""
    venv.create(tmp_path / "env", with_pip=False)
    site = next((tmp_path / "env" / "lib").glob("python*")) / "site-packages"
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--no-deps", "--quiet", "--disable-pip-version-check",
         "--target", str(site), str(wheel)],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    names = {
        p.name for p in site.iterdir() if not p.name.endswith(".dist-info") and p.name not in ("bin", "__pycache__")
    }
    assert names == {"lazytrain"}
    # The installed copy, not this tree: run elsewhere, with its packages first and ours only for what they import.
    code = (
        "import sys, lazytrain.hwprofiles as h, lazytrain.kernels, lazytrain.simulator, lazytrain.models as m;"
        "print(h.__file__); assert h.load_machine('h800-sxm').name == 'h800-sxm'; m.load_model('qwen3.6-27b')"
    )
    packages = next(p for p in sys.path if p.endswith("site-packages"))
    out = subprocess.run(
        [sys.executable, "-I", "-c", f"import sys; sys.path[:0] = [{str(site)!r}, {packages!r}]; {code}"],
        check=True, capture_output=True, text=True, cwd=tmp_path,
    )  # fmt: skip
    assert str(site) in out.stdout


def test_wheel_carries_the_data(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    for part in ("hwprofiles/data/machines/h800-sxm.yaml", "models/data/configs/qwen2.5-7b.json",
                 "models/data/traces/qwen3.6-27b.json", "demo/data/us_founding_documents.txt"):  # fmt: skip
        assert f"lazytrain/{part}" in names
    assert not [n for n in names if n.startswith(("tests/", "benchmarks/"))]


def test_bare_names_are_not_used() -> None:
    """Nothing imports the top-level folders by their bare names."""
    bad = []
    for path in [*ROOT.glob("lazytrain/**/*.py"), *ROOT.glob("tests/*.py"), *ROOT.glob("benchmarks/*.py")]:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if line.startswith(
                tuple(f"{w} {n}" for w in ("import", "from") for n in ("simulator", "hwprofiles", "kernels"))
            ):
                bad.append(f"{path.name}:{number}")
    assert not bad
