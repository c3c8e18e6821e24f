"""A disk that the power may fail: what it may hold afterwards, from a record of what was done to it.

The promises are those of POSIX, with what journals add for names, and no more:

- What was written to a file is there once the file was synced. Before that each write (and truncation) by itself is
  there, is not there, is there in part, or has left zeros.
- What was done to the names in a folder (made, renamed, removed) is there once the folder was synced. Before that it is
  there up to any point: names are journalled in order. Each folder has a point of its own.
- A file's being synced says nothing of its name, nor the other way around.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from traced_writer import Operation

__all__ = ["LOSSES", "Disk", "Loss", "Tree", "at_random", "lay_out"]

Tree = dict[str, bytes | None]
"""Path -> content; None for a folder, which comes before what is in it."""


@dataclass(eq=False)
class _File:
    synced: bytes = b""
    since: list[Operation] = field(default_factory=list)


@dataclass(eq=False)
class _Folder:
    synced: dict[str, _Node] = field(default_factory=dict)
    since: list[dict[str, _Node | None]] = field(default_factory=list)
    """Names, and what they are from then on; None: nothing."""

    def names(self, count: int | None = None) -> dict[str, _Node]:
        """Return the folder's entries with the first `count` changes since it was synced; None: as programs see it."""
        found: dict[str, _Node | None] = dict(self.synced)
        for change in self.since[:count]:
            found.update(change)
        return {name: node for name, node in found.items() if node is not None}


_Node = _File | _Folder


@dataclass(frozen=True)
class Loss:
    """Effect of a power loss on data that was not synced.

    names: of so many changes in a folder, how many are there.
    write: what is there of a write: "all", "none", "some" or "zeros". truncation: whether it is there.
    """

    names: Callable[[int], int]
    write: Callable[[], str]
    truncation: Callable[[], bool]


LOSSES = {
    "nothing": Loss(lambda count: count, lambda: "all", lambda: True),
    "all": Loss(lambda count: 0, lambda: "none", lambda: False),
    "contents": Loss(lambda count: count, lambda: "none", lambda: False),
    "contents, but not lengths": Loss(lambda count: count, lambda: "zeros", lambda: True),
    "the last name": Loss(lambda count: max(count - 1, 0), lambda: "some", lambda: True),
}


def at_random(seed: int) -> Loss:
    rng = random.Random(seed)
    return Loss(
        lambda count: rng.randint(0, count),
        lambda: rng.choice(["all", "none", "some", "zeros"]),
        lambda: rng.random() < 0.5,
    )


class Disk:
    """Disk of which only the folder `root` is tracked. at_first: what is there, and was synced."""

    def __init__(self, root: Path, at_first: Tree) -> None:
        self._root = str(root)
        self._tree = _Folder()
        for path, content in at_first.items():
            above, _, name = f"{root}/{path}".rpartition("/")
            self._folder(above).synced[name] = _Folder() if content is None else _File(content)

    def do(self, one: Operation) -> None:
        """Apply an operation. Operations outside of the root are ignored."""
        if one.kind in ("begin", "done") or not f"{one.path}/".startswith(f"{self._root}/"):
            return
        if one.kind == "sync":
            node = self._find(one.path)
            if isinstance(node, _Folder):
                node.synced, node.since = node.names(), []
            else:
                node.synced, node.since = _content(node, LOSSES["nothing"]), []
        elif one.kind in ("write", "truncate"):
            file = self._find(one.path)
            assert isinstance(file, _File)
            file.since.append(one)
        else:
            folder, _, name = one.path.rpartition("/")
            change: dict[str, _Node | None] = {name: None}
            if one.kind == "rename":
                there, _, to = one.to.rpartition("/")
                assert there == folder, "between folders: two changes, of which one may be there and the other not"
                change[to] = self._find(one.path)
            elif one.kind in ("create", "mkdir"):
                change[name] = _File() if one.kind == "create" else _Folder()
            self._folder(folder).since.append(change)

    def now(self) -> Tree:
        """Return the files as programs see them."""
        return self.after(LOSSES["nothing"])

    def after(self, loss: Loss) -> Tree:
        """Return the files as they are found after a power loss."""
        found: Tree = {}

        def look(folder: _Folder, path: str) -> None:
            for name, node in folder.names(loss.names(len(folder.since))).items():
                if isinstance(node, _File):
                    found[path + name] = _content(node, loss)
                else:
                    found[path + name] = None
                    look(node, f"{path}{name}/")

        look(self._tree, "")
        return found

    def _find(self, path: str) -> _Node:
        node: _Node = self._tree
        for name in filter(None, path.removeprefix(self._root).split("/")):
            assert isinstance(node, _Folder)
            node = node.names()[name]
        return node

    def _folder(self, path: str) -> _Folder:
        node = self._find(path)
        assert isinstance(node, _Folder)
        return node


def _content(file: _File, loss: Loss) -> bytes:
    content = bytearray(file.synced)
    for one in file.since:
        if one.kind == "truncate":
            if loss.truncation():
                content = content[: one.number].ljust(one.number, b"\0")
            continue
        kept = loss.write()
        if kept != "none":
            data = {"all": one.data, "some": one.data[: len(one.data) // 2], "zeros": bytes(len(one.data))}[kept]
            content = content.ljust(one.number, b"\0")
            content[one.number : one.number + len(data)] = data
    return bytes(content)


def lay_out(tree: Tree, root: Path) -> None:
    """Make these files in a new folder."""
    root.mkdir(parents=True)
    for path, content in tree.items():
        if content is None:
            (root / path).mkdir()
        else:
            (root / path).write_bytes(content)
