"""Rules of imports: `appliance`, `worker` and `client` never import each other, and packages import one way.

Read from the syntax trees, not from what happens to be loaded: an import inside a function or under TYPE_CHECKING
couples two packages as surely as one at the top of a module.
"""

from __future__ import annotations

import ast
import functools
from collections import defaultdict
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]

PACKAGES = {
    "proto": "proto",
    "runtime": "proto",
    "appliance": "appliance",
    "worker": "worker",
    "data": "worker",
    "client": "client",
    "deploy": "deploy",
}
"""Package -> the root folder that it lies in."""

SHARED = {"proto", "runtime"}
MAY_IMPORT = {
    "proto": SHARED,
    "runtime": SHARED,
    "appliance": {"appliance", *SHARED},
    "worker": {"worker", *SHARED},
    "data": {"data", *SHARED},
    "client": {"client", *SHARED},
    "deploy": {"deploy", *SHARED},
}
"""Package -> the packages of which its modules may import all. `deploy` has ENTRY_POINTS besides."""

EXCEPTIONS = {
    # It is the process that runs the other two, beside the training process.
    "penstock.client.embedded_daemons": {"penstock.appliance", "penstock.worker"},
    # It runs the worker's loaders in this process, where there is no daemon to ask for their batches: tests of training
    # loops (penstock.client.testing). A copy of them would not be what is tested.
    "penstock.client.in_process": {"penstock.worker"},
    # It makes an input_fn of torch's own arguments, which is a source of ours.
    "penstock.client.torch_loaders": {"penstock.data"},
    # They read and write buckets by the means that read datasets.
    "penstock.client.checkpoint.bucket_lists": {"penstock.data"},
    "penstock.client.checkpoint.restoring.places": {"penstock.data"},
    "penstock.client.checkpoint.restoring.sources": {"penstock.data"},
    # It loads once what the input_fns of all its children may use.
    "penstock.worker.runner.fork_server": {"penstock.data"},
}
"""Module -> what it may import against MAY_IMPORT."""

ENTRY_POINTS = {
    "penstock.appliance.journal.journal": "a state directory that is private before a token is written into it",
    "penstock.appliance.server.server": "a coordinator",
    "penstock.appliance.limits": "with other limits than its own",
    "penstock.worker.daemon.serving": "a worker",
    "penstock.worker.daemon.worker_settings": "with its settings",
    **dict.fromkeys(
        [
            "penstock.worker.processes.control_channel",
            "penstock.worker.processes.fork_servers",
            "penstock.worker.processes.interpreters",
            "penstock.worker.processes.orphans",
            "penstock.worker.processes.user_code",
        ],
        "processes that run users' loaders outside of a worker",
    ),
    **dict.fromkeys(
        [
            "penstock.worker.loader.restart_plan",
            "penstock.worker.loader.restart_points",
            "penstock.worker.loader.slot_loader",
            "penstock.worker.loader.start",
            "penstock.worker.loader.travel",
        ],
        "what runs in them",
    ),
    "penstock.client": "what users have",
    "penstock.client.states.saved_state": "the states that they save",
    "penstock.client.checkpoint.restoring.places": "where checkpoints are",
    "penstock.client.checkpoint.restoring.whole": "what is in a checkpoint",
    "penstock.data": "what users have",
    "penstock.data.formats.contents": "what an index knows of a file's content",
    "penstock.data.formats.index": "the index of a dataset's folder",
    "penstock.data.formats.shards": "what an index lists",
    "penstock.data.ordering.order_states": "the states of its sources",
}
"""Modules of other roots that `deploy` imports, and for what. It imports no other, nor what lies below them."""

DATA_HOOK = "penstock.worker.batch"
"""All that `penstock.data` may import of the worker: where a batch is built in the memory that it is sent from."""


@functools.cache
def modules() -> dict[str, Path]:
    """Name -> file, of all modules of the product but the generated ones."""
    found = {}
    for package, root in PACKAGES.items():
        for path in sorted((REPO / root / "penstock" / package).rglob("*.py")):
            if not path.stem.endswith(("_pb2", "_pb2_grpc")):
                parts = path.relative_to(REPO / root).with_suffix("").parts
                found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@functools.cache
