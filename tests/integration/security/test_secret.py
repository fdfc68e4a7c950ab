"""Queues that ``init()`` starts: who knows the secret gets in, and readers know whose bytes they read."""

from __future__ import annotations

import asyncio
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tensordict import NonTensorStack, TensorDict

import transfer_queue as tq
from tests import preloaded
from tests.integration.security.peers import _CONTROLLER, _Endpoint
from tests.integration.stack import ROOT, Stack
from transfer_queue.client.options import ClientOptions
from transfer_queue.config.attach import (
    AttachConfig,
    AttachSecurity,
    ControllerAddresses,
    Target,
    attach_from_environment,
)
from transfer_queue.config.security import PeerSecurity, ServerSecurity
from transfer_queue.errors import ConfigError, ConnectionLostError, InvalidTypeError, NotAuthorizedError
from transfer_queue.launch.local import LocalStack, default_plan
from transfer_queue.runtime.access import Access
from transfer_queue.runtime.connect import connect
from transfer_queue.runtime.connection import Connection, Keepalive
from transfer_queue.runtime.secret import new_secret
from transfer_queue.runtime.tls import Credentials
from transfer_queue.wire import messages as wire

SMALL = {"backend": {"SimpleStorage": {"num_data_storage_units": 1, "unit_capacity": "16Mi"}}}


class Plain:
    """Of this module, so that only pickle carries it."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plain) and other.number == self.number


@pytest.fixture(scope="module")
def started() -> Iterator[Any]:
    """What ``init()`` returned in a process that found no queue."""
    saved = {name: os.environ.pop(name, None) for name in ("TQ_CONTROLLER_ADDRESS", "TQ_CONFIG_FILE")}
    yield tq.init(SMALL)
    tq.close()
    assert "TQ_CONFIG_FILE" not in os.environ
    os.environ.update({name: value for name, value in saved.items() if value is not None})


@pytest.fixture
def attach_file(started: Any) -> Path:
    return Path(os.environ["TQ_CONFIG_FILE"])


def address_of(started: Any) -> str:
    return str(started.controller.zmq_info.address("request_handle_socket"))


def run_elsewhere(code: str, **environ: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TQ_")}
    command = [sys.executable, "-c", code]
    env = {**clean, "PYTHONPATH": str(ROOT), **environ}
    return preloaded.run(command, check=False, cwd=ROOT, env=env, capture_output=True, text=True, timeout=200)


def test_a_process_without_the_secret_is_refused_by_controller_and_unit(started: Any, attach_file: Path) -> None:
    with pytest.raises(NotAuthorizedError, match="TQ_CONFIG_FILE"):
        shake(address_of(started), PeerSecurity())
    with pytest.raises(NotAuthorizedError, match="only processes that know its secret"):
        shake(address_of(started), PeerSecurity(secret=new_secret()))
    unit = next(iter(started.backend.SimpleStorage.zmq_info.values())).address("put_get_socket")
    with pytest.raises(NotAuthorizedError, match="only processes that know its secret"):
        shake(unit, PeerSecurity(), wire.UnitReply)


def test_the_secret_is_in_private_files_and_in_no_text(started: Any, attach_file: Path) -> None:
    secret = started.controller.zmq_info.secret
    assert secret in attach_file.read_text()
    holding = [path for path in attach_file.parent.rglob("*") if path.is_file() and secret in path.read_text()]
    assert {stat.S_IMODE(path.stat().st_mode) for path in holding} == {0o600}
    assert stat.S_IMODE(attach_file.parent.stat().st_mode) == 0o700
    assert secret not in f"{started} {started.controller.zmq_info!r} {tq.get_client().config!r} {os.environ}"


def test_children_and_the_returned_settings_find_the_queue_and_its_pickled_values(started: Any) -> None:
    tq.kv_put("a", "p", {"x": Plain(4)})
    assert tq.kv_batch_get(["a"], "p")["x"][0] == Plain(4)
    code = f"""
