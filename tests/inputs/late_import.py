"""A script whose imports start threads, so that it cannot be imported before a fork: its name is the first argument."""

from __future__ import annotations

import importlib
import sys


def main() -> None:
    sys.argv = sys.argv[1:]
    importlib.import_module(sys.argv[0]).main()
