"""Clips of videos and sounds: frames and samples at exact positions, decoded by torchcodec from the bytes of a column.

torchcodec rounds a sound's times, and resamples a range without the samples before it. So a sound is decoded from its
beginning (as torchcodec does for any range), and the clip cut out: equal to the whole sound's positions, to the bit.
"""

from __future__ import annotations

import importlib
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, NoReturn

from penstock.data.arguments import at_least_one
from penstock.data.formats.raw_files import CORRECT
from penstock.data.formats.shards import BlockReader, ShardReader, rows_of
from penstock.proto.errors import DatasetError, InvalidArgumentError, SampleCorruptError

if TYPE_CHECKING:  # processes that only convert datasets have no use for torch
    import torch

MARGIN_S = 0.5
"""Seconds of sound decoded after a clip's end: resampling needs them, and if the sound begins after time 0, sample n
comes later than n / sample_rate."""

Positions = Sequence[int] | str | Callable[[Mapping[str, Any], int], Sequence[int]]
"""Of a video: frame numbers. Of a sound: the first sample and the one after the last. Or the name of the sample's
column with these numbers; or a function (sample, number of frames or samples in the file) that returns them."""


class InvalidPositions(Exception):
    """Error: positions are not numbers, their column is missing, or the file does not have these frames or samples."""


@dataclass(frozen=True)
class VideoClip:
    """Frames of a video, for the argument `clips` of StreamingDataset. The column's value becomes a tensor of uint8
    with shape (frames, 3, height, width), in RGB.

    Example::

        from torchcodec.transforms import CenterCrop, Resize

        clip = VideoClip(range(0, 64, 4), transforms=[Resize((256, 340)), CenterCrop((224, 224))])
        dataset = StreamingDataset("s3://bucket/videos", "/data/cache", clips={"mp4": clip})
    """

    frames: Positions
    """Numbers of the frames, from 0 in the order of display; in any order, also repeated. Or the name of a column with
    these numbers, or a function (sample, number of frames in the video) that returns them."""
    transforms: Sequence[Any] = ()
    """torchcodec's transforms (Resize, CenterCrop, RandomCrop), applied in this order while frames are decoded."""

    @property
    def draws(self) -> bool:
        """True if decoding may draw random numbers, as RandomCrop does."""
        return callable(self.frames) or any("Random" in type(each).__name__ for each in self.transforms)

    def open(self, data: bytes) -> _Video:
        """Open the bytes of a video's file. Raises any exception for a damaged one."""
        return _Video(_decoders().VideoDecoder(data, device="cpu", transforms=list(self.transforms) or None))


@dataclass(frozen=True)
class AudioClip:
    """Samples of a sound, or of the sound of a video, for the argument `clips` of StreamingDataset. The column's value
    becomes a tensor of float32 with shape (channels, samples) and values from -1 to 1.

    Example::

        clip = AudioClip((0, 16_000), sample_rate=16_000, channels=1)
        dataset = StreamingDataset("s3://bucket/speech", "/data/cache", clips={"flac": clip})
    """

    samples: Positions
    """Range of samples: (first sample, sample after the last one), from 0, at `sample_rate`. Or the name of a column
    with these numbers. Or a function (sample of the dataset, number of samples in the sound) that returns them; all of
    the sound is then decoded, to count its samples."""
    sample_rate: int | None = None
    """Samples per second of the clip; None: as many as the file has."""
    channels: int | None = None
    """Number of channels of the clip; None: as many as the file has."""

    def __post_init__(self) -> None:
        for name in ("sample_rate", "channels"):
            if getattr(self, name) is not None:
                at_least_one(name, getattr(self, name))

    @property
    def draws(self) -> bool:
        """True if decoding may draw random numbers."""
        return callable(self.samples)

    def open(self, data: bytes) -> _Sound:
        """Open the bytes of a sound's or video's file. Raises any exception for a damaged one."""
        return _Sound(data, {"sample_rate": self.sample_rate, "num_channels": self.channels})


Clip = VideoClip | AudioClip


class _Video:
    def __init__(self, decoder: Any) -> None:
        self._decoder = decoder

    def __len__(self) -> int:
        return len(self._decoder)

    def read(self, positions: list[int]) -> torch.Tensor:
        """Decode these frames. Raises InvalidPositions, or any exception for a damaged file."""
        wrong = next((number for number in positions if not 0 <= number < len(self)), None)
        if wrong is not None:
            raise InvalidPositions(f"a frame's number must be at least 0 and below {len(self)}, got {wrong}")
        frames: torch.Tensor = self._decoder.get_frames_at(positions).data
        return frames


