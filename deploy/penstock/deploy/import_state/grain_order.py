"""Script that writes the record keys of an epoch of Grain to a file, for all shards one after another. It runs in an
interpreter that has Grain. A shard, in Grain's words, is the part of the records that one process reads.

python grain_order.py OUT.npy < REQUEST.json
"""

import json
import sys

import numpy as np
from grain import samplers, sharding


def main() -> None:
    """Write the record keys of an epoch: the keys of shard 0 in the order of its indexes, then the keys of shard 1, and
    so on."""
    request = json.load(sys.stdin)
    shards, epoch = request["shards"], request["epoch"]
    found = []
    for shard, length in enumerate(request["lengths"]):
        options = sharding.ShardOptions(shard, shards, request["drop_remainder"]) if request["sharded"] else None
        sampler = samplers.IndexSampler(
            request["records"], options or sharding.NoSharding(), shuffle=request["shuffle"], seed=request["seed"]
        )
        begin = epoch * length
        found += [sampler[index * shards + shard].record_key for index in range(begin, begin + length)]
    np.save(sys.argv[1], np.array(found, np.int64))


if __name__ == "__main__":
    main()
