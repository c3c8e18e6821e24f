"""What the loaders of the proof are, as data: nothing of them is imported here.

The generators that a loader holds are named, so the reference does not look for them as the product does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["KINDS", "Kind"]


@dataclass(frozen=True)
class Kind:
    """Loader of the proof."""

    input_fn: str
    """"module:name"."""
    own: tuple[str, ...] = ()
    """Attributes, seen from the loader, with the generators that it holds."""
    module: tuple[str, ...] = ()
    """Globals with the generators of the module of its dataset, in their order there."""
    variants: tuple[dict[str, Any], ...] = ({},)
    """Arguments to choose from."""
    steps: int = 0
    """Least number of steps of a history."""
    is_function: bool = True
    """False if an epoch of it is not a function: other batches must not come, but a named error may."""
    is_vouched: bool = False
    big: bool = True
    """True if it makes batches of more than 128 KiB with big=True."""
    moves: bool = False
    """True if each epoch has `length` batches of each slot, so that it is known where an epoch ends."""
    in_process: bool = False
    """True if it is a function also in a process that makes several epochs."""
    deaths: bool = False
    """True if it takes a folder, in which it notes the times when it has killed its process."""


_PAUSE: tuple[dict[str, Any], ...] = ({}, {"pause_s": 0.002})

KINDS: dict[str, Kind] = {
    "shuffled": Kind("proof.loaders:shuffled", variants=_PAUSE, moves=True, in_process=True),
    "own generators": Kind(
        "proof.loaders:own_generators",
        own=("generator", "dataset.rng", "dataset.other"),
        variants=_PAUSE,
        moves=True,
        in_process=True,
    ),
    "entropy": Kind(
        "proof.loaders:entropy", own=("dataset.rng",), variants=(*_PAUSE, {"hidden": True}), is_function=False
    ),
    "worker processes": Kind(
        "proof.loaders:with_workers", variants=({}, {"workers": 2}, {"workers": 2, "persistent": True}), moves=True
    ),
    "keeps its place": Kind("proof.loaders:keeps_place", variants=({}, {"pause_s": 0.0}), moves=True, in_process=True),
    "counter": Kind("proof.loaders:counter", variants=_PAUSE, moves=True, in_process=True),
    "lies at once": Kind("proof.loaders:lies_at_once", variants=({}, {"pause_s": 0.0}), moves=True, in_process=True),
    "lies after 100 batches": Kind("proof.loaders:lies_late", steps=320),
    "counts epochs": Kind("proof.loaders:counts_epochs", moves=True, in_process=True),
    "detshuffle": Kind("proof.loaders:detshuffle", variants=_PAUSE, moves=True, in_process=True),
    "set_epoch": Kind("proof.loaders:sets_epoch", moves=True, in_process=True),
    "reads epoch": Kind("proof.loaders:reads_epoch", moves=True, in_process=True),
    "memoised": Kind("proof.memo:memoised", moves=True),
    "module generators": Kind(
        "proof.module_draws:module_generators", module=("RNG", "OTHER", "TORCH"), variants=_PAUSE, moves=True
    ),
    "file at import": Kind("proof.at_import:opens_file", big=False, moves=True),
    "socket at import": Kind("proof.socket_at_import:opens_socket", big=False, moves=True),
    "threads": Kind("proof.loaders:threads", big=False, moves=True),
    "uneven": Kind("proof.loaders:uneven", variants=({}, {"longest": 4}), in_process=True),
    "empty epochs": Kind("proof.loaders:empty_epochs", variants=({}, {}, {}, {"everywhere": True}), in_process=True),
    "StatefulDataLoader": Kind(
        "proof.loaders:stateful",
        own=("sampler.generator",),
        variants=(*_PAUSE, {"workers": 2}),
        moves=True,
        in_process=True,
    ),
    "infinite": Kind("proof.loaders:infinite"),
    "vouched": Kind(
        "proof.loaders:vouched",
        is_vouched=True,
        variants=({}, {"length": 150}, {"shuffle": False}, {"draws": True}),
        in_process=True,
    ),
    "worker info": Kind(
        "proof.loaders:shards",
        variants=({"reads": "nothing"}, {"reads": "box"}, {"reads": "slot"}, {"reads": "nothing", "workers": 2}),
        big=False,
    ),
    "dies": Kind(
        "proof.dying:dying",
        variants=tuple({"point": point} for point in ("iter", "next", "end", "leave", "hand over")),
        deaths=True,
    ),
    "leaves slowly": Kind("proof.dying:leaves_slowly", moves=True),
}
