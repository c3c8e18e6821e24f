"""Jobs of four ranks that are killed, suspended or overtaken while they save into a bucket; `make bucket-kills` kills
at many more requests."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from bucket_jobs import RANKS, Answer, BucketJob
from bucket_kills import Rounds, leftovers, plan_of
from s3_server import Moment, S3Server, Strike
from waiting import until

for needed in ("moto", "s3fs"):
    pytest.importorskip(needed)

ROUNDS = 12
SEED = 46
BUCKET = "two-jobs"
RUN = f"s3://{BUCKET}/run"
COMMIT = r"PUT /[^ ]*/catalog-"


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with S3Server(min_part=256) as server:
        server.make_bucket(BUCKET)
        yield server


@pytest.mark.timeout(900)
def test_kills_at_any_request(server: S3Server, tmp_path: Path) -> None:
    rounds = Rounds(server, "kills", tmp_path)
    try:
        for number in range(ROUNDS):
            plan = plan_of(SEED, number)
            print(plan)
            rounds.run(plan)
    finally:
        rounds.close()


def overtaken(answers: list[Answer]) -> None:
    """All ranks of the older job say that another job has the folder, and what to do."""
    for one in answers:
        assert one.raised == "CheckpointError", answers
        assert "a job that began later saves into" in one.said, one.said
        assert RUN in one.said


def whole(job: BucketJob, step: int, mark: int) -> None:
    assert job.done("restore", verify=True) == [{"step": step, "mark": mark, "differ": []}] * RANKS


@pytest.mark.timeout(600)
def test_the_later_of_two_jobs_has_the_folder(server: S3Server) -> None:
    with BucketJob(server.environment, "older") as older, BucketJob(server.environment, "newer") as newer:
        older.done("open", folder=RUN)
        older.done("save", step=1, mark=1)
        newer.done("open", folder=RUN)
        whole(newer, 1, 1)
        newer.done("save", step=2, mark=2)
        older.begin("save", step=3, mark=3)  # both at once
        newer.done("save", step=3, mark=4)
        overtaken(older.answers())
        writer = older.writer(0)
        os.kill(writer, signal.SIGKILL)  # another writer is no later job
        until(lambda: not Path(f"/proc/{writer}").exists())  # reaped: the next save starts another one
        overtaken(older.call("save", step=4, mark=5))
        whole(newer, 3, 4)
        newer.done("save", step=4, mark=6)
        whole(newer, 4, 6)
        assert not leftovers(server, BUCKET, "run")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("moment", ["before", "late"])
def test_a_job_that_was_suspended_before_its_commit(server: S3Server, moment: Moment) -> None:
    """Its commit is on the way while another job saves, or is tried again when it wakes up."""
    with BucketJob(server.environment, "suspended") as suspended, BucketJob(server.environment, "other") as other:
        suspended.done("open", folder=RUN)
        suspended.done("save", step=1, mark=1)
        pids = suspended.trainers
        server.strike(Strike(0, pids, pids, moment, path=COMMIT, number=signal.SIGSTOP))
        suspended.begin("save", step=2, mark=2)
        until(server.struck)
        writers = [suspended.writer(rank) for rank in range(RANKS)]
        other.done("open", folder=RUN)
        whole(other, 1, 1)
        for step in (2, 3, 4):
            other.done("save", step=step, mark=10 * step)
        server.release()
        whole(other, 4, 40)
        for pid in (*writers, *pids):
            os.kill(pid, signal.SIGCONT)
        overtaken(suspended.answers())
        whole(other, 4, 40)
        other.done("save", step=5, mark=50)
        whole(other, 5, 50)
        assert not leftovers(server, BUCKET, "run")
