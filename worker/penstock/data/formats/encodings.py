"""Encodings of MDS columns, by mosaicml-streaming's names: from values to bytes, and back. What comes back is equal,
but JPEG loses detail, numbers are rounded to the float type, JSON has lists for tuples.

A decoder gets the whole sample's bytes, to avoid copies. It raises an error unless it uses all of the value's bytes
(except pickles and image files, decoded by other libraries), and allocates no more memory than the value needs. Arrays
are writable copies (mosaicml-streaming's are read-only, about which torch.from_numpy warns). As there, "int" and
"str_float" give Python's numbers, "uint8" to "float64" numpy's scalars, images PIL's objects, decoded on first use.
"""

from __future__ import annotations

import json
import operator
import pickle
import struct
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from math import prod
from typing import Any

import numpy as np

from penstock.data.formats.media import images
from penstock.proto.errors import DatasetError, InvalidArgumentError


@dataclass(frozen=True, slots=True)
class Encoding:
    size: int | None
    """Number of bytes of each encoded value; None if it varies."""
    decode: Callable[[bytes, int, int], Any]
    """(sample, begin, end) -> value. Raises any exception for bytes that are not a value."""
    encode: Callable[[Any], bytes]
    """Raises TypeError, ValueError or OverflowError for a value that the encoding cannot store."""
    decode_array: Callable[[bytes, int, int], Any] | None = None
    """As `decode`, but returns an image, or a list of images, as arrays; None for other values."""
    decode_file: Callable[[bytes, int, int], Any] | None = None
    """As `decode`, but returns images as the bytes of their files, and a pickle as bytes; None for other values."""


def encoding_of(name: str, *, allow_unsafe_types: bool = False) -> Encoding:
    """Raises InvalidArgumentError for an unknown name, DatasetError for pickles unless `allow_unsafe_types`."""
    check_encoding(name)
    if name in UNSAFE and not allow_unsafe_types:
        raise DatasetError(
            f"encoding {name!r} needs allow_unsafe_types=True, because reading it runs code of the dataset's writer"
        )
    family, colon, config = name.partition(":")
    return _ndarray(config) if family == "ndarray" and colon else ENCODINGS[family]


def check_encoding(name: str) -> None:
    family, colon, config = name.partition(":") if isinstance(name, str) else (name, "", "")
    if family not in ENCODINGS:
        raise InvalidArgumentError(f"the encoding must be one of {', '.join(ENCODINGS)}, got {name!r}")
    if colon:
        if family != "ndarray":
            raise InvalidArgumentError(f"encoding {name!r}: {family} takes no parameter. Use {family!r}")
        _ndarray(config)


def _typed(value: Any, kind: type | tuple[type, ...], what: str) -> None:
    if not isinstance(value, kind):
        raise TypeError(f"the value must be {what}, got {type(value).__name__}")


def as_bytes(sample: bytes, begin: int, end: int) -> bytes:
    return sample[begin:end]


def _encode_bytes(value: Any) -> bytes:
    _typed(value, bytes, "bytes")
    return bytes(value)


def _decode_str(sample: bytes, begin: int, end: int) -> str:
    return sample[begin:end].decode()


def _encode_str(value: Any) -> bytes:
    _typed(value, str, "str")
    return bytes(value.encode())


_INT64 = struct.Struct("=q").unpack_from


def _decode_int(sample: bytes, begin: int, end: int) -> int:
    if end - begin != 8:
        raise ValueError(f"the value must have 8 bytes, got {end - begin}")
    value: int = _INT64(sample, begin)[0]
    return value


def _encode_int(value: Any) -> bytes:
    return operator.index(value).to_bytes(8, "little", signed=True)


