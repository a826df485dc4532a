"""Whether a plan's passed verdict covers the machine it is to run on. Rules about capacities and rates, not digests."""

from __future__ import annotations

from collections.abc import Mapping

from lazytrain.schedule.plan import TIERS, Plan, Verdict
from lazytrain.units import format_bytes


def objections(
    plan: Plan, available: Mapping[str, float], rates: Mapping[str, float], *, shared_memory: bool = False
) -> list[str]:
    """Why a plan must not run here, in user words; empty when its verdict covers this machine.

    ``available``: bytes free now per tier. ``rates``: this machine's measured rates (SI), with the names that verdicts
    use. ``shared_memory``: the device is the CPU, so GPU tier and host tier live in the same RAM.
    """
    verdict = plan.verdict
    if verdict is None:
        return ["the plan has no verdict: it was never simulated"]
    if not verdict.feasible:
        reasons = "; ".join(v.message for v in verdict.violations) or "it does not say why"
        return [f"its verdict did not pass: {reasons}"]
    return [*_capacity(verdict, available, shared_memory), *_rates(verdict, rates)]


def _capacity(verdict: Verdict, available: Mapping[str, float], shared_memory: bool) -> list[str]:
    found = []
    for tier, name in TIERS.items():
        needed = verdict.peak_bytes[tier]
        free = available.get(tier, 0.0)
        if needed > free:
            found.append(f"{name}: the plan needs {format_bytes(needed)}, free here {format_bytes(free)}")
    both = verdict.peak_bytes["gpu"] + verdict.peak_bytes["host"]
    if shared_memory and not found and both > available["host"]:
        found.append(
            f"RAM (device and host share it): {format_bytes(both)} needed, {format_bytes(available['host'])} free"
        )
    return found


def _rates(verdict: Verdict, rates: Mapping[str, float]) -> list[str]:
    found = []
    for name, assumed in verdict.assumed_rates.items():
        if name not in rates:
            continue
        least = assumed * (1 - verdict.rate_margin)
        if rates[name] < least:
            found.append(
                f"{name.replace('_', ' ')}: measured {rates[name]:.3g}/s here, the verdict assumes {assumed:.3g}/s and "
                f"tolerates {least:.3g}/s"
            )
    return found
