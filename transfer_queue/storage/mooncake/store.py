"""One process's connection to Mooncake. Everything here blocks; callers bring the thread."""

from __future__ import annotations

import ctypes
import http.client
import os
import socket
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from transfer_queue.backoff import Backoff
from transfer_queue.config.attach import join_address, parse_address
from transfer_queue.errors import ConnectionLostError, StartError
from transfer_queue.storage.mooncake import codes, engine
from transfer_queue.storage.mooncake.buffers import Bytes, address_of, merged_spans
from transfer_queue.storage.mooncake.engine import choose_devices, leave, with_low_priority
from transfer_queue.storage.mooncake.loopback import confined, is_loopback
from transfer_queue.storage.mooncake.parts import Range, block_key
from transfer_queue.storage.mooncake.settings import MooncakeSettings

__all__ = ["Store", "master_host", "open_store"]

_RETRY_S = (0.1, 2.0)
_SET_UP_TRIES = 5
_PROBE_S = 2.0
_PARTS_AT_ONCE = 64
_LONG_TRANSFER = 8 << 20
"""Bytes; these take much longer than to start a thread."""


class Store:
    """Made by ``open_store``. Keys are written once and never reused, which is what makes reads verifiable."""

    def __init__(self, raw: Any, module: Any, settings: MooncakeSettings, name: str, reserved: socket.socket) -> None:
        self.name = name
        """This process's name in the store, and its segment's: host:port."""
        self._raw = raw
        self._module = module
        self._zero_copy = settings.zero_copy.enable
        self._pinned = not settings.eviction_disabled
        self._reserved = reserved
        self._masters_in_etcd = settings.master_server_address.startswith("etcd://")
        self.reads_ranges = settings.zero_copy.enable and hasattr(raw, "get_into_ranges")
        """True if ``read_ranges`` may be used; older engines read whole values."""
        self._tcp = settings.protocol == "tcp"
        self.sends_in_place = self._tcp and settings.zero_copy.enable and hasattr(raw, "batch_put_from_multi_buffers")
        """True if ``write`` takes memory that is not registered, and values in several pieces. Over TCP the
        engine only tells the metadata server what is registered (0.06 ms on this host); for RDMA it pins every page."""
        self._registered: dict[int, int] = {}  # address -> bytes

    # ------------------------------------------------------------------------------------------------------ memory

    def register(self, address: int, nbytes: int) -> None:
        """Make memory usable by ``write`` and ``read``. Raises StartError."""
        if not self._zero_copy:
            return
        code = self._raw.register_buffer(address, nbytes)
        if not code:
            self._registered[address] = nbytes
        else:
            raise StartError(
                f"Mooncake cannot register a buffer of {nbytes} bytes ({code}); for RDMA raise the limit of locked "
                "memory (ulimit -l unlimited, or root with CAP_IPC_LOCK) or lower zeroCopy.tensorBufferSize"
            )

    def unregister(self, address: int, nbytes: int) -> None:
        if self._zero_copy:
            self._registered.pop(address, None)
            self._raw.unregister_buffer(address)

    @contextmanager
    def _lent(self, values: Sequence[Sequence[Bytes]]) -> Iterator[bool]:
        """Registers what is not registered of ``values`` for the time of a ``with`` block; whether that was possible.

        Calls of one store never overlap in time, so that no other call registers meanwhile.
        """
        spans = ((address_of(piece), piece.nbytes) for value in values for piece in value)
        new = merged_spans(span for span in spans if not self._is_registered(*span))
        done: list[int] = []
        try:
            for address, nbytes in new:
                if self._raw.register_buffer(address, nbytes):
                    break
                done.append(address)
            yield len(done) == len(new)
        finally:
            for address in done:
                self._raw.unregister_buffer(address)

    def _is_registered(self, address: int, nbytes: int) -> bool:
        return any(start <= address and address + nbytes <= start + size for start, size in self._registered.items())

    # -------------------------------------------------------------------------------------------------------- data

    def write(self, keys: Sequence[str], values: Sequence[Sequence[Bytes]], segment: str) -> list[int]:
        """Store values, wherever there is room but first of all in ``segment``; a code per key, 0 for stored.

        A value is its pieces one after the other: one in registered memory, unless ``sends_in_place``.
        Stored values are never evicted. An existing key keeps its old value. Code ``UNREGISTERED``: not stored, as its
        memory could not be registered; the metadata server may be away.
        """
        config = self._module.ReplicateConfig()
        config.preferred_segment = segment
        if self._pinned:
            config.with_hard_pin = True
        if not self._zero_copy:
            return [int(self._raw.put(key, piece, config)) for key, (piece,) in zip(keys, values, strict=True)]
        if not self.sends_in_place:
            return self._write_registered(keys, values, config)
        with self._lent(values) as registered:
            if registered:
                return self._write_registered(keys, values, config)
        results = [codes.UNREGISTERED] * len(keys)
        own = [
            position
            for position, value in enumerate(values)
            if all(self._is_registered(address_of(piece), piece.nbytes) for piece in value)
        ]
        if own:
            found = self._write_registered([keys[at] for at in own], [values[at] for at in own], config)
            for position, code in zip(own, found, strict=True):
                results[position] = code
        return results

    def _write_registered(self, keys: Sequence[str], values: Sequence[Sequence[Bytes]], config: Any) -> list[int]:
        addresses = [[address_of(piece) for piece in value] for value in values]
        sizes = [[piece.nbytes for piece in value] for value in values]
        if any(len(value) > 1 for value in values):
            call = partial(self._raw.batch_put_from_multi_buffers, list(keys), addresses, sizes, config)
        else:
            flat = [address for (address,) in addresses], [size for (size,) in sizes]
            call = partial(self._raw.batch_put_from, list(keys), *flat, config)
        return self._transferred(call, sum(map(sum, sizes)))

    def read(self, keys: Sequence[str], targets: Sequence[Bytes]) -> list[int]:
        """Fill ``targets``, each as long as its value; a code per key, 0 for filled.

        A value that is removed meanwhile may give code 0 and wrong bytes: see ``verify``.
        """
        if not self._zero_copy:
            return [self._read_through(key, target) for key, target in zip(keys, targets, strict=True)]
        sizes = [target.nbytes for target in targets]
        call = partial(self._raw.batch_get_into, list(keys), [address_of(target) for target in targets], sizes)
        results = self._transferred(call, sum(sizes))
        return [
            int(result) if result < 0 else (0 if result == target.nbytes else codes.GONE)
            for result, target in zip(results, targets, strict=True)
        ]

    def _transferred(self, call: Callable[[], Iterable[int]], nbytes: int) -> list[int]:
        """The codes that ``call`` returns, which moves ``nbytes``.

        The engine polls without a pause until a transfer has ended, while two threads that it has for TCP, one on each
        side, copy the bytes. Where cores are scarce they need those of the caller.
        """
        long = self._tcp and nbytes >= _LONG_TRANSFER
        return list(with_low_priority(call) if long else call())

    def read_ranges(self, keys: Sequence[str], targets: Sequence[Bytes], ranges: Sequence[list[Range]]) -> list[int]:
        """Fill ``ranges`` (start, stop) of each of ``targets``, which are as long as their values; see ``read``."""
        results = self._raw.get_into_ranges(
            [address_of(target) for target in targets],
            [[key] for key in keys],
            *(
                [[[start for start, _ in each]] for each in ranges],
                [[[start for start, _ in each]] for each in ranges],
                [[[stop - start for start, stop in each]] for each in ranges],
            ),
        )
        codes_of_keys = []
        for result, wanted in zip(results, ranges, strict=True):
            moved = result[0] if result else [codes.GONE]
            failed = [int(code) for code in moved if code < 0]
            short = len(moved) != len(wanted) or any(
                code != stop - start for code, (start, stop) in zip(moved, wanted, strict=False)
            )
            codes_of_keys.append(min(failed) if failed else (codes.GONE if short else 0))
        return codes_of_keys

    def _read_through(self, key: str, target: Bytes) -> int:
        value = self._raw.get(key)  # b"" for anything that goes wrong
        if len(value) == target.nbytes:
            target.data[:] = value
            return 0
        size = int(self._raw.get_size(key))
        return size if size < 0 else codes.TRANSFER_FAILED

    def verify(self, keys: Sequence[str]) -> list[int]:
        """0 for each key that still exists. If it does, what ``read`` gave before was the value: keys are not reused,
        and its memory is recycled only after the key is gone."""
        states = {1: 0, 0: codes.GONE}
        return [states.get(state, state) for state in self._raw.batch_is_exist(list(keys))]

    def places(self, keys: Sequence[str]) -> dict[str, tuple[int, str]]:
        """key -> (bytes, endpoint of the segment), for those of ``keys`` that exist."""
        found = {}
        for key, replicas in self._raw.batch_get_replica_desc(list(keys)).items():
            for replica in replicas:
                if replica.is_memory_replica():
                    buffer = replica.get_memory_descriptor().buffer_descriptor
                    found[key] = (int(buffer.size), str(buffer.transport_endpoint))
        return found

    def remove(self, keys: Sequence[str]) -> list[int]:
        """Remove at once, under lease or not: readers verify. A code per key."""
        return list(self._raw.batch_remove(list(keys), True))

    # ------------------------------------------------------------------------------------------------------ blocks

    def block_sizes(self, run: str, blocks: Sequence[int]) -> dict[int, int]:
        """block -> bytes, for those of ``blocks`` that exist. Raises ConnectionLostError."""
        keys = {block_key(run, block): block for block in blocks}
        states = dict(zip(keys, self.verify(list(keys)), strict=True))
        # The engine logs an error for each key that is not there and whose place it is asked for.
        found = self.places([key for key, state in states.items() if state == 0])
        sizes = {keys[key]: nbytes for key, (nbytes, _) in found.items()}
        absent = {key: block for key, block in keys.items() if block not in sizes}
        if vanished := [key for key in absent if states[key] == 0]:  # or unreachable since: places() does not tell
            states.update(zip(vanished, self.verify(vanished), strict=True))
        if absent and (code := min(states[key] for key in absent)) not in (0, codes.GONE):
            raise ConnectionLostError(codes.explain(code, list(absent)))
        for key, block in absent.items():
            total = 0
            for names in _part_names(key):
                found = self.places(self._existing(names))
                total += sum(nbytes for nbytes, _ in found.values())
                if len(found) < len(names):
                    break
            if total:
                sizes[block] = total
        return sizes

    def _existing(self, keys: Sequence[str]) -> list[str]:
        """Those that exist: the engine logs an error for each other one whose place it is asked for."""
        return [key for key, code in zip(keys, self.verify(keys), strict=True) if code == 0]

    def remove_blocks(self, run: str, blocks: Sequence[int]) -> list[int]:
        """Remove blocks in one piece or in parts. Returns those that could not be removed now."""
        if not blocks:
            return []
        results = self.remove([block_key(run, block) for block in blocks])
        left = [block for block, code in zip(blocks, results, strict=True) if code not in (0, codes.GONE)]
        for block, code in zip(blocks, results, strict=True):
            for names in _part_names(block_key(run, block)) if code == codes.GONE else ():
                parts = self.remove(names)
                if any(part not in (0, codes.GONE) for part in parts):
                    left.append(block)
                    break
                if codes.GONE in parts[-1:]:
                    break
        return left

    # --------------------------------------------------------------------------------------------------------- end

    def close(self) -> None:
        """Unmount this process's segment, with all that is in it, and disconnect. Idempotent.

        With several masters the connection ends with the process, see ``leaving``.
        """
        raw, self._raw = self._raw, None
        if raw is None:
            return
        if self._masters_in_etcd:
            leave(raw, self.name, self._reserved, self._module.__file__)
        else:
            raw.close()
            self._reserved.close()

    def abandon(self) -> None:
        """Drop the connection in a forked child without destroying it: it belongs to the parent."""
        if self._raw is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._raw))
            self._raw = None
            self._reserved.close()


