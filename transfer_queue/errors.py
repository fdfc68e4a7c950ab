"""Every error TransferQueue raises on purpose.

::

    TransferQueueError
    ├── ConfigError (ValueError)              a setting is wrong; the message names the field and the allowed values
    ├── InvalidInputError (ValueError)        an argument is wrong: names, shapes, dtypes, lengths
    ├── InvalidTypeError (TypeError)          an argument has the wrong type
    │   └── UnsupportedFieldError (RuntimeError)  a field has a form that is not stored, such as a nested TensorDict
    ├── CorruptBlockError (ValueError)        stored or received bytes are not what their header says
    ├── CorruptJournalError (ValueError)      a file of the controller's journal was damaged
    ├── JournalWriteError (RuntimeError)      the journal cannot be written, so that nothing can be acknowledged
    ├── NotInitializedError (RuntimeError)    a call that needs ``init()`` came before it
    ├── StartError (RuntimeError)             a server process could not be started
    ├── ConnectionLostError (ConnectionError, RuntimeError)   a server cannot be reached or went away
    ├── WaitTimeoutError (TimeoutError, RuntimeError)         a wait ended before its condition held
    ├── NotAuthorizedError (PermissionError)  who asks is unknown, or may not do this
    ├── CapacityError (RuntimeError)          a byte or sample budget is used up (the text contains "capacity")
    ├── NotReadyError (ValueError)            a row exists but a requested field is not produced yet
    ├── RequestError (RuntimeError)           the controller or a storage unit refused the request
    │   ├── UnknownPartitionError
    │   ├── LockLostError                    a lock ended before its holder gave it back
    │   ├── RowChangedError                  a put that depends on what a row has; that has changed
    │   ├── UnsupportedRequestError (NotImplementedError)   a call of an earlier release that is not available
    │   └── SamplerError                      a sampler raised, or returned rows it may not return
    ├── KeyNotFoundError (ValueError)         keys that are not in the partition
    ├── StorageKeyNotFoundError (KeyError)    a row or field is gone from storage
    ├── CheckpointError (RuntimeError)        a checkpoint cannot be written or read
    │   ├── CheckpointNotFoundError (FileNotFoundError)
    │   ├── CorruptCheckpointError (ValueError)   its files are not what they were when they were written
    │   └── QueueNotEmptyError                a checkpoint must not replace existing rows
    ├── DataLostError (RuntimeError)          rows whose bytes were lost with a storage unit or master
    └── WorkerLostError (RuntimeError)        a worker process of a streaming loader died

The built-in bases are part of the contract: user code catches them.
"""

from __future__ import annotations

__all__ = [
    "CapacityError",
    "CheckpointError",
    "CheckpointNotFoundError",
    "ConfigError",
    "ConnectionLostError",
    "CorruptBlockError",
    "CorruptCheckpointError",
    "CorruptJournalError",
    "DataLostError",
    "InvalidInputError",
    "InvalidTypeError",
    "JournalWriteError",
    "KeyNotFoundError",
    "LockLostError",
    "NotAuthorizedError",
    "NotInitializedError",
    "NotReadyError",
    "QueueNotEmptyError",
    "RequestError",
    "RowChangedError",
    "SamplerError",
    "StartError",
    "StorageKeyNotFoundError",
    "TransferQueueError",
    "UnknownPartitionError",
    "UnsupportedFieldError",
    "UnsupportedRequestError",
    "WaitTimeoutError",
    "WorkerLostError",
    "error_class",
]


class TransferQueueError(Exception):
    """Base of all errors raised by TransferQueue on purpose."""


class ConfigError(TransferQueueError, ValueError):
    """A setting is wrong; the message names the field and the allowed values."""


class InvalidInputError(TransferQueueError, ValueError):
    """An argument is wrong: a name, shape, dtype or length."""


class InvalidTypeError(TransferQueueError, TypeError):
    """An argument has the wrong type."""


class UnsupportedFieldError(InvalidTypeError, RuntimeError):
    """A field has a form that is not stored, such as a nested TensorDict."""


class CorruptBlockError(TransferQueueError, ValueError):
    """Stored or received bytes are not what their header says: truncated, damaged, or not a block at all."""


class CorruptJournalError(TransferQueueError, ValueError):
    """A file of the controller's journal was damaged; the text names the file and the byte."""


class JournalWriteError(TransferQueueError, RuntimeError):
    """The journal cannot be written, for example because its disk is full. Nothing more is acknowledged."""


class NotInitializedError(TransferQueueError, RuntimeError, AssertionError):
    """A call that needs ``transfer_queue.init()`` came before it."""


class StartError(TransferQueueError, RuntimeError):
    """A server process could not be started."""


class ConnectionLostError(TransferQueueError, ConnectionError, RuntimeError):
    """A server cannot be reached or went away."""


class WaitTimeoutError(TransferQueueError, TimeoutError, RuntimeError):
    """A wait ended before its condition held; the text says what was missing."""


class NotAuthorizedError(TransferQueueError, PermissionError):
    """Who asks is unknown to the server, or may not do this; the text names principal, verb and allowed prefixes."""


class CapacityError(TransferQueueError, RuntimeError):
    """A byte or sample budget is used up and did not free up in time."""


class NotReadyError(TransferQueueError, ValueError):
    """A row exists but a requested field is not produced yet."""


class RequestError(TransferQueueError, RuntimeError):
    """The controller or a storage unit refused the request."""


class UnsupportedRequestError(RequestError, NotImplementedError):
    """A call of an earlier release that this one does not have; the message names the call to use instead."""


class UnknownPartitionError(RequestError):
    """The named partition does not exist."""


class LockLostError(RequestError):
    """A lock ended before its holder gave it back: its lease was over, or the connection to the controller was lost."""


class RowChangedError(RequestError):
    """A put depends on what a row has, and that has changed. ``kv_update`` reads and tries again."""


class SamplerError(RequestError):
    """A sampler raised, or returned rows that it may not return."""


class KeyNotFoundError(TransferQueueError, ValueError):
    """Keys that are not in the partition."""


class StorageKeyNotFoundError(TransferQueueError, KeyError):
    """A row or field is gone from storage."""

    def __str__(self) -> str:  # KeyError would show the repr of the message
        return str(self.args[0]) if self.args else ""


class DataLostError(TransferQueueError, RuntimeError):
    """Rows whose bytes were lost with a storage unit or a Mooncake master."""


class CheckpointError(TransferQueueError, RuntimeError):
    """A checkpoint cannot be written or read."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is no checkpoint, or a part of it is missing."""


class CorruptCheckpointError(CheckpointError, ValueError):
    """The files of a checkpoint are not what they were when they were written."""


class QueueNotEmptyError(CheckpointError):
    """The queue has rows, and the checkpoint must not replace them."""


class WorkerLostError(TransferQueueError, RuntimeError):
    """A worker process of a streaming loader died; what it fetched and did not deliver can be fetched again."""


def error_class(name: str) -> type[TransferQueueError]:
    """The error class called ``name``, for errors that travel over the wire; unknown names give RequestError."""
    found = globals().get(name)
    if isinstance(found, type) and issubclass(found, TransferQueueError):
        return found
    return RequestError
