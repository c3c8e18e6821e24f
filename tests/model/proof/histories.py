"""Random histories of a training job, each a function of its seed: what the loop does, and what happens meanwhile.

Pure. When a fault comes is told in steps of the loop; what it meets there depends on timing.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from proof.kinds import KINDS

__all__ = ["FAULTS", "Fault", "Launch", "Loop", "Place", "Plan", "live", "plan_of"]

REPLAYS = (None, None, 0.0, float("inf"))
RUN_SEEDS = (5, 5, 5, 2**63 + 11)


@dataclass(frozen=True)
class Loop:
    """One `for` of the training script."""

    kind: str
    """"epoch": over one epoch; "steps": num_steps=count; "persistent": over one epoch, with persistent=True; "iter": an
    iterator that is dropped before its first batch."""
    count: int = 0
    leave: int = 0
    """Batches after which the loop leaves by `break`; 0 = never."""

    def __str__(self) -> str:
        return self.kind + (f" {self.count}" if self.count else "") + (f" break {self.leave}" if self.leave else "")


@dataclass(frozen=True)
class Fault:
    """What happens when box `box` has its batch of step `step`."""

    kind: str
    box: int
    step: int
    which: int
    """Number that chooses what it happens to."""
    waits: bool
    """True if the loop waits meanwhile, so workers make all that they may make ahead; False: it runs on."""
    after_s: float = 0.0
    """Seconds after the step."""
    lasts_s: float = 0.0
    """Seconds until it is put right."""

    def __str__(self) -> str:
        more = f" lasts {self.lasts_s:.2f} s" if self.lasts_s else ""
        return f"{self.kind} ({self.which}) at step {self.step} of box {self.box} + {self.after_s:.2f} s{more}"


@dataclass(frozen=True)
class Launch:
    """One start of the job, on all boxes."""

    stop: int
    """Step at which it ends."""
    killed: bool
    """True if the training processes get SIGKILL there, False if they close the appliance."""
    saves: tuple[int, ...]
    """Steps at which the loop saves."""
    announced: tuple[int, ...]
    """Those that DataExecutor is told before, as checkpoint_steps."""
    resume: int = 0
    """Step of the last launch that it resumes from; 0: from the beginning."""
    topology: tuple[int, int] = (0, 0)
    """Numbers of boxes and of slots of a box, if they are not the plan's."""
    rests: bool = False
    """True if it ends with an epoch, and saves after the loop."""