def imports(source: str, package: str) -> tuple[tuple[int, str], ...]:
    """(line, name) for each import of something below `penstock` in a module of `package`, in whatever form."""
    return tuple(_imports(source, package))


def _imports(source: str, package: str) -> Iterator[tuple[int, str]]:
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
            if name.startswith("penstock."):
                yield node.lineno, name


def _below(name: str, package: str) -> bool:
    return f"{name}.".startswith(f"{package}.")


def violations(module: str, source: str, *, is_package: bool = False) -> list[str]:
    """Return the imports of `module` that MAY_IMPORT does not allow."""
    package = module.split(".")[1]
    allowed = {f"penstock.{name}" for name in MAY_IMPORT[package]} | EXCEPTIONS.get(module, set())
    if package == "data":
        allowed.add(DATA_HOOK)
    return [
        f"{module}:{line}: {package} imports {name}"
        for line, name in imports(source, module if is_package else module.rpartition(".")[0])
        if not any(_below(name, one) for one in allowed) and not (package == "deploy" and _enters(name))
    ]


def _enters(name: str) -> bool:
    """Return True if an entry point is imported, or a name from one that is not itself a module."""
    return name in ENTRY_POINTS or (name not in modules() and name.rpartition(".")[0] in ENTRY_POINTS)


def cycle(graph: Mapping[str, set[str]]) -> list[str]:
    """Packages that import each other in a circle; empty if there are none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(reversed(error.args[1]))
    return []


def _package_graph(found: Mapping[str, Path]) -> dict[str, set[str]]:
    """Package -> the packages that it imports. A module that lies beside packages counts as one by itself."""
    packages = {name if path.stem == "__init__" else name.rpartition(".")[0] for name, path in found.items()}
    holding = {name for name in packages if any(other.startswith(f"{name}.") for other in packages)}

    def node(module: str) -> str:
        package = module if found[module].stem == "__init__" else module.rpartition(".")[0]
        return module if package in holding else package

    graph: dict[str, set[str]] = defaultdict(set)
    for module, path in found.items():
        package = module if path.stem == "__init__" else module.rpartition(".")[0]
        for _, name in imports(path.read_text(), package):
            imported = name if name in found else name.rpartition(".")[0]
            if imported in found and node(imported) != node(module):
                graph[node(module)].add(node(imported))
    return graph


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_package_imports_only_what_it_may(package: str) -> None:
    found = {name: path for name, path in modules().items() if _below(name, f"penstock.{package}")}
    assert found, f"no module found of penstock.{package}"
    wrong = [
        line
        for name, path in found.items()
        for line in violations(name, path.read_text(), is_package=path.stem == "__init__")
    ]
    assert not wrong, "\n".join(wrong)


def test_packages_import_one_way() -> None:
    assert not cycle(_package_graph(modules()))


@pytest.mark.parametrize("package", PACKAGES)
def test_modules_import_one_way(package: str) -> None:
    """Imports inside functions count too: a circle that is put off is one."""
    found = {name: path for name, path in modules().items() if _below(name, f"penstock.{package}")}
    graph: dict[str, set[str]] = {}
    for module, path in found.items():
        inside = module if path.stem == "__init__" else module.rpartition(".")[0]
        names = {name for _, name in imports(path.read_text(), inside)}
        imported = {name if name in found else name.rpartition(".")[0] for name in names}
        graph[module] = imported & found.keys() - {module}
    assert not cycle(graph)


def test_entry_points_are_modules() -> None:
    assert ENTRY_POINTS.keys() <= modules().keys()


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("penstock.data.a", "from penstock.worker.runner import runner"),
        ("penstock.client.a", "def f():\n    from penstock.worker.daemon.daemon import main"),
        ("penstock.appliance.a", "import importlib\nimportlib.import_module('penstock.worker')"),
        ("penstock.appliance.a", "from ..worker import daemon"),
        ("penstock.deploy.a", "from penstock.worker.runner.runner import run_slot"),
    ],
)
def test_the_rule_sees_a_breach(module: str, source: str) -> None:
    assert violations(module, source)
