"""Who a peer is and what it may do: admission, the policy, and a store that keeps tenants' blocks apart."""

from __future__ import annotations

import hashlib
import hmac
import logging
import secrets
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import msgspec

from transfer_queue.config.document import load_document
from transfer_queue.config.security import Policy, PolicyPrincipal, ServerSecurity
from transfer_queue.control.commands import Value
from transfer_queue.control.directory import shard_of_writer
from transfer_queue.control.requests import ADMINS, PRODUCERS, STORAGE, USERS, Roles, Scope
from transfer_queue.errors import ConfigError, ConnectionLostError, NotAuthorizedError, RequestError
from transfer_queue.runtime.secret import NONCE_BYTES, is_proof, new_nonce, prove
from transfer_queue.runtime.tls import ReloadingFile, Tokens, authorities, is_loopback, names_of
from transfer_queue.storage.base import Peer, Served, ServingStore, UnitStats
from transfer_queue.wire import messages as wire

if TYPE_CHECKING:
    from transfer_queue.runtime.connection import Connection

__all__ = ["Access", "GuardedStore", "Principal", "Tickets"]

log = logging.getLogger(__name__)

_NO_SECRET = (
    "this queue admits only processes that know its secret, which is in the file that TQ_CONFIG_FILE names in the "
    "process that started it and in its children; set it here too, or pass init() the settings that it returned there"
)


@dataclass(frozen=True)
class Principal:
    """An authenticated peer. ``entry`` None: there is no policy, and it may do everything."""

    name: str
    entry: PolicyPrincipal | None = None

    @property
    def roles(self) -> Roles:
        return frozenset(self.entry.roles) if self.entry is not None else USERS | STORAGE

    @property
    def prefixes(self) -> tuple[str, ...]:
        return tuple(self.entry.partitions) if self.entry is not None else ("",)

    @property
    def sees_all_memory(self) -> bool:
        """May it map the arena, in which every partition's bytes lie?"""
        return "" in self.prefixes and ("admin" in self.roles or self.roles >= {"producer", "consumer"})

    @property
    def moves_blocks(self) -> bool:
        """May it copy blocks of every partition from unit to unit, as one that is emptied does?"""
        return "storage" in self.roles

    def may(self, roles: Roles, partition: str) -> bool:
        return bool(self.roles & roles) and partition.startswith(self.prefixes)

    def check_unit(self, verb: str, owner: str) -> None:
        """Empty a storage unit that joined as ``owner``. Raises NotAuthorizedError."""
        if not (self.moves_blocks and self.name == owner):
            self.check(verb, ADMINS, None)

    def check(self, verb: str, roles: Roles, partition: str | None) -> None:
        """``partition`` None: all of the queue. Raises NotAuthorizedError."""
        allowed = bool(self.roles & roles) and (
            "" in self.prefixes if partition is None else partition.startswith(self.prefixes)
        )
        if not allowed:
            where = "the whole queue" if partition is None else f"partition {partition[:200]!r}"
            prefixes = ", ".join(repr(prefix) for prefix in self.prefixes) or "none"
            raise NotAuthorizedError(
                f"{self.name!r} may not do {verb} on {where}: that takes the role {' or '.join(sorted(roles))}; its "
                f"roles are {', '.join(sorted(self.roles))}, its partition prefixes: {prefixes}; an administrator "
                "can change the policy"
            )


@dataclass(frozen=True)
class _Shown:
    """What an admitted peer showed."""

    kind: str
    names: list[str]
    digest: bytes | None = None
    """Of its token."""
    chain: frozenset[bytes] = frozenset()
    """By which its certificate was verified."""


_OWNER = Principal("")
"""The principal of peers that know the secret: any process of the queue's user."""