def _scalar(dtype: type[np.generic]) -> Encoding:
    size = np.dtype(dtype).itemsize
    whole = issubclass(dtype, np.integer)

    def decode(sample: bytes, begin: int, end: int) -> Any:
        if end - begin != size:
            raise ValueError(f"the value must have {size} bytes, got {end - begin}")
        return np.frombuffer(sample, dtype, 1, begin)[0]

    def encode(value: Any) -> bytes:
        if value is None or isinstance(value, str):  # numpy converts both to numbers
            raise TypeError(f"the value must be a number, got {type(value).__name__}")
        with np.errstate(over="ignore"):
            made = dtype(value)
        if (whole and made != value) or (not whole and np.any(np.isinf(made) & np.isfinite(value))):
            what = "a whole number" if whole else "a number"
            raise ValueError(f"the value must be {what} within the range of {dtype.__name__}, got {value!r}")
        return made.tobytes()

    return Encoding(size, decode, encode)


# Codes of dtypes in MDS. `_decode_array` shows the rest of the format.
_DTYPES: dict[int, np.dtype[Any]] = {
    8: np.dtype(np.uint8),
    9: np.dtype(np.int8),
    16: np.dtype(np.uint16),
    17: np.dtype(np.int16),
    18: np.dtype(np.float16),
    32: np.dtype(np.uint32),
    33: np.dtype(np.int32),
    34: np.dtype(np.float32),
    64: np.dtype(np.uint64),
    65: np.dtype(np.int64),
    66: np.dtype(np.float64),
}
_NUMBERS = {dtype: number for number, dtype in _DTYPES.items()}
_BY_NAME = {dtype.name: dtype for dtype in _NUMBERS}
_SHAPES = tuple(struct.Struct(f"={letter}") for letter in "BHIQ")
"""For one dimension of a shape, in 1 to 8 bytes: the two lowest bits of the byte of dimensions say which."""
MAX_DIMENSIONS = 63


def _ndarray(config: str) -> Encoding:
    """`config`: ":dtype:shape" or less. What the name leaves out is stored before each value."""
    name, colon, dims = config.partition(":")
    if not config:
        return ENCODINGS["ndarray"]
    dtype = _BY_NAME.get(name)
    if dtype is None:
        raise InvalidArgumentError(
            f"encoding 'ndarray:{config}': the dtype must be one of {', '.join(_BY_NAME)}, got {name!r}"
        )
    shape = None
    if colon:
        parts = dims.split(",")
        if len(parts) > MAX_DIMENSIONS or not all(dim.isascii() and dim.isdigit() and int(dim) for dim in parts):
            raise InvalidArgumentError(
                f"encoding 'ndarray:{config}': the shape must be numbers >= 1, such as 3,224,224, got {dims!r}"
            )
        shape = tuple(map(int, parts))
    size = None if shape is None else prod(shape) * dtype.itemsize
    return Encoding(size, partial(_decode_array, dtype, shape), partial(_encode_array, dtype, shape))


def _decode_array(
    dtype: np.dtype[Any] | None, shape: tuple[int, ...] | None, sample: bytes, begin: int, end: int
) -> np.ndarray[Any, Any]:
    if dtype is None:
        dtype = _DTYPES[sample[begin]]
        begin += 1
    if shape is None:
        head = sample[begin]
        begin += 1
        dim, count = _SHAPES[head & 3], head >> 2
        shape = tuple([dim.unpack_from(sample, begin + i * dim.size)[0] for i in range(count)])
        begin += count * dim.size
    items = prod(shape)
    if begin + items * dtype.itemsize != end:
        raise ValueError(
            f"an array of {dtype.name} and shape {shape} must have {items * dtype.itemsize} bytes, got {end - begin}"
        )
    return np.frombuffer(sample, dtype, items, begin).reshape(shape).copy()