def _part_names(key: str) -> Iterator[list[str]]:
    start = 0
    while True:
        yield [f"{key}/{k}" for k in range(start, start + _PARTS_AT_ONCE)]
        start += _PARTS_AT_ONCE


# --------------------------------------------------------------------------------------------------------- set-up


_engines_of: int | None = None
"""The process that made engines. In a child that it forks, setting one up would never end."""


def open_store(settings: MooncakeSettings, segment_bytes: int) -> Store:
    """Join the store with a segment of ``segment_bytes`` (0: none).

    Waits ``settings.start_timeout`` for the master. Raises StartError: not installed, not reachable, no device, or this
    process was forked from one that has used the engine.
    """
    if _engines_of not in (None, os.getpid()):
        raise StartError(
            "this process was forked from one that has used Mooncake, whose engine does not work after a fork: start "
            'worker processes by spawn or forkserver, for example StreamingDataLoader(multiprocessing_context="spawn")'
        )
    engine.check_version(engine.installed_version())
    local = _local_address(master_host(settings))
    if ":" in local:
        os.environ.setdefault("MC_USE_IPV6", "1")  # the engine reads it when it is loaded
    module = engine.import_store()
    if not settings.eviction_disabled and not hasattr(module.ReplicateConfig, "with_hard_pin"):
        raise StartError(
            f"Mooncake {engine.installed_version()} cannot pin blocks, and its master evicts unread data by default: "
            "start it with --eviction_high_watermark_ratio=1 --eviction_ratio=0 and set evictionDisabled: true"
        )
    devices = ""
    if settings.protocol == "rdma":
        chosen = choose_devices(settings.device_name, os.environ, segment_bytes=segment_bytes)
        devices = chosen.device_name
        _prepare_rdma(chosen.environment)
    _prepare_environment(settings, local)
    deadline = time.monotonic() + settings.start_timeout
    backoff, tries = Backoff(*_RETRY_S), 0
    while True:
        problem = _probe(settings)
        if problem is None:
            store, code = _set_up(module, settings, local, segment_bytes, devices)
            if store is not None:
                return store
            tries += 1
            problem = (
                f"Mooncake set-up of a segment of {segment_bytes} bytes at {local} over {settings.protocol} failed "
                f"({code}) although master and metadata server answer; {_advice(settings)}"
            )
        if time.monotonic() >= deadline or tries >= _SET_UP_TRIES:
            raise StartError(problem)
        time.sleep(backoff.next_s())


