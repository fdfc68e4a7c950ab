"""The controller's page in a real browser: a stage that is stuck, many partitions, nothing at all."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from rich.text import Text
from tensordict import TensorDict

from tests.browser import Page, open_browser
from tests.integration.observability.test_page import record_svg
from tests.integration.stack import ROOT, Stack, running_stack
from tests.waiting import wait_until
from transfer_queue import TransferQueueClient
from transfer_queue.cli.connection import ControllerConnection
from transfer_queue.cli.top import draw_picture
from transfer_queue.config.attach import AttachConfig, ControllerAddresses
from transfer_queue.config.resource import parse
from transfer_queue.errors import TransferQueueError
from transfer_queue.launch.local import LocalStack
from transfer_queue.launch.plan import plan_local
from transfer_queue.launch.ports import with_free_ports

pytestmark = pytest.mark.timeout(600)  # a browser and servers start, on whatever machine
STAGES = {"reward": (["tokens"], "reward"), "advantage": (["reward"], "adv"), "trainer": (["tokens", "adv"], "")}
ROWS = 8
WHY_PICTURE = ROOT / "docs" / "pictures" / "why.svg"


class Pipeline:
    """rollout -> reward -> advantage -> trainer, a client each. Reward is stuck after its first batch, or needs
    ``slow_s`` seconds for each."""

    def __init__(self, stack: Stack, batches: int = 2, slow_s: float = 0.0) -> None:
        self.batches, self.slow_s = batches, slow_s
        config = AttachConfig(controller=ControllerAddresses(addresses=[stack.address]))
        self.goes_on = threading.Event()
        self.clients = {name: TransferQueueClient(f"{name}_worker", config) for name in ("rollout", *STAGES)}
        for _ in range(batches):
            self.clients["rollout"].put(TensorDict({"tokens": torch.ones(ROWS, 100)}, [ROWS]), partition_id="train_7")
        self.threads = [threading.Thread(target=self.run, args=(name,)) for name in STAGES]
        for thread in self.threads:
            thread.start()

    def run(self, name: str) -> None:
        fields, result = STAGES[name]
        for step in range(self.batches):
            meta = self.clients[name].get_meta(fields, ROWS, "train_7", task_name=name, timeout=500)
            if name == "reward" and (step or self.slow_s):
                self.goes_on.wait(self.slow_s or 500)
            if result:
                self.clients[name].put(TensorDict({result: torch.ones(ROWS, 1)}, [ROWS]), metadata=meta)

    def close(self) -> None:
        self.goes_on.set()
        for thread in self.threads:
            thread.join(60)
        for client in self.clients.values():
            client.close()


@pytest.fixture(scope="module")
def stuck() -> Iterator[Stack]:
    with running_stack(units=1, capacity="64Mi") as stack:
        pipeline = Pipeline(stack)
        try:
            wait_until(
                lambda: len(look(stack)["waiters"]) == 2 and wrote_once(stack), "advantage and trainer wait", 120
            )
            yield stack
        finally:
            pipeline.close()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with open_browser(tmp_path_factory.mktemp("browser")) as found:
        yield found


def look(stack: Stack) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(stack.controller.http("/api/dataflow")[1])
    return found


def wrote_once(stack: Stack) -> bool:
    """All stages but the trainer have written their first batch."""
    return look(stack)["counters"]["rows_put"] == 4 * ROWS


def url(stack: Stack, path: str = "/") -> str:
    return f"http://{stack.controller.ready['metrics']}{path}"


def test_the_stuck_stage_is_named_in_words_and_on_the_page(stuck: Stack, page: Page) -> None:
    cause, *_ = look(stuck)["why"]
    assert cause.startswith("field 'reward' holds up tasks 'advantage', 'trainer': 'reward' was last written ")
    assert "by reward_worker (task 'reward'), which is connected and waits for nothing itself" in cause
    assert cause.endswith(": 'reward' itself is slow")
    page.show(url(stuck))
    assert "Field 'reward' holds up tasks 'advantage', 'trainer'" in page.text("#why")
    wait_until(lambda: page.ask("document.querySelectorAll('#why .fault').length") == 1, "the cause is red", 120)
    wait_until(
        lambda: "requests waited was for reward, by reward" in page.text("#chart-reasons .verdict"),
        "the plot says why",
        60,
    )
    assert "advantage" in page.text("#chart-tasks .legend")
    wait_until(lambda: "⚠ The oldest request has waited" in page.text("#chart-reasons .verdict"), "it is red", 120)
    assert "waited" in page.text("#waiters thead")
    page.keep("stuck")
    page.ask("document.getElementById('partitions').scrollIntoView()")  # what is out of sight is not drawn
    late = "document.querySelectorAll('#partitions .late').length"
    wait_until(lambda: page.ask(late) == 2, "the tasks that wait are red", 60)
    has_all = (
        "now.partitions.forEach((item) => Object.values(item.tasks).forEach((task) => { task.consumed = item.rows; }))"
    )
    assert page.ask(f"({has_all}, draw(), {late})") == 0  # a task that has all rows only waits for new ones
    numbers = page.ask(
        "(past.queue.rows_in.fill(18), drawPast(), draw(), ['#summary', '#chart-flow .verdict'].map("
        "(name) => document.querySelector(name).textContent))"
    )
    assert all(" 18 rows/s in" in text for text in numbers), numbers


def test_a_slow_stage_is_named_in_words_and_on_the_page(page: Page) -> None:
    """It goes on all the time, so that no wait is long: what tells is the sum of them."""
    with running_stack(units=1, capacity="64Mi") as stack:
        pipeline = Pipeline(stack, batches=500, slow_s=0.5)
        try:
            wait_until(lambda: look(stack)["counters"]["rows_put"] > 503 * ROWS, "reward has written some batches", 120)
            command = ["-m", "transfer_queue.cli", "why", "--controller", stack.address]
            for _ in range(20):  # between two batches nobody waits
                done = subprocess.run(
                    [sys.executable, *command], capture_output=True, text=True, timeout=250, cwd=ROOT, check=True
                )
                if " holds up " in done.stdout:
                    break
            assert done.stdout.startswith("field 'reward' holds up "), done.stdout
            assert "by reward_worker (task 'reward'), which is connected and waits for nothing itself" in done.stdout
            assert re.search(r": 'reward' itself is slow, at [0-9.]+ rows/s", done.stdout)
            page.show(url(stack))
            wait_until(
                lambda: "requests waited was for reward, by reward" in page.text("#chart-reasons .verdict"),
                "the plot says it",
                60,
            )
            wait_until(lambda: "Field 'reward' holds up " in page.text("#why"), "the page says it", 60)
            page.keep("slow")
        finally:
            pipeline.batches = 0
            pipeline.close()


def test_a_picture_of_tq_why_is_kept_in_the_docs(stuck: Stack) -> None:
    command = ["-m", "transfer_queue.cli", "why", "--controller", stuck.address]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=250, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("field 'reward' holds up tasks 'advantage', 'trainer'")
    config = AttachConfig(controller=ControllerAddresses(addresses=[stuck.address]))
    with ControllerConnection(config) as link:
        top = draw_picture(link.look(), None)

    def screen(*parts: Any) -> Console:
        console = Console(record=True, width=100, height=24, file=io.StringIO(), highlight=False)
        for part in parts:
            console.print(part)
        return console

    cause, *others = done.stdout.rstrip().splitlines()
    shown = [Text("$ tq top --once\n"), *top]
    asked, told = Text("\n$ tq why"), Text(cause, "bold red")
    frames = [
        (screen(Text("$ tq top --once")), 1.0),
        (screen(*shown), 4.0),
        (screen(*shown, asked), 1.0),
        (screen(*shown, asked, told), 4.0),
        (screen(*shown, asked, told, *map(Text, others)), 5.0),
    ]
    image = record_svg(frames, "tq why")
    assert image.count("<animate ") == len(frames)
    assert len(image) < 120_000
    if os.environ.get("TQ_KEEP_PICTURES"):  # make pictures
        WHY_PICTURE.write_text(image)
    assert "reward" in WHY_PICTURE.read_text()


@pytest.mark.parametrize(
    ("name", "width", "dark"), [("light", 1100, False), ("dark", 1100, True), ("phone", 360, True)]
)
def test_axe_finds_nothing_serious_and_nothing_is_cut_off(
    stuck: Stack, page: Page, name: str, width: int, dark: bool
) -> None:
    page.show(url(stuck), width=width, dark=dark)
    assert page.violations() == []
    assert page.ask("document.documentElement.scrollWidth") <= width
    assert len(page.keep(name)) > 10_000


def test_a_plot_is_read_with_the_keyboard(stuck: Stack, page: Page) -> None:
    page.show(url(stuck))
    page.ask("document.querySelector('#chart-clients .plot').focus()")
    page.press("ArrowLeft")
    wait_until(lambda: "connected 4" in page.text("#chart-clients .readout"), "the value is read out", 60)
    page.ask("document.querySelector('#chart-clients summary').click()")
    assert "highest" in page.text("#chart-clients table")


def test_a_link_to_a_partition_shows_its_past_and_stays_valid(stuck: Stack, page: Page) -> None:
    page.show(url(stuck, "/#partition=train_7"))
    assert "Over time of train_7" in page.text("main")
    assert "Requests that wait for this partition" in page.text("#charts")
    page.show(url(stuck, "/#partition=never_there"))
    assert "There is no past of partition never_there" in page.text("#past-note")


def test_the_timeline_shows_which_put_ended_a_wait(stuck: Stack, page: Page) -> None:
    events = json.loads(stuck.controller.http("/api/timeline")[1])["events"]
    puts = {event["number"]: event for event in events if event["kind"] == "put"}
    ends = {(event["stage"], puts[event["ended_by"]]["stage"]) for event in events if event["ended_by"]}
    assert ends <= {("reward", "rollout_worker"), ("advantage", "reward"), ("trainer", "advantage")}
    assert ends
    page.show(url(stuck))
    page.ask("document.querySelector('#timeline summary').click()")
    page.ask("document.getElementById('timeline-span').value = '600'; drawTimeline()")
    wait_until(lambda: page.ask("document.querySelectorAll('#lanes .arrow').length"), "an arrow is drawn", 60)
    assert page.ask("document.querySelectorAll('#lanes .arrow').length") == sum(
        bool(each["ended_by"]) for each in events
    )
    assert "for tokens, adv, and goes on" in page.text("#timeline table")
    assert page.violations() == []
    page.keep("timeline")


def test_five_hundred_partitions_with_long_names_are_found(page: Page) -> None:
    with running_stack(units=1, capacity="64Mi") as stack:
        config = AttachConfig(controller=ControllerAddresses(addresses=[stack.address]))
        client = TransferQueueClient("writer", config)
        for number in range(500):
            name = f"run_{number:03d}_" + "long" * 48
            client.put(TensorDict({"tokens": torch.ones(2, 4)}, [2]), partition_id=name[:200])
        page.show(url(stack))
        drawn = int(page.ask("document.querySelectorAll('#partitions tbody tr').length"))
        assert 50 <= drawn < 500
        assert page.violations() == []
        page.keep("many")
        page.ask("document.getElementById('more').click()")
        assert int(page.ask("document.querySelectorAll('#partitions tbody tr').length")) > drawn
        page.show(url(stack, "/#filter=run_123"), width=360)
        assert page.ask("document.querySelectorAll('#partitions tbody tr').length") == 1
        assert page.ask("document.documentElement.scrollWidth") <= 360
        page.keep("many-phone")
        past = json.loads(stack.controller.http("/api/history?span=300")[1])
        assert past["left_out"]["partitions"] == 500 - len(past["partitions"])
        client.close()


def test_the_pages_of_several_controllers_link_to_each_other(page: Page, tmp_path: Path) -> None:
    resource = {
        "apiVersion": "transferqueue.io/v1alpha1",
        "kind": "TransferQueue",
        "metadata": {"name": "wide"},
        "spec": {
            "backend": {"simple": {}},
            "storage": {"replicas": 1, "capacity": "16Mi"},
            "controller": {"shards": 2},
        },
    }
    with LocalStack(plan_local(with_free_ports(parse(resource))), tmp_path).start() as stack:
        page.show(stack.page)
        assert page.text("#shards [aria-current=page]") == "controller 0"
        page.show(str(page.ask("document.querySelectorAll('#shards a')[1].href")))
        assert page.text("#shards [aria-current=page]") == "controller 1"
        assert page.violations() == []


def test_focus_selection_and_scroll_outlive_what_is_new(page: Page) -> None:
    with running_stack(units=1, capacity="64Mi") as stack:
        client = TransferQueueClient(
            "producer", AttachConfig(controller=ControllerAddresses(addresses=[stack.address]))
        )
        try:
            client.put(TensorDict({"x": torch.zeros(3)}, [3]), partition_id="train_7")
            page.show(url(stack))
            wait_until(lambda: "train_7" in page.text("#partitions"), "the partition is shown", 60)
            page.ask(
                "document.getElementById('filter').focus(); row = document.querySelector('#partitions tbody tr');"
                "getSelection().selectAllChildren(row.querySelector('th')); row.scrollIntoView({block: 'center'}); null"
            )
            before = page.ask("[scrollY, getSelection().toString()]")
            assert "train_7" in before[1]
            client.put(TensorDict({"x": torch.zeros(4)}, [4]), partition_id="train_7")
            wait_until(lambda: "7" in page.text("#partitions tbody td"), "the new rows are shown", 60)
            assert page.ask("document.querySelector('#partitions tbody tr') === row")
            assert page.ask("document.activeElement.id") == "filter"
            assert page.ask("[scrollY, getSelection().toString()]") == before
        finally:
            client.close()


def test_an_empty_queue_says_so(page: Page) -> None:
    with running_stack(units=0) as stack:
        page.show(url(stack))
        for text in ("No request is waiting.", "No rows yet", "No storage unit has registered.", "No task has waited."):
            assert text in page.text()
        assert page.violations() == []
        page.keep("empty")


def test_the_error_of_a_fetch_that_timed_out_names_the_writer(stuck: Stack) -> None:
    config = AttachConfig(controller=ControllerAddresses(addresses=[stuck.address]))
    client = TransferQueueClient("late", config)
    with pytest.raises(
        TransferQueueError, match=r"'reward' is missing on 8 of 16; 'reward' was last written .* by reward_"
    ):
        client.get_meta(["reward"], 16, "train_7", task_name="late", timeout=0.2)
    client.close()
