"""A real Chromium, driven over its debugging protocol: what a person sees and does, and what axe-core says of it."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import websocket

from tests.waiting import wait_until

AXE = "axe-core-4.14.1.tgz"
AXE_SHA256 = "e6b0ce02b84d892e2e33e403485e7f3d6c29e2be6df65daf44d89ba564139745"
BROWSERS = ("chromium-headless-shell", "chromium", "google-chrome", "chromium-browser")


def browser() -> str:
    for name in BROWSERS:
        if found := shutil.which(name):
            return found
    pytest.fail("no Chromium here; as root `scripts/setup` installs Debian's chromium-headless-shell")


def axe() -> str:
    """The script of axe-core, kept in the cache of the tests."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "transferqueue" / "npm"
    archive = cache / AXE
    if not archive.exists():
        cache.mkdir(parents=True, exist_ok=True)
        name, version = AXE.removesuffix(".tgz").rsplit("-", 1)
        subprocess.run(["npm", "pack", "--silent", f"{name}@{version}"], cwd=cache, check=True, timeout=250)
    content = archive.read_bytes()
    assert hashlib.sha256(content).hexdigest() == AXE_SHA256
    shown = subprocess.run(
        ["tar", "xzOf", str(archive), "package/axe.min.js"], capture_output=True, check=True, timeout=60
    )
    return shown.stdout.decode()


class Page:
    """A tab. Errors of its scripts fail the next call."""

    def __init__(self, socket: websocket.WebSocket) -> None:
        self._socket = socket
        self._number = 0
        self.errors: list[str] = []
        for domain in ("Page", "Runtime"):
            self.call(f"{domain}.enable")
        self.call("Page.setBypassCSP", enabled=True)  # for axe alone; other tests show that the page needs none

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._socket.recv())
            if message.get("method") == "Runtime.exceptionThrown":
                self.errors.append(json.dumps(message["params"]))
            if message.get("id") == self._number:
                assert "error" not in message, message
                assert not self.errors, self.errors
                found: dict[str, Any] = message["result"]
                return found

    def ask(self, script: str) -> Any:
        """The value of a script, awaited if it is a promise."""
        result = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def show(self, url: str, width: int = 1100, height: int = 900, dark: bool = False) -> Page:
        """Load a page; it is drawn when this returns."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=url)
        drawn = "document.body && document.body.dataset.drawn && document.body.dataset.plotted"
        wait_until(lambda: self.ask(drawn) == "true", f"{url} is drawn", 120)
        return self

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def text(self, selector: str = "body") -> str:
        return str(self.ask(f"document.querySelector({json.dumps(selector)}).innerText"))

    def keep(self, name: str) -> bytes:
        """A picture of the whole page; also a file in the folder TQ_PICTURES."""
        found = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        content = base64.b64decode(found["data"])
        if folder := os.environ.get("TQ_PICTURES"):
            (Path(folder) / f"{name}.png").write_bytes(content)
        return content

    def violations(self) -> list[str]:
        """What axe-core finds that is serious or worse."""
        self.ask(axe())
        found = self.ask("axe.run().then((found) => found.violations)")
        return [
            f"{each['id']}: {each['nodes'][0]['html']}" for each in found if each["impact"] in ("serious", "critical")
        ]


@contextmanager
def open_browser(folder: Path) -> Iterator[Page]:
    """It reaches nothing but this machine: every other name resolves to nothing."""
    profile = folder / "profile"
    command = [
        browser(), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
        "--remote-debugging-port=0", "--remote-allow-origins=*",
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
        f"--user-data-dir={profile}", "about:blank",
    ]  # fmt: skip
    environ = {**os.environ, "HOME": str(folder), "NO_PROXY": "127.0.0.1"}
    process = subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        file = profile / "DevToolsActivePort"
        port = wait_until(lambda: file.exists() and file.read_text().count("\n") and file.read_text(), "it runs", 120)
        with urllib.request.urlopen(f"http://127.0.0.1:{port.split()[0]}/json/list", timeout=120) as answer:
            tab = next(each for each in json.load(answer) if each["type"] == "page")
        socket = websocket.create_connection(tab["webSocketDebuggerUrl"], timeout=120)
        try:
            yield Page(socket)
        finally:
            socket.close()
    finally:
        process.kill()
        process.wait(60)
