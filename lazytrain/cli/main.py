"""Assembles the commands and turns errors into one line and an exit code (0 done, 1 infeasible, 2 bad input)."""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import NoReturn

import typer
from pydantic import ValidationError

from lazytrain import __version__
from lazytrain.cli import hardware, planning, training
from lazytrain.cli.common import note
from lazytrain.errors import LazyTrainError

INTERRUPTED = 130  # 128 + SIGINT, as shells report it

app = typer.Typer(
    help="Plan one training step of a large model on limited hardware, check it in simulation, and run it.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context, version: bool = typer.Option(False, "--version", help="Print the version and exit.")
) -> None:
    if version:
        print(__version__)
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(2)


hardware.register(app)
planning.register(app)
training.register(app)


def fail(message: str, code: int) -> NoReturn:
    """One line on stderr; with --json also one object on stdout, so that a caller always has something to parse."""
    line = " ".join(message.split())
    if "--json" in sys.argv:
        print(json.dumps({"error": line, "exit_code": code}))
    note(f"error: {line}", "bold red")
    sys.exit(code)


def main() -> None:
    # Asked to stop by a scheduler is as asked by a person: the run's record is written.
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        code = app(standalone_mode=False)
    except Exception as error:
        if os.environ.get("LAZYTRAIN_DEBUG"):
            raise
        explain(error)
    except KeyboardInterrupt:
        code = INTERRUPTED
    if code == INTERRUPTED:  # typer makes it of Ctrl-C
        fail("interrupted", INTERRUPTED)
    sys.exit(code)


def explain(error: Exception) -> NoReturn:
    """Ends the process with what a person can do about ``error``."""
    if isinstance(error, LazyTrainError):
        fail(str(error), error.exit_code)
    if isinstance(error, typer.TyperException):  # bad usage
        context = getattr(error, "ctx", None)
        fail(f"{error.format_message()} (see `{context.command_path if context else 'lazytrain'} --help`)", 2)
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        fail(f"{'.'.join(str(p) for p in first['loc'])}: {first['msg']} (got {first.get('input')!r})", 2)
    if isinstance(error, BrokenPipeError):  # the reader of our output went away, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    if isinstance(error, OSError):
        fail(f"{error.filename or 'system'}: {error.strerror or error}", 2)
    # Exit code 1 means infeasible, so no fault of ours may end with it.
    fail(f"unexpected {type(error).__name__}: {error} (set LAZYTRAIN_DEBUG=1 for where)", 2)
