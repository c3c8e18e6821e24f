"""What each box must receive in a history, from the user's input_fn alone: python -m proof.reference PLAN, as JSON.

Nothing of the product that makes, moves or restores a loader is used. A slot's epoch is made in a process that was
forked for it and has made nothing else: it imports the user's module and calls input_fn under generators seeded by
(seed, box, slot), begins the epoch by the second rule of rows/core.md, and iterates. It takes of the product the
derivation of seeds, and what a worker's code may ask: current_assignment().
"""

from __future__ import annotations

import gc
import importlib
import itertools
import json
import operator
import os
import signal
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.utils.data
import torchdata.stateful_dataloader  # noqa: F401  # once, and not in each process
from proof.contents import brief, fingerprint
from proof.histories import Launch, Loop, Place, Plan, live
from proof.kinds import KINDS
from proof.model import Box, NoInputError
from torch.utils.data._utils import worker as torch_worker

import penstock.data
import penstock.worker  # noqa: F401
from penstock.proto.errors import EmptyInputError
from penstock.proto.state import assignment as assignments
from penstock.proto.state.found_generators import find_generators, initial_seed, reseed
from penstock.proto.state.generators import derive_seed, seed_rng

__all__ = ["Made", "expected"]

DEADLINE_S = 600
"""Seconds after which the reference ends by a signal: a loader that waits for ever must not stop all histories."""
FIRST = 32
"""Batches of an epoch that are made at first: more than most histories take of one."""


@dataclass(frozen=True)
class Made:
    """Batch of the reference."""

    slot: int
    epoch: int
    number: int
    content: str
    brief: str


class Slots:
    """Epochs of one box, each made in a process of its own: its first batches, and more when they are asked for."""

    def __init__(self, plan: Plan, topology: tuple[int, int], box: int) -> None:
        self._plan, self._topology, self._box = plan, topology, box
        self._made: dict[tuple[int, int], list[Made]] = {}
        self._asked: dict[tuple[int, int], int] = {}
        """Batches that were asked for; fewer were made if the epoch has no more."""

    def __call__(self, slot: int, epoch: int, number: int) -> Made | None:
        made, asked = self._made.get((slot, epoch), []), self._asked.get((slot, epoch), 0)
        while number >= len(made) == asked:
            asked = self._asked[slot, epoch] = max(FIRST, 4 * asked)
            batches = _in_a_fork(self._plan, self._topology, self._box, slot, epoch, asked)
            made = self._made[slot, epoch] = [Made(slot, epoch, n, *batch) for n, batch in enumerate(batches)]
        return made[number] if number < len(made) else None


def _in_a_fork(*what: Any) -> list[list[str]]:
    reading, writing = os.pipe()
    sys.stdout.flush()
    pid = os.fork()
    if not pid:
        status = 1
        try:
            os.close(reading)
            with os.fdopen(writing, "w") as pipe:
                json.dump(_epoch(*what), pipe)
            status = 0
        except BaseException as error:
            sys.excepthook(type(error), error, error.__traceback__)
        finally:
            sys.stderr.flush()
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    _, status = os.waitpid(pid, 0)
    assert status == 0, f"the reference cannot make an epoch: {what}"
    batches: list[list[str]] = json.loads(text)
    return batches


def _epoch(plan: Plan, topology: tuple[int, int], box: int, slot: int, epoch: int, most: int) -> list[tuple[str, str]]:
    kind, seed = KINDS[plan.kind], plan.run_seed
    boxes, workers = topology
    assignments.set_assignment(assignments.Assignment(box, boxes, slot, workers, seed, 1))
    _answer_worker_info(plan.arguments.get("reads"), boxes, workers, box, slot)
    seed_rng(derive_seed(seed, "slot", box, slot))
    module, _, name = kind.input_fn.partition(":")
    loader = getattr(importlib.import_module(module), name)(**plan.arguments)
    if kind.is_vouched:
        for _ in range(epoch):
            for _ in loader:
                pass
    else:
        _begin(loader, plan, box, slot, epoch)
    iterator = iter(loader)
    made = [(fingerprint(batch), brief(batch)) for batch in itertools.islice(iterator, most)]
    del iterator, loader
    gc.collect()  # ends torch's worker processes
    return made


