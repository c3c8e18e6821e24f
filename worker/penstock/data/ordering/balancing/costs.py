"""Costs of samples, known without reading the samples. They come from an array, a column of the dataset, or a function
of sample numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from penstock.data.ordering.permutation import Ints
from penstock.proto.errors import DatasetError, InvalidArgumentError

__all__ = ["Cost", "Costs"]

Cost = Any | str | Callable[[Ints], npt.ArrayLike]
"""Source of the samples' costs: an array, the name of a column, or a function from sample numbers to costs."""
CHUNK = 1 << 20
"""Number of costs that are checked in one step, which limits the memory of the check."""
PROBES = 1024
"""Number of samples whose costs identify a cost function in a loader's state, because a function has no digest."""


class Costs:
    """Costs of a dataset's samples, checked to be finite and at least 0."""

    def __init__(self, cost: Cost, dataset: Any, length: int) -> None:
        """
        Args:
            cost: see Balance.
            dataset: dataset whose column `cost` may name.
            length: number of samples in the dataset.

        Raises InvalidArgumentError for costs that are missing, not numbers, or not one for each sample; DatasetError
        for a cost that is NaN, infinite or negative.
        """
        self._function = cost if callable(cost) else None
        self._array = None if self._function else _array(_column(cost, dataset) if isinstance(cost, str) else cost)
        digest = xxhash.xxh3_64()
        if self._array is None:
            probes = np.unique(np.linspace(0, length - 1, min(length, PROBES)).astype(np.int64))
            digest.update(self.of(probes).tobytes())
        else:
            if len(self._array) != length:
                raise InvalidArgumentError(
                    f"balance: cost must have one number for each of the dataset's {length} samples, got "
                    f"{len(self._array)}. Pass the costs of this dataset"
                )
            for begin in range(0, length, CHUNK):
                digest.update(self.of(np.arange(begin, min(begin + CHUNK, length))).tobytes())
        self.digest = digest.hexdigest()
        """Digest of all costs. If `cost` is a function, it is the digest of the costs of up to PROBES samples. With
        `over_steps` above 1 it is part of a loader's state, so that a resume with other costs is refused; otherwise the
        costs do not decide which step has which rows."""

    def of(self, ids: Ints) -> npt.NDArray[np.float64]:
        """Return the costs of these samples. Raises DatasetError for a cost that is NaN, infinite or negative,
        InvalidArgumentError if the function does not return a number for each sample."""
        if self._array is not None:
            costs = self._array[ids]
        else:
            assert self._function is not None
            costs = _array(self._function(ids), "the cost function must return")
            if len(costs) != len(ids):
                raise InvalidArgumentError(
                    f"balance: the cost function must return one number for each of {len(ids)} samples, got "
                    f"{len(costs)}. Correct the function"
                )
        found: npt.NDArray[np.float64] = np.asarray(costs, np.float64)
        wrong = np.flatnonzero(~((found >= 0) & (found < np.inf)))
        if len(wrong):
            raise DatasetError(
                f"balance: the cost of a sample must be finite and at least 0, got {found[wrong[0]]} for sample "
                f"{int(ids[wrong[0]])}. Correct the costs, or give such samples a cost of 0"
            )
        return found


def _array(given: Any, must: str = "cost must be a column's name, a function, or") -> npt.NDArray[Any]:
    """Return given costs as an array. Raise InvalidArgumentError for anything but numbers in one dimension. `must`:
    beginning of the error's text."""
    if isinstance(given, torch.Tensor):
        given = given.detach().to("cpu", torch.float64).numpy()
    array = np.asarray(given)
    if array.ndim != 1 or array.dtype.kind not in "iufb":
        raise InvalidArgumentError(
            f"balance: {must} a one-dimensional array of numbers, got an array with {array.ndim} dimensions of "
            f"{array.dtype}. Correct the costs"
        )
    return array


def _column(name: str, dataset: Any) -> Any:
    """Return a column of a dataset that has a method `column(name)`, or of a Hugging Face dataset."""
    kind = type(dataset).__qualname__
    if callable(column := getattr(dataset, "column", None)):
        return column(name)
    known = getattr(dataset, "column_names", None)
    if isinstance(known, list) and hasattr(dataset, "with_format"):
        if name not in known:
            raise InvalidArgumentError(
                f"balance: cost must be a column of the dataset ({', '.join(known)}), got {name!r}. Name one of these "
                "columns"
            )
        return dataset.select_columns([name]).with_format("numpy")[:][name]
    raise InvalidArgumentError(
        f"balance: cost={name!r} needs a dataset with columns, got {kind}. Pass an array with the cost of each sample, "
        "or a function from sample numbers to costs"
    )
