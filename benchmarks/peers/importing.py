"""Import of mosaicml-streaming where torchvision cannot be imported."""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
import types
from typing import Any

import torch

__all__ = ["import_streaming"]


def import_streaming() -> Any:
    """Return the package, imported by name, because the type checker's environment lacks it.

    The package imports torchvision for its image datasets, which are not used here. That import fails if torchvision
    was built for another torch: pip may find one for CUDA although torch is for processors. Then a stub replaces
    torchvision.
    """
    try:
        importlib.import_module("torchvision")
    except Exception:
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        names: dict[str, dict[str, Any]] = {"": {}, ".datasets": {"VisionDataset": object}, ".transforms": {}}
        names[".transforms.functional"] = {"to_tensor": torch.as_tensor}
        for name, attributes in names.items():
            module = types.ModuleType(f"torchvision{name}")
            module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None, is_package=True)
            module.__path__ = []
            vars(module).update(attributes)
            sys.modules[module.__name__] = module
    return importlib.import_module("streaming")
