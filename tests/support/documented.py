"""The fenced blocks of the pages, and how each says that it is tested.

A comment `<!-- test: ... -->` right above a block of Python (nothing but blank lines in between) says it:

    (none)               it is a program of its own: run as a script if it has a main guard, else executed
    continues            executed where the block of Python before it left off
    in FIXTURE           executed in the namespace that this fixture of tests/docs/conftest.py returns
    file NAME            a file of the page's folder, which later blocks of the page may import
    file NAME, run       the same, and run; `run twice`: two times
    quotes PATH          a part of this file of the repository, word for word
    run by PATH          executed by this test, which needs more around it; its BLOCKS are those that it runs
    only parsed: REASON  not run, for this reason

Blocks of other languages need no comment: what is a command is checked against the command line, data are parsed.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["DATA", "PROSE", "PYTHON", "QUOTED", "REPO", "Block", "blocks", "pages"]

REPO = Path(__file__).parents[2]

PYTHON = {"python", "py"}
QUOTED = {"javascript"}
"""Code of other languages: quoted from files that other tests run."""
PROSE = {"", "text", "sh", "bash", "shell", "console"}
"""Commands, what they print, and drawings."""
DATA = {"json", "toml", "yaml", "ini"}

_FENCE = re.compile(r"( *)(`{3,}|~{3,})\s*([^`]*)")
_NOTE = re.compile(r"\s*<!-- test: (.+?) -->\s*")


@dataclass(frozen=True)
class Block:
    page: str
    """Relative to the repository."""
    line: int
    """Number of the block's first line of text, from 1."""
    language: str
    """"{name}" for a directive of Sphinx."""
    text: str
    note: str
    """Text of the block's comment; "" if it has none."""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[Path]:
    """All pages with blocks that users may follow."""
    found = [REPO / "README.md", REPO / "CONTRIBUTING.md"]
    for folder in ("docs", "examples", "benchmarks", "deploy"):
        found += (REPO / folder).rglob("*.md")
    return sorted(page for page in found if not {"out", "node_modules"} & set(page.parts))


def blocks(page: Path) -> Iterator[Block]:
    """Its blocks, from top to bottom."""
    lines = page.read_text().splitlines()
    note, at = "", 0
    while at < len(lines):
        line, at = lines[at], at + 1
        noted, fence = _NOTE.fullmatch(line), _FENCE.fullmatch(line)
        if noted:
            note = noted[1]
        elif fence:
            first = at
            end = re.compile(rf" *{fence[2][0]}{{{len(fence[2])},}}\s*")
            while at < len(lines) and not end.fullmatch(lines[at]):
                at += 1
            text = textwrap.dedent("\n".join(lines[first:at]))
            at += 1
            words = fence[3].split()
            yield Block(page.relative_to(REPO).as_posix(), first + 1, words[0] if words else "", text, note)
            note = ""
        elif line.strip():
            note = ""
