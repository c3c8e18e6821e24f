"""The programs of the pages docs/from_*.md, taken out of them, run, saved and resumed."""

from __future__ import annotations

import importlib
import io
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from documented import REPO, blocks
from neighbours import beside

from penstock.client import Appliance, DataExecutor, DataLoader
from penstock.data import MDSWriter, index_folder

STATEFUL, STREAMING = "torch", "from_mosaicml_streaming"
ENERGON, TF_DATA = "from_energon", "from_tf_data"
NOTE = "run by tests/integrations/test_from_pages.py"
BLOCKS = [
    block
    for page in sorted([STATEFUL, STREAMING, ENERGON, TF_DATA])
    for block in blocks(REPO / f"docs/{page}.md")
    if block.note == NOTE
]
"""Blocks that this module runs; tests/docs checks that it does."""
PROGRAMS = {Path(block.page).stem: block for block in BLOCKS}
LOOPS = {STREAMING: (16, None), ENERGON: (10, 30), TF_DATA: (10, 30)}
"""Pages that have an input_fn and refer to torch.md's loop: batch size and steps."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Yield the folder in which the programs are and run, with the data that they read."""
    folder = tmp_path_factory.mktemp("programs")
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
        index_folder(folder / name)
    (folder / "numbers").mkdir()
    for number in range(6):
        lines = [f"{number} {line}\n" for line in range(20)]
        (folder / "numbers" / f"{number}.txt").write_text("".join(lines))
    for page, block in PROGRAMS.items():
        (folder / f"{page}_program.py").write_text(block.text)
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))


@pytest.fixture(scope="module")
def appliance(folder: Path) -> Iterator[Appliance]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)  # the daemons run there too
        with Appliance(num_workers_per_box=2, seed=7, timeout_s=60) as appliance:
            yield appliance


class Program:
    """Program of the page, imported, with its calls of `step` and `save` recorded."""

    def __init__(self, page: str) -> None:
        self.page = page
        self.module: ModuleType = importlib.import_module(f"{page}_program")
        self.seen: list[Any] = []
        """The batches, as plain values."""
        self.saved: dict[int, Any] = {}
        """Batches seen -> the state that was saved then."""
        self.module.step = lambda batch: self.seen.append(plain(batch))  # type: ignore[attr-defined]
        self.module.save = lambda state: self.saved.update({len(self.seen): state})  # type: ignore[attr-defined]

    def run(self, saved: Any = None) -> list[Any]:
        self.seen = []
        if self.page in LOOPS:
            self._loop(*LOOPS[self.page], saved)
        else:
            self.module.main(*([] if saved is None else [saved]))
        return self.seen

    def _loop(self, batch_size: int, steps: int | None, saved: Any) -> None:
        loader = DataLoader(self.module.input_fn, batch_size=batch_size)
        if saved is not None:
            loader.load_state_dict(saved)
        executor = DataExecutor(loader, num_steps=steps, checkpoint_steps=10)
        for batch in executor:
            self.module.step(batch)
            if executor.on_checkpoint_step:
                self.module.save(loader.state_dict())


def plain(batch: Any) -> Any:
    return {key: plain(value) for key, value in batch.items()} if isinstance(batch, dict) else batch.tolist()


def rows(batches: list[Any]) -> list[Any]:
    return [row for batch in batches for row in batch]


def test_every_program_is_there() -> None:
    assert set(PROGRAMS) == {STATEFUL, STREAMING, ENERGON, TF_DATA}


@pytest.mark.parametrize("page", [STATEFUL, STREAMING, ENERGON, TF_DATA])
def test_what_is_saved_goes_on(appliance: Appliance, page: str) -> None:
    """Resume on another number of workers."""
    program = Program(page)
    whole = list(program.run())
    with beside(appliance, num_workers_per_box=3):
        rest = program.run(program.saved[10])
    assert len(whole) >= 20
    assert rest[: len(whole) - 10] == whole[10:]
    complete = {STATEFUL: all_squares, STREAMING: all_numbers, ENERGON: four_to_one, TF_DATA: all_lines}
    complete[page](whole)


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