def _answer_worker_info(reads: str | None, boxes: int, workers: int, box: int, slot: int) -> None:
    """Let torch's get_worker_info() answer by what the loader reads of its assignment: nothing, "box", or "slot"."""
    answers = {
        "nothing": SimpleNamespace(id=box * workers + slot, num_workers=boxes * workers),
        "box": SimpleNamespace(id=slot, num_workers=workers),
    }

    def get_worker_info() -> Any:
        if torch_worker._worker_info is not None:  # in a worker process of the loader's own
            return torch_worker._worker_info
        return answers.get(reads or "slot")

    if reads is not None:
        torch.utils.data.get_worker_info = get_worker_info


def _begin(loader: Any, plan: Plan, box: int, slot: int, epoch: int) -> None:
    """Begin an epoch, but for `iter()`."""
    kind, seed = KINDS[plan.kind], plan.run_seed
    own = [_found(operator.attrgetter(path)(loader)) for path in kind.own]
    initial = [initial_seed(generator) for generator in own]
    seed_rng(derive_seed(seed, "epoch", box, slot, epoch))
    for generator, start in zip(own, initial, strict=True):
        if epoch:
            reseed(generator, derive_seed(start, "epoch", epoch))
    names = vars(sys.modules[type(loader.dataset).__module__]) if kind.module else {}
    for number, name in enumerate(kind.module):
        reseed(_found(names[name]), derive_seed(seed, "module", box, slot, epoch, number))
    assignments.set_epoch(epoch)
    sampler = getattr(loader, "batch_sampler", None)
    parts = [loader, getattr(loader, "sampler", None), sampler, getattr(sampler, "sampler", None)]
    parts.append(getattr(loader, "dataset", None))
    for part in {id(part): part for part in parts}.values():
        if hasattr(part, "set_epoch"):
            part.set_epoch(epoch)


def _found(generator: Any) -> Any:
    """Return one generator as the product has those that it finds."""
    (one,) = find_generators([[generator]])
    return one


# ---- a whole history

AFTER = 12
"""Steps beyond the end of a launch that is killed: it runs on until the signal comes."""


def expected(plan: Plan) -> list[list[list[Made]]]:
    """Return what each box receives in each launch, from the step after that from which it resumes."""
    found: list[list[list[Made]]] = []
    slots: dict[Any, Slots] = {}
    saved: dict[int, list[tuple[Box, Place]]] = {}
    topology = (0, 0)
    for number, launch in enumerate(plan.launches):
        before, topology = topology, plan.topology(number)
        boxes, workers = topology[0], max(1, topology[1])  # without workers the training process is the only one
        given = [slots.setdefault((topology, box), Slots(plan, (boxes, workers), box)) for box in range(boxes)]
        begun = [(Box(workers, given[box]), (0, 0)) for box in range(boxes)]
        if launch.resume:
            then = saved[launch.resume]
            begun = (
                [(then[box][0].resumed(), then[box][1]) for box in range(boxes)]
                if before == topology
                else [(then[0][0].moved(workers, given[box]), then[0][1]) for box in range(boxes)]
            )
        saved = {}
        found.append([_taken(plan, launch, stream, place, saved) for stream, place in begun])
        if any(box and box[-1].slot < 0 for box in found[-1]):
            break  # by an error
    return found


def _taken(
    plan: Plan, launch: Launch, stream: Box, place: Place, saved: dict[int, list[tuple[Box, Place]]]
) -> list[Made]:
    """Return the batches of one box in one launch, and add its position at each save."""
    taken: list[Made] = []
    stop = launch.stop + (0 if launch.rests else AFTER)
    try:
        for step, batch, at in live(plan.script, place, stream.step, stop, _loops(stream), rests=launch.rests):
            taken.append(batch)
            place = at
            if step in launch.saves:
                saved.setdefault(step, []).append((stream.resumed(), at))
    except NoInputError:
        taken.append(Made(-1, stream.epoch, 0, EmptyInputError.__name__, "an error"))
    if launch.rests:
        saved.setdefault(launch.stop, []).append((stream, (place[0] + 1, 0)))
    return taken


def _loops(stream: Box) -> Any:
    def iterate(loop: Loop, taken: int) -> Iterator[Any]:
        if loop.kind == "iter":
            return iter(())
        left = loop.count - taken if loop.kind == "steps" else None
        return stream.loop(left, persistent=loop.kind == "persistent")

    return iterate


def main(arguments: Sequence[str] = ()) -> None:
    warnings.simplefilter("ignore")
    signal.alarm(DEADLINE_S)
    plan = Plan.decoded((arguments or sys.argv[1:])[0])
    rows = [[[vars(made) for made in box] for box in launch] for launch in expected(plan)]
    print(json.dumps(rows), flush=True)


if __name__ == "__main__":
    main()
