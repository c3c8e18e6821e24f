"""`make versions`: Penstock with the oldest releases that pyproject.toml admits, and with the newest that pip finds.

Development is held at one release of each dependency, and what `pip install penstock` brings is another one. So this
makes an environment of each kind below build/versions and runs in it the tests of the control plane and of checkpoints,
and a fleet of 1,000 simulated workers, each with a connection of its own, whose state is fetched. grpcio 1.85 showed
why a fleet: all other tests passed with it, and states of 1,000 workers never came.

The oldest releases are the lower bounds in pyproject.toml. The newest are found each time anew, so a release that came
out today may fail here. That is the purpose. Where the package index cannot be reached nothing is run, which is said.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
FOLDER = REPO / "build" / "versions"
KINDS = ("oldest", "newest")
TESTS = (
    "tests/appliance",
    "tests/proto",
    "tests/checkpoint",
    "tests/deploy/test_cli.py",  # pydantic and typer
    "tests/deploy/test_config.py",
)
TOOLS = (
    *("editables", "hatchling", "hypothesis", "pytest", "pytest-timeout", "pytest-xdist"),
    *("ml-dtypes", "pillow", "torchdata", "transformers", "zstandard"),
)
"""What the tests need beside the dependencies, in the releases of development."""
BUCKETS = ("moto", "s3fs")
"""What the tests of buckets need besides, which are skipped without it. It needs newer releases than the oldest."""
REMOTE = "grpcio-health-checking"
"""Package by which the index is tried. The machines of CI have no copy of it on their disk."""
PYTEST = ("-q", "-p", "no:cacheprovider", "-m", "not slow", "-n", "5", "--dist", "loadfile", "--no-loadscope-reorder")
FLEET = "tests/benchmarks/test_fleet.py"


def project() -> dict[str, list[str]]:
    """Return the requirements: those of Penstock, and those of its development."""
    with (REPO / "pyproject.toml").open("rb") as file:
        found = tomllib.load(file)["project"]
    return {"core": found["dependencies"], "dev": found["optional-dependencies"]["dev"]}


def requirements(kind: str) -> list[str]:
    """Return what pip installs: lower bounds as exact releases for "oldest", no bounds for "newest"."""
    named = project()
    wanted = TOOLS if kind == "oldest" else TOOLS + BUCKETS
    tools = [line for line in named["dev"] if re.split(r"[=<>\[]", line)[0] in wanted]
    core = [line.replace(">=", "==") for line in named["core"]] if kind == "oldest" else named["core"]
    return core + tools


def python(kind: str) -> str:
    return str(FOLDER / kind / "bin" / "python")


def succeeds(*command: str, timeout_s: float | None = None) -> bool:
    """Run a command in the repository. Return True if it succeeds. What it writes to standard error is shown."""
    print("$", " ".join(command), flush=True)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    try:
        return subprocess.run(command, cwd=REPO, env=environment, timeout=timeout_s).returncode == 0
    except subprocess.TimeoutExpired:
        print(f"versions: {' '.join(command[2:])} did not end within {timeout_s:g} s", file=sys.stderr)
        return False


def index_answers() -> bool:
    """Return True if pip can ask the package index which releases there are."""
    ask = [sys.executable, "-m", "pip", "--retries", "1", "--timeout", "20", "index", "versions", REMOTE]
    return subprocess.run(ask, capture_output=True).returncode == 0


def install(kind: str) -> bool:
    """Make the environment of this kind, with Penstock in it. Return True if all could be installed."""
    pip = [python(kind), "-m", "pip", "install", "--quiet"]
    return (
        succeeds(sys.executable, "-m", "venv", "--clear", str(FOLDER / kind))
        # Bytecode is written by the processes that import a module: most of what torch brings is never imported.
        and succeeds(*pip, "--no-compile", "--only-binary", ":all:", *requirements(kind))
        and succeeds(*pip, "--no-deps", "--no-build-isolation", "--editable", ".")
    )


def show(kind: str) -> bool:
    """Print the installed releases of Penstock's dependencies. Return True if these fit together."""
    names = [re.split(r"[=<>\[]", line)[0] for line in project()["core"]]
    shown = f"*(f'{{n}} {{m.version(n)}}' for n in {names})"
    releases = f"import importlib.metadata as m; print('{kind}:', {shown}, sep='  ')"
    return succeeds(python(kind), "-c", releases) and succeeds(python(kind), "-m", "pip", "check")


def passes_tests(kind: str) -> bool:
    return succeeds(python(kind), "-m", "pytest", *PYTEST, *TESTS)


def serves_a_fleet(kind: str) -> bool:
    return succeeds(python(kind), "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "slow", FLEET, timeout_s=600)


CHECKS: tuple[tuple[str, Callable[[str], bool]], ...] = (
    ("releases that fit together", show),
    ("tests", passes_tests),
    ("fleet", serves_a_fleet),
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Penstock with the oldest and the newest releases of its dependencies."
    )
    parser.add_argument("kinds", nargs="*", choices=[*KINDS, "all"], default="all")
    given = parser.parse_args().kinds
    kinds = KINDS if "all" in given else given
    if not index_answers():
        print(f"versions: skipped, because pip cannot ask the package index for {REMOTE}", file=sys.stderr)
        return 0
    with ThreadPoolExecutor() as pool:  # pip unpacks gigabytes, on one core each
        installed = dict(zip(kinds, pool.map(install, kinds), strict=True))
    failed = [f"{kind}: environment" for kind in kinds if not installed[kind]]
    for kind in kinds:
        if installed[kind]:
            failed += [f"{kind}: {name}" for name, check in CHECKS if not check(kind)]
    if not failed:
        shutil.rmtree(FOLDER)  # each run makes them anew
    print("versions: " + (f"failed: {', '.join(failed)}" if failed else "ok"))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
