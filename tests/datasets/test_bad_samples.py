"""Samples that cannot be decoded, as crawls have them: named, skipped and counted, or repaired; and batches that cannot
be made. The images are Pillow's."""

from __future__ import annotations

import io
import os
import shutil
import tarfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from torch.utils.data import DataLoader

from penstock.data import (
    LogicalShards,
    MapLoader,
    Mapped,
    MDSWriter,
    Mixture,
    Repeated,
    ShardLoader,
    StreamingDataset,
    StreamingLoader,
    index_folder,
)
from penstock.proto.errors import DatasetError, InvalidArgumentError, SampleCorruptError, ShardCorruptError
from penstock.proto.state.counts import COUNTS, SAMPLES, SKIPPED, saved_rows

SAMPLES_OF_TAR = 40
BAD = (3, 11, 12, 13, 39)


def image(number: int, form: str) -> bytes:
    file = io.BytesIO()
    pixels = np.random.default_rng(number).integers(0, 256, (48, 64, 3), np.uint8)
    Image.fromarray(pixels).save(file, form)
    return file.getvalue()


def member(number: int) -> bytes:
    """Return a file named .jpg, as it is in a crawl."""
    if number == BAD[0]:
        return b"<html><body>404 Not Found</body></html>"
    if number in BAD:
        return image(number, "JPEG")[:-900]  # Pillow opens it, and cannot decode it
    return image(number, ("JPEG", "PNG", "WEBP", "GIF")[number % 4])


@pytest.fixture(scope="module")
def crawl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("crawl")
    for part in range(2):
        with tarfile.open(folder / f"{part}.tar", "w") as archive:
            for number in range(part * 20, part * 20 + 20):
                for name, data in ((f"{number:03}.jpg", member(number)), (f"{number:03}.cls", str(number).encode())):
                    info = tarfile.TarInfo(name)
                    info.size = len(data)
                    archive.addfile(info, io.BytesIO(data))
    index_folder(folder)
    return folder


def numbers(samples: list[dict[str, Any]]) -> list[int]:
    for sample in samples:
        assert np.asarray(sample["jpg"]).shape[:2] == (48, 64)  # whatever kind of file it was
    return [sample["cls"] for sample in samples]


def tolerant(crawl: Path, most: int = 3, **options: Any) -> StreamingDataset:
    return StreamingDataset(None, crawl, skip_failures=most, **options)


