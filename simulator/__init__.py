"""The machine in simulation: runs a StepProgram, tells its period, its waits and its peaks, and judges them.

simulation = simulate(program, dram_bandwidth=60e9)
verdict = judge(simulation, program, capacities={"gpu": 24e9, ...}, assumed_rates={"h2d": 12e9, ...})
write_trace(path, simulated_trace(program, simulation))
"""

from lazytrain.simulator.graph import ProgramError, check
from lazytrain.simulator.machine import simulate
from lazytrain.simulator.memory import Curve, Peak
from lazytrain.simulator.result import Interval, Simulation
from lazytrain.simulator.trace import simulated_trace, trace_events, write_trace
from lazytrain.simulator.verdict import judge

__all__ = [
    "Curve", "Interval", "Peak", "ProgramError", "Simulation",
    "check", "judge", "simulate", "simulated_trace", "trace_events", "write_trace",
]  # fmt: skip
