from __future__ import annotations

from typing import Any

import pytest

from transfer_queue.config.document import validate_document
from transfer_queue.errors import ConfigError
from transfer_queue.storage.mooncake.settings import MasterSettings, MooncakeSettings, parse_settings, role_from

GIB = 2**30
REQUIRED = {"metadataServer": "http://head:8080/metadata", "masterServerAddress": "head:50051"}


def test_defaults() -> None:
    settings = parse_settings(REQUIRED)
    assert settings.protocol == "rdma"
    assert settings.device_name == "auto"
    assert settings.global_segment_size == 64 * GIB
    assert settings.local_buffer_size == 10 * GIB
    zero_copy = settings.zero_copy
    assert zero_copy.enable
    assert (zero_copy.tensor_buffer_size, zero_copy.bytes_buffer_size) == (2 * GIB, 2 * GIB)
    assert (zero_copy.controller_tensor_buffer_size, zero_copy.controller_bytes_buffer_size) == (10 * GIB, 10 * GIB)
    assert settings.buffer_bytes_of("worker") == 4 * GIB
    assert settings.buffer_bytes_of("controller") == 20 * GIB


def test_sizes_are_taken_as_gib_numbers_and_as_quantities() -> None:
    sizes = {"global_segment_size_gb": 0.5, "zero_copy": {"tensor_buffer_size_gb": 1.5, "bytesBufferSize": "8Mi"}}
    settings = parse_settings({**REQUIRED, **sizes, "localBufferSize": "1Gi"})
    assert settings.global_segment_size == GIB // 2
    assert settings.local_buffer_size == GIB
    assert settings.zero_copy.tensor_buffer_size == 3 * GIB // 2
    assert settings.zero_copy.bytes_buffer_size == 8 * 2**20


def test_settings_survive_the_way_through_a_message() -> None:
    settings = parse_settings({**REQUIRED, "local_buffer_size_gb": 2, "protocol": "tcp"})
    assert parse_settings(settings.dump()) == settings


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"protocol": "ib"}, 'protocol: Unsupported value: "ib": supported values: "rdma", "tcp"'),
        (
            {"metadataServer": "head:8080"},
            "metadataServer.*http://HOST:PORT/metadata, etcd://HOST:PORT or P2PHANDSHAKE",
        ),
        ({"metadataServer": "p2p_handshake"}, "metadataServer.*exactly P2PHANDSHAKE"),
        ({"masterServerAddress": "head"}, "masterServerAddress.*HOST:PORT"),
        ({"masterServerAddress": "head:123456"}, "masterServerAddress.*HOST:PORT"),
        ({"zeroCopy": {"tensor_buffer_size_gb": "much"}}, "zeroCopy.*tensor_buffer_size_gb is a number of GiB"),
        ({"zeroCopy": {"bytesBufferSize": "2 gigs"}}, "zeroCopy.bytesBufferSize.*'2 gigs' is not a quantity"),
        ({"zeroCopy": {"bytesBufferSize": 5}}, "zeroCopy.bytesBufferSize.*at least 1Mi"),
        ({"localBufferSize": "1Gi", "local_buffer_size_gb": 1}, "local_buffer_size and local_buffer_size_gb"),
        ({"segments": 3}, 'unknown field "segments"; .*allowed: .*masterServerAddress'),
        ({"metadataServer": None}, "metadataServer"),
    ],
)
def test_wrong_settings_are_refused_with_their_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        parse_settings({**REQUIRED, **change})
    assert "\n" not in str(caught.value)


def test_names_with_underscores_are_taken() -> None:
    settings = parse_settings({"metadata_server": "P2PHANDSHAKE", "master_server_address": "head:50051"})
    assert settings.metadata_server == "P2PHANDSHAKE"


def test_missing_addresses_are_named() -> None:
    with pytest.raises(ConfigError, match="metadataServer: Required value; masterServerAddress: Required value"):
        parse_settings({})


@pytest.mark.parametrize("address", ["etcd://a:2379;b:2379", "[::1]:50051", "10.0.0.1:50051"])
def test_master_addresses_of_all_forms_are_taken(address: str) -> None:
    assert parse_settings({**REQUIRED, "masterServerAddress": address}).master_server_address == address


def test_small_buffers_mean_small_parts() -> None:
    small = {"tensor_buffer_size": "8Mi", "bytes_buffer_size": "8Mi"}
    assert parse_settings({**REQUIRED, "zero_copy": small}).part_bytes == 4 * 2**20
    assert MooncakeSettings.model_validate(REQUIRED).part_bytes == 64 * 2**20


def test_parts_fit_the_smaller_of_the_buffers_of_both_roles() -> None:
    small = {"controllerTensorBufferSize": "4Mi", "controllerBytesBufferSize": "4Mi"}
    assert parse_settings({**REQUIRED, "zeroCopy": small}).part_bytes == 2 * 2**20


def test_role_comes_from_the_environment_and_a_wrong_one_is_named() -> None:
    assert role_from({}) == "worker"
    assert role_from({"TQ_MOONCAKE_ROLE": "controller"}) == "controller"
    with pytest.raises(ConfigError, match="TQ_MOONCAKE_ROLE: 'driver'; allowed: worker, controller"):
        role_from({"TQ_MOONCAKE_ROLE": "driver"})


def test_master_ports_must_differ() -> None:
    with pytest.raises(ConfigError, match="rpcPort, httpMetadataPort and metricsPort must differ"):
        validate_document(MasterSettings, {"rpcPort": 9003}, "master")
    assert validate_document(MasterSettings, {"rpcPort": 0, "metricsPort": 0}, "master").http_metadata_port == 8080
