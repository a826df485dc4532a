"""Each command end to end, in processes of their own: output, files, exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lazytrain.hwprofiles import save_machine
from tests import builders
from tests.cli_support import PLAN, as_json, lazytrain, refused


def test_models_and_hardware() -> None:
    names = {m["name"] for m in as_json("models")["models"]}
    assert {"qwen3.6-27b", "qwen2.5-7b", "tiny-qwen3"} <= names
    assert "h800-sxm" in {m["name"] for m in as_json("hardware")["machines"]}
    assert "datasheet" in lazytrain("hardware", "rtx-3090-desktop").stdout
    assert "flash" in lazytrain("models", "qwen2.5-7b").stdout


def test_plan_simulate_export(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    planned = as_json("plan", *PLAN, "-o", str(path), "--trace", str(tmp_path / "trace.json"))
    assert planned["feasible"] is True
    assert planned["violations"] == []
    assert set(planned["peak_bytes"]) == {"gpu", "host", "pinned", "nvme"}
    assert set(planned["solver"]) >= {"status", "objective", "bound", "gap", "seconds"}
    assert planned["tokens_per_second"] == pytest.approx(4 * 64 / planned["step_seconds"])
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]

    again = as_json("simulate", str(path))
    assert again["step_seconds"] == pytest.approx(planned["step_seconds"])
    elsewhere = as_json("simulate", str(path), "--hardware", "h800-sxm")
    assert elsewhere["step_seconds"] < again["step_seconds"]

    exported = as_json("export", str(path), "-o", str(tmp_path / "export"))
    assert sorted(p.name for p in (tmp_path / "export").iterdir()) == sorted(exported["files"])
    assert as_json("simulate", str(tmp_path / "export"))["feasible"]


def test_policies_side_by_side() -> None:
    rows = as_json("policies", *PLAN)["policies"]
    by_name = {row["policy"]: row for row in rows}
    assert {"lazytrain", "megatrain", "uniform-k"} <= set(by_name)
    for row in rows:
        assert set(row) >= {"policy", "feasible", "step_seconds", "tokens_per_second", "peak_bytes"}
    assert by_name["lazytrain"]["step_seconds"] <= by_name["uniform-k"]["step_seconds"]


def test_infeasible_job_exits_one_and_writes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    job = ["-m", "qwen2.5-32b", "-H", "rtx-3090-desktop", "-b", "1", "-s", "512", "-o", str(path)]
    found = as_json("plan", *job, code=1)
    assert found["feasible"] is False
    assert not path.exists()
    (violation,) = [v for v in found["violations"] if v["limit"] == "host memory"]
    assert violation["needed_bytes"] > violation["available_bytes"]
    assert found["advice"]
    assert "host memory: needs" in lazytrain("plan", *job).stdout
    policies = as_json("policies", *job[:-2], code=1)["policies"]
    assert all(row["step_seconds"] > 0 for row in policies), "a policy that breaks a limit still gets its time"


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        (["-m", "qwen9", "-H", "h800-sxm", "-b", "1", "-s", "64"], "qwen9"),
        (["-m", "tiny-qwen3", "-H", "h900", "-b", "1", "-s", "64"], "h900"),
        (["-m", "tiny-qwen3", "-H", "h800-sxm", "-b", "0", "-s", "64"], "--batch-size must be positive"),
        (["-m", "tiny-qwen3", "-H", "h800-sxm", "-b", "4", "-s", "64", "-M", "3"], "does not divide"),
        (["-m", "tiny-qwen3", "-H", "h800-sxm", "-b", "1", "-s", "99999999"], "seq"),
        (["-m", "tiny-qwen3", "-H", "h800-sxm", "-b", "1", "-s", "64", "--gap", "2"], "--gap"),
        (["-m", "tiny-qwen3", "-H", "h800-sxm", "-b", "1", "-s", "64", "--time-limit", "-1"], "--time-limit"),
    ],
)
def test_bad_plan_arguments(args: list[str], problem: str) -> None:
    assert problem in refused("plan", *args)


def test_bad_profiles(tmp_path: Path) -> None:
    good = tmp_path / "good.yaml"
    save_machine(builders.machine(), good)
    text = good.read_text()
    for name, old, new in (
        ("negative", "value: 25 GB/s", "value: -25 GB/s"),
        ("zero", "value: 25 GB/s", "value: 0 GB/s"),
        ("nan", "value: 25 GB/s", "value: nan GB/s"),
        ("unit", "value: 25 GB/s", "value: '25'"),
    ):
        if old not in text:
            old = next(part for part in text.split("{") if "GB/s" in part).split(",")[0]
            new = f"value: {new.split(': ')[1]}"
        bad = tmp_path / f"{name}.yaml"
        bad.write_text(text.replace(old, new, 1))
        line = refused("plan", "-m", "tiny-qwen3", "-H", str(bad), "-b", "1", "-s", "64")
        assert bad.name in line
    (tmp_path / "torn.yaml").write_text(text[: len(text) // 3])
    assert "torn.yaml" in refused("hardware", str(tmp_path / "torn.yaml"))


def test_bad_plan_files(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    as_json("plan", *PLAN, "-o", str(path))
    data = json.loads(path.read_text())

    def variant(name: str, **changes: Any) -> str:
        other = tmp_path / f"{name}.json"
        other.write_text(json.dumps({**data, **changes}))
        return str(other)

    assert "another model" in refused("simulate", variant("model", model_digest="0" * 16))
    assert "has changed since the plan" in refused("simulate", variant("hardware", hardware_digest="0" * 16))
    assert "version 99" in refused("simulate", variant("version", version=99))
    torn = tmp_path / "torn.json"
    torn.write_text(path.read_text()[:300])
    assert "truncated" in refused("simulate", str(torn))
    assert "no passed verdict" in refused(
        "export", variant("unjudged", verdict=None), "-o", str(tmp_path / "x"), code=1
    )
    failed = {**data["verdict"], "feasible": False}
    assert "no passed verdict" in refused(
        "export", variant("failed", verdict=failed), "-o", str(tmp_path / "x"), code=1
    )
    assert not (tmp_path / "x").exists()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    assert "other things" in refused("export", str(path), "-o", str(tmp_path / "mine"))
    (tmp_path / "mine" / "program.json").write_text("{}")  # as a run's folder has beside its weights
    assert "other things" in refused("export", str(path), "-o", str(tmp_path / "mine"))
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "precious"


def test_json_error_is_one_object() -> None:
    found = lazytrain("plan", "-m", "nope", "-H", "h800-sxm", "-b", "1", "-s", "64", "--json")
    assert found.returncode == 2
    assert json.loads(found.stdout)["exit_code"] == 2


def test_calibrate_writes_a_profile(cpu_machine: Path) -> None:
    shown = as_json("hardware", str(cpu_machine))["machines"][0]
    assert shown["gpu"]["device"] in ("cpu", "cuda")


def test_run_and_report(cpu_plan: Path, cpu_machine: Path, text: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    summary = as_json(
        "run", str(cpu_plan), "--data", str(text), "--steps", "4", "-o", str(folder), "--machine", str(cpu_machine),
        "--lr", "1e-3", "--force",
    )  # fmt: skip
    assert summary["status"] == "finished"
    assert summary["steps"] == 4
    assert summary["last_loss"] < summary["first_loss"]
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 4
    assert (folder / "model" / "model.safetensors").exists()
    found = as_json("report", str(folder))
    assert found["step_seconds"]["measured"] > 0
    planned, measured = found["moved_bytes"]["planned"], found["moved_bytes"]["measured"]
    for resource in ("h2d", "d2h"):
        assert measured[resource] == pytest.approx(planned[resource], rel=0.02)
    assert "whole step" in lazytrain("report", str(folder)).stdout
    assert "not an empty folder" in refused(
        "run", str(cpu_plan), "--data", str(text), "--steps", "1", "-o", str(folder), "--machine", str(cpu_machine)
    )

    more = tmp_path / "more"  # the weights of a run start another
    again = as_json(
        "run", str(cpu_plan), "--data", str(text), "--steps", "1", "-o", str(more), "--machine", str(cpu_machine),
        "--model", str(folder / "model"), "--force",
    )  # fmt: skip
    assert again["first_loss"] < summary["first_loss"]


def test_run_refuses_what_its_verdict_does_not_cover(
    cpu_plan: Path, cpu_machine: Path, text: Path, tmp_path: Path
) -> None:
    data = json.loads(cpu_plan.read_text())
    data["verdict"]["assumed_rates"]["h2d"] = 1e15
    fast = tmp_path / "fast.json"
    fast.write_text(json.dumps(data))
    args = ["--data", str(text), "--steps", "1", "-o", str(tmp_path / "run"), "--machine", str(cpu_machine)]
    line = refused("run", str(fast), *args, code=1)
    assert "h2d: measured" in line
    assert "--force" in line
    data["verdict"]["peak_bytes"]["host"] = 1e15
    fast.write_text(json.dumps(data))
    assert "host memory: the plan needs" in refused("run", str(fast), *args, code=1)
    assert not (tmp_path / "run").exists()


def test_run_names_bad_data(cpu_plan: Path, cpu_machine: Path, tmp_path: Path) -> None:
    args = ["--steps", "1", "-o", str(tmp_path / "run"), "--machine", str(cpu_machine), "--force"]
    (tmp_path / "empty.txt").write_text("")
    assert "empty" in refused("run", str(cpu_plan), "--data", str(tmp_path / "empty.txt"), *args)
    (tmp_path / "bad.jsonl").write_text('{"text": "fine"}\n{"text": broken}\n')
    assert "bad.jsonl:2" in refused("run", str(cpu_plan), "--data", str(tmp_path / "bad.jsonl"), *args)
    assert "No such file" in refused("run", str(cpu_plan), "--data", str(tmp_path / "absent"), *args)
    assert not (tmp_path / "run").exists()


def test_demo_goes_all_the_way_round(tmp_path: Path) -> None:
    found = as_json("demo", "--steps", "2", "-o", str(tmp_path / "run"))
    assert found["plan"]["feasible"]
    actions = {
        a for layer in json.loads((tmp_path / "run" / "plan.json").read_text())["layers"] for a, n in layer.items() if n
    }
    assert len(actions) >= 2, "the memory limits must force a choice"
    assert {row["policy"] for row in found["policies"]} >= {"lazytrain", "megatrain", "uniform-k"}
    report = found["report"]
    assert report["run"]["steps"] == 2
    assert report["step_seconds"]["measured"] > 0
    assert report["peak_bytes"]["measured"] > 0
