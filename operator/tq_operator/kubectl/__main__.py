"""``python -m tq_operator.kubectl``."""

from __future__ import annotations

import sys

from tq_operator.kubectl import main

if __name__ == "__main__":
    sys.exit(main())
