"""Process of one compared reader, which answers requests: `python -m benchmarks.readers.player MODULE CLASS`."""

from __future__ import annotations

import importlib
import sys
import warnings

from benchmarks.streaming_player import play

if __name__ == "__main__":
    module, name = sys.argv[1:]
    # Arrays over read-only memory, of which torch warns; no code here writes to them.
    warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
    play(getattr(importlib.import_module(f"benchmarks.readers.{module}"), name)())