def _advice(settings: MooncakeSettings) -> str:
    if settings.master_server_address.startswith("etcd://"):
        return (
            "perhaps no master is registered in etcd: start mooncake_master with --enable_ha=true and "
            "--etcd_endpoints, and set clusterId or MC_STORE_CLUSTER_ID to its --cluster_id"
        )
    if settings.protocol == "rdma":
        return "check ulimit -l and deviceName"
    return "check that this host's memory has room for the segment"


def master_host(settings: MooncakeSettings) -> str:
    """Host of the master, or of the first etcd member that knows it."""
    first = settings.master_server_address.removeprefix("etcd://").split(";")[0]
    return first.rpartition(":")[0].strip("[]")


def _set_up(
    module: Any, settings: MooncakeSettings, local: str, segment_bytes: int, devices: str
) -> tuple[Store | None, int]:
    # The number is held as long as the store lives: two processes of one name on one host would take each other's
    # entry out of the metadata server.
    reserved = socket.socket(socket.AF_INET6 if ":" in local else socket.AF_INET)
    reserved.bind((local, 0))
    port = reserved.getsockname()[1]
    name = join_address(local, port)
    global _engines_of
    _engines_of = os.getpid()
    # A failed object stays failed: each try has a fresh one.
    raw = module.MooncakeDistributedStore()
    try:
        with engine.quiet(), confined(wanted=is_loopback(local)):
            code = raw.setup(
                name,
                settings.metadata_server,
                segment_bytes,
                0 if settings.zero_copy.enable or segment_bytes else settings.local_buffer_size,
                settings.protocol,
                devices,
                settings.master_server_address,
            )
    except BaseException:
        reserved.close()
        raise
    if code:
        raw.close()
        reserved.close()
        return None, code
    return Store(raw, module, settings, name, reserved), 0


