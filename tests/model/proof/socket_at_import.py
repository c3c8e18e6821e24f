"""Dataset that reads on in a file and in a socket that modules have opened when they were imported."""

from __future__ import annotations

from typing import Any

from proof import at_import
from proof.mutations import mutable
from torch.utils.data import DataLoader

at_import.open_sockets()


@mutable
def opens_socket(length: int = 20) -> Any:
    return DataLoader(at_import.Opened(length), batch_size=None)
