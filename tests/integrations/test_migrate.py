"""The programs of docs/migrate.md, taken out of it and run: all after, and those before whose framework is here."""

from __future__ import annotations

import importlib
import io
import re
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from documented import REPO, Block, blocks
from neighbours import beside

from penstock.client import Appliance
from penstock.data import MDSWriter

TORCH, STATEFUL = "From a torch DataLoader", "From StatefulDataLoader"
STREAMING, ENERGON, TF_DATA = "From mosaicml-streaming", "From Megatron Energon", "From tf.data service"
MID_RUN = "Moving in mid-run"
"""A section without programs."""


PAGE = REPO / "docs/migrate.md"
PYTHON = [block for block in blocks(PAGE) if block.language == "python"]
BLOCKS = [block for block in PYTHON if block.note == "run by tests/integrations/test_migrate.py"]
"""Blocks that this module runs; tests/docs checks that it does."""


def programs() -> dict[str, list[Block]]:
    """Return the programs before and after the migration, by their heading."""
    headings = {n: line[3:] for n, line in enumerate(PAGE.read_text().splitlines(), 1) if line.startswith("## ")}
    found: dict[str, list[Block]] = {heading: [] for heading in headings.values() if heading != MID_RUN}
    for block in PYTHON:
        heading = headings[max(line for line in headings if line < block.line)]
        if heading != MID_RUN:
            found[heading].append(block)
    return found


PROGRAMS = programs()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Yield the folder in which the programs are and run, with the data that they read."""
    folder = tmp_path_factory.mktemp("migrate")
    with MDSWriter(folder / "train", {"number": "int"}, size_limit=512) as shards:
        for number in range(320):
            shards.write({"number": number})
    for name in ("web", "books"):
        (folder / name).mkdir()
        for number in range(6):
            with tarfile.open(folder / name / f"{number}.tar", "w") as tar:
                for key in range(10):
                    for kind, content in (("txt", f"{name} {number} {key}".encode()), ("json", b"{}")):
                        info = tarfile.TarInfo(f"{key:03}.{kind}")
                        info.size = len(content)
                        tar.addfile(info, io.BytesIO(content))
    (folder / "numbers").mkdir()
    for number in range(6):
        lines = [f"{number} {line}\n" for line in range(20)]
        (folder / "numbers" / f"{number}.txt").write_text("".join(lines))
    for section, written in PROGRAMS.items():
        for which, block in zip(("before", "after"), written, strict=True):
            (folder / f"{module_name(section, which)}.py").write_text(block.text)
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))


@pytest.fixture(scope="module")
def appliance(folder: Path) -> Iterator[Appliance]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)  # the daemons run there too
        with Appliance(num_workers_per_box=2, seed=7, timeout_s=60) as appliance:
            yield appliance


def module_name(section: str, which: str) -> str:
    return f"{re.sub('[^a-z]+', '_', section.lower())}_{which}"


class Program:
    """Program of the page, imported, with its calls of `step` and `save` recorded."""

    def __init__(self, section: str, which: str) -> None:
        self.module: ModuleType = importlib.import_module(module_name(section, which))
        self.seen: list[Any] = []
        """The batches, as plain values."""
        self.saved: dict[int, Any] = {}
        """Batches seen -> the state that was saved then."""
        self.module.step = lambda batch: self.seen.append(plain(batch))  # type: ignore[attr-defined]
        self.module.save = lambda state: self.saved.update({len(self.seen): state})  # type: ignore[attr-defined]

    def run(self, saved: Any = None) -> list[Any]:
        self.seen = []
        self.module.main(*([] if saved is None else [saved]))
        return self.seen


def plain(batch: Any) -> Any:
    return {key: plain(value) for key, value in batch.items()} if isinstance(batch, dict) else batch.tolist()


def rows(batches: list[Any]) -> list[Any]:
    return [row for batch in batches for row in batch]


def test_every_program_is_there() -> None:
    runs = {section: [block in BLOCKS for block in written] for section, written in PROGRAMS.items()}
    both, one = [True, True], [False, True]
    assert runs == {TORCH: both, STATEFUL: both, STREAMING: one, ENERGON: one, TF_DATA: one}


def test_the_five_lines() -> None:
    """Check that the changed lines are numbered, and that no other line is new."""
    before, after = ([line for line in block.text.splitlines() if line.strip()] for block in PROGRAMS[TORCH])
    numbered = [line for line in after if re.search(r"  # \d$", line)]
    assert [line[-1] for line in numbered] == ["1", "2", "3", "4", "5"]
    assert [line for line in after if line not in before and line not in numbered] == [
        "from torch.utils.data import Dataset"  # without the DataLoader that is not needed any more
    ]


@pytest.mark.parametrize("which", ["before", "after"])
def test_a_torch_dataloader(appliance: Appliance, which: str) -> None:
    seen = Program(TORCH, which).run()
    first, second = rows(seen[:10]), rows(seen[10:])
    assert sorted(first) == sorted(second) == [[number, number**2] for number in range(200)]
    assert first != second


def test_a_stateful_dataloader_before(folder: Path) -> None:
    """Check what the page says of the StatefulDataLoader: with worker processes it continues where it was."""
    program = Program(STATEFUL, "before")
    whole = program.run()
    all_squares(whole)
    assert program.run(program.saved[20]) == whole[20:]


@pytest.mark.parametrize("section", [STATEFUL, STREAMING, ENERGON, TF_DATA])
def test_what_is_saved_goes_on(appliance: Appliance, section: str) -> None:
    """Resume on another number of workers."""
    program = Program(section, "after")
    whole = list(program.run())
    with beside(appliance, num_workers_per_box=3):
        rest = program.run(program.saved[10])
    assert len(whole) >= 20
    assert rest[: len(whole) - 10] == whole[10:]
    complete = {STATEFUL: all_squares, STREAMING: all_numbers, ENERGON: four_to_one, TF_DATA: all_lines}
    complete[section](whole)


def all_squares(whole: list[Any]) -> None:
    assert sorted(rows(whole)) == [[number, number**2] for number in range(800)]


def all_numbers(whole: list[Any]) -> None:
    assert sorted(number for batch in whole for number in batch["number"]) == list(range(320))


def four_to_one(whole: list[Any]) -> None:
    """Four samples of the web for each of a book, within one sample at every prefix."""
    texts = [bytes(row).decode().split() for row in rows(whole)]
    for length in range(1, len(texts) + 1):
        web = sum(name == "web" for name, _, _ in texts[:length])
        assert abs(web - 0.8 * length) <= 1
    assert {(name, int(file)) for name, file, _ in texts} == {(name, n) for name in ("web", "books") for n in range(6)}


def all_lines(whole: list[Any]) -> None:
    """All of them have come: 300 rows are more than twice as many."""
    seen = rows(whole)
    counts = [seen.count([float(file), float(line)]) for file in range(6) for line in range(20)]
    assert len(seen) == sum(counts) == 300
    assert min(counts) >= 1