def read(loader: Any) -> list[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return list(loader)


def test_a_bad_sample_is_named(crawl: Path) -> None:
    dataset = StreamingDataset(None, crawl)
    assert dataset[2]["jpg"].format == "WEBP"
    words = r"0\.tar: sample 3 cannot be read: 003\.jpg: .*must be an image, got 39 bytes that begin with b'<html>"
    with pytest.raises(SampleCorruptError, match=words):
        _ = dataset[3]
    with pytest.raises(
        SampleCorruptError, match=r"0\.tar: sample 12, column 'jpg' cannot be decoded: OSError: .*truncated"
    ):
        _ = tolerant(crawl)[12]  # decoded when it is read, and not in the loop
    with pytest.raises(SampleCorruptError, match=r"1\.tar: sample 19 cannot be read: 039\.jpg: OSError: .*truncated"):
        _ = StreamingDataset(None, crawl, images="array")[39]


@pytest.mark.parametrize("images", ["pil", "array"])
def test_columns_that_are_not_read_are_not_decoded(crawl: Path, images: Any) -> None:
    for dataset in (
        StreamingDataset(None, crawl, columns=["cls"], images=images),
        tolerant(crawl, columns=["cls"], images=images),
    ):
        assert [sample["cls"] for sample in dataset.get_many(np.arange(SAMPLES_OF_TAR))] == list(range(SAMPLES_OF_TAR))
    with pytest.raises(DatasetError, match=r"must have the column 'txt' of `columns`, got __key__, jpg, cls"):
        _ = StreamingDataset(None, crawl, columns=["txt"])[BAD[0]]


@pytest.mark.parametrize("images", ["pil", "array"])
@pytest.mark.parametrize("threads", [0, 2])
def test_bad_samples_are_left_out_in_the_same_order(crawl: Path, images: Any, threads: int) -> None:
    def loader(rank: int = 0, ranks: int = 1) -> StreamingLoader:
        return StreamingLoader(
            tolerant(crawl, images=images),
            global_batch_size=8,
            shuffle=True,
            seed=4,
            collate_fn=list,
            fetch_threads=threads,
            keys="key",
            rank=(rank, ranks),
            reseed=False,
        )

    with pytest.warns(UserWarning, match=r"sample \d+ \(epoch 0, position \d+\) is left out: .*\.tar: sample \d+"):
        batches = list(loader())
    rows = [numbers(batch["batch"]) for batch in batches]
    assert len(rows) == SAMPLES_OF_TAR // 8 == len(loader())
    repaired = StreamingDataset(None, crawl, repair=grey)
    expected = read(StreamingLoader(repaired, batch_size=8, shuffle=True, seed=4, collate_fn=numbers))
    assert rows == [[number for number in batch if number >= 0] for batch in expected]
    again = loader()
    restored = [again.restore_sample(key)["cls"] for batch in batches for key in batch["key"]]
    assert restored == [number for batch in rows for number in batch]
    halves = [read(loader(rank, 2)) for rank in range(2)]
    for batch, *parts in zip(rows, *halves, strict=True):
        assert sorted(batch) == sorted(number for part in parts for number in numbers(part["batch"]))


def test_what_is_left_out_is_in_the_state(crawl: Path) -> None:
    loader = MapLoader(tolerant(crawl), batch_size=10, collate_fn=numbers)
    batches, state = iter(loader), None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        begun = [next(batches), next(batches)]
        state = loader.state_dict()
        assert counted(state) == (16, 4)
        again = MapLoader(tolerant(crawl), batch_size=10, collate_fn=numbers)
        again.load_state_dict(state)
        assert begun + list(again) == [[n for n in range(at, at + 10) if n not in BAD] for at in range(0, 40, 10)]
        assert counted(again.state_dict()) == (35, 5)


def counted(state: Any) -> tuple[int, int]:
    rows = saved_rows(state[COUNTS]["rows"]).values()
    return sum(row[SAMPLES] for row in rows), sum(row[SKIPPED] for row in rows)


def test_sharded_readers_leave_them_out_too(crawl: Path) -> None:
    def loader(box: int = 0, boxes: int = 1) -> ShardLoader:
        source = LogicalShards([tolerant(crawl)], shards=4, shuffle=True)
        plain = LogicalShards([[{"jpg": np.zeros((48, 64)), "cls": 100 + n} for n in range(20)]], shards=4)
        mixed = Mixture([Repeated(source), Repeated(plain)], weights=[1, 1], names=["crawl", "plain"])
        return ShardLoader(Mapped(mixed, dict), global_batch_size=8, seed=1, collate_fn=numbers, rank=(box, boxes))

    assert LogicalShards([tolerant(crawl)], shards=4).lengths(0) is None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole = loader()
        batches = iter(whole)
        begun = [next(batches) for _ in range(5)]
        state = whole.state_dict()
        rest = [next(batches) for _ in range(15)]
        found = [number for batch in begun + rest for number in batch if number < 100]
        assert set(found) == set(range(SAMPLES_OF_TAR)) - set(BAD)
        samples, skipped = counted(whole.state_dict())
        assert samples == 160
        assert skipped >= len(BAD)
        again = loader()
        again.load_state_dict(state)
        assert [batch for batch, _ in zip(again, range(15), strict=False)] == rest
        assert counted(again.state_dict())[0] >= 160


def grey(number: int, error: SampleCorruptError) -> dict[str, Any]:
    return {"__key__": str(number), "jpg": Image.new("RGB", (64, 48)), "cls": -number}


def test_repaired_samples_keep_all_lengths(crawl: Path) -> None:
    dataset = StreamingDataset(None, crawl, repair=grey)
    expected = [-number if number in BAD else number for number in range(SAMPLES_OF_TAR)]
    with pytest.warns(UserWarning, match=r"sample 3 is repaired: .*0\.tar: sample 3 cannot be read"):
        assert dataset[3]["cls"] == -3
    for loader in (
        StreamingLoader(dataset, batch_size=7, collate_fn=numbers),
        MapLoader(dataset, batch_size=7, collate_fn=numbers),
        DataLoader(dataset, batch_size=7, collate_fn=numbers, num_workers=2),
        ShardLoader(LogicalShards([dataset], shards=1), batch_size=7, collate_fn=numbers),
    ):
        batches = read(loader)
        assert [number for batch in batches for number in batch] == expected
        assert len(loader) == len(batches)
    assert LogicalShards([dataset], shards=3).lengths(0) is not None


def test_a_failing_read_is_never_skipped(crawl: Path, tmp_path: Path) -> None:
    """Or the order would depend on it."""
    shutil.copytree(crawl, tmp_path, dirs_exist_ok=True)
    dataset = tolerant(tmp_path, 40)
    _ = dataset[0]  # the file is open
    os.truncate(tmp_path / "0.tar", 20_000)
    for loader in (
        StreamingLoader(dataset, batch_size=20, collate_fn=numbers),
        ShardLoader(LogicalShards([dataset], shards=1), batch_size=20, collate_fn=numbers),
    ):
        with pytest.raises(ShardCorruptError, match="is truncated") as caught:
            read(loader)
        assert type(caught.value) is ShardCorruptError


def test_too_many_in_a_row_are_an_error(crawl: Path) -> None:
    shards = ShardLoader(LogicalShards([tolerant(crawl, 2)], shards=1), batch_size=20, collate_fn=numbers)
    for loader, words in (
        (
            StreamingLoader(tolerant(crawl, 2), batch_size=20, collate_fn=numbers),
            "more than skip_failures=2 .* sample 13",
        ),
        (
            StreamingLoader(tolerant(crawl, 9), batch_size=1, collate_fn=numbers),
            "batch would have no sample.* sample 3",
        ),
        (shards, "sample 13"),
    ):
        with pytest.raises(SampleCorruptError, match=words):
            read(loader)
    with pytest.raises(InvalidArgumentError, match="either skip_failures, at least 0, or repair"):
        StreamingDataset(None, crawl, skip_failures=1, repair=grey)


# ---- batches that cannot be made


@pytest.fixture
def uneven(tmp_path: Path) -> Iterator[StreamingDataset]:
    with MDSWriter(tmp_path, {"x": "ndarray"}) as writer:
        for number in range(8):
            writer.write({"x": np.zeros(3 if number == 5 else 2, np.float32)})
    dataset = StreamingDataset(None, tmp_path)
    yield dataset
    dataset.close()


def test_a_collate_error_names_its_rows(uneven: StreamingDataset) -> None:
    for loader, words in (
        (StreamingLoader(uneven, batch_size=4), r"the samples 4, 5, 6, 7 of StreamingDataset \(epoch 0\)"),
        (ShardLoader(LogicalShards([uneven], shards=1), batch_size=4), "4 samples, of which the first is sample 4 of"),
    ):
        with pytest.raises(RuntimeError, match="stack expects each tensor") as caught:
            list(loader)
        (note,) = [note for note in caught.value.__notes__ if note.startswith("raised for a batch of")]
        assert note.startswith(f"raised for a batch of {words}".replace("\\", ""))
