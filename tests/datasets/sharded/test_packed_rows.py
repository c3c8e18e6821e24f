"""Fields of packed lines, best fit and images, against a naive packer that walks token by token."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from given_shards import Given, whole
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.data import Chunked, Packed, Repeated, ShardLoader, collate_packed
from penstock.proto.errors import DatasetError, InvalidArgumentError

ALL: Any = {
    "labels": True,
    "shift": True,
    "positions": True,
    "segments": True,
    "cu_seqlens": True,
    "payload": ["weight"],
}
PAD = -9
SIZES = st.lists(st.integers(0, 14), max_size=14)


def column_documents(sizes: list[int], first: int = 0) -> list[dict[str, Any]]:
    """Documents of different tokens, each with a weight and a mask, which are functions of the token."""
    made = []
    for size in sizes:
        tokens = np.arange(first + 1, first + 1 + size)
        made.append({"tokens": tokens, "weight": np.stack([tokens * 2, tokens * 3], 1), "learn": (tokens % 3).tolist()})
        first += size
    return made


Slot = tuple[int, int, int]
"""Token of a line: (document, index in the document, segment)."""


def in_order(sizes: list[int], length: int, whole_documents: bool, truncate: bool) -> list[list[Slot]]:
    lines: list[list[Slot]] = [[]]
    for number, full in enumerate(sizes):
        size = min(full, length) if truncate else full
        if whole_documents and len(lines[-1]) + size > length:
            lines += [[]]
        for at in range(size):
            if len(lines[-1]) == length:
                lines += [[]]
            new = not lines[-1] or lines[-1][-1][0] != number
            lines[-1].append((number, at, (lines[-1][-1][2] if lines[-1] else 0) + new))
    return [line for line in lines if line]


def fields_by_hand(
    line: list[Slot], documents: list[dict[str, Any]], most: int, length: int, shift: bool
) -> dict[str, list[Any]]:
    """The fields of a line. `most`: tokens of a document that exist, the others are truncated."""
    row: dict[str, list[Any]] = {name: [] for name in ("tokens", "labels", "positions", "segments", "loss_mask")}
    row |= {"weight": [], "cu_seqlens": []}
    for at in range(length):
        if at >= len(line):
            for name, value in (("tokens", PAD), ("labels", -100), ("positions", 0), ("segments", 0)):
                row[name].append(value)
            row["weight"].append([0, 0])
            row["loss_mask"].append(False)
            continue
        number, index, segment = line[at]
        document = documents[number]
        begins = at == 0 or line[at - 1][2] != segment
        label = index + shift
        exists = label < min(len(document["tokens"]), most) and (shift or not begins)
        learns = exists and bool(document["learn"][label])
        row["tokens"].append(int(document["tokens"][index]))
        row["labels"].append(int(document["tokens"][label]) if learns else -100)
        row["positions"].append(0 if begins else row["positions"][-1] + 1)
        row["segments"].append(segment)
        row["weight"].append(document["weight"][index].tolist())
        row["loss_mask"].append(learns)
        row["cu_seqlens"] += [at] * begins
    row["cu_seqlens"] += [len(line), length] if len(line) < length else [length]
    return row


def lists(rows: list[dict[str, torch.Tensor]]) -> list[dict[str, list[Any]]]:
    return [{name: value.tolist() for name, value in row.items()} for row in rows]


@settings(max_examples=20)
@given(SIZES, st.integers(1, 12), st.sampled_from(["split", "whole", "truncate"]), st.booleans(), st.booleans())
def test_fields_equal_those_made_by_hand(sizes: list[int], length: int, how: str, narrow: bool, shift: bool) -> None:
    documents = column_documents(sizes)
    options: dict[str, Any] = ALL | {"shift": shift} | ({} if how == "split" else {"split": False})
    if how == "truncate":
        options["long"] = "truncate"
    if narrow:
        options["dtype"] = "int32"
    source = Packed(Given([documents]), length=length, pad=PAD, loss_mask="learn", **options)
    lines = in_order(sizes, length, how != "split", how == "truncate")
    most = length if how == "truncate" else 1 << 30
    expected = [fields_by_hand(line, documents, most, length, shift) for line in lines]
    rows = whole(source)
    assert lists(rows) == expected
    assert {row[name].dtype for row in rows for name in ("tokens", "labels")} <= {
        torch.int32 if narrow else torch.int64
    }


@settings(max_examples=12)
@given(SIZES, st.integers(1, 12), st.integers(1, 6), st.sampled_from(["split", "truncate"]))
def test_best_fit_has_each_token_once(sizes: list[int], length: int, window: int, long: Any) -> None:
    documents = column_documents(sizes)
    source = Packed(Given([documents]), length=length, pad=PAD, split=False, long=long, window=window, **ALL)
    rows = lists(whole(source))
    expected = [document["tokens"][: length if long == "truncate" else None].tolist() for document in documents]
    assert sorted(t for row in rows for t in row["tokens"] if t != PAD) == [t for tokens in expected for t in tokens]
    owner = {token: tokens for tokens in expected for token in tokens}
    for row in rows:  # each segment is a document, or length-sized parts of one with its labels
        bounds = row["cu_seqlens"]
        assert bounds[-1] == length
        for number, (begin, end) in enumerate(itertools.pairwise(bounds), 1):
            tokens = row["tokens"][begin:end]
            if PAD in tokens:
                assert set(tokens) == {PAD}
                assert set(row["labels"][begin:end]) == {-100}
                assert set(row["segments"][begin:end]) == {0}
                continue
            rest = owner[tokens[0]]
            at = rest.index(tokens[0])
            assert at % length == 0
            assert tokens == rest[at : at + length]
            assert row["labels"][begin:end] == [*rest[at + 1 : at + 1 + len(tokens)], -100][: len(tokens)]
            assert row["positions"][begin:end] == list(range(len(tokens)))
            assert set(row["segments"][begin:end]) == {number}
            assert row["weight"][begin:end] == [[2 * token, 3 * token] for token in tokens]


@settings(max_examples=12)
@given(SIZES, st.integers(1, 12), st.integers(1, 9), st.booleans())
def test_pieces_are_joined(sizes: list[int], length: int, piece: int, repeated: bool) -> None:
    """Rows over a Chunked are those of whole documents, but for the label where a line and a piece end together."""
    texts = [list(range(20 * at, 20 * at + size)) for at, size in enumerate(sizes)]
    fields: Any = {**ALL, "payload": ()}
    plain = whole(Packed(Given([texts]), length=length, pad=PAD, **fields))
    chunked = Chunked(Given([texts]), length=piece)
    if repeated and any(sizes):
        cursor = Packed(Repeated(chunked), length=length, pad=PAD, **fields).open(0, 0, 1)
        rows = [next(cursor) for _ in range(sum(sizes) // length)]
    else:
        rows = whole(Packed(chunked, length=length, pad=PAD, **fields))
    for row, expected in zip(rows, plain, strict=False):
        differing = row["labels"] != expected["labels"]
        assert not differing[:-1].any()
        assert row["labels"][-1] in (-100, expected["labels"][-1])
        for name in ("tokens", "positions", "segments", "cu_seqlens"):
            assert torch.equal(row[name], expected[name])


def test_bounds_of_a_batch_are_those_of_its_rows() -> None:
    documents = column_documents([5, 9, 3, 12, 7, 1, 8])
    rows = whole(Packed(Given([documents]), length=13, pad=PAD, split=False, window=5, **ALL))
    batch = collate_packed(rows)
    bounds = [13 * at + bound for at, row in enumerate(rows) for bound in row["cu_seqlens"].tolist()[1:]]
    assert batch["cu_seqlens"].tolist() == [0, *bounds]
    assert batch["cu_seqlens"].dtype == torch.int32
    assert int(batch["max_seqlen"]) == max(end - begin for begin, end in itertools.pairwise([0, *bounds]))
    assert torch.equal(batch["tokens"], torch.stack([row["tokens"] for row in rows]))


def test_images_stay_with_their_documents() -> None:
    documents: list[dict[str, Any]] = [
        {"tokens": [1, 2, 3], "images": np.ones((2, 4), np.float32), "image_tokens": [1, 1]},
        {"tokens": [4, 5], "images": [], "image_tokens": []},
        {"tokens": [6, 7, 8, 9], "images": 3 * torch.ones(1, 4), "image_tokens": [3]},
        {"tokens": [10], "images": np.zeros((0, 4), np.float32), "image_tokens": np.zeros(0, np.int64)},
    ]
    options: Any = {"pad": 0, "split": False, "long": "refuse", "attached": ["images", "image_tokens"]}
    source = Packed(Given([documents]), length=5, segments=True, window=4, **options)
    rows = whole(source)
    assert [row["tokens"].tolist() for row in rows] == [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]]
    batch = collate_packed(rows)
    assert batch["images"].tolist() == [[1.0] * 4, [1.0] * 4, [3.0] * 4]
    assert batch["image_tokens"].tolist() == [1, 1, 3]
    assert batch["images_rows"].tolist() == batch["image_tokens_rows"].tolist() == [0, 0, 1]
    assert batch["images_segments"].tolist() == [1, 1, 1]
    loader = ShardLoader(source, batch_size=2, collate_fn=collate_packed)
    assert torch.equal(next(iter(loader))["images"], batch["images"])
    documents[2]["images"] = np.ones((1, 5), np.float32)
    with pytest.raises(DatasetError, match=r"document 2 .*'images' must be float32 of shape \(4,\)"):
        list(Packed(Given([documents]), length=30, **options).open(0, 0, 1))


@pytest.mark.parametrize(
    ("sample", "options", "what"),
    [
        ({"tokens": [1] * 9}, {"split": False, "pad": 0, "long": "refuse"}, "at most length=4 tokens, got 9.*Filtered"),
        ({"tokens": [1 << 31]}, {"dtype": "int32"}, "tokens must fit dtype='int32', got 2147483648"),
        ({"tokens": [1, 2], "weight": [1]}, {"payload": ["weight"]}, "'weight' must have 2 values"),
        ([1, 2], {"payload": ["weight"]}, "must be a dict with .* got list"),
        ({"tokens": [1], "weight": ["a"]}, {"payload": ["weight"]}, "'weight' must be an array"),
    ],
)
@pytest.mark.parametrize("window", [None, 3])
def test_an_error_names_the_document(sample: Any, options: Any, what: str, window: int | None) -> None:
    usual: Any = {"length": 4, "labels": True, "shift": True}
    if window:
        usual |= {"window": window, "split": False, "pad": 0}
    good = {"tokens": [1, 2, 3, 4], "weight": [1, 2, 3, 4]}
    cursor = Packed(Given([[good, sample, good, good]]), **usual | options).open(0, 2, 1)
    with pytest.raises(DatasetError, match=rf"Packed: document 1 of shard 0 in epoch 2.*{what}"):
        list(cursor)


def test_labels_need_a_choice() -> None:
    """Whoever forgets `shift` would train a model that shifts on the token after the next."""
    fields: Any
    for fields in ({"labels": True}, {"loss_mask": True}):
        with pytest.raises(InvalidArgumentError, match=r"need shift: True if the loop .* False if the model shifts"):
            Packed(Given([[]]), length=4, **fields)
    with pytest.raises(InvalidArgumentError, match="shift must be False with names='transformers'"):
        Packed(Given([[]]), length=4, labels=True, shift=True, names="transformers")
    with pytest.raises(InvalidArgumentError, match=r"names must rename tokens, positions or payload, got \['labels'\]"):
        Packed(Given([[]]), length=4, positions=True, names={"labels": "targets"})


def test_other_names() -> None:
    names = {"tokens": "text", "weight": "loss_weight", "segments": "documents"}
    source = Packed(Given([column_documents([3, 4])]), length=5, segments=True, payload=["weight"], names=names)
    (row,) = whole(source)
    assert {name: value.tolist() for name, value in row.items()} == {
        "text": [1, 2, 3, 4, 5],
        "documents": [1, 1, 1, 2, 2],
        "loss_weight": [[2 * token, 3 * token] for token in range(1, 6)],
    }
