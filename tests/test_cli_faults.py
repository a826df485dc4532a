"""Bad input, full disks, damaged files and interrupts: one line, the right exit code, nothing half-written."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.cli_support import PLAN, as_json, lazytrain, refused, refused_here


# --- how commands end ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("args", "problem"),
    [
        (["plan", "-b", "x"], "--batch-size"),
        (["plan", "-m", "tiny-qwen3"], "Missing option"),
        (["simulate", "--no-such-option"], "--no-such-option"),
        (["no-such-command"], "no-such-command"),
    ],
)
def test_bad_usage_is_one_line_and_one_object(args: list[str], problem: str) -> None:
    assert problem in refused(*args)
    found = as_json(*args, code=2)
    assert problem in found["error"]
    assert found["exit_code"] == 2


def test_no_arguments_show_the_help() -> None:
    found = lazytrain()
    assert found.returncode == 2
    assert "Commands:" in found.stdout


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_stopped_from_outside(
    cpu_plan: Path, cpu_machine: Path, text: Path, tmp_path: Path, how: signal.Signals
) -> None:
    folder = tmp_path / "run"
    process = subprocess.Popen(
        [sys.executable, "-m", "lazytrain", "run", str(cpu_plan), "--data", str(text), "--steps", "100000", "-o",
         str(folder), "--machine", str(cpu_machine), "--force", "--json"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    metrics = folder / "metrics.jsonl"
    for _ in range(600):
        if metrics.exists() and len(metrics.read_text().splitlines()) >= 2:
            break
        time.sleep(0.1)
    process.send_signal(how)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert json.loads(stdout) == {"error": "interrupted", "exit_code": 130}
    assert "Traceback" not in stderr
    assert "error: interrupted" in stderr
    summary = json.loads((folder / "run.json").read_text())
    assert summary["status"] == "interrupted"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert len(rows) == summary["steps"] >= 2
    assert "interrupted" in refused("report", str(folder), code=1)


# --- places that cannot be written -----------------------------------------------------------------------------------
def test_destinations_are_tried_before_the_work(tmp_path: Path, cpu_plan: Path, text: Path) -> None:
    """As root permissions do not bind, so a file where a folder should be stands for a place without access."""
    (tmp_path / "file").write_text("")
    for bad, problem in ((tmp_path / "file" / "out", "not a folder"), (tmp_path, "is a folder")):
        assert problem in as_json("plan", *PLAN, "-o", str(bad), code=2)["error"]
        assert problem in as_json("plan", *PLAN, "--trace", str(bad), code=2)["error"]
        assert problem in refused("simulate", str(cpu_plan), "--trace", str(bad))
        assert problem in refused("calibrate", "-o", str(bad))
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "thesis.txt").write_text("precious")
    assert "not an empty folder" in refused("demo", "-o", str(tmp_path / "used"))
    run = ["run", str(cpu_plan), "-d", str(text), "-n", "1"]
    assert "not an empty folder" in refused(*run, "-o", str(tmp_path / "used"))
    assert "not a folder" in refused(*run, "-o", str(tmp_path / "file" / "out"))
    assert "not a folder" in refused("export", str(cpu_plan), "-o", str(tmp_path / "file"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "text.txt", "used"]


def limited(size: int, *args: str) -> subprocess.CompletedProcess[str]:
    """A command that cannot write files of more than ``size`` bytes, as on a drive that is full."""
    return subprocess.run(
        [sys.executable, "-m", "lazytrain", *args], capture_output=True, text=True, timeout=300,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size)),
    )  # fmt: skip


def test_a_plan_that_cannot_be_written_is_not_printed(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text("the plan before")
    found = limited(1000, "plan", *PLAN, "-o", str(path), "--json")
    assert found.returncode == 2
    assert "cannot be written" in json.loads(found.stdout)["error"]
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]
    assert path.read_text() == "the plan before"


def test_an_export_that_cannot_be_written_leaves_the_old_one(cpu_plan: Path, tmp_path: Path) -> None:
    folder = tmp_path / "export"
    as_json("export", str(cpu_plan), "-o", str(folder))
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    found = limited(3000, "export", str(cpu_plan), "-o", str(folder))
    assert found.returncode == 2
    assert "cannot be written" in found.stderr
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before
    assert [p.name for p in tmp_path.iterdir()] == ["export"]


def test_weights_that_cannot_be_saved_fail_the_run(
    cpu_plan: Path, cpu_machine: Path, text: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    found = limited(
        200_000, "run", str(cpu_plan), "-d", str(text), "-n", "2", "-o", str(folder), "--machine", str(cpu_machine),
        "--force", "--json",
    )  # fmt: skip
    assert found.returncode == 2
    assert "weights cannot be saved" in json.loads(found.stdout)["error"]
    assert json.loads((folder / "run.json").read_text())["status"] == "failed"
    assert list((folder / "model").iterdir()) == []
    assert "failed after 2 steps" in refused("report", str(folder), code=1)


# --- what a run starts from ------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def finished(cpu_plan: Path, cpu_machine: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    (folder / "text.txt").write_text("All work and no play makes a dull boy. " * 200)
    as_json("export", str(cpu_plan), "-o", str(folder / "export"))
    as_json(
        "run", str(folder / "export"), "-d", str(folder / "text.txt"), "-n", "2", "-o", str(folder / "run"),
        "--machine", str(cpu_machine), "--force",
    )  # fmt: skip
    return folder


def test_weights_of_the_planned_folder_are_taken_and_named(finished: Path, cpu_machine: Path, tmp_path: Path) -> None:
    """A plan made from a model's folder trains that model, not a fresh one."""
    model, plan = finished / "run" / "model", tmp_path / "plan.json"
    job = ["-H", str(cpu_machine), "-b", "4", "-s", "32", "-M", "2", "-o", str(plan)]
    found = lazytrain("plan", "-m", "model", *job, cwd=model.parent)
    assert found.returncode == 0, found.stderr
    assert json.loads(plan.read_text())["model"] == str(model), "a relative name must hold from anywhere"
    rest = ["-d", str(finished / "text.txt"), "-n", "1", "--machine", str(cpu_machine), "--force"]
    taken = as_json("run", str(plan), *rest, "-o", str(tmp_path / "taken"))
    assert taken["weights"] == str(model)
    fresh = as_json("run", str(plan), *rest, "-m", str(model / "config.json"), "-o", str(tmp_path / "fresh"))
    assert fresh["weights"] == "seed 0"
    assert taken["first_loss"] < fresh["first_loss"]