@dataclass(frozen=True)
class Plan:
    seed: int
    kind: str
    """Name of the loader in loaders.KINDS."""
    arguments: dict[str, Any]
    boxes: int
    workers: int
    lane: str
    pace: str
    run_seed: int
    script: tuple[Loop, ...]
    """The loops, again and again until the last step."""
    launches: tuple[Launch, ...]
    faults: tuple[tuple[Fault, ...], ...]
    """For each launch, in order of steps."""
    replay_s: float | None = None
    """Argument of Appliance; None: its own default."""
    mutation: str = ""

    def encoded(self) -> str:
        """Return the plan as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def decoded(cls, text: str) -> Plan:
        given = json.loads(text)
        given["script"] = tuple(Loop(**loop) for loop in given["script"])
        launches: list[dict[str, Any]] = given["launches"]
        for launch in launches:
            launch.update({key: tuple(value) for key, value in launch.items() if isinstance(value, list)})
        given["launches"] = tuple(Launch(**launch) for launch in launches)
        given["faults"] = tuple(tuple(Fault(**fault) for fault in faults) for faults in given["faults"])
        return cls(**given)

    def topology(self, launch: int) -> tuple[int, int]:
        """Return the numbers of boxes and of slots of a box in a launch."""
        boxes, workers = self.launches[launch].topology
        return (boxes, workers) if boxes else (self.boxes, self.workers)

    def __str__(self) -> str:
        arguments = ", ".join(f"{name}={value!r}" for name, value in self.arguments.items())
        place = (
            f"{self.boxes} boxes x {self.workers} slots, lane {self.lane}, pace {self.pace}, run seed {self.run_seed}"
        )
        lines = [f"{self.kind}({arguments}), {place}, replay_s {self.replay_s} {self.mutation}"]
        lines.append(f"script: {', '.join(map(str, self.script))}")
        for number, (launch, faults) in enumerate(zip(self.launches, self.faults, strict=True)):
            begins = f"resumes from {launch.resume}" if launch.resume else "begins"
            begins += " on {} boxes x {} slots".format(*launch.topology) if launch.topology[0] else ""
            ends = f"{'is killed' if launch.killed else 'saves and ends' if launch.rests else 'ends'} at {launch.stop}"
            lines.append(f"launch {number} {begins}, {ends}; saves {[*launch.saves]}, announced {[*launch.announced]}")
            lines += [f"  {fault}" for fault in faults]
        return "\n".join(lines)


# ---- the script, for the model and for the training process

Place = tuple[int, int]
"""(number of the loop, batches taken in it)."""


def live(
    script: Sequence[Loop],
    place: Place,
    step: int,
    stop: int,
    iterate: Callable[[Loop, int], Iterator[Any]],
    *,
    rests: bool = False,
) -> Generator[tuple[int, Any, Place], None, None]:
    """Run the loops up to step `stop`, and yield each step with its batch and its place in the script.

    iterate: returns the iterator of a loop in which so many batches were taken before. rests: True if the last loop
    must end by itself at that step.
    """
    number, taken = place
    if taken and _is_over(script[number % len(script)], taken):
        number, taken = number + 1, 0
    while step < stop:
        loop = script[number % len(script)]
        iterator = iterate(loop, taken)
        for batch in iterator:
            step, taken = step + 1, taken + 1
            yield step, batch, (number, taken)
            del batch
            if taken == loop.leave or (step == stop and not rests):
                break
            assert step <= stop, "this loop goes on"
        del iterator
        number, taken = number + 1, 0


def _is_over(loop: Loop, taken: int) -> bool:
    return taken == loop.leave or (loop.kind == "steps" and taken == loop.count)


# ---- the plan of a seed

FAULTS = {
    "kill slot": 8,
    "kill epoch": 8,
    "drain": 5,
    "kill daemon": 2,
    "kill coordinator": 2,
    "stop slot": 2,
}
"""What may happen -> how often."""


def plan_of(seed: int, kinds: Sequence[str] = tuple(KINDS)) -> Plan:
    """Return the plan of a seed. kinds: names of the loaders from which one is chosen."""
    rng = random.Random(seed)
    name = rng.choice(kinds)
    kind = KINDS[name]
    arguments = dict(rng.choice(kind.variants))
    if rng.random() < 0.45 and kind.big:
        arguments["big"] = True
    if kind.moves and rng.random() < 0.12:
        return _moving(rng, seed, name, arguments)
    if kind.in_process and rng.random() < 0.06:
        return _in_process(rng, seed, name, arguments)
    hard = rng.random() < 0.6
    """Two boxes of two slots, three faults, a `break` before a fault, and a resume."""
    boxes, workers = (2, 2) if hard else rng.choice([(1, 1), (1, 2), (1, 3), (2, 1), (2, 2)])
    steps = max(kind.steps, rng.randint(30, 90))
    script = _script(rng, steps, hard, max(20, kind.steps))
    launches = _launches(rng, steps, script[0].leave, rng.choice([2, 3]) if hard else rng.choice([1, 1, 2]))
    count = rng.randint(3, 5) if hard else rng.randint(0, 3)
    return Plan(
        seed,
        name,
        arguments,
        boxes,
        workers,
        rng.choice(["auto", "tcp"]),
        rng.choice(["fast", "slow", "varying"]),
        rng.choice(RUN_SEEDS),
        script,
        launches,
        _faults(rng, launches, count, boxes, script, hard),
        rng.choice(REPLAYS),
    )


def _moving(rng: random.Random, seed: int, name: str, arguments: dict[str, Any]) -> Plan:
    """A job that goes on with other numbers of boxes and workers, each time between two epochs."""
    arguments["length"] = length = rng.randint(5, 9)
    loops: list[Loop] = []
    launches: list[Launch] = []
    topologies = rng.sample([(1, 1), (1, 2), (1, 3), (2, 1), (2, 2)], 3)
    begins = 0
    for number, topology in enumerate(topologies):
        leave = rng.randint(1, length)
        loops += [Loop("epoch", leave=leave), Loop("epoch")]
        stop = begins + leave + length * topology[1]
        saves = tuple(sorted(rng.sample(range(begins + 1, stop), 2)))
        launches.append(Launch(stop, False, saves, saves[:1], begins, topology, number < 2))
        begins = stop
    script = tuple(loops)
    faults: list[Any] = []
    for launch in launches:
        faults += _faults(rng, [launch], rng.randint(0, 2), launch.topology[0], script, False)
    lane, pace = rng.choice(["auto", "tcp"]), rng.choice(["fast", "slow", "varying"])
    return Plan(seed, name, arguments, 1, 1, lane, pace, 5, script, tuple(launches), tuple(faults), rng.choice(REPLAYS))


def _in_process(rng: random.Random, seed: int, name: str, arguments: dict[str, Any]) -> Plan:
    """A job whose batches are made in the training process."""
    steps = rng.randint(30, 90)
    script = _script(rng, steps, False, 20)
    launches = _launches(rng, steps, script[0].leave, rng.choice([1, 2, 3]))
    faults = ((),) * len(launches)
    return Plan(seed, name, arguments, 1, 0, "auto", "fast", 5, script, launches, faults, rng.choice(REPLAYS))


def _script(rng: random.Random, steps: int, hard: bool, longest: int) -> tuple[Loop, ...]:
    loops: list[Loop] = []
    for _ in range(rng.randint(2, 6)):
        few = rng.randint(1, longest)
        kinds = [
            Loop("epoch"),
            Loop("epoch", leave=few),
            Loop("epoch", leave=few),
            Loop("steps", few),
            Loop("steps", few + 1, leave=rng.randint(1, few)),
            Loop("persistent", leave=few),
            Loop("iter"),
        ]
        loops.append(rng.choice(kinds))
    if hard:
        loops.insert(0, Loop("epoch", leave=rng.randint(2, max(3, steps // 8))))
    elif all(loop.kind == "iter" for loop in loops):
        loops.append(Loop("epoch"))
    return tuple(loops)


def _launches(rng: random.Random, steps: int, first: int, count: int) -> tuple[Launch, ...]:
    launches: list[Launch] = []
    begins = 0
    for number in range(count):
        left = steps - begins
        stop = steps
        if number < count - 1:
            least = max(2, left // (3 * (count - number)), first + 2 if number == 0 else 0)
            stop = min(steps - 2, begins + rng.randint(least, max(least, left * 2 // 3)))
        places = range(begins + 1, stop + 1)
        saves = sorted(rng.sample(places, min(len(places), rng.choice([1, 2, 3, 6]))))
        announced = tuple(step for step in saves if rng.random() < 0.5)
        if rng.random() < 0.1:  # each step
            saves, announced = list(places), tuple(places)
        launches.append(Launch(stop, rng.random() < 0.5 and number < count - 1, tuple(saves), announced, begins))
        begins = rng.choice(saves)
    return tuple(launches)


def _faults(
    rng: random.Random, launches: Sequence[Launch], count: int, boxes: int, script: Sequence[Loop], hard: bool
) -> tuple[tuple[Fault, ...], ...]:
    found: list[list[Fault]] = [[] for _ in launches]
    for number in range(count):
        launch = rng.randrange(len(launches))
        first, last = launches[launch].resume + 1, launches[launch].stop
        step = rng.randint(first, last)
        if hard and number == 0:  # soon after the first `break`
            launch, step = 0, min(launches[0].stop, script[0].leave + rng.randint(0, 4))
        kind = rng.choices(list(FAULTS), list(FAULTS.values()))[0]
        found[launch].append(
            Fault(
                kind,
                rng.randrange(boxes),
                step,
                rng.randrange(1000),
                rng.random() < 0.5,
                rng.choice([0.0, 0.0, rng.uniform(0, 0.1)]),
                0.0 if kind.startswith(("kill slot", "kill epoch")) else rng.uniform(0.05, 0.8),
            )
        )
    return tuple(tuple(sorted(faults, key=lambda fault: (fault.step, fault.box))) for faults in found)
