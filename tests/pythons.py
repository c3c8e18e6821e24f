"""`make pythons`: Penstock on other versions of Python than the one of .venv, as far as this machine has them.

For each version: mypy with its rules; then, if there is an interpreter, an environment below build/pythons in which all
modules are compiled, with warnings as errors, and tests are run. torch for another Python is a download of gigabytes:
they are those that need none (the coordinator, its simulation, and what decides without data), unless --torch asks for
all of them. What was not run is said, and why: pytest names each test that it skipped, and the end says the rest.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
ROOTS = ("proto", "appliance", "worker", "client", "deploy")
WITHOUT_TORCH = (
    "tests/appliance",
    "tests/simulation",
    "tests/house/test_error_catalogue.py",
    "tests/house/test_imports.py",
    "tests/house/test_no_unpickling.py",
    "tests/proto/test_assignment.py",
    "tests/proto/test_position.py",
    "tests/security/test_admission.py",
    "tests/security/test_tickets.py",
    "tests/security/test_tls_files.py",
    "tests/security/test_tokens.py",
    "tests/deploy/test_settings.py",
)
TOOLS = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis")


def interpreter(version: str) -> str | None:
    """Return the interpreter on the path, or where pyenv puts it. One that does not start does not count: pyenv's shims
    on the path often only print an error."""
    installed = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    for python in (shutil.which(f"python{version}"), *map(str, reversed(installed))):
        if python and subprocess.run([python, "-c", ""], capture_output=True).returncode == 0:
            return python
    return None


def requirements(with_torch: bool) -> list[list[str]]:
    """Return the requirements of pip's runs, one list for each."""
    with (REPO / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    pinned = project["optional-dependencies"]["dev"]
    if with_torch:
        # torch alone and first, as `make setup` does it: pip takes the build that its configuration prefers.
        return [[line for line in pinned if line.startswith("torch==")], ["--editable", f"{REPO}[dev]"]]
    tools = [line for line in pinned if re.split(r"[=<>\[]", line)[0] in TOOLS]
    return [[line for line in project["dependencies"] if not line.startswith("torch")] + tools]


def run(*command: str) -> bool:
    print("$", " ".join(command), flush=True)
    roots = os.pathsep.join(str(REPO / root) for root in ROOTS)
    return subprocess.run(command, cwd=REPO, env={**os.environ, "PYTHONPATH": roots}).returncode == 0


def check(version: str, with_torch: bool) -> tuple[list[str], list[str]]:
    """Return what failed, and what was not run."""
    failed = [] if run(sys.executable, "-m", "mypy", "--python-version", version) else ["mypy"]
    base = interpreter(version)
    if base is None:
        return failed, [f"everything but mypy: there is no python{version} here"]
    folder = REPO / "build" / "pythons" / version
    python = str(folder / "bin" / "python")
    made = run(base, "-m", "venv", str(folder))
    if not made or not all(run(python, "-m", "pip", "install", "--quiet", *what) for what in requirements(with_torch)):
        return [*failed, "its environment"], ["bytecode and tests: there is no environment for them"]
    sources = [*ROOTS, "tests", "examples", "benchmarks"]
    if not run(python, "-W", "error", "-m", "compileall", "-q", "-f", *sources):
        failed.append("compileall")
    tests = ["-n", "4", "--dist", "loadfile", "--no-loadscope-reorder"] if with_torch else list(WITHOUT_TORCH)
    if not run(python, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", *tests):
        failed.append("tests")
    return failed, [] if with_torch else ["tests that need torch (--torch runs them)"]


def main() -> None:
    parser = argparse.ArgumentParser(description="Penstock on other versions of Python.")
    parser.add_argument("versions", nargs="*", default=["3.12", "3.13"])
    parser.add_argument("--torch", action="store_true", help="install torch, too (gigabytes), and run all tests")
    options = parser.parse_args()
    lines, well = [], True
    for version in options.versions:
        failed, skipped = check(version, options.torch)
        well = well and not failed
        lines.append(f"Python {version}: {'failed: ' + ', '.join(failed) if failed else 'ok'}")
        lines += [f"    not run: {what}" for what in skipped]
    print("\n".join(lines))
    raise SystemExit(0 if well else 1)


if __name__ == "__main__":
    main()
