"""Lanes. A lane carries one slot's batches to the training process. It has two ends: the producer, which fills a ring
(shared memory), and the consumer, which reads the ring.

Both ends speak the frames of lane.proto over a SEQPACKET Unix socket, which keeps each frame whole, while the batch
stays in the ring. `Producer` is the runner's end (and, on another host, the receiver's); `Consumer` is the training
loop's end (and, for another host, the sender's). So the same two classes serve lanes on one host and between hosts: a
TCP lane is two local lanes with TCP between them.

Neither end has threads or locks: the caller's thread does everything, and blocks only where documented. A producer
exists longer than its consumers, and keeps each batch until the batch is delivered. So a consumer that reconnects gets
undelivered batches from the ring, and no batch is computed again.

Three rules prevent deadlock. A consumer sends its acks before it waits for anything. A producer that waits for a free
entry reads acks. Neither ever waits to write: messages that do not fit in the socket stay queued until the next call.
"""
