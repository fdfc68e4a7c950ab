"""Making the controller's sampler from its settings."""

from __future__ import annotations

import importlib

from transfer_queue.config.processes import SamplerChoice
from transfer_queue.errors import ConfigError
from transfer_queue.sampler import BaseSampler

__all__ = ["load_sampler"]


def load_sampler(choice: SamplerChoice) -> BaseSampler:
    """A built-in sampler by class name, or one by ``package.module:Class``. Raises ConfigError."""
    module_name, _, class_name = choice.name.rpartition(":")
    try:
        module = importlib.import_module(module_name or "transfer_queue.sampler")
    except ImportError as error:
        raise ConfigError(f"sampler.name: cannot import {module_name!r}: {error}") from None
    found = getattr(module, class_name, None)
    if not (isinstance(found, type) and issubclass(found, BaseSampler)):
        raise ConfigError(
            f"sampler.name: Could not find sampler {choice.name!r}; built-in: {', '.join(_built_in())}; "
            "write your own as package.module:Class"
        )
    try:
        return found(**choice.args)
    except TypeError as error:
        raise ConfigError(f"sampler.args: {error}") from None


def _built_in() -> list[str]:
    samplers = importlib.import_module("transfer_queue.sampler")
    return sorted(
        name
        for name, value in vars(samplers).items()
        if isinstance(value, type) and issubclass(value, BaseSampler) and value is not BaseSampler
    )
