"""Tokens: where they come from, what each is good for, and that a call without one costs nothing."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import importlib
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from appliances import made
from coroutines import in_loop
from forked import join_all
from tests.security.conftest import SECRETS, Starter, answering

from penstock.proto.errors import (
    AuthenticationError,
    CoordinatorUnavailableError,
    InvalidArgumentError,
    NotPermittedError,
    TlsError,
    UnsafeBindError,
)
from penstock.proto.rpc.auth_interceptor import SERVICE
from penstock.proto.rpc.calls import AsyncCoordinatorClient, CoordinatorClient
from penstock.proto.rpc.channel import connect_aio
from penstock.proto.rpc.credentials.roles import METHODS, ROLES, Role
from penstock.proto.rpc.credentials.tokens import Tokens, read_token, read_tokens
from penstock.proto.v1 import coordinator_pb2 as pb
from penstock.runtime.process.memory_secrecy import keep_memory_private

PENSTOCK = str(Path(sys.executable).with_name("penstock"))
TEXT = "client:c-token\nworker:w-token\n\n admin:a-token \n"


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PENSTOCK_TOKEN", raising=False)
    monkeypatch.delenv("PENSTOCK_TOKEN_FILE", raising=False)


def secret_file(folder: Path, text: str, mode: int = 0o600) -> Path:
    file = folder / "token"
    file.write_text(text)
    file.chmod(mode)
    return file


# ------------------------------------------------------------------------------------------------------ what they mean


def test_token_fits_its_roles_and_a_bare_one_all() -> None:
    tokens = Tokens(TEXT + "client:both\nworker:both")
    shown = ("c-token", "w-token", "a-token", "both")
    assert [tokens.roles_of(token) for token in shown] == [{"client"}, {"worker"}, {"admin"}, {"client", "worker"}]
    for wrong in ("", "c-token2", "client:c-token", "tökn"):
        assert tokens.roles_of(wrong) == frozenset()
    assert Tokens("bare").roles_of("bare") == ROLES
    of = Tokens("client:both\nworker:both\nrest").of
    assert [of("client"), of("admin")] == ["both", "rest"], "the one that is good for less"


@pytest.mark.parametrize("text", ["wroker:token", "client:two words", "client:", "tökn"])
def test_invalid_token_text_is_refused_unshown(text: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        Tokens(text)
    assert text not in caught.value.message
    assert "token" not in repr(Tokens(TEXT)).replace("Tokens", "")


# ------------------------------------------------------------------------------------------------ where they come from


def test_where_the_token_comes_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = secret_file(tmp_path, "from-file\n")
    with pytest.raises(AuthenticationError, match=r"no token was given: set PENSTOCK_TOKEN, or PENSTOCK_TOKEN_FILE"):
        read_token("client")
    monkeypatch.setenv("PENSTOCK_TOKEN_FILE", str(file))
    assert read_token("client") == "from-file"
    monkeypatch.setenv("PENSTOCK_TOKEN", "worker:from-environment")
    assert read_token("worker") == "from-environment"
    assert read_token("worker", file=file) == "from-file"
    with pytest.raises(AuthenticationError, match="PENSTOCK_TOKEN has no token for the role client"):
        read_token("client")


def test_role_takes_its_line_and_coordinator_all(tmp_path: Path) -> None:
    file = secret_file(tmp_path, TEXT)
    assert [read_token(role, file=file) for role in ("client", "worker", "admin")] == ["c-token", "w-token", "a-token"]
    assert read_tokens(file) == TEXT


@pytest.mark.parametrize("content", [None, "\n", "tökn", "x" * 70_000])
def test_unusable_token_file_is_fatal_and_named(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "token" if content is None else secret_file(tmp_path, content)
    with pytest.raises((AuthenticationError, InvalidArgumentError), match=str(file)) as caught:
        read_token("client", file=file)
    assert not content or content not in caught.value.message or content == "\n"


def as_a_daemon() -> None:
    """A sibling, as runners are, can read this process's environment before it becomes private, and not after; the
    process itself can still look at its descriptors."""
    if os.geteuid() == 0:
        os.setgid(10001)
        os.setuid(10001)
        ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE: giving up root has cleared it
    environment = Path(f"/proc/{os.getpid()}/environ")
    join_all(environment.read_bytes)
    keep_memory_private()
    assert os.listdir("/proc/self/fd")
    with pytest.raises(AssertionError, match="PermissionError"):
        join_all(environment.read_bytes)


def test_siblings_of_daemon_cannot_read_its_token() -> None:
    join_all(as_a_daemon)


@pytest.mark.parametrize("module", ["penstock.appliance.__main__", "penstock.worker.__main__"])
def test_daemons_keep_their_memory_private(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []

    def private() -> None:
        called.append(module)
        raise SystemExit

    monkeypatch.setattr(f"{module}.keep_memory_private", private)
    monkeypatch.setattr(
        sys, "argv", [module, *(["--coordinator", "c:1", "--slots", "1"] if "worker" in module else [])]
    )
    with pytest.raises(SystemExit):
        importlib.import_module(module).main()
    assert called == [module]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")
def test_what_root_gives_to_our_group_is_ours() -> None:
    """Accept a file as Kubernetes mounts a Secret for a pod that has an fsGroup."""
    with tempfile.TemporaryDirectory() as folder:  # tmp_path is closed to others
        os.chmod(folder, 0o755)
        file = secret_file(Path(folder), TEXT)

        def read(user: int) -> None:
            os.setgroups([])
            os.setgid(user)
            os.setuid(user)
            read_tokens(file)

        for mode, owner, user, is_ours in (
            *((0o440, 0, 10001, True), (0o640, 0, 10001, True), (0o444, 0, 10001, False), (0o460, 0, 10001, False)),
            *((0o440, 10001, 10001, False), (0o440, 0, 0, False)),  # that user could close it
        ):
            file.chmod(mode)
            os.chown(file, owner, 10001)
            refused = pytest.raises(AssertionError, match=rf"can be read by others \(mode 0{mode:o}\)")
            with contextlib.nullcontext() if is_ours else refused:
                join_all(partial(read, user))


def test_pipe_without_a_writer_is_not_waited_for(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe, 0o600)
    with pytest.raises(AuthenticationError, match=f"the token file {pipe} is empty"):
        read_token("client", file=pipe)


def test_a_pipe_that_is_being_written_is_read() -> None:
    """Read a pipe of a shell: --token-file <(command)."""
    read, write = os.pipe()

    def say() -> None:
        os.write(write, b"a-token\n")
        os.close(write)

    writer = threading.Timer(0.2, say)
    writer.start()
    try:
        assert read_token("client", file=f"/proc/self/fd/{read}") == "a-token"
    finally:
        writer.join()
        os.close(read)


# ------------------------------------------------------------------------------------------------------ over the wire


def test_role_map_names_exactly_the_methods() -> None:
    service = pb.DESCRIPTOR.services_by_name["Coordinator"]
    assert set(METHODS) == {method.name for method in service.methods}
    assert all(roles and roles <= ROLES for roles in METHODS.values())


@pytest.fixture(scope="module")
def address(start_once: Starter) -> str:
    return start_once.coordinator().line


CALLS: dict[Role, Callable[[AsyncCoordinatorClient], Awaitable[object]]] = {
    "client": lambda client: client.open_run(pb.OpenRunRequest()),
    "worker": lambda client: client.register(pb.RegisterWorkerRequest()),
    "admin": lambda client: client.status(),
}
"""A call that no other role may make."""


@pytest.mark.parametrize("role", CALLS)
@in_loop
async def test_a_role_may_make_its_calls_and_no_other(address: str, role: Role) -> None:
    async with AsyncCoordinatorClient(address, SECRETS[role], insecure=True) as client:
        for of, call in CALLS.items():
            if of == role:
                with contextlib.suppress(InvalidArgumentError):
                    await call(client)
            else:
                with pytest.raises(NotPermittedError, match=f"got one of {role}"):
                    await call(client)


SECRET = "s" * 64


@pytest.mark.parametrize("address", ["127.0.0.1:1", "localhost:1", "[::1]:1", "10.0.0.7:1"])
def test_no_token_is_sent_in_clear_text(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On this machine neither: another process may listen after the coordinator. Only who calls can allow it."""
    monkeypatch.delenv("PENSTOCK_INSECURE")
    words = "the token would be sent to .* in clear text: use a Unix socket .* or TLS"
    with pytest.raises(TlsError, match=words):
        CoordinatorClient(address, SECRET)
    with pytest.raises(TlsError, match=words):
        made(address, token=SECRET, num_boxes=1, box=0)
    arguments = ["--coordinator", address, "--slots", "1", "--allow", "streams"]
    for command in ([sys.executable, "-m", "penstock.worker", *arguments], [PENSTOCK, "worker", *arguments]):
        run = subprocess.run(
            command, env={**os.environ, "PENSTOCK_TOKEN": SECRET}, capture_output=True, text=True, timeout=60
        )
        assert run.returncode
        assert "in clear text" in run.stderr
    for given in ({"address": f"unix:{tmp_path}/socket"}, {"address": address, "insecure": True}):
        CoordinatorClient(given.pop("address"), SECRET, **given).close()  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["my#fleet", "why?", "a%41b", "a b", "é"])
