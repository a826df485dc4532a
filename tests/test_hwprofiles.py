"""Profiles: shipped data, what malformed files say, tables, overrides, saving."""

from __future__ import annotations

import copy
import datetime
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from lazytrain.errors import InputError, ProfileError
from lazytrain.hwprofiles import (
    Machine,
    Quantity,
    RateTable,
    dump_machine,
    list_machines,
    list_parts,
    load_gpu,
    load_host,
    load_link,
    load_machine,
    load_nvme,
    save_machine,
)
from lazytrain.hwprofiles.quantity import parse_si
from lazytrain.hwprofiles.schema import Frozen

TODAY = datetime.date(2026, 12, 1)
PART_LOADERS = {"gpu": load_gpu, "link": load_link, "host": load_host, "nvme": load_nvme}
PARTS = [(kind, name) for kind in PART_LOADERS for name in list_parts(kind)]


def numbers(value: Any) -> list[Quantity | RateTable]:
    """Every number with provenance inside a model."""
    if isinstance(value, Quantity | RateTable):
        return [value]
    if isinstance(value, Frozen):
        return [n for _, field in value for n in numbers(field)]
    if isinstance(value, dict):
        return [n for field in value.values() for n in numbers(field)]
    return []


@pytest.fixture
def data() -> dict[str, Any]:
    """A whole machine as plain data, to be damaged."""
    loaded = yaml.safe_load(dump_machine(load_machine("rtx-3090-desktop")))
    return copy.deepcopy(loaded)


def write(tmp_path: Path, content: Any, name: str = "mine.yaml") -> Path:
    path = tmp_path / name
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content, sort_keys=False))
    return path


def refused(path: Path) -> str:
    """The message with which loading fails: one line that names the file."""
    with pytest.raises(ProfileError) as caught:
        load_machine(path)
    message = str(caught.value)
    assert "\n" not in message
    assert path.name in message
    return message


# --- shipped data ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("kind", "name"), PARTS, ids=lambda value: value)
def test_every_part_loads_and_every_number_has_provenance(kind: str, name: str) -> None:
    part = PART_LOADERS[kind](name)
    found = numbers(part)
    assert len(found) >= 4
    for number in found:
        assert number.kind in ("datasheet", "published", "assumed")  # nothing here was measured by us
        assert len(number.source) > 10
        assert number.date <= TODAY


@pytest.mark.parametrize("name", list_machines())
def test_every_machine_loads_and_survives_a_round_trip(name: str, tmp_path: Path) -> None:
    machine = load_machine(name)
    assert machine.name == name
    assert machine.description
    assert 0 < machine.usable_gpu_bytes < machine.gpu.memory.si
    assert 0 < machine.pin_limit_bytes <= machine.usable_host_bytes < machine.host.memory.si
    save_machine(machine, tmp_path / "copy.yaml")
    again = load_machine(tmp_path / "copy.yaml")
    assert again == machine
    assert again.digest() == machine.digest()
    assert [p.name for p in tmp_path.iterdir()] == ["copy.yaml"]


def test_the_machines_people_ask_for_exist() -> None:
    wanted = {"h800-sxm", "h800-lazytrain-paper", "rtx-3090-desktop", "rtx-3090-server", "rtx-4090-desktop", "h200-sxm"}
    assert wanted <= set(list_machines())
    assert {"h800-pcie", "h100-sxm", "gh200", "a100-80", "rtx-5060-ti-16gb", "mi355x"} <= set(list_parts("gpu"))


def test_digests_tell_machines_apart() -> None:
    digests = [load_machine(name).digest() for name in list_machines()]
    assert len(set(digests)) == len(digests)


def test_paper_machine_has_the_papers_numbers() -> None:
    machine = load_machine("h800-lazytrain-paper")
    assert float(machine.link.h2d) == float(machine.link.d2h) == 12e9
    assert float(machine.host.memory) == 2 * 2**40
    assert machine.host.adamw["fp32"].kind == "published"
    assert float(machine.host.adamw["fp32"]) == pytest.approx(2.3e9)
    assert machine.nvme is not None
    assert (float(machine.nvme.read), float(machine.nvme.write)) == (2.83e9, 3.35e9)
    assert machine.nvme.drives == 2
    assert float(machine.gpu.memory) == 81559 * 2**20


