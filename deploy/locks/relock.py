"""Write the lock files beside this one (`make lock`): what pip may install, by hash. torch is in none: each machine
chooses its build."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

HERE = Path(__file__).parent
LOCKS = {
    "development": ("3.11", ("dev",), ("torch",)),
    "coordinator": ("3.12", ("metrics",), ("torch", "fsspec")),
    "worker-plain": ("3.12", (), ("torch",)),
    "worker": ("3.12", ("compression", "http", "metrics", "s3", "streaming"), ("torch",)),
    "build": ("3.12", None, ()),
}
"""By lock file: Python, extras (None: what builds an image), packages left out. All but the first are for the images
(../docker/Dockerfile)."""
HEADER = "# {name}: what pip may install on Python {python} and Linux, by hash. Written by `make lock`; not by hand.\n"


def wanted(extras: tuple[str, ...] | None) -> list[str]:
    """Return the requirements of a lock file."""
    settings = tomllib.loads((HERE.parents[1] / "pyproject.toml").read_text())
    if extras is None:
        return [*settings["build-system"]["requires"], "cyclonedx-bom"]
    project = settings["project"]
    return [*project["dependencies"], *(d for extra in extras for d in project["optional-dependencies"][extra])]


def relock(uv: str, name: str) -> None:
    """Write one lock file with the newest versions that pyproject.toml admits. `uv`: path of the program."""
    python, extras, without = LOCKS[name]
    with tempfile.TemporaryDirectory() as folder:
        excluded = Path(folder, "excluded.txt")
        excluded.write_text("\n".join(without))
        command = [uv, "pip", "compile", "-", "--quiet", "--generate-hashes", "--no-header", "--no-annotate"]
        command += ["--no-config", "--python-version", python, "--python-platform", "x86_64-manylinux_2_28"]
        done = subprocess.run(
            [*command, "--excludes", str(excluded)],
            input="\n".join(wanted(extras)),
            text=True,
            stdout=subprocess.PIPE,
            check=True,
        )
    (HERE / f"{name}.txt").write_text(HEADER.format(name=name, python=python) + done.stdout)


if __name__ == "__main__":
    for name in LOCKS:
        relock(sys.argv[1], name)
