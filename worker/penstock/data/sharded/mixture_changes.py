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
from penstock.proto.errors import InvalidArgumentError, StateCorruptError, StateMismatchError
from penstock.proto.state.envelope import damaged_state

__all__ = [
    "CHANGES",
    "LoadSource",
    "MixtureChange",
    "changed",
    "listed",
    "merged",
    "mixture_of",
    "new_parts",
    "refuse_to_import",
    "shares_at",
    "source_facts",
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

    def plain(self) -> dict[str, Any]:
        """Return the change as an entry of a state."""
        return {"key": self.key, "position": self.position, "parts": dict(self.parts), "added": dict(self.added)}

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
            )
            texts = [change.key, *change.parts, *change.added, *change.added.values()]
            numbers = [change.position, *change.parts.values()]
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


def merged(saved: Sequence[MixtureChange], assigned: Sequence[MixtureChange], position: int) -> list[MixtureChange]:
    """Return the changes for a loader that loads a state: those that the state lists, then those of the run that come
    after it. A change of an earlier launch that lies before the state and is not in it belongs to a part of the run's
    history that was left: it does not count.

    saved: the changes in the state. assigned: the changes of the run. position: first position that the state has not
    reached.

    Raises StateMismatchError for a state of the present launch that lies beyond a change and lacks it.
    """
    known = {change.key for change in saved}
    more = [change for change in assigned if change.key not in known]
    for change in more:
        if change.required and change.position < position:
            raise StateMismatchError(
                f"the state lies beyond position {change.position}, from which on the weights of the mixture were "
                "changed by `penstock mix`, but was made with the weights from before. Load another state"
            )
    return [*saved, *(change for change in more if change.position >= position)]


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


def source_facts(source: ShardedSource) -> tuple[int, bool]:
    """Return the number of sources of the mixture, and True if its weights change with the position."""
    mixture = mixture_of(source)
    return len(mixture.names), mixture.changes


def try_sources(mixture: Mixture, names: Iterable[str], seed: int) -> None:
    """Read a sample of each of these sources."""
    for name in names:
        cursor = mixture.sources[mixture.names.index(name)].open(0, 0, seed)
        try:
            next(cursor)
        finally:
            cursor.close()


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
