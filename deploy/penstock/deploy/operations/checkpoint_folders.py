"""`penstock checkpoint ls`, `show` and `verify`: what is in a folder or bucket of checkpoints, or in one of them, and
whether it is what was written."""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.deploy.console.tables import Table, show
from penstock.proto.errors import CheckpointCorruptError, CheckpointError, CheckpointNotFoundError, PenstockError
from penstock.proto.state.checkpoint_catalog import is_bucket
from penstock.proto.state.checkpoint_files import (
    FoundCheckpoint,
    Manifest,
    checkpoints,
    damage,
    leftovers,
    read_manifest,
)
from penstock.proto.state.torch_checkpoints import described, is_torchs, torch_checkpoints, written_ns
from penstock.runtime.telemetry.units import size

if TYPE_CHECKING:
    from penstock.client.checkpoint.restoring.places import BucketPlace, Place

NONE_INTACT = "No checkpoint here is intact: restore the files from a copy, or start without a checkpoint"
NO_CHECKSUMS = "no checksums"
TIMEOUT_S = 60.0
"""Seconds for a request of a bucket."""
_IN_BUCKET = re.compile(r"(s3://.+)/step-([0-9]+)(?:-[0-9a-f]+)?")


@dataclass(frozen=True)
class _Row:
    name: str
    address: str
    step: int
    """-1 if unknown."""
    manifest: Manifest | None
    written_s: float
    """Seconds since 1970."""
    has_checksums: bool
    wrong: list[str]


def show_list(where: str, as_json: bool) -> None:
    """Print all checkpoints at a path or URL, ours and torch's. Files are compared by size alone."""
    if is_bucket(where):
        rows = _in_bucket(_bucket(where)[0], contents=False)
    else:
        path = Path(where)
        rows = [_row(path, found, [found.damage] if found.damage else []) for found in _ours(path)]
        rows += [_row(path, described(each), []) for each in torch_checkpoints(path)]
    if not rows:
        raise _none_at(where)
    _print(where, rows, as_json)


def show_verification(where: str, as_json: bool) -> None:
    """Read a checkpoint, or all in a folder or bucket, and print what differs from what was written. Raises
    CheckpointCorruptError for damage, CheckpointError for a checkpoint without checksums."""
    if is_bucket(where):
        place, step = _bucket(where)
        rows = _in_bucket(place, contents=True, step=step)
    else:
        path = Path(where)
        if is_torchs(path):
            raise CheckpointError(f"{path} was written by torch's dcp.save, which keeps no checksums to compare with")
        rows = [
            _row(
                path,
                found,
                [found.damage] if found.manifest is None else list(damage(found.path, found.manifest, contents=True)),
            )
            for found in _ours(path)
        ]
    if not rows:
        raise _none_at(where)
    _print(where, rows, as_json)
    damaged = sum(bool(row.wrong) for row in rows)
    if damaged:
        intact = next((row.address for row in rows if not row.wrong), None)
        raise CheckpointCorruptError(
            f"{damaged} of {len(rows)} checkpoints {'is' if damaged == 1 else 'are'} damaged (see above). "
            + (f"Resume from {intact}, the newest intact checkpoint" if intact else NONE_INTACT)
        )


def show_content(where: str, as_json: bool) -> None:
    """Print the names, dtypes, shapes and bytes of a checkpoint's values."""
    from penstock.client.checkpoint.restoring.whole import list_values

    place, address = one_checkpoint(where)
    values = list_values(place, address)
    if as_json:
        print(json.dumps({"path": address, "values": [value._asdict() for value in values]}, indent=2))
        return
    listed = Table(
        f"{address}: {len(values):,} values, {size(sum(value.nbytes for value in values))}",
        ("name", "dtype", "shape", "bytes>"),
        [
            (value.name, value.dtype, "" if value.shape is None else str(value.shape), f"{value.nbytes:,}")
            for value in values
        ],
    )
    show([listed])


def one_checkpoint(where: str) -> tuple[Place, str]:
    """Return the place and the address of a checkpoint, ours or torch's: the one at `where`, or else the newest of ours
    in that folder or bucket."""
    from penstock.client.checkpoint.restoring.places import FolderPlace

    if is_bucket(where):
        place, step = _bucket(where)
        found = place.choose(step)
        if found is None:
            raise _none_at(where)
        return place, found.address
    path = Path(where).absolute()
    if not is_torchs(path):
        ours = _ours(path)
        if not ours:
            raise _none_at(where)
        path = ours[0].path
    return FolderPlace(path.parent), str(path)


