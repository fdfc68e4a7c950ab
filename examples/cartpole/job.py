"""The whole job on one machine: three rollout workers and a trainer, each a process, with a queue between them.

tq up -f examples/quickstart.yaml -- python examples/cartpole/job.py
"""

from __future__ import annotations

import argparse
import multiprocessing
import signal
import sys
from multiprocessing import forkserver
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
from types import FrameType
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=180.0, help="seconds after which training gives up")
    arguments = parser.parse_args()
    # A Ctrl-C reaches every process of the terminal. Those that are started here ignore it: this one ends them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    forkserver.set_forkserver_preload(["torch", "tensordict", "gymnasium"])  # loaded once, not by each process
    forkserver.ensure_running()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _leave)
    print(f"CartPole with {arguments.workers} rollout workers: mean return of the last 20 episodes", flush=True)
    context = multiprocessing.get_context("forkserver")
    seed = f"--seed={arguments.seed}"
    trainer = context.Process(
        target=_trainer, args=([seed, f"--workers={arguments.workers}", f"--limit={arguments.limit:g}"],)
    )
    rollouts = [
        context.Process(target=_rollout, args=([seed, f"--worker={number}"],)) for number in range(arguments.workers)
    ]
    try:
        for process in (trainer, *rollouts):
            process.start()
        sys.exit(_wait(trainer, rollouts))
    finally:
        for process in (trainer, *rollouts):
            if process.pid is not None:
                process.terminate()
                process.join()


def _leave(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


def _trainer(arguments: list[str]) -> None:
    import trainer

    trainer.main(arguments)


def _rollout(arguments: list[str]) -> None:
    import rollout

    rollout.main(arguments)


def _wait(trainer: ForkServerProcess, rollouts: list[ForkServerProcess]) -> int:
    """The trainer's exit code, or that of a rollout worker that failed before."""
    running: dict[Any, ForkServerProcess] = {process.sentinel: process for process in (trainer, *rollouts)}
    while running:
        for sentinel in wait(list(running)):
            ended = running.pop(sentinel)
            ended.join()
            if ended.exitcode:
                return ended.exitcode if ended.exitcode > 0 else 128 - ended.exitcode
    return 0


if __name__ == "__main__":
    main()
