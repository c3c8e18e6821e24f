"""The two ends of a lane: the producer, which fills a ring, and the consumer, which reads the ring. (A lane is the
connection that carries one slot's batches to the training process.)

Both ends speak the frames of lane.proto over a SEQPACKET Unix socket, which keeps each frame whole, while the batch
stays in the ring. `Producer` is the runner's end (and, on another host, the receiver's); `Consumer` is the training
loop's end (and, for another host, the sender's). So the same two classes serve lanes on one host and between hosts: a
TCP lane is two local lanes with TCP between them.

Neither end has threads or locks: the caller's thread does everything, and blocks only where documented. A producer
exists longer than its consumers, and keeps each batch until the batch is delivered. So a consumer that reconnects gets
undelivered batches from the ring, and no batch is computed again.

Three rules prevent deadlock. A consumer sends its acks before it waits for anything. A producer that waits for a free
entry reads acks. Neither ever waits to write: messages that do not fit in the socket stay queued until the next call.

The code is in frames.py, producer.py and consumer.py. Code that handles single frames imports frames.py itself.
"""

from __future__ import annotations

from penstock.proto.lane.consumer import Consumer
from penstock.proto.lane.frames import LANE_PROTOCOL, MAX_FRAME, check_peer, connect_local, dims_of
from penstock.proto.lane.producer import FreeEntry, Producer

__all__ = ["LANE_PROTOCOL", "MAX_FRAME", "Consumer", "FreeEntry", "Producer", "check_peer", "connect_local", "dims_of"]
