"""``data_parser``: a user's function over the values of a put before they are stored."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from transfer_queue.errors import RequestError

if TYPE_CHECKING:
    from tensordict import TensorDict

__all__ = ["DataParser", "parsed"]

DataParser = Callable[[dict[str, Any]], dict[str, Any]]


def parsed(data: TensorDict | dict[str, Any], parser: DataParser | None) -> TensorDict | dict[str, Any]:
    """``data`` as ``parser`` returns it, or as it is without one.

    The parser gets ``{field: dense tensor | list of rows}`` and returns the same keys with as many rows each. It runs
    in the calling process: storage units run no user code. Raises RequestError with the parser's own text.
    """
    if parser is None:
        return data
    if not callable(parser):
        raise RequestError(f"data_parser must be callable, not {type(parser).__name__}")
    fields: dict[str, Any] = {str(name): _rows(value) for name, value in data.items()}
    counts = {name: len(value) for name, value in fields.items()}
    try:
        result = parser(fields)
    except Exception as error:  # boundary of user code
        raise RequestError(f"data_parser raised {type(error).__name__}: {error}") from error
    if not isinstance(result, dict):
        raise RequestError(f"data_parser must return a dict, not {type(result).__name__}")
    if set(result) != set(counts):
        raise RequestError(f"data_parser must not change dict keys: got {sorted(result)}, expected {sorted(counts)}")
    for name, value in result.items():
        if not hasattr(value, "__len__"):
            raise RequestError(
                f"data_parser must return a tensor or a list of rows for {name!r}, not {type(value).__name__}"
            )
        if len(value) != counts[name]:
            raise RequestError(
                f"data_parser changed the number of elements of {name!r} from {counts[name]} to {len(value)}"
            )
    return result


def _rows(value: Any) -> Any:
    """A dense tensor as it is, anything else as a list of rows."""
    import torch

    if isinstance(value, torch.Tensor):
        return list(value.unbind()) if value.is_nested else value
    return value.tolist() if hasattr(value, "tolist") else value
