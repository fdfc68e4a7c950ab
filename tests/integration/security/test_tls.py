"""TLS and tokens between real processes: who gets in, who does not, and what the refusal says."""

from __future__ import annotations

import os
import signal
import ssl
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
import torch
from cryptography import x509
from tensordict import TensorDict

from tests.integration.security.authority import TOKENS, Authority, token_files
from tests.integration.security.peers import as_peer
from tests.integration.security.servers import Servers, running
from tests.waiting import meanwhile, wait_until
from transfer_queue.client import TransferQueueClient
from transfer_queue.errors import ConfigError, ConnectionLostError, NotAuthorizedError, TransferQueueError
from transfer_queue.launch import local
from transfer_queue.launch.local import LocalStack, default_plan
from transfer_queue.runtime.connection import Connection
from transfer_queue.runtime.tls import Credentials, listen_context


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def encrypted(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    tls = {"tls": authority.issue("server")}
    with running(tmp_path_factory.mktemp("encrypted"), tls) as servers:
        yield servers


@pytest.fixture(scope="module")
def with_tokens(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    folder = tmp_path_factory.mktemp("tokens")
    security = {"tokensFile": token_files(folder), "tokenFile": str(folder / "storage.token")}
    with running(folder, security) as servers:
        yield servers


def put_and_get(servers: Servers, **security: Any) -> None:
    rows = torch.arange(200_000, dtype=torch.float32).reshape(100, 2000)
    with servers.client(**security) as client:
        client.put(TensorDict({"x": rows}, batch_size=[100]), partition_id="a/1")
        meta = client.get_meta(["x"], 100, "a/1", task_name=f"task-{os.urandom(4).hex()}")
        assert torch.equal(torch.as_tensor(client.get_data(meta)["x"]), rows)
        client.clear_partition("a/1")


def refusal(servers: Servers, **security: Any) -> TransferQueueError:
    async def never(connection: Connection, _: Any) -> None:
        raise AssertionError("admitted")

    with pytest.raises(TransferQueueError) as caught:
        as_peer(servers, security, never)
    return caught.value


def test_rows_go_through_tls_between_client_controller_and_unit(encrypted: Servers, authority: Authority) -> None:
    put_and_get(encrypted, tls=authority.issue("client"))


def test_rows_go_through_tls_where_memory_is_not_shared(encrypted: Servers, authority: Authority) -> None:
    from transfer_queue.storage.memory import client as memory

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "attach_arena", lambda *_: None)
        put_and_get(encrypted, tls=authority.issue("client"))


def test_a_plain_client_at_a_tls_port_is_told_to_set_tls(encrypted: Servers) -> None:
    error = refusal(encrypted)
    assert isinstance(error, ConnectionLostError)
    assert "if it speaks TLS, set security.tls" in str(error)


def test_a_tls_client_at_a_plain_port_is_told_so(with_tokens: Servers, authority: Authority) -> None:
    error = refusal(with_tokens, tls=authority.issue("client"))
    assert isinstance(error, ConnectionLostError)
    assert "if that port is plain TCP, remove security.tls" in str(error)


def test_a_server_of_another_authority_is_refused_by_the_client(
    encrypted: Servers, authority: Authority, tmp_path: Path
) -> None:
    other = Authority(tmp_path, "other")
    error = refusal(encrypted, tls={**authority.issue("client"), "ca": str(other.ca)})
    assert "security.tls.ca must name the CA that issued it" in str(error)


@pytest.mark.parametrize("fault", ["other authority", "expired", "missing"])
def test_a_client_without_a_good_certificate_is_refused(
    encrypted: Servers, authority: Authority, tmp_path: Path, fault: str
) -> None:
    if fault == "other authority":
        shown = {**Authority(tmp_path, "other").issue("client"), "ca": str(authority.ca)}
    elif fault == "expired":
        shown = authority.issue("late", expired=True)
    else:
        shown = {"ca": str(authority.ca)}
    error = refusal(encrypted, tls=shown)
    assert "security.tls" in str(error)
    put_and_get(encrypted, tls=authority.issue("client"))


def test_tls_below_version_1_3_is_refused(encrypted: Servers, authority: Authority) -> None:
    import socket

    files = authority.issue("client")
    context = ssl.create_default_context(cafile=files["ca"])
    context.load_cert_chain(files["certificate"], files["key"])
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    host, port = encrypted.address.rsplit(":", 1)
    with (
        socket.create_connection((host, int(port)), timeout=60) as plain,
        pytest.raises(OSError, match=r"(?i)protocol version|reset|EOF"),
    ):
        context.wrap_socket(plain, server_hostname="localhost")


def test_new_connections_use_rotated_certificates_without_a_restart(tmp_path: Path) -> None:
    old = Authority(tmp_path, "old")
    server, client = old.issue("server"), old.issue("client")
    with running(tmp_path, {"tls": server}) as servers:
        pid = servers.controller.process.pid
        (tmp_path / "next").mkdir()
        new = Authority(tmp_path / "next", "new")
        fresh, shown = new.issue("server"), new.issue("client")
        for name in ("key", "certificate", "ca"):
            os.replace(fresh[name], server[name])
        shown["ca"] = server["ca"]
        put_and_get(servers, tls=shown)
        error = refusal(servers, tls={**client, "ca": server["ca"]})
        assert "refuses this process's certificate" in str(error)
        assert servers.controller.process.pid == pid
        assert servers.controller.process.poll() is None


def test_a_new_authority_that_first_joins_the_old_one_refuses_nobody_and_ends_no_call(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("old", "new")]
    for folder in folders:
        folder.mkdir()
    old, new = (Authority(folder, folder.name) for folder in folders)
    both = tmp_path / "both.crt"
    both.write_bytes(new.ca.read_bytes() + old.ca.read_bytes())
    # As the operator writes them, one after the other; pods get each a while before or after other pods.
    steps = [(old, old.ca), (old, both), (new, both), (new, new.ca)]

    def files(role: str, step: int) -> dict[str, Any]:
        issuer, trusted = steps[step]
        return {**issuer.issue(f"{role}{step}"), "ca": str(trusted)}

    def replace_files(target: dict[str, Any], source: dict[str, Any]) -> None:
        for name in ("ca", "key", "certificate"):
            copy = Path(f"{target[name]}.next")
            copy.write_bytes(Path(source[name]).read_bytes())
            os.replace(copy, target[name])

    used = {role: {name: str(tmp_path / f"{role}.{name}") for name in ("ca", "certificate", "key")} for role in "sc"}
    for role in used:
        replace_files(used[role], files(role, 0))
    with running(tmp_path, {"tls": used["s"]}) as servers, servers.client(tls=used["c"]) as kept:
        for step in range(len(steps)):
            replace_files(used["s"], files("s", step))
            for other in {max(0, step - 1), step, min(len(steps) - 1, step + 1)}:
                put_and_get(servers, tls=files("c", other))
            assert kept.get_partition_list() == []
            replace_files(used["c"], files("c", step))
            assert kept.get_partition_list() == []
        assert "refused" not in servers.controller.log.read_text()


def test_certificates_of_ones_own_are_replaced_and_end_under_load_and_break_no_client(tmp_path: Path) -> None:
    authority, rows, turns = Authority(tmp_path), torch.arange(64, dtype=torch.float32).reshape(4, 16), 0
    server, client = authority.issue("server"), authority.issue("client")
    with running(tmp_path, {"tls": server}) as servers, servers.client(tls=client) as kept:

        def work() -> None:
            nonlocal turns
            kept.put(TensorDict({"x": rows}, batch_size=[4]), partition_id="load")
            meta = kept.get_meta(["x"], 4, "load", task_name=f"task-{turns}")
            assert torch.equal(torch.as_tensor(kept.get_data(meta)["x"]), rows)
            kept.clear_partition("load")
            turns += 1

        def loaded() -> None:
            before = turns
            wait_until(lambda: turns > before + 2, "rows went through since then")

        def replaced(**life: timedelta) -> None:
            for name in ("server", "client"):  # a new key, of the same authority and in the same files
                authority.issue(name, **life)

        with meanwhile(work, 0.05):
            for _ in range(3):
                replaced()
                put_and_get(servers, tls=client)
                loaded()
            replaced(life=timedelta(seconds=10))
            end = x509.load_pem_x509_certificate(Path(server["certificate"]).read_bytes()).not_valid_after_utc
            with servers.client(tls=client) as brief:
                wait_until(lambda: datetime.now(timezone.utc) > end, "both have ended")
                loaded()
                assert "never" not in brief.get_partition_list()
                for shown in (client, authority.issue("other")):
                    assert "expired" in str(refusal(servers, tls=shown))
                replaced()
                put_and_get(servers, tls=client)
                assert "never" not in brief.get_partition_list()
            loaded()
        assert "is cut off" not in servers.controller.log.read_text()


def test_a_token_admits_and_a_wrong_one_is_refused_at_once(with_tokens: Servers, tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(TOKENS["a"])
    put_and_get(with_tokens, tokenFile=str(path))
    path.write_text("wrong-0123456789abcdef")
    with pytest.raises(NotAuthorizedError, match="token is not one"), with_tokens.client(tokenFile=str(path)):
        pass
    with pytest.raises(NotAuthorizedError, match="wants to know who connects"), with_tokens.client():
        pass


def test_a_token_works_over_tls_without_a_client_certificate(authority: Authority, tmp_path: Path) -> None:
    security = {
        "tls": authority.issue("server"),
        "tokensFile": token_files(tmp_path),
        "tokenFile": str(tmp_path / "storage.token"),
    }
    with running(tmp_path, security) as servers:
        put_and_get(servers, tls={"ca": str(authority.ca)}, tokenFile=str(tmp_path / "a.token"))
        assert isinstance(refusal(servers, tls={"ca": str(authority.ca)}), NotAuthorizedError)


def test_tokens_are_in_no_log_and_no_environment(with_tokens: Servers, tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("wrong-0123456789abcdef")
    refusal(with_tokens, tokenFile=str(path))
    for process in (with_tokens.controller, with_tokens.unit):
        shown = process.log.read_bytes() + process.path.read_bytes()
        shown += Path(f"/proc/{process.process.pid}/environ").read_bytes()
        for token in (*TOKENS.values(), "wrong-0123456789abcdef"):
            assert token.encode() not in shown
    from transfer_queue.wire.messages import Hello

    assert TOKENS["a"] not in repr(Hello("client", "x", token=TOKENS["a"]))


def test_a_token_over_plain_tcp_to_another_host_is_warned_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from transfer_queue.config.security import PeerSecurity

    (tmp_path / "token").write_text(TOKENS["a"])
    credentials = Credentials(PeerSecurity(token_file=str(tmp_path / "token")))
    credentials.token("127.0.0.1")
    assert not caplog.records
    for _ in range(3):
        credentials.token("controller.example")
    assert len(caplog.records) == 1
    assert TOKENS["a"] not in caplog.text


def test_a_token_file_is_read_again_when_it_changes(tmp_path: Path) -> None:
    from transfer_queue.runtime.tls import Tokens

    tokens = Tokens(token_files(tmp_path))
    assert tokens.name_of(TOKENS["a"]) == "a"
    (tmp_path / "tokens").write_text("new another-secret-0123456789\n")
    assert (tokens.name_of(TOKENS["a"]), tokens.name_of("another-secret-0123456789")) == (None, "new")
    (tmp_path / "tokens").write_text("broken\n")
    assert tokens.name_of("another-secret-0123456789") == "new"


def test_unusable_files_are_named(authority: Authority, tmp_path: Path) -> None:
    from transfer_queue.config.security import ServerSecurity, TlsFiles

    files = authority.issue("server")
    (tmp_path / "garbage").write_text("garbage")
    for field in ("ca", "certificate", "key"):
        for path in (tmp_path / "absent", tmp_path / "garbage"):
            with pytest.raises(ConfigError, match=path.name):
                listen_context(ServerSecurity(tls=TlsFiles(**{**files, field: str(path)})))


def test_the_shared_memory_of_a_unit_is_private_to_its_user(encrypted: Servers, authority: Authority) -> None:
    with encrypted.client(tls=authority.issue("client")):
        arenas = wait_until(lambda: list(encrypted.unit.path.parent.glob("tq-unit-0-*")), "the arena is there")
        assert [path.stat().st_mode & 0o777 for path in arenas] == [0o600]


def test_a_replaced_authority_cuts_off_open_connections(tmp_path: Path) -> None:
    old = Authority(tmp_path, "old")
    server, client, revoked = old.issue("server"), old.issue("client"), old.issue("revoked")
    with (
        running(tmp_path, {"tls": server}) as servers,
        servers.client(tls=client) as kept,
        servers.client(tls=revoked) as gone,
    ):
        assert gone.get_partition_list() == kept.get_partition_list() == []
        (tmp_path / "next").mkdir()
        new = Authority(tmp_path / "next", "new")
        for files, fresh in ((client, new.issue("client")), (server, new.issue("server"))):
            for name in ("key", "certificate"):
                os.replace(fresh[name], files[name])
        os.replace(new.ca, old.ca)
        wait_until(
            lambda: (
                servers.controller.log.read_text().count(
                    "is cut off: the authority of its certificate is trusted no longer"
                )
                == 3
            ),
            "both clients and the unit are cut off",
        )
        assert kept.get_partition_list() == []  # it comes back with its new certificate
        assert "refuses this process's certificate" in str(refusal(servers, tls=revoked))


def test_a_renewed_certificate_of_the_same_authority_leaves_open_connections_alone(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    server = authority.issue("server")
    with running(tmp_path, {"tls": server}) as servers, servers.client(tls=authority.issue("client")) as kept:
        authority.issue("server")
        os.utime(authority.ca)  # read again, with the same content
        put_and_get(servers, tls=authority.issue("client"))
        assert kept.get_partition_list() == []
        assert "is cut off" not in servers.controller.log.read_text()


def test_a_removed_token_cuts_off_open_connections(tmp_path: Path) -> None:
    tokens = Path(token_files(tmp_path))
    with (
        running(
            tmp_path,
            {"tokensFile": str(tokens)},
            {"tokensFile": str(tokens), "tokenFile": str(tmp_path / "storage.token")},
        ) as servers,
        servers.client(tokenFile=str(tmp_path / "a.token")) as a,
        servers.client(tokenFile=str(tmp_path / "b.token")) as b,
    ):
        assert a.get_partition_list() == b.get_partition_list() == []
        kept = [line for line in tokens.read_text().splitlines() if not line.startswith("a ")]
        tokens.write_text("\n".join(kept))
        wait_until(
            lambda: "is cut off: its token was replaced or removed" in servers.controller.log.read_text(),
            "a is cut off",
        )
        assert servers.controller.log.read_text().count("is cut off") == 1
        assert b.get_partition_list() == []
        assert isinstance(refusal(servers, tokenFile=str(tmp_path / "a.token")), NotAuthorizedError)


def test_certificates_of_tq_up_are_renewed_before_their_end_while_programs_are_connected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = replace(default_plan(units=1, unit_capacity=32 << 20), tls=True)
    row = TensorDict({"x": torch.ones(1, 2)}, batch_size=[1])
    with LocalStack(plan, tmp_path).start() as stack:
        kept = TransferQueueClient("kept", stack.attach_config)
        monkeypatch.setattr(local, "_LIFE", timedelta(seconds=2))
        stack._issue_certificates(datetime.now(timezone.utc))
        first = x509.load_pem_x509_certificate((tmp_path / "tls" / "client.pem").read_bytes())
        kept.put(row, partition_id="p")
        monkeypatch.setattr(local, "_RENEW_AGAIN", timedelta(0))
        blocked = tmp_path / "tls" / "client.new"
        blocked.mkdir()
        stack.restart_ended()  # cannot renew them now, and goes on
        blocked.rmdir()
        wait_until(
            lambda: stack.restart_ended() or datetime.now(timezone.utc) > first.not_valid_after_utc,
            "the first one has ended",
        )
        monkeypatch.undo()
        stack.restart_ended()
        later = TransferQueueClient("later", stack.attach_config)
        assert later.get_partition_list() == ["p"]
        kept.put(row, partition_id="p")
        os.kill(stack.processes[1].pid, signal.SIGKILL)
        wait_until(stack.failure, "the unit is dead")
        wait_until(lambda: stack.restart_ended() or stack.failure() is None, "it is started again, and admitted", 60)
        kept.put(row, partition_id="p")
        later.close()
        kept.close()
