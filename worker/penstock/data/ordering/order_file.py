"""Order of one epoch, read from a file: the rest of an epoch that another library began.

`penstock import-state` writes such a file. The file holds the numbers of all samples of that epoch: the samples that
the other library delivered, then the remaining ones in that library's order. So a state in this epoch is a position
like any other, and fits any topology. All other epochs have the loader's own order.

    magic                                      8 bytes
    format, bytes of a sample's number         u32 each
    epoch, number of samples                   i64 each
    digest                                     u64
    zeros                                      up to byte 64
    numbers of the samples                     u32 or u64 each

All values are little-endian. Workers map the file into memory, so all workers of a host share its pages. They check its
digest when they open it.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from penstock.data.ordering.epoch_plan import SampleOrder
from penstock.data.ordering.permutation import Ints
from penstock.proto.errors import DatasetError, InvalidArgumentError
from penstock.runtime.files.atomic_files import write_whole

__all__ = ["FiledOrder", "OrderFile", "write_order"]

MAGIC, FORMAT = b"PENORDER", 1
_HEADER = struct.Struct("<8sIIqqQ24x")
_EPOCH = struct.Struct("<qq")
CHUNK = 1 << 24
"""Number of sample numbers that are checked in one step, which limits the memory of the check."""


def write_order(path: Path, epoch: int, ids: Ints) -> OrderFile:
    """Write the order of an epoch to the file `path`, atomically, and return it. `ids`: numbers of the samples in this
    order. Raises InvalidArgumentError unless `ids` has each number from 0 to len(ids) - 1 once."""
    if len(ids) == 0 or not np.array_equal(np.bincount(ids, minlength=len(ids)), np.ones(len(ids), np.int64)):
        raise InvalidArgumentError(
            f"an order must have each of the samples 0 to {len(ids) - 1} once, got repeated or other numbers. Use "
            "the dataset and the settings of the saved run"
        )
    kind = np.dtype("<u4" if len(ids) <= 1 << 32 else "<u8")
    numbers = ids.astype(kind)
    digest = _digest(epoch, numbers)
    header = _HEADER.pack(MAGIC, FORMAT, kind.itemsize, epoch, len(ids), digest)
    write_whole(path, header + numbers.tobytes())
    return OrderFile(path, epoch, len(ids), f"{digest:016x}", numbers)


@dataclass(frozen=True)
class OrderFile:
    """Order of one epoch, as a file stores it."""

    path: Path
    epoch: int
    samples: int
    """Number of samples in the epoch."""
    digest: str
    """Digest of the epoch's number and of the order, 16 hexadecimal digits."""
    numbers: npt.NDArray[Any]
    """Numbers of the epoch's samples, in the order of the epoch; shape (samples,)."""

    @property
    def described(self) -> dict[str, Any]:
        """Epoch and digest, which identify this order in a loader's state."""
        return {"epoch": self.epoch, "digest": self.digest}

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderFile.read, (self.path,)  # a pickled copy maps the file again in the other process

    @staticmethod
    def read(given: str | os.PathLike[str]) -> OrderFile:
        """Return the order in a file. Raises DatasetError if the file is missing, damaged, or of another version of the
        format."""
        path = Path(given)
        try:
            with path.open("rb") as file:
                header = file.read(_HEADER.size)
                size = os.fstat(file.fileno()).st_size
        except OSError as error:
            raise DatasetError(
                f"order_file {path} cannot be read: {error.strerror}. Copy the file to the same path on each worker"
            ) from error
        if len(header) < _HEADER.size or not header.startswith(MAGIC):
            raise DatasetError(
                f"order_file {path} must be a file that `penstock import-state` wrote, got one that begins with "
                f"{header[:8]!r}. Pass the file that it wrote with --order-file"
            )
        _, version, width, epoch, samples, digest = _HEADER.unpack(header)
        if version != FORMAT:
            raise DatasetError(
                f"the format of order_file {path} must be {FORMAT}, got {version}: another version of Penstock wrote "
                "it. Run `penstock import-state` of this version"
            )
        if width not in (4, 8) or samples < 1 or epoch < 0 or size != _HEADER.size + samples * width:
            raise _damaged(
                path, f"the file must have {samples} samples of epoch {epoch} with {width} bytes each, got {size} bytes"
            )
        numbers = np.memmap(path, f"<u{width}", "r", _HEADER.size, (samples,))
        if _digest(epoch, numbers) != digest:
            raise _damaged(path, "the digest does not match the content")
        if any(int(part.max()) >= samples for part in _parts(numbers)):
            raise _damaged(path, f"it has sample numbers above {samples - 1}")
        return OrderFile(path, epoch, samples, f"{digest:016x}", numbers)


class FiledOrder:
    """Order of all epochs of a loader. One epoch has the order in a file, the others have the loader's own order."""

    def __init__(self, own: SampleOrder, file: OrderFile, name: str, count: int) -> None:
        """
        Args:
            own: order of all other epochs.
            file: order of the one epoch.
            name: name of the data, for errors.
            count: number of samples in the data.

        Raises DatasetError unless the file's epoch and an epoch of `own` have as many samples as the data.
        """
        if not file.samples == len(own) == count:
            raise DatasetError(
                f"order_file {file.path} must have as many samples as {name} ({count}) and as an epoch of the loader "
                f"({len(own)}), got {file.samples}. Pass the dataset whose position was imported, with epochs that "
                "take each sample once"
            )
        self._own, self._file = own, file

    def __len__(self) -> int:
        """Return the number of samples in an epoch."""
        return len(self._own)

    def covers(self, epoch: int) -> bool:
        """Return True if the file has the order of this epoch."""
        return epoch == self._file.epoch

    def ids(self, epoch: int, positions: npt.ArrayLike) -> Ints:
        """Return the numbers of the samples at these positions of an epoch. `positions`: numbers in [0, len(self))."""
        if not self.covers(epoch):
            return self._own.ids(epoch, positions)
        return np.asarray(self._file.numbers[np.asarray(positions, np.int64)]).astype(np.int64)


def _parts(numbers: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
    return [numbers[begin : begin + CHUNK] for begin in range(0, len(numbers), CHUNK)]


def _digest(epoch: int, numbers: npt.NDArray[Any]) -> int:
    digest = xxhash.xxh3_64(_EPOCH.pack(epoch, len(numbers)))
    for part in _parts(numbers):
        digest.update(np.ascontiguousarray(part).view(np.uint8).data)
    return digest.intdigest()


def _damaged(path: Path, how: str) -> DatasetError:
    return DatasetError(f"order_file {path} is damaged: {how}. Copy it again, or run `penstock import-state` again")
