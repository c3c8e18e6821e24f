"""Samples that are made up."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from penstock.data import MapLoader, SyntheticDataset
from penstock.proto.errors import StateMismatchError


class Pair(NamedTuple):
    image: Any
    label: Any


SPEC = {
    "tokens": torch.empty(5, dtype=torch.int64),
    "pair": Pair(torch.empty(2, 3, dtype=torch.bfloat16), lambda index, generator: index % 10),
    "more": [torch.empty((), dtype=torch.bool), torch.empty(0, 4), torch.empty(3, dtype=torch.complex64)],
}


def test_samples_have_the_form_and_are_repeatable() -> None:
    one, other = SyntheticDataset(SPEC, 7), SyntheticDataset(SPEC, 7)
    sample = one[3]
    assert sample["tokens"].shape == (5,)
    assert 0 <= int(sample["tokens"].min()) <= int(sample["tokens"].max()) < 128
    assert isinstance(sample["pair"], Pair)
    assert sample["pair"].image.dtype == torch.bfloat16
    assert sample["pair"].label == 3
    assert [(leaf.dtype, leaf.shape) for leaf in sample["more"]] == [
        (torch.bool, ()),
        (torch.float32, (0, 4)),
        (torch.complex64, (3,)),
    ]
    assert torch.equal(other[3]["tokens"], sample["tokens"])
    assert torch.equal(other[-4]["tokens"], sample["tokens"])
    assert not torch.equal(one[2]["tokens"], sample["tokens"])
    assert not torch.equal(SyntheticDataset(SPEC, 7, seed=1)[3]["tokens"], sample["tokens"])
    assert len(one) == 7


def test_another_form_is_refused_by_a_state() -> None:
    state = MapLoader(SyntheticDataset(SPEC, 7), batch_size=2).state_dict()
    MapLoader(SyntheticDataset(SPEC, 7), batch_size=2).load_state_dict(state)
    with pytest.raises(StateMismatchError, match="synthetic"):
        MapLoader(SyntheticDataset({**SPEC, "tokens": torch.empty(6)}, 7), batch_size=2).load_state_dict(state)