import transfer_queue as tq
print(tq.kv_batch_get(["a"], "p")["x"][0].number)
client = tq.TransferQueueClient("by address", {address_of(started)!r})
print(client.get_data(client.kv_retrieve_meta(["a"], "p"))["x"][0].number)
"""
    found = run_elsewhere(code, TQ_CONFIG_FILE=os.environ["TQ_CONFIG_FILE"])
    assert found.stdout.split() == ["4", "4"], found.stderr
    client = tq.TransferQueueClient("by info", started.controller.zmq_info)
    assert client.get_data(client.kv_retrieve_meta(["a"], "p"))["x"][0] == Plain(4)
    client.close()


def test_a_program_that_took_over_the_port_is_refused_before_anything_of_it_is_read() -> None:
    """It answers as the queue would and allows pickled values, but it cannot know the secret."""
    with pytest.raises(NotAuthorizedError, match="does not know the secret"):
        against_impostor(lambda address: connected(address, PeerSecurity(secret=new_secret())))


def test_a_handshake_is_of_no_use_at_another_server(started: Any) -> None:
    """Whoever listens where a unit was passes the controller's challenge on to a client, and its answer back."""

    async def relay(address: str) -> None:
        with pytest.raises(NotAuthorizedError):
            await connected(address, PeerSecurity(secret=started.controller.zmq_info.secret))

    refused: list[BaseException] = []
    against_impostor(relay, relayed_to=(address_of(started), refused))
    assert "only processes that know its secret" in str(refused[0])


def test_a_recorded_handshake_is_of_no_use_to_anybody() -> None:
    """At the same server or at the next one of the port, on whatever address it listens."""
    access, next_one = Access(ServerSecurity(secret="0" * 32)), Access(ServerSecurity(secret="0" * 32))
    access.port = next_one.port = 1
    first: Any = NoConnection()
    later: Any = NoConnection()
    recorded = answered(access, first)
    assert access.admit(first, recorded)
    assert access.challenge(later)
    with pytest.raises(NotAuthorizedError, match="made for another connection"):
        access.admit(later, recorded)
    with pytest.raises(NotAuthorizedError, match="made for another connection"):
        next_one.admit(later, recorded)


class NoConnection:
    """Nothing of it is looked at."""


def answered(access: Access, connection: Any) -> wire.Hello:
    """What a client with the secret says to the challenge of a server at port 1."""
    known = Credentials(PeerSecurity(secret="0" * 32))
    hello = known.introduce(wire.Hello("client", "one"), "host:1")
    return known.prove(hello, wire.Challenge(access.challenge(connection)), "host:1")


def test_a_client_by_address_does_not_unpickle_where_the_queue_did_not_prove_itself(stack: Stack) -> None:
    trusting = tq.TransferQueueClient(
        "trusting",
        AttachConfig(
            controller=ControllerAddresses(addresses=[stack.address]), security=AttachSecurity(allow_pickle=True)
        ),
    )
    client = tq.TransferQueueClient("plain", stack.address)
    try:
        meta = trusting.put(TensorDict({"x": NonTensorStack(Plain(1))}, [1]), partition_id="pickled")
        with pytest.raises(InvalidTypeError, match=r"did not prove.*TQ_CONFIG_FILE"):
            client.get_data(meta)
        assert trusting.get_data(meta)["x"][0] == Plain(1)
    finally:
        client.close()
        trusting.close()


@pytest.mark.parametrize(
    ("given", "queue", "authentic", "writes", "reads"),
    [
        (None, True, True, True, True),
        (None, True, False, True, False),
        (None, False, True, False, False),
        (None, None, True, False, False),
        (True, False, True, False, False),
        (True, None, False, True, True),
        (False, True, True, False, False),
    ],
)
def test_the_queue_decides_on_pickled_values(
    given: bool | None, queue: bool | None, authentic: bool, writes: bool, reads: bool
) -> None:
    decided = ClientOptions().decided(given, queue, authentic)
    assert (decided.allow_pickle, decided.unpickle) == (writes, reads)


def test_another_queue_at_the_address_is_refused_by_name_and_by_identity(tmp_path: Path) -> None:
    plan = default_plan(units=1, unit_capacity=16 << 20, allow_pickle=True)
    with LocalStack(plan, tmp_path).start() as stack:
        found = stack.attach_config
        attach = tmp_path / "attach.yaml"
        others = (({"name": "old"}, "expects queue old"), ({"uid": "1234"}, "expects queue local with uid 1234"))
        for update, text in others:
            copy = found.model_copy(update=update)
            attach.write_text(msgspec.json.encode(copy.dump()).decode())
            done = run_elsewhere("import transfer_queue as tq; tq.init()", TQ_CONFIG_FILE=str(attach))
            assert done.returncode == 1
            assert f"TQ_CONFIG_FILE={attach} {text}" in done.stderr.strip().splitlines()[-1]
    with LocalStack(plan, tmp_path).start() as again:
        assert again.attach_config.uid == found.uid
        assert again.attach_config.security == found.security
        assert found.security.secret


