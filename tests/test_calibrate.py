"""Calibration: probes against fakes with known answers, refusals, and a whole run on this machine."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest

from lazytrain.errors import InputError
from lazytrain.hwprofiles import calibrate as calibration
from lazytrain.hwprofiles import load_machine, probes_disk, probes_memory, probes_system, probes_timing, save_machine
from lazytrain.hwprofiles.calibrate import calibrate
from lazytrain.hwprofiles.probes_disk import BLOCK, DirectFile, ProbeRefused, check_plausible, measure_disk

torch = pytest.importorskip("torch")


class FakeClock:
    """Time that moves only when a fake drive works."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class FakeFile:
    """A drive with a write cache: block i costs BLOCK over the rate of its place."""

    def __init__(self, clock: FakeClock, write: Callable[[int], float], read: float, direct: bool = True):
        self.clock, self.write_rate, self.read_rate, self.direct, self.closed = clock, write, read, direct, False

    def write(self, index: int) -> None:
        self.clock.now += BLOCK / self.write_rate(index)

    def read(self, index: int) -> None:
        self.clock.now += BLOCK / self.read_rate

    def read_small(self, index: int) -> None:
        self.clock.now += 80e-6

    def finish(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def roomy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes_disk, "_free_bytes", lambda directory: 1e12)
    monkeypatch.setattr(probes_disk, "file_system", lambda directory: "ext4")


def measured(
    tmp_path: Path, file: FakeFile, clock: FakeClock, *, quick: bool, copy: float = 20e9
) -> probes_disk.DiskRates:
    return measure_disk(tmp_path, quick=quick, memory_copy_rate=copy, open_file=lambda _: file, clock=clock, depth=1)


# --- drive -------------------------------------------------------------------------------------------------------
@pytest.mark.usefixtures("roomy")
def test_rates_of_a_steady_drive(tmp_path: Path) -> None:
    clock = FakeClock()
    file = FakeFile(clock, lambda i: 3e9, 5e9)
    rates = measured(tmp_path, file, clock, quick=True)
    assert rates.read == pytest.approx(5e9)
    assert [rates.write, rates.sustained_write] == pytest.approx([3e9, 3e9])
    assert rates.latency == pytest.approx(80e-6)
    assert rates.capacity == 1e12
    assert "O_DIRECT" in rates.source
    assert "slowest quarter" in rates.sustained_source
    assert file.closed


@pytest.mark.usefixtures("roomy")
def test_sustained_write_is_what_remains_after_the_cache(tmp_path: Path) -> None:
    clock = FakeClock()
    cliff = (2 << 30) // BLOCK
    rates = measured(tmp_path, FakeFile(clock, lambda i: 5e9 if i < cliff else 0.5e9, 7e9), clock, quick=False)
    assert rates.write == pytest.approx(5e9)
    assert rates.sustained_write == pytest.approx(0.5e9)
    assert "window of 256 MiB" in rates.sustained_source


@pytest.mark.usefixtures("roomy")
def test_a_slow_drive_is_not_written_for_ever(tmp_path: Path) -> None:
    clock = FakeClock()
    rates = measured(tmp_path, FakeFile(clock, lambda i: 10e6, 1e9), clock, quick=False)
    assert rates.write == pytest.approx(10e6)
    assert clock.now < 2 * probes_disk.WRITE_LIMIT_S


@pytest.mark.usefixtures("roomy")
@pytest.mark.parametrize(
    ("write", "read", "copy", "says"),
    [
        (3e9, 23e9, 100e9, "read measured 23 GB/s, more than 1 drive"),  # field case E4
        (20e9, 3e9, 100e9, "write measured 20 GB/s"),
        (3e9, 12e9, 9e9, "more than a copy in RAM reaches"),
    ],
)
def test_the_page_cache_is_refused(tmp_path: Path, write: float, read: float, copy: float, says: str) -> None:
    clock = FakeClock()
    file = FakeFile(clock, lambda i: write, read)
    with pytest.raises(ProbeRefused, match=says) as caught:
        measured(tmp_path, file, clock, quick=True, copy=copy)
    assert "page cache" in str(caught.value)
    assert file.closed


def test_two_drives_may_be_twice_as_fast(tmp_path: Path) -> None:
    check_plausible("read", 25e9, tmp_path, 100e9, drives=2)
    with pytest.raises(ProbeRefused):
        check_plausible("read", 25e9, tmp_path, 100e9, drives=1)


@pytest.mark.usefixtures("roomy")
def test_a_buffered_probe_says_so(tmp_path: Path) -> None:
    clock = FakeClock()
    rates = measured(tmp_path, FakeFile(clock, lambda i: 1e9, 1e9, direct=False), clock, quick=True)
    assert "O_DIRECT refused" in rates.source


