"""Importing this module raises ImportError on other systems than Linux, before other code of Penstock fails there."""

from __future__ import annotations

import sys

if sys.platform != "linux":
    raise ImportError(f"Penstock must run on Linux, got {sys.platform}: use a container (deploy/docker), or WSL 2")
