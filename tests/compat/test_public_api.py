"""Names, parameters and defaults of the public interface, against the table of what clients rely on."""

from __future__ import annotations

import importlib
import importlib.resources
import inspect
import pickle
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

import transfer_queue as tq
from tests.compat import contract
from transfer_queue import errors
from transfer_queue.compat import paths

PAGE = Path(__file__).resolve().parents[2] / "docs" / "compatibility.md"


def attribute(module: Any, name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return getattr(module, name)


def parameters(text: str) -> list[tuple[str, str]]:
    """``"(a, b=1, *c)"`` as names and defaults in order."""
    inside = text.removeprefix("(").removesuffix(")")
    pairs = [item.partition("=") for item in inside.split(", ") if item]
    return [(name, default) for name, _, default in pairs]


def signature_of(function: Any) -> dict[str, inspect.Parameter]:
    found = dict(inspect.signature(function).parameters)
    # socket has no effect, here or there; tests/compat/surface sees to it that it is accepted
    return {name: item for name, item in found.items() if name not in ("self", "cls", "socket")}


def check_signature(name: str, function: Any, wanted: str) -> None:
    found = signature_of(function)
    expected = parameters(wanted)
    allowed = contract.EXTENSIONS.get(name, set())
    assert [item.lstrip("*") for item, _ in expected] == [item for item in found if item not in allowed], name
    for parameter, default in expected:
        actual = found[parameter.lstrip("*")]
        if parameter.startswith("*") and default:
            assert (actual.kind, repr(actual.default)) == (inspect.Parameter.KEYWORD_ONLY, default), (name, parameter)
        elif parameter.startswith("**"):
            assert actual.kind is inspect.Parameter.VAR_KEYWORD, (name, parameter)
        elif parameter.startswith("*"):
            assert actual.kind is inspect.Parameter.VAR_POSITIONAL, (name, parameter)
        else:
            assert actual.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD, (name, parameter)
            has_default = actual.default is not inspect.Parameter.empty
            if parameter in contract.OPTIONAL.get(name, {}):
                assert (actual.default, default) == (contract.OPTIONAL[name][parameter], ""), (name, parameter)
            else:
                assert (repr(actual.default) if has_default else "") == default, (name, parameter)
    for extra in allowed:
        if found[extra].kind is inspect.Parameter.VAR_KEYWORD:
            continue
        assert found[extra].kind is inspect.Parameter.KEYWORD_ONLY, (name, extra)
        assert found[extra].default in (None, False), (name, extra)


@pytest.mark.parametrize("name", contract.TOP_LEVEL)
def test_a_top_level_name_has_the_parameters_that_clients_pass(name: str) -> None:
    check_signature(name, attribute(tq, name), contract.TOP_LEVEL[name])


@pytest.mark.parametrize("name", contract.TWINS)
def test_a_key_value_function_has_an_awaitable_twin_of_the_same_parameters(name: str) -> None:
    twin = getattr(tq, f"async_{name}")
    assert inspect.iscoroutinefunction(twin)
    check_signature(f"async_{name}", twin, contract.TOP_LEVEL[name])
    assert not inspect.iscoroutinefunction(getattr(tq, name))


@pytest.mark.parametrize("name", contract.CLIENT)
def test_a_client_method_exists_blocking_and_awaitable(name: str) -> None:
    check_signature(name, getattr(tq.TransferQueueClient, name), contract.CLIENT[name])
    twin = getattr(tq.AsyncTransferQueueClient, f"async_{name}")
    assert inspect.iscoroutinefunction(twin)
    check_signature(f"async_{name}", twin, contract.CLIENT[name])
    assert issubclass(tq.TransferQueueClient, tq.AsyncTransferQueueClient)


@pytest.mark.parametrize("name", contract.CLIENT_PLAIN)
def test_a_client_method_without_a_twin_is_not_awaitable(name: str) -> None:
    for kind in (tq.TransferQueueClient, tq.AsyncTransferQueueClient):
        assert not inspect.iscoroutinefunction(getattr(kind, name))
        check_signature(name, getattr(kind, name), contract.CLIENT_PLAIN[name])


@pytest.mark.parametrize(("owner", "name"), [(o, n) for o, names in contract.MEMBERS.items() for n in names])
def test_a_member_has_the_parameters_that_clients_pass(owner: str, name: str) -> None:
    member = getattr(attribute(tq, owner), name)
    check_signature(name, member, contract.MEMBERS[owner][name])


@pytest.mark.parametrize(("owner", "name"), [(o, n) for o, names in contract.PROPERTIES.items() for n in names])
def test_a_property_is_one(owner: str, name: str) -> None:
    assert isinstance(inspect.getattr_static(getattr(tq, owner), name), property)


@pytest.mark.parametrize(("module", "name"), [(m, n) for m, names in contract.MODULES.items() for n in names])
def test_an_import_path_of_an_earlier_release_gives_a_real_object(module: str, name: str) -> None:
    found = attribute(importlib.import_module(module), name)
    assert callable(found)
    assert found.__module__.startswith("transfer_queue")


@pytest.mark.parametrize("module", contract.MODULES)
def test_a_module_lists_its_names_and_refuses_others(module: str) -> None:
    loaded = importlib.import_module(module)
    listed = {*dir(loaded), *getattr(loaded, "__all__", ()), *paths.legacy_names(module)}
    assert set(contract.MODULES[module]) <= listed
    with pytest.raises(AttributeError, match="no_such_name"):
        attribute(loaded, "no_such_name")


def test_everything_that_is_offered_is_in_the_tables() -> None:
    offered = set(tq.__all__) - {"__version__", *errors.__all__}
    twins = {f"async_{name}" for name in contract.TWINS}
    known = {*contract.TOP_LEVEL, *contract.ADDED, *twins}
    assert offered <= known, offered - known
    assert isinstance(tq.__version__, str)
    assert issubclass(tq.StorageKeyNotFoundError, KeyError)


def test_the_page_on_compatibility_gives_a_reason_for_every_difference() -> None:
    page = PAGE.read_text()
    differences = [
        *contract.ABSENT,
        *contract.ADDED,
        *(name for names in contract.EXTENSIONS.values() for name in names),
    ]
    assert [name for name in differences if f"`{name}`" not in page] == []


def test_the_packaged_settings_are_those_of_the_contract_and_a_few_more() -> None:
    packaged = OmegaConf.create(importlib.resources.files("transfer_queue").joinpath("config.yaml").read_text())
    assert {path: OmegaConf.select(packaged, path) for path in contract.CONFIG} == contract.CONFIG
    assert packaged.backend.Yuanrong.ucx_env_vars == {}


def test_a_name_that_an_earlier_release_dropped_warns_once() -> None:
    code = """
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(3):
        from transfer_queue.utils.enum_utils import TransferQueueRole
        from transfer_queue.storage.managers.factory import TransferQueueStorageManagerFactory
        from transfer_queue.utils.enum_utils import Role
    import transfer_queue
    transfer_queue.ZMQServerInfo
print([(str(w.message), w.category.__name__) for w in caught])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert eval(done.stdout) == [
        ("transfer_queue.utils.enum_utils.TransferQueueRole is deprecated: use Role", "DeprecationWarning"),
        (
            "transfer_queue.storage.managers.factory.TransferQueueStorageManagerFactory is deprecated: "
            "use StorageManagerFactory",
            "DeprecationWarning",
        ),
        (
            "transfer_queue.ZMQServerInfo is deprecated: "
            "import it from transfer_queue.controller, transfer_queue.storage or transfer_queue.utils",
            "DeprecationWarning",
        ),
    ]


def test_importing_every_path_loads_no_torch_and_no_ray() -> None:
    code = f"""
import importlib, sys
for module in {[name for name in contract.MODULES if ".dataloader." not in name and name != "transfer_queue.metadata"]}:
    importlib.import_module(module)
print([name for name in ("torch", "tensordict", "ray") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_a_server_info_is_a_value_that_travels() -> None:
    info = attribute(tq, "ZMQServerInfo")("controller", "c0", "::1", {"request_handle_socket": 7})
    assert (info.role, info.id, info.ip, info.ports) == ("controller", "c0", "::1", {"request_handle_socket": 7})
    assert info.to_addr("request_handle_socket") == "tcp://[::1]:7"
    assert pickle.loads(pickle.dumps(info)) == info
    assert info.to_dict()["ports"] == {"request_handle_socket": 7}
    with pytest.raises(ValueError, match="port_name"):
        info.to_addr("other")
