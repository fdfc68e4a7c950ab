"""Finding a queue, or starting one: ``init``, ``close``, ``get_client``."""

from __future__ import annotations

import atexit
import functools
import logging
import os
import re
import sys
import threading
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, cast

from transfer_queue.client.options import ClientOptions
from transfer_queue.client.twins import end_daemon_calls
from transfer_queue.compat.client import TransferQueueClient
from transfer_queue.compat.server_info import CONTROLLER_PORT_NAME, ZMQServerInfo, controller_address
from transfer_queue.config.attach import AttachConfig, attach_from_environment, parse_address
from transfer_queue.config.document import parse_bytes, validate_document
from transfer_queue.config.init_settings import ATTACH_SETTINGS, check_names, leaves
from transfer_queue.config.running import noted_queues
from transfer_queue.config.variables import check_values, misspelt
from transfer_queue.errors import ConfigError, InvalidTypeError, NotInitializedError, StartError
from transfer_queue.launch.discovery import queue_at, ray_launcher
from transfer_queue.launch.ranks import Ranks

if TYPE_CHECKING:
    from omegaconf import DictConfig

__all__ = ["close", "current_client", "get_client", "init", "queue_named_by"]

log = logging.getLogger(__name__)

_CLIENT_CHOICES = ("layout", "missing_fields", "traces")
"""Settings of each client, not of the queue."""
_INHERITED = "TQ_INHERITED_FILE"
"""Variable with the file to which ``init()`` of a parent process set ``TQ_CONFIG_FILE``."""


class LocalQueue(Protocol):
    """Server processes that this process started."""

    @property
    def attach_config(self) -> AttachConfig: ...

    @property
    def created(self) -> bool:
        """Did this process start it?"""

    def when_ended(self, tell: Callable[[str], None]) -> None:
        """Call ``tell`` with the reason once the controller has ended on its own."""

    def stop(self) -> None: ...


class StartedQueue(LocalQueue, Protocol):
    """A queue of local processes."""

    @property
    def page(self) -> str:
        """URL of the page that shows it."""

    def write_attach_config(self) -> Path: ...


