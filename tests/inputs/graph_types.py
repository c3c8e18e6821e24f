"""A library that registers its type with torch's pytree, and an input of it."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import register_pytree_node


class Graph:
    def __init__(self, nodes: Any, name: str) -> None:
        self.nodes = nodes
        self.name = name


register_pytree_node(Graph, lambda graph: ([graph.nodes], graph.name), lambda nodes, name: Graph(*nodes, name))  # type: ignore[call-arg]


def graphs() -> list[Graph]:
    return [Graph(torch.ones(2), "first"), Graph(torch.ones(3), "second")]
