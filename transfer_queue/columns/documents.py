"""Python objects as msgpack documents; tensors and arrays in them stay raw bytes.

An object becomes *frames*: frame 0 is msgpack, the others are large buffers it refers to, uncopied. What msgpack lacks
travels as extension types. Anything else is pickled where that is allowed, and refused where not. Containers keep
their exact values, with one exception: tuples come back as lists.
"""

from __future__ import annotations

import pickle
import re
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from transfer_queue.columns.column import Bytes, Int64s, as_bytes
from transfer_queue.columns.packing import pack_table, unpack_from
from transfer_queue.errors import CorruptBlockError, InvalidTypeError

if TYPE_CHECKING:
    import torch

__all__ = ["decode_frames", "decode_rows", "encode_frames", "encode_rows"]

FRAME_BYTES: Final = 4096
"""Buffers of at least this size become frames of their own."""

FRAMED: Final = b"\xc1" + bytes(7)
"""Starts the stored form of an object of several frames; 0xc1 starts no msgpack document."""

NDARRAY, OBJECT_ARRAY, NUMPY_SCALAR, TENSOR, JAGGED, NESTED, BYTES, COMPLEX, BIG_INT, SURROGATES, PAIRS, PICKLE = range(
    1, 13
)

_PLAIN = frozenset({str, int, float, bool, type(None)})
_KEYS = frozenset({str, int, float, bool, type(None), bytes})
_ARRAY_DTYPE = re.compile(r"[<>|=][biufcSUMm]\d{1,18}(\[\w+\])?")

_ALLOW = "set allow_pickle (spec.security.allowPickle of a TransferQueue resource)"

_pack = msgspec.msgpack.Encoder().encode


class _Writer:
    """Encodes one object; ``careful`` also looks at every int and str that msgpack may be unable to hold."""

    def __init__(self, where: str, allow_pickle: bool, careful: bool) -> None:
        self.where = where
        self.allow_pickle = allow_pickle
        self.careful = careful
        self.frames: list[Bytes] = []

    def plain(self, value: Any) -> Any:
        """``value`` in terms of what msgpack holds natively and extensions."""
        kind = type(value)
        if kind is list or kind is tuple:
            if not self.careful and _PLAIN.issuperset(map(type, value)):
                return value
            return [self.plain(item) for item in value]
        if kind is dict:
            if not all(_is_key(key, self.careful) for key in value):
                if self.careful and _KEYS.issuperset(map(type, value)):
                    return _extension(PAIRS, [[_careful_scalar(key), self.plain(item)] for key, item in value.items()])
                return self.pickled(value)
            if not self.careful and _PLAIN.issuperset(map(type, value.values())):
                return value
            return {key: self.plain(item) for key, item in value.items()}
        if kind is bytes and len(value) >= FRAME_BYTES:
            return _extension(BYTES, self.buffer(as_bytes(value)))
        if kind in _PLAIN or kind is bytes:
            return _careful_scalar(value) if self.careful else value
        return self.special(value)

    def special(self, value: Any) -> msgspec.msgpack.Ext:
        if type(value) is complex:
            return _extension(COMPLEX, [value.real, value.imag])
        if isinstance(value, np.generic) and value.dtype.kind in "biufcSUMm":
            array = np.array(value)
            return _extension(NUMPY_SCALAR, [array.dtype.str, array.tobytes()])
        if type(value) is np.ndarray and value.dtype.kind in "biufcSUMm":
            data = np.ascontiguousarray(value).reshape(-1)
            raw = data.view(np.uint8) if data.nbytes else np.empty(0, np.uint8)
            return _extension(NDARRAY, [value.dtype.str, list(value.shape), self.buffer(raw)])
        if type(value) is np.ndarray and value.dtype.kind == "O":
            return _extension(OBJECT_ARRAY, [list(value.shape), [self.plain(item) for item in value.reshape(-1)]])
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(value, torch.Tensor):
            return self.tensor(value)
        return self.pickled(value)

    def tensor(self, value: torch.Tensor) -> msgspec.msgpack.Ext:
        from transfer_queue.columns.nested import jagged_parts
        from transfer_queue.columns.tensor_bytes import dtype_name, tensor_to_bytes

        if value.is_nested:
            parts = jagged_parts(value)
            if parts is None:
                return _extension(NESTED, [self.tensor(row) for row in value.unbind()])
            return _extension(JAGGED, [self.tensor(parts[0]), self.tensor(parts[1]), parts[2]])
        name = dtype_name(value.dtype, self.where)
        return _extension(TENSOR, [name, list(value.shape), self.buffer(tensor_to_bytes(value, self.where))])

    def buffer(self, data: Bytes) -> int | bytes:
        """Small data as it is, large data as the number of its frame."""
        if data.nbytes < FRAME_BYTES:
            return data.tobytes()
        self.frames.append(data)
        return len(self.frames)

    def pickled(self, value: Any) -> msgspec.msgpack.Ext:
        if not self.allow_pickle:
            raise InvalidTypeError(
                f"{self.where}: a {type(value).__module__}.{type(value).__qualname__} can only be stored by pickling, "
                f"which is off; put str, numbers, bytes, lists, dicts, arrays or tensors, or {_ALLOW}"
            )
        return msgspec.msgpack.Ext(PICKLE, _pickle(value, self.where))


