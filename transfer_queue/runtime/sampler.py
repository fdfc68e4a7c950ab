"""Making the controller's sampler from its settings: in the controller, and before that where they are given."""

from __future__ import annotations

import base64
import importlib
import inspect
import pickle
from typing import Any

from transfer_queue.config.processes import SamplerChoice
from transfer_queue.errors import ConfigError
from transfer_queue.sampler import BaseSampler

__all__ = ["load_sampler"]


def load_sampler(choice: SamplerChoice) -> BaseSampler:
    """A built-in sampler by class name, one by ``package.module:Class``, or a pickled one. Raises ConfigError, also for
    what a user's module or constructor raises."""
    if choice.pickled is not None:
        return _unpickled(choice.name, choice.pickled, choice.args)
    module_name, _, class_name = choice.name.rpartition(":")
    try:
        module = importlib.import_module(module_name or "transfer_queue.sampler")
    except Exception as error:  # boundary: it may be a user's module
        raise ConfigError(f"sampler.name: cannot import {module_name!r}: {_describe(error)}") from error
    found = getattr(module, class_name, None)
    if not (isinstance(found, type) and issubclass(found, BaseSampler)):
        raise ConfigError(
            f"sampler.name: Could not find sampler {choice.name!r}; built-in: {', '.join(_built_in())}; "
            "write your own as package.module:Class"
        )
    return _made(found, choice.args)


def _unpickled(name: str, data: str, args: dict[str, Any]) -> BaseSampler:
    try:
        found = pickle.loads(base64.b64decode(data))
    except Exception as error:  # boundary: what it imports is a user's
        raise ConfigError(f"sampler {name}: cannot be unpickled: {_describe(error)}") from error
    return found if isinstance(found, BaseSampler) else _made(found, args)


def _made(found: type[BaseSampler], args: dict[str, Any]) -> BaseSampler:
    try:
        return found(**args)
    except Exception as error:  # boundary: it may be a user's class
        raise ConfigError(
            f"sampler.args: {found.__name__}({', '.join(f'{name}={value!r}' for name, value in args.items())}): "
            f"{_describe(error)}; it takes {found.__name__}{inspect.signature(found)}"
        ) from error


def _describe(error: Exception) -> str:
    return str(error) if isinstance(error, TypeError | ValueError) else f"{type(error).__name__}: {error}"


def _built_in() -> list[str]:
    samplers = importlib.import_module("transfer_queue.sampler")
    return sorted(
        name
        for name, value in vars(samplers).items()
        if isinstance(value, type) and issubclass(value, BaseSampler) and not inspect.isabstract(value)
    )
