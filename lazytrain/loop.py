"""The planning loop: solve, build, simulate, judge; tighten and solve again where a limit breaks; rivals beside it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from lazytrain.costs.job import TrainingJob
from lazytrain.costs.table import CostTable
from lazytrain.errors import InputError
from lazytrain.hwprofiles import Machine
from lazytrain.models.spec import ModelSpec
from lazytrain.planner.policies import PolicyMaker
from lazytrain.planner.program import Shape, StepModel
from lazytrain.planner.solve import Solution, solve
from lazytrain.schedule.build import build_program
from lazytrain.schedule.plan import Certificate, Plan, Verdict
from lazytrain.schedule.program import StepProgram
from lazytrain.simulator import Simulation, judge, simulate

MAX_MICRO_BATCHES = 16
TIGHTENINGS = 3
SHAPES = (Shape(weight_buffers=2), Shape(weight_buffers=3))
SMALLEST = (Shape(weight_buffers=1, gradient_buffers=1, transfer_window=1),)  # searched where neither of those fits
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Outcome:
    """A plan with what was found out about it. ``plan.verdict`` is always set."""

    plan: Plan
    program: StepProgram
    simulation: Simulation
    costs: CostTable
    advice: tuple[str, ...] = ()

    @property
    def verdict(self) -> Verdict:
        assert self.plan.verdict is not None
        return self.plan.verdict

    @property
    def feasible(self) -> bool:
        return self.verdict.feasible

    @property
    def step_seconds(self) -> float:
        return self.verdict.step_seconds

    @property
    def tokens_per_second(self) -> float:
        return self.costs.job.tokens_per_step / self.step_seconds

    @property
    def model_tflops(self) -> float:
        """6 * N * tokens / step, in TFLOPS, as the field prints it."""
        return self.costs.model_flops_per_step() / self.step_seconds / 1e12


def evaluate(plan: Plan, model: ModelSpec, machine: Machine, *, dram_sharing: bool = True) -> Outcome:
    """Builds, simulates and judges a plan on a machine; the plan returned carries the verdict.

    Without ``dram_sharing`` the simulation assumes exactly what the program does (fixed rates), so their periods agree.
    """
    costs = CostTable(model, machine, plan.job, plan.micro_batches)
    program = build_program(plan, costs)
    simulation = simulate(program, dram_bandwidth=float(machine.host.dram_bandwidth) if dram_sharing else None)
    rates = costs.assumed_rates(drive=simulation.run_peaks["nvme"].bytes > 0)
    verdict = judge(simulation, program, costs.capacities(), rates)
    return Outcome(plan.model_copy(update={"verdict": verdict}), program, simulation, costs)


def _better(one: Outcome, other: Outcome) -> bool:
    """Whether one outcome's step is shorter by more than rounding."""
    return one.step_seconds < other.step_seconds * (1 - 1e-9)


def micro_batch_candidates(batch_size: int, chosen: int | None) -> list[int]:
    """The micro-batch counts the search may use: the user's, or the divisors of the batch up to 16."""
    if chosen is not None:
        if chosen < 1 or batch_size % chosen:
            raise InputError(f"--micro-batches {chosen} does not divide --batch-size {batch_size}")
        return [chosen]
    return [m for m in range(1, min(batch_size, MAX_MICRO_BATCHES) + 1) if batch_size % m == 0]


