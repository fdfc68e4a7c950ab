"""A ``mooncake_master`` of the installed wheel, for peers that do not start their own."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

START_S = 30.0


def free_ports(count: int) -> list[int]:
    """``count`` free ports in a row, most likely others than those of peers that start in the same moment."""
    firsts = range(21_000, 31_000, count)
    for first in random.sample(firsts, len(firsts)):
        probes = [socket.socket() for _ in range(count)]
        try:
            for offset, probe in enumerate(probes):
                probe.bind(("127.0.0.1", first + offset))
            return list(range(first, first + count))
        except OSError:
            continue
        finally:
            for probe in probes:
                probe.close()
    raise OSError(f"no {count} free ports in a row between 21000 and 31000")


class Master:
    """Serves until ``stop``."""

    def __init__(self) -> None:
        spec = importlib.util.find_spec("mooncake")
        if spec is None or not spec.submodule_search_locations:
            raise RuntimeError("the environment of the peers has no Mooncake")
        binary = Path(spec.submodule_search_locations[0]) / "mooncake_master"
        binary.chmod(binary.stat().st_mode | 0o111)
        rpc, metadata, metrics = free_ports(3)
        self.address = f"127.0.0.1:{rpc}"
        self.metadata = f"http://127.0.0.1:{metadata}/metadata"
        arguments = {
            "rpc_address": "127.0.0.1",
            "rpc_port": rpc,
            "enable_http_metadata_server": "true",
            "http_metadata_server_host": "127.0.0.1",
            "http_metadata_server_port": metadata,
            "metrics_port": metrics,
        }
        self._process = subprocess.Popen(
            [str(binary), *(f"--{name}={value}" for name, value in arguments.items())],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "no_proxy": "*"},
        )
        deadline = time.monotonic() + START_S
        while not self._ready(f"http://127.0.0.1:{metrics}/health"):
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise RuntimeError("mooncake_master does not serve")
            time.sleep(0.05)

    def _ready(self, url: str) -> bool:
        try:
            with urllib.request.urlopen(url, timeout=1) as answer:
                return bool(json.loads(answer.read()).get("service_ready"))
        except (OSError, ValueError):
            return False

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
