"""Megatron-core's token files beside its own IndexedDataset: the same documents, and the same parts of a split."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch

from penstock.data import MegatronDocuments, megatron_blend
from penstock.data.sharded.megatron_blend import MegatronPart

indexed = pytest.importorskip("megatron.core.datasets.indexed_dataset")

pytestmark = pytest.mark.filterwarnings("ignore")


def built(prefix: Path, dtype: type[np.number], documents: int, *, multimodal: bool = False) -> None:
    draw = np.random.default_rng(documents)
    builder = indexed.IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype, multimodal=multimodal)
    for _ in range(documents):
        lengths = draw.integers(0, 50, draw.integers(1, 4)).tolist()
        tokens = torch.from_numpy(draw.integers(0, 100, sum(lengths)))
        builder.add_document(tokens, lengths, [number % 2 for number in range(len(lengths))] if multimodal else None)
    builder.finalize(f"{prefix}.idx")


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int16, np.int32, np.int64, np.uint16, np.float32, np.float64])
@pytest.mark.parametrize("multimodal", [False, True])
def test_documents_are_equal(dtype: type[np.number], multimodal: bool, tmp_path: Path) -> None:
    built(tmp_path / "a", dtype, 50, multimodal=multimodal)
    built(tmp_path / "b", dtype, 30, multimodal=multimodal)
    merged = indexed.IndexedDatasetBuilder(str(tmp_path / "all.bin"), dtype=dtype, multimodal=multimodal)
    for name in ("a", "b"):
        merged.add_index(str(tmp_path / name))
    merged.finalize(str(tmp_path / "all.idx"))
    theirs, ours = indexed.IndexedDataset(str(tmp_path / "all"), multimodal), MegatronDocuments(tmp_path / "all")
    bounds = theirs.document_indices.tolist()
    assert len(ours) == len(bounds) - 1 == 80
    for number in range(80):
        parts = [theirs[at] for at in range(bounds[number], bounds[number + 1])]
        tokens = [part[0] if multimodal else part for part in parts]
        sample = ours.sample(number)
        assert ours[number].dtype == tokens[0].dtype
        assert ours[number].tolist() == np.concatenate(tokens).tolist() == sample["tokens"].tolist()
        assert sample["sequence_lengths"].tolist() == [len(one) for one in tokens]
        if multimodal:
            assert sample["modes"].tolist() == [int(mode) for _, mode in parts]


@pytest.mark.parametrize("split", ["969,30,1", "1,1,1", "99,1,0", "0.8,0.2"])
def test_parts_are_megatrons(split: str, tmp_path: Path) -> None:
    config = pytest.importorskip("megatron.core.datasets.blended_megatron_dataset_config")
    built(tmp_path / "a", np.int32, 333)
    weights = config.parse_and_normalize_split(split)
    documents = MegatronDocuments(tmp_path / "a")
    for part, bounds in zip(get_args(MegatronPart), config.convert_split_vector_to_split_matrix(weights), strict=True):
        count = 0 if bounds is None else round(bounds[1] * 333.0) - round(bounds[0] * 333.0)
        if not count:
            continue
        source = megatron_blend([f"{tmp_path}/a"], shards=1, split=split, part=part, shuffle=False, by="samples")
        cursor = source.open(0, 0, 1)
        first = round(bounds[0] * 333.0)
        for at in range(first, first + count):
            assert next(cursor).tolist() == documents[at].tolist()
        assert next(cursor).tolist() == documents[first].tolist()  # the next epoch
        cursor.close()
