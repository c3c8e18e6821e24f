"""Import of mosaicml-streaming also if torchvision cannot be imported.

The package imports torchvision for its image datasets, which are not used here. That import fails if torchvision was
built for another torch: pip may install a torchvision for CUDA beside a torch for CPUs. Then the package in STUBS
replaces torchvision.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

__all__ = ["STUBS", "import_streaming"]

STUBS = Path(__file__).parent / "stubs"
"""Folder with a replacement of torchvision that has only what mosaicml-streaming imports. The folder must be before
site-packages in sys.path."""


def import_streaming() -> Any:
    """Import mosaicml-streaming, and return the package. It is imported by name, because the type checker's environment
    lacks it."""
    try:
        importlib.import_module("torchvision")
    except Exception:
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        sys.path.insert(0, str(STUBS))
    return importlib.import_module("streaming")
