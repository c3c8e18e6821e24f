"""Script for an interpreter that has mosaicml-streaming: the order of an epoch in which each sample comes once.

python mosaicml_order.py OUT.npy < REQUEST.json
"""

import json
import sys

import numpy as np
from streaming.base.partition import get_partitions
from streaming.base.shuffle import get_shuffle


def main() -> None:
    """Write the sample numbers of an epoch in the order of their delivery. With one node, rank and worker, and batches
    of one sample, the partitions that mosaicml-streaming computes are that order itself."""
    request = json.load(sys.stdin)
    sizes = np.array(request["sizes"], np.int64)
    order = get_partitions("orig", int(sizes.sum()), request["nodes"], 1, 1, 1, 1).reshape(-1)
    if request["algorithm"] is not None:
        shuffle = get_shuffle(
            request["algorithm"], sizes, request["nodes"], request["seed"], request["epoch"], request["block"]
        )
        order = np.where(order != -1, shuffle[order], -1)
    np.save(sys.argv[1], order[order != -1])


if __name__ == "__main__":
    main()
