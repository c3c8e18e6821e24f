"""Plain lines, rows and tar archives: what is a sample, and what is refused. See test_format_contract.py, too."""

from __future__ import annotations

import io
import json
import shutil
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from archives import Members, archive
from offset_files import forget_fingerprints
from PIL import Image

from penstock.data import StreamingDataset, index_folder
from penstock.data.formats.records import tar_samples
from penstock.proto.errors import InvalidArgumentError, ShardCorruptError

DATA = Path(__file__).parents[1] / "data" / "webdataset"


def samples(folder: Path, **options: Any) -> list[dict[str, Any]]:
    dataset = StreamingDataset(local=folder, **options)
    found = [dataset[number] for number in range(len(dataset))]
    assert any("npy" in sample for sample in found) or dataset.get_many(np.arange(len(dataset))) == found
    dataset.close()
    return found


@pytest.mark.parametrize("line", ["[1]", "\xff"])
def test_line_that_is_no_object_is_named(tmp_path: Path, line: str) -> None:
    (tmp_path / "a.jsonl").write_text(f"{line}\n", encoding="latin-1")
    with pytest.raises(ShardCorruptError, match=r"^a\.jsonl: sample 0 must be a"):
        index_folder(tmp_path)
    (tmp_path / "a.jsonl").write_text(f'{{"a": 1}}\n{line}\n', encoding="latin-1")
    index_folder(tmp_path)
    with pytest.raises(ShardCorruptError, match=r"a\.jsonl: sample 1 must be a"):
        samples(tmp_path)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a,b\n1,2\n1\n", "the row that ends in line 3 must have 2 values, got 1"),
        ("a,a\n1,2\n", "the first line must have the columns' names, each once"),
        ("", "the first line must have the columns' names"),
        ("a,b\n1,\xff\n", "line 2 must be CSV in UTF-8"),
        ("a,b\r1,2\r", "line 1 must be CSV in UTF-8: new-line character seen in unquoted field"),
    ],
)
def test_bad_rows_are_named_when_indexed(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "a.csv").write_text(text, encoding="latin-1")
    with pytest.raises(ShardCorruptError, match=rf"^a\.csv: {says}"):
        index_folder(tmp_path)


@pytest.mark.parametrize("changed", ["a,b\n1,2\n333,4\n", "b,a\n333,4\n1,2\n"])
def test_rows_changed_at_the_same_size_are_named(tmp_path: Path, changed: str) -> None:
    (tmp_path / "a.csv").write_text("a,b\n333,4\n1,2\n")
    index_folder(tmp_path)
    (tmp_path / "a.csv").write_text(changed)
    with pytest.raises(ShardCorruptError, match=r"a\.csv must be the file that was indexed, got another one\. Put"):
        samples(tmp_path)
    forget_fingerprints(tmp_path)
    with pytest.raises(
        ShardCorruptError, match=r"a\.csv: (sample 0 must be one row|the header must be a, b).* Put the "
    ):
        samples(tmp_path)


@pytest.mark.parametrize("kind", [tarfile.LNKTYPE, tarfile.SYMTYPE])
def test_links_in_archives_are_refused(tmp_path: Path, kind: bytes) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as written:
        member = tarfile.TarInfo("1.txt")
        written.addfile(member)
        member = tarfile.TarInfo("2.txt")
        member.type, member.linkname = kind, "1.txt"
        written.addfile(member)
    with pytest.raises(
        ShardCorruptError,
        match=r"tar: 2\.txt must be a file, got a link\. Write the archive with tar --hard-dereference --dereference$",
    ):
        index_folder(tmp_path)


def test_samples_are_those_of_webdataset(tmp_path: Path) -> None:
    """Read archives that webdataset wrote, see tests/data/webdataset/make.py; expected are the bytes that it reads."""
    shutil.copytree(DATA / "shards", tmp_path / "shards")
    index_folder(tmp_path)
    decoders: dict[str, Any] = {"txt": bytes.decode, "json": json.loads, "cls": int, "npy": opened_array}
    decoders |= dict.fromkeys(("jpg", "seg.png"), lambda data: Image.open(io.BytesIO(data)))
    expected = [
        {
            name: value if name == "__key__" else decoders.get(name, bytes)(bytes.fromhex(value))
            for name, value in sample.items()
        }
        for sample in json.loads((DATA / "expected.json").read_text())
    ]
    found = samples(tmp_path)
    assert len(found) == len(expected)
    for sample, other in zip(found, expected, strict=True):
        assert np.array_equal(sample.pop("npy"), other.pop("npy"))
        assert sample == other


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT])
def test_names_with_several_dots(tmp_path: Path, form: int) -> None:
    """By default as webdataset, which wrote and read the archive; what that joins is said, and what is left out."""
    shutil.copy(DATA / "names.tar", tmp_path)
    long = "x" * 60 + "/" + "y" * 60  # in GNU's format read by tarfile
    archive(tmp_path / "other.tar", [("README", b"1"), (f"{long}.mp3", b"2"), ("LICENSE", b"3"), (".git", b"4")], form)
    with pytest.warns(UserWarning, match="members") as said:
        index_folder(tmp_path)
    left_out, joined = (str(warning.message) for warning in said)
    assert (
        "3 members of archives are left out, because their names have no dot or begin with one, such as 'README'"
        in left_out
    )
    assert "1 samples join members such as 'a/song v1.0.mp3' and 'a/song v1.5.mp3'" in joined
    *found, other = samples(tmp_path)
    expected = json.loads((DATA / "names.json").read_text())
    assert [
        {name: value if name == "__key__" else value.hex() for name, value in one.items()} for one in found
    ] == expected
    assert other == {"__key__": long, "mp3": b"2"}
    with pytest.warns(UserWarning, match="3 members of archives are left out"):
        index_folder(tmp_path, key="last_dot")
    assert samples(tmp_path) == [
        {"__key__": "a/song v1.0", "mp3": b"0.mp3"},
        {"__key__": "a/song v1.5", "mp3": b"5.mp3"},
        {"__key__": "a/song v2.0", "mp3": b"0.mp3", "lyrics": b"0.lyrics"},
        {"__key__": "b", "mp3": b"mp3", "lyrics": b"lyrics"},
        {"__key__": long, "mp3": b"2"},
    ]
    with pytest.raises(InvalidArgumentError, match="key must be one of first_dot, last_dot, got 'dot'"):
        index_folder(tmp_path, key="dot")  # type: ignore[arg-type]