class _State:
    """The client of this process, and the servers that its ``close`` stops."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.client: TransferQueueClient | None = None
        self.local: LocalQueue | None = None
        self.local_pid = 0
        self.stops_at_exit = True
        self.conf: dict[str, Any] | None = None
        self.exported = ""
        """The file by which children find the queue; ``exporter``: the process that exported it."""
        self.exporter = 0
        self.ranks: Ranks | None = None
        """The ranks to which ``local`` is published."""


_state = _State()


def init(conf: DictConfig | Mapping[str, Any] | None = None, **settings: NoReturn) -> DictConfig | None:
    """Attach this process to a queue; start one as local processes if none is found.

    A queue is looked for in this order: ``conf`` naming it (``{"controller": {"addresses": ["host:port"]}}``, as in the
    file of ``TQ_CONFIG_FILE``); the environment (``TQ_CONFIG_FILE``, ``TQ_CONTROLLER_ADDRESS``); where Ray is
    initialized, the queue of its cluster, which is started there if there is none; among the ranks of a ``torchrun``
    job on one machine, the queue that rank 0 starts; otherwise server processes are started on this machine. A queue
    that is started gets ``conf`` merged over the packaged ``config.yaml``, and ends with this process. Children that
    this process starts afterwards find it by ``TQ_CONFIG_FILE``. ``layout``, ``missing_fields`` and ``traces`` of
    ``conf`` apply to this process, regardless of how the queue is found.

    In a process that is attached, it warns (UserWarning) of settings that differ from those in effect, and does nothing
    else. If the queue of this process has ended, it logs the reason and looks for a queue again.

    Args:
        conf: Settings as in ``config.yaml``, or the address of a queue.
        settings: None is taken; the error says where in ``conf`` to give it.

    Returns:
        The merged settings if it started the queue, ``conf`` as given if it attached.

    Raises:
        ConfigError: A setting is wrong.
        InvalidTypeError: A setting is given as an argument of its own.
        StartError: A server did not start.
        ConnectionLostError: The queue does not answer.

    Example:
        >>> conf = tq.init({"backend": {"SimpleStorage": {"unit_capacity": "1Gi"}}})
    """
    if settings:
        raise InvalidTypeError(f"init() takes settings in conf: write init({settings!r})")
    _warn_of_variables()
    with _state.lock:
        if _state.client is not None and not _state.client.closed:
            ended = _state.client.ended
            if not ended:
                _warn_of_differences(conf)
                return cast("DictConfig | None", conf)
            _leave(ended)
        if _attach_to_own(conf):
            return cast("DictConfig | None", conf)
        named = queue_named_by(conf)
        check_names(_plain(conf) or {}, _is_backend, attaches=named is not None)
        check_values()
        found = named or attach_from_environment()
        if found is not None:
            return _attach_to_found(found, conf)
        launched = ray_launcher()
        if launched is not None:
            queue, merged = launched.find_or_start(conf)
            _attach_to(queue, conf)
            _state.conf = _plain(merged if queue.created else conf)
            return cast("DictConfig | None", merged if queue.created else conf)
        ranks = Ranks.of(os.environ)
        if ranks is not None and ranks.rank > 0:
            found, path = ranks.find()
            attached = _attach_to_found(found, conf)
            _export(path)
            return attached
        return _start(conf, ranks)


def _attach_to_found(config: AttachConfig, conf: DictConfig | Mapping[str, Any] | None) -> DictConfig | None:
    """Attach to a queue of another process, and warn if it has another sampler than ``conf`` names."""
    _state.client = client = _attach(_with_choices(config, conf))
    _state.conf = _plain(conf)
    controller = (_state.conf or {}).get("controller")
    wanted = controller.get("sampler") if isinstance(controller, Mapping) else None
    if isinstance(wanted, Mapping):
        wanted = wanted.get("name")
    if wanted and client.sampler and _sampler_name(wanted) != _sampler_name(client.sampler):
        log.warning(
            "the queue at %s samples with %s, not with %s of conf: it was started with its own settings",
            ", ".join(config.controller.addresses),
            client.sampler,
            wanted if isinstance(wanted, str) else _sampler_name(wanted),
        )
    return cast("DictConfig | None", conf)


def _sampler_name(sampler: object) -> str:
    """Return the last part of the name of ``sampler``, a sampler, its class or a name."""
    kind = sampler if isinstance(sampler, type) else type(sampler)
    return re.split("[.:]", sampler if isinstance(sampler, str) else kind.__qualname__)[-1]


def _start(conf: DictConfig | Mapping[str, Any] | None, ranks: Ranks | None) -> DictConfig:
    """Start a queue of this process, attach to it, and publish it to children and to the other ``ranks``."""
    local, merged = _start_local(conf)
    try:
        _attach_to(local, conf)
        path = str(local.write_attach_config())
        _export(path)
        where = ", ".join(local.attach_config.controller.addresses)
        page = f"; page: {local.page}" if local.page else ""
        print(
            f"transfer_queue: found no queue and started a queue of its own at {where}; child processes find it, other "
            f"processes of this user by TQ_CONFIG_FILE={path}{page}{_others()}",
            file=sys.stderr,
            flush=True,
        )
        if ranks is not None:
            ranks.publish(path)
            _state.ranks = ranks
    except BaseException:
        close()
        raise
    _state.conf = _plain(merged)
    return merged


def _others() -> str:
    """Return advice about the queues that ``tq up`` runs for this user."""
    return "".join(
        f"; queue {queue.name} runs here too: export TQ_CONFIG_FILE={queue.attach_file} to use it"
        for queue in noted_queues()[:3]
    )


def _attach_to_own(conf: DictConfig | Mapping[str, Any] | None) -> bool:
    """Attach again to the queue that this process started, after its client was closed other than by ``close()``."""
    _state.client, local = None, _state.local
    if local is None or _state.local_pid != os.getpid() or not local.created:
        return False
    _attach_to(local, conf)
    return True


def close() -> None:
    """Close this process's client, and stop the servers that it started. Idempotent.

    In a Ray cluster this ends the queue for all processes, also if this one only attached; a detached queue goes on.
    """
    _close(at_exit=False)


def _close(*, at_exit: bool) -> None:
    if at_exit:
        end_daemon_calls()
    with _state.lock:
        client, _state.client = _state.client, None
        local, _state.local = _state.local, None
        ranks, _state.ranks = _state.ranks, None
        _state.conf = None
        try:
            if client is not None:
                client.close()
        finally:
            if local is not None and _state.local_pid == os.getpid() and (_state.stops_at_exit or not at_exit):
                if ranks is not None:
                    ranks.withdraw()
                local.stop()
            if _state.exporter == os.getpid():
                _withdraw()


@functools.cache
def _warn_of_variables() -> None:
    """Warn once of variables with misspelt names."""
    for text in misspelt():
        warnings.warn(text, UserWarning, stacklevel=3)


def _leave(reason: str) -> None:
    """Give up the client of a queue that has ended, and what is left of the queue if this process started it."""
    log.warning("%s; init() looks for a queue again", reason.partition("; call transfer_queue.init()")[0])
    if _state.local is not None and not _state.local.created:
        _state.local = None  # ``stop`` would end the queue that took its place
    close()
    if os.environ.get(_INHERITED, "") == os.environ.get("TQ_CONFIG_FILE"):  # not a choice of the user
        del os.environ["TQ_CONFIG_FILE"]


def _export(attach_file: str) -> None:
    """Let child processes find the queue of this process."""
    os.environ["TQ_CONFIG_FILE"] = os.environ[_INHERITED] = _state.exported = attach_file
    _state.exporter = os.getpid()


def _withdraw() -> None:
    exported, _state.exported = _state.exported, ""
    if exported and os.environ.get("TQ_CONFIG_FILE") == exported:
        del os.environ["TQ_CONFIG_FILE"]
        os.environ.pop(_INHERITED, None)


def get_client() -> TransferQueueClient:
    """Return this process's client.

    Returns:
        The client that ``init`` attached.

    Raises:
        NotInitializedError: ``init`` was not called in this process.
    """
    client = _state.client
    if client is None:
        raise NotInitializedError("TransferQueue has not been initialized in this process; call tq.init() first")
    return client


def current_client() -> TransferQueueClient:
    """This process's client, attached on first use where the environment names a queue.

    Raises NotInitializedError if there is none to attach to.
    """
    client = _state.client
    if client is not None:
        return client
    _warn_of_variables()
    with _state.lock:
        if _state.client is None:
            found = attach_from_environment()
            launched = None if found is not None else ray_launcher()
            queue = None if launched is None else launched.find()
            if queue is not None:
                return _attach_to(queue)
            if found is None:
                raise NotInitializedError(
                    "TransferQueue has not been initialized: call transfer_queue.init(), or set TQ_CONFIG_FILE or "
                    "TQ_CONTROLLER_ADDRESS to attach to a running queue"
                )
            _state.client = _attach(found)
        return _state.client


def open_client(client_id: str, config: AttachConfig) -> TransferQueueClient:
    """A further client, with the calls of every generation of programs. The caller closes it."""
    return TransferQueueClient(client_id, config)


def _attach(config: AttachConfig) -> TransferQueueClient:
    return TransferQueueClient(f"TransferQueueClient_{os.getpid()}", config)


def _attach_to(queue: LocalQueue, conf: DictConfig | Mapping[str, Any] | None = None) -> TransferQueueClient:
    try:
        client = _attach(_with_choices(queue.attach_config, conf))
    except BaseException:
        if queue.created:
            queue.stop()
        raise
    _state.client, _state.local, _state.local_pid, _state.stops_at_exit = client, queue, os.getpid(), queue.created
    queue.when_ended(lambda reason: client.give_up(f"{reason}; call transfer_queue.init() for a new, empty one"))
    return client


def queue_named_by(conf: DictConfig | Mapping[str, Any] | None) -> AttachConfig | None:
    """The queue that an explicit ``conf`` names, if it names one."""
    plain: dict[str, Any] = _plain(conf) or {}
    controller = plain.get("controller")
    if not isinstance(controller, dict):
        return None
    addresses, info = controller.get("addresses"), controller.get("zmq_info")
    if not addresses and info is not None:  # settings that ``init`` returned in another process
        addresses = [controller_address(info)]
    if not addresses:
        return None
    known: dict[str, Any] = {name: plain[name] for name in ATTACH_SETTINGS if name in plain}
    if isinstance(info, ZMQServerInfo) and info.secret is not None and info.address(CONTROLLER_PORT_NAME) in addresses:
        known["security"] = {"secret": info.secret, **(known.get("security") or {})}
    elif isinstance(addresses, list) and not (known.get("security") or {}).keys() - {"allowPickle", "allow_pickle"}:
        elsewhere = queue_at(str(addresses[0]))
        shown = {} if elsewhere is None else elsewhere.security.model_dump(exclude={"allow_pickle"}, exclude_none=True)
        known["security"] = {**shown, **(known.get("security") or {})}
    found = validate_document(AttachConfig, {**known, "controller": {"addresses": addresses}}, "conf")
    for address in found.controller.addresses:
        try:
            parse_address(address)
        except ConfigError as error:
            raise ConfigError(f"conf: controller.addresses: {error}") from None
    return found.found_in("controller.addresses of conf" if controller.get("addresses") else "zmq_info of conf")


def _with_choices(config: AttachConfig, conf: DictConfig | Mapping[str, Any] | None) -> AttachConfig:
    """Return ``config`` with the choices of this client in ``conf``."""
    plain: dict[str, Any] = _plain(conf) or {}
    chosen = {name: plain[name] for name in _CLIENT_CHOICES if plain.get(name) is not None}
    if not chosen:
        return config
    named = {"controller": {"addresses": config.controller.addresses}}
    checked = validate_document(AttachConfig, {**chosen, **named}, "conf")
    return config.model_copy(update={name: getattr(checked, name) for name in chosen})


def _start_local(conf: DictConfig | Mapping[str, Any] | None) -> tuple[StartedQueue, DictConfig]:
    try:
        from transfer_queue.launch.conf import start_local
    except ModuleNotFoundError as error:
        raise StartError(
            f"cannot start local server processes: {error}; set TQ_CONFIG_FILE or TQ_CONTROLLER_ADDRESS to attach to "
            "a running queue"
        ) from None
    return start_local(conf)


def _is_backend(name: str) -> bool:
    """Does the program or an installed package bring a backend of this name?"""
    from transfer_queue.compat.registered.registry import StorageManagerFactory
    from transfer_queue.storage.registry import packaged_backends

    return StorageManagerFactory.stores_by_itself(name) or name in packaged_backends()


def _plain(conf: DictConfig | Mapping[str, Any] | None) -> dict[str, Any] | None:
    if conf is None:
        return None
    if isinstance(conf, dict):
        return conf
    from omegaconf import DictConfig, OmegaConf

    if isinstance(conf, DictConfig):
        return cast("dict[str, Any]", OmegaConf.to_container(conf, resolve=True))
    if not isinstance(conf, Mapping):
        raise InvalidTypeError(f"conf must be a DictConfig or another mapping, not {type(conf).__name__}")
    return {str(name): value for name, value in conf.items()}


def _warn_of_differences(conf: DictConfig | Mapping[str, Any] | None) -> None:
    assert _state.client is not None
    config = _state.client.config
    options = ClientOptions.of(config)
    choices = {"layout": options.layout, "missing_fields": options.missing_fields, "traces": config.traces}
    in_effect = {"controller.addresses": config.controller.addresses, **dict(leaves(_state.conf or {})), **choices}
    differing = [
        f"{path}: {value!r} (in effect: {in_effect.get(path, 'not set')!r})"
        for path, value in leaves(_plain(conf) or {})
        if value is not None and not _same(path, value, in_effect.get(path))
    ]
    if differing:
        warnings.warn(
            "transfer_queue is already initialized in this process; settings that init() does not change: "
            f"{', '.join(differing)}. Call transfer_queue.close() first for a queue with other settings",
            stacklevel=3,
        )


def _same(path: str, given: object, in_effect: object) -> bool:
    """Whether the setting ``path`` means the same: samplers also by class and name, sizes in any unit."""
    if path == "controller.sampler" and in_effect is not None and str in (type(given), type(in_effect)):
        return _sampler_name(given) == _sampler_name(in_effect)
    with suppress(ValueError):
        return parse_bytes(given) == parse_bytes(in_effect)
    return given == in_effect


def _renew_lock_in_child() -> None:
    _state.lock = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock_in_child)
atexit.register(_close, at_exit=True)