@in_loop
async def test_a_sockets_path_is_taken_as_it_is(name: str, tmp_path: Path) -> None:
    """For gRPC it is a URI: what follows a # would be left out, and the token sent to another socket."""
    folder = tmp_path / name
    folder.mkdir(mode=0o700)
    async with answering(f"unix:{folder}/s", SECRET), AsyncCoordinatorClient(f"unix:{folder}/s", SECRET) as client:
        await client.status()
    assert not [path for path in tmp_path.rglob("*") if path.name not in (name, "s")]


async def serve(address: str) -> None:
    async with answering(address, SECRET):
        pass


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")
@pytest.mark.parametrize(
    "how",
    [
        "link of another user",
        "link to one",
        "folder that all can write to",
        "open folder above",
        "folder of another user above",
        "socket of another user",
        "no folder, where all can make one",
    ],
)
def test_no_token_goes_where_others_can_put_a_socket(how: str, tmp_path: Path) -> None:
    own = tmp_path / "above" / "own"
    own.mkdir(mode=0o700, parents=True)
    path = own / "s"
    if how.startswith("link"):
        (tmp_path / "theirs").symlink_to(own)
        os.lchown(tmp_path / "theirs", 65534, 65534)
        (tmp_path / "link").symlink_to("theirs")
        path = tmp_path / ("link" if how == "link to one" else "theirs") / "s"
    elif how == "folder of another user above":
        os.chown(own.parent, 65534, 65534)
    elif how == "socket of another user":
        path.symlink_to("/dev/null")
        os.lchown(path, 65534, 65534)
    elif how.startswith("no folder"):
        own.rmdir()
        (tmp_path / "link").symlink_to(own)
        path = tmp_path / "link" / "s"
        own.parent.chmod(0o1777)
    else:
        (own if how == "folder that all can write to" else own.parent).chmod(0o777)
    for connect in (lambda: CoordinatorClient(f"unix:{path}", SECRET), lambda: asyncio.run(serve(f"unix:{path}"))):
        with pytest.raises(UnsafeBindError, match="pose as the coordinator"):
            connect()


