"""Result of DataLoader.state_dict(): a dict that prints as one line, because states hold tables and bytes of any size.

Everything else takes it for a dict: pickled, and so after torch.load, it is an OrderedDict, which torch's
weights_only=True accepts, and which needs no Penstock."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any


class StateDict(dict[str, Any]):
    about = "a loader"

    def __repr__(self) -> str:
        return f"<State of {self.about}; dict() of it shows its {len(self)} items>"

    def __deepcopy__(self, memo: dict[int, Any]) -> StateDict:
        same = StateDict(copy.deepcopy(dict(self), memo))
        same.about = self.about
        return same

    def __reduce_ex__(self, protocol: Any) -> Any:
        return OrderedDict, (), None, None, iter(self.items())
