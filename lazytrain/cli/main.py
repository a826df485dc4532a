"""Assembles the commands and turns errors into one line and an exit code (0 done, 1 infeasible, 2 bad input)."""

from __future__ import annotations

import json
import os
import sys

import typer
from pydantic import ValidationError

from lazytrain import __version__
from lazytrain.cli import hardware, planning, training
from lazytrain.cli.common import console
from lazytrain.errors import LazyTrainError

app = typer.Typer(
    help="Plan one training step of a large model on limited hardware, check it in simulation, and run it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def version(show: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    if show:
        print(__version__)
        raise typer.Exit


hardware.register(app)
planning.register(app)
training.register(app)


def fail(message: str, code: int) -> None:
    """One line on stderr; with --json also one object on stdout, so that a caller always has something to parse."""
    line = " ".join(message.split())
    if "--json" in sys.argv:
        print(json.dumps({"error": line, "exit_code": code}))
    console.print(f"error: {line}", style="bold red", markup=False, highlight=False, soft_wrap=True)
    sys.exit(code)


def main() -> None:
    try:
        app()
    except LazyTrainError as error:
        fail(str(error), error.exit_code)
    except ValidationError as error:
        first = error.errors()[0]
        fail(f"{'.'.join(str(p) for p in first['loc'])}: {first['msg']} (got {first.get('input')!r})", 2)
    except KeyboardInterrupt:
        fail("interrupted", 130)
    except BrokenPipeError:  # the reader of our output went away, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except OSError as error:
        fail(f"{error.filename or 'system'}: {error.strerror or error}", 2)
    except Exception as error:  # exit code 1 means infeasible, so no fault of ours may end with it
        if os.environ.get("LAZYTRAIN_DEBUG"):
            raise
        fail(f"unexpected {type(error).__name__}: {error} (set LAZYTRAIN_DEBUG=1 for where)", 2)
