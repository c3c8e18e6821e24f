"""Kills at any request of a job that saves into a bucket, reproducible by seed: python -m bucket_kills.

In each round four ranks save, and at one request of the server processes are killed: one rank's writer, rank 0's
writer, one training process (then also the others, as a launcher does, while the writers may go on), or everything at
once; or everything at a request of a job that is being started again. The request is lost, or its answer, or it is
handled late, after the job has been started again. Then, read by the job that runs or by a new one:

- The newest checkpoint is whole and one that was saved, to the bit, on all ranks; not an older one than was reported as
  saved.
- It does not change until the next save, whatever an older job's writers still do.
- The next save succeeds, and leaves no upload unfinished and no object besides those of the listed checkpoints.

Prints each round that is wrong with its plan, and goes on in a new bucket.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import xxhash
from bucket_jobs import RANKS, Answer, BucketJob
from census import alive
from s3_server import Moment, S3Server, Strike
from waiting import until

from penstock.proto.state.checkpoint_catalog import Catalog
from penstock.proto.state.checkpoint_files import MANIFEST, Manifest

__all__ = ["Rounds", "damage", "leftovers", "plan_of"]

KEEP = 2
"""Number of checkpoints that the job keeps."""
LISTS = 2
"""Number of lists of checkpoints that stay."""
Victim = Literal["writer", "first writer", "trainer", "all", "all at the start"]
VICTIMS: tuple[Victim, ...] = (
    *("writer", "first writer") * 4,  # the job lives on: of these a minute has many
    "trainer",
    "all",
    "all at the start",
)


@dataclass(frozen=True)
class Plan:
    number: int
    victim: Victim
    rank: int
    """Of the writer or the training process that is killed."""
    moment: Moment
    at: float
    """Request to kill at, as a part of those of a save without kills."""
    agent: str
    """Whose requests are counted; empty: all."""
    path: str
    """Which requests are counted."""
    again: bool
    """True to save the step of the last save again."""
    released_after: bool
    """True to handle a late request after the next save, and not before it."""
    writers_go_on: bool
    """True to let the writers finish after a killed training process."""
    local: str
    """What becomes of the disks of a job that is started again: "none" are used, "kept", "lost" one, "damaged" one."""


def plan_of(seed: int, number: int) -> Plan:
    rng = random.Random(f"{seed} {number}")
    victim = rng.choice(VICTIMS)
    rank = rng.randrange(1, RANKS) if victim == "writer" else 0 if victim == "first writer" else rng.randrange(RANKS)
    moment: Moment = rng.choice(("before", "after", "after", "late"))
    agent = rng.choice(("", f"-{rank}$"))  # half of the kills at a request of the victim itself
    if moment == "late" and victim == "trainer":
        moment = "after"  # whose request comes late is killed, or it would wait
    elif moment == "late" and "writer" in victim:
        agent = f"-{rank}$"
    return Plan(
        number,
        victim,
        rank,
        moment,
        rng.random(),
        agent,
        # reads (of other ranks' messages, mostly) matter less
        rng.choice((".", "PUT|POST|DELETE", "PUT|POST|DELETE", "PUT|POST|DELETE", "json|metadata")),
        rng.random() < 0.3,
        rng.random() < 0.3,
        rng.random() < 0.5,
        rng.choice(("none", "none", "kept", "lost", "damaged")),
    )


def _listed(objects: Mapping[str, bytes], folder: str) -> dict[str, Manifest]:
    """Return the manifests of the checkpoints that the newest list has, by the name of their folder."""
    names = [key for key in objects if key.startswith(f"{folder}/catalog-")]
    if not names:
        return {}
    catalog = Catalog.decode(objects[max(names)], max(names))
    paths = [f"{folder}/{one.folder}" for one in catalog.checkpoints]
    return {path: Manifest.decode(objects[f"{path}/{MANIFEST}"], f"{path}/{MANIFEST}") for path in paths}


def damage(server: S3Server, bucket: str, folder: str) -> list[str]:
    """Files of listed checkpoints that are not what was written."""
    objects, found = server.contents(bucket), []
    for path, manifest in _listed(objects, folder).items():
        for file in manifest.files:
            key = f"{path}/{file.name}"
            if key not in objects:
                found.append(f"{key} is missing")
            elif xxhash.xxh3_128_hexdigest(objects[key]) != file.xxh3:
                found.append(f"{key} is damaged")
    return found


def leftovers(server: S3Server, bucket: str, folder: str) -> list[str]:
    """Unfinished uploads, and objects that belong to no listed checkpoint."""
    objects = server.contents(bucket)
    kept = set(sorted(key for key in objects if key.startswith(f"{folder}/catalog-"))[-LISTS:])
    for path, manifest in _listed(objects, folder).items():
        kept |= {f"{path}/{name}" for name in (MANIFEST, *(file.name for file in manifest.files))}
    return sorted([*(objects.keys() - kept), *(f"upload of {key}" for key in server.uploads(bucket))])


class Rounds:
    """Rounds of kills in one bucket."""

    def __init__(self, server: S3Server, bucket: str, room: Path) -> None:
        self._server, self._bucket, self._room = server, bucket, room
        self._job: BucketJob | None = None
        self._jobs = 0
        self._mark = self._step = 0
        self._saved = 0
        """Mark of the last save that was reported as saved."""
        self._possible: dict[int, int] = {}
        """Steps, by mark, of the saves that may be found: the last one reported and those after it."""
        self._requests: Counter[tuple[str, str]] = Counter()
        """Number of requests of a save without kills, by what plans count."""
        self._gone_on: list[int] = []
        """Writers of killed jobs."""
        self.times: list[tuple[str, float]] = []
        """What the last round did, and its seconds."""
        self.struck: Counter[str] = Counter()
        """Requests that were struck, by what they do."""
        server.make_bucket(bucket)

    def close(self) -> None:
        self._server.strike(None)
        if self._job is not None:
            self._job.kill()
            self._job = None

    # ---- a round

    def run(self, plan: Plan) -> None:
        self.times.clear()
        if self._job is None:
            self._timed("start", lambda: self._start(plan.local))
            self._timed("save", self._save_well)
        self._timed("kill", lambda: self._kill_in_a_save(plan))
        wrong = damage(self._server, self._bucket, "run")
        assert not wrong, f"listed, but not whole: {wrong}"
        if not plan.released_after:
            self._server.release()
        if self._job is None:
            self._timed("start again", lambda: self._start(plan.local))
        self._timed("restore", lambda: self._restore(verify=plan.number % 4 == 0))
        # Until it saves, a job lets earlier ones commit.
        self._timed("save", self._save_well)
        self._timed("ends", self._await_writers)
        self._server.release()
        if plan.moment == "late" or plan.victim == "trainer":
            self._timed("restore again", self._restore)
            self._timed("save again", self._save_well)
        left = leftovers(self._server, self._bucket, "run")
        assert not left, f"left after the next save: {left}"
        wrong = damage(self._server, self._bucket, "run")
        assert not wrong, f"listed, but not whole: {wrong}"

    def _timed(self, what: str, work: Callable[[], object]) -> None:
        began = time.monotonic()
        work()
        self.times.append((what, round(time.monotonic() - began, 1)))

    def _await_writers(self) -> None:
        """Wait for the ends of writers of killed jobs."""
        until(lambda: not alive(self._gone_on), 30, lambda: f"writers of an ended job live on: {self._gone_on}")
        self._gone_on.clear()

    def _kill_in_a_save(self, plan: Plan) -> None:
        if plan.victim == "all at the start":
            self.close()
            self._open(plan.local)
        job = self._job
        assert job is not None
        self._arm(plan, job)
        self._mark += 1
        self._step += not plan.again
        answers = [Answer()]
        if plan.victim == "all at the start":
            answers = job.call("restore")
        if not any(one.raised for one in answers):
            self._possible[self._mark] = self._step
            answers = job.call("save", step=self._step, mark=self._mark)
            if any(not one.raised for one in answers):
                self._reported(self._mark)
        struck = self._note()
        if struck and "writer" not in plan.victim:
            self._gone_on += job.kill(writers=plan.victim != "trainer" or not plan.writers_go_on)
            self._job = None
        elif struck:
            self._check_words(plan, answers)
        else:
            assert not [one for one in answers if one.raised], f"without a kill: {answers}"

    def _arm(self, plan: Plan, job: BucketJob) -> None:
        ranks = range(RANKS) if plan.victim.startswith("all") else (plan.rank,)
        pids = tuple(job.trainer(rank) for rank in ranks)
        count = self._requests[plan.agent, plan.path]
        self._server.strike(
            Strike(
                int(plan.at * (count + 1)),
                trainers=() if "writer" in plan.victim else pids,
                writers_of=() if plan.victim == "trainer" else pids,
                moment=plan.moment,
                agent=plan.agent,
                path=plan.path,
            )
        )

    def _note(self) -> bool:
        """Return True if the strike has come."""
        request = self._server.struck()
        self.struck["none" if request is None else kind_of(request.method, request.path)] += 1
        if request is None:
            self._server.strike(None)
        return request is not None

    def _check_words(self, plan: Plan, answers: list[Answer]) -> None:
        """All ranks learn that the save failed, and whose writer was killed; none, if it had been committed."""
        said = f"rank {plan.rank}: its writer process ended before the save did (killed by SIGKILL"
        failed = [one for one in answers if one.raised]
        assert all(one.raised == "CheckpointError" and said in one.said for one in failed), f"they say: {answers}"

    # ---- jobs

    def _name(self) -> str:
        self._jobs += 1
        return f"job{self._jobs}"

    def _options(self, local: str) -> dict[str, Any]:
        return {"keep_last": KEEP, "timeout_s": 60, **({} if local == "none" else {"local": str(self._room)})}

    def _start(self, local: str) -> None:
        """Start a job, which goes on from what it finds."""
        disks = sorted(self._room.iterdir())
        if local == "lost" and disks:
            shutil.rmtree(disks[self._jobs % len(disks)])
        elif local == "damaged":
            for path in sorted(self._room.rglob("*.distcp"))[self._jobs % 2 :: 3]:
                data = bytearray(path.read_bytes())
                data[len(data) // 2] ^= 1
                path.write_bytes(data if self._jobs % 5 else data[:-1])
        self._open(local)
        self._restore()

    def _open(self, local: str) -> None:
        self._jobs += 1
        self._job = BucketJob(self._server.environment, f"job{self._jobs}")
        options = {} if local == "none" else {"local": str(self._room)}
        self._job.done("open", folder=f"s3://{self._bucket}/run", keep_last=KEEP, timeout_s=60, **options)

    def _restore(self, *, verify: bool = False) -> None:
        """Restore the newest checkpoint, which must be one that may be found."""
        assert self._job is not None
        seen = self._job.done("restore", verify=verify)
        assert not [one for one in seen if one["differ"]], f"not what was saved: {seen}"
        [mark] = {one["mark"] for one in seen}
        if mark is None:
            assert not self._saved, f"no checkpoint is found, after {self._saved} was reported as saved"
            return
        assert mark in self._possible, f"found save {mark}, but only these can be there: {self._possible}"
        assert {one["step"] for one in seen} == {self._possible[mark]}, f"another step than was saved: {seen}"
        # A save that was found stays; one that was not may still come, from a writer that lives on.
        self._saved = mark
        self._possible = {other: step for other, step in self._possible.items() if other >= mark}

    def _reported(self, mark: int) -> None:
        self._saved = mark
        self._possible = {mark: self._possible[mark]}

    def _save_well(self) -> None:
        """Save, which must succeed, and count its requests."""
        assert self._job is not None
        self._server.requests()
        self._mark += 1
        self._step += 1
        self._possible[self._mark] = self._step
        self._job.done("save", step=self._step, mark=self._mark)
        self._reported(self._mark)
        requests = self._server.requests()
        self._requests = Counter()
        for agent in ("", *(f"-{rank}$" for rank in range(RANKS))):
            of_it = [one for one in requests if one.agent.endswith(agent.strip("$"))]
            self._requests[agent, "."] = len(of_it)
            self._requests[agent, "PUT|POST|DELETE"] = sum(one.changes for one in of_it)
            self._requests[agent, "json|metadata"] = sum("json" in one.path or "metadata" in one.path for one in of_it)


def kind_of(method: str, path: str) -> str:
    """Say what a request does."""
    if "uploadId" in path:
        return {"PUT": "part", "POST": "complete", "DELETE": "abort"}.get(method, "parts")
    if "uploads" in path:
        return "begin an upload" if method == "POST" else "list uploads"
    if method == "GET" and "list-type" in path:
        return "list"
    name = path.partition("?")[0].rpartition("/")[2]
    for sign, what in (("catalog", "catalog"), ("rank-", "message"), ("failed", "message"), ("json", "json")):
        if sign in name:
            return f"{method} {what}"
    return f"{method} {'delete' if 'delete' in path else 'other'}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first round")
    parser.add_argument("--say", action="store_true", help="print each round")
    options = parser.parse_args()
    wrong: list[int] = []
    struck: Counter[str] = Counter()
    victims: Counter[str] = Counter()
    began = time.monotonic()
    with ExitStack() as stack:
        server = stack.enter_context(S3Server(min_part=256))
        rounds: Rounds | None = None
        for number in range(options.first, options.first + options.rounds):
            plan = plan_of(options.seed, number)
            if rounds is None:
                room = Path(stack.enter_context(tempfile.TemporaryDirectory()))
                rounds = Rounds(server, f"bucket-{os.getpid()}-{number}", room)
            began_round = time.monotonic()
            try:
                rounds.run(plan)
            except Exception:
                wrong.append(number)
                print(f"round {number} is wrong: {plan}\nstruck at {server.struck()}", flush=True)
                traceback.print_exc(file=sys.stdout)
                rounds.close()
                struck += rounds.struck
                rounds = None
            victims[plan.victim] += 1
            if options.say:
                took = time.monotonic() - began_round
                times = rounds.times if rounds is not None else "wrong"
                print(f"{number} {took:.1f} s {plan.victim} {plan.moment} {server.struck()} {times}", flush=True)
        if rounds is not None:
            rounds.close()
            struck += rounds.struck
    print(f"seed {options.seed}: {options.rounds} rounds in {time.monotonic() - began:.0f} s, wrong: {wrong or 'none'}")
    print(f"killed: {dict(victims)}")
    print(f"at requests: {dict(struck.most_common())}")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
