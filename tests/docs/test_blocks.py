"""Every block of the pages does what it says: Python is run, quotations are word for word, commands exist, data parse.

How a block says which of these it is stands in tests/support/documented.py. Nothing is passed over: a block that says
nothing and cannot be run by itself fails here, with its page and line.
"""

from __future__ import annotations

import configparser
import importlib.util
import json
import re
import subprocess
import sys
import time
import tomllib
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import command_lines
import pytest
import warm
import yaml
from documented import DATA, PROSE, PYTHON, QUOTED, REPO, Block, blocks, pages

ALL = [block for page in pages() for block in blocks(page)]
HOW = "see tests/support/documented.py for what a comment <!-- test: ... --> above it may say"
_FILE = re.compile(r"file ([\w./-]+)(, run( twice)?)?")
_GUARD = re.compile(r"^if __name__ == .__main__.:", re.MULTILINE)


def python() -> Iterator[list[Block]]:
    """Blocks of Python that are run, in groups that belong together: with those that continue it, or a page's files."""
    for page in dict.fromkeys(block.page for block in ALL):
        files = []
        group: list[Block] = []
        for block in ALL:
            if block.page != page or block.language not in PYTHON:
                continue
            if _FILE.fullmatch(block.note):
                files.append(block)
            elif block.note == "continues":
                assert group, f"{block} continues, and no block of Python comes before it"
                group.append(block)
            elif not block.note or block.note.startswith("in "):
                if group:
                    yield group
                group = [block]
        if group:
            yield group
        if files:
            yield files


@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")  # more processes than cores here
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")  # one process will do here
@pytest.mark.parametrize("group", list(python()), ids=lambda group: str(group[0]))
def test_python_runs(
    group: list[Block], request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first = group[0]
    if _FILE.fullmatch(first.note):
        run_files(group, tmp_path)
    elif _GUARD.search(first.text) and not first.note:
        assert len(group) == 1, f"{group[1]} cannot continue a script: {HOW}"
        (tmp_path / "main.py").write_text(first.text)
        run_script("main.py", tmp_path, first)
    else:
        module = types.ModuleType("documented_block")
        monkeypatch.setitem(sys.modules, module.__name__, module)
        if first.note:
            given: dict[str, Any] = request.getfixturevalue(first.note.removeprefix("in "))
            given.update(vars(module) | given)
            namespace = given  # the fixture looks at what became of it
        else:
            namespace = vars(module)
        for block in group:
            # The lines above are blank, so that a traceback shows the page's own line.
            exec(compile("\n" * (block.line - 1) + block.text, block.page, "exec"), namespace)


def run_files(group: list[Block], folder: Path) -> None:
    for block in group:
        note = _FILE.fullmatch(block.note)
        assert note is not None
        (folder / note[1]).parent.mkdir(parents=True, exist_ok=True)
        (folder / note[1]).write_text(block.text)
        for _ in range(2 if note[3] else 1 if note[2] else 0):
            run_script(note[1], folder, block)


def run_script(name: str, folder: Path, block: Block) -> None:
    imports = ["torch", "penstock.client", "penstock.client.checkpoint", "penstock.data"]
    script = warm.fork("scripts:run", str(folder), name, imports=imports, environment={"PYTHONWARNINGS": "error"})
    try:
        ended = script.outcome(time.monotonic() + 100)
    finally:
        script.kill()
    assert not ended.raised, f"{block} ended with {ended}:\n{(folder / f'{name}.log').read_text()}"


@pytest.mark.parametrize("page", sorted({block.page for block in ALL}))
def test_each_block_is_of_a_kind_that_is_checked(page: str) -> None:
    for block in ALL:
        if block.page != page:
            continue
        note = block.note
        if block.language in PYTHON:
            compile(block.text, str(block), "exec")
            reason = note.removeprefix("only parsed: ")
            assert (
                not note
                or note == "continues"
                or note.startswith(("in ", "quotes ", "run by "))
                or (_FILE.fullmatch(note) or reason not in (note, ""))
            ), f"{block}: {note!r} says nothing that is known: {HOW}"
        elif block.language in QUOTED:
            assert note.startswith("quotes "), f"{block} is quoted from no file: {HOW}"
        else:
            assert not note, f"{block} is no Python, and its comment means nothing"
            known = PROSE | DATA
            is_directive = block.language.startswith("{")
            assert is_directive or block.language in known, f"{block}: {block.language!r} is none of {sorted(known)}"


@pytest.mark.parametrize("block", [block for block in ALL if block.note.startswith("quotes ")], ids=str)
def test_what_is_quoted_stands_there(block: Block) -> None:
    path = REPO / block.note.removeprefix("quotes ")

    def bare(text: str) -> str:
        """Without indentation, blank lines, and the remarks for type checkers that a reader does not need."""
        lines = [re.sub(r"\s+# type: ignore\[.*?\]", "", line).strip() for line in text.splitlines()]
        return "\n".join(line for line in lines if line)

    assert bare(block.text) in bare(path.read_text()), f"{block} is no part of {path.relative_to(REPO)} any more"


@pytest.mark.parametrize("path", sorted({block.note for block in ALL if block.note.startswith("run by ")}))
def test_what_another_test_runs_is_run_there(path: str) -> None:
    declared = [block for block in ALL if block.note == path]
    runs = importing(REPO / path.removeprefix("run by ")).BLOCKS
    assert runs == declared


def importing(path: Path) -> Any:
    """The module in this file, which no package has."""
    spec = importlib.util.spec_from_file_location(f"documented_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


READERS: dict[str, Callable[[str], object]] = {
    "json": json.loads,
    "toml": tomllib.loads,
    "ini": lambda text: configparser.ConfigParser().read_string(text),
    "yaml": lambda text: list(yaml.safe_load_all(text)),
}


def test_data_parse() -> None:
    wrong = []
    for block in ALL:
        if block.language in DATA:
            try:
                READERS[block.language](block.text)
            except (ValueError, configparser.Error, yaml.YAMLError) as error:
                wrong.append(f"{block}: {error}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("page", sorted({block.page for block in ALL if block.language in PROSE}))
def test_commands_exist(page: str) -> None:
    wrong = []
    for block in ALL:
        if block.page == page and block.language in PROSE:
            for words in command_lines.commands(block.text):
                why = command_lines.problem(words)
                if why:
                    wrong.append(f"{block}: `{' '.join(words)}`: {why}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("block", [block for block in ALL if block.language in {"sh", "bash"}], ids=str)
def test_shell_parses(block: Block) -> None:
    done = subprocess.run(["bash", "-n"], input=block.text, capture_output=True, text=True, timeout=20)
    assert done.returncode == 0, f"{block}:\n{done.stderr}"