class Access:
    """Admits peers, and checks requests to the controller. Without secret, tokens, TLS and policy there is no Access at
    all."""

    def __init__(self, security: ServerSecurity) -> None:
        """Raises ConfigError."""
        path = security.policy_file
        self._tokens = None if security.tokens_file is None else Tokens(security.tokens_file)
        self._policy = None if path is None else ReloadingFile([path], lambda: load_document(Policy, path))
        self._encrypted = security.tls is not None
        self._secret = security.secret
        if path is not None and self._secret is not None:
            raise ConfigError("security: a policy needs peers with names, so give them tls or tokens instead of secret")
        self._authorities = None if security.tls is None else authorities(security.tls)
        self._shown: WeakKeyDictionary[Connection, _Shown] = WeakKeyDictionary()
        self._seen: tuple[object, ...] = self._files()
        self.port = 0
        """Port on which the server listens."""
        self._challenges: WeakKeyDictionary[Connection, bytes] = WeakKeyDictionary()

    @classmethod
    def of(cls, security: ServerSecurity) -> Access | None:
        """None if every peer may do everything. Raises ConfigError."""
        asked = (security.secret, security.tls, security.tokens_file, security.policy_file)
        return None if all(setting is None for setting in asked) else cls(security)

    @property
    def limited(self) -> bool:
        """Is there a policy?"""
        return self._policy is not None

    def warn_if_readable(self, host: str) -> None:
        """To be called once, with the address that is listened on."""
        if self._tokens is not None and not self._encrypted and not is_loopback(host):
            log.warning("tokens come over plain TCP, readable on the way; set security.tls")

    def challenge(self, connection: Connection) -> bytes:
        """The nonce that a peer has to answer before it is admitted; empty if there is no secret, or it was asked."""
        if self._secret is None or connection in self._challenges:
            return b""
        return self._challenges.setdefault(connection, new_nonce())

    def answer(self, hello: wire.Hello, welcome: wire.Welcome) -> wire.Welcome:
        """Return ``welcome`` with the proof that this server knows the secret, if there is a secret."""
        if self._secret is None:
            return welcome
        proof = prove(self._secret, "server", self.port, hello.nonce)
        return msgspec.structs.replace(welcome, attributes={**welcome.attributes, "proof": proof})

    def admit(self, connection: Connection, hello: wire.Hello) -> Principal:
        """Who the peer is. Raises NotAuthorizedError."""
        names: list[str] = []
        shown: _Shown | None = None
        if self._secret is not None:
            if not is_proof(hello.proof, self._secret, "client", self.port, hello.nonce):
                raise NotAuthorizedError(_NO_SECRET)
            if hello.nonce[NONCE_BYTES:] != self._challenges.get(connection):
                raise NotAuthorizedError("the proof of the secret was made for another connection")
            principal = _OWNER
        elif hello.token:
            name = None if self._tokens is None else self._tokens.name_of(hello.token)
            if name is None:
                raise NotAuthorizedError(
                    "the token is not one that this server accepts; check security.tokenFile of this process and "
                    "security.tokensFile of the server"
                )
            assert self._tokens is not None
            shown = _Shown("token", [name], self._tokens.current().get(name))
            principal = self._principal(shown.kind, shown.names)
        else:
            names = names_of(connection.peer_certificate())
            if not names:
                raise NotAuthorizedError(
                    "this server wants to know who connects: set security.tokenFile, or security.tls with certificate "
                    "and key"
                )
            shown = _Shown("certificate", names, chain=connection.peer_authorities())
            principal = self._principal(shown.kind, shown.names)
        if hello.role == "unit" and not principal.roles & STORAGE:
            principal.check("Join", STORAGE, None)
        if shown is not None:
            self._shown[connection] = shown
        return principal

    def _files(self) -> tuple[object, ...]:
        """The contents of the files that say who is admitted; the same objects as long as they do not change."""
        sources = (self._authorities, self._policy)
        read = [None if source is None else source.get() for source in sources]
        return (*read, None if self._tokens is None else self._tokens.current())

    def changed(self) -> bool:
        """Whether one of those files changed since this was last asked."""
        before, self._seen = self._seen, self._files()
        return any(one is not other for one, other in zip(before, self._seen, strict=True))

    def objection(self, connection: Connection) -> str:
        """Why this admitted peer would not be admitted as it was; empty if it would."""
        shown = self._shown.get(connection)
        if shown is None:
            return ""
        if shown.chain and self._authorities is not None and not shown.chain & self._authorities.get():
            return "the authority of its certificate is trusted no longer"
        if shown.digest is not None:
            current = {} if self._tokens is None else self._tokens.current()
            if current.get(shown.names[0]) != shown.digest:
                return "its token was replaced or removed"
        try:
            same = self._principal(shown.kind, shown.names) == connection.principal
        except NotAuthorizedError as error:
            return str(error)
        return "" if same else "the policy changed what it may do"

    def _principal(self, kind: str, names: list[str]) -> Principal:
        if self._policy is None:
            return Principal(names[0])
        for entry in self._policy.get().principals:
            if getattr(entry, kind) in names:
                return Principal(entry.name, entry)
        raise NotAuthorizedError(f"the policy names no principal with the {kind} {names[0]!r}; it may do nothing")

    def check(self, connection: Connection, body: Any) -> None:
        """A request to the controller, before anything is done for it. Raises NotAuthorizedError."""
        principal = connection.principal
        if principal is None or principal.entry is None:
            return
        verb, scope = type(body).__name__, body.covers()
        if scope is Scope.PARTITION:
            principal.check(verb, body.roles, body.partition)
        elif scope is Scope.QUEUE:
            principal.check(verb, ADMINS, None)
        elif scope is Scope.UNIT and not principal.moves_blocks:  # whose unit it is, is checked where it is looked up
            principal.check(verb, ADMINS | STORAGE, None)

    def visible(self, connection: Connection, body: Any, reply: Any) -> Any:
        """The reply without partitions that the principal may not see."""
        if body.covers() is not Scope.LISTING:
            return reply
        seen = set(self.visible_names(connection, reply.value))
        if isinstance(reply.value, dict):
            return Value({name: item for name, item in reply.value.items() if name in seen})
        return Value([name for name in reply.value if name in seen])

    def visible_names(self, connection: Connection, partitions: Iterable[str]) -> list[str]:
        """Those that the principal may see."""
        principal = connection.principal
        if principal is None or principal.entry is None:
            return list(partitions)
        return [name for name in partitions if principal.may(USERS, name)]