def test_slot_of_a_3090_board() -> None:
    """Field case B9: a streamed 7B in bf16 moves 42 GB a step; the same reported link gives 3.2 or 6.5 s."""
    seconds = [42e9 / float(load_link(name).h2d) for name in ("pcie4-x16", "pcie4-x8", "pcie4-x8-chipset")]
    assert seconds == pytest.approx([1.6, 3.2, 6.5], rel=0.06)


def test_linear_attention_kernels_follow_the_device() -> None:
    assert load_gpu("h200-sxm").linear_attention_backend == "fla"
    assert load_gpu("mi355x").linear_attention_backend == "torch"


# --- numbers -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "dimension", "si"),
    [
        ("24 GiB", "bytes", 24 * 2**30),
        ("600 TBW", "bytes", 6e14),
        ("12 GB/s", "byte_rate", 12e9),
        ("80 us", "time", 8e-5),
        ("2.3 Gparams/s", "param_rate", 2.3e9),
        ("95 %", "fraction", 0.95),
        ("1.6 x", "ratio", 1.6),
        ("71.2 TFLOPS", "flop_rate", 71.2e12),
        ("3.6 USD/h", "money_rate", 1e-3),
        ("34 GFLOP", "flop", 34e9),
    ],
)
def test_texts_become_si(text: str, dimension: str, si: float) -> None:
    assert parse_si(text, dimension) == pytest.approx(si)
    quantity = Quantity.of(text, dimension, kind="assumed", source="a test", date=TODAY)
    assert float(quantity) == pytest.approx(si)
    assert str(quantity) == text


@pytest.mark.parametrize(
    ("text", "dimension"),
    [
        ("24", "bytes"),
        ("24 GB/s", "bytes"),
        ("nan GiB", "bytes"),
        ("inf GiB", "bytes"),
        ("-1 GiB", "bytes"),
        ("0 GiB", "bytes"),
        ("24 GiBs", "bytes"),
        ("much", "bytes"),
        (24, "bytes"),
        (None, "bytes"),
        ("101 %", "fraction"),
        ("2.1 x", "ratio"),
        ("0.9 x", "ratio"),
        ("1.5", "ratio"),
        ("1e400 GiB", "bytes"),
    ],
)
def test_bad_texts_are_refused(text: Any, dimension: str) -> None:
    with pytest.raises(ValueError, match=re.escape(str(text))):
        parse_si(text, dimension)


def table(*points: tuple[str, str]) -> RateTable:
    return RateTable.of(list(points), "fraction", kind="assumed", source="a test", date=TODAY)


def test_tables_interpolate_in_the_logarithm_of_the_size() -> None:
    rates = table(("1 GFLOP", "20 %"), ("100 GFLOP", "60 %"), ("1 TFLOP", "70 %"))
    assert rates.at(1e9) == pytest.approx(0.2)
    assert rates.at(10e9) == pytest.approx(0.4)
    assert rates.at(100e9) == pytest.approx(0.6)
    assert rates.at(10**11.5) == pytest.approx(0.65)
    assert rates.at(1e12) == pytest.approx(0.7)
    samples = [rates.at(10 ** (8 + i / 20)) for i in range(100)]
    assert samples == sorted(samples)


def test_tables_are_clamped_at_both_ends() -> None:
    rates = table(("1 GFLOP", "20 %"), ("100 GFLOP", "60 %"))
    assert [rates.at(size) for size in (0, 1.0, 1e8)] == [0.2] * 3
    assert [rates.at(size) for size in (1e12, float("inf"))] == [0.6] * 2
    assert table(("1 GFLOP", "30 %")).at(5e9) == 0.3


