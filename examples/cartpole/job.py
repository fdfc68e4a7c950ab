"""The whole job on one machine: three rollout workers and a trainer, each a process, with a queue between them.

tq up -f examples/quickstart.yaml -- python examples/cartpole/job.py
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType

HERE = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=180.0, help="seconds after which training gives up")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, _leave)
    seed = f"--seed={arguments.seed}"
    print(
        f"CartPole: {arguments.workers} rollout workers and a trainer; mean return of the last 20 episodes:", flush=True
    )
    trainer = _start("trainer.py", seed, f"--workers={arguments.workers}", f"--limit={arguments.limit:g}")
    rollouts = [_start("rollout.py", seed, f"--worker={number}") for number in range(arguments.workers)]
    try:
        sys.exit(_wait(trainer, rollouts))
    finally:
        for process in (trainer, *rollouts):
            if process.poll() is None:
                process.terminate()
            process.wait()


def _leave(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


def _start(script: str, *arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, str(HERE / script), *arguments])


def _wait(trainer: subprocess.Popen[bytes], rollouts: list[subprocess.Popen[bytes]]) -> int:
    """The trainer's exit code, or that of a rollout worker that failed before."""
    while True:
        try:
            code = trainer.wait(0.2)
        except subprocess.TimeoutExpired:
            failed = next((process.returncode for process in rollouts if process.poll()), None)
            if failed is not None:
                return failed
        else:
            return code or max(process.wait(10) for process in rollouts)


if __name__ == "__main__":
    main()
