"""The command line: ``lazytrain`` and ``python -m lazytrain``."""

from lazytrain.cli.main import main

__all__ = ["main"]
