"""Single mechanism for child processes: every call that starts, watches or ends one goes through
penstock.runtime.process."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

REPO = Path(__file__).parents[2]
ROOTS = ("appliance", "client", "deploy", "proto", "worker")
HOME = REPO / "proto/penstock/runtime/process"

FORBIDDEN = {
    "os": {
        *("fork", "forkpty", "posix_spawn", "posix_spawnp", "popen", "system", "startfile"),
        *("wait", "wait3", "wait4", "waitid", "waitpid", "pidfd_open", "kill", "killpg"),
    },
    "signal": {"pidfd_send_signal"},
    "asyncio": {"create_subprocess_exec", "create_subprocess_shell", "subprocess"},
    "pty": {"fork", "spawn"},
}
"""Module -> what nothing else may use of it. Of `subprocess`: all but ONE_SHOT."""

ONE_SHOT = {"run", "DEVNULL", "PIPE", "STDOUT", "TimeoutExpired", "CompletedProcess"}
"""Names of `subprocess` that are allowed: for another program that is run to its end, with a deadline."""


def _allowed(module: str, name: str) -> bool:
    return name in ONE_SHOT if module == "subprocess" else name not in FORBIDDEN.get(module, ())


def breaches(source: str) -> Iterator[str]:
    """Yield what a module does to processes without penstock.runtime.process."""
    words = ["subprocess", "shell", *(f"from {module} import" for module in FORBIDDEN)]
    words += [f"{module}.{name}" for module, names in FORBIDDEN.items() for name in names]
    if not any(word in source for word in words):
        return  # as most modules, which so need no syntax tree
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            uses = [(node.value.id, node.attr)]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            uses = [(node.module, alias.name) for alias in node.names]
        elif isinstance(node, ast.Call):
            names = {keyword.arg for keyword in node.keywords}
            if "shell" in names and any(ast.unparse(keyword) == "shell=True" for keyword in node.keywords):
                yield f"line {node.lineno}: {ast.unparse(node.func)} with a shell"
            runs = isinstance(node.func, ast.Attribute) and node.func.attr == "run" and "timeout" not in names
            if runs and ast.unparse(node.func) == "subprocess.run":
                yield f"line {node.lineno}: subprocess.run without a deadline"
            continue
        else:
            continue
        for module, name in uses:
            if not _allowed(module, name):
                yield f"line {node.lineno}: {module}.{name}"


def test_processes_are_started_in_one_place() -> None:
    wrong = [
        f"{path.relative_to(REPO)}: {breach}"
        for root in ROOTS
        for path in sorted((REPO / root / "penstock").rglob("*.py"))
        if path.parent != HOME
        for breach in breaches(path.read_text())
    ]
    assert not wrong, "\n".join(wrong)
    assert any(True for path in HOME.rglob("*.py") for _ in breaches(path.read_text())), "and it would be seen"
