"""What a layer's graph holds: nothing but its saved set, which really leaves the device and comes back."""

from __future__ import annotations

import itertools
import mmap
import time
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from lazytrain.errors import ExecutionError
from lazytrain.executor import operations
from lazytrain.executor.buffers import Buffers
from lazytrain.executor.emulate import emulate
from lazytrain.executor.layout import Layout
from lazytrain.executor.peak import peak_bytes, reset_peak, resident_bytes
from lazytrain.executor.saved import Box, Graph, record
from lazytrain.schedule.plan import LayerDecision
from lazytrain.schedule.program import Dep, Kind, Op, Resource, StepProgram
from lazytrain.simulator import simulate
from tests.executor_support import Case


@pytest.fixture
def layer() -> dict[str, Any]:
    """A Llama layer whose parameters are views of flat weights, and its plain gradients."""
    case = Case()
    a = case.architecture
    block = a.build_block(0, torch.float32, "cpu")
    layout = Layout(a.parameter_shapes(0))
    weights, accumulator = torch.randn(layout.size) * 0.1, torch.zeros(layout.size)
    leaves = [torch.nn.Parameter(v) for v in layout.views(weights)]
    for place, leaf in zip(layout.places, leaves, strict=True):
        owner, _, name = place.local.rpartition(".")
        block.get_submodule(owner)._parameters[name] = leaf
    context = a.context(2, 12, "cpu", torch.float32)
    x, gradient = torch.randn(2, 12, 32), torch.randn(2, 12, 32)
    plain = x.clone().requires_grad_()
    y = a.run_block(block, plain, context)
    y.backward(gradient)
    expected = [leaf.grad.clone() for leaf in leaves]  # type: ignore[union-attr]
    for leaf in leaves:
        leaf.grad = None
    constants = frozenset(t.untyped_storage().data_ptr() for t in context.tensors)

    def recorded(entering: torch.Tensor) -> tuple[torch.Tensor, Graph]:
        return record(lambda h: a.run_block(block, h, context), entering, weights, leaves, constants)

    return {
        "x": x, "y": y.detach(), "gradient": gradient, "input_gradient": plain.grad, "expected": expected,
        "record": recorded, "weights": weights, "views": layout.views(accumulator), "constants": constants,
    }  # fmt: skip


def test_offloaded_set_frees_the_device_and_comes_back(layer: dict[str, Any]) -> None:
    x = layer["x"].clone()
    y, graph = layer["record"](x)
    assert torch.equal(y, layer["y"])
    saved = graph.saved
    assert saved.box.storages
    refs = [StorageWeakRef(s) for s in (*saved.box.storages, x.untyped_storage(), y.untyped_storage())]
    slab = torch.zeros(saved.slab_bytes(), dtype=torch.uint8)
    moved = saved.send(slab, False)
    assert moved == saved.box.nbytes
    saved.box.storages = None
    del x, y
    assert all(ref.expired() for ref in refs)  # neither the graph nor the input or output keeps anything

    elsewhere = layer["weights"].clone()  # the next load goes to another slot, and the old one is reused
    layer["weights"].fill_(float("nan"))
    assert saved.load(slab, torch.device("cpu"), False) == moved
    slab.fill_(255)
    entering = graph.backward(layer["gradient"], elsewhere, layer["views"])
    assert torch.equal(entering, layer["input_gradient"])
    assert all(torch.equal(a, b) for a, b in zip(layer["views"], layer["expected"], strict=True))


def test_a_dropped_boundary_is_freed_while_a_set_without_it_stays(layer: dict[str, Any]) -> None:
    """In fp32 the layer saves its own input; the graph must hold it through the set alone."""
    x = layer["x"].clone()
    _, graph = layer["record"](x)
    pointers = {s.data_ptr() for s in graph.saved.box.storages or ()}
    ref, held = StorageWeakRef(x.untyped_storage()), x.data_ptr() in pointers
    del x
    assert ref.expired() is not held
    graph.saved.box.storages = None
    assert ref.expired()


def test_weights_and_constants_are_not_in_the_set(layer: dict[str, Any]) -> None:
    _, graph = layer["record"](layer["x"])
    pointers = {s.data_ptr() for s in graph.saved.box.storages or ()}
    assert layer["weights"].data_ptr() not in pointers
    assert not pointers & layer["constants"]
    sizes = [s.nbytes() for s in graph.saved.box.storages or ()]
    assert len(pointers) == len(sizes)  # each storage once


def test_gradients_add_up_over_micro_batches(layer: dict[str, Any]) -> None:
    for _ in range(2):
        _, graph = layer["record"](layer["x"])
        graph.backward(layer["gradient"], layer["weights"], layer["views"])
    for mine, once in zip(layer["views"], layer["expected"], strict=True):
        torch.testing.assert_close(mine, 2 * once)


def test_use_after_release_is_an_error(layer: dict[str, Any]) -> None:
    _, graph = layer["record"](layer["x"])
    graph.saved.box.storages = None
    with pytest.raises(ExecutionError, match="released"):
        graph.backward(layer["gradient"], layer["weights"], layer["views"])


