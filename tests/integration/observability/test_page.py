"""The controller's page, drawn by a real browser from a real run."""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from tensordict import TensorDict

import transfer_queue as tq
from tests.integration.stack import ROOT, Stack, running_stack
from tests.waiting import wait_until
from transfer_queue.cli.connection import ControllerConnection
from transfer_queue.cli.top import draw_picture
from transfer_queue.config.attach import AttachConfig, ControllerAddresses
from transfer_queue.web import CONTENT_POLICY, read_pages

pytestmark = pytest.mark.timeout(600)  # each test starts processes, on whatever machine
TOP_PICTURE = ROOT / "docs" / "pictures" / "top.svg"
PICTURE = ROOT / "docs" / "pictures" / "page.png"
BROWSERS = ("chromium-headless-shell", "chromium", "google-chrome", "chromium-browser")
HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def busy() -> Iterator[Stack]:
    """A step in the middle: rollouts done, rewards half done, a trainer that waits for the rest."""
    with running_stack(units=2, capacity="64Mi") as stack:
        tq.init({"controller": {"addresses": [stack.address]}})
        client = tq.get_client()
        keys = [f"prompt-{number}" for number in range(64)]
        for name, count in (("tokens", 64), ("log_probs", 64), ("reward", 32)):
            fields = TensorDict({name: torch.ones(count, 20_000 if name != "reward" else 1)}, [count])
            tq.kv_batch_put(keys=keys[:count], partition_id="train_step_7", fields=fields)
        client.get_meta(["tokens"], 48, "train_step_7", task_name="reference")
        waiting = threading.Thread(
            target=lambda: client.get_meta(["tokens", "reward"], 64, "train_step_7", task_name="trainer", timeout=300)
        )
        waiting.start()
        wait_until(lambda: stack.controller.metric("tq_controller_waiting") == 1, "the trainer waits")
        wait_until(lambda: stack.used() > 0, "the units have reported")
        yield stack
        tq.kv_batch_put(
            keys=keys[32:], partition_id="train_step_7", fields=TensorDict({"reward": torch.ones(32, 1)}, [32])
        )
        waiting.join(30)
        tq.close()


def browser() -> str:
    for name in BROWSERS:
        if found := shutil.which(name):
            return found
    pytest.fail("no Chromium here; as root `scripts/setup` installs Debian's chromium-headless-shell")


