"""Clips of videos and sounds equal the same positions of the whole file, to the bit, wherever they are decoded."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from archives import archive

from penstock.data import (
    AudioClip,
    MDSWriter,
    StreamingDataset,
    StreamingLoader,
    VideoClip,
    index_folder,
    index_parquet,
)
from penstock.data.formats.media import clips
from penstock.data.formats.shards import BlockReader
from penstock.proto.errors import DatasetError, InvalidArgumentError, ShardCorruptError

torchcodec: Any = None
"""Imported when the tests run, and not in each process that collects them: it brings torch's compiler."""


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    global torchcodec
    try:
        for name in ("decoders", "encoders", "transforms"):
            importlib.import_module(f"torchcodec.{name}")
        torchcodec = importlib.import_module("torchcodec")
    except (ImportError, RuntimeError, OSError):
        pytest.skip("torchcodec or FFmpeg is not installed")


FRAMES, SAMPLES, RATE = 30, 22_050, 22_050


@cache
def video(number: int = 0) -> bytes:
    """Return a video of 30 frames of 64 x 48 pixels, in which most frames depend on those before."""
    draw = torch.Generator().manual_seed(number)
    noise = torch.randint(0, 256, (1, 3, 6, 8 + FRAMES), generator=draw).float()
    wide = torch.nn.functional.interpolate(noise, size=(48, 8 * (8 + FRAMES)), mode="bilinear")[0].to(torch.uint8)
    frames = torch.stack([wide[:, :, 8 * at : 8 * at + 64] for at in range(FRAMES)])
    return encoded(torchcodec.encoders.VideoEncoder(frames, frame_rate=25).to_tensor(format="mp4", codec="mpeg4"))


@cache
def sound(form: str) -> bytes:
    """Return a second of noise in two channels."""
    samples = torch.randn(2, SAMPLES, generator=torch.Generator().manual_seed(1)) / 8
    return encoded(torchcodec.encoders.AudioEncoder(samples, sample_rate=RATE).to_tensor(format=form))


def encoded(data: Any) -> bytes:
    return bytes(data.numpy().tobytes())


def dataset(
    folder: Path, samples: list[dict[str, Any]], columns: Mapping[str, str], **options: Any
) -> StreamingDataset:
    if not folder.exists():
        with MDSWriter(folder, dict(columns)) as shards:
            for sample in samples:
                shards.write(sample)
    return StreamingDataset(local=folder, **options)


def read(tmp_path: Path, column: str, clip: Any, **sample: Any) -> torch.Tensor:
    columns = {name: "bytes" if name == column else "json" for name in sample}
    found: torch.Tensor = dataset(tmp_path / "data", [sample], columns, clips={column: clip})[0][column]
    return found


def last_two(sample: Mapping[str, Any], count: int) -> list[int]:
    return [count - 1, count - 2]


@pytest.mark.parametrize("frames", [[0], [29, 3, 3, 17], range(0, 30, 4), "at", last_two], ids=range(5))
def test_frames_are_those_of_the_whole_video(tmp_path: Path, frames: Any) -> None:
    expected = [5, 29] if frames == "at" else [29, 28] if frames is last_two else list(frames)
    found = read(tmp_path, "video", VideoClip(frames), video=video(), at=[5, 29])
    assert (found.dtype, found.shape) == (torch.uint8, (len(expected), 3, 48, 64))
    assert torch.equal(found, torchcodec.decoders.VideoDecoder(video())[:][expected])


def test_frames_are_scaled_and_cropped(tmp_path: Path) -> None:
    transforms = [torchcodec.transforms.Resize((24, 32)), torchcodec.transforms.CenterCrop((16, 20))]
    found = read(tmp_path, "video", VideoClip([20, 4], transforms), video=video())
    assert found.shape == (2, 3, 16, 20)
    assert torch.equal(found, torchcodec.decoders.VideoDecoder(video(), transforms=transforms)[:][[20, 4]])


@pytest.mark.parametrize(
    ("form", "settings"),
    [("wav", {}), ("flac", {}), ("mp3", {"sample_rate": 16_000, "channels": 1}), ("ogg", {})],
    ids=["wav", "flac", "mp3, resampled", "ogg"],
)
def test_samples_are_those_of_the_whole_sound(tmp_path: Path, form: str, settings: dict[str, int]) -> None:
    whole = torchcodec.decoders.AudioDecoder(
        sound(form), sample_rate=settings.get("sample_rate"), num_channels=settings.get("channels")
    ).get_all_samples()
    count = whole.data.shape[1]
    for begin, end in [(0, 1), (1, 400), (6_000, 9_001), (count - 700, count), (0, count)]:
        clip = AudioClip("at", **settings)
        found = read(tmp_path / f"{begin}-{end}", "sound", clip, sound=sound(form), at=[begin, end])
        assert (found.dtype, found.shape) == (torch.float32, (settings.get("channels", 2), end - begin))
        assert torch.equal(found, whole.data[:, begin:end])


def rows(loader: Any) -> list[tuple[int, bytes]]:
    return [
        (number, frames.contiguous().numpy().tobytes())
        for batch in loader
        for number, frames in zip(batch["number"].tolist(), batch["video"], strict=True)
    ]


