"""A controller with something wrong, named by PLANTED: ``protocol``, a version of its own; ``clock``, an hour late."""

from __future__ import annotations

import os
import sys
import time

from transfer_queue.runtime import controller, server

if os.environ["PLANTED"] == "protocol":
    server.PROTOCOL = 99
else:
    real = time.time
    time.time = lambda: real() - 3600
sys.exit(controller.main())