def opened_array(data: bytes) -> Any:
    return np.load(io.BytesIO(data))


@pytest.mark.parametrize("name", ["a.pth", "a.pyd"])
def test_pickles_in_archives_stay_bytes(tmp_path: Path, name: str) -> None:
    archive(tmp_path / "a.tar", [(name, b"cos\nsystem\n.")])
    index_folder(tmp_path)
    assert samples(tmp_path)[0][name[2:]] == b"cos\nsystem\n."


@pytest.mark.parametrize(
    ("members", "says"),
    [
        (
            [("a.txt", b"1"), ("b.txt", b"2"), ("a.cls", b"3")],
            "a sample's members must follow each other, got a.cls",
        ),
        ([("a.txt", b"1"), ("a.TXT", b"2")], "a sample must have each column .* once, got .txt. again by a.TXT"),
    ],
)
def test_archives_of_other_order_are_refused(tmp_path: Path, members: Members, says: str) -> None:
    archive(tmp_path / "a.tar", members)
    with pytest.raises(ShardCorruptError, match=rf"^a\.tar: {says}"):
        index_folder(tmp_path)


def test_cut_and_joined_archives_are_refused(tmp_path: Path) -> None:
    """tarfile reads both without an error, up to the first end."""
    path = tmp_path / "a.tar"
    archive(path, [(f"{number}.txt", b"x" * 600) for number in range(3)])
    whole = path.read_bytes()
    member = 512 + 1024
    for size in (3 * member, 2 * member, member, 3 * member + 100):
        path.write_bytes(whole[:size])
        with pytest.raises(ShardCorruptError, match=r"^a\.tar must end with a block of zeros, but it is truncated"):
            index_folder(tmp_path)
    path.write_bytes(whole + whole)
    with pytest.raises(ShardCorruptError, match=r"^a\.tar must be one archive, but more data follow its end"):
        index_folder(tmp_path)
    path.write_bytes(whole[: 3 * member + 512])  # one block of zeros, as some writers leave it
    index_folder(tmp_path)
    assert len(samples(tmp_path)) == 3


def test_compressed_archive_is_refused(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w:gz") as written:
        written.addfile(tarfile.TarInfo("a.txt"))
    with pytest.raises(ShardCorruptError, match=r"a\.tar must be a plain tar archive: .*Decompress the archive"):
        index_folder(tmp_path)


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_damaged_headers_are_never_an_end(tmp_path: Path, form: int) -> None:
    """tarfile takes a damaged header for the end of the archive."""
    members = [(f"{'long' * 40 * (row % 2)}{row}.{kind}", b"%d" % row) for row in range(4) for kind in ("txt", "cls")]
    archive(tmp_path / "a.tar", members, form)
    whole = (tmp_path / "a.tar").read_bytes()
    index_folder(tmp_path)
    expected = samples(tmp_path)
    assert len(expected) == 4
    for at in range(0, len(whole) - 2 * tarfile.BLOCKSIZE, tarfile.BLOCKSIZE):
        if not whole[at : at + 512].strip(b"\0"):
            break
        damaged = bytearray(whole)
        damaged[at + 150] ^= 1  # within the checksum, if it is a header
        (tmp_path / "a.tar").write_bytes(damaged)
        try:
            found = samples(tmp_path)
        except ShardCorruptError:
            continue
        assert [set(sample) for sample in found] == [set(sample) for sample in expected]


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype="<i4").reshape(2, 3),
        np.arange(6, dtype=">f8"),
        np.asfortranarray(np.arange(6).reshape(2, 3)),
        np.array([(1, 2.5)], [("a", "<i2"), ("b", "<f4")]),
        np.array(["a", "bc"]),
    ],
    ids=lambda array: f"{array.dtype} {array.shape}",
)
def test_npy_members_are_as_numpy_reads_them(array: Any) -> None:
    file = io.BytesIO()
    np.save(file, array)
    for data in (file.getvalue(), file.getvalue() + b"more"):
        found = tar_samples._array(data)
        assert (found.dtype, found.shape, found.tobytes()) == (array.dtype, array.shape, array.tobytes())
        assert found.flags.writeable
    np.save(file := io.BytesIO(), np.array([{}]), allow_pickle=True)
    for data in (file.getvalue(), b"\x93NUMPY\x01\x00", b"", b"\x93NUMPY\x01\x00\x02\x00{}"):
        with pytest.raises((ValueError, EOFError)):
            tar_samples._array(data)