class Tickets:
    """The controller's word to its storage units on which principal has which writer number."""

    def __init__(self, key: bytes | None = None) -> None:
        self.key = key or secrets.token_bytes(32)

    def ticket(self, run: str, writer: int, principal: Principal) -> bytes:
        text = msgspec.msgpack.encode((run, writer, principal.name))
        return hmac.digest(self.key, text, hashlib.sha256)

    def check(self, hello: wire.Hello, principal: Principal) -> None:
        """Raises NotAuthorizedError."""
        if not hmac.compare_digest(self.ticket(hello.run, hello.writer, principal), hello.ticket):
            raise NotAuthorizedError(
                f"{principal.name!r} is not writer {hello.writer} of this queue: connect to the controller first"
            )


class GuardedStore(ServingStore):
    """A store whose clients reach only blocks of partitions they may use. It takes the place of the store it guards.

    A block is tagged with the partition that its writer named; the tags go with the blocks, and a store that keeps
    blocks for the next process keeps their tags. Clients that may not see everything never learn of the shared memory,
    and fill blocks over their connection only.
    """

    def __init__(self, store: ServingStore, connected: Callable[[int], bool], shards: int = 1) -> None:
        """``connected``: is this unit registered with that one of ``shards`` controllers?"""
        self._store = store
        self._connected = connected
        self._scopes: dict[int, str] = store.scopes
        self._principals: dict[Peer, Principal] = {}
        self._shards = shards
        self.tickets: dict[int, Tickets] = {}
        """By shard."""

    @property
    def incarnation(self) -> str | None:
        return self._store.incarnation

    @property
    def scopes(self) -> dict[int, str]:
        return self._scopes

    def attributes(self) -> dict[str, Any]:
        return self._store.attributes()

    def registered(self, unit: int, run: str, shard: int = 0) -> None:
        self._store.registered(unit, run, shard)

    async def inventory(self) -> list[int]:
        return await self._store.inventory()

    def stats(self) -> UnitStats:
        return self._store.stats()

    async def close(self) -> None:
        await self._store.close()

    def connected(self, peer: Peer) -> dict[str, Any]:
        """Clients are admitted by `connected_as`."""
        raise RequestError("a storage unit with a policy admits only clients that it knows")

    def admit(self, hello: wire.Hello, principal: Principal) -> None:
        """Raises NotAuthorizedError; ConnectionLostError while the controller is away."""
        shard = shard_of_writer(hello.writer, self._shards)
        tickets = self.tickets.get(shard)
        if tickets is None or (hello.ticket and not self._connected(shard)):
            raise ConnectionLostError("this storage unit is not registered with its controller; try again")
        tickets.check(hello, principal)

    def connected_as(self, peer: Peer, principal: Principal) -> dict[str, Any]:
        """See ``ServingStore.connected``."""
        self._principals[peer] = principal
        attributes = self._store.connected(peer)
        return attributes if principal.sees_all_memory else {}

    def disconnected(self, peer: Peer) -> list[int]:
        del self._principals[peer]
        return self._store.disconnected(peer)

    async def free(self, blocks: Sequence[int]) -> None:
        for number in blocks:
            self._scopes.pop(number, None)
        await self._store.free(blocks)

    def receive_buffer(self, peer: Peer, message: Any, nbytes: int) -> memoryview | None:
        self._check(self._principals[peer], message)
        return self._store.receive_buffer(peer, message, nbytes)

    def notice(self, peer: Peer, message: Any) -> None:
        if isinstance(message, wire.Abort):
            principal = self._principals[peer]
            may = principal.moves_blocks or principal.may(PRODUCERS, self._scopes.get(message.block, ""))
            if not may or message.block >> 32 != peer.writer:
                return
            self._scopes.pop(message.block, None)
        self._store.notice(peer, message)

    def serve(self, peer: Peer, message: Any, payload: memoryview | None) -> Served | Coroutine[Any, Any, Served]:
        self._check(self._principals[peer], message)
        if not isinstance(message, wire.Put | wire.Alloc) or message.block in self._scopes:
            return self._store.serve(peer, message, payload)
        self._scopes[message.block] = message.scope
        try:
            answer = self._store.serve(peer, message, payload)
        except BaseException:
            self._scopes.pop(message.block, None)
            raise
        return answer if isinstance(answer, Served) else self._stored(message.block, answer)

    async def _stored(self, block: int, work: Coroutine[Any, Any, Served]) -> Served:
        try:
            return await work
        except BaseException:
            self._scopes.pop(block, None)
            raise

    def _check(self, principal: Principal, message: Any) -> None:
        """Raises NotAuthorizedError, RequestError."""
        verb = type(message).__name__
        if not isinstance(message, wire.ToUnit) or not message.roles:
            raise RequestError(f"{verb} is not a request that this storage unit knows")
        if principal.moves_blocks and message.copies:
            return
        for partition in message.partitions(self._scopes):
            principal.check(verb, message.roles, partition)
        if message.maps_memory and not principal.sees_all_memory:
            raise NotAuthorizedError(
                f"{principal.name!r} may not do {verb}, a part of access through shared memory: that takes the "
                f"partition prefix ''; its partition prefixes: {', '.join(map(repr, principal.prefixes))}"
            )
