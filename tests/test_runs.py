"""The gate before a run: rules about capacities and rates, not digests."""

from __future__ import annotations

from typing import Any

import pytest

from lazytrain.executor.gate import objections
from lazytrain.loop import evaluate
from lazytrain.planner.policies import PolicyMaker
from lazytrain.schedule.plan import Plan
from tests import builders

ROOMY = {"gpu": 1e12, "host": 1e12, "pinned": 1e12, "nvme": 1e12}


@pytest.fixture(scope="module")
def plan() -> Plan:
    spec, machine = builders.model(), builders.machine()
    return evaluate(PolicyMaker(spec, machine, builders.job()).uniform(2)[0], spec, machine).plan


def verdict(plan: Plan, **changes: Any) -> Plan:
    assert plan.verdict is not None
    return plan.model_copy(update={"verdict": plan.verdict.model_copy(update=changes)})


def test_same_machine_is_covered(plan: Plan) -> None:
    assert plan.verdict is not None
    assert objections(plan, ROOMY, plan.verdict.assumed_rates) == []


def test_faster_is_covered_and_slower_within_the_margin(plan: Plan) -> None:
    assert plan.verdict is not None
    rates, margin = plan.verdict.assumed_rates, plan.verdict.rate_margin
    assert objections(plan, ROOMY, {k: 10 * v for k, v in rates.items()}) == []
    assert objections(plan, ROOMY, {k: v * (1 - margin + 1e-6) for k, v in rates.items()}) == []
    slow = objections(plan, ROOMY, {**rates, "h2d": rates["h2d"] * (1 - margin - 1e-3)})
    assert len(slow) == 1
    assert slow[0].startswith("h2d: measured")


@pytest.mark.parametrize(("tier", "name"), [("gpu", "GPU memory"), ("host", "host memory"), ("pinned", "pinned")])
def test_less_memory_than_the_peak_is_refused(plan: Plan, tier: str, name: str) -> None:
    assert plan.verdict is not None
    peak = plan.verdict.peak_bytes[tier]
    assert objections(plan, {**ROOMY, tier: peak}, {}) == []
    (problem,) = objections(plan, {**ROOMY, tier: peak * 0.999}, {})
    assert problem.startswith(name)


def test_device_and_host_share_the_ram_of_a_cpu(plan: Plan) -> None:
    assert plan.verdict is not None
    both = plan.verdict.peak_bytes["gpu"] + plan.verdict.peak_bytes["host"]
    room = {**ROOMY, "host": both * 0.99, "gpu": both * 0.99}
    assert objections(plan, room, {}) == []
    (problem,) = objections(plan, room, {}, shared_memory=True)
    assert "share" in problem


def test_no_verdict_or_a_failed_one(plan: Plan) -> None:
    assert "never simulated" in objections(plan.model_copy(update={"verdict": None}), ROOMY, {})[0]
    assert "did not pass" in objections(verdict(plan, feasible=False), ROOMY, {})[0]
