"""Checkpoints that torch's `dcp.save` wrote: found, so that none is passed over in silence, and opened to be read.

They have torch's `.metadata` but no manifest, so neither checksums nor a place in the order of our saves. One of them
counts as newer than ours if it was written later, or if the number in its name is larger than our step: both may be
wrong, after a copy or a rollback, so nothing is restored from them that the user did not name (`restore(step=)`)."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.proto.errors import CheckpointError, CheckpointNotFoundError
from penstock.proto.state.checkpoint_files import (
    MANIFEST,
    METADATA,
    CheckpointFile,
    FoundCheckpoint,
    Manifest,
    is_aside,
    pinned,
    read_manifest,
    step_name,
    step_of,
)
from penstock.proto.tracebacks import warn_user

_ALONE = f"__0{METADATA}"
"""Name of rank 0's index if each rank saved without the others, by dcp.save(use_collectives=False)."""
_NUMBER = re.compile(r"\d+")


def torch_checkpoints(folder: Path) -> list[Path]:
    """Return the folders that `dcp.save` wrote, if any: `folder` itself, those in it, and those in its numbered ones,
    such as checkpoint-100/model."""
    found = []
    for path in [folder, *_folders(folder)]:
        if os.path.exists(path / MANIFEST):
            continue
        if _has_index(path):
            found.append(path)
        elif path != folder and _NUMBER.search(path.name):
            found += filter(is_torchs, _folders(path))
    return found


def is_torchs(path: Path) -> bool:
    return _has_index(path) and not os.path.exists(path / MANIFEST)


def _has_index(path: Path) -> bool:
    return any(os.path.isfile(path / name) for name in (METADATA, _ALONE))


def check_newer(folder: Path, own: FoundCheckpoint | None) -> None:
    """Warn if the folder has checkpoints of `dcp.save` that are newer than `own`, the newest of ours. Raise
    CheckpointNotFoundError if it has only such ones."""
    found = torch_checkpoints(folder)
    if own is not None:
        written = written_ns(own.path)
        found = [path for path in found if _number(path, folder) > own.step or written_ns(path) > written]
    if not found:
        return
    newest = max(found, key=written_ns)
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    step = step_of(newest.name) if newest.parent == folder else None
    remedy = (
        f"Pass step={step} to read it"
        if step is not None
        else f"To read it, move its files to {folder / 'step-N'}, where N is its step, and pass step=N"
    )
    if own is None:
        raise CheckpointNotFoundError(
            f"{folder} has no checkpoint of AsyncCheckpointer, but one of torch's dcp.save, without a {MANIFEST}: "
            f"{newest}{more}. {remedy}; to begin anew, use another folder"
        )
    warn_user(
        f"{own.path} is the newest checkpoint of AsyncCheckpointer, but torch's dcp.save wrote a newer one: "
        f"{newest}{more}. {remedy}, or move it away"
    )


def described(path: Path) -> FoundCheckpoint:
    """Return what `dcp.save` wrote into a folder; -1 for a step that its name does not tell."""
    step = step_of(path.name)
    return FoundCheckpoint(-1 if step is None else step, path, _manifest_without_checksums(path), "")


def torch_step(folder: Path, step: int) -> FoundCheckpoint | None:
    """Return the checkpoint step-N that `dcp.save` wrote, and warn that it has no checksums; None: no such one."""
    path = folder / step_name(step)
    if not is_torchs(path):
        return None
    warn_user(f"{path} was written by torch's dcp.save, without checksums: damage in it is not noticed")
    return described(path)


@contextmanager
def opened(path: Path) -> Iterator[tuple[int, Manifest]]:
    """Pin a checkpoint, ours or torch's, inside a block. Yield a descriptor of its folder, and its manifest. Raises
    CheckpointNotFoundError if it is gone, or cannot be read; CheckpointCorruptError for a damaged manifest."""
    if not is_torchs(path):
        with pinned(path) as handle:
            yield handle, read_manifest(Path(f"/proc/self/fd/{handle}"))
        return
    if not os.path.isfile(path / METADATA):
        raise CheckpointError(
            f"{path} was saved by each rank alone, with dcp.save(use_collectives=False): load it with dcp.load"
        )
    # `keep_last` deletes none of torch's, so there is nothing to pin
    try:
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise CheckpointNotFoundError(f"{path} cannot be read: {error.strerror}") from error
    try:
        yield handle, _manifest_without_checksums(path)
    finally:
        os.close(handle)


def _manifest_without_checksums(path: Path) -> Manifest:
    files = [CheckpointFile(each.name, each.stat().st_size, "") for each in sorted(path.iterdir()) if each.is_file()]
    return Manifest(step_of(path.name) or 0, f"{written_ns(path):x}", 0, 0, tuple(files))


def _folders(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            folders = [each.path for each in entries if not is_aside(each.name) and _is_folder(each)]
    except OSError:
        return []
    return [Path(path) for path in sorted(folders)]


def _is_folder(entry: os.DirEntry[str]) -> bool:
    return os.path.isdir(entry) if entry.is_symlink() else entry.is_dir()  # a link may lead to itself, which raises


def _number(path: Path, folder: Path) -> int:
    """Return the last number in the name of a folder, such as 10 of epoch=0-step=10.ckpt; -1 if it has none."""
    top = path.relative_to(folder).parts[:1]
    return int((["-1", *_NUMBER.findall("".join(top))])[-1])


def written_ns(path: Path) -> int:
    """Return when the file that completes a checkpoint was written, in ns; 0 if it has none."""
    for name in (MANIFEST, METADATA, _ALONE):
        try:
            return (path / name).stat().st_mtime_ns
        except OSError:
            continue
    return 0
