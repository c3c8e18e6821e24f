"""Changes of a mixture's weights that an operator ordered in mid-run (`penstock mix`).

Code does not know such a change, so it belongs to the run: the coordinator gives it to each loader of the run, and each
later state lists it. A loader applies a change to the mixture that its code made, as if the code had a Schedule with
these weights from the change's position on. So what holds for a Schedule holds for a change: the rows are a function of
the position, on any topology.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.data.sharded.layers.layer import checked
from penstock.data.sharded.layers.mapped import Mapped
from penstock.data.sharded.layers.mixture import Mixture
from penstock.data.sharded.layers.mixture_shares import parts_of
from penstock.data.sharded.protocol import ShardedSource
from penstock.data.sharded.runs import take
from penstock.data.sharded.shard_cursors import HeldSample
from penstock.data.sharded.shard_keys import KeyStage, digest_of
from penstock.data.sharded.shard_states import described
from penstock.proto.errors import InvalidArgumentError, ReplayMismatchError, StateCorruptError, StateMismatchError
from penstock.proto.state.envelope import damaged_state

__all__ = [
    "CHANGES",
    "LoadSource",
    "MixtureChange",
    "changed",
    "in_epoch",
    "listed",
    "merged",
    "mixture_of",
    "new_parts",
    "new_position",
    "refuse_to_import",
    "shares_at",
    "stages_of",
    "still_to_come",
    "try_sources",
]

LoadSource = Callable[[str], Any]
"""Function from the name of a function ("module:function") to its result, a source."""
CHANGES = "mixture_changes"
"""Name of the entry of a state that lists the changes."""
NUMBER_LIMIT = 1 << 62


@dataclass(frozen=True)
class MixtureChange:
    """Change of the weights of a loader's uppermost mixture."""

    key: str
    """Text that identifies the change."""
    position: int
    """Number of samples that the mixture gives before the change."""
    parts: Mapping[str, int]
    """Weight of each source from then on, as whole numbers; sources that are left out have weight 0."""
    added: Mapping[str, str] = field(default_factory=dict)
    """Name of each added source -> name of the function that returns it."""
    required: bool = False
    """True if the change was made in the present launch: a state beyond it must list it."""
    epoch: int = 0
    """First epoch that has the change, from its position on. Earlier ones were delivered without it."""

    @property
    def begins(self) -> tuple[int, int]:
        """Epoch and position from which on the weights are others."""
        return self.epoch, self.position

    def drops(self, earlier: MixtureChange) -> bool:
        """Return True if this change, which was ordered after the earlier one, lets nothing of it remain."""
        return self.epoch <= earlier.epoch and self.position <= earlier.position

    def plain(self) -> dict[str, Any]:
        """Return the change as an entry of a state."""
        return {
            "key": self.key,
            "epoch": self.epoch,
            "position": self.position,
            "parts": dict(self.parts),
            "added": dict(self.added),
        }

    @classmethod
    def parsed(cls, entry: Mapping[str, Any]) -> MixtureChange:
        """Return the change in an entry of a state. Raises StateCorruptError for a damaged entry."""
        try:
            change = cls(
                entry["key"],
                entry["position"],
                dict(entry["parts"]),
                dict(entry["added"]),
                entry.get("required", False) is True,
                entry.get("epoch", 0),
            )
            texts = [change.key, *change.parts, *change.added, *change.added.values()]
            numbers = [change.epoch, change.position, *change.parts.values()]
            if not all(type(text) is str for text in texts):
                raise TypeError(f"names must be texts, got {texts!r:.200}")
            if not all(type(number) is int and 0 <= number < NUMBER_LIMIT for number in numbers):
                raise ValueError(f"numbers must be in range, got {numbers!r:.200}")
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise damaged_state("the ShardLoader's state is damaged", error) from error
        return change


def listed(state: Mapping[str, Any]) -> list[MixtureChange]:
    """Return the changes that a state lists, in the order in which they were made."""
    entries = state.get(CHANGES, ())
    if not isinstance(entries, list | tuple):
        raise StateCorruptError(
            f"the ShardLoader's state is damaged: its entry {CHANGES} must be a list, got {entries!r:.200}. Load an "
            "older state"
        )
    return [MixtureChange.parsed(entry) for entry in entries]


def in_epoch(changes: Iterable[MixtureChange], epoch: int) -> list[MixtureChange]:
    """Return the changes that an epoch has."""
    return [change for change in changes if change.epoch <= epoch]


def still_to_come(changes: Sequence[MixtureChange], reached: tuple[int, int]) -> list[MixtureChange]:
    """Return the changes that begin where nothing was reached yet, without those that a later order dropped. `reached`:
    see `merged`."""
    return [
        change
        for number, change in enumerate(changes)
        if change.begins >= reached and not any(later.drops(change) for later in changes[number + 1 :])
    ]


def merged(
    saved: Sequence[MixtureChange], assigned: Sequence[MixtureChange], reached: tuple[int, int]
) -> list[MixtureChange]:
    """Return the changes for a loader that loads a state, in the order in which they were made: those that the state
    lists, and those of the run that come after it. A change of an earlier launch that lies before the state and is not
    in it belongs to a part of the run's history that was left: it does not count.

    saved: the changes in the state. assigned: the changes of the run. reached: the state's epoch, and the first
    position there that the state has not reached.

    Raises ReplayMismatchError for a state of the present launch that lies beyond a change and lacks it: it does not
    lead to the batches that the launch delivers.
    """
    listed_keys, own_keys = {change.key for change in saved}, {change.key for change in assigned}
    for change in assigned:
        if change.required and change.begins < reached and change.key not in listed_keys:
            raise ReplayMismatchError(
                f"the state lies beyond position {change.position} of epoch {change.epoch}, from which on the weights "
                "of the mixture were changed by `penstock mix`, but was made with the weights from before. Load "
                "another state"
            )
    before_the_run = [change for change in saved if change.key not in own_keys]
    return [*before_the_run, *(one for one in assigned if one.key in listed_keys or one.begins >= reached)]


