"""The executor's law: whatever the plan, losses, gradients and weights are those of plain PyTorch training."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lazytrain.executor.operations import Operations
from lazytrain.executor.run import ResumeState, TrainResult
from lazytrain.executor.settings import OptimizerSettings
from lazytrain.schedule.plan import LayerDecision, Plan, Style
from lazytrain.schedule.program import Kind, Op, Resource, StepProgram
from tests.executor_support import BF16, FP32, Case, Reference, check


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    """Tiny products: more threads only cost time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@functools.cache
def _case(**which: Any) -> tuple[Case, Reference]:
    case = Case(**which)
    return case, case.reference()


def same_bits(a: TrainResult, b: TrainResult) -> bool:
    mine, theirs = a.weights(), b.weights()
    return a.losses == b.losses and a.norms == b.norms and all(torch.equal(mine[n], theirs[n]) for n in mine)


@st.composite
def decisions(draw: st.DrawFn, layers: int, M: int) -> dict[str, Any]:
    chosen: list[LayerDecision] = []
    for i in range(layers):
        resident = draw(st.booleans())
        before_keeps = bool(chosen) and bool(chosen[-1].keep_gpu or chosen[-1].keep_host)
        if i > 0 and not before_keeps and draw(st.booleans()):
            chosen.append(LayerDecision(dropped=M, resident=resident))
            continue
        boundaries = ("boundary_gpu", "boundary_host")
        names = draw(st.sampled_from([boundaries, ("keep_gpu", "keep_host", *boundaries)]))
        counts = dict.fromkeys(names, 0)
        for _ in range(M):
            counts[draw(st.sampled_from(names))] += 1
        chosen.append(LayerDecision(resident=resident, **counts))
    return {
        "decisions": chosen,
        "weight_buffers": draw(st.integers(1, 3)),
        "gradient_buffers": draw(st.integers(1, 3)),
        "embedding_resident": draw(st.booleans()),
        "head_resident": draw(st.booleans()),
        "style": Style(
            update=draw(st.sampled_from(["lazy", "serial"])),
            backward_prefetch=draw(st.booleans()),
            recompute_whole_segment=draw(st.booleans()),
        ),
    }


CASES = [
    {"M": 1, "layers": 2}, {"M": 2, "layers": 4, "tied": True}, {"M": 2, "A": 3, "padded": True, "steps": 2},
    {"M": 4, "tied": True, "padded": True, "family": "qwen2"},
    {"M": 2, "A": 3, "tied": True, "family": "qwen2", "steps": 2},
]  # fmt: skip


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_valid_plan_equals_plain_pytorch(data: st.DataObject) -> None:
    case, reference = _case(**data.draw(st.sampled_from(CASES)))
    plan = case.plan(**data.draw(decisions(case.layers, case.M)))
    check(case.run(plan), reference, **FP32)


@pytest.mark.parametrize(
    "which", [{"A": 3, "M": 4, "tied": True}, {"padded": True, "parked": "fp32"}, {"family": "qwen2"}]
)
def test_bf16(which: dict[str, Any]) -> None:
    """Wider, because bf16 rounds differently in chunked and whole products; losses to 1e-3, norms to 1e-2."""
    case, reference = _case(dtype="bf16", **which)
    check(case.run(case.plan([LayerDecision(keep_host=case.M)] * 3)), reference, **BF16)


def test_gradients_parked_in_bf16_under_fp32_compute() -> None:
    case, reference = _case(parked="bf16", tied=True, A=3)
    check(case.run(), reference, loss=1e-4, norm=2e-3, weight=1e-2)


def test_without_clipping_and_with_a_schedule() -> None:
    settings_ = OptimizerSettings(lr=lambda step: 1e-2 * (step + 1), eps=1e-3, weight_decay=0.1)
    case = Case(max_norm=None, optimizer=settings_)
    result = case.run()
    check(result, case.reference(), **FP32)
    assert result.coefficients == [1.0] * 3
    assert [s.lr for s in result.steps] == [1e-2, 2e-2, 3e-2]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_plans_differ_in_no_bit(dtype: str) -> None:
    case = Case(dtype=dtype, M=4, layers=4)
    plans = [
        case.plan([LayerDecision(keep_gpu=4)] * 4, weight_buffers=1),
        case.plan([LayerDecision(keep_host=4, resident=True)] * 4, embedding_resident=True, head_resident=True),
        case.plan([LayerDecision(boundary_host=2, boundary_gpu=2), *[LayerDecision(dropped=4)] * 3], weight_buffers=3),
    ]
    first, *others = [case.run(plan) for plan in plans]
    assert all(same_bits(first, other) for other in others)


# --- nothing kept may point into a reused buffer ---------------------------------------------------------------------
def _last_users(program: StepProgram) -> set[int]:
    """Compute operations after which the content of their weight slot is dead."""
    last: dict[int, int] = {}
    dead = set()
    for op in program.ops:
        if op.slot >= 0 and op.kind is Kind.LOAD_WEIGHTS:
            dead.add(last.get(op.slot, -1))
        if op.slot >= 0 and op.resource is Resource.COMPUTE:
            last[op.slot] = op.id
    return dead | set(last.values())