def test_bad_weights_leave_no_run(finished: Path, cpu_plan: Path, cpu_machine: Path, tmp_path: Path) -> None:
    model, run = tmp_path / "model", tmp_path / "run"
    model.mkdir()
    (model / "config.json").write_bytes((finished / "run" / "model" / "config.json").read_bytes())
    args = [
        "run", str(cpu_plan), "-d", str(finished / "text.txt"), "-n", "1", "-o", str(run), "--machine",
        str(cpu_machine), "--force", "-m", str(model),
    ]  # fmt: skip
    assert "no *.safetensors" in refused_here(*args)
    state = load_file(finished / "run" / "model" / "model.safetensors")
    for problem, changed in {
        "tensors are missing": {k: v for k, v in state.items() if "embed" not in k},
        "has shape": {k: v[:-1].clone() if "embed" in k else v for k, v in state.items()},
        "is int8": {k: v.to(torch.int8) if "embed" in k else v for k, v in state.items()},
    }.items():
        save_file(changed, model / "model.safetensors")
        assert problem in refused_here(*args)
        assert not run.exists()
    (model / "model.safetensors").write_bytes(b"torn")
    assert "model.safetensors" in refused_here(*args)
    assert not run.exists()


def test_bad_settings_of_a_run(cpu_plan: Path, text: Path, tmp_path: Path) -> None:
    args = ["run", str(cpu_plan), "-d", str(text), "-o", str(tmp_path / "run")]
    for more in (["-n", "0"], ["-n", "1", "--lr", "nan"], ["-n", "1", "--weight-decay", "-1"]):
        assert more[-2].replace("-n", "--steps") in refused_here(*args, *more)
    assert "tokenizer" in refused_here(*args, "-n", "1", "--tokenizer", str(tmp_path / "absent"))
    args[3] = str(tmp_path)
    assert "Is a directory" in refused_here(*args, "-n", "1")