@pytest.mark.parametrize("action", ["keep_host", "boundary_host", "keep_gpu", "boundary_gpu"])
def test_live_device_memory_follows_the_program(monkeypatch: pytest.MonkeyPatch, action: str) -> None:
    """Between forward and loss, what the program counts as live is live, and no storage more."""
    case = Case(layers=4, M=2, steps=2)
    seen: list[tuple[StorageWeakRef, bool]] = []
    alive: list[int] = []
    put, loss = Buffers.put, operations.Operations._loss

    def watch(self: Buffers, kind: str, unit: int, micro: int, op: int, payload: Any) -> None:
        put(self, kind, unit, micro, op, payload)
        storages = payload.storages if isinstance(payload, Box) else [payload.untyped_storage()]
        seen.extend((StorageWeakRef(s), isinstance(payload, Box)) for s in storages)

    def count(self: operations.Operations, op: Op, step: int) -> None:
        # Offloads of the last layer may still be under way: wait for them before counting.
        sends = [o.id for o in self.program.ops if o.kind in (Kind.SEND_SAVED, Kind.SEND_BOUNDARY)]
        engine_done = self._batch_of.__self__.engine._done  # type: ignore[attr-defined]
        while not all(engine_done[s] > step for s in sends):
            time.sleep(1e-3)
        if op.micro == 0:
            alive.append(sum(not ref.expired() for ref, is_saved in seen if is_saved))
        loss(self, op, step)

    monkeypatch.setattr(Buffers, "put", watch)
    monkeypatch.setattr(operations.Operations, "_loss", count)
    case.run(case.plan([LayerDecision(**{action: 2})] * 4, transfer_window=1))
    per_set = len([1 for _, is_saved in seen if is_saved]) // (case.steps * 8 * (2 if action == "keep_host" else 1))
    assert per_set > 5
    expected = {"keep_gpu": 8 * per_set, "keep_host": 0, "boundary_host": 0, "boundary_gpu": 0}[action]
    if action == "keep_host":
        assert alive[0] <= 2 * per_set  # at most what the head start of the reloads brought back
    else:
        assert alive == [expected] * 2
    assert all(ref.expired() for ref, _ in seen)  # nothing outlives the run


def test_memory_is_flat_over_hundreds_of_steps() -> None:
    case = Case(steps=300, layers=2, M=1, B=1, S=6)
    sizes: list[int] = []
    case.run(on_step=lambda report: sizes.append(resident_bytes()))
    assert max(sizes[-50:]) - max(sizes[50:100]) < 1 << 20


def test_peak_can_be_reset() -> None:
    if not reset_peak():
        pytest.skip("the system does not let a process reset its peak")
    before = peak_bytes()
    block = mmap.mmap(-1, 16 << 20)  # fresh pages: the heap may have some to spare
    block.write(b"1" * (16 << 20))
    assert peak_bytes() - before > 12 << 20
    block.close()
    assert reset_peak()
    assert peak_bytes() - before < 12 << 20


# --- the engine alone ------------------------------------------------------------------------------------------------
def _program(ops: list[Op]) -> StepProgram:
    return StepProgram(
        n_units=1, micro_batches=1, passes=1, weight_slots=1, gradient_slots=1, ops=tuple(ops), buffers=(), static=()
    )


def test_emulated_overlap_has_the_period_of_its_slowest_cycle() -> None:
    """Load 20 ms, compute 30 ms, send 10 ms; the next load waits for compute (one slot): period 50, not 60 or 30."""
    ops = [
        Op(0, Kind.LOAD_WEIGHTS, Resource.H2D, 0, deps=(Dep(1, 1),), seconds=0.02),
        Op(1, Kind.FORWARD, Resource.COMPUTE, 0, deps=(Dep(0),), seconds=0.03),
        Op(2, Kind.SEND_GRADIENT, Resource.D2H, 0, deps=(Dep(1),), seconds=0.01),
    ]
    intervals = emulate(_program(ops), 6)
    starts = [intervals[s][1].start for s in sorted(intervals)]
    periods = [b - a for a, b in itertools.pairwise(starts)]
    assert 0.05 <= min(periods) < 0.058, periods
    free = emulate(_program([ops[0]._replace(deps=()), *ops[1:]]), 6)
    starts = [free[s][1].start for s in sorted(free)]
    assert 0.03 <= min(b - a for a, b in itertools.pairwise(starts)) < 0.04


def test_emulation_agrees_with_the_simulator() -> None:
    """The same program, slept by the engine and simulated: periods within 20 % (sleeps overrun on a busy machine)."""
    case = Case(layers=3, M=2)
    plan = case.plan([LayerDecision(keep_host=1, boundary_gpu=1)] * 3, weight_buffers=2)
    seconds = {Resource.COMPUTE: 8e-3, Resource.H2D: 6e-3, Resource.D2H: 7e-3, Resource.CPU: 9e-3}
    program = case.program(plan)
    program = program.model_copy(
        update={"ops": tuple(op._replace(seconds=seconds[op.resource], dram_bytes=0.0) for op in program.ops)}
    )
    intervals = emulate(program, 5)
    first = next(program.on(Resource.COMPUTE)).id
    starts = [{i.op: i.start for i in intervals[s]}[first] for s in sorted(intervals)]
    assert (starts[-1] - starts[0]) / (len(starts) - 1) == pytest.approx(simulate(program).step_seconds, rel=0.2)


def test_a_buffer_read_before_it_exists_is_an_error() -> None:
    case = Case()
    buffers = Buffers(case.program(case.plan()))
    with pytest.raises(ExecutionError, match="before it exists"):
        buffers.get("boundary", 1, 0, 0)
    with pytest.raises(ExecutionError, match="not there"):
        buffers.get("boundary", 1, 0, 5)
