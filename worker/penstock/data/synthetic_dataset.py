"""Dataset of random samples, to try out a model, or to measure everything except the reading of data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.utils.data

from penstock.data.arguments import at_least_one, whole
from penstock.data.sample_numbers import many_numbers, one_number
from penstock.proto.errors import InvalidArgumentError
from penstock.proto.state.generators import derive_seed

HIGHEST = 128
"""Exclusive upper bound of random integers in samples, which therefore fit any dtype."""


class SyntheticDataset(torch.utils.data.Dataset[Any]):
    """Map-style dataset of random samples. Sample i is the same each time, in every process, as far as the functions of
    `sample_spec` depend on nothing but their arguments.

    For example::

        dataset = SyntheticDataset({"x": torch.empty(3, 224, 224), "label": torch.tensor(0)}, 10_000)
    """

    def __init__(self, sample_spec: Any, num_samples: int, *, seed: int = 0) -> None:
        """
        Args:
            sample_spec: form of a sample: dicts, lists and tuples of tensors and functions. Only a tensor's shape and
                dtype matter (`torch.empty(...)`): floats are standard normal, integers 0 to 127, bools random. A
                function is called as `function(index, generator)`, with a numpy Generator seeded for this sample, and
                returns the value.

        Raises InvalidArgumentError for a spec with other values, or for num_samples below 1.
        """
        self._spec, self._length = sample_spec, at_least_one("num_samples", num_samples)
        self._seed = whole("seed", seed)
        _check(sample_spec, "sample_spec")

    @property
    def fingerprint(self) -> str:
        """Text that identifies this dataset in the states of a MapLoader."""
        return f"synthetic, seed {self._seed}: {_form(self._spec)}"

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        """Return a sample; for a slice, a list or an array of numbers, the list of these samples. Raises IndexError."""
        several = many_numbers(index, self._length, "SyntheticDataset")
        if several is not None:
            return [self[number] for number in several]
        at = one_number(index, self._length, "SyntheticDataset")
        return _made(self._spec, at, np.random.default_rng(derive_seed(self._seed, "synthetic", at)))


def _check(spec: Any, path: str) -> None:
    if isinstance(spec, Mapping):
        for key, value in spec.items():
            _check(value, f"{path}[{key!r}]")
    elif isinstance(spec, list | tuple):
        for number, value in enumerate(spec):
            _check(value, f"{path}[{number}]")
    elif not isinstance(spec, torch.Tensor) and not callable(spec):
        raise InvalidArgumentError(
            f"{path} must be a tensor or a function of (index, generator), got {type(spec).__name__}"
        )


def _form(spec: Any) -> str:
    if isinstance(spec, Mapping):
        return "{" + ", ".join(f"{key!r}: {_form(value)}" for key, value in spec.items()) + "}"
    if isinstance(spec, list | tuple):
        return "[" + ", ".join(_form(value) for value in spec) + "]"
    if isinstance(spec, torch.Tensor):
        return f"{spec.dtype} {tuple(spec.shape)}"
    return str(getattr(spec, "__qualname__", type(spec).__qualname__))


def _made(spec: Any, index: int, generator: np.random.Generator) -> Any:
    if isinstance(spec, Mapping):
        return {key: _made(value, index, generator) for key, value in spec.items()}
    if isinstance(spec, tuple) and hasattr(spec, "_fields"):
        return type(spec)(*(_made(value, index, generator) for value in spec))
    if isinstance(spec, list | tuple):
        return type(spec)(_made(value, index, generator) for value in spec)
    if not isinstance(spec, torch.Tensor):
        return spec(index, generator)
    shape = tuple(spec.shape)
    if spec.dtype.is_floating_point or spec.dtype.is_complex:
        return torch.as_tensor(generator.standard_normal(shape, np.float32)).to(spec.dtype)
    return torch.as_tensor(generator.integers(0, 2 if spec.dtype == torch.bool else HIGHEST, shape)).to(spec.dtype)
