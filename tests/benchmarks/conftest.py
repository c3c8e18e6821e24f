"""The benchmarks are a package of the clone and of no distribution, so they are found from its root."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent.parent))
