"""Queue of a producer's frames to a consumer on a local lane. Several frames are sent in one packet.

The largest cost of a small batch is waking the consumer: 5 us for each packet to a sleeping peer (2-core AMD EPYC,
virtual), against 7 us for everything else. So `flush` sends all frames as one packet of at most MAX_PACKET bytes. The
descriptor of a ring has a packet of its own, after the one that ends with its RING frame."""

from __future__ import annotations

import socket
from collections import deque

from penstock.proto.errors import malformed
from penstock.proto.lane.frames import MAX_PACKET


class Outbox(deque[bytes | int]):
    """Frames, and descriptors as integers. Use `add`, which checks, and not `append`."""

    __slots__ = ()

    def add(self, message: bytes | int) -> None:
        """Raises ProtocolError for a frame that is larger than a packet: a peer's, which is forwarded."""
        if not isinstance(message, int) and len(message) > MAX_PACKET:
            raise malformed(f"a frame must have at most {MAX_PACKET} bytes, got {len(message)}")
        self.append(message)

    def flush(self, sock: socket.socket) -> None:
        """Send as many frames as fit into the socket's buffer. Raises OSError if it fails, and drops all frames then,
        because the peer would get later ones without the failed one."""
        try:
            while self:
                first = self[0]
                if isinstance(first, int):
                    socket.send_fds(sock, [b"\x00"], [first])
                    self.popleft()
                elif len(self) == 1:
                    sock.send(first)
                    self.popleft()
                else:
                    packet = self._packet()
                    sock.send(b"".join(packet))
                    for _ in packet:
                        self.popleft()
        except BlockingIOError:
            pass
        except OSError:
            self.clear()
            raise

    def _packet(self) -> list[bytes]:
        packet: list[bytes] = []
        room = MAX_PACKET
        for message in self:
            if isinstance(message, int):
                break
            room -= len(message)
            if room < 0:
                break
            packet.append(message)
        return packet