def _local_address(master: str) -> str:
    """The address by which others reach this process. With a master on loopback the store is local to this machine."""
    toward = _address_toward(master)
    return toward if is_loopback(toward) else os.environ.get("LOCAL_IP") or toward


def _address_toward(host: str) -> str:
    """The address that others reach this host by. No packet is sent."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise StartError(f"masterServerAddress: cannot resolve or route to {host!r}: {error.strerror}") from None


def _prepare_environment(settings: MooncakeSettings, local: str) -> None:
    """The engine reads these, some of them long after set-up."""
    if is_loopback(local):
        os.environ["MC_TCP_BIND_ADDRESS"] = local
    else:
        os.environ.setdefault("MC_TCP_BIND_ADDRESS", local)
    if settings.cluster_id:
        os.environ["MC_STORE_CLUSTER_ID"] = settings.cluster_id
    host = urllib.parse.urlsplit(settings.metadata_server).hostname
    if host:  # its HTTP client would go through a proxy
        for variable in ("no_proxy", "NO_PROXY"):
            hosts = [name for name in os.environ.get(variable, "").split(",") if name]
            if host not in hosts:
                os.environ[variable] = ",".join([*hosts, host])


def _prepare_rdma(variables: Mapping[str, str]) -> None:
    """Set variables that are not set, and the variable by which the engine uses the given devices."""
    for name, value in variables.items():
        if name == "MC_MS_AUTO_DISC":
            os.environ[name] = value
        elif name != "MC_GID_INDEX" or not os.environ.get("NCCL_IB_GID_INDEX"):  # the engine reads either
            os.environ.setdefault(name, value)


def _probe(settings: MooncakeSettings) -> str | None:
    """Return why set-up cannot work now, in one line; None if there is no reason."""
    master = settings.master_server_address
    if master.startswith("etcd://"):
        if (reason := _unreachable(master)) is not None:
            return f"masterServerAddress: none of the etcd members {master} can be reached ({reason}): start etcd"
    elif (reason := _unreachable(master)) is not None:
        return (
            f"the Mooncake master at {master} cannot be reached ({reason}): start mooncake_master, or check "
            "masterServerAddress"
        )
    if settings.metadata_server.startswith("etcd://"):
        reason = _unreachable(settings.metadata_server)
        if reason is not None:
            return f"metadataServer: {settings.metadata_server} cannot be reached ({reason}): start etcd"
    if settings.metadata_server.startswith("http"):
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            opener.open(f"{settings.metadata_server}?key=tq", timeout=_PROBE_S).close()
        except urllib.error.HTTPError as error:
            error.close()  # no such key: it answers
        except (OSError, http.client.HTTPException) as error:
            cause = getattr(error, "reason", None) or error
            return (
                f"the Mooncake metadata server at {settings.metadata_server} cannot be reached ({cause}): start "
                "mooncake_master with --enable_http_metadata_server=true, or check metadataServer"
            )
    return None


def _unreachable(address: str) -> str | None:
    """Return why no host of ``HOST:PORT`` or ``etcd://HOST:PORT;HOST:PORT`` accepts connections; None if one does."""
    reason = ""
    for member in address.removeprefix("etcd://").split(";"):
        host, port = parse_address(member)
        try:
            socket.create_connection((host, port), timeout=_PROBE_S).close()
        except OSError as error:
            reason = error.strerror or str(error)
        else:
            return None
    return reason
