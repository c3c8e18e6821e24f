"""The coverage-guided driver: every target in turn under libFuzzer (by atheris), in a process of its own with limits.

    python tests/fuzz/drive.py --minutes 10             all targets, the time shared equally
    python tests/fuzz/drive.py --only state,consumer    some
    python tests/fuzz/drive.py --replay FILE            a reproducer once more; its name begins with the target's

A finding is any exception but ours, an input that takes seconds or too much memory, or a crash of the interpreter. The
input that caused it is kept in the output folder under TARGET-..., and the exit code is 1. What was learned of a target
stays there too, and the next run goes on from it.

Python code of Penstock is instrumented, so that the fuzzer sees which branches it takes; torch, numpy and protobuf are
not, they are compiled.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import resource
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
LIMIT_MIB = 2048
"""Resident memory of a target, of which torch takes 300."""
ONE_INPUT_S = 10
LONGEST = 4096
"""Bytes of an input: enough for every branch, and short ones teach faster."""


def child(name: str, arguments: list[str]) -> None:
    """Fuzz one target in this process; does not return."""
    import atheris

    with atheris.instrument_imports(include=["penstock"], exclude=["penstock.proto.v1"]):
        from targets.every import EVERY
        from targets.target import hold

    target = EVERY[name]
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    def one(data: bytes) -> None:
        hold(target, data)

    atheris.Setup([sys.argv[0], *arguments], one)
    atheris.Fuzz()


def fuzz(name: str, seconds: int, out: Path) -> tuple[int, list[Path]]:
    """Fuzz one target in a child process; return its exit code and the inputs that it found."""
    from targets.every import EVERY

    corpus, found = out / "corpus" / name, out / "found"
    for folder in (corpus, found):
        folder.mkdir(parents=True, exist_ok=True)
    for data in EVERY[name].seeds():
        (corpus / hashlib.sha256(data).hexdigest()[:16]).write_bytes(data)
    before = set(found.iterdir())
    limits = [
        f"-max_total_time={seconds}",
        f"-timeout={ONE_INPUT_S}",
        f"-rss_limit_mb={LIMIT_MIB}",
        f"-max_len={LONGEST}",
    ]
    command = [sys.executable, __file__, "--child", name, str(corpus), *limits, f"-artifact_prefix={found}/{name}-"]
    with (out / f"{name}.log").open("wb") as log:
        done = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, timeout=seconds + 600)
    return done.returncode, sorted(set(found.iterdir()) - before)


def main() -> int:
    parser = argparse.ArgumentParser(description="Fuzz the decoders of what a peer says.")
    parser.add_argument("--minutes", type=float, default=10.0, help="for all targets together")
    parser.add_argument("--only", default="", help="targets, separated by commas")
    parser.add_argument("--out", type=Path, default=Path(".fuzz"), help="for what is learned and found")
    parser.add_argument("--replay", type=Path, help="an input of an earlier run")
    given = parser.parse_args()
    from targets.every import EVERY
    from targets.target import hold

    if given.replay is not None:
        name = given.replay.name.partition("-")[0]
        taken = hold(EVERY[name], given.replay.read_bytes())
        print(f"{name}: {'taken' if taken else 'refused, as it should be'}")
        return 0
    if importlib.util.find_spec("atheris") is None:
        print("atheris is not installed here: run `make fuzz`, which makes an environment with it", file=sys.stderr)
        return 2
    names = [name for name in given.only.split(",") if name] or list(EVERY)
    seconds = max(1, round(60 * given.minutes / len(names)))
    bad = 0
    for name in names:
        code, found = fuzz(name, seconds, given.out)
        print(f"{name:12} exit {code}, {len(found)} found; what it said stands in {given.out / name}.log", flush=True)
        for path in found:
            print(f"found: {path}; again with: python {Path(__file__).name} --replay {path}")
        bad += bool(code or found)
    print(f"{len(names)} targets, {bad} with findings")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.path.insert(0, str(HERE))
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], sys.argv[3:])
    sys.exit(main())
