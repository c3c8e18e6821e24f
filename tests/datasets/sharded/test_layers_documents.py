"""Documents in pieces and in lines, against cutting a list by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from given_shards import Given, again, whole
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.data import Chunked, Packed
from penstock.proto.errors import DatasetError, InvalidArgumentError
from penstock.proto.state.codec import encode_state

DOCUMENTS = st.lists(st.lists(st.integers(0, 99) | st.integers(0, 1), max_size=12), max_size=12)
SEPARATOR = st.sampled_from([None, -1])
SEPARATORS = st.sampled_from([None, -1, 0, 1])


def pieces_by_hand(documents: list[list[int]], length: int, bos: int | None, eos: int | None) -> list[list[int]]:
    pieces = []
    for document in filter(None, documents):
        tokens = [token for token in [bos, *document, eos] if token is not None]
        pieces += [tokens[at : at + length] for at in range(0, len(tokens), length)]
    return pieces


def lists(samples: list[torch.Tensor]) -> list[list[int]]:
    assert all(sample.dtype == torch.int64 and sample.ndim == 1 for sample in samples)
    return [sample.tolist() for sample in samples]


def cut_everywhere(source: Any, expected: list[list[int]], skipped: int) -> None:
    """Reading on from every place, and from behind some that are passed over."""
    for at in range(len(expected) + 1):
        cursor = source.open(0, 0, 1)
        assert lists([next(cursor) for _ in range(at)]) == expected[:at]
        cursor = again(source, cursor)
        assert cursor.skip(skipped) == min(skipped, len(expected) - at)
        cursor = again(source, cursor)
        assert lists(list(cursor)) == expected[at + skipped :]
        assert next(cursor, None) is None
        assert list(again(source, cursor)) == []


@settings(max_examples=20)
@given(DOCUMENTS, st.integers(1, 8), SEPARATOR, SEPARATOR, st.integers(0, 5))
def test_documents_in_pieces(
    documents: list[list[int]], length: int, bos: int | None, eos: int | None, skipped: int
) -> None:
    source = Chunked(Given([documents]), length=length, bos=bos, eos=eos)
    cut_everywhere(source, pieces_by_hand(documents, length, bos, eos), skipped)


def lines_by_hand(tokens: list[int], length: int, pad: int | None, bos: int | None, eos: int | None) -> list[list[int]]:
    lines = []
    while tokens:
        line = [] if bos is None or tokens[0] == bos else [bos]
        while tokens and len(line) < length:
            line.append(tokens.pop(0))
        if eos is not None and line[-1] != eos:
            if len(line) == length:
                tokens.insert(0, line.pop())
            line.append(eos)
        if len(line) == length or pad is not None:
            lines.append(line + [pad or 0] * (length - len(line)))
    return lines


@settings(max_examples=20)
@given(DOCUMENTS, st.integers(3, 30), st.sampled_from([None, 7]), SEPARATORS, SEPARATORS, st.integers(0, 5))
def test_documents_in_lines(
    documents: list[list[int]], length: int, pad: int | None, bos: int | None, eos: int | None, skipped: int
) -> None:
    """Pack documents with BOS and EOS of lines, which are added, or found if documents have them (0 and 1) anyway."""
    lines = lines_by_hand([token for document in documents for token in document], length, pad, bos, eos)
    cut_everywhere(Packed(Given([documents]), length=length, pad=pad, bos=bos, eos=eos), lines, skipped)


def whole_documents_by_hand(
    documents: list[list[int]], length: int, bos: int | None, eos: int | None
) -> list[list[int]]:
    def closed(tokens: list[int]) -> list[int]:
        return tokens if eos is None or tokens[-1] == eos else [*tokens, eos]

    lines, waiting = [], [document for document in documents if document]
    while waiting:
        line = [] if bos is None or waiting[0][0] == bos else [bos]
        eviction = length - len(line)
        if len(closed(waiting[0])) > eviction:
            closing = len(closed(waiting[0][:eviction])) > eviction
            taken = eviction - closing
            line = line + waiting[0][:taken] + [eos or 0] * closing
            waiting[0] = waiting[0][taken:]
        else:
            while waiting and len(closed(line + waiting[0])) <= length:
                line = line + waiting.pop(0)
        lines.append(closed(line) + [7] * (length - len(closed(line))))
    return lines


@settings(max_examples=20)
@given(DOCUMENTS, st.integers(3, 30), SEPARATORS, SEPARATORS, st.integers(0, 5))
def test_whole_documents_in_lines(
    documents: list[list[int]], length: int, bos: int | None, eos: int | None, skipped: int
) -> None:
    lines = whole_documents_by_hand(documents, length, bos, eos)
    cut_everywhere(Packed(Given([documents]), length=length, pad=7, bos=bos, eos=eos, split=False), lines, skipped)


def test_a_line_has_one_bos_and_one_eos() -> None:
    source = Packed(Given([[[0, 5, 6, 9], [0, 7, 8, 9]]]), length=4, bos=0, eos=9)
    assert lists(whole(source)) == [[0, 5, 6, 9], [0, 7, 8, 9]]
    source = Packed(Given([[[5, 6, 7, 8, 9]]]), length=4, bos=0, eos=9, pad=-1)
    assert lists(whole(source)) == [[0, 5, 6, 9], [0, 7, 8, 9]]
    with pytest.raises(InvalidArgumentError, match="split=False needs a token that fills up lines"):
        Packed(Given([[[1]]]), length=4, split=False)
    with pytest.raises(InvalidArgumentError, match="length must leave room for a token besides BOS and EOS, got 2"):
        Packed(Given([[[1]]]), length=2, bos=0, eos=9)


@settings(max_examples=20)
@given(DOCUMENTS, st.frozensets(st.integers(0, 99), max_size=60), st.integers(1, 5), st.integers(0, 5))
def test_documents_are_stripped_or_dropped(
    documents: list[list[int]], strip: frozenset[int], least: int, skipped: int
) -> None:
    def stripped(document: list[int]) -> list[int]:
        inside = [at for at, token in enumerate(document) if token not in strip]
        return document[inside[0] : inside[-1] + 1] if inside else []

    kept = [document for document in map(stripped, documents) if len(document) >= least]
    source = Chunked(Given([documents]), length=4, eos=-1, strip_tokens=strip, min_length=least)
    cut_everywhere(source, pieces_by_hand(kept, 4, None, -1), skipped)


def test_default_settings_are_not_described() -> None:
    """A state that was saved before there were such settings goes on."""
    source = Given([[[1]]])
    assert set(Packed(source, length=3).settings()) == {"length", "pad"}
    assert set(Chunked(source, length=3).settings()) == {"length", "bos", "eos", "longest"}
    given = Chunked(source, length=3, strip_tokens=[2, 0], min_length=2).settings()
    assert (given["strip_tokens"], given["min_length"]) == ([0, 2], 2)
    assert Packed(source, length=3, bos=1).settings()["bos"] == 1
    with pytest.raises(InvalidArgumentError, match="strip_tokens must be a list of token ids, got 2"):
        Chunked(source, length=3, strip_tokens=2)  # type: ignore[arg-type]


def test_the_kinds_of_documents(tmp_path: Path) -> None:
    np.arange(3, dtype=np.uint16).tofile(tmp_path / "tokens")
    documents = [
        [0, 1, 2],
        (0, 1, 2),
        np.arange(3, dtype=np.uint16),
        np.arange(6)[::2] // 2,
        np.memmap(tmp_path / "tokens", np.uint16),
        torch.arange(3, dtype=torch.int32),
        torch.arange(6)[::2] // 2,
        [],
        torch.zeros(0),
    ]
    assert lists(whole(Chunked(Given([documents]), length=8))) == [[0, 1, 2]] * 7
    assert lists(whole(Packed(Given([documents]), length=21))) == [[0, 1, 2] * 7]


@pytest.mark.parametrize(
    ("document", "what"),
    [
        ("text", "str"),
        ([1.5], r"float64 of shape \(1,\)"),
        ([[1], [2, 3]], r"object of shape \(2,\)"),
        (torch.ones(2, 2, dtype=torch.int64), r"int64 of shape \(2, 2\)"),
        (np.array(True), r"bool of shape \(\)"),
    ],
)
def test_what_is_no_document(document: Any, what: str) -> None:
    for layer in (Chunked(Given([[[1], document]]), length=1), Packed(Given([[[1], document]]), length=1)):
        cursor = layer.open(0, 2, 1)
        next(cursor)
        with pytest.raises(DatasetError, match=rf"document 1 of shard 0 in epoch 2 must be .* got {what}. Use Mapped"):
            next(cursor)


def test_a_document_longer_than_allowed() -> None:
    source = Chunked(Given([[[1]], [[1, 2, 3], [1, 2, 3, 4]]]), length=2, bos=0, longest=3)
    cursor = source.open(1, 0, 1)
    assert cursor.skip(2) == 2
    message = r"document 1 of shard 1 in epoch 0 must have at most longest=3 tokens, got 4"
    with pytest.raises(DatasetError, match=message):
        next(cursor)


def test_a_token_that_no_int64_holds() -> None:
    """Refuse a token that would become negative as an int64."""
    cursor = Packed(Given([[np.array([1, 1 << 63], np.uint64)]]), length=2).open(0, 0, 1)
    with pytest.raises(DatasetError, match="tokens must fit int64, got 9223372036854775808"):
        next(cursor)


def test_a_state_holds_no_text() -> None:
    source = Packed(Chunked(Given([[list(range(100_000))] * 3]), length=70_000), length=1000)
    cursor = source.open(0, 0, 1)
    cursor.skip(150)
    assert len(encode_state(cursor.saved_position())) < 300


def test_writing_to_a_line_changes_no_other() -> None:
    document = torch.arange(8)
    for source in (Packed(Given([[document]]), length=4), Chunked(Given([[document]]), length=4)):
        cursor = source.open(0, 0, 1)
        next(cursor).fill_(-1)
        next(cursor).fill_(-1)
    assert document.tolist() == list(range(8))


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (lambda source: Packed(source, length=4), r"more than 8 tokens, .* got 2"),
        (lambda source: Chunked(source, length=4), r"more than 2 pieces, .* got 1"),
    ],
)
def test_a_document_that_has_become_shorter(layer: Any, message: str) -> None:
    cursor = layer(Given([[list(range(10))]])).open(0, 0, 1)
    cursor.skip(2)
    cursor = layer(Given([[[0, 1]]])).open(0, 0, 1, cursor.saved_position())
    with pytest.raises(DatasetError, match=message):
        next(cursor)
