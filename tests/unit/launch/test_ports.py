"""Ports of queues that start on one machine at the same time."""

from __future__ import annotations

import socket

from transfer_queue.config.resource import TransferQueue, parse
from transfer_queue.launch.plan import HOST
from transfer_queue.launch.ports import PortClaims, with_free_ports


def several(shards: int = 1) -> TransferQueue:
    spec = {"backend": {"simple": {}}, "controller": {"shards": shards}, "storage": {"replicas": 3}}
    head = {"apiVersion": "transferqueue.io/v1beta1", "kind": "TransferQueue", "metadata": {"name": "a"}}
    return parse({**head, "spec": spec})


def ports(resource: TransferQueue) -> set[int]:
    controller, storage = resource.spec.controller, resource.spec.storage
    firsts = [(port, controller.shards) for port in (controller.port, controller.metrics_port)]
    firsts += [(port, storage.replicas) for port in (storage.port, storage.metrics_port)]
    return {first + number for first, count in firsts for number in range(count)}


def test_queues_that_start_together_choose_different_ports_before_their_servers_listen() -> None:
    with PortClaims() as first, PortClaims() as second:
        mine, theirs = with_free_ports(several(), first), with_free_ports(several(2), second)
        assert (len(ports(mine)), len(ports(theirs))) == (8, 10)
        assert not ports(mine) & ports(theirs)
        assert not ports(mine) & ports(with_free_ports(several()))
        for port in ports(mine):  # a server of this process may listen there
            socket.create_server((HOST, port)).close()


def test_a_port_that_is_given_up_or_was_in_use_may_be_claimed() -> None:
    with PortClaims() as first, PortClaims() as second:
        with socket.create_server((HOST, 0)) as server:
            port = int(server.getsockname()[1])
            assert not first.claim(port)
        assert second.claim(port)
        assert not first.claim(port)
        second.give_up([port])
        assert first.claim(port)
