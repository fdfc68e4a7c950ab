"""The table of features in docs/architecture.md: tests that exist, and refusals that are made."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.features import COLUMNS, TABLE, Refused, Works
from transfer_queue.config.processes import BackendChoice, ControllerConfig
from transfer_queue.config.resource import TransferQueue, parse
from transfer_queue.config.security import ServerSecurity
from transfer_queue.errors import ConfigError
from transfer_queue.launch.conf import merge_settings, plan_queue
from transfer_queue.launch.plan import plan_local
from transfer_queue.runtime.controller import serve

TESTS = Path(__file__).parents[2]
CELLS = [(f"{name}, {column}", cell) for name, row in TABLE.items() for column, cell in zip(COLUMNS, row, strict=True)]


def resource(spec: str) -> TransferQueue:
    head = {"apiVersion": "transferqueue.io/v1beta1", "kind": "TransferQueue", "metadata": {"name": "q"}}
    return parse({**head, "spec": yaml.safe_load(spec)})


def init(backend: str) -> Any:
    section = {"offload": {"enabled": True}} if backend == "MooncakeStore" else {}
    merged = merge_settings({"backend": {"storage_backend": backend, backend: section}})
    return plan_queue(merged, allow_ray=backend == "Yuanrong")


def controller(backend: str) -> None:
    security = ServerSecurity(policy_file="policy.yaml", tokens_file="tokens")
    config = ControllerConfig(backend=BackendChoice(kind=backend), security=security)
    asyncio.run(serve(config, asyncio.Event()))


ASK = {"resource": resource, "init": init, "controller": controller, "tq up": lambda spec: plan_local(resource(spec))}


@pytest.mark.parametrize("test", sorted({cell.test for _, cell in CELLS if isinstance(cell, Works)}))
def test_each_cell_that_works_names_a_test_that_exists(test: str) -> None:
    file, _, name = test.partition("::")
    assert f"def {name}(" in (TESTS / file).read_text()


@pytest.mark.parametrize(("name", "cell"), [each for each in CELLS if isinstance(each[1], Refused)])
def test_each_refusal_is_made_with_its_reason(name: str, cell: Refused) -> None:
    with pytest.raises(ConfigError) as refused:
        ASK[cell.where](cell.asked)
    assert cell.message in str(refused.value)
