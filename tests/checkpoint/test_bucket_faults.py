"""A store that fails: the error names the cause and the remedy, and the checkpoint before stays."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
import small_parts_writer
import torch
from s3_server import Fault, S3Server

from penstock.client.checkpoint import AsyncCheckpointer
from penstock.client.checkpoint.saving import writer_process
from penstock.proto.errors import CheckpointError

for needed in ("moto", "s3fs"):
    pytest.importorskip(needed)

pytestmark = pytest.mark.slow

FILES = r"PUT /bucket/run/step-[^ ]*\.distcp"
COMMIT = r"PUT /bucket/[^/]*/catalog-"
LARGE = 12_000
"""Values of a tensor whose upload has three parts."""
STEPS = itertools.count(1)


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with pytest.MonkeyPatch.context() as patch, S3Server(min_part=256) as server:
        patch.setattr(writer_process, "WRITER", small_parts_writer.THIS)
        for name, value in server.environment.items():
            patch.setenv(name, value)
        server.make_bucket("bucket")
        yield server


@pytest.fixture(scope="module")
def shared(server: S3Server) -> Iterator[AsyncCheckpointer]:
    with AsyncCheckpointer("s3://bucket/run", keep_last=2) as checkpointer:
        yield checkpointer


@pytest.fixture
def store(server: S3Server) -> Iterator[S3Server]:
    yield server
    server.fail()


@pytest.fixture
def checkpointer(shared: AsyncCheckpointer, store: S3Server) -> AsyncCheckpointer:
    """A checkpointer that has saved a checkpoint."""
    save(shared)
    return shared


def state(mark: int) -> dict[str, torch.Tensor]:
    return {"weights": torch.full((LARGE,), float(mark)), "bias": torch.full((7,), mark)}


def save(checkpointer: AsyncCheckpointer) -> int:
    """Save the next step, and return its number."""
    step = next(STEPS)
    checkpointer.save(step, state(step))
    checkpointer.wait()
    return step


def holds(checkpointer: AsyncCheckpointer, step: int) -> None:
    """The newest checkpoint is that of this step, and whole."""
    found = state(0)
    assert checkpointer.restore(found, verify=True) == step
    assert all(torch.equal(value, found[name]) for name, value in state(step).items())


@pytest.mark.parametrize(
    ("fault", "cause", "remedy"),
    [
        (Fault("bucket", 403, "AccessDenied"), "denies", "(AccessDenied). Renew the keys"),
        (Fault("bucket", 403, "ExpiredToken"), "denies", "(ExpiredToken). Renew the keys"),
        (Fault("bucket", 400, "ExpiredToken"), "denies", "(ExpiredToken). Renew the keys"),
        (Fault("bucket", 403, "InvalidAccessKeyId"), "denies", "(InvalidAccessKeyId). Renew the keys"),
        (Fault("bucket", 404, "NoSuchBucket"), "there is no bucket 'bucket'", "Create it"),
        (Fault(FILES, 507, "XMinioStorageFull"), "is full", "set keep_last"),
        (Fault(FILES, 403, "QuotaExceeded"), "is full", "set keep_last"),
        (Fault(COMMIT, 403, "AccessDenied"), "denies", "(AccessDenied). Renew the keys"),
    ],
    ids=lambda value: f"{value.code}-{value.status}" if isinstance(value, Fault) else "",
)
def test_what_does_not_pass(
    checkpointer: AsyncCheckpointer, store: S3Server, fault: Fault, cause: str, remedy: str
) -> None:
    """It is said with the folder and a remedy, and the next save succeeds when it is over."""
    before = checkpointer.latest()
    assert before is not None
    store.fail(fault)
    with pytest.raises(CheckpointError, match=r"step \d+ was not saved into s3://bucket/run") as error:
        save(checkpointer)
    print(error.value.message)
    assert cause in error.value.message
    assert remedy in error.value.message
    store.fail()
    holds(checkpointer, before)
    step = save(checkpointer)
    holds(checkpointer, step)
    assert not store.uploads("bucket")
    folders = {key.split("/")[1].partition("-")[2].partition("-")[0] for key in store.objects("bucket")}
    assert folders >= {str(before), str(step)}


@pytest.mark.parametrize("kind", ["SlowDown", "InternalError", "RequestTimeout", "cut", "unanswered"])
def test_what_passes(checkpointer: AsyncCheckpointer, store: S3Server, kind: Any) -> None:
    """Each kind of request fails twice, and is made again. An answer that was lost is no failure, also of a commit."""
    status = {"SlowDown": 503, "InternalError": 500, "RequestTimeout": 400}.get(kind)
    paths = (r"POST [^ ]*\?uploads", "partNumber=2", "POST [^ ]*uploadId", COMMIT, "PUT [^ ]*json", "GET", "delete")
    store.fail(*(Fault(one, status, kind, times=2) if status else Fault(one, kind=kind, times=2) for one in paths))
    store.requests()
    holds(checkpointer, save(checkpointer))
    made = [f"{one.method} {one.path}" for one in store.requests()]
    for path in paths:
        assert len([one for one in made if re.search(path, one)]) > 2, path
    store.fail()
    save(checkpointer)  # ends uploads whose beginning was not answered
    assert not store.uploads("bucket")


@pytest.mark.parametrize(
    "fault",
    [
        # S3 answers 200 before it completes an upload, and may then say that it has failed.
        Fault("POST .*uploadId", 200, "InternalError", times=1),
        # S3's answer to a conditional put while another of the same key has not ended.
        Fault(COMMIT, 409, "ConditionalRequestConflict", times=1),
    ],
    ids=["200", "409"],
)
def test_answers_that_only_s3_gives(checkpointer: AsyncCheckpointer, store: S3Server, fault: Fault) -> None:
    store.fail(fault)
    holds(checkpointer, save(checkpointer))


@pytest.mark.parametrize(
    "fault", [Fault("bucket", kind="unconditional"), Fault(COMMIT, 501, "NotImplemented")], ids=["ignored", "refused"]
)
def test_a_store_without_conditional_puts(store: S3Server, fault: Fault) -> None:
    """It would let two jobs commit at once: every save is refused, before anything is written."""
    store.fail(fault)
    with closing(AsyncCheckpointer("s3://bucket/without")) as checkpointer:
        for _ in range(2):
            with pytest.raises(CheckpointError, match=r"If-None-Match.*Use another store"):
                save(checkpointer)
    assert not [key for key in store.objects("bucket") if re.search(r"^without/.*\.distcp", key)]


def test_a_bucket_that_is_not_there(store: S3Server) -> None:
    checkpointer = AsyncCheckpointer("s3://no-such-bucket/run")
    says = r"s3://no-such-bucket/run: there is no bucket 'no-such-bucket'\. Create it"
    with closing(checkpointer), pytest.raises(CheckpointError, match=says):
        save(checkpointer)
