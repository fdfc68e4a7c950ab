"""``python -m tq_operator``: run the operator with settings from the environment."""

from __future__ import annotations

import sys

from tq_operator.runtime.main import main

if __name__ == "__main__":
    sys.exit(main())
