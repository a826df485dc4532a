"""Solves a StepModel with HiGHS and reads the decisions and what was proven."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from pyomo.contrib.solver.common.results import SolutionStatus, TerminationCondition
from pyomo.contrib.solver.solvers.highs import Highs

from lazytrain.errors import SolverError
from lazytrain.planner.program import TIE_BREAK, StepModel
from lazytrain.schedule.plan import Action, LayerDecision

_STATUS = {
    TerminationCondition.convergenceCriteriaSatisfied: "optimal within the asked gap",
    TerminationCondition.maxTimeLimit: "time limit",
    TerminationCondition.provenInfeasible: "infeasible",
    TerminationCondition.infeasibleOrUnbounded: "infeasible",
}


@dataclass(frozen=True)
class Solution:
    """Decisions and proof. Times in seconds; ``objective`` is the step's period without the tie-break term."""

    status: str
    objective: float
    bound: float
    seconds: float
    layers: tuple[LayerDecision, ...] = ()
    embedding_resident: bool = False
    head_resident: bool = False

    @property
    def found(self) -> bool:
        return bool(self.layers)

    @property
    def infeasible(self) -> bool:
        return self.status == "infeasible"


def solve(model: StepModel, *, time_limit_s: float, gap: float, relax: bool = False) -> Solution:
    """Minimises the period. With ``relax`` counts may be fractional: only the bound of the result means something.

    Raises SolverError when HiGHS stops for a reason that is neither a result, infeasibility, nor the time limit.
    """
    started = time.monotonic()
    solver = Highs()
    solver.config.time_limit = max(time_limit_s, 0.1)
    solver.config.rel_gap = gap
    solver.config.threads = 2
    solver.config.load_solutions = False
    solver.config.raise_exception_on_nonoptimal_result = False
    if relax:
        solver.config.solver_options["solve_relaxation"] = True
    results = solver.solve(model.m)
    seconds = time.monotonic() - started
    status = _STATUS.get(results.termination_condition)
    if status is None:
        raise SolverError(f"HiGHS stopped: {results.termination_condition.name}")
    if status == "infeasible":
        return Solution(status, math.inf, math.inf, seconds)
    lowest = results.objective_bound
    # HiGHS bounds period plus tie-break term: less the term's largest value, the bound holds for the period.
    bound = max(0.0, (lowest or 0.0) - TIE_BREAK * model.max_penalty) * model.time_unit_s
    if relax or results.solution_status not in (SolutionStatus.feasible, SolutionStatus.optimal):
        return Solution(status, math.inf, bound, seconds)
    results.solution_loader.load_vars()
    objective = model.m.step() * model.time_unit_s
    return Solution(
        status, objective, min(bound, objective), seconds, decisions(model),
        round(model.m.embedding_resident.value) == 1, round(model.m.head_resident.value) == 1,
    )  # fmt: skip


def decisions(model: StepModel) -> tuple[LayerDecision, ...]:
    """The solved counts per layer."""
    m = model.m
    layers = []
    for i in range(model.L):
        counts = {a.value: round(m.n[i, a.value].value) for a in model.actions}
        counts[Action.DROPPED.value] = model.M if round(m.drop[i].value) else 0
        layers.append(LayerDecision(**counts, resident=bool(round(m.resident[i].value))))
    return tuple(layers)