def _extension(code: int, payload: object) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(code, _pack(payload))


def _is_key(key: Any, careful: bool) -> bool:
    if type(key) is tuple:
        return all(_is_key(item, careful) for item in key)
    return type(key) in _KEYS and (not careful or not isinstance(_careful_scalar(key), msgspec.msgpack.Ext))


def _careful_scalar(value: Any) -> Any:
    if type(value) is int and not -(2**63) <= value < 2**64:
        return _extension(BIG_INT, hex(value))
    if type(value) is str and not value.isascii():
        raw = value.encode("utf-8", "surrogatepass")
        if raw.decode("utf-8", "replace") != value:
            return _extension(SURROGATES, raw)
    return value


def _pickle(value: Any, where: str) -> bytes:
    try:
        import cloudpickle

        data: bytes = cloudpickle.dumps(value)
    except (pickle.PicklingError, TypeError, AttributeError, ValueError, RecursionError, NotImplementedError) as error:
        raise InvalidTypeError(f"{where}: a {type(value).__qualname__} cannot be pickled: {error}") from error
    return data


def encode_frames(value: Any, *, allow_pickle: bool = True, where: str = "object") -> list[Bytes]:
    """``value`` as frames. Large buffers in it are referenced, so it must not change until the frames are written.

    Raises InvalidTypeError, starting with ``where``, for what cannot be stored; InvalidInputError for sparse and meta
    tensors in it.
    """
    try:
        try:
            writer = _Writer(where, allow_pickle, careful=False)
            document = _pack(writer.plain(value))
        except (OverflowError, UnicodeEncodeError):
            writer = _Writer(where, allow_pickle, careful=True)
            document = _pack(writer.plain(value))
    except RecursionError:
        raise InvalidTypeError(f"{where}: nested too deeply, or contains itself") from None
    return [as_bytes(document), *writer.frames]


class _Reader:
    def __init__(self, allow_pickle: bool) -> None:
        self.allow_pickle = allow_pickle
        self.frames: Sequence[Bytes] = ()
        self.decode = msgspec.msgpack.Decoder(ext_hook=self.extension).decode

    def extension(self, code: int, payload: memoryview) -> Any:
        if code == PICKLE:
            return self.unpickled(payload)
        read = self._readers.get(code)
        if read is None:
            raise ValueError(f"extension type {code} is unknown")
        return read(self, self.decode(payload))

    def buffer(self, data: int | bytes) -> Bytes:
        if isinstance(data, bytes):
            return np.frombuffer(data, np.uint8)
        if type(data) is not int or not 1 <= data < len(self.frames):
            raise ValueError(f"frame {data!r} of {len(self.frames)}")
        return self.frames[data]

    def array(self, payload: list[Any]) -> npt.NDArray[Any]:
        dtype, shape, data = payload
        raw = self.buffer(data)
        return np.array(np.ndarray(_shape(shape), _array_dtype(dtype), raw.data))

    def object_array(self, payload: list[Any]) -> npt.NDArray[Any]:
        shape, items = payload
        array = np.empty(len(items), object)
        for position, item in enumerate(items):
            array[position] = item
        return array.reshape(_shape(shape))

    def scalar(self, payload: list[Any]) -> Any:
        dtype, data = payload
        return np.ndarray((), _array_dtype(dtype), data)[()]

    def tensor(self, payload: list[Any]) -> torch.Tensor:
        from transfer_queue.columns.tensor_bytes import DTYPES, tensor_from_bytes

        dtype, shape, data = payload
        return tensor_from_bytes(self.buffer(data).copy(), DTYPES[dtype], _shape(shape))

    def jagged(self, payload: list[Any]) -> torch.Tensor:
        from transfer_queue.columns.nested import checked_jagged

        values, offsets, axis = payload
        return checked_jagged(values, offsets, axis)

    def nested(self, payload: list[Any]) -> torch.Tensor:
        from transfer_queue.columns.nested import strided_nested

        return strided_nested(payload)

    def unpickled(self, payload: memoryview) -> Any:
        if not self.allow_pickle:
            raise InvalidTypeError(
                "the value was pickled, and unpickling is off here, as the queue does not allow it or did not prove "
                f"its identity; to read it {_ALLOW}, and attach by the queue's own settings (TQ_CONFIG_FILE)"
            )
        try:
            return pickle.loads(payload)
        except (ImportError, AttributeError) as error:
            raise InvalidTypeError(f"a pickled value needs a class that is not importable here: {error}") from error

    _readers: Final[dict[int, Callable[[_Reader, Any], Any]]] = {
        NDARRAY: array,
        OBJECT_ARRAY: object_array,
        NUMPY_SCALAR: scalar,
        TENSOR: tensor,
        JAGGED: jagged,
        NESTED: nested,
        BYTES: lambda self, payload: self.buffer(payload).tobytes(),
        COMPLEX: lambda self, payload: complex(*payload),
        BIG_INT: lambda self, payload: int(payload, 16),
        SURROGATES: lambda self, payload: payload.decode("utf-8", "surrogatepass"),
        PAIRS: lambda self, payload: dict(payload),
    }