def test_a_program_that_is_not_the_plans_is_refused_here(finished: Path, cpu_machine: Path, tmp_path: Path) -> None:
    """Two operations swapped would hang the executor; the verdict was never about them."""
    export = tmp_path / "export"
    export.mkdir()
    for file in (finished / "export").iterdir():
        (export / file.name).write_bytes(file.read_bytes())
    program = json.loads((export / "program.json").read_text())
    program["ops"][0], program["ops"][-1] = program["ops"][-1], program["ops"][0]
    (export / "program.json").write_text(json.dumps(program))
    args = ["-d", str(finished / "text.txt"), "-n", "1", "-o", str(tmp_path / "run"), "--machine", str(cpu_machine)]
    assert "not the program of the plan" in refused_here("run", str(export), *args, "--force")
    assert not (tmp_path / "run").exists()


# --- damaged files ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("file", "content", "problem"),
    [
        ("run.json", None, "cannot be read"),
        ("run.json", "[", "run.json:1: not a run's record"),
        ("run.json", "[]", "run.json"),
        ("run.json", "{}", "status: Field required"),
        ("intervals.json", "{}", "was not recorded"),
        ("intervals.json", '{"0": 5}', "intervals.json: 0"),
        ("intervals.json", '{"0": [[0, "x", 1]]}', "intervals.json: 0.0.1"),
        ("plan.json", "{}", "no 'version'"),
        ("program.json", '{"version": 1}', "not a step program"),
    ],
)
def test_damaged_runs(finished: Path, tmp_path: Path, file: str, content: str | None, problem: str) -> None:
    for name in ("run.json", "plan.json", "program.json", "intervals.json"):
        (tmp_path / name).write_bytes((finished / "run" / name).read_bytes())
    (tmp_path / file).unlink()
    if content is not None:
        (tmp_path / file).write_text(content)
    line = refused_here("report", str(tmp_path))
    assert problem in line
    assert file in line


@pytest.mark.parametrize(
    "change", [{"peak_bytes": {}}, {"step_seconds": 0}, {"step_seconds": "nan"}, {"assumed_rates": {"h2d": -1.0}}]
)
def test_a_verdict_must_say_all(cpu_plan: Path, tmp_path: Path, change: dict[str, Any]) -> None:
    data = json.loads(cpu_plan.read_text())
    data["verdict"].update(change)
    bad = tmp_path / "bad.json"
    bad.write_text(json.dumps(data))
    line = refused_here("simulate", str(bad))
    assert "bad.json: verdict" in line
    assert next(iter(change)) in line


def test_plans_of_another_version(cpu_plan: Path, tmp_path: Path) -> None:
    data = json.loads(cpu_plan.read_text())
    for version in (True, "1", 2):
        bad = tmp_path / "bad.json"
        bad.write_text(json.dumps({**data, "version": version}))
        assert "version" in refused_here("simulate", str(bad))
    bad.write_text("[" * 100_000)
    assert "nested too deep" in refused_here("simulate", str(bad))


# --- results that say what they are ----------------------------------------------------------------------------------
def test_another_machine_gets_its_own_name_and_no_proof(cpu_plan: Path) -> None:
    found = as_json("simulate", str(cpu_plan), "-H", "h800-sxm")
    assert found["hardware"] == "h800-sxm"
    assert found["solver"]["bound"] is None
    own = as_json("simulate", str(cpu_plan))
    assert own["solver"]["bound"] > 0


def test_an_infeasible_job_says_so_where_the_solver_is_asked(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text("the plan before")
    job = ["-m", "qwen2.5-32b", "-H", "rtx-3090-desktop", "-b", "1", "-s", "512", "-o", str(path)]
    assert as_json("plan", *job, code=1)["solver"]["status"] == "infeasible"
    assert "left as it was" in lazytrain("plan", *job).stderr
    assert path.read_text() == "the plan before"
