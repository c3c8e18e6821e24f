"""Importing this module raises ImportError on other systems than Linux, before other code of Penstock fails there."""

from __future__ import annotations

import sys

_NAMES = {"darwin": "macOS", "win32": "Windows"}

if sys.platform != "linux":
    raise ImportError(
        f"Penstock must run on Linux, got {_NAMES.get(sys.platform, sys.platform)}: it uses memfd, pidfd and prctl. "
        "Use a Linux machine, a container (deploy/docker), or WSL 2 on Windows"
    )