def _encode_array(dtype: np.dtype[Any] | None, shape: tuple[int, ...] | None, value: Any) -> bytes:
    _typed(value, np.ndarray, "a numpy array")
    number = _NUMBERS.get(value.dtype)
    if number is None or (dtype is not None and value.dtype != dtype):
        raise TypeError(f"the array's dtype must be {dtype or ', '.join(_BY_NAME)}, got {value.dtype}")
    if shape is not None and value.shape != shape:
        raise ValueError(f"the array's shape must be {shape}, got {value.shape}")
    if not value.ndim or value.ndim > MAX_DIMENSIONS or not value.size:
        raise ValueError(f"the array must have 1 to {MAX_DIMENSIONS} axes, none empty, got shape {value.shape}")
    head = bytearray() if dtype is not None else bytearray([number])
    if shape is None:
        width = next(i for i, dim in enumerate(_SHAPES) if max(value.shape) < 1 << 8 * dim.size)
        head.append(value.ndim << 2 | width)
        for dim in value.shape:
            head += _SHAPES[width].pack(dim)
    data: bytes = bytes(head) + value.tobytes()
    return data


def _text(kind: type) -> Encoding:
    def decode(sample: bytes, begin: int, end: int) -> Any:
        return kind(sample[begin:end].decode())

    def encode(value: Any) -> bytes:
        _typed(value, kind, kind.__name__)
        if value is True or value is False:
            raise TypeError("the value must be a number, got bool")
        return str(value).encode()

    return Encoding(None, decode, encode)


def _decode_json(sample: bytes, begin: int, end: int) -> Any:
    return json.loads(sample[begin:end].decode())


def _encode_json(value: Any) -> bytes:
    return json.dumps(value.tolist() if isinstance(value, np.ndarray) else value).encode()


def _unpickle(sample: bytes, begin: int, end: int) -> Any:
    # The only unpickling of foreign data, available only with allow_unsafe_types=True.
    return pickle.loads(sample[begin:end])


UNSAFE = {"pkl"}


def _image(
    decode: images.Decode,
    encode: images.Encode,
    decode_array: images.Decode | None = None,
    decode_file: images.Decode = as_bytes,
) -> Encoding:
    return Encoding(None, decode, encode, decode_array or images.array_decoder(decode), decode_file)


def _images(one: Encoding, encode: images.Encode) -> Encoding:
    decoders = (one.decode, one.decode_array or one.decode, one.decode_file or as_bytes)
    pil, array, file = map(images.list_decoder, decoders)
    return Encoding(None, pil, images.list_encoder(encode), array, file)


_PIL = _image(images.decode_raw, images.encode_raw, decode_file=images.raw_to_png)
_JPEG = _image(images.decode_image, images.encode_jpeg, images.decode_image_array)
_PNG = _image(images.decode_image, images.encode_png, images.decode_image_array)
_JPEG_ARRAY = Encoding(
    None,
    images.file_list_decoder(images.decode_image),
    images.encode_files,
    images.file_list_decoder(images.decode_image_array),
    images.file_list_decoder(as_bytes),
)

ENCODINGS: dict[str, Encoding] = {
    "bytes": Encoding(None, as_bytes, _encode_bytes),
    "str": Encoding(None, _decode_str, _encode_str),
    "int": Encoding(8, _decode_int, _encode_int),
    "ndarray": Encoding(None, partial(_decode_array, None, None), partial(_encode_array, None, None)),
    **{dtype.name: _scalar(dtype.type) for dtype in _DTYPES.values()},
    "str_int": _text(int),
    "str_float": _text(float),
    "str_decimal": _text(Decimal),
    "pil": _PIL,
    "jpeg": _JPEG,
    "jpeg_array": _JPEG_ARRAY,
    "jpegarray": _JPEG_ARRAY,
    "png": _PNG,
    "list[pil]": _images(_PIL, images.encode_raw),
    "list[jpeg]": _images(_JPEG, images.encode_jpeg),
    "list[png]": _images(_PNG, images.encode_png),
    "pkl": Encoding(None, _unpickle, pickle.dumps, decode_file=as_bytes),
    "json": Encoding(None, _decode_json, _encode_json),
}
""""ndarray" may be followed by ":dtype" or ":dtype:shape"."""