def refuse_to_import(name: str) -> Any:
    """Refuse to call the function of an added source, in a process that has no list of allowed modules."""
    raise StateMismatchError(
        f"the state has a source of {name!r}, which `penstock mix --add` added: load the state in a run of an "
        "Appliance, or add the source to the Mixture in the code"
    )


def mixture_of(source: ShardedSource) -> Mixture:
    """Return the mixture whose weights can change: the uppermost source, or the one below layers that make one sample
    of each. Raises InvalidArgumentError if there is none."""
    inner: Any = source
    while isinstance(inner, Mapped) and inner.one_to_one:
        inner = inner.source
    if not isinstance(inner, Mixture) or not inner.endless:
        where = f"below {type(inner).__name__}" if hasattr(inner, "source") else "in this loader"
        raise InvalidArgumentError(
            "the uppermost source must be a Mixture(stop='never') whose positions the loader knows, also below Mapped, "
            f"got {type(source).__name__}: the weights {where} cannot change in mid-run"
        )
    return inner


def changed(source: ShardedSource, changes: Iterable[MixtureChange], load: LoadSource) -> ShardedSource:
    """Return a source with the changes in its uppermost mixture. Raises InvalidArgumentError if they do not fit."""
    changes = list(changes)
    if not changes:
        return source
    mixture = mixture_of(source)
    for change in changes:
        more = {name: checked(load(fn), "Mixture") for name, fn in change.added.items() if name not in mixture.names}
        mixture = mixture.changed_from(change.position, change.parts, more)
    return _around(source, mixture)


def _around(source: Any, mixture: Mixture) -> ShardedSource:
    if isinstance(source, Mixture):
        return mixture
    return source.over(_around(source.source, mixture))  # type: ignore[no-any-return]


def shares_at(mixture: Mixture, position: int) -> dict[str, float]:
    """Return each source's share of the weights at a position, by name."""
    return dict(zip(mixture.names, mixture.wanted(position), strict=True))


def stages_of(
    code: ShardedSource, changes: Sequence[MixtureChange], load: LoadSource, order: Mapping[str, Any]
) -> list[KeyStage]:
    """Return the parts of an epoch's order between its changes, for restore keys.

    code: source without the changes. order: description of the loader's order.
    """
    found = []
    for position in sorted({0, *(change.position for change in changes)}):
        source = changed(code, (change for change in changes if change.position <= position), load)
        digest = digest_of({**order, "source": described(source)})
        mixture = mixture_of(source) if changes else None
        facts = (0, True) if mixture is None else (len(mixture.names), mixture.changes)
        found.append(KeyStage(position, source, digest, *facts))
    return found


def try_sources(source: ShardedSource, names: Iterable[str], seed: int) -> list[HeldSample]:
    """Return a sample of each of these sources of the mixture, which the layers above the mixture have made."""
    mixture, found = mixture_of(source), []
    for name in names:
        cursor = _around(source, mixture.changed_from(0, {name: 1}, {})).open(0, 0, seed)
        try:
            run = take(cursor, 1)
            found += [HeldSample(sample, origins=run.origins) for sample in run.samples]
        finally:
            cursor.close()
    return found


def new_position(begin: int, steps: int, batch: int) -> int:
    """Return the position of a change after a number of global batches. Raises InvalidArgumentError if it is too
    far."""
    position = begin + steps * batch
    if position >= NUMBER_LIMIT:
        raise InvalidArgumentError(f"--from-step must lie before sample {NUMBER_LIMIT}, got sample {position}")
    return position


def new_parts(
    mixture: Mixture, position: int, weights: Mapping[str, Any], added: Iterable[str], retired: Sequence[str]
) -> dict[str, int]:
    """Return the weight of each source as whole numbers, for the weights and added sources of a command. Without
    weights, all sources but the retired ones keep theirs.

    Raises InvalidArgumentError for invalid weights, unknown sources, and a source that is left out although it has a
    weight.
    """
    names = [*mixture.names, *(name for name in added if name not in mixture.names)]
    before = dict(zip(mixture.names, mixture.parts_at(position), strict=True))
    for name in added:
        if name in mixture.names:
            raise InvalidArgumentError(f"--add must name a new source, got {name!r}, which the mixture has")
        if name not in weights:
            raise InvalidArgumentError(f"--weights must have a weight for the added source {name!r}: give one")
    for name in (*weights, *retired):
        if name not in names:
            raise InvalidArgumentError(f"a source must be one of {', '.join(names)}, got {name!r}: see --add")
    for name in retired:
        if name in weights:
            raise InvalidArgumentError(
                f"a source must be in --weights or --retire, got {name!r} in both: leave out one"
            )
    given: Mapping[str, Any] = weights or before
    missing = [name for name, part in before.items() if part and name not in given and name not in retired]
    if missing:
        raise InvalidArgumentError(
            f"--weights must have each source that has a weight now, got none for {', '.join(missing)}: give its "
            "weight, or --retire it"
        )
    values = [0 if name in retired else given.get(name, 0) for name in names]
    return dict(zip(names, parts_of(values), strict=True))