def _bucket(where: str) -> tuple[BucketPlace, int | None]:
    """Return a bucket's place, and the step if `where` is a checkpoint in it."""
    from penstock.client.checkpoint.restoring.places import BucketPlace

    one = _IN_BUCKET.fullmatch(where.rstrip("/"))
    return BucketPlace(one[1] if one else where, TIMEOUT_S, None, None), int(one[2]) if one else None


def _in_bucket(place: BucketPlace, *, contents: bool, step: int | None = None) -> list[_Row]:
    rows = []
    for found in place.listed():
        if step in (None, found.step):
            address, manifest, wrong = place.address_of(found.step, found.save), None, []
            try:
                with place.open(address) as (source, manifest):
                    wrong = list(source.damage(manifest, contents=contents))
            except PenstockError as error:
                wrong = [error.message]
            rows.append(_Row(found.folder, address, found.step, manifest, float(found.saved_s), True, wrong))
    return rows


def _row(path: Path, found: FoundCheckpoint, wrong: list[str]) -> _Row:
    name = str(found.path.relative_to(path)) if found.path != path else path.name
    written_s = written_ns(found.path) / 1e9
    return _Row(name, str(found.path), found.step, found.manifest, written_s, not is_torchs(found.path), wrong)


def _none_at(where: str) -> CheckpointNotFoundError:
    torchs = [] if is_bucket(where) else torch_checkpoints(Path(where))
    offer = f"; torch's dcp.save wrote {torchs[-1]}: name that" if torchs else ": name the folder of one, or of several"
    return CheckpointNotFoundError(f"{where} has no checkpoint of AsyncCheckpointer{offer}")


def _ours(path: Path) -> list[FoundCheckpoint]:
    if not path.is_dir():
        raise CheckpointNotFoundError(f"{path} must be the folder of a checkpoint, or a folder of checkpoints")
    try:
        manifest = read_manifest(path)
        return [FoundCheckpoint(manifest.step, path, manifest, "; ".join(damage(path, manifest)))]
    except CheckpointCorruptError as error:
        return [FoundCheckpoint(-1, path, None, error.message)]
    except CheckpointNotFoundError:
        return checkpoints(path)


def _print(where: str, rows: list[_Row], as_json: bool) -> None:
    aside = [] if is_bucket(where) else [each.name for each in leftovers(Path(where))]
    if as_json:
        print(json.dumps(_as_dict(where, rows, aside), indent=2))
        return
    show(_tables(where, rows))
    for name in aside:
        print(
            f"{name} belongs to a save that was interrupted or still runs. It is not checked; the next save removes it."
        )


def _as_dict(where: str, rows: list[_Row], aside: list[str]) -> dict[str, Any]:
    return {
        "path": where,
        "ok": not any(row.wrong for row in rows),
        "checkpoints": [
            {
                "path": row.address,
                "step": None if row.step < 0 else row.step,
                "ranks": row.manifest.ranks if row.manifest else None,
                "files": len(row.manifest.files) if row.manifest else None,
                "bytes": row.manifest.nbytes if row.manifest else None,
                "written_at": row.written_s,
                "has_checksums": row.has_checksums,
                "damage": row.wrong,
            }
            for row in rows
        ],
        "leftovers": aside,
    }


def _tables(where: str, rows: list[_Row]) -> list[Table]:
    columns = "name", "step>", "ranks>", "files>", "size>", "written", "found"
    listed = Table(f"Checkpoints at {where}, the newest first", columns)
    damaged = Table("Damaged", ("name", "what"))
    for row in rows:
        manifest, numbers = row.manifest, ("", "", "")
        if manifest:
            numbers = (str(manifest.ranks or ""), str(len(manifest.files)), size(manifest.nbytes))
        state = "damaged" if row.wrong else "whole" if row.has_checksums else NO_CHECKSUMS
        step = "" if row.step < 0 else str(row.step)
        written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row.written_s))
        listed.rows.append((row.name, step, *numbers, written, state))
        damaged.rows.extend((row.name, what) for what in row.wrong)
    return [listed, damaged]
