"""Megatron-core's token files, as its own builder wrote them (tests/data/megatron)."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.data import MegatronDocuments, megatron_blend
from penstock.data.formats import megatron
from penstock.data.sharded.megatron_blend import MegatronPart
from penstock.proto.errors import DatasetError, InvalidArgumentError, ShardCorruptError

DATA = Path(__file__).parents[1] / "data" / "megatron"
EXPECTED = json.loads((DATA / "expected.json").read_text())
NAMES = ["text", "sentences", "images"]


@pytest.fixture(params=["in memory", "on disk"])
def kept(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read the index in both ways."""
    if request.param == "on disk":
        monkeypatch.setattr(megatron, "KEPT_BYTES", 0)


@pytest.fixture
def copied(tmp_path: Path) -> Callable[[str], Path]:
    """Prefix of a copy that may be damaged."""

    def copy(name: str) -> Path:
        for end in ("bin", "idx"):
            shutil.copy(DATA / f"{name}.{end}", tmp_path)
        return tmp_path / name

    return copy


def joined(name: str, begin: int = 0, end: int | None = None) -> list[list[int]]:
    return [[token for one in document for token in one] for document in EXPECTED[name][begin:end]]


@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize("name", NAMES)
def test_documents_are_megatrons(name: str) -> None:
    documents = MegatronDocuments(DATA / name)
    assert len(documents) == len(EXPECTED[name])
    assert [one.tolist() for one in documents] == joined(name)
    assert {one.dtype for one in documents} == {documents.dtype} == {np.dtype("u2" if name == "text" else "i4")}
    assert documents.num_tokens == sum(map(len, joined(name)))
    assert documents[-1].tolist() == joined(name)[-1]
    documents[1][:] = 0  # an array of its own
    assert documents[1].tolist() == joined(name)[1]
    for wrong in (len(documents), -len(documents) - 1, 10**20):
        with pytest.raises(IndexError, match=f"below {len(documents)}, got {wrong}"):
            documents[wrong]


@pytest.mark.usefixtures("kept")
def test_inner_boundaries_and_modes_are_read() -> None:
    modes = iter(EXPECTED["modes"])
    for name in NAMES:
        documents = MegatronDocuments(DATA / name)
        for number, sequences in enumerate(EXPECTED[name]):
            sample = documents.sample(number)
            assert sample["sequence_lengths"].tolist() == [len(one) for one in sequences]
            assert sample["tokens"].tolist() == joined(name)[number]
            assert ("modes" in sample) == (name == "images")
            if name == "images":
                assert sample["modes"].tolist() == [next(modes) for _ in sequences]


@pytest.mark.usefixtures("kept")
def test_parts_read_nothing_else() -> None:
    part = MegatronDocuments(DATA / "sentences")[3:9]
    assert [one.tolist() for one in part] == joined("sentences", 3, 9)
    assert part.num_tokens == sum(map(len, joined("sentences", 3, 9)))
    assert [one.tolist() for one in part[1:-1]] == joined("sentences", 4, 8)
    assert part.fingerprint != part[1:].fingerprint
    assert (len(part[4:2]), part[4:2].num_tokens) == (0, 0)
    with pytest.raises(InvalidArgumentError, match="step 1, got 2"):
        part[::2]


def test_pickled_documents_open_again(copied: Callable[[str], Path]) -> None:
    prefix = copied("sentences")
    data = pickle.dumps(MegatronDocuments(prefix)[2:5])
    assert [one.tolist() for one in pickle.loads(data)] == joined("sentences", 2, 5)
    for end in ("bin", "idx"):
        shutil.copy(DATA / f"text.{end}", f"{prefix}.{end}")
    with pytest.raises(DatasetError, match=r"sentences.idx must not change while a job reads it"):
        pickle.loads(data)


def test_a_missing_file_is_named(copied: Callable[[str], Path]) -> None:
    prefix = copied("text")
    with pytest.raises(DatasetError, match=r"text\.bin\.idx must exist: prefix must be the path without"):
        MegatronDocuments(f"{prefix}.bin")
    Path(f"{prefix}.bin").unlink()
    with pytest.raises(DatasetError, match=r"text.bin must exist"):
        MegatronDocuments(prefix)
    with pytest.raises(InvalidArgumentError, match="prefix must be a path"):
        MegatronDocuments(7)  # type: ignore[arg-type]


def test_files_of_two_pairs_are_refused(copied: Callable[[str], Path]) -> None:
    prefix = copied("sentences")
    shutil.copy(DATA / "text.bin", f"{prefix}.bin")
    with pytest.raises(ShardCorruptError, match=r"sentences.bin must have 332 bytes, as .*idx says, got 1264"):
        MegatronDocuments(prefix)


def read_all(prefix: Path) -> None:
    documents = MegatronDocuments(prefix)
    for at in range(len(documents)):
        documents.sample(at)


