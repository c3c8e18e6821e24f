"""Round trips of states through their envelope, compared to the bit."""

from __future__ import annotations

import math
import struct
from collections import OrderedDict
from typing import Any

import numpy as np
import torch

from penstock.proto.state.codec import decode_state, encode_state

__all__ = ["fingerprint", "same"]


def fingerprint(value: Any) -> Any:
    """Return a value that is equal for two values of the same type, structure and bits; all NaNs are one."""
    kind = type(value)
    if isinstance(value, torch.Tensor):
        dense = value.detach().resolve_conj().resolve_neg()
        dense = dense.view(torch.uint8) if dense.itemsize == 1 else dense
        raw = dense.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8).numpy().tobytes()
        return torch.Tensor, value.dtype, tuple(value.shape), raw
    if kind is np.ndarray:
        return kind, value.dtype.str, value.dtype.char, value.shape, value.tobytes()
    if isinstance(value, np.generic) and kind is not np.str_:
        return kind, value.dtype.str, value.tobytes()
    if isinstance(value, dict):
        items = [(fingerprint(k), fingerprint(v)) for k, v in value.items()]
        return kind, items, fingerprint(vars(value)) if kind is OrderedDict else None
    if isinstance(value, (set, frozenset)):
        return kind, sorted(repr(fingerprint(item)) for item in value)
    if isinstance(value, (list, tuple)):
        return kind, [fingerprint(item) for item in value]
    if hasattr(kind, "__dataclass_fields__"):
        return kind, [fingerprint(getattr(value, name)) for name in kind.__dataclass_fields__]
    if kind is float:
        return kind, "nan" if math.isnan(value) else struct.pack("d", value)
    if kind is complex:
        return kind, fingerprint(value.real), fingerprint(value.imag)
    if kind is slice:
        return kind, [fingerprint(part) for part in (value.start, value.stop, value.step)]
    if kind is range:
        return kind, value.start, value.stop, value.step
    return kind, bytes(value) if kind is bytearray else value


def same(value: Any) -> Any:
    """Return the value after a round trip through its envelope; assert that nothing has changed."""
    back = decode_state(encode_state(value))
    assert fingerprint(back) == fingerprint(value)
    return back
