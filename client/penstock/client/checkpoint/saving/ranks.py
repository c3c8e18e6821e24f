"""Exchange of small values between the ranks of a training job: JSON over a separate process group.

It uses gloo, so that nothing waits for a GPU's kernels, and has its own timeout, so that a lost rank becomes an error.
JSON and not pickle, because nothing from another machine is unpickled."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from penstock.client.host_group import HostGroup
from penstock.proto.errors import CATALOGUE, CheckpointError, InvalidArgumentError, PenstockError

MARGIN_S = 60.0


class Ranks:
    """Ranks that save and restore together; each makes a Ranks, at the same point of the program. `group` None: all
    ranks, or only this process. `timeout_s`: how long a rank may be busy before an exchange."""

    def __init__(self, group: dist.ProcessGroup | None, timeout_s: float) -> None:
        self.rank, self.size = 0, 1
        self.timeout_s = timeout_s
        self._group: HostGroup | None = None
        self._alone = not _initialized()  # checked again at each exchange
        if _initialized() and dist.get_rank(group) < 0:
            raise InvalidArgumentError(f"rank {dist.get_rank()} must be in AsyncCheckpointer(group=...), but is not")
        if _initialized() and dist.get_world_size(group) > 1:
            members = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
            self.rank, self.size = dist.get_rank(group), len(members)
            # The timeout is longer than a rank may wait for its own writer before it joins the exchange.
            self._group = HostGroup(members, dist.get_rank(), timeout_s + MARGIN_S)

    def exchange(self, value: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the values of all ranks. Raises CheckpointError if a rank is lost or does not answer in time."""
        if self._alone and _initialized() and dist.get_world_size() > 1:
            raise CheckpointError(
                "this AsyncCheckpointer was created before init_process_group, and covers only this rank"
            )
        if self._group is None:
            return [value]
        own = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        try:
            lengths = self._group.gather(torch.tensor([own.numel()], device="cpu"))
            longest = max(int(length) for length in lengths)
            padded = torch.zeros(longest, dtype=torch.uint8, device="cpu")
            padded[: own.numel()] = own
            values = self._group.gather(padded)
        except RuntimeError as error:
            raise CheckpointError(
                f"rank {self.rank} lost the other {self.size - 1} ranks, or waited for them for more than "
                f"{self.timeout_s + MARGIN_S:g} s: start the job again. Cause: {error}"
            ) from error
        return [
            json.loads(value[: int(length)].numpy().tobytes()) for value, length in zip(values, lengths, strict=True)
        ]

    def together(self, call: str, what: str, part: Callable[[], dict[str, Any]]) -> list[dict[str, Any]]:
        """Run `part` on every rank, and return all results; an error on one rank is raised on all. `call`: public
        method, the same on all ranks. `what`: beginning of the error message."""
        own: dict[str, Any] = {}
        failure: BaseException | None = None
        try:
            own = part()
        # also for an interrupt: the others wait for this rank's answer, so send it before raising
        except BaseException as error:
            failure = error
        named = None if failure is None else [type(failure).__name__, str(failure)]
        answers = self.exchange({"call": call, "value": own, "error": named})
        if failure is not None:
            raise failure
        failed = [(rank, *answer["error"]) for rank, answer in enumerate(answers) if answer["error"]]
        if failed:
            causes = "; ".join(f"rank {rank}: {name}: {message}" for rank, name, message in failed)
            raise _fitting(failed[0][1])(f"{what}: {causes}")
        if any(answer["call"] != call for answer in answers):
            calls = ", ".join(f"rank {rank}: {answer['call']}" for rank, answer in enumerate(answers))
            raise InvalidArgumentError(
                f"all ranks must call the same method of their AsyncCheckpointer together, got {calls}"
            )
        return [answer["value"] for answer in answers]

    def close(self) -> None:
        self._group = None


def _initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


def _fitting(name: str) -> type[PenstockError]:
    """Return the error class to raise on this rank when another has raised `name`."""
    kind = CATALOGUE[name].error if name in CATALOGUE else CheckpointError
    return kind if issubclass(kind, CheckpointError) else CheckpointError
