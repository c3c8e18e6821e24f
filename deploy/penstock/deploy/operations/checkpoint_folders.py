"""`penstock checkpoint ls`, `show` and `verify`: what is in a folder of checkpoints, or in one, and whether it is what
was written."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.deploy.console.tables import Table, show
from penstock.proto.errors import CheckpointCorruptError, CheckpointError, CheckpointNotFoundError
from penstock.proto.state.checkpoint_files import FoundCheckpoint, checkpoints, damage, leftovers, read_manifest
from penstock.proto.state.torch_checkpoints import described, is_torchs, torch_checkpoints, written_ns
from penstock.runtime.telemetry.units import size

_Checked = tuple[FoundCheckpoint, list[str]]
"""A checkpoint, and what is wrong with it."""
NONE_INTACT = "No checkpoint here is intact: restore the files from a copy, or start without a checkpoint"
NO_CHECKSUMS = "no checksums"


def show_list(path: Path, as_json: bool) -> None:
    """Print all checkpoints at `path`, ours and torch's. Files are compared by size alone."""
    ours = [(found, [found.damage] if found.damage else []) for found in _ours(path)]
    torchs: list[_Checked] = [(described(each), []) for each in torch_checkpoints(path)]
    if not ours and not torchs:
        raise _none_at(path)
    _print(path, [*ours, *torchs], as_json)


def show_verification(path: Path, as_json: bool) -> None:
    """Read a checkpoint, or all in a folder, and print what differs from what was written. Raises
    CheckpointCorruptError for damage, CheckpointError for a checkpoint without checksums."""
    if is_torchs(path):
        raise CheckpointError(f"{path} was written by torch's dcp.save, which keeps no checksums to compare with")
    ours = _ours(path)
    if not ours:
        raise _none_at(path)
    checked = [
        (found, [found.damage] if found.manifest is None else list(damage(found.path, found.manifest, contents=True)))
        for found in ours
    ]
    _print(path, checked, as_json)
    damaged = sum(bool(wrong) for _, wrong in checked)
    if damaged:
        intact = next((found.path for found, wrong in checked if not wrong), None)
        raise CheckpointCorruptError(
            f"{damaged} of {len(checked)} checkpoints {'is' if damaged == 1 else 'are'} damaged (see above). "
            + (f"Resume from {intact}, the newest intact checkpoint" if intact else NONE_INTACT)
        )


def show_content(path: Path, as_json: bool) -> None:
    """Print the names, dtypes, shapes and bytes of a checkpoint's values."""
    from penstock.client.checkpoint.restoring.whole import list_values

    path = one_checkpoint(path)
    values = list_values(path)
    if as_json:
        print(json.dumps({"path": str(path), "values": [value._asdict() for value in values]}, indent=2))
        return
    listed = Table(
        f"{path}: {len(values):,} values, {size(sum(value.nbytes for value in values))}",
        ("name", "dtype", "shape", "bytes>"),
        [
            (value.name, value.dtype, "" if value.shape is None else str(value.shape), f"{value.nbytes:,}")
            for value in values
        ],
    )
    show([listed])


def one_checkpoint(path: Path) -> Path:
    """Return `path` if it is a checkpoint, ours or torch's; else the newest of ours in that folder."""
    if is_torchs(path):
        return path
    ours = _ours(path)
    if not ours:
        raise _none_at(path)
    return ours[0].path


def _none_at(path: Path) -> CheckpointNotFoundError:
    torchs = torch_checkpoints(path)
    offer = f"; torch's dcp.save wrote {torchs[-1]}: name that" if torchs else ": name the folder of one, or of several"
    return CheckpointNotFoundError(f"{path} has no checkpoint of AsyncCheckpointer{offer}")


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


def _print(path: Path, checked: Sequence[_Checked], as_json: bool) -> None:
    aside = [each.name for each in leftovers(path)]
    if as_json:
        print(json.dumps(_as_dict(path, checked, aside), indent=2))
        return
    show(_tables(path, checked))
    for name in aside:
        print(
            f"{name} belongs to a save that was interrupted or still runs. It is not checked; the next save removes it."
        )


def _as_dict(path: Path, checked: Sequence[_Checked], aside: list[str]) -> dict[str, Any]:
    return {
        "path": str(path),
        "ok": not any(wrong for _, wrong in checked),
        "checkpoints": [
            {
                "path": str(found.path),
                "step": None if found.step < 0 else found.step,
                "ranks": found.manifest.ranks if found.manifest else None,
                "files": len(found.manifest.files) if found.manifest else None,
                "bytes": found.manifest.nbytes if found.manifest else None,
                "written_at": written_ns(found.path) / 1e9,
                "has_checksums": not is_torchs(found.path),
                "damage": wrong,
            }
            for found, wrong in checked
        ],
        "leftovers": aside,
    }


def _tables(path: Path, checked: Sequence[_Checked]) -> list[Table]:
    columns = "name", "step>", "ranks>", "files>", "size>", "written", "found"
    listed = Table(f"Checkpoints at {path}, the newest first", columns)
    damaged = Table("Damaged", ("name", "what"))
    for found, wrong in checked:
        name = str(found.path.relative_to(path)) if found.path != path else path.name
        manifest, numbers = found.manifest, ("", "", "")
        if manifest:
            numbers = (str(manifest.ranks or ""), str(len(manifest.files)), size(manifest.nbytes))
        state = "damaged" if wrong else NO_CHECKSUMS if is_torchs(found.path) else "whole"
        step = "" if found.step < 0 else str(found.step)
        listed.rows.append(
            (
                name,
                step,
                *numbers,
                time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(written_ns(found.path) / 1e9)),
                state,
            )
        )
        damaged.rows.extend((name, what) for what in wrong)
    return [listed, damaged]
