"""Docstrings of the calls that programs make: whole on both twins, and with examples that run."""

from __future__ import annotations

import doctest
import inspect
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import transfer_queue as tq
from transfer_queue import errors

KV = ["kv_put", "kv_batch_put", "kv_batch_get", "kv_batch_get_by_meta", "kv_list", "kv_clear"]
CLIENT = ["get_meta", "put", "get_data"]


def document(owner: Any, name: str) -> str:
    return getattr(owner, name).__doc__ or ""


@pytest.mark.parametrize(
    ("owner", "name"), [(tq, name) for name in KV] + [(tq.TransferQueueClient, name) for name in CLIENT]
)
def test_both_twins_have_the_whole_docstring(owner: Any, name: str) -> None:
    blocking, awaited = document(owner, name), document(owner, f"async_{name}")
    assert all(f"{section}:\n" in blocking for section in ("Raises", "Example"))
    assert "await" not in blocking
    assert "async_" not in blocking
    assert f"await {'tq' if owner is tq else 'client'}.async_{name}(" in awaited
    assert blocking.splitlines()[0] == awaited.splitlines()[0]


def test_no_docstring_only_refers_to_a_twin() -> None:
    names = [name for name in dir(tq.TransferQueueClient) if hasattr(tq.TransferQueueClient, f"async_{name}")]
    assert not [name for name in names if document(tq.TransferQueueClient, name).startswith("See ``async_")]
    assert not [name for name in KV if document(tq, f"async_{name}").startswith("See ``")]


def test_every_call_has_its_arguments_result_and_errors() -> None:
    calls = {name: getattr(tq, name) for name in tq.__all__ if name[0].islower() and name != "close"}
    for name, call in calls.items():
        if name.startswith("async_") and "See ``" in (call.__doc__ or ""):
            continue  # a twin that names its whole docstring
        said = call.__doc__ or ""
        signature = inspect.signature(call)
        wanted = ["Args:"] * bool(signature.parameters) + ["Raises:"]
        wanted += ["Returns:", "Yields:"] if signature.return_annotation not in ("None", None) else []
        missing = [section for section in wanted if section not in said]
        assert missing in ([], ["Returns:"], ["Yields:"]), f"{name}: {missing}"


def test_the_examples_run() -> None:
    tq.init({"backend": {"SimpleStorage": {"unit_capacity": "16Mi", "num_data_storage_units": 1}}})
    try:
        known = {"tq": tq, "torch": torch, "TensorDict": TensorDict, "client": tq.get_client()}
        runner = doctest.DocTestRunner()
        for owner, names in ((tq, KV), (tq.TransferQueueClient, ["put", "get_data", "get_meta"])):
            for name in names:
                tq.get_client().clear_partition("train")
                if name in ("get_data", "get_meta"):
                    rows = TensorDict({"tokens": torch.ones(2, 7)}, batch_size=[2])
                    tq.get_client().put(rows, partition_id="train")
                runner.run(doctest.DocTestParser().get_doctest(document(owner, name), dict(known), name, None, None))
        assert runner.summarize(verbose=False) == (0, runner.tries)
    finally:
        tq.close()


def test_every_error_is_at_the_top() -> None:
    assert {*errors.__all__} - {"error_class"} <= {*tq.__all__}
    assert all(getattr(tq, name) is getattr(errors, name) for name in {*errors.__all__} - {"error_class"})


def test_type_checkers_and_editors_find_the_package_and_its_types() -> None:
    assert (Path(tq.__file__).parent / "py.typed").is_file()
    checkout = Path(tq.__file__).parents[1]
    files = Path(sysconfig.get_path("purelib")).glob("*.pth")
    paths = {line for file in files for line in file.read_text().splitlines() if not line.startswith("import ")}
    assert str(checkout) in paths  # a path, as editors run no code of an editable installation