@pytest.mark.usefixtures("roomy")
@pytest.mark.parametrize(("code", "says"), [(errno.ENOSPC, "filled up"), (errno.EIO, "probe failed")])
@pytest.mark.parametrize("depth", [1, 4])
def test_errors_of_the_drive_are_refusals(tmp_path: Path, code: int, says: str, depth: int) -> None:
    clock = FakeClock()
    file = FakeFile(clock, lambda i: 1e9, 1e9)

    def fail(index: int) -> None:
        if index == 5:
            raise OSError(code, "injected")

    file.write = fail  # type: ignore[method-assign]
    with pytest.raises(ProbeRefused, match=says):
        measure_disk(tmp_path, quick=True, memory_copy_rate=1e12, open_file=lambda _: file, clock=clock, depth=depth)
    assert file.closed


def test_a_full_drive_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes_disk, "_free_bytes", lambda directory: 100e6)
    monkeypatch.setattr(probes_disk, "file_system", lambda directory: "ext4")
    with pytest.raises(ProbeRefused, match=r"95\.37 MiB free, the probe writes 256 MiB"):
        measure_disk(tmp_path, quick=True, memory_copy_rate=1e10)


def test_a_directory_in_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes_disk, "file_system", lambda directory: "tmpfs")
    with pytest.raises(ProbeRefused, match="RAM"):
        measure_disk(tmp_path, quick=True, memory_copy_rate=1e10)


def test_file_system_of_the_kernels_own_files() -> None:
    assert probes_system.file_system(Path("/proc/self")) == "proc"


def test_the_probe_file_has_no_name(tmp_path: Path) -> None:
    file = DirectFile(tmp_path)
    assert list(tmp_path.iterdir()) == []
    for index in range(3):
        file.write(index)
    file.finish()
    file.read(2)
    file.read_small(1)
    with pytest.raises(OSError, match="short read"):
        file.read(3)
    file.close()
    assert list(tmp_path.iterdir()) == []


# --- system and timing -------------------------------------------------------------------------------------------
def fake_system(tmp_path: Path, **files: str) -> tuple[Path, Path]:
    proc, cgroup = tmp_path / "proc", tmp_path / "cgroup"
    proc.mkdir()
    cgroup.mkdir()
    (proc / "meminfo").write_text("MemTotal: 16000000 kB\nMemFree: 1 kB\nMemAvailable: 12000000 kB\n")
    for name, text in files.items():
        (cgroup / name.replace("_", ".")).write_text(text)
    return proc, cgroup


def test_ram_without_a_limit(tmp_path: Path) -> None:
    for files in ({}, {"memory_max": "max\n"}):
        folder = tmp_path / str(len(files))
        folder.mkdir()
        found = probes_system.memory(*fake_system(folder, **files))
        assert (found.limit, found.available) == (16e6 * 1024, 12e6 * 1024)


def test_ram_of_a_control_group(tmp_path: Path) -> None:
    found = probes_system.memory(
        *fake_system(
            tmp_path,
            memory_max="8000000000\n",
            memory_current="5000000000\n",
            memory_stat="anon 1\ninactive_file 2000000000\n",
        )
    )
    assert (found.limit, found.available) == (8e9, 5e9)


def test_cores_of_a_control_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes_system.os, "sched_getaffinity", lambda pid: set(range(16)))
    _, cgroup = fake_system(tmp_path, cpu_max="400000 100000\n")
    assert probes_system.core_count(cgroup) == 4
    (cgroup / "cpu.max").write_text("max 100000\n")
    assert probes_system.core_count(cgroup) == 16


def test_medians_ignore_one_slow_sample() -> None:
    clock = FakeClock()
    durations = iter([9.0, 1.0, 50.0, 1.0, 1.0, 1.0, 1.0])

    def act() -> None:
        clock.now += next(durations)

    assert probes_timing.median_seconds(act, budget_s=0.0, clock=clock) == 1.0


def test_pairs_are_timed_apart() -> None:
    clock = FakeClock()

    def move(by: float) -> None:
        clock.now += by

    assert probes_timing.median_pair(lambda: move(1.0), lambda: move(3.0), budget_s=1.0, clock=clock) == (1.0, 3.0)


def test_thread_counts_come_back() -> None:
    before = torch.get_num_threads()
    inside: list[int] = []

    def fail() -> None:
        with probes_timing.torch_threads(before + 1):
            inside.append(torch.get_num_threads())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert (inside, torch.get_num_threads()) == ([before + 1], before)


def test_no_memlock_limit_is_no_pin_limit() -> None:
    assert probes_memory.pin_limit(None) is None


