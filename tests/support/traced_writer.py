"""The checkpoint writer, with all that it does to the disk recorded, and killed at one of these operations if told to.

A program, which tests have started in the place of client/penstock/client/checkpoint/saving/writer.py, and which runs
just that: with the functions by which it, and what it uses, changes files replaced by ones that also keep a record. One
operation at a time, so that the record has them in the order in which they took effect.

And what tests need to do so: `traced` has it started, `stop_at` says where it is to be killed, `operations` reads the
record. Files of the record lie in a folder of their own, one for each rank.
"""

from __future__ import annotations

import base64
import fcntl
import io
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

__all__ = ["ROOM", "THIS", "Operation", "When", "forget", "operations", "points", "stop_at"]

ROOM = "TRACED_WRITER"
"""Environment variable: the folder for records."""
THIS = Path(__file__)
When = Literal["before", "within", "after"]
"""Moment of an operation; within: half of the data has been written."""
T = TypeVar("T")


@dataclass(frozen=True)
class Operation:
    """Operation that took effect. The kinds "begin" and "done" are those of a save, which is done once its writer can
    report it."""

    kind: Literal["begin", "done", "create", "write", "truncate", "sync", "rename", "mkdir", "unlink", "rmdir"]
    path: str = ""
    to: str = ""
    """The new name, for "rename"."""
    number: int = 0
    """Offset of a write, or the new length."""
    data: bytes = b""


def stop_at(room: Path, when: When, number: int, rank: int = 0) -> None:
    """Have the rank's writer kill itself at this operation of its next save, counted from 0; once."""
    (room / f"{rank}.stop").write_text(json.dumps([when, number]))


def forget(room: Path) -> None:
    """Begin a new record."""
    for path in room.iterdir():
        path.unlink()


def operations(room: Path, rank: int = 0) -> list[Operation]:
    """Return the operations of the writer so far."""
    try:
        lines = (room / f"{rank}.record").read_text().splitlines()
    except FileNotFoundError:
        return []
    found = [json.loads(line) for line in lines]
    return [Operation(**{**one, "data": base64.b64decode(one.get("data", ""))}) for one in found]


def points(done: list[Operation]) -> Iterator[tuple[When, int]]:
    """All places to be killed at in a save that did this: before its first change, within each write, and after each
    change. After one is before the next: nothing lies between them that anybody could see."""
    changes = [one for one in done if one.kind not in ("begin", "done")]
    yield "before", 0
    for number, one in enumerate(changes):
        if one.kind == "write":
            yield "within", number
        yield "after", number


# ---- the program


class _Tracer:
    def __init__(self, room: Path) -> None:
        self._room = room
        self._lock = threading.Lock()
        self._record = -1
        """Descriptor of the record of the save in progress; -1 between saves."""
        self._number = 0
        self._stop: tuple[When, int] | None = None

    def save(self, rank: int, run: Callable[[], None]) -> None:
        """Run a save, traced."""
        stop = self._room / f"{rank}.stop"
        self._stop, self._number = None, 0
        if stop.exists():
            when, number = json.loads(stop.read_text())
            self._stop = when, number
            stop.unlink()
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._record = os.open(self._room / f"{rank}.record", flags, 0o666)
        try:
            self._write(kind="begin")
            run()
            self._write(kind="done")
        finally:
            os.close(self._record)
            self._record = -1

    def act(
        self, change: Callable[[], T], half: Callable[[], object], entry: Callable[[T], dict[str, Any] | None]
    ) -> T:
        """Make a change and write it down. entry: what to write, by what the change returned."""
        if self._record < 0:
            return change()
        with self._lock:
            self._die_if("before")
            if self._stop == ("within", self._number):
                half()
                self._die_if("within")
            result = change()
            found = entry(result)
            if found is not None:
                self._write(**found)
                self._die_if("after")
                self._number += 1
            return result

    def _die_if(self, when: When) -> None:
        if self._stop == (when, self._number):
            os.kill(os.getpid(), signal.SIGKILL)

    def _write(self, **entry: Any) -> None:
        line = json.dumps(entry).encode() + b"\n"
        assert os.write(self._record, line) == len(line)


def _nothing() -> None:
    pass


def _of(handle: int) -> str:
    """The present name of what is open."""
    return os.readlink(f"/proc/self/fd/{handle}")