@in_loop
async def test_no_token_goes_to_who_comes_after(tmp_path: Path) -> None:
    """Jobs and workers wait for a coordinator whose folder in /tmp was removed, and which another user makes again. The
    channel may have connected to that before the coordinator is back."""
    folder, shown = tmp_path / "fleet", []
    address = f"unix:{folder}/s"
    tmp_path.chmod(0o1777)
    folder.mkdir(0o700)

    class Rogue(grpc.GenericRpcHandler):
        def service(self, call: grpc.HandlerCallDetails) -> None:
            shown.append(dict(call.invocation_metadata).get("authorization"))

    async with AsyncCoordinatorClient(address, SECRET) as there, answering(address, SECRET):
        await there.status()
    async with AsyncCoordinatorClient(address, SECRET) as waits:
        folder.rmdir()
        with pytest.raises(CoordinatorUnavailableError, match="other users could make it"):
            await waits.status()
        folder.mkdir(0o777)
        folder.chmod(0o777)
        rogue = grpc.aio.server(handlers=(Rogue(),))
        rogue.add_insecure_port(address)
        await rogue.start()
        await waits._channel.channel_ready()
        with pytest.raises(CoordinatorUnavailableError, match="pose as the coordinator"):
            await waits.status()
        folder.rename(tmp_path / "before")
        folder.mkdir(0o700)
        async with answering(address, SECRET):
            await waits.status()
        await rogue.stop(0)
    assert not shown


@in_loop
async def test_request_is_not_read_before_the_token(address: str) -> None:
    """A stream is answered although its caller never says anything. A proof of a token is of another release."""
    wrong, other = grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.FAILED_PRECONDITION
    async with connect_aio(address) as channel:
        for shown, status, words in (
            ((), wrong, "no token was sent"),
            (("Bearer wrong",), wrong, "the token is wrong"),
            (("Penstock-Proof",), other, "install the same release on both ends"),
            (("Penstock-Proof 0 0 0",), other, "install the same release on both ends"),
        ):
            put: Any = channel.stream_unary(f"/{SERVICE}/PutBlob")
            call = put(timeout=20, metadata=[("authorization", text) for text in shown])
            assert await call.code() is status
            assert words in await call.details()