def browse(stack: Stack, folder: Path, *arguments: str, path: str = "/") -> str:
    """The browser's output. It reaches nothing but this machine: every other name resolves to nothing."""
    command = [
        browser(),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--enable-logging=stderr",
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
        f"--user-data-dir={folder / 'profile'}",
        "--window-size=1100,760",
        "--virtual-time-budget=4000",
        *arguments,
        f"http://{stack.controller.ready['metrics']}{path}",
    ]
    environ = {**os.environ, "HOME": str(folder), "NO_PROXY": "127.0.0.1"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    assert "Content Security Policy" not in done.stderr
    assert "Uncaught" not in done.stderr
    return done.stdout


def export_svg(console: Console, title: str, place: int = 0) -> str:
    """What was printed, as a picture. No font from elsewhere: the docs must work offline."""
    form = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    return console.export_svg(title=title, code_format=form, unique_id=f"{title.replace(' ', '-')}-{place}")


def record_svg(frames: list[tuple[Console, float]], title: str) -> str:
    """A recording of a terminal: what each console has printed, for so many seconds."""
    lines = [console.export_text(clear=False).count("\n") for console, _ in frames]
    for (console, _), own in zip(frames, lines, strict=True):
        for _ in range(max(lines) - own):  # all of one height
            console.print()
    pictures = [export_svg(console, title, place) for place, (console, _) in enumerate(frames)]
    (size,) = {re.search(r'viewBox="([^"]+)"', picture)[1] for picture in pictures}  # type: ignore[index]
    times = [seconds for _, seconds in frames]
    whole = sum(times)
    found = [f'<svg viewBox="{size}" xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{title}">']
    for place, picture in enumerate(pictures):
        start, end = sum(times[:place]) / whole, sum(times[: place + 1]) / whole
        shown = ["hidden", "visible", "hidden"] if place else ["visible", "visible", "hidden"]
        last = place == len(frames) - 1
        values, keys = (shown[:2], [0.0, start]) if last else (shown, [0.0, start, end])
        animation = (
            f'<animate attributeName="visibility" calcMode="discrete" dur="{whole:g}s" repeatCount="indefinite" '
            f'values="{";".join(values)}" keyTimes="{";".join(f"{key:.4f}" for key in keys)}"/>'
        )
        still = "visible" if last else "hidden"  # where nothing moves, as in print
        found.append(f'<g visibility="{still}">{animation}{picture}</g>')
    return "\n".join([*found, "</svg>"])


def test_the_page_shows_where_samples_wait(busy: Stack, tmp_path: Path) -> None:
    page = browse(busy, tmp_path, "--dump-dom")
    assert 'data-drawn="true"' in page
    for text in (
        "train_step_7",
        "tokens 64/64",
        "reward 32/64",
        "2 of 2 storage units",
        "reference: 48 consumed, 16 ready",
        "trainer: 0 consumed, 32 ready, 1 waiting",
        "32 are ready, 'reward' is missing on 32 of 64",
        "127.0.0.1:",
        "connected",
    ):
        assert text in page, f"{text!r} is not in {page}"


def test_a_picture_of_the_page_is_kept_in_the_docs(busy: Stack, tmp_path: Path) -> None:
    taken = tmp_path / "page.png"
    browse(busy, tmp_path, f"--screenshot={taken}", "--window-size=1100,1180")
    content = taken.read_bytes()
    assert content.startswith(b"\x89PNG")
    assert len(content) > 10_000
    if os.environ.get("TQ_KEEP_PICTURES"):  # make pictures
        PICTURE.write_bytes(content)
    assert PICTURE.read_bytes().startswith(b"\x89PNG")


def test_status_in_a_program_says_the_same(busy: Stack) -> None:
    status = tq.status()
    assert status.partitions[0]["fields"] == {"tokens": 64, "log_probs": 64, "reward": 32}
    assert "train_step_7: 64 rows; tokens 64/64, log_probs 64/64, reward 32/64" in repr(status)
    assert "task 'trainer' has waited " in repr(status)
    assert "reward 32/64" in status._repr_html_()


def test_the_page_filters_partitions_by_its_address(busy: Stack, tmp_path: Path) -> None:
    page = browse(busy, tmp_path, "--dump-dom", path="/#filter=no_such_name")
    assert "No partition or task has this text in its name." in page
    assert "train_step_7</span></th>" not in page


def test_names_of_users_are_shown_and_never_run(busy: Stack, tmp_path: Path) -> None:
    tq.kv_put(key="a", partition_id=HOSTILE, fields={"x": torch.ones(1)})  # last: it is no sight for the picture
    page = browse(busy, tmp_path, "--dump-dom")
    assert HOSTILE.replace("<", "&lt;").replace(">", "&gt;") in page
    assert "<img" not in page


def test_a_picture_of_tq_top_is_kept_in_the_docs(busy: Stack) -> None:
    with ControllerConnection(AttachConfig(controller=ControllerAddresses(addresses=[busy.address]))) as link:
        picture = link.look()
    console = Console(record=True, width=112, file=io.StringIO(), highlight=False)
    console.print("$ tq top --once\n")
    for part in draw_picture(picture, None):
        console.print(part)
    image = export_svg(console, "tq top")
    for text in ("train_step_7", "trainer", "missing"):
        assert text in image
    assert "url(http" not in image
    if os.environ.get("TQ_KEEP_PICTURES"):  # make pictures
        TOP_PICTURE.write_text(image)
    assert "train_step_7" in TOP_PICTURE.read_text()


def test_every_answer_forbids_scripts_from_elsewhere(busy: Stack) -> None:
    import urllib.request

    for path in (*read_pages(), "/api/dataflow", "/metrics"):
        with urllib.request.urlopen(f"http://{busy.controller.ready['metrics']}{path}", timeout=30) as answer:
            assert answer.headers["Content-Security-Policy"] == CONTENT_POLICY
            assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert "unsafe" not in CONTENT_POLICY


def test_the_page_only_reads(busy: Stack) -> None:
    import urllib.error
    import urllib.request

    request = urllib.request.Request(
        f"http://{busy.controller.ready['metrics']}/api/dataflow", method="POST", data=b"x"
    )
    with pytest.raises(urllib.error.HTTPError, match="405"):
        urllib.request.urlopen(request, timeout=30)
