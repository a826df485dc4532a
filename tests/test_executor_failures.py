"""A run that cannot go on stops at once, with its first cause, and leaves no thread behind."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lazytrain.errors import ExecutionError, InputError, RefusedError
from lazytrain.executor.capabilities import CAPABILITIES, unsupported
from lazytrain.executor.data import StepBatch
from lazytrain.executor.operations import Operations
from lazytrain.executor.run import train
from lazytrain.executor.runtime import make_runtime
from lazytrain.executor.settings import OptimizerSettings
from lazytrain.schedule.plan import LayerDecision, Style
from lazytrain.schedule.program import Kind, Op
from tests.executor_support import Case


def _workers() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("lazytrain ")]


@pytest.fixture(autouse=True)
def _nothing_left() -> Any:
    threads = torch.get_num_threads()
    yield
    assert not _workers()
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("kind", [Kind.LOAD_WEIGHTS, Kind.FORWARD, Kind.SEND_GRADIENT, Kind.UPDATE, Kind.LOAD_SAVED])
@pytest.mark.parametrize("at", [0, 2])
def test_a_failing_worker_stops_the_run(monkeypatch: pytest.MonkeyPatch, kind: Kind, at: int) -> None:
    execute = Operations.execute

    def fail(self: Operations, op: Op, step: int) -> None:
        if op.kind is kind and step == at:
            raise RuntimeError("the cable is out")
        execute(self, op, step)

    monkeypatch.setattr(Operations, "execute", fail)
    case = Case(steps=4)
    began = time.monotonic()
    with pytest.raises(ExecutionError, match=f"step {at}: {kind}.*the cable is out") as caught:
        case.run(case.plan([LayerDecision(keep_host=2)] * 3))
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert time.monotonic() - began < 20


@pytest.mark.parametrize("busy", ["waiting", "callback"])
def test_keyboard_interrupt_is_a_clean_stop(monkeypatch: pytest.MonkeyPatch, busy: str) -> None:
    case = Case(steps=10_000)
    if busy == "waiting":
        threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            case.run()
    else:

        def on_step(report: Any) -> None:
            if report.step == 2:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            case.run(on_step=on_step)


def test_errors_of_the_data_arrive_as_they_are() -> None:
    case = Case(steps=5)

    def broken() -> Iterator[StepBatch]:
        source = case.batches()
        yield next(source)
        yield next(source)
        raise InputError("line 7 is bad")

    with pytest.raises(InputError, match="line 7 is bad"):
        case.run(batches=broken())
    with pytest.raises(ExecutionError, match="data ended at step 2 of 5"):
        case.run(batches=iter([next(case.batches())] * 2))


def test_batches_are_checked() -> None:
    case = Case(steps=1)
    good = next(case.batches())
    too_high = StepBatch.of(good.input_ids.clone().fill_(case.vocab), good.labels)
    with pytest.raises(InputError, match=r"token ids 96\.\.96, the model 0\.\.95"):
        case.run(batches=iter([too_high]))
    with pytest.raises(InputError, match="no token to learn from"):
        case.run(batches=iter([StepBatch.of(good.input_ids, torch.full_like(good.labels, -100))]))
    with pytest.raises(InputError, match="shape"):
        case.run(batches=iter([StepBatch.of(good.input_ids[:, :2], good.labels[:, :2])]))


def _break_gradients(monkeypatch: pytest.MonkeyPatch, bad_steps: set[int]) -> None:
    execute = Operations.execute

    def spoil(self: Operations, op: Op, step: int) -> None:
        execute(self, op, step)
        if op.kind is Kind.SEND_GRADIENT and op.unit == 2 and step in bad_steps:
            self.store.units[2].parked[5] = math.inf

    monkeypatch.setattr(Operations, "execute", spoil)


def test_a_step_that_is_not_finite_is_skipped_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the batch had not been there: weights, moments and AdamW's step count stay."""
    case = Case(steps=3)
    _break_gradients(monkeypatch, {1})
    result = case.run()
    assert [s.skipped for s in result.steps] == [False, True, False]
    assert result.skipped == 1
    assert result.store is not None
    assert result.store.applied_updates == 2
    monkeypatch.undo()
    batches = case.batches()
    kept = [next(batches) for _ in range(3)]
    case.steps = 2
    without = case.run(batches=iter([kept[0], kept[2]]))
    assert without.losses == [result.losses[0], result.losses[2]]
    assert all(torch.equal(result.weights()[n], w) for n, w in without.weights().items())


def test_three_such_steps_in_a_row_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(steps=9)
    _break_gradients(monkeypatch, {1, 2, 4, 5, 6})
    seen: list[int] = []
    with pytest.raises(ExecutionError, match="step 6: the gradient was not finite in 3 steps in a row"):
        case.run(on_step=lambda report: seen.append(report.step))
    assert seen == [0, 1, 2, 3, 4, 5]


def test_plans_beyond_the_executor_are_refused() -> None:
    case = Case()
    kept = LayerDecision(keep_gpu=2)
    nvme = case.plan([kept, LayerDecision(keep_nvme=1, boundary_nvme=1), kept])
    assert len(unsupported(nvme)) == 2
    assert "layers 1: action keep_nvme" in unsupported(nvme)[0]
    with pytest.raises(RefusedError, match="keep_nvme"):
        case.run(nvme)
    assert unsupported(case.plan(style=Style(keep_all_logits=True))) != []
    assert unsupported(case.plan(style=Style(master_dtype="bf16"))) == ["master weights in bf16"]
    assert unsupported(case.plan()) == []
    assert "nvme" not in CAPABILITIES["homes"]


def test_capabilities_import_no_torch() -> None:
    import subprocess
    import sys

    code = "import sys, lazytrain.executor.capabilities; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_foreign_program_and_state_are_refused() -> None:
    case, other = Case(), Case(layers=2)
    with pytest.raises(InputError, match="not of this plan and model"):
        train(case.plan(), case.program(case.plan()), other.architecture, case.batches(), 1)
    state = case.state()
    state.pop("model.norm.weight")
    with pytest.raises(InputError, match=r"1 tensors are missing, for example model\.norm\.weight"):
        case.run(initial_state=state)
    with pytest.raises(InputError, match="has no other"):
        case.run(initial_state={**case.state(), "other": torch.zeros(1)})
    with pytest.raises(InputError, match="has shape"):
        case.run(initial_state={**case.state(), "model.norm.weight": torch.zeros(1)})


def test_devices_and_settings() -> None:
    with pytest.raises(InputError, match="runs on cpu or cuda"):
        make_runtime("mps")
    if not torch.cuda.is_available():
        with pytest.raises(InputError, match="finds no CUDA GPU"):
            make_runtime("cuda")
    for wrong in ({"lr": -1.0}, {"beta1": 1.0}, {"eps": 0.0}, {"weight_decay": -0.1}, {"lr": math.nan}):
        with pytest.raises(InputError):
            OptimizerSettings(**wrong)
