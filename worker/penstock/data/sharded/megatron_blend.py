"""Mixture of Megatron-core's token files, from the blend of a Megatron job: a list of prefixes, or of alternating
weights and prefixes (--data-path); a file with it (--data-args-path); or a JSON file with one for each part (train,
valid, test: --per-split-data-args-path). --split divides each file's documents into parts."""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

from penstock.data.arguments import one_of
from penstock.data.formats.megatron import MegatronDocuments
from penstock.data.loading.streaming_loader import BLOCK
from penstock.data.sharded.layers.mixture import By, Mixture, Stop
from penstock.data.sharded.sources.logical_shards import LogicalShards
from penstock.data.streams import stream_names
from penstock.proto.errors import DatasetError, InvalidArgumentError
from penstock.runtime.files.plain_files import read_plain

MegatronPart = Literal["train", "valid", "test"]
PARTS: tuple[MegatronPart, ...] = get_args(MegatronPart)
MAX_BYTES = 64 << 20


def megatron_blend(
    blend: str | os.PathLike[str] | Sequence[str | float],
    *,
    shards: int,
    split: str | None = None,
    part: MegatronPart = "train",
    shuffle: bool = True,
    shuffle_block: int | None = BLOCK,
    by: By = "tokens",
    stop: Stop = "never",
) -> Mixture:
    """Return a Mixture of the documents of Megatron's token files, mixed by the blend's weights.

        source = Packed(megatron_blend("blend.txt", shards=64, split="969,30,1"), length=4096)

    Args:
        blend: list of prefixes of token files (PREFIX.bin and PREFIX.idx), or of alternating weights and prefixes, as
            in Megatron's --data-path; or the path of a file with such a list, or of a .json file with a list for each
            part. Without weights, a file's weight is the number of tokens that the part has of it. Prefixes in a file
            are relative to the working directory, as in Megatron.
        shards, shuffle, shuffle_block: see LogicalShards.
        split: weights of the parts, such as "969,30,1". Each part gets the same documents as in Megatron. None: every
            part has all documents, for a .json file that lists different files for each.
        part: part to read: "train", "valid" or "test".
        by, stop: see Mixture. The default "tokens" is Megatron's unit, whose samples have equal lengths.

    Raises:
        InvalidArgumentError: an argument is invalid.
        DatasetError, ShardCorruptError: a file is missing or damaged, or a part has no documents.
    """
    one_of("part", part, PARTS)
    prefixes, weights = _listed(_given(blend, part))
    bounds = (0.0, 1.0) if split is None else _bounds(split, part)
    parts = [_part(MegatronDocuments(prefix), bounds, part) for prefix in prefixes]
    sources = [
        LogicalShards([documents], shards=shards, shuffle=shuffle, shuffle_block=shuffle_block, names=[prefix])
        for prefix, documents in zip(prefixes, parts, strict=True)
    ]
    return Mixture(
        sources,
        weights or [documents.num_tokens for documents in parts],
        by=by,
        stop=stop,
        names=stream_names(prefixes),
    )


def _given(blend: str | os.PathLike[str] | Sequence[str | float], part: MegatronPart) -> list[str]:
    if not isinstance(blend, str | os.PathLike):
        return [str(each).strip() for each in blend]
    path = Path(blend)
    try:
        text = read_plain(path, MAX_BYTES).decode()
    except (OSError, ValueError) as error:
        raise DatasetError(f"the blend file {path} cannot be read: {error}") from error
    if path.suffix != ".json":
        return text.split()
    try:
        lists = json.loads(text)
        return [str(each).strip() for each in lists[part]]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DatasetError(
            f"the blend file {path} must be a JSON object with a list for {part!r}: {error!r}"
        ) from error


def _listed(given: list[str]) -> tuple[list[str], list[float] | None]:
    """As in Megatron, a list has weights if its length is even and every second entry a number."""
    if not given:
        raise InvalidArgumentError("blend must have at least one prefix, got none. Name the token files to mix")
    if len(given) % 2:
        return given, None
    weights = []
    for text in given[::2]:
        try:
            weights.append(float(text))
        except ValueError:
            continue
    if weights and len(weights) < len(given) // 2:
        raise InvalidArgumentError(
            f"blend must have a weight before each prefix, or none, got {' '.join(given)[:300]!r}"
        )
    return (given[1::2], weights) if weights else (given, None)


def _bounds(split: str, part: MegatronPart) -> tuple[float, float]:
    """Return where a part begins and ends, as fractions of the documents, rounded as in Megatron."""
    try:
        weights = [float(text) for text in re.findall(r"[.0-9]+", split)] if re.fullmatch(r"[\s.,/0-9]+", split) else []
    except ValueError:  # a text such as "969.30.1"
        weights = []
    weights += [0.0] * (len(PARTS) - len(weights))
    total = sum(weights)
    if len(weights) > len(PARTS) or not total:
        raise InvalidArgumentError(f"split must be up to three weights such as '969,30,1', got {split!r:.100}")
    ends = [0.0, *itertools.accumulate(weight / total for weight in weights)]
    at = PARTS.index(part)
    return ends[at], ends[at + 1]


def _part(documents: MegatronDocuments, bounds: tuple[float, float], part: MegatronPart) -> MegatronDocuments:
    begin, end = (round(bound * float(len(documents))) for bound in bounds)
    if begin >= end:
        raise DatasetError(
            f"{documents.prefix}: the part {part!r} has none of {len(documents)} documents. Change split"
        )
    return documents if (begin, end) == (0, len(documents)) else documents[begin:end]
