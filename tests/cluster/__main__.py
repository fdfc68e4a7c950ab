"""Run the cluster tool: python -m tests.cluster --help."""

from __future__ import annotations

import sys

from tests.cluster.cli import main

sys.exit(main())