def test_where_nobody_listens_the_setting_that_led_there_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TQ_CONNECT_TIMEOUT", "3")
    environ = {"TQ_CONFIG_FILE": str(tmp_path / "attach.yaml")}
    with pytest.raises(ConfigError, match=r"TQ_CONFIG_FILE=.*no such file"):
        attach_from_environment(environ)
    (tmp_path / "attach.yaml").write_text("controller: {addresses: ['127.0.0.1:1']}")
    found = attach_from_environment(environ)
    assert found is not None
    with pytest.raises(ConnectionLostError, match=rf"127\.0\.0\.1:1.*TQ_CONFIG_FILE={tmp_path}.* names it"):
        tq.TransferQueueClient("c", found)
    assert any("TQ_CONFIG_FILE" in record.message and "trying for 3 s" in record.message for record in caplog.records)


def shake(
    address: str, security: PeerSecurity, replies: Any = wire.ControllerReply, hello: wire.Hello | None = None
) -> None:
    decoder = msgspec.msgpack.Decoder(wire.Envelope[replies])
    asyncio.run(connected(address, security, decoder, hello))


async def connected(
    address: str, security: PeerSecurity, decoder: Any = _CONTROLLER, hello: wire.Hello | None = None
) -> None:
    made = await connect(
        address, hello or wire.Hello("client", "c"), _Endpoint(), decoder, Keepalive(2.0, 60.0),
        what="server", timeout_s=60, credentials=Credentials(security, Target()),
    )  # fmt: skip
    made.close()


class Impostor:
    """With ``relayed_to`` it shows what a client says to the server at that address, and collects how that ends."""

    def __init__(self, relayed_to: tuple[str, list[BaseException]] | None) -> None:
        self.relayed_to = relayed_to
        self.proof: asyncio.Future[wire.Hello] | None = None
        self.relaying: asyncio.Task[None] | None = None

    def on_request(self, connection: Connection, request: int, body: Any, *_: Any) -> None:
        if self.relayed_to is not None and self.proof is None:
            self.proof = asyncio.get_running_loop().create_future()
            self.relaying = asyncio.ensure_future(self.relay(connection, request, body))
            return
        if self.proof is not None and not self.proof.done():
            self.proof.set_result(body)
        says = {"pickle": True, "proof": b"?"}
        welcome = wire.Welcome("controller", name="local", run="r", writer=1, attributes=says)
        connection.reply(request, welcome)

    async def relay(self, victim: Connection, request: int, hello: wire.Hello) -> None:
        assert self.relayed_to is not None
        assert self.proof is not None
        address, refused = self.relayed_to
        host, port = address.rsplit(":", 1)
        loop = asyncio.get_running_loop()
        _, server = await loop.create_connection(
            lambda: Connection(_Endpoint(), _CONTROLLER, Keepalive(2.0, 60.0)), host, int(port)
        )
        challenge, _ = await server.request(hello, timeout_s=60)
        victim.reply(request, challenge)
        try:
            await server.request(await self.proof, timeout_s=60)
        except NotAuthorizedError as error:
            refused.append(error)
        server.close()

    def on_notice(self, *_: Any) -> None: ...
    def on_lost(self, *_: Any) -> None: ...
    def receive_buffer(self, *_: Any) -> None: ...


def against_impostor(work: Any, relayed_to: tuple[str, list[BaseException]] | None = None) -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        decoder = msgspec.msgpack.Decoder(wire.Envelope[wire.Hello])
        endpoint = Impostor(relayed_to)
        server = await loop.create_server(lambda: Connection(endpoint, decoder, Keepalive(2.0, 60.0)), "127.0.0.1", 0)
        try:
            await work(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
            if endpoint.relaying is not None:
                await endpoint.relaying
        finally:
            server.close()

    asyncio.run(run())
