"""Who may import whom: `appliance`, `worker` and `client` know `penstock.proto` and never each other.

Read from the syntax trees, not from what happens to be loaded: an import inside a function or under TYPE_CHECKING
couples two roots as surely as one at the top of a module.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]

MAY_IMPORT = {
    "proto": {"proto"},
    "appliance": {"appliance", "proto"},
    "worker": {"worker", "proto"},
    "client": {"client", "proto"},
    "deploy": {"deploy", "proto", "appliance", "worker", "client"},
}
"""Root -> the roots that its modules may import."""

EXCEPTIONS = {Path("client/penstock/client/embedded.py"): {"appliance", "worker"}}
"""embedded.py starts the other two on this machine; there is no second exception."""


def roots_imported(source: str, package: str) -> Iterator[tuple[int, str]]:
    """(line, root) for every import of `penstock.<root>` in a module of `package`, in whatever form it is written."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")
            base = parents[: len(parents) - node.level + 1] if node.level else []
            base += node.module.split(".") if node.module else []
            names = [".".join([*base, alias.name]) for alias in node.names]
        elif isinstance(node, ast.Call) and node.args:
            called = ast.unparse(node.func).rpartition(".")[2]
            target = node.args[0]
            dynamic = called in {"import_module", "__import__"} and isinstance(target, ast.Constant)
            names = [ast.literal_eval(target)] if dynamic else []
        else:
            continue
        for name in names:
            first, _, rest = name.partition(".")
            if first == "penstock" and rest:
                yield node.lineno, rest.partition(".")[0]


def violations(path: Path, source: str) -> list[str]:
    """What the module at `path`, relative to the repository, imports against the rule."""
    root = path.parts[0]
    allowed = MAY_IMPORT[root] | EXCEPTIONS.get(path, set())
    return [
        f"{path}:{line}: {root} imports penstock.{imported}"
        for line, imported in roots_imported(source, ".".join(path.parts[1:-1]))
        if imported not in allowed
    ]


@pytest.mark.parametrize("root", MAY_IMPORT)
def test_root_imports_only_what_it_may(root: str) -> None:
    modules = sorted((REPO / root / "penstock").rglob("*.py"))
    assert modules, f"no module found below {root}/penstock"
    found = [line for module in modules for line in violations(module.relative_to(REPO), module.read_text())]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("worker/penstock/worker/a.py", "import penstock.client.api.data_loader"),
        ("worker/penstock/worker/a.py", "from penstock import appliance"),
        ("client/penstock/client/a.py", "def f():\n    from penstock.worker.daemon.daemon import main"),
        ("client/penstock/client/checkpoint/embedded.py", "import penstock.worker"),
        ("client/penstock/client/embedded.py", "import penstock.deploy"),
        ("appliance/penstock/appliance/a.py", "import importlib\nimportlib.import_module('penstock.worker')"),
        ("appliance/penstock/appliance/a.py", "from ..worker import daemon"),
        ("appliance/penstock/appliance/a.py", "if TYPE_CHECKING:\n    import penstock.client as c"),
        ("proto/penstock/proto/v1/a.py", "from penstock.client import DataLoader"),
    ],
)
def test_the_rule_sees_a_breach(path: str, source: str) -> None:
    assert violations(Path(path), source)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        (
            "worker/penstock/worker/a.py",
            "from penstock.proto import errors\nimport torch, penstock.worker.runner.runner",
        ),
        ("worker/penstock/data/a.py", "from ..runner import main\nfrom . import streaming"),
        ("client/penstock/client/embedded.py", "from penstock import appliance, worker"),
        ("deploy/penstock/deploy/cli/main.py", "import penstock.appliance, penstock.client, penstock.worker"),
    ],
)
def test_the_rule_lets_the_rest_pass(path: str, source: str) -> None:
    assert not violations(Path(path), source)
