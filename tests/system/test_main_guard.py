"""A script without a main guard is refused before a worker loads it, and needs none if its loader needs nothing of it.

Each script adds a line to a file as its body runs, so that the file tells which processes ran it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
from main_script import outcome

from penstock.client.states.code_reference import CodeReference, check_guard
from penstock.proto.errors import InvalidArgumentError

TOP = """
import os
import torch
from torch.utils.data import TensorDataset
from penstock.client import Appliance, DataLoader

with open(__file__ + ".ran", "a") as ran:
    ran.write(__name__ + chr(10))

class Rows(TensorDataset):
    pass

def make(count):
    return [torch.tensor(number) for number in range(count)]
"""
LOOP = "for batch in DataLoader({}): print(batch, flush=True)\n"
ROWS = "{}(torch.arange(3)), batch_size=2"
GUARD = 'if __name__ == "__main__":\n    '


def run(tmp_path: Path, body: str, *, by_module: bool = False) -> tuple[int, str, str, list[str]]:
    """Return exit status, output, error, and the names under which processes ran the body."""
    script = tmp_path / "train.py"
    script.write_text(TOP + body)
    environment = os.environ | {"PENSTOCK_TIMEOUT_S": "60"}
    if by_module:
        done = subprocess.run(
            [sys.executable, "-m", "train"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100
        )
        found = done.returncode, done.stdout, done.stderr
    else:
        found = outcome(script, environment)
    return *found, Path(f"{script}.ran").read_text().split()


@pytest.mark.parametrize(
    ("body", "name", "line", "by_module"),
    [
        (LOOP.format("make, 2"), "make", 1, False),
        (LOOP.format("make, 2"), "make", 1, True),
        ("def main():\n    " + LOOP.format(ROWS.format("Rows")) + "main()\n", "Rows", 3, False),
        ("appliance = Appliance()\n" + GUARD + LOOP.format("make, 2"), "make", 1, False),
    ],
)
def test_a_missing_guard_is_an_error_of_the_parent(
    tmp_path: Path, body: str, name: str, line: int, by_module: bool
) -> None:
    status, output, error, ran = run(tmp_path, body, by_module=by_module)
    assert (status, output, ran) == (1, "", ["__main__"]), error
    where = (
        f"{name!r} is defined in {tmp_path / 'train.py'}, which workers load too, and line {TOP.count(chr(10)) + line}"
    )
    assert where in error, error
    assert error.rstrip().endswith(GUARD.rstrip()), error


@pytest.mark.parametrize(
    ("script", "guarded"),
    [
        ('if __name__ == "__main__":\n    train()', True),
        ('if args and __name__ == "__main__":\n    if more:\n        train()', True),
        ('here = __name__ == "__main__"\nif here:\n    train()', True),
        ('train() if __name__ == "__main__" else None', True),
        ('__name__ == "__main__" and train()', True),
        ('if __name__ != "__main__":\n    pass\nelse:\n    train()', True),
        ('if __name__ == "__main__":\n    pass\ntrain()', False),
        ("log = get(__name__)\nif args:\n    train()", False),
        ("with a, b:\n    train(\n)", False),
    ],
)
def test_what_a_guard_is(script: str, guarded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    main = types.ModuleType("__main__")
    main.__file__ = str(tmp_path / "train.py")
    Path(main.__file__).write_text(script)
    monkeypatch.setitem(sys.modules, "__main__", main)
    line = 1 + script[: script.index("train(")].count("\n")
    with (
        contextlib.nullcontext() if guarded else pytest.raises(InvalidArgumentError, match=f"line {line} of it starts")
    ):
        check_guard(CodeReference("penstock_main:make", main.__file__, "make"), [line])
    check_guard(CodeReference("other:make"), [line])


def test_a_guarded_script_is_loaded_by_each_worker(tmp_path: Path) -> None:
    loops = LOOP.format("make, 1") + "    " + LOOP.format(ROWS.format("Rows"))
    status, output, error, ran = run(tmp_path, GUARD + loops)
    assert (status, ran) == (0, ["__main__", "penstock_main", "penstock_main"]), error
    assert output.splitlines() == ["tensor(0)", "[tensor([0, 1])]", "[tensor([2])]"]


def test_without_a_guard_if_the_loader_needs_nothing_of_the_script(tmp_path: Path) -> None:
    status, output, error, ran = run(tmp_path, LOOP.format(ROWS.format("TensorDataset")))
    assert (status, ran) == (0, ["__main__"]), error
    assert output.splitlines() == ["[tensor([0, 1])]", "[tensor([2])]"]


def test_workers_read_the_options_of_the_training_process(tmp_path: Path) -> None:
    """A script that parses its command line as it is loaded, with a name that is not UTF-8: as a loader by name, and by
    value."""
    top = """
import argparse
import torch
from penstock.client import Appliance, DataLoader

parser = argparse.ArgumentParser()
parser.add_argument("--start", type=int, default=0)
parser.add_argument("folder")
options = parser.parse_args()

class Rows(torch.utils.data.Dataset):
    def __len__(self): return 2
    def __getitem__(self, index): return options.start + index, ascii(options.folder)

def make():
    return [torch.tensor(options.start)]
"""
    (tmp_path / "train.py").write_text(top + GUARD + LOOP.format("make") + "    " + LOOP.format("Rows(), batch_size=2"))
    command = [sys.executable, "train.py", "--start", "7", os.fsdecode(b"\xff")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.stdout.splitlines() == ["tensor(7)", r"""[tensor([7, 8]), ("'\\udcff'", "'\\udcff'")]"""], done.stderr
