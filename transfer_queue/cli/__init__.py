"""The command ``tq``."""

from __future__ import annotations

__all__ = ["main"]


def main() -> None:
    """Entry point of the console script."""
    from transfer_queue.cli.app import app

    app()