# --- malformed files ---------------------------------------------------------------------------------------------
GOOD = {"value": "25 GB/s", "kind": "assumed", "source": "a test", "date": TODAY}


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("link.h2d", {**GOOD, "value": "25"}, "no unit"),
        ("link.h2d", {**GOOD, "value": 25}, "no unit"),
        ("link.h2d", {**GOOD, "value": "25 GiB"}, "expected byte rate"),
        ("link.h2d", {**GOOD, "value": "nan GB/s"}, "finite"),
        ("link.h2d", {**GOOD, "value": ".inf"}, "number"),
        ("link.h2d", {**GOOD, "value": "-25 GB/s"}, "positive"),
        ("link.h2d", {**GOOD, "value": "0 GB/s"}, "positive"),
        ("link.h2d", {**GOOD, "value": "25 parsecs"}, "unknown unit"),
        ("link.h2d", "25 GB/s", "provenance"),
        ("link.h2d", 25, "provenance"),
        ("link.h2d", {"kind": "assumed"}, "value"),
        ("link.h2d.kind", "guessed", "assumed"),
        ("link.h2d.source", "", "at least"),
        ("link.h2d.date", "yesterday", "date"),
        ("link.h2d.error", 1, "unknown field"),
        ("link.h2d.si", 1.0, "unknown field"),
        ("link.h2d.spread", -0.1, "greater than 0"),
        ("link.h2dd", GOOD, "did you mean h2d"),
        ("link.duplex", {**GOOD, "value": "2.5 x"}, "between 1 and 2"),
        ("link.duplex", {**GOOD, "value": "160 %"}, "ratio"),
        ("gpu.memory_efficiency", {**GOOD, "value": "120 %"}, "between 0 and 1"),
        ("gpu.peak_flops.bf17", {**GOOD, "value": "1 TFLOPS"}, "bf16"),
        ("gpu.peak_flops.bf16.value", "71", "no unit"),
        ("gpu.peak_flops", {}, "names no dtype"),
        ("gpu.device", "abacus", "cuda"),
        ("gpu.compute_threads", 4, "device cpu"),
        ("gpu.reserved.value", "30 GiB", "leaves nothing"),
        ("gpu.matmul_efficiency.points", [], "at least one point"),
        ("gpu.matmul_efficiency.points", [{"size": "1 GFLOP", "value": "130 %"}], "points[0]"),
        ("gpu.matmul_efficiency.points", [{"size": "1 GFLOP"}], "points[0]"),
        (
            "gpu.matmul_efficiency.points",
            [{"size": "2 GFLOP", "value": "30 %"}, {"size": "1 GFLOP", "value": "40 %"}],
            "must rise",
        ),
        ("gpu.matmul_efficiency", 0.5, "table"),
        (
            "gpu.layer_rate_forward",
            {
                "bf16": {k: GOOD[k] for k in ("kind", "source", "date")}
                | {"points": [{"size": "1 GFLOP", "value": "1 TFLOPS"}]}
            },
            "come together",
        ),
        ("host.baseline.value", "200 GiB", "leaves nothing"),
        ("host.pin_limit", {**GOOD, "value": "200 GiB"}, "above memory"),
        ("host.adamw.fp32.value", "1 GB/s", "expected param rate"),
        ("host.numa_nodes", 0, "greater than 0"),
        ("host.adamw", {}, "adamw.fp32 is missing"),
        ("link.name", "", "at least 1 character"),
        ("nvme.sustained_write.value", "6.5 GB/s", "above write"),
        ("nvme.read.value", "22 GB/s", "page cache"),
        ("nvme.drives", "two", "integer"),
        ("link", "pcie9-x99", "no link profile"),
        ("link", 3, "neither"),
        ("voltage", GOOD, "unknown field"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_bad_field_is_named(data: dict[str, Any], tmp_path: Path, field: str, value: Any, says: str) -> None:
    *parents, last = field.split(".")
    place = data
    for step in parents:
        place = place[step]
    place[last] = value
    message = refused(write(tmp_path, data))
    assert says in message
    assert field.split(".")[0] in message
    if "points" not in field and says not in (
        "come together",
        "names no dtype",
        "leaves nothing",
        "adamw.fp32 is missing",
        "above memory",
        "above write",
        "page cache",
        "device cpu",
    ):
        assert ".".join(field.split(".")[:2]) in message


@pytest.mark.parametrize(
    "field",
    [
        "gpu",
        "link",
        "host",
        "gpu.memory",
        "gpu.peak_flops",
        "link.h2d",
        "host.adamw",
        "nvme.read",
        "link.h2d.kind",
        "link.h2d.source",
        "link.h2d.date",
    ],
)
def test_a_missing_field_is_named(data: dict[str, Any], tmp_path: Path, field: str) -> None:
    *parents, last = field.split(".")
    place = data
    for step in parents:
        place = place[step]
    del place[last]
    assert re.search(rf"{re.escape(field)}: is missing", refused(write(tmp_path, data)))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("gpu: [", "not a YAML file"),
        ("- a\n- b\n", "not a mapping"),
        ("", "not a mapping"),
        ("gpu: \x07", "YAML"),
        ("gpu: rtx-3090\ngpu: rtx-4090\n", "given twice (line 2)"),
        ("link: {h2d: {value: '1 GB/s', value: '2 GB/s'}}\n", "'value' is given twice"),
        ("gpu: rtx-3090\nlink: pcie4-x16\nhost: desktop-ddr4-2ch\noverride: 3\n", "override"),
        (
            "gpu: rtx-3090\nlink: pcie4-x16\nhost: desktop-ddr4-2ch\noverride: {disk: {}}\n",
            "override.disk: no such part",
        ),
        ("gpu: rtx-3090\nlink: pcie4-x16\nhost: desktop-ddr4-2ch\noverride: {link: 3}\n", "override.link"),
        ("gpu: rtx-3090\nlink: pcie4-x16\nhost: desktop-ddr4-2ch\noverride: {nvme: {drives: 2}}\n", "has no nvme"),
        (
            "gpu: rtx-3090\nlink: pcie4-x16\nhost: desktop-ddr4-2ch\noverride: {link: {h3d: 3}}\n",
            "override.link.h3d: unknown field; did you mean h2d?",
        ),
        (
            "gpu: rtx-3090\nlink: pcie4-x16\nhost: desktop-ddr4-2ch\noverride: {link: {h2d: {value: 12 GB/s}}}\n",
            "override.link.h2d.kind: is missing",
        ),
    ],
)
def test_a_bad_file_is_explained(tmp_path: Path, text: str, says: str) -> None:
    assert says in refused(write(tmp_path, text))


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_bytes(b"\xff\xfe\x00gpu")
    assert "not a YAML file" in refused(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert "no such machine file" in refused(tmp_path / "nowhere.yaml")


def test_unknown_names_list_close_ones() -> None:
    with pytest.raises(ProfileError, match=r"did you mean.*rtx-3090-desktop"):
        load_machine("rtx-3090-desktp")
    with pytest.raises(ProfileError, match=r"no gpu profile 'RTX 3090'.*rtx-3090"):
        load_gpu("RTX 3090")
    with pytest.raises(ProfileError, match=r"there are .*h200-sxm"):
        load_machine("zzz")
    with pytest.raises(ProfileError, match="no link profile"):
        load_link("../gpus/h200-sxm")
    with pytest.raises(ProfileError, match="kind of part"):
        list_parts("disk")


# --- machines ----------------------------------------------------------------------------------------------------
NAMED = """
gpu: rtx-3090
link: pcie4-x16
host: desktop-ddr4-2ch
nvme: consumer-pcie4
"""


def test_overrides_replace_single_numbers(tmp_path: Path) -> None:
    machine = load_machine(
        write(
            tmp_path,
            NAMED
            + """
override:
  gpu:
    peak_flops:
      bf16: {value: "60 TFLOPS", kind: fitted, source: "a test", date: 2026-08-01, spread: 0.1}
  link:
    h2d: {value: "6.5 GB/s", kind: measured, source: "a test", date: 2026-08-01}
  host:
    pin_limit: {value: "20 GiB", kind: measured, source: "ulimit -l", date: 2026-08-01}
    adamw:
      int8: {value: "0.5 Gparams/s", kind: measured, source: "a test", date: 2026-08-01}
""",
        )
    )
    plain = load_machine(write(tmp_path, NAMED, "plain.yaml"))
    assert machine.name == "mine"
    assert float(machine.link.h2d) == 6.5e9
    assert machine.link.d2h == plain.link.d2h
    assert float(machine.gpu.peak_flops["bf16"]) == 60e12
    assert machine.gpu.peak_flops["bf16"].spread == 0.1
    assert machine.gpu.peak_flops["fp32"] == plain.gpu.peak_flops["fp32"]
    assert set(machine.host.adamw) == {"fp32", "int8"}
    assert machine.pin_limit_bytes == 20 * 2**30
    assert plain.pin_limit_bytes == plain.usable_host_bytes
    assert machine.digest() != plain.digest()
    assert float(load_link("pcie4-x16").h2d) == 25e9


def test_a_machine_without_a_drive(tmp_path: Path) -> None:
    machine = load_machine(write(tmp_path, NAMED.replace("nvme: consumer-pcie4", "nvme: null")))
    assert machine.nvme is None
    save_machine(machine, tmp_path / "saved.yaml")
    assert load_machine(tmp_path / "saved.yaml").nvme is None


def test_the_digest_is_of_numbers_only(data: dict[str, Any], tmp_path: Path) -> None:
    original = load_machine("rtx-3090-desktop")
    data["name"], data["description"], data["gpu"]["vendor"] = "other", "other", "other"
    data["link"]["h2d"] |= {"source": "somewhere else", "kind": "measured", "value": "25000 MB/s"}
    assert load_machine(write(tmp_path, data)).digest() == original.digest()
    data["nvme"]["drives"] = 2
    assert load_machine(write(tmp_path, data, "two.yaml")).digest() != original.digest()


def test_a_file_changed_on_disk_is_read_again(data: dict[str, Any], tmp_path: Path) -> None:
    path = write(tmp_path, data)
    first = load_machine(path)
    assert load_machine(str(path)) is first
    data["link"]["h2d"]["value"] = "7.25 GB/s"
    write(tmp_path, data)
    os.utime(path, ns=(1, 1))
    assert float(load_machine(path).link.h2d) == 7.25e9


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "machine.yaml"
    save_machine(load_machine("gh200"), path)
    before = path.read_text()

    def fail(*_: object) -> None:
        raise OSError("no")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(InputError, match="cannot be written: no"):
        save_machine(load_machine("h200-sxm"), path)
    assert path.read_text() == before
    assert list(tmp_path.iterdir()) == [path]


def test_profiles_cannot_be_changed() -> None:
    machine = load_machine("gh200")
    with pytest.raises(ValueError, match="frozen"):
        machine.name = "other"
    with pytest.raises(ValueError, match="frozen"):
        machine.link.h2d.si = 1.0


def test_a_quantity_of_another_dimension_does_not_fit() -> None:
    machine = load_machine("gh200")
    wrong = {
        "name": "x",
        "h2d": machine.gpu.memory,
        **{f: getattr(machine.link, f) for f in ("d2h", "duplex", "pageable", "latency")},
    }
    with pytest.raises(ValueError, match="expected byte rate"):
        type(machine.link).model_validate(wrong)


def test_machines_can_be_built_in_code() -> None:
    parts = load_machine("gh200")
    machine = Machine(name="built", gpu=parts.gpu, link=parts.link, host=parts.host)
    assert machine.nvme is None
    assert machine.digest() != parts.digest()


def test_importing_profiles_does_not_import_torch() -> None:
    code = "import sys, lazytrain.hwprofiles as h; h.load_machine('h200-sxm'); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