def _shape(shape: Any) -> tuple[int, ...]:
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"shape {shape!r}")
    return tuple(shape)


def _array_dtype(name: Any) -> np.dtype[Any]:
    if not isinstance(name, str) or not _ARRAY_DTYPE.fullmatch(name):
        raise ValueError(f"array dtype {name!r}")
    return np.dtype(name)


def decode_frames(frames: Sequence[Bytes], *, allow_pickle: bool = True) -> Any:
    """The object that ``encode_frames`` was given; arrays and tensors in it own their memory.

    Raises CorruptBlockError if the bytes are damaged, InvalidTypeError if they need unpickling and that is off.
    """
    reader = _Reader(allow_pickle)
    reader.frames = frames
    return _decoded(reader, frames[0] if frames else np.empty(0, np.uint8))


def _decoded(reader: _Reader, document: Bytes | bytes) -> Any:
    try:
        return reader.decode(document if isinstance(document, bytes) else document.data)
    except (InvalidTypeError, CorruptBlockError):
        raise
    # What damaged bytes make the decoders raise is not a closed list, unpickling runs arbitrary code above all.
    except Exception as error:
        raise CorruptBlockError(f"object is damaged: {type(error).__name__}: {error}") from error


def encode_rows(rows: Sequence[Any], *, allow_pickle: bool, field: str) -> tuple[list[Bytes], Int64s]:
    """Objects as the chunks of a column and int64 ``(rows,)`` bytes of each row. Errors name field and row."""
    documents: list[bytes] | None = None
    if _PLAIN.issuperset(map(type, rows)):
        try:
            documents = list(map(_pack, rows))
        except (OverflowError, UnicodeEncodeError):
            documents = None
    if documents is not None:
        lengths = np.fromiter(map(len, documents), np.int64, len(documents))
        return [as_bytes(b"".join(documents))], lengths
    chunks: list[Bytes] = []
    sizes = []
    for number, row in enumerate(rows):
        frames = encode_frames(row, allow_pickle=allow_pickle, where=f"field {field!r}, row {number}")
        if len(frames) > 1:
            frames = [as_bytes(FRAMED + pack_table([frame.nbytes for frame in frames]) + frames[0].data), *frames[1:]]
        chunks += frames
        sizes.append(sum(frame.nbytes for frame in frames))
    return _joined(chunks), np.array(sizes, np.int64)


def _joined(chunks: list[Bytes]) -> list[Bytes]:
    """Neighbouring small chunks joined, large ones as they are."""
    joined: list[Bytes] = []
    small: list[Bytes] = []
    for chunk in chunks:
        if chunk.nbytes < FRAME_BYTES:
            small.append(chunk)
            continue
        if small:
            joined.append(np.concatenate(small))
            small = []
        joined.append(chunk)
    if small:
        joined.append(np.concatenate(small))
    return joined


def decode_rows(values: Bytes, starts: Int64s, ends: Int64s, allow_pickle: bool) -> list[Any]:
    """The objects of a column: row ``i`` is ``values[starts[i]:ends[i]]``. Errors as ``decode_frames``."""
    count = len(starts)
    if count == 0:
        return []
    if (ends <= starts).any():
        raise CorruptBlockError("object is damaged: a row of no bytes")
    reader = _Reader(allow_pickle)
    if not (values[starts] == FRAMED[0]).any() and (starts[1:] == ends[:-1]).all():
        # One call decodes them all, as the items of one array.
        together = values[starts[0] : ends[-1]].tobytes()
        return list(_decoded(reader, b"\xdd" + count.to_bytes(4, "big") + together))
    rows = []
    for low, high in zip(starts.tolist(), ends.tolist(), strict=True):
        row = values[low:high]
        if row[0] == FRAMED[0]:
            reader.frames = [as_bytes(frame) for frame in unpack_from(row[len(FRAMED) :])]
            row = reader.frames[0] if reader.frames else row[:0]
        rows.append(_decoded(reader, row))
    return rows