def _at(path: Any, dir_fd: int | None) -> str:
    if dir_fd is not None:
        return f"{_of(dir_fd)}/{os.fsdecode(path)}"
    folder, name = os.path.split(os.path.abspath(path))  # the folder may be given by a descriptor's path
    return f"{os.path.realpath(folder)}/{name}"


def _install(tracer: _Tracer) -> None:
    """Replace what files are changed by. Who needs another function for it is found out: tests compare the record
    with the disk."""
    real = {name: getattr(os, name) for name in ("open", "pwrite", "ftruncate", "fsync")}
    real_open = io.open

    def opened(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        def open_it() -> int:
            return int(real["open"](path, flags, mode, dir_fd=dir_fd))

        if not flags & os.O_CREAT or os.path.lexists(_at(path, dir_fd)):
            return open_it()
        return tracer.act(open_it, _nothing, lambda handle: {"kind": "create", "path": _of(handle)})

    def written(handle: int, data: Any, offset: int, change: Callable[[], T]) -> T:
        data = memoryview(data).cast("B")

        def half() -> None:
            flags = fcntl.fcntl(handle, fcntl.F_GETFL)
            fcntl.fcntl(handle, fcntl.F_SETFL, flags & ~os.O_DIRECT)  # half a page is no matter without
            real["pwrite"](handle, data[: len(data) // 2], offset)

        def entry(count: T) -> dict[str, Any]:
            assert isinstance(count, int)
            text = base64.b64encode(data[:count]).decode()
            return {"kind": "write", "path": _of(handle), "number": offset, "data": text}

        return tracer.act(change, half, entry)

    def pwrite(handle: int, data: Any, offset: int) -> int:
        return written(handle, data, offset, lambda: int(real["pwrite"](handle, data, offset)))

    def ftruncate(handle: int, length: int) -> None:
        entry = {"kind": "truncate", "path": _of(handle), "number": length}
        tracer.act(lambda: real["ftruncate"](handle, length), _nothing, lambda _: entry)

    def fsync(handle: Any) -> None:
        entry = {"kind": "sync", "path": _of(handle)}
        tracer.act(lambda: real["fsync"](handle), _nothing, lambda _: entry)

    class Raw(io.FileIO):
        def write(self, data: Any) -> int:
            offset, above = self.tell(), super().write
            return written(self.fileno(), data, offset, lambda: above(data))

    def io_open(file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
        if mode in ("xb", "wb"):
            return io.BufferedWriter(Raw(file, mode, opener=opened))
        return real_open(file, mode, *args, **options)

    def renaming(name: str) -> Callable[[Any, Any], None]:
        change = getattr(os, name)

        def rename(path: Any, to: Any) -> None:
            entry = {"kind": "rename", "path": _at(path, None), "to": _at(to, None)}
            tracer.act(lambda: change(path, to), _nothing, lambda _: entry)

        return rename

    def naming(name: str, kind: str) -> Callable[..., None]:
        change = getattr(os, name)

        def act(path: Any, *args: Any, dir_fd: int | None = None) -> None:
            entry = {"kind": kind, "path": _at(path, dir_fd)}
            tracer.act(lambda: change(path, *args, dir_fd=dir_fd), _nothing, lambda _: entry)

        return act

    replaced: dict[str, Callable[..., Any]] = {
        "open": opened,
        "pwrite": pwrite,
        "ftruncate": ftruncate,
        "fsync": fsync,
        **{name: renaming(name) for name in ("rename", "replace")},
        **{name: naming(name, name) for name in ("mkdir", "unlink", "rmdir")},
        "remove": naming("remove", "unlink"),
    }
    for name, function in replaced.items():
        setattr(os, name, function)
    vars(io)["open"] = io_open


def _main() -> None:
    from penstock.client.checkpoint.saving import folder_save, writer

    tracer = _Tracer(Path(os.environ[ROOM]))
    _install(tracer)
    folder_save.PROBE_S = 1e9  # a rank that waits for a slow one would do more to the disk than in another save
    run = folder_save.FolderSave.run
    vars(folder_save)["FolderSave"].run = lambda save: tracer.save(save.rank, lambda: run(save))
    writer.main()


if __name__ == "__main__":
    _main()