def test_threads_decode_the_same(tmp_path: Path) -> None:
    samples = [{"number": number, "video": video(number % 3)} for number in range(8)]
    data = dataset(tmp_path / "data", samples, {"number": "int", "video": "bytes"}, clips={"video": VideoClip([7, 2])})
    alone = rows(StreamingLoader(data, batch_size=2))
    assert rows(StreamingLoader(data, batch_size=2, fetch_threads=2)) == alone


def test_threads_and_random_clips_are_refused(tmp_path: Path) -> None:
    columns = {"number": "int", "video": "bytes"}
    for clip in (VideoClip(last_two), VideoClip([1], [torchcodec.transforms.RandomCrop((8, 8))])):
        data = dataset(tmp_path / "data", [{"number": 0, "video": video()}], columns, clips={"video": clip})
        with pytest.raises(InvalidArgumentError, match="fetch_threads must be 0 with random clips"):
            StreamingLoader(data, batch_size=1, fetch_threads=2)
        assert len(rows(StreamingLoader(data, batch_size=1, fetch_threads=2, reseed=False))) == 1
    smaller = VideoClip([1], [torchcodec.transforms.Resize((8, 8))])
    scaled = dataset(tmp_path / "data", [], columns, clips={"video": smaller})
    assert len(rows(StreamingLoader(scaled, batch_size=1, fetch_threads=2))) == 1


def in_tar(folder: Path) -> str:
    archive(folder / "a.tar", [("one.mp4", video())])
    index_folder(folder)
    return "mp4"


def in_parquet(folder: Path) -> str:
    """A column of videos as Hugging Face's datasets store it."""
    pq.write_table(pa.table({"video": [{"bytes": video(), "path": None}]}), folder / "a.parquet")
    index_parquet(str(folder))
    return "video"


@pytest.mark.parametrize("written", [in_tar, in_parquet])
def test_other_formats_have_clips(tmp_path: Path, written: Callable[[Path], str]) -> None:
    column = written(tmp_path)
    data = StreamingDataset(local=tmp_path, clips={column: VideoClip([3])}, columns=[column])
    assert torch.equal(data[0][column], torchcodec.decoders.VideoDecoder(video())[3:4])
    assert torch.equal(data[[0]][0][column], torchcodec.decoders.VideoDecoder(video())[3:4])
    assert isinstance(data._open.get(0, data._opened), BlockReader) == (written is in_parquet)


@pytest.mark.parametrize(
    ("clip", "message"),
    [
        (VideoClip([3, 30]), "a frame's number must be at least 0 and below 30, got 30"),
        (VideoClip([]), r"positions must be a list of at least one whole number, got \[\]"),
        (VideoClip("text"), "positions must be a list of at least one whole number, got 'abc'"),
        (VideoClip("other"), "'other', must be one of sound, text, video"),
        (AudioClip((5, 5)), r"must be two numbers >= 0, the first below the second, got \[5, 5\]"),
        (AudioClip((0, SAMPLES + 1)), "the sound must have at least 22051 samples, got 22050"),
    ],
    ids=range(6),
)
def test_wrong_positions_name_their_sample(tmp_path: Path, clip: Any, message: str) -> None:
    column = "video" if isinstance(clip, VideoClip) else "sound"
    sample = {"video": video(), "sound": sound("wav"), "text": "abc"}
    columns = {"video": "bytes", "sound": "bytes", "text": "json"}
    data = dataset(tmp_path / "data", [sample], columns, clips={column: clip})
    with pytest.raises(DatasetError, match=f"shard.00000.mds.*: sample 0, column '{column}': .*{message}"):
        data[0]


@pytest.mark.parametrize("clip", [VideoClip([0]), AudioClip((0, 1))], ids=["video", "sound"])
@pytest.mark.parametrize("left", [0, 500], ids=["empty", "cut"])
def test_damaged_file_names_its_sample(tmp_path: Path, clip: Any, left: int) -> None:
    with pytest.raises(ShardCorruptError, match=r"shard.00000.mds.*: sample 0, column 'v': the stored bytes must be"):
        read(tmp_path, "v", clip, v=video()[:left])


def test_error_of_a_function_names_the_sample(tmp_path: Path) -> None:
    def broken(sample: Mapping[str, Any], count: int) -> list[int]:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine") as caught:
        read(tmp_path, "v", VideoClip(broken), v=video())
    assert "positions of" in caught.value.__notes__[0]
    assert "sample 0, column 'v'" in caught.value.__notes__[0]


def test_columns_of_clips_are_checked(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="sample 0, column 'x' must be one of the sample's columns, got v"):
        dataset(tmp_path / "data", [{"v": [1]}], {"v": "json"}, clips={"x": VideoClip([0])})[0]
    with pytest.raises(DatasetError, match="must be the bytes of a video or sound, got list"):
        dataset(tmp_path / "data", [], {}, clips={"v": VideoClip([0])})[0]
    with pytest.raises(InvalidArgumentError, match="sample_rate must be at least 1, got 0"):
        AudioClip((0, 1), sample_rate=0)


def test_missing_ffmpeg_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clips._decoders.cache_clear()
    monkeypatch.setattr("torchcodec.ffmpeg_major_version", None)
    with pytest.raises(DatasetError, match="Install FFmpeg"):
        dataset(tmp_path / "data", [{"v": b""}], {"v": "bytes"}, clips={"v": VideoClip([0])})
