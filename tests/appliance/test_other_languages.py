"""Programs without Penstock read a run's state, from Python stubs alone and from Node: docs/grpc.md quotes them."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import site
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from coroutines import in_loop
from documented import REPO
from served import TOKEN, asking, coordinator, daemon, opening, until_ready

from penstock.proto.rpc.calls import AsyncCoordinatorClient
from penstock.proto.state.codec import encode_state
from penstock.proto.v1 import coordinator_pb2 as pb

EXAMPLES = REPO / "examples" / "state_over_grpc"
PROTO = REPO / "proto"
FILES = [f"{PROTO}/penstock/proto/v1/{name}.proto" for name in ("coordinator", "records")]
Program = tuple[list[str], dict[str, str]]
"""Command and environment."""


def user_state(request: pb.StateRequest) -> tuple[pb.StateAnswer, bytes]:
    value = {"user": {"seen": request.position.total, "words": "ä" * 300_000}, "restart": {}}  # more than one part
    return pb.StateAnswer(samples_streamed=8 * request.position.total), encode_state(value)


def from_stubs(folder: Path) -> Program:
    """Penstock itself is out of its reach: -S leaves out the file that leads there."""
    pytest.importorskip("grpc_tools")
    out = [f"--python_out={folder}", f"--grpc_python_out={folder}"]
    subprocess.run([sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTO}", *out, *FILES], check=True, timeout=60)
    path = os.pathsep.join([str(folder), *site.getsitepackages()])
    shutil.copy(EXAMPLES / "state.py", folder)
    return [sys.executable, "-S", str(folder / "state.py")], {"PYTHONPATH": path}


def from_node(folder: Path) -> Program:
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    if not (EXAMPLES / "node_modules").is_dir():
        pytest.skip("the packages of the Node example are not installed: make node")
    return [node, str(EXAMPLES / "state.mjs")], {"PENSTOCK_PROTO": str(PROTO)}


async def printed(program: Program, address: str, token: str = TOKEN, insecure: str = "true") -> tuple[list[Any], str]:
    """Its lines, and what it said besides."""
    command, environment = program
    running = await asyncio.create_subprocess_exec(
        *command,
        address,
        "job/0",
        env={"PATH": os.environ["PATH"], "PENSTOCK_TOKEN": token, "PENSTOCK_INSECURE": insecure, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    out, said = await running.communicate()
    return [json.loads(line) for line in out.splitlines()], said.decode()


@pytest.mark.parametrize("program", [from_stubs, from_node])
@in_loop
async def test_a_program_without_penstock_reads_states(program: Callable[[Path], Program], tmp_path: Path) -> None:
    made = program(tmp_path)
    async with coordinator() as address, AsyncCoordinatorClient(address, TOKEN, insecure=True) as client:
        async with daemon(address, say=user_state):
            await client.open_run(opening())
            await until_ready(client)
            await client.fetch_state(asking(0, 5))
            lines, said = await printed(made, address)
            assert not said
            assert [(line["worker"], line["step"], line["worker_step"]) for line in lines] == [(0, 5, 3), (1, 5, 2)]
            assert [line["samples_streamed"] for line in lines] == [24, 16]
            assert lines[1]["user_state_dict"] == {"seen": 2, "words": "ä" * 300_000}
            await client.close_run(pb.CloseRunRequest(run="job/0", attempt=1, client_id="c0"))
        assert (await printed(made, address)) == (lines, "")
        told = f"the token would go to {address} in clear text: set PENSTOCK_TLS_CA=FILE, or PENSTOCK_INSECURE=true\n"
        assert (await printed(made, address, insecure="")) == ([], told)
        assert "the token is wrong" in (await printed(made, address, "wrong"))[1]