def test_poisoned_slots_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weight slots after their last user, gradient slots after they were sent, host slabs after they were read: NaN."""
    case = Case(M=2, layers=4, tied=False)
    layers = [
        LayerDecision(keep_host=1, keep_gpu=1),
        LayerDecision(keep_host=1, boundary_host=1),
        LayerDecision(boundary_gpu=2),
        LayerDecision(dropped=2),
    ]
    plan = case.plan(layers, weight_buffers=2, gradient_buffers=1)
    clean = case.run(plan)
    dead = _last_users(case.program(plan))
    execute, poisoned = Operations.execute, set()

    def poison(self: Operations, op: Op, step: int) -> None:
        execute(self, op, step)
        if op.id in dead:
            self.memory.weights(op.unit, op.slot).fill_(float("nan"))
        elif op.kind is Kind.SEND_GRADIENT:
            self.memory.gradient(op.unit, op.gradient_slot).fill_(float("nan"))
        elif op.kind in (Kind.LOAD_SAVED, Kind.LOAD_BOUNDARY):
            self._host[op.kind.removeprefix("load_"), op.unit, op.micro].fill_(255)
        else:
            return
        poisoned.add(op.kind)

    monkeypatch.setattr(Operations, "execute", poison)
    assert same_bits(clean, case.run(plan))
    assert len(poisoned) >= 4


# --- what is reported ------------------------------------------------------------------------------------------------
def test_moved_bytes_are_the_planned_ones() -> None:
    case = Case(M=2, layers=3, A=2)
    mixed = LayerDecision(boundary_host=1, boundary_gpu=1)
    plan = case.plan([LayerDecision(boundary_host=2), LayerDecision(dropped=2), mixed])
    result, planned = case.run(plan), case.program(plan).moved_bytes()
    for resource in (Resource.H2D, Resource.D2H):
        assert result.moved_bytes[resource] == case.steps * planned[resource]


def test_intervals_follow_order_and_dependencies() -> None:
    case = Case(M=2, steps=5)
    plan = case.plan([LayerDecision(keep_host=1, boundary_host=1)] * 3)
    program, result = case.program(plan), case.run(plan)
    assert 2 <= len(result.intervals) <= 5
    by_step = {s: {i.op: i for i in intervals} for s, intervals in result.intervals.items()}
    for step, intervals in by_step.items():
        assert len(intervals) == len(program.ops)
        for op in program.ops:
            for dep, lag in op.deps:
                before = by_step.get(step - lag, {}).get(dep)
                assert before is None or before.end <= intervals[op.id].start
        for resource in Resource:
            served = [intervals[op.id] for op in program.on(resource)]
            assert all(a.end <= b.start for a, b in itertools.pairwise(served))
    assert len(result.step_seconds) == 5
    assert sum(result.step_seconds) <= result.total_seconds + 1e-3


def test_static_device_memory_is_the_planned_one() -> None:
    for tied in (False, True):
        case = Case(tied=tied, steps=1)
        plan = case.plan(weight_buffers=2, gradient_buffers=1)
        assert case.run(plan).device_static_bytes == case.program(plan).static_bytes("gpu")


def test_resumed_run_equals_an_unbroken_one() -> None:
    case = Case(M=2)
    whole = case.run()
    case.steps = 2
    first = case.run()
    assert first.store is not None
    m, v = ({n: t.clone() for n, t in moments.items()} for moments in first.store.moments())
    batches = case.batches()
    for _ in range(2):
        next(batches)
    case.steps = 1
    rest = case.run(
        batches=batches,
        initial_state={n: t.clone() for n, t in first.weights().items()},
        resume=ResumeState(m, v, first.store.applied_updates, step=2),
    )
    assert rest.losses == whole.losses[2:]
    assert rest.steps[0].step == 2
    assert all(torch.equal(rest.weights()[n], w) for n, w in whole.weights().items())


def test_fresh_weights_depend_on_the_seed_only() -> None:
    case = Case(steps=1)
    runs = [case.run(initial_state=None, seed=seed) for seed in (1, 1, 2)]
    assert same_bits(runs[0], runs[1])
    assert runs[0].losses != runs[2].losses


def test_hugging_face_loads_the_weights() -> None:
    case, reference = _case(tied=True)
    model = case.architecture.build_reference_model(torch.float32)
    missing = model.load_state_dict(case.run().weights(), strict=False)
    assert not missing.unexpected_keys
    assert set(missing.missing_keys) <= {"lm_head.weight"}
    name = "model.layers.1.self_attn.q_proj.weight"
    torch.testing.assert_close(model.state_dict()[name], reference.weights[name], rtol=1e-4, atol=1e-5)


def test_plan_round_trip_runs_the_same() -> None:
    case = Case()
    plan = case.plan([LayerDecision(keep_host=2)] * 3)
    again = Plan.model_validate_json(plan.model_dump_json())
    assert same_bits(case.run(plan), case.run(again))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_equals_plain_pytorch() -> None:
    case = Case(M=2, layers=4)
    stored = [LayerDecision(keep_host=2), LayerDecision(keep_gpu=2), LayerDecision(boundary_host=2)]
    plan = case.plan([*stored, LayerDecision(dropped=2)])
    check(case.run(plan, device="cuda"), case.reference(), loss=1e-4, norm=1e-3, weight=1e-3)
