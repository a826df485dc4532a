"""The verdict: which limits of a machine a simulated run breaks, in user words."""

from __future__ import annotations

from collections.abc import Mapping

from lazytrain.errors import InputError
from lazytrain.schedule.plan import TIERS, Verdict, Violation
from lazytrain.schedule.program import StepProgram
from lazytrain.simulator.memory import Peak
from lazytrain.simulator.result import Simulation
from lazytrain.units import format_bytes

ROUNDING = 1e-9  # relative: sums of bytes are floats


def judge(
    simulation: Simulation, program: StepProgram, capacities: Mapping[str, float], assumed_rates: Mapping[str, float]
) -> Verdict:
    """The verdict on a program that ran as ``simulation``.

    ``capacities``: usable bytes of ``gpu``, ``host``, ``pinned`` and ``nvme`` (0 where there is none); the peaks of the
    whole run count, first steps included. ``assumed_rates`` (SI) are recorded: the step time rests on them.
    """
    if missing := [tier for tier in TIERS if tier not in capacities]:
        raise InputError(f"capacities: {', '.join(missing)} missing (0 where the machine has none)")
    peaks = simulation.run_peaks
    violations = [
        violation(tier, peaks[tier], capacities[tier])
        for tier in TIERS
        if peaks[tier].bytes > capacities[tier] * (1 + ROUNDING)
    ]
    return Verdict(
        feasible=not violations,
        violations=tuple(violations),
        step_seconds=simulation.step_seconds,
        first_step_seconds=simulation.first_step_seconds,
        peak_bytes=simulation.peak_bytes,
        capacity_bytes={tier: capacities[tier] for tier in TIERS},
        assumed_rates=dict(assumed_rates),
    )


def violation(tier: str, peak: Peak, available: float) -> Violation:
    """``pinned host memory: needs 41 GiB, has 32 GiB (weights 30 GiB, staging 11 GiB)``."""
    needs, has = format_bytes(peak.bytes), format_bytes(available)
    message = f"{TIERS[tier]}: needs {needs}, has {has}"
    if needs == has:
        message += f", {format_bytes(peak.bytes - available)} too little"
    largest = ", ".join(f"{name.replace('_', ' ')} {format_bytes(size)}" for name, size in peak.largest())
    return Violation(
        limit=TIERS[tier], needed_bytes=peak.bytes, available_bytes=available, message=f"{message} ({largest})"
    )
