"""Mixtures whose weights are shares of tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from given_shards import Given, again, first, whole
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.data import Mixture, Packed
from penstock.proto.errors import DatasetError, InvalidArgumentError

LENGTHS = st.lists(st.integers(1, 50), min_size=1, max_size=8)


def corpus(number: int, lengths: list[int]) -> Given:
    """Return one shard of documents that consist of the source's number."""
    return Given([[[number] * length for length in lengths]])


def within_one_document(documents: list[Any], parts: list[int]) -> None:
    """Check that every prefix has each source's share of the tokens, to within the longest document so far."""
    tokens, longest = [0] * len(parts), max(map(len, documents), default=0)
    for document in documents:
        tokens[document[0]] += len(document)
        for part, had in zip(parts, tokens, strict=True):
            assert abs(had * sum(parts) - part * sum(tokens)) <= longest * sum(parts)


@settings(max_examples=40)
@given(st.lists(st.tuples(LENGTHS, st.integers(1, 9)), min_size=1, max_size=6), st.integers(0, 90))
def test_token_shares_are_exact_to_one_document(mixed: list[tuple[list[int], int]], at: int) -> None:
    parts = [part for _, part in mixed]
    source = Mixture([corpus(n, lengths) for n, (lengths, _) in enumerate(mixed)], parts, by="tokens")
    documents = first(source, 120)
    within_one_document(documents, parts)
    cursor = source.open(0, 0, 1)
    assert cursor.skip(at) == at
    cursor = again(source, cursor)
    assert [next(cursor) for _ in range(120 - at)] == documents[at:]


def test_long_and_short_documents_share_lines() -> None:
    """Mix by tokens, because by samples documents of 10 and of 1,000 tokens would have 1% and 99% of the tokens, as in
    many loaders."""
    sources = [corpus(0, [10] * 40), corpus(1, [1000] * 40)]
    tokens = torch.stack(first(Packed(Mixture(sources, [0.5, 0.5], by="tokens"), length=100), 400))
    assert abs(float((tokens == 0).double().mean()) - 0.5) < 0.03
    by_samples = torch.stack(first(Packed(Mixture(sources, [0.5, 0.5]), length=100), 400))
    assert float((by_samples == 0).double().mean()) < 0.02


@settings(max_examples=40)
@given(st.lists(st.lists(st.integers(1, 9), max_size=6), min_size=1, max_size=4), st.data())
def test_ends(lengths: list[list[int]], data: st.DataObject) -> None:
    parts = data.draw(st.lists(st.integers(0, 3), min_size=len(lengths), max_size=len(lengths)).filter(any))
    corpora = [corpus(number, each) for number, each in enumerate(lengths)]
    live = [number for number, part in enumerate(parts) if part]
    to_last = Mixture(corpora, parts, stop="last", by="tokens")
    documents = whole(to_last)
    for number in live:
        assert [document for document in documents if document[0] == number] == whole(corpora[number])
    assert len(documents) == sum(to_last.lengths(0) or []) == sum(len(lengths[number]) for number in live)
    to_first = whole(Mixture(corpora, parts, stop="first", by="tokens"))
    within_one_document(to_first, parts)
    assert any(sum(document[0] == number for document in to_first) == len(lengths[number]) for number in live)


def test_what_has_no_tokens_is_refused() -> None:
    for sample, name in (("text", "str"), (np.zeros((2, 2), int), r"ndarray of shape \(2, 2\)")):
        source = Mixture([Given([[[1]]]), Given([[sample]])], [1, 1], by="tokens")
        with pytest.raises(DatasetError, match=rf"sources\[1\] of a Mixture.by='tokens'., shard 0 .* got {name}"):
            next(source.open(0, 0, 1))
    with pytest.raises(InvalidArgumentError, match="by must be one of samples, tokens, got 'words'"):
        Mixture([Given([[[1]]])], [1], by="words")  # type: ignore[arg-type]


def test_mixture_by_samples_description_is_fixed() -> None:
    """A state that was saved before there were tokens goes on."""
    sources = [corpus(0, [1])]
    assert set(Mixture(sources, [1]).described()) == {"kind", "parts", "stop", "sources"}
    assert Mixture(sources, [1], by="tokens").described()["by"] == "tokens"
