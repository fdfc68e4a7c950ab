"""The process that restores a queue once and saves it on a schedule.

``python -m transfer_queue.checkpoint.saver --config FILE``, with a CheckpointConfig. It is ready once the queue is
restored. A restore that fails ends it with one line. A save that fails is reported, and the next one starts on
schedule.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path

import msgspec

from transfer_queue._printable import log_to_stderr
from transfer_queue.checkpoint.directory import CheckpointDirectory
from transfer_queue.checkpoint.load import load_queue, was_interrupted
from transfer_queue.checkpoint.save import save_queue
from transfer_queue.checkpoint.scheduled import moments, save_at, save_next
from transfer_queue.checkpoint.series import Series, newest
from transfer_queue.client.client import Client
from transfer_queue.client.shards import engines_of
from transfer_queue.config.document import load_document
from transfer_queue.config.processes import CheckpointConfig
from transfer_queue.config.running import CheckpointReport, LastCheckpoint, Restored, read_report, write_note
from transfer_queue.control.checkpoint import counted
from transfer_queue.errors import CheckpointError, ConnectionLostError, QueueNotEmptyError, TransferQueueError
from transfer_queue.runtime.http import StatusServer
from transfer_queue.runtime.metrics import Metrics
from transfer_queue.runtime.process import announce_ready, run_process
from transfer_queue.runtime.tls import ReloadingFile

__all__ = ["Saver", "main"]

log = logging.getLogger(__name__)

_PAUSE_S = 0.2
_LONGEST = 1000
"""Characters of an error that the report keeps."""


class Saver:
    """Blocking; on a thread of its own. ``missing``: what it waits for, empty once the queue is restored."""

    def __init__(self, config: CheckpointConfig, serves: Callable[[], None] = lambda: None) -> None:
        """``serves``: called once the queue is restored."""
        self._config = config
        self._serves = serves
        self._file = Path(config.status_file)
        self.settings: Callable[[], CheckpointConfig] = lambda: config
        """As the file has them now. A restore that waits uses these: they change without a restart."""
        self.missing = "the queue is not restored yet"
        self.report = read_report(self._file) or CheckpointReport()

    def run(self) -> None:
        """Restore the queue, then save it until the process ends. Raises TransferQueueError."""
        try:
            self._run(self._config)
        except OSError as error:
            if isinstance(error, TransferQueueError):
                raise
            place = self._config.restore_from if self.missing else self._config.destination
            raise CheckpointError(f"cannot use {place}: {error.strerror or error}") from error

    def _run(self, config: CheckpointConfig) -> None:
        series = None if config.destination is None else Series(config.destination, config.attach.identity)
        times = moments(config.schedule) if config.schedule is not None else ()
        if config.restore_from is not None and self.report.restored is None:
            self._restore()
        self.missing = ""
        self._serves()
        if series is not None:
            save_at(times, series, config.keep, lambda: self._save(series), self._failed)

    def _restore(self) -> None:
        with self._client() as client:
            self._wait_for_units(client)
            if (url := self.settings().restore_from) is None:
                return
            directory = newest(url)
            rows = client.run(client.rows.row_counts)
            if self.report.restoring and rows and not was_interrupted(client):
                restored = Restored(
                    url, False, f"a restore of {url} was interrupted, and the queue has {counted(rows)}"
                )
            else:
                self._note(restoring=True)
                try:
                    manifest = load_queue(client, directory)
                    loaded = f"{manifest.rows} rows in {manifest.partitions} partitions, {manifest.nbytes} bytes"
                    restored = Restored(url, True, f"loaded {loaded}, from {directory}")
                except QueueNotEmptyError as error:
                    restored = Restored(url, False, f"{url} was not loaded: {error}")
        log.warning("%s", restored.message)
        self._note(restored=restored, restoring=False)

    def _wait_for_units(self, client: Client) -> None:
        engines = engines_of(client.engine)
        while min(engine.writable_units for engine in engines) < (units := self.settings().units):
            self.missing = f"fewer than {units} storage units are there"
            time.sleep(_PAUSE_S)

    def _save(self, series: Series) -> None:
        def save(directory: CheckpointDirectory, former: CheckpointDirectory | None) -> None:
            at = datetime.now(timezone.utc).isoformat(timespec="seconds").replace("+00:00", "Z")
            manifest = save_queue(client, directory, former=former)
            self._note(last=LastCheckpoint(at, manifest.rows, manifest.nbytes, str(directory)))

        with self._client() as client:
            if not save_next(client, series, save) and self.report.last is not None:
                self._note(last=msgspec.structs.replace(self.report.last, error=""))

    def _failed(self, why: str) -> None:
        log.warning("%s", why)
        self._note(last=msgspec.structs.replace(self.report.last or LastCheckpoint(), error=why[:_LONGEST]))

    def _note(self, **news: object) -> None:
        self.report = msgspec.structs.replace(self.report, **news)
        try:
            write_note(self._file, self.report)
        except OSError as error:  # /status has it all the same
            log.warning("cannot write %s: %s", self._file, error.strerror)

    @contextlib.contextmanager
    def _client(self) -> Iterator[Client]:
        """A client of the queue. Before the restore is over, it waits for servers that are still starting."""
        while True:
            try:
                client = Client("checkpoint", self._config.attach)
                break
            except ConnectionLostError as error:
                if not self.missing:
                    raise
                self.missing = str(error)
        try:
            yield client
        finally:
            client.close()


async def serve(config: CheckpointConfig, stop: asyncio.Event, path: str) -> None:
    """Run until ``stop`` is set, which abandons a save in progress. Raises TransferQueueError."""
    log_to_stderr(logging.INFO)
    saver = Saver(config, announce_ready)
    saver.settings = ReloadingFile([path], lambda: load_document(CheckpointConfig, path)).get

    async def status(query: Mapping[str, str]) -> tuple[str, list[bytes]]:
        return "application/json", [msgspec.json.encode(saver.report)]

    pages = StatusServer(Metrics(lambda scrape: iter(())), lambda: saver.missing, {"/status": status})
    if config.metrics_port is not None:
        await pages.listen(config.host, config.metrics_port, None)
    stopped = asyncio.create_task(stop.wait())
    work = asyncio.create_task(asyncio.to_thread(saver.run))
    try:
        await asyncio.wait([work, stopped], return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            await work
            await stopped  # restored, and nothing to save
    finally:
        pages.close()


def main() -> int:
    """Run until SIGTERM; returns the exit code."""
    return run_process(CheckpointConfig, serve, "transfer_queue.checkpoint.saver")


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # a save that is under way would go on until it is done
