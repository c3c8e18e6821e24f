"""Datasets in local folders: their index, their content, and a check that every sample can be read."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from penstock.data import convert_dataset, index_folder
from penstock.data.formats.contents import PROBE_BYTES, PROBES, check_content, content_now
from penstock.data.formats.index import INDEX, local_index, read_index
from penstock.data.formats.shards import Shard
from penstock.deploy.console.exit_codes import exit_code
from penstock.deploy.operations.state_values import brief
from penstock.proto.errors import DatasetError
from penstock.runtime.telemetry.logs import printable

if TYPE_CHECKING:
    from penstock.data import StreamingDataset

VERIFIED_AT_ONCE = 64
_COMPARED = {
    "whole": "all bytes",
    "footer": "the footer",
    "pieces": f"{PROBES} pieces of {PROBE_BYTES >> 10} KiB",
    "": "the size",
}
"""What is compared of a file without hashes, by the kind of its digest (formats/contents.py)."""


def show_index(folder: str, format: str | None, as_json: bool, **settings: Any) -> None:
    """Write the index of a folder, and print what was found. `settings`: arguments of index_folder."""
    shards = index_folder(folder, format, **settings)
    found = _counts(folder, shards)
    splits = Counter(split for shard in shards for split in shard.settings.get("splits", ()))
    _print(found | ({"splits": dict(splits)} if splits else {}), as_json)


def show_conversion(source: str, dest: str, to: str, as_json: bool, **settings: Any) -> None:
    if "://" not in source:
        _index_of(Path(source).expanduser())
    done = convert_dataset(source, dest, to, **settings)
    found: dict[str, Any] = {
        **_counts(dest, done.shards),
        "parts": done.parts,
        "parts_made_now": done.made,
        "rows_digest": done.digest,
        "columns": dict(done.columns),
    }
    _print(found, as_json)


def show_inspection(folder: Path, samples: int, as_json: bool) -> None:
    shards = _shards(folder)
    found: dict[str, Any] = _counts(folder, shards)
    with _opened(folder, shards) as dataset:
        first = [dataset[number] for number in range(min(max(samples, 1), len(dataset)))]
    found["columns"] = {name: type(value).__name__ for name, value in (first[0] if first else {}).items()}
    found["first_samples"] = [{name: brief(value) for name, value in sample.items()} for sample in first[:samples]]
    _print(found, as_json)


def show_verification(folder: Path, as_json: bool) -> int:
    """Read all samples, and print what was compared with the index, and the damaged or missing shards with the first
    error of each. Return the exit code."""
    shards = _shards(folder)
    stored = [file.packed or file.raw for shard in shards for file in shard.files]
    algorithms = sorted(set.intersection(*(set(file.hashes) for file in stored))) if stored else []
    damaged: list[dict[str, str]] = []
    number = 0
    with _opened(folder, shards, validate_hash=algorithms[0] if algorithms else None) as dataset:
        for shard in shards:
            end = number + shard.samples
            try:
                while number < end:
                    dataset.__getitems__(list(range(number, min(end, number + VERIFIED_AT_ONCE))))
                    number += VERIFIED_AT_ONCE
                check_content(shard, content_now(shard, folder / shard.name), folder / shard.name)
            except DatasetError as error:
                damaged.append({"file": shard.name, "error": error.message})
            number = end
    kinds = {} if algorithms else dict(Counter(_COMPARED[shard.content.partition(":")[0]] for shard in shards))
    found: dict[str, Any] = {"verified_by": algorithms[0] if algorithms else ", ".join(sorted(kinds))}
    if kinds.keys() - {_COMPARED["whole"]}:
        found["not_compared"] = (
            "other bytes of the files, of which a change is noticed only if a sample cannot be read. Index the folder "
            "with --hashes, as long as it is whole, to compare all bytes"
        )
    _print(
        {**_counts(folder, shards), **found, "damaged": damaged}, as_json, "none" if len(found) == 1 else "none found"
    )
    return exit_code(DatasetError("")) if damaged else 0


@contextlib.contextmanager
def _opened(folder: Path, shards: Sequence[Shard], **options: Any) -> Iterator[StreamingDataset]:
    """Open a dataset without writing into its folder; decompressed shards go into a temporary one."""
    from penstock.data import StreamingDataset  # imports torch

    split = "*" if any("splits" in shard.settings for shard in shards) else None
    with tempfile.TemporaryDirectory() as scratch:
        dataset = StreamingDataset(str(folder.absolute()), scratch, split=split, **options)
        try:
            yield dataset
        finally:
            dataset.close()


def _shards(folder: Path) -> list[Shard]:
    path = _index_of(folder)
    try:
        return read_index(path.read_bytes(), str(path))
    except OSError as error:
        raise DatasetError(f"{path} cannot be read: {error.strerror}. Check that this user may read it") from error


def _index_of(folder: Path) -> Path:
    path = local_index(folder)
    if not folder.is_dir():
        found = "a file" if folder.exists() else "nothing"
        raise DatasetError(f"{folder} must be the folder of a dataset, got {found}. Give the folder that has {INDEX}")
    if not path.exists():
        raise DatasetError(f"{folder} must have {INDEX}. Write it with `penstock data index {folder}`")
    return path


def _counts(folder: str | Path, shards: Sequence[Shard]) -> dict[str, Any]:
    return {
        "folder": str(folder),
        "formats": dict(Counter(shard.format for shard in shards)),
        "shards": len(shards),
        "samples": sum(shard.samples for shard in shards),
        "bytes": sum(shard.size for shard in shards),
    }


def _print(found: Mapping[str, Any], as_json: bool, nothing: str = "none") -> None:
    """`nothing`: what an empty list is printed as."""
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    for name, value in found.items():
        if isinstance(value, list):
            typer.echo(f"{name.replace('_', ' ')}: {'' if value else nothing}".rstrip())
            for number, each in enumerate(value):
                typer.echo(f"  {number}: " + printable(", ".join(f"{key}={text}" for key, text in each.items())))
        elif isinstance(value, dict):
            parts = ", ".join(f"{key}: {text}" for key, text in value.items())
            typer.echo(f"{name}: " + printable(parts))
        else:
            typer.echo(f"{name.replace('_', ' ')}: {printable(f'{value:,}' if type(value) is int else str(value))}")