class Planner:
    """Plans one (model, machine, job). ``homes``: tiers beyond the GPU that may hold activations."""

    def __init__(
        self, model: ModelSpec, machine: Machine, job: TrainingJob, *, homes: Sequence[str] = ("host",),
        micro_batches: int | None = None, progress: Progress = lambda _: None,
    ):  # fmt: skip
        if "nvme" in homes and machine.nvme is None:
            raise InputError(f"{machine.name} has no NVMe drive to plan with")
        self.model, self.machine, self.job, self.homes = model, machine, job, tuple(homes)
        self.progress = progress
        self.chosen = micro_batches
        self.candidates = micro_batch_candidates(job.batch_size, micro_batches)
        self.costs = {m: CostTable(model, machine, job, m) for m in self.candidates}
        self.policies = PolicyMaker(model, machine, job)
        self._rivals: dict[int, list[Outcome]] = {}
        self._covered = ""

    # --- our plan --------------------------------------------------------------------------------------------------
    def plan(self, *, time_limit_s: float = 60.0, gap: float = 0.01) -> Outcome:
        """The best plan found, or, where none fits, the most frugal one with the limits it breaks and advice."""
        started = time.monotonic()
        deadline = started + time_limit_s
        best, bound, status = self._search(deadline, gap, SHAPES)
        if best is None:
            self.progress("nothing fits with 2 or 3 weight slots: trying one")
            best, bound, status = self._search(deadline, gap, SMALLEST)
        self.progress("comparing with simple policies")
        rivals = list(self.rivals(best.plan.micro_batches if best else self.candidates[-1]))
        if best is None:
            rivals += [self._evaluate(p) for p in self.policies.frugal(self.candidates[-1])]
        fitting = [o for o in rivals if o.feasible and o.plan.style.executable]
        rival = min(fitting, key=lambda o: o.step_seconds, default=None)
        if best is not None and rival is not None and _better(rival, best):
            self.progress(f"'{rival.plan.policy}' is ahead within the gap: solving to a tenth of it")
            shape = Shape(best.plan.weight_buffers, best.plan.gradient_buffers, best.plan.transfer_window)
            left = max(deadline - time.monotonic(), 1.0)
            again, _ = self._solve_and_check(best.plan.micro_batches, shape, left, gap / 10)
            best = again if again is not None and _better(again, best) else best
        if rival is not None and (best is None or _better(rival, best)):
            best, status = rival, f"{status}; the policy '{rival.plan.policy}' is better and was taken"
            if rival.step_seconds < bound:
                bound, status = 0.0, f"{status}: it lies outside what the program covers, so nothing is proven of it"
        if best is None:
            return self._explain()
        objective = best.plan.certificate.objective if best.plan.certificate else best.step_seconds
        bound = min(bound, objective)
        note = f"for {self._covered}, segments of up to {SHAPES[0].max_segment} layers and this order of operations"
        if self.job.accumulation > 1:
            note += "; passes are modelled as alike, so the bound is approximate"
        certificate = Certificate(
            status=status, objective=objective, bound=bound, gap=(objective - bound) / objective,
            seconds=time.monotonic() - started, note=note,
        )  # fmt: skip
        return replace(best, plan=best.plan.model_copy(update={"certificate": certificate, "policy": "lazytrain"}))

    def _relaxations(self, deadline: float, gap: float, shapes: Sequence[Shape]) -> list[tuple[float, int, Shape]]:
        """(bound, M, shape) of every option that fits by its relaxation, most promising first.

        Takes at most half of the time left; what was not reached is not covered by the certificate.
        """
        started = time.monotonic()
        options: list[tuple[float, int, Shape]] = []
        tried: list[str] = []
        for shape in shapes:
            for m in self.candidates:
                left = (started + deadline) / 2 - time.monotonic()
                if left <= 0 and options:
                    break
                relaxed = self._solve(m, shape, {}, max(left, 1.0), gap, relax=True)
                tried.append(f"M={m} with {shape.weight_buffers}")
                if not relaxed.infeasible:
                    options.append((relaxed.bound, m, shape))
                    self.progress(f"M={m}, {shape.weight_buffers} weight slots: at least {relaxed.bound:.3g} s a step")
        everything = len(tried) == len(shapes) * len(self.candidates)
        counts, slots = ", ".join(map(str, self.candidates)), " or ".join(str(s.weight_buffers) for s in shapes)
        self._covered = f"M in {counts} with {slots} weight slots" if everything else f"{', '.join(tried)} weight slots"
        return sorted(options, key=lambda option: (option[0], option[1], option[2].weight_buffers))

    def _search(self, deadline: float, gap: float, shapes: Sequence[Shape]) -> tuple[Outcome | None, float, str]:
        """Best outcome over micro-batch counts and slot counts, the lowest bound, and why the search stopped."""
        options = self._relaxations(deadline, gap, shapes)
        best: Outcome | None = None
        best_objective, lowest, status = math.inf, math.inf, "optimal within the asked gap"
        for k, (relaxed_bound, m, shape) in enumerate(options):
            left = deadline - time.monotonic()
            if relaxed_bound >= best_objective * (1 - gap) or (left <= 0 and best is not None):
                lowest = min([lowest, *(b for b, _, _ in options[k:])])
                status = "time limit" if left <= 0 else status
                break
            share = left if k == len(options) - 1 else left / 2
            outcome, solution = self._solve_and_check(m, shape, max(share, 1.0), gap)
            lowest = min(lowest, max(solution.bound, relaxed_bound) if solution.found else relaxed_bound)
            if solution.status == "time limit":
                status = "time limit"
            if outcome is not None and (best is None or _better(outcome, best)):
                best, best_objective = outcome, solution.objective
                self.progress(f"M={m}, {shape.weight_buffers} weight slots: {outcome.step_seconds:.3g} s a step")
        if best is None:
            status = "no plan within the program's memory model"
            lowest = min((b for b, _, _ in options), default=0.0)
        return best, lowest, status

    def _solve(
        self, m: int, shape: Shape, tightened: dict[str, float], time_limit_s: float, gap: float, relax: bool = False
    ) -> Solution:
        capacities = {**self.costs[m].capacities(), **tightened}
        model = StepModel(self.costs[m], shape, homes=self.homes, capacities=capacities)
        return solve(model, time_limit_s=time_limit_s, gap=gap, relax=relax)

    def _solve_and_check(
        self, m: int, shape: Shape, time_limit_s: float, gap: float
    ) -> tuple[Outcome | None, Solution]:
        """Solve, simulate, and where the simulated peak breaks a limit solve again with that much less of it.

        The solution's bound is that of the first solve, with the machine's own limits.
        """
        tightened: dict[str, float] = {}
        bound = math.inf
        deadline = time.monotonic() + time_limit_s
        for attempt in range(TIGHTENINGS + 1):
            solution = self._solve(m, shape, tightened, max(deadline - time.monotonic(), 1.0), gap)
            bound = min(bound, solution.bound)
            solution = replace(solution, bound=bound)
            if not solution.found:
                return None, solution
            outcome = evaluate(self._as_plan(m, shape, solution), self.model, self.machine)
            if outcome.feasible:
                return outcome, solution
            if attempt == TIGHTENINGS:
                break
            for tier in ("gpu", "host", "pinned"):
                over = outcome.verdict.peak_bytes[tier] - outcome.verdict.capacity_bytes[tier]
                if over > 0:
                    limit = tightened.get(tier, outcome.verdict.capacity_bytes[tier])
                    tightened[tier] = limit - 1.1 * over
                    self.progress(f"simulated {tier} peak is over its limit by {over / 1e6:.0f} MB: solving again")
        return None, solution

    def _as_plan(self, m: int, shape: Shape, solution: Solution) -> Plan:
        plan = self.policies.plan(
            "lazytrain", m, solution.layers, weight_buffers=shape.weight_buffers,
            gradient_buffers=shape.gradient_buffers, transfer_window=shape.transfer_window,
            embedding_resident=solution.embedding_resident and not self.model.tied,
            head_resident=solution.head_resident and not self.model.tied,
        )  # fmt: skip
        gap = (solution.objective - solution.bound) / solution.objective
        certificate = Certificate(
            status=solution.status, objective=solution.objective, bound=solution.bound, gap=gap,
            seconds=solution.seconds,
        )  # fmt: skip
        return plan.model_copy(update={"certificate": certificate})

    # --- policies --------------------------------------------------------------------------------------------------
    def _evaluate(self, plan: Plan) -> Outcome:
        return evaluate(plan, self.model, self.machine)

    def _best(self, outcomes: Sequence[Outcome]) -> Outcome:
        """The fastest feasible outcome, or the fastest one if none is feasible."""
        return min(outcomes, key=lambda o: (not o.feasible, o.step_seconds))

    def rivals(self, micro_batches: int) -> list[Outcome]:
        """MegaTrain as coded, best uniform K, store-all-that-fits; the latter two with this micro-batch count and 1."""
        if micro_batches not in self._rivals:
            found = [self._evaluate(self.policies.megatrain())]
            counts = sorted({1, micro_batches} if 1 in self.candidates else {micro_batches})
            found.append(self._best([self._evaluate(p) for m in counts for p in self.policies.uniform(m)]))
            filled = [self.policies.store_all_that_fits(m, lambda p: self._evaluate(p).feasible) for m in counts]
            plans = [p for p in filled if p is not None]
            if plans:
                found.append(self._best([self._evaluate(p) for p in plans]))
            self._rivals[micro_batches] = found
        return self._rivals[micro_batches]

    # --- infeasible jobs -------------------------------------------------------------------------------------------
    def _explain(self) -> Outcome:
        """The most frugal plan with the limits that it still breaks, and the smallest changes that would fit."""
        self.progress("nothing fits: looking for the binding limit")
        outcomes = [self._evaluate(p) for p in self.policies.frugal(self.candidates[-1])]
        outcome = min(outcomes, key=lambda o: sum(v.needed_bytes - v.available_bytes for v in o.verdict.violations))
        advice = []
        largest = self._largest_batch() if outcome.verdict.violations else 0
        if largest:
            advice.append(f"--batch-size {largest} fits")
        needed = [
            f"{v.limit} of at least {math.ceil(v.needed_bytes / 2**30 * 100) / 100:.2f} GiB usable"
            for v in outcome.verdict.violations
        ]
        if needed:
            advice.append(f"{' and '.join(needed)} would fit this job")
        return replace(outcome, advice=tuple(advice))

    def _largest_batch(self) -> int:
        """The largest smaller batch whose most frugal plan fits; 0 when not even the smallest one does."""
        step = self.chosen or 1  # a micro-batch count that the user gave must divide the batch

        def fits(batch: int) -> bool:
            job = self.job.model_copy(update={"batch_size": batch})
            makers = PolicyMaker(self.model, self.machine, job)
            count = micro_batch_candidates(batch, self.chosen)[-1]
            return any(evaluate(p, self.model, self.machine).feasible for p in makers.frugal(count))

        low, high = 0, (self.job.batch_size - 1) // step
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if fits(middle * step) else (low, middle - 1)
        return low * step
