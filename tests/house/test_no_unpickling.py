"""Nothing in the tree unpickles: a pickle is a program, and bytes from a peer or a file are not to be run.

Read from the syntax trees, with import aliases followed. Naming a forbidden function is enough to be found, for
`load = pickle.loads` calls nothing yet. Writing pickles is no danger and is not looked at.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
SCANNED = ("proto", "appliance", "worker", "client", "deploy", "examples", "benchmarks", "docs")

FORBIDDEN_MODULES = {"cloudpickle", "dill", "jsonpickle", "marshal", "shelve"}
FORBIDDEN_NAMES = {
    *(f"{module}.{name}" for module in ("pickle", "_pickle") for name in ("load", "loads", "Unpickler", "_Unpickler")),
    "multiprocessing.reduction.ForkingPickler.loads",
    "torch.load",
    "torch.serialization.load",
}


def unpickling(source: str) -> Iterator[tuple[int, str]]:
    """(line, what) for everything in a module that unpickles, or could be made to."""
    syntax = ast.parse(source)
    bound: dict[str, str] = {}  # local name -> what it was imported as
    for node in ast.walk(syntax):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                bound[alias.asname or top] = alias.name if alias.asname else top
                if top in FORBIDDEN_MODULES:
                    yield node.lineno, f"import {alias.name}"
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                bound[alias.asname or alias.name] = full
                if node.module.partition(".")[0] in FORBIDDEN_MODULES or full in FORBIDDEN_NAMES:
                    yield node.lineno, f"from {node.module} import {alias.name}"
    for node in ast.walk(syntax):
        if isinstance(node, ast.Attribute):
            head, dot, rest = ast.unparse(node).partition(".")
            full = bound.get(head, head) + dot + rest
            if full in FORBIDDEN_NAMES:
                yield node.lineno, full
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle" and ast.unparse(node.value) != "False":
            yield node.lineno, f"allow_pickle={ast.unparse(node.value)}"


def test_nothing_in_the_tree_unpickles() -> None:
    modules = [module for folder in SCANNED for module in sorted((REPO / folder).rglob("*.py"))]
    assert modules
    found = [
        f"{module.relative_to(REPO)}:{line}: {what}"
        for module in modules
        for line, what in unpickling(module.read_text())
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        "import pickle\npickle.loads(b'')",
        "import pickle as p\nload = p.load",
        "import pickle\nclass U(pickle.Unpickler): ...",
        "from pickle import loads as decode",
        "def f():\n    import dill",
        "from cloudpickle import dumps",
        "import torch\ntorch.load('x', weights_only=True)",
        "import torch as t\nt.serialization.load('x')",
        "import torch.serialization\ntorch.serialization.load('x')",
        "from torch import load",
        "from torch import serialization\nserialization.load('x')",
        "from multiprocessing.reduction import ForkingPickler\nForkingPickler.loads(b'')",
        "import numpy as np\nnp.load('x', allow_pickle=True)",
    ],
)
def test_the_scan_sees(source: str) -> None:
    assert list(unpickling(source))


@pytest.mark.parametrize(
    "source",
    [
        "import pickle\npickle.dumps(1)",
        "import json\njson.loads('1')",
        "import numpy as np\nnp.load('x', allow_pickle=False)",
        "import torch\ntorch.save(1, 'x')\nmodel.load('x')",
    ],
)
def test_the_scan_lets_the_rest_pass(source: str) -> None:
    assert not list(unpickling(source))
