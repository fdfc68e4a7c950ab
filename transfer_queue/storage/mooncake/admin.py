"""The master's HTTP API of its metrics port. Blocking; answers are small except for the list of keys."""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request
from typing import Any

import msgspec

from transfer_queue.errors import ConnectionLostError

__all__ = ["Admin"]

# A proxy from the environment is never meant for the master.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Admin:
    """Requests to ``address`` (host:port). Methods raise ConnectionLostError."""

    def __init__(self, address: str, timeout_s: float = 3.0) -> None:
        self.address = address
        self._timeout_s = timeout_s

    def ready(self) -> bool:
        """Whether the master serves: up and leader. A standby's /health is 200 as well."""
        try:
            text = self._get("health")
        except ConnectionLostError:
            return False
        return '"service_ready":true' in text or "service_ready" not in text  # old masters answer plain text

    def segment_usage(self, segment: str) -> tuple[int, int] | None:
        """(bytes used, capacity) of the segment called ``segment``; None if it is not mounted."""
        try:
            answer = msgspec.json.decode(self._get("get_segments_detail"), type=dict[str, Any])
        except ConnectionLostError:
            return self._old_segment_usage(segment)
        for item in answer.get("segments", []):
            if segment in (item.get("segment_name"), item.get("te_endpoint")):
                return int(item["allocator_used_bytes"]), int(item["size_bytes"])
        return None

    def _old_segment_usage(self, segment: str) -> tuple[int, int] | None:
        # Before 0.3.13: "<segment>\nUsed(bytes): N\nCapacity(bytes) : N"
        numbers = [int(word) for word in self._get(f"query_segment?segment={segment}").split() if word.isdigit()]
        return (numbers[0], numbers[1]) if len(numbers) == 2 else None

    def keys(self, prefix: str) -> list[str]:
        """All complete keys that start with ``prefix``."""
        return [key for key in self._get("get_all_keys").split() if key.startswith(prefix)]

    def _get(self, path: str) -> str:
        try:
            with _opener.open(f"http://{self.address}/{path}", timeout=self._timeout_s) as answer:
                return str(answer.read().decode())
        except (OSError, http.client.HTTPException, urllib.error.HTTPError) as error:
            raise ConnectionLostError(
                f"the Mooncake master's HTTP port {self.address} does not answer ({error}); check adminAddress"
            ) from None
