"""Compile the tests as pytest does, which rewrites their asserts, and import none: `make test` runs this before it
starts five processes that would each do it. What is compiled already is only looked at."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from _pytest.assertion import rewrite
from _pytest.assertion.rewrite import assertstate_key

TESTS = Path(__file__).parents[1]


class Compiling:
    """In place of pytest's own collection."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self, session: pytest.Session) -> bool:
        state = session.config.stash[assertstate_key]
        for path in (*TESTS.rglob("test_*.py"), *TESTS.rglob("conftest.py")):
            folder = rewrite.get_cache_dir(path)
            pyc = folder / f"{path.stem}{rewrite.PYC_TAIL}"
            if rewrite._read_pyc(path, pyc) is None and rewrite.try_makedirs(folder):
                source_hash, code = rewrite._rewrite_test(path, session.config)
                rewrite._write_pyc(state, code, source_hash, pyc)
        return True


if __name__ == "__main__":
    arguments: Sequence[str] = ("--noconftest", "-p", "no:terminal", "-p", "no:cacheprovider", str(TESTS))
    ended = pytest.main([*arguments], plugins=[Compiling()])
    sys.exit(0 if ended in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED) else ended)