class _Sound:
    def __init__(self, data: bytes, settings: Mapping[str, int | None]) -> None:
        self._data, self._settings = data, settings
        self._decoder()  # raises an error for a damaged head

    def _decoder(self) -> Any:
        return _decoders().AudioDecoder(self._data, **self._settings)

    def _whole(self) -> torch.Tensor:
        samples: torch.Tensor = self._decoder().get_all_samples().data
        return samples

    def __len__(self) -> int:
        return int(self._whole().shape[1])

    def read(self, positions: list[int]) -> torch.Tensor:
        """Decode the samples from the first to before the second number. Raises as `_Video.read`."""
        if len(positions) != 2 or not 0 <= positions[0] < positions[1]:
            raise InvalidPositions(
                f"positions of samples must be two numbers >= 0, the first below the second, got {positions}"
            )
        begin, end = positions
        decoder = self._decoder()
        stop_s = end / (self._settings["sample_rate"] or decoder.metadata.sample_rate) + MARGIN_S
        samples = decoder.get_samples_played_in_range(0.0, stop_s).data
        if samples.shape[1] < end:
            samples = self._whole()
        if samples.shape[1] < end:
            raise InvalidPositions(f"the sound must have at least {end} samples, got {samples.shape[1]}")
        clip: torch.Tensor = samples[:, begin:end].clone()  # without the samples around it
        return clip


def _chosen(clip: Clip, sample: Mapping[str, Any], opened: _Video | _Sound) -> list[int]:
    """Raises InvalidPositions, or what a user's function raises."""
    positions = clip.frames if isinstance(clip, VideoClip) else clip.samples
    if callable(positions):
        found = positions(sample, len(opened))
    elif not isinstance(positions, str):
        found = positions
    elif positions in sample:
        found = sample[positions]
    else:
        raise InvalidPositions(
            f"the column with the positions, {positions!r}, must be one of {', '.join(map(str, sample))}"
        )
    try:
        numbers = [operator.index(number) for number in found]
    except TypeError:
        numbers = []
    if not numbers:
        raise InvalidPositions(f"the positions must be a list of at least one whole number, got {found!r:.100}")
    return numbers


def check_clips(clips: Mapping[str, Clip] | None) -> dict[str, Clip]:
    """Check StreamingDataset's `clips`. Raises InvalidArgumentError, and DatasetError without a usable torchcodec."""
    for name, clip in (clips or {}).items():
        if not isinstance(name, str) or not isinstance(clip, VideoClip | AudioClip):
            raise InvalidArgumentError(
                f"clips must be a dict from columns to VideoClip or AudioClip, got {clip!r:.100} for {name!r}"
            )
    if clips:
        _decoders()
    return dict(clips or {})


class ClipReader:
    """Open shard that decodes clips in the samples of another reader."""

    def __init__(self, reader: ShardReader, clips: Mapping[str, Clip], first: int = 0) -> None:
        """`first`: number in the shard of the reader's first sample, for errors."""
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
            positions = _chosen(clip, sample, opened)
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
            raise DatasetError(f"{where} must be one of the sample's columns, got {', '.join(map(str, sample))}")
        value = sample[column]
        if isinstance(value, Mapping) and isinstance(value.get("bytes"), bytes):  # as Hugging Face's datasets store it
            return bytes(value["bytes"])
        if not isinstance(value, bytes):
            raise DatasetError(f"{where} must be the bytes of a video or sound, got {type(value).__name__}")
        return value


def _invalid(where: str, error: InvalidPositions) -> DatasetError:
    return DatasetError(f"{where}: {error}. Correct the positions, or leave the sample out")


def _damaged(where: str, error: Exception) -> NoReturn:
    what = str(error).strip().splitlines()
    raise SampleCorruptError(
        f"{where}: the stored bytes must be a video or sound that FFmpeg decodes: {type(error).__name__}: "
        f"{what[0] if what else ''}. {CORRECT}"
    ) from error


@cache
def _decoders() -> Any:
    try:
        library = importlib.import_module("torchcodec")
        found = importlib.import_module("torchcodec.decoders")
        has_ffmpeg = library.ffmpeg_major_version is not None
    except ImportError as error:
        raise DatasetError(
            "clips of videos and sounds need the package torchcodec and FFmpeg's libraries. Run pip install "
            "'penstock[media]', and install FFmpeg, for example by apt-get install ffmpeg"
        ) from error
    except (RuntimeError, OSError) as error:
        raise _unloadable() from error
    if not has_ffmpeg:
        raise _unloadable()
    return found


def _unloadable() -> DatasetError:
    return DatasetError(
        f"torchcodec cannot be loaded with torch {version('torch')}. Install FFmpeg and a release that fits "
        "(docs/formats.md#videos-and-sounds)"
    )
