"""What a controller serves over HTTP beside its metrics: the page, and the JSON that it draws."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from transfer_queue.config.security import ServerSecurity
from transfer_queue.runtime.http import Page
from transfer_queue.runtime.observer import Observer
from transfer_queue.web import read_pages

if TYPE_CHECKING:
    from transfer_queue.runtime.controller import Controller

__all__ = ["make_pages"]


def make_pages(controller: Controller) -> dict[str, Page]:
    """Pages by path; none where the queue is secured, as they show names to everybody. The controller's past is kept
    from now on if there is somebody to show it to."""
    config = controller.config
    if config.security != ServerSecurity():
        return {}
    pages: dict[str, Page] = {path: partial(_same, *content) for path, content in read_pages().items()}
    pages["/api/dataflow"] = partial(_dataflow, controller)
    if config.metrics_port is not None:
        controller.observer = Observer(controller)
        controller.observer.start(asyncio.get_running_loop())
        pages["/api/history"] = controller.observer.page
        pages["/api/timeline"] = controller.observer.timeline_page
    return pages


async def _same(content_type: str, content: bytes, query: Mapping[str, str]) -> tuple[str, list[bytes]]:
    return content_type, [content]


async def _dataflow(controller: Controller, query: Mapping[str, str]) -> tuple[str, list[bytes]]:
    return "application/json", await controller.long_answers.json()
