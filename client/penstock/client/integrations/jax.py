"""JAX: batches as NumPy arrays, which `jax.jit` and `jax.device_put` take, and states as JSON, for Orbax.

An array is a view of the memory that the workers filled and keeps it alive: the ring entry is not filled again while an
array, a slice or a jax.Array in the same memory (`jax.device_put` on CPUs) exists. Neither JAX nor Orbax is imported,
so this suits any library that takes NumPy arrays."""

from __future__ import annotations

import base64
import importlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any, cast

import numpy as np
import torch

from penstock.proto.batch.classes import class_fields
from penstock.proto.errors import InvalidArgumentError, StateCorruptError, UnsupportedLeafError
from penstock.proto.state.codec import decode_state, encode_state

__all__ = ["as_numpy", "numpy_batches", "state_from_json", "state_to_json"]

_KEY = "penstock_state"


def numpy_batches(batches: Iterable[Any]) -> Iterator[Any]:
    """Return an iterator over the same batches with NumPy arrays in place of torch tensors.

    Example::

        executor = DataExecutor(loader, num_steps=1000, checkpoint_steps=100)
        for batch in numpy_batches(executor):
            parameters, loss = train_step(parameters, batch)     # a function compiled by jax.jit

    It takes a batch only when the loop requests one, so executor and loader have the loop's position. `batches`: a
    DataExecutor, a DataLoader, or another iterable. Iterating raises the stream's errors, and those of as_numpy()."""
    return map(as_numpy, batches)


def as_numpy(batch: Any) -> Any:
    """Return a batch with each torch tensor replaced by a writable NumPy array in the same memory.

    An array has the shape of its tensor and the dtype of the same name; bfloat16 and float8 come from the package
    ml_dtypes, which JAX requires. Dicts, lists, tuples, namedtuples and dataclasses are copied; all other values stay
    as they are.

    Raises:
        UnsupportedLeafError: NumPy has no such dtype (complex32, float4_e2m1fn_x2), or ml_dtypes is not installed.
        InvalidArgumentError: a tensor is not on the CPU."""
    cls = type(batch)
    if isinstance(batch, torch.Tensor):
        return _array(batch)
    if cls is dict or cls is OrderedDict:
        return cls((key, as_numpy(value)) for key, value in batch.items())
    if cls is list or cls is tuple:
        return cls(map(as_numpy, batch))
    record = None if isinstance(batch, (np.ndarray, np.generic)) else class_fields(cls)
    if record is None:
        return batch
    kind, fields = record
    if kind == "nt":
        return tuple.__new__(cls, map(as_numpy, batch))
    # __init__ and __post_init__ ran on the worker and are not run again, as in penstock.proto.batch.assemble.
    instance = object.__new__(cls)
    for name in fields:
        object.__setattr__(instance, name, as_numpy(getattr(batch, name)))
    return instance


def _array(tensor: torch.Tensor) -> np.ndarray[Any, np.dtype[Any]]:
    if not tensor.is_cpu:
        raise InvalidArgumentError(
            f"as_numpy: tensors must be on the CPU, got one on {tensor.device}: leave device= out of Appliance()"
        )
    extended = _extended(tensor.dtype)
    if extended is None:
        return tensor.numpy()
    carrier, dtype = extended
    return tensor.view(carrier).numpy().view(dtype)


@cache
def _extended(dtype: torch.dtype) -> tuple[torch.dtype, np.dtype[Any]] | None:
    """Return, for a dtype that NumPy lacks, such as bfloat16, the integers of its size to view the tensor as, and
    ml_dtypes' dtype to view the array as; else None. Cached: an array takes 2 us, a caught error of torch 30 us
    more."""
    try:
        torch.empty(0, dtype=torch.uint8, device="cpu").view(dtype).numpy()  # torch warns of an empty complex32
        return None
    except TypeError:
        pass
    name = str(dtype).removeprefix("torch.")
    try:
        extended = getattr(importlib.import_module("ml_dtypes"), name, None)
    except ImportError:
        raise UnsupportedLeafError(f"as_numpy: a tensor of {dtype} needs a package: pip install ml_dtypes") from None
    carrier = {1: torch.int8, 2: torch.int16}.get(dtype.itemsize)
    if extended is None or carrier is None:
        raise UnsupportedLeafError(
            f"as_numpy: tensors must have a dtype that NumPy or ml_dtypes has, got {dtype}: return another one"
        )
    return carrier, np.dtype(extended)


def state_to_json(state: dict[str, Any]) -> dict[str, str]:
    """Return the result of a loader's state_dict() as a value for JSON, such as `orbax.checkpoint.args.JsonSave`.

    Example::

        args = ocp.args.Composite(
            parameters=ocp.args.StandardSave(parameters), loader=ocp.args.JsonSave(state_to_json(loader.state_dict()))
        )
        manager.save(executor.step, args=args)
        ...
        loader.load_state_dict(state_from_json(restored.loader))

    Raises UnsupportedStateError for a value that a state cannot hold.
    """
    return {_KEY: base64.b64encode(encode_state(state)).decode()}


def state_from_json(saved: dict[str, Any]) -> dict[str, Any]:
    """Return the loader's state from a value that state_to_json() returned.

    Raises StateCorruptError for any other or damaged value, StateVersionError for a state of an unsupported version.
    """
    text = saved.get(_KEY) if isinstance(saved, dict) else None
    if not isinstance(text, str):
        raise StateCorruptError(f"state_from_json: saved must be a result of state_to_json(), got {repr(saved)[:80]}")
    try:
        data = base64.b64decode(text, validate=True)
    except ValueError as error:
        raise StateCorruptError(f"state_from_json: saved must be an unchanged result: {error}") from None
    return cast(dict[str, Any], decode_state(data))