def test_layer_flops_are_those_of_the_real_layer() -> None:
    """torch's counter sees a layer's products; attention on the CPU runs in a kernel it does not count."""
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import Qwen2Config
    from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RotaryEmbedding

    case = calibration.CPU_LAYERS[True][1]
    config = Qwen2Config(
        hidden_size=case.hidden,
        intermediate_size=case.intermediate,
        num_attention_heads=case.heads,
        num_key_value_heads=case.kv_heads,
        num_hidden_layers=1,
        vocab_size=16,
        attn_implementation="sdpa",
    )
    x = torch.randn(case.batch, case.seq, case.hidden)
    position = Qwen2RotaryEmbedding(config)(x, torch.arange(case.seq)[None])
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        Qwen2DecoderLayer(config, 0)(x, position_embeddings=position)
    attention = 4 * case.batch * case.seq**2 * case.hidden
    uncounted = case.forward_flops - counter.get_total_flops()
    assert uncounted in (0, attention)


# --- whole runs --------------------------------------------------------------------------------------------------
def test_a_calibrated_machine_is_a_loadable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of calibrate on the CPU with tiny sizes; the real sizes are in the slow test below."""
    for name in ("CPU_PRODUCTS", "CPU_LAYERS"):
        table = getattr(calibration, name)
        monkeypatch.setattr(calibration, name, {True: table[True][:2]})
    monkeypatch.setattr(calibration, "CPU_ATTENTION", calibration.CPU_ATTENTION[:1])
    monkeypatch.setattr(calibration, "MIB", 1 << 16)
    monkeypatch.setattr(probes_disk, "QUICK_BYTES", 4 * BLOCK)
    calls: list[tuple[str, float]] = []
    before = torch.get_num_threads()
    updates: list[int] = []

    def update(parameters: int) -> Callable[[], object]:
        return lambda: updates.append(parameters)

    machine = calibrate(
        tmp_path,
        quick=True,
        device="cpu",
        progress=lambda *call: calls.append(call),
        name="here",
        adamw_steps={"fp32": update, "int8": update},
    )
    assert torch.get_num_threads() == before
    assert list(tmp_path.iterdir()) == []
    shares = [share for _, share in calls]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert set(machine.host.adamw) == {"fp32", "int8"}
    assert updates
    assert machine.gpu.device == "cpu"
    assert machine.gpu.compute_threads == max(1, probes_system.core_count() - 1)
    assert machine.gpu.layer_rate_forward is not None
    assert machine.gpu.layer_rate_forward["fp32"].kind == "measured"
    assert torch.__version__ in machine.gpu.peak_flops["fp32"].source
    assert float(machine.gpu.memory) == pytest.approx(float(machine.host.memory) / 2, rel=1e-4)
    assert machine.nvme is not None or "no drive" in machine.description
    save_machine(machine, tmp_path / "here.yaml")
    again = load_machine(tmp_path / "here.yaml")
    assert again == machine
    assert again.digest() == machine.digest()


def test_a_refused_drive_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    writer = calibration._Writer("x", calibration.datetime.date.today())
    run = calibration._Calibration("cpu", True, lambda *_: None, {}, writer)
    parts = load_machine("gh200")
    monkeypatch.setattr(run, "_gpu", lambda share: parts.gpu)
    monkeypatch.setattr(run, "_link", lambda: (parts.link, 1e9))
    monkeypatch.setattr(run, "_host", lambda share: parts.host)

    def refuse(*_: object, **__: object) -> None:
        raise ProbeRefused("this is the page cache")

    monkeypatch.setattr(calibration, "measure_disk", refuse)
    run.load = 9.0 * run.cores
    machine = run.machine(Path("."), "here", 0.25, 0.5)
    assert machine.nvme is None
    assert "no drive: this is the page cache" in machine.description
    assert "the machine was busy" in machine.description


def test_bad_arguments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such directory"):
        calibrate(tmp_path / "nowhere")
    with pytest.raises(InputError, match="gpu_share"):
        calibrate(tmp_path, gpu_share=0.8, host_share=0.5)
    with pytest.raises(InputError, match="no device 'abacus'"):
        calibrate(tmp_path, device="abacus")


@pytest.mark.slow
def test_a_quick_calibration_of_this_machine(tmp_path: Path) -> None:
    machine = calibrate(tmp_path, quick=True, device="cpu")
    assert machine.gpu.layer_rate_backward is not None
    assert len(machine.gpu.layer_rate_backward["fp32"].points) == len(calibration.CPU_LAYERS[True])
    save_machine(machine, tmp_path / "here.yaml")
    assert load_machine(tmp_path / "here.yaml").digest() == machine.digest()
