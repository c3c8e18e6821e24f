"""Lanes. A lane carries one slot's batches to the training process: the producer fills a ring (shared memory), and the
consumer reads the ring.

Both speak the frames of lane.proto over a SEQPACKET Unix socket, which keeps each frame whole. `Producer` is the
runner's end (and, on another host, the receiver's); `Consumer` the training loop's (and, for another host, the
sender's): a TCP lane is two local lanes with TCP between them.

Neither end has threads or locks. A producer exists longer than its consumers, and keeps each batch until it is
delivered, so a consumer that reconnects gets it from the ring.

Three rules prevent deadlock: a consumer sends its acks before it waits; a producer that waits for a free entry reads
acks; neither waits to write (messages that do not fit in the socket stay queued until the next call)."""
