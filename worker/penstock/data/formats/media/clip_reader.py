"""Reader of a shard whose columns of videos and sounds are decoded to clips."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from penstock.data.formats.media.clips import Clip, InvalidPositions, chosen
from penstock.data.formats.shards import BlockReader, ShardReader, rows_of
from penstock.proto.errors import DatasetError, ShardCorruptError

__all__ = ["ClipReader"]


class ClipReader:
    """Open shard that decodes clips of videos and sounds, after another reader has read the samples from the file."""

    def __init__(self, reader: ShardReader, clips: Mapping[str, Clip], first: int = 0) -> None:
        """
        Args:
            reader: reader whose samples have the files of videos and sounds as bytes.
            clips: settings of the clips to decode, by column.
            first: number in the shard of the reader's first sample, for errors; not 0 if `reader` reads a part.
        """
        self.name = reader.name
        self._reader, self._clips, self._first = reader, clips, first
        if isinstance(reader, BlockReader):
            self.load, self.forget = reader.load, reader.forget

    def __len__(self) -> int:
        return len(self._reader)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._decoded(index, self._reader[index])

    def get_many(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        return [self._decoded(row, sample) for row, sample in zip(rows, rows_of(self._reader, rows), strict=True)]

    def close(self) -> None:
        self._reader.close()

    def _decoded(self, index: int, sample: dict[str, Any]) -> dict[str, Any]:
        decoded = {}
        for column, clip in self._clips.items():
            where = f"{self.name}: sample {self._first + index}, column {column!r}"
            data = self._file(sample, column, where)
            try:
                opened = clip.open(data)
            except DatasetError:  # a package is missing
                raise
            except Exception as error:
                _damaged(where, error)
            decoded[column] = self._clip(clip, opened, sample, where)
        return sample | decoded

    def _clip(self, clip: Clip, opened: Any, sample: dict[str, Any], where: str) -> Any:
        try:
            positions = chosen(clip.positions, sample, opened)
        except InvalidPositions as error:
            raise _invalid(where, error) from error
        except Exception as error:
            error.add_note(f"raised by the function that chooses the positions of {where}")
            raise
        try:
            return opened.read(positions)
        except InvalidPositions as error:
            raise _invalid(where, error) from error
        except Exception as error:
            _damaged(where, error)

    def _file(self, sample: Mapping[str, Any], column: str, where: str) -> bytes:
        if column not in sample:
            raise DatasetError(
                f"{where} must be one of the sample's columns, got {', '.join(map(str, sample))}. Correct the argument "
                "`clips`"
            )
        value = sample[column]
        if isinstance(value, Mapping) and isinstance(value.get("bytes"), bytes):  # as Hugging Face's datasets store it
            return bytes(value["bytes"])
        if not isinstance(value, bytes):
            raise DatasetError(
                f"{where} must be the bytes of a video or sound, got {type(value).__name__}. Correct the argument "
                "`clips`"
            )
        return value


def _invalid(where: str, error: InvalidPositions) -> DatasetError:
    return DatasetError(f"{where}: {error}. Correct the positions, or leave the sample out")


def _damaged(where: str, error: Exception) -> NoReturn:
    what = str(error).strip().splitlines()
    raise ShardCorruptError(
        f"{where}: the stored bytes must be a video or sound that FFmpeg decodes: {type(error).__name__}: "
        f"{what[0] if what else ''}. Write the dataset again"
    ) from error
