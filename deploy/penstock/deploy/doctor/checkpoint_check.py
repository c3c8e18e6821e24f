"""Check of checkpoints for `penstock doctor CHECKPOINT`: reads all files and compares them with what was written."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.deploy.console.tables import Table, show
from penstock.proto.errors import CheckpointCorruptError, CheckpointNotFoundError
from penstock.proto.state.checkpoint_files import FoundCheckpoint, checkpoints, damage, leftovers, read_manifest
from penstock.runtime.telemetry.units import size

__all__ = ["is_path", "show_checkpoints"]

NONE_INTACT = "No checkpoint here is intact: restore the files from a copy, or start without a checkpoint"


@dataclass(frozen=True)
class Verified:
    found: FoundCheckpoint
    wrong: list[str]


def is_path(target: str) -> bool:
    return Path(target).is_dir() or "/" in target


def show_checkpoints(path: Path, as_json: bool) -> int:
    """Check a checkpoint, or all in a folder, and print. Raises CheckpointNotFoundError, CheckpointCorruptError."""
    verified = [_verify(one) for one in _at(path)]
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
    bad = [one for one in verified if one.wrong]
    if bad:
        good = next((one.found.path for one in verified if not one.wrong), None)
        offer = f"Resume from {good}, the newest intact checkpoint" if good else NONE_INTACT
        raise CheckpointCorruptError(
            f"{len(bad)} of {len(verified)} checkpoints {'is' if len(bad) == 1 else 'are'} damaged (see above). {offer}"
        )
    return 0


def _at(path: Path) -> list[FoundCheckpoint]:
    if not path.is_dir():
        raise CheckpointNotFoundError(
            f"{path} must be the folder of a checkpoint, or a folder of checkpoints, but is not a folder. Correct the "
            "path"
        )
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
                "checkpoints, got a folder without any. Pass the folder that AsyncCheckpointer writes to"
            ) from None
        return found


def _verify(found: FoundCheckpoint) -> Verified:
    if found.manifest is None:
        return Verified(found, [found.damage])
    return Verified(found, list(damage(found.path, found.manifest, contents=True)))


def _as_dict(path: Path, verified: list[Verified], aside: list[str]) -> dict[str, Any]:
    return {
        "path": str(path),
        "ok": not any(one.wrong for one in verified),
        "checkpoints": [
            {
                "path": str(one.found.path),
                "step": one.found.manifest.step if one.found.manifest else None,
                "ranks": one.found.manifest.ranks if one.found.manifest else None,
                "files": len(one.found.manifest.files) if one.found.manifest else None,
                "bytes": one.found.manifest.nbytes if one.found.manifest else None,
                "damage": one.wrong,
            }
            for one in verified
        ],
        "leftovers": aside,
    }


def _tables(path: Path, verified: list[Verified]) -> list[Table]:
    listed = Table(f"Checkpoints at {path}, the newest first", ("name", "step>", "ranks>", "files>", "size>", "found"))
    wrong = Table("Damaged", ("name", "what"))
    for one in verified:
        manifest = one.found.manifest
        numbers = (
            (str(manifest.step), str(manifest.ranks), str(len(manifest.files)), size(manifest.nbytes))
            if manifest
            else ("", "", "", "")
        )
        listed.rows.append((one.found.path.name, *numbers, "damaged" if one.wrong else "whole"))
        wrong.rows.extend((one.found.path.name, what) for what in one.wrong)
    return [listed, wrong]