HEAD, SEQUENCES, DOCUMENTS = 34, 21, 12
"""Bytes before the tables of "sentences", its sequences and documents."""


def number(at: int, code: str, value: int) -> Callable[[bytearray], None]:
    def change(data: bytearray) -> None:
        struct.pack_into(code, data, at, value)

    return change


@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (number(0, "<B", 0), "must begin with MMIDIDX"),
        (number(9, "<Q", 2), "version must be 1, got 2"),
        (number(17, "<B", 9), "code of the dtype must be one of 1, .*, 8, got 9"),
        (number(18, "<Q", 2**63), "for 9223372036854775808 sequences"),
        (number(26, "<Q", 0), "and 0 documents"),
        (number(HEAD, "<i", -1), "negative length"),
        (number(HEAD, "<i", 2**31 - 1), "before one that begins at byte"),
        (number(HEAD + 4 * SEQUENCES + 8, "<q", 2**62), "before one that begins at byte 4611686018427387904"),
        (number(HEAD + 12 * SEQUENCES + 8 * DOCUMENTS, "<q", 2**40), "must consist of sequences 0 to 21"),
        (number(HEAD + 12 * SEQUENCES + 32, "<q", 2**40), "document [34] must not end before"),
        (lambda data: data.pop(), "It is truncated or damaged"),
    ],
)
def test_damaged_indexes_are_named(
    change: Callable[[bytearray], Any], message: str, copied: Callable[[str], Path]
) -> None:
    prefix = copied("sentences")
    index = Path(f"{prefix}.idx")
    data = bytearray(index.read_bytes())
    change(data)
    index.write_bytes(data)
    with pytest.raises(ShardCorruptError, match=rf"sentences.idx: .*{message}"):
        read_all(prefix)


@pytest.mark.usefixtures("kept")
def test_files_cut_while_they_are_read(copied: Callable[[str], Path]) -> None:
    """A mapped file would kill the process here."""
    prefix = copied("text")
    documents = MegatronDocuments(prefix)
    os.truncate(f"{prefix}.bin", 100)
    with pytest.raises(ShardCorruptError, match=r"text.bin: document 39 is truncated: 0 of \d+ bytes are left"):
        documents[39]
    os.truncate(f"{prefix}.idx", 100)
    with pytest.raises(ShardCorruptError, match=r"text.(idx|bin): .* truncated"):
        documents[38]


def lengths(source: Any, count: int) -> Iterator[list[int]]:
    cursor = source.open(0, 0, 1)
    try:
        for _ in range(count):
            yield next(cursor).tolist()
    finally:
        cursor.close()


def test_a_blend_mixes_tokens_by_weight(tmp_path: Path) -> None:
    given = ["0.25", f"{DATA}/text", "0.75", f"{DATA}/sentences"]
    listed = megatron_blend(given, shards=1)
    counts = {"text": 0, "sentences": 0}
    texts = joined("text")
    for document in lengths(listed, 400):
        counts["text" if document in texts else "sentences"] += len(document)
    assert counts["text"] / sum(counts.values()) == pytest.approx(0.25, abs=0.02)
    for path, text in (
        (tmp_path / "blend.txt", "\n".join(given)),
        (tmp_path / "blend.json", json.dumps({"train": given, "valid": given[:2], "test": []})),
    ):
        path.write_text(text)
        assert megatron_blend(path, shards=1).described() == listed.described()
    valid = megatron_blend(tmp_path / "blend.json", shards=1, part="valid")
    assert [s["names"] for s in (each["source"] for each in valid.described()["sources"])] == [[f"{DATA}/text"]]


def test_a_split_divides_documents() -> None:
    seen: list[list[int]] = []
    counts: dict[MegatronPart, int] = {"train": 36, "valid": 3, "test": 1}
    for part, count in counts.items():
        source = megatron_blend([f"{DATA}/text"], shards=1, split="90,8,2", part=part, shuffle=False)
        seen += lengths(source, count)
    assert seen == joined("text")


@pytest.mark.parametrize(
    ("blend", "options", "message"),
    [
        ([], {}, "at least one prefix"),
        (["0.5", f"{DATA}/text", f"{DATA}/text", f"{DATA}/text"], {}, "weight before each prefix, or none"),
        ([f"{DATA}/text"], {"split": "1,2,3,4"}, "split must be up to three weights"),
        ([f"{DATA}/text"], {"split": "100,0,0", "part": "test"}, "text: the part 'test' has none of"),
        ("/nowhere/blend.txt", {}, "/nowhere/blend.txt cannot be read"),
        ([f"{DATA}/nothing"], {}, "nothing.idx must exist"),
    ],
)
def test_bad_blends_are_named(blend: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises((InvalidArgumentError, DatasetError), match=message):
        megatron_blend(blend, shards=2, **options)
