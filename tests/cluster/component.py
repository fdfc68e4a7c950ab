"""One long-running program of the cluster: how it is started, whether it lives, what it said last."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.cluster import cgroups
from tests.cluster.commands import tail
from tests.cluster.errors import ClusterError
from tests.cluster.paths import STATE_VARIABLE, state_folder

POLL_SECONDS = 0.25  # most look with a kubectl of their own, which takes from what they wait for

# The shell enters the control group, then forks off the program: there is no moment outside the group, and the
# program is nobody's child, so that it outlives the tool.
_ENTER_AND_DETACH = 'echo $$ > "$0" && exec setsid --fork "$@"'


@dataclass(frozen=True)
class Component:
    """A program by the name it has in `status`, in control groups and in its log's file name."""

    name: str
    program: Path

    @property
    def log(self) -> Path:
        """File of everything the program printed."""
        return state_folder() / "log" / f"{self.name}.log"

    def start(
        self,
        arguments: Sequence[str | Path],
        *,
        enter: Sequence[str | Path] = (),
        environment: Mapping[str, str] | None = None,
        keep_open: tuple[int, ...] = (),
    ) -> None:
        """Run the program detached, through the command prefix `enter` (such as nsenter …)."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        command = [*enter, self.program, *arguments]
        with self.log.open("ab") as log:
            subprocess.run(
                ["sh", "-c", _ENTER_AND_DETACH, str(cgroups.entrance(self.name)), *(str(word) for word in command)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=keep_open,
                env={**os.environ, **(environment or {}), STATE_VARIABLE: str(state_folder())},
                check=True,
            )

    def pid(self) -> int | None:
        """Its process id, or None while it is not running."""
        try:
            program = os.stat(self.program)
        except FileNotFoundError:
            return None
        for pid in sorted(cgroups.members(f"system/{self.name}")):
            try:
                running = os.stat(f"/proc/{pid}/exe")
            except OSError:
                continue
            if (running.st_dev, running.st_ino) == (program.st_dev, program.st_ino):
                return pid
        return None

    def last_words(self) -> str:
        """The last lines of its log, for an error message."""
        try:
            text = self.log.read_text(errors="replace")
        except FileNotFoundError:
            text = ""
        return f"Last lines of {self.log}:\n{tail(text) or '  | (empty)'}"


def wait_until(condition: Callable[[], bool], what: str, seconds: float, components: Sequence[Component] = ()) -> None:
    """Wait until `condition` holds.

    Raises ClusterError when one of `components` dies meanwhile, or after `seconds`, with their last words.
    """
    deadline = time.monotonic() + seconds
    seen: set[Component] = set()
    while not condition():
        for component in components:
            if component.pid():
                seen.add(component)
            elif component in seen or not cgroups.members(f"system/{component.name}"):
                raise ClusterError(f"{component.name} died, so {what} cannot be. {component.last_words()}")
        if time.monotonic() > deadline:
            words = "\n".join(component.last_words() for component in components)
            raise ClusterError(f"{what}: not so after {seconds:.0f} s. {words}")
        time.sleep(POLL_SECONDS)


def program(name: str) -> Path:
    """A program of this machine by its name."""
    found = shutil.which(name)
    if not found:
        raise ClusterError(f"{name} is not on PATH. Install its Debian package, or add /usr/sbin to PATH.")
    return Path(found).resolve()
