"""Check of checkpoints for `penstock doctor CHECKPOINT`: reads all files and compares them with what was written."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.deploy.console.tables import Table, show
from penstock.proto.errors import CheckpointCorruptError, CheckpointNotFoundError
from penstock.proto.state.checkpoint_files import FoundCheckpoint, checkpoints, damage, leftovers, read_manifest
from penstock.runtime.telemetry.units import size

_Verified = tuple[FoundCheckpoint, list[str]]
"""A checkpoint, and what is wrong with it."""
NONE_INTACT = "No checkpoint here is intact: restore the files from a copy, or start without a checkpoint"


def is_path(target: str) -> bool:
    return Path(target).is_dir() or "/" in target


def show_checkpoints(path: Path, as_json: bool) -> int:
    """Check a checkpoint, or all in a folder, and print. Raises CheckpointNotFoundError, CheckpointCorruptError."""
    verified = [
        (found, [found.damage] if found.manifest is None else list(damage(found.path, found.manifest, contents=True)))
        for found in _at(path)
    ]
    aside = [one.name for one in leftovers(path)]
    if as_json:
        print(json.dumps(_as_dict(path, verified, aside), indent=2))
    else:
        show(_tables(path, verified))
        for name in aside:
            print(
                f"{name} belongs to a save that was interrupted or still runs. It was not checked; the next save "
                "removes it."
            )
    damaged = sum(bool(wrong) for _, wrong in verified)
    if damaged:
        intact = next((found.path for found, wrong in verified if not wrong), None)
        raise CheckpointCorruptError(
            f"{damaged} of {len(verified)} checkpoints {'is' if damaged == 1 else 'are'} damaged (see above). "
            + (f"Resume from {intact}, the newest intact checkpoint" if intact else NONE_INTACT)
        )
    return 0


def _at(path: Path) -> list[FoundCheckpoint]:
    if not path.is_dir():
        raise CheckpointNotFoundError(f"{path} must be the folder of a checkpoint, or a folder of checkpoints")
    try:
        manifest = read_manifest(path)
        return [FoundCheckpoint(manifest.step, path, manifest, "")]
    except CheckpointCorruptError as error:
        return [FoundCheckpoint(-1, path, None, error.message)]
    except CheckpointNotFoundError:
        found = checkpoints(path)
        if not found:
            raise CheckpointNotFoundError(
                f"{path} must be a checkpoint of AsyncCheckpointer, which has a penstock.json, or a folder of "
                "checkpoints, got a folder without any"
            ) from None
        return found


def _as_dict(path: Path, verified: Sequence[_Verified], aside: list[str]) -> dict[str, Any]:
    return {
        "path": str(path),
        "ok": not any(wrong for _, wrong in verified),
        "checkpoints": [
            {
                "path": str(found.path),
                "step": found.manifest.step if found.manifest else None,
                "ranks": found.manifest.ranks if found.manifest else None,
                "files": len(found.manifest.files) if found.manifest else None,
                "bytes": found.manifest.nbytes if found.manifest else None,
                "damage": wrong,
            }
            for found, wrong in verified
        ],
        "leftovers": aside,
    }


def _tables(path: Path, verified: Sequence[_Verified]) -> list[Table]:
    listed = Table(f"Checkpoints at {path}, the newest first", ("name", "step>", "ranks>", "files>", "size>", "found"))
    damaged = Table("Damaged", ("name", "what"))
    for found, wrong in verified:
        manifest, numbers = found.manifest, ("", "", "", "")
        if manifest:
            numbers = (str(manifest.step), str(manifest.ranks), str(len(manifest.files)), size(manifest.nbytes))
        listed.rows.append((found.path.name, *numbers, "damaged" if wrong else "whole"))
        damaged.rows.extend((found.path.name, what) for what in wrong)
    return [listed, damaged]
