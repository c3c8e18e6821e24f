"""Recorded history of a run for `penstock replay`, from a running coordinator or a stopped one's files."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from penstock.appliance.core.box_history import StoppedCoordinator
from penstock.proto.errors import StateUnavailableError, UnknownRunError
from penstock.proto.rpc.calls import CoordinatorClient
from penstock.proto.v1 import coordinator_pb2 as pb

__all__ = ["Archive", "RunningArchive", "StoppedArchive"]


def _unknown(run: str, box: int, where: str, remedy: str) -> UnknownRunError:
    return UnknownRunError(
        f"{where} has no record of box {box} of run {run}. {remedy}. A run that ended long ago can be replayed only "
        "from a checkpoint (--checkpoint)"
    )


class RunningArchive:
    def __init__(self, client: CoordinatorClient) -> None:
        self._client = client

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def histories(self, run: str, box: int) -> list[pb.History]:
        """Return what was recorded of a box in each attempt, oldest first. Raises UnknownRunError for no record."""
        found = self._client.fetch_histories(run, box)
        if not found:
            raise _unknown(
                run,
                box,
                f"the coordinator at {self._client.address}",
                "`penstock status --all` lists the known runs and the boxes of each",
            )
        return found

    def snapshot(self, header: pb.SnapshotHeader) -> bytes:
        """Return the bytes of a listed snapshot. Raises StateUnavailableError if it is no longer kept."""
        return self._client.fetch_snapshot(header)

    def blob(self, name: str) -> bytes | None:
        """Return a large value stored by itself; None if it is no longer kept."""
        try:
            return self._client.get_blob(name)
        except StateUnavailableError:
            return None


class StoppedArchive(StoppedCoordinator):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._name = path

    def __enter__(self) -> Self:
        return self

    def histories(self, run: str, box: int) -> list[pb.History]:
        found = super().histories(run, box)
        if not found:
            raise _unknown(
                run, box, f"the journal in {self._name}", "Correct RUN, --box or --state-dir, if one of them is wrong"
            )
        return found

    def snapshot(self, header: pb.SnapshotHeader) -> bytes:
        data = self.find_snapshot(header)
        if data is None:
            raise StateUnavailableError(
                f"the state directory {self._name} no longer has the snapshot of worker slot {header.slot} after its "
                f"batch {header.total}. Start from a checkpoint (--checkpoint)"
            )
        return data


Archive = RunningArchive | StoppedArchive
