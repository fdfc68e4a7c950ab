"""``python -m tests.compat.surface``: describe the releases that pip fetches and write ``recorded.json``."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from tests.compat.suites.__main__ import release
from tests.compat.surface.compare import RECORDED, RELEASES, merge


def described(version: str, python: str) -> dict[str, str]:
    """What ``describe.py`` says about a release."""
    environ = {**os.environ, "PYTHONPATH": str(release(version, python))}
    command = [python, str(RECORDED.with_name("describe.py"))]
    done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, str] = json.loads(done.stdout)
    return found


def main() -> int:
    merged = merge({version: described(version, sys.executable) for version in RELEASES})
    RECORDED.write_text(json.dumps(merged, indent=0, sort_keys=True) + "\n")
    print(f"{len(merged)} names in {RECORDED}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
