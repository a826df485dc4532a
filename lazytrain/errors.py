"""The errors a user can meet. The command line prints each as one line and maps it to an exit code."""

from __future__ import annotations

from pathlib import Path


class LazyTrainError(Exception):
    """Something could not be evaluated: bad input, an unusable machine, a broken file (exit code 2)."""

    exit_code = 2


class InputError(LazyTrainError):
    """A value the user gave is wrong; the message names the field, the value and what is allowed."""


class ProfileError(InputError):
    """A hardware profile is malformed or physically impossible; names file, field and unit."""


class ModelError(InputError):
    """A model is unknown or its configuration cannot be built."""


class FileFormatError(InputError):
    """A file is damaged, of another version, or not what it should be."""

    def __init__(self, path: Path | str, problem: str, line: int | None = None):
        where = f"{path}:{line}" if line is not None else f"{path}"
        super().__init__(f"{where}: {problem}")
        self.path, self.line, self.problem = Path(path), line, problem


class SolverError(LazyTrainError):
    """The solver failed (not: found the job infeasible)."""


class DeadlockError(LazyTrainError):
    """Operations of a step wait for each other; the message names the cycle."""


class ExecutionError(LazyTrainError):
    """A run failed; the message carries the first cause."""


class InfeasibleError(LazyTrainError):
    """No plan fits; the message names the binding limits (exit code 1)."""

    exit_code = 1


class RefusedError(LazyTrainError):
    """A plan may not run here: its verdict has not passed or does not cover this machine (exit code 1)."""

    exit_code = 1
