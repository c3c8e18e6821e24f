"""The two ends of a lane: who fills a ring, and who reads it.

Both ends speak the frames of lane.proto over a SEQPACKET Unix socket, which keeps each frame whole, while the payload
stays in the ring. `Producer` is the runner's end (and, on another host, the receiver's); `Consumer` is the training
loop's end (and, for another host, the sender's). So there is one producer path and one consumer path to make right and
fast, and the TCP lane is the local lane twice with TCP between.

Neither end has threads or locks: the caller's thread does everything, and blocks only where it says so. The producer
outlives its consumers: it keeps each batch until it was delivered, so a consumer that comes back gets what it had not
yet handed out, from the ring, with nothing computed again.

Three rules keep it free of deadlock. A consumer's acks go out before it waits for anything. A producer that waits for a
free slot reads acks. Neither ever waits for room to write: what does not fit in the socket now stays queued and goes
out at the next call.

The parts live in frames.py, producer.py and consumer.py; the rest of Penstock takes them from here.
"""

from __future__ import annotations

from penstock.proto.lane.consumer import Consumer
from penstock.proto.lane.frames import LANE_PROTOCOL, MAX_FRAME, check_peer, connect_local, dims_of
from penstock.proto.lane.producer import FreeEntry, Producer

__all__ = ["LANE_PROTOCOL", "MAX_FRAME", "Consumer", "FreeEntry", "Producer", "check_peer", "connect_local", "dims_of"]
