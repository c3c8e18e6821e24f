"""A runner is killed at each point of its life: the stream equals the run without the fault, digest by digest.

The runner kills itself (tests/inputs/traps.py), so that it dies at the very point and not somewhere near it. A run dies
at several points one after the other, and every one must have been reached.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import traps
from cluster import Cluster, running

from penstock.client import Appliance, DataExecutor, DataLoader
from penstock.client.testing import FakeAppliance

STEPS = 2 * 2 * traps.PASS  # two workers, two epochs
STATELESS = ["generator", "shuffled 0", "shuffled 2"]
STARTING = ["input_fn", "iter", "epoch_start"]
"""Without a batch in between no more than three losses are forgiven, so these are a run of their own."""
STREAMING = [point for point in traps.POINTS if point not in STARTING]
WITH_PROCESSES = ["state_dict", "end of the epoch", "second epoch"]
"""Points at which loaders with worker processes die. Each start of such a loader is slow, so there is one death in each
of the loader's own conditions: in the middle of an epoch, between two, and after the first. All points are tested with
the same loaders without processes, and the code at a point does not know which kind it has."""
WITH_STATES = {"state_dict"}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Yield a cluster that does not give a slot up although it dies at every point before the loop has got a batch of
    it."""
    losses = f"losses={len(traps.POINTS)}"
    with running(tmp_path_factory.mktemp("state"), "limited_coordinator", LIMITS=losses) as cluster:
        cluster.add_worker(8, allow="traps")
        yield cluster


def run(
    appliance: Appliance, kind: str, points: list[str], folder: Path
) -> tuple[list[int | None], Any, list[int | None]]:
    """The digest after each step; then a state in the middle of the second epoch, and the digests of a resume."""
    folder.mkdir()
    with appliance:
        loader = DataLoader(traps.trapped, kind, points, str(folder))
        executor = DataExecutor(
            loader, num_steps=STEPS - 9, checkpoint_steps=2 * traps.CHECKPOINT - 1, appliance=appliance
        )
        digests = [executor.digest for _ in executor]
        state = loader.state_dict()
        after = DataExecutor(loader, num_steps=9, appliance=appliance)
        digests += [after.digest for _ in after]
        again = DataLoader(traps.trapped, kind, points, str(folder))
        again.load_state_dict(state)
        rest = DataExecutor(again, num_steps=9, appliance=appliance)
        return digests, state, [rest.digest for _ in rest]


@pytest.fixture(scope="module")
def whole(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The run without a fault, once for each kind: in this process, which test_appliance_contract.py shows to be the
    same, but where processes would be forked beside threads."""
    done: dict[str, Any] = {}

    def of(kind: str) -> Any:
        if kind not in done:
            appliance: Appliance = FakeAppliance(num_workers_per_box=2, seed=5, replay=True)
            if kind[-1] == "2":
                appliance = cluster.box(f"whole {kind}", replay=True)
            done[kind] = run(appliance, kind, [], tmp_path_factory.mktemp("whole") / "markers")
        return done[kind]

    return of


@pytest.mark.parametrize(
    ("kind", "lane", "points"),
    [
        *((kind, "auto", points) for kind in traps.KINDS if kind[-1] != "2" for points in (STARTING, STREAMING)),
        *((kind, "auto", WITH_PROCESSES) for kind in traps.KINDS if kind[-1] == "2"),
        ("shared", "tcp", STREAMING),  # what dies while it starts has no lane yet
    ],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_killed_at_each_point(
    cluster: Cluster, whole: Any, tmp_path: Path, kind: str, lane: str, points: list[str]
) -> None:
    if kind in STATELESS:
        points = [point for point in points if point not in WITH_STATES]
    digests, state, rest = whole(kind)
    folder = tmp_path / "markers"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        appliance = cluster.box(f"{kind} {lane} {points[0]}", lane=lane, replay=True, replay_s=0)
        got = run(appliance, kind, points, folder)
    assert sorted(path.name for path in folder.iterdir()) == sorted(points)
    assert got[0] == digests
    assert got[2] == rest
    assert user_state(got[1]) == user_state(state)
    assert sum("SIGKILL" in str(warning.message) for warning in caught) >= 1


def user_state(state: dict[str, Any]) -> str:
    """Return the part of a state that the user's code made."""
    return repr({key: value for key, value in state.items() if key != "__penstock__"})
