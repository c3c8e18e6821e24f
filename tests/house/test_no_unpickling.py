"""Absence of unpickling in the tree: a pickle is a program, and bytes from a peer or a file must not be run.

What unpickles in secret counts too (multiprocessing's pipes and queues, object collectives, arrays of objects), and so
does what runs text: eval, exec, YAML with tags. Who uses none of them has nothing to keep safe.

Read from the syntax trees, with import aliases followed. Naming a forbidden function is enough to be found, for
`load = pickle.loads` calls nothing yet. Writing pickles is no danger and is not looked at.
"""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

REPO = Path(__file__).parents[2]
SCANNED = ("proto", "appliance", "worker", "client", "deploy", "examples", "benchmarks", "docs")

FORBIDDEN_MODULES = {"cloudpickle", "dill", "joblib", "jsonpickle", "marshal", "shelve", "yaml"}
FORBIDDEN_NAMES = {
    *(f"{module}.{name}" for module in ("pickle", "_pickle") for name in ("load", "loads", "Unpickler", "_Unpickler")),
    "concurrent.futures.ProcessPoolExecutor",
    "concurrent.futures.process",
    *(f"multiprocessing.{name}" for name in ("JoinableQueue", "Manager", "Pipe", "Pool", "Queue", "SimpleQueue")),
    *(f"multiprocessing.{name}" for name in ("connection", "managers", "pool", "queues")),
    "multiprocessing.reduction.ForkingPickler.loads",
    "numpy.lib.format.read_array",
    "pandas.read_pickle",
    *(f"torch.distributed.{name}" for name in ("all_gather_object", "broadcast_object_list", "gather_object")),
    *(f"torch.distributed.{name}" for name in ("recv_object_list", "scatter_object_list")),
    "torch.hub.load",
    "torch.load",
    "torch.multiprocessing",
    "torch.serialization.load",
}
FORBIDDEN_CALLS = {"compile", "eval", "exec"}
RUNS_CODE = {Path("worker/penstock/worker/processes/user_code.py"): 2}
"""Module -> calls of FORBIDDEN_CALLS in it. The one place is where an embedded worker loads the training script by the
path that its own user's process named (`check_plain` refuses it from anybody else)."""
UNPICKLES = {
    Path("proto/penstock/proto/state/by_value.py"): ["import cloudpickle", "pickle.Unpickler"],
    Path("worker/penstock/data/formats/encodings.py"): ["pickle.loads"],
    Path("client/penstock/client/checkpoint/restoring/metadata_reader.py"): ["pickle.Unpickler"],
    Path("client/penstock/client/checkpoint/values/objects.py"): ["pickle.Unpickler", "torch.load", "torch.load"],
    Path("deploy/penstock/deploy/operations/saved_file.py"): ["torch.load"],
    Path("deploy/penstock/deploy/operations/export_checkpoint.py"): ["torch.load"],  # weights_only, of its own bytes
    Path("benchmarks/checkpoint_small.py"): ["torch.load"],  # of the file that it has just written
}
"""Module -> what it unpickles with. One place is a dataset's column that its writer pickled, and only for a user who
said allow_unsafe_types=True: tests/datasets/test_encodings.py holds that. And one is a file that a user named to a
command, with weights_only=True, which runs nothing: tests/deploy/test_saved_file.py holds that. The third is a
checkpoint that is restored: torch's index, of dcp.save or an earlier Penstock, by a process whose unpickler finds
stand-ins alone: tests/checkpoint/test_hostile_folders.py; objects by one that finds no class at all, else with
weights_only=True unless the user says allow_unsafe_types=True: tests/checkpoint/test_restore.py. The fourth is what an
embedded worker gets from the training process that started it, of the same user on the same machine: a lambda, say,
that has no name. Other workers refuse it: tests/proto/test_by_value.py."""


def dotted(node: ast.expr) -> str:
    """Return `a.b.c` for attributes of a name; another expression is "?". (ast.unparse takes ten times as long.)"""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


_WORDS = [
    *((module,) for module in FORBIDDEN_MODULES),
    *(name.split(".") for name in FORBIDDEN_NAMES),
    ("allow_pickle",),
]
_CALLS = re.compile(rf"(?<!\.)\b({'|'.join(FORBIDDEN_CALLS)})\b")


def is_suspect(source: str) -> bool:
    """Return False for a module that has not all words of anything forbidden: most need no syntax tree."""
    found = set(re.findall(r"\w+", source))
    return any(found.issuperset(words) for words in _WORDS) or _CALLS.search(source) is not None


def unpickling(source: str) -> Iterator[tuple[int, str]]:
    """(line, what) for everything in a module that unpickles, or could be made to."""
    if not is_suspect(source):
        return
    syntax = ast.parse(source)
    bound: dict[str, str] = {}  # local name -> what it was imported as
    for node in ast.walk(syntax):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                bound[alias.asname or top] = alias.name if alias.asname else top
                if top in FORBIDDEN_MODULES or alias.name in FORBIDDEN_NAMES:
                    yield node.lineno, f"import {alias.name}"
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                bound[alias.asname or alias.name] = full
                if node.module.partition(".")[0] in FORBIDDEN_MODULES or {node.module, full} & FORBIDDEN_NAMES:
                    yield node.lineno, f"from {node.module} import {alias.name}"
    for node in ast.walk(syntax):
        if isinstance(node, ast.Attribute):
            head, dot, rest = dotted(node).partition(".")
            full = bound.get(head, head) + dot + rest
            if full in FORBIDDEN_NAMES:
                yield node.lineno, full
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in FORBIDDEN_CALLS:
            yield node.lineno, f"{node.func.id}(...)"
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle" and ast.unparse(node.value) != "False":
            yield node.lineno, f"allow_pickle={ast.unparse(node.value)}"


def test_nothing_in_the_tree_unpickles() -> None:
    modules = [module for folder in SCANNED for module in sorted((REPO / folder).rglob("*.py"))]
    assert modules
    assert {module.relative_to(REPO).parts[0] for module in modules} >= {
        "proto",
        "appliance",
        "worker",
        "client",
        "deploy",
    }
    found, runs, unpickles = [], Counter[Path](), defaultdict[Path, list[str]](list)
    for module in modules:
        place = module.relative_to(REPO)
        for line, what in unpickling(module.read_text()):
            if what.endswith("(...)") and place in RUNS_CODE:
                runs[place] += 1
            elif place in UNPICKLES:
                unpickles[place].append(what)
            else:
                found.append(f"{place}:{line}: {what}")
    assert not found, "\n".join(found)
    assert runs == RUNS_CODE
    assert unpickles == UNPICKLES
