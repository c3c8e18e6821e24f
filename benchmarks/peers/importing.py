"""Import of mosaicml-streaming where torchvision cannot be imported.

The package imports torchvision for its image datasets, which are not used here. That import fails if torchvision was
built for another torch: pip may find one for CUDA although torch is for processors. Then STUBS replaces torchvision.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

__all__ = ["STUBS", "import_streaming"]

STUBS = Path(__file__).parent / "stubs"
"""Folder with a torchvision that has what mosaicml-streaming imports. It belongs before site-packages in the path."""


def import_streaming() -> Any:
    """Return the package, imported by name, because the type checker's environment lacks it."""
    try:
        importlib.import_module("torchvision")
    except Exception:
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        sys.path.insert(0, str(STUBS))
    return importlib.import_module("streaming")
