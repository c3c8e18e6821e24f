"""The sender between sockets that play the runner and the receiver. Whole lanes with it are in test_contract."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
from lane_frames import a_frame, ack_of
from tests.lanes.conftest import DEADLINE_S

from penstock.proto.lane.frames import MAX_FRAME, MAX_PACKET, STRUCTURE, Ack, framed
from penstock.proto.lane.tcp import sealed
from penstock.proto.v1 import lane_pb2
from penstock.worker.daemon.sender import FRAMES_A_TURN, MAX_OUT, Sender


class Rig:
    """The sender, the runner's end of its socket, and the receiver's end of its TCP connection."""

    def __init__(self) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        self.far = socket.create_connection(listener.getsockname())
        near, _ = listener.accept()
        listener.close()
        self.runner, local = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for sock in (self.far, self.runner):
            sock.settimeout(DEADLINE_S)
        self.sender = Sender(near, local, lane_pb2.Hello(next_total=1), "slot 0")
        self.sender.start()

    def say(self, **ack: object) -> None:
        self.far.sendall(sealed(Ack(**ack).encode()))  # type: ignore[arg-type]

    def flood(self) -> None:
        """Send what nobody reads from TCP, until the sender reads no more of it."""
        piece = framed(a_frame(kind=STRUCTURE, structure=1, inline=b"x" * 60_000, size=60_000).encode())
        assert len(piece) < MAX_PACKET
        self.runner.settimeout(0.2)
        sent = 0
        while sent < 4 * MAX_OUT:
            try:
                self.runner.send(piece)
                sent += 1
            except TimeoutError:
                if len(self.sender._out) > MAX_OUT:
                    break
        assert sent < 4 * MAX_OUT, "the flood was not stopped"
        self.runner.settimeout(DEADLINE_S)

    def acks(self) -> list[Ack]:
        """All that the runner hears up to the end of its lane."""
        heard: list[Ack] = []
        while True:
            try:
                data = self.runner.recv(MAX_FRAME)
            except ConnectionResetError:
                continue  # shown once, before what was sent last
            if not data:
                return heard
            heard.append(ack_of(data))

    def ended(self) -> bool:
        self.sender.join(DEADLINE_S)
        return not self.sender.is_alive()


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.far.close()
    rig.runner.close()
    assert rig.sender.stop(DEADLINE_S)


def test_flood_of_announcements_fills_no_memory(rig: Rig) -> None:
    rig.flood()
    assert len(rig.sender._out) <= MAX_OUT + FRAMES_A_TURN
    rig.say(open_epochs=3)
    assert ack_of(rig.runner.recv(MAX_FRAME)).open_epochs == 3, "acks are read while the network stalls"


def test_a_lost_runner_is_told_and_last_acks_are_awaited(rig: Rig) -> None:
    rig.runner.close()
    assert rig.far.recv(1) == b""
    assert rig.sender.is_alive(), "closing now could destroy what is on its way"
    rig.far.close()
    assert rig.ended()
    assert "the other end closed the connection" in rig.sender.reason


@pytest.mark.parametrize("words", [{}, {"delivered": 2, "close": True}])
def test_last_acks_of_lost_receiver_reach_runner(rig: Rig, words: dict[str, object]) -> None:
    rig.flood()  # unread when it leaves: the kernel resets the connection
    if words:
        rig.say(**words)
    rig.far.close()
    assert rig.ended()
    heard = rig.acks()
    assert max([ack.delivered for ack in heard], default=0) == words.get("delivered", 0)
    assert any(ack.close for ack in heard) is bool(words.get("close"))
    assert rig.sender.reason


def test_stop_leaves_both_sides_at_once(rig: Rig) -> None:
    rig.flood()
    assert rig.sender.stop(DEADLINE_S)
    assert rig.sender.stop(DEADLINE_S)
    assert rig.sender.reason == "stopped"
    assert rig.acks() == []
