"""The command ``tq``."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Entry point of the console script."""
    from transfer_queue.cli.app import app
    from transfer_queue.cli.faults import run

    sys.exit(run(app, prog_name="tq"))
