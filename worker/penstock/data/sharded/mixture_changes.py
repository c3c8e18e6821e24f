"""Changes of a mixture's weights that an operator orders by `penstock mix` while a run trains.

The coordinator sends them to each loader of the run, and each later state lists them. A loader applies one as if the
code had a Schedule with it, so which sample is at a position does not depend on the topology here either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from penstock.data.ordering.order_states import NUMBER_LIMIT, Number
from penstock.data.sharded.layers.layer import checked
from penstock.data.sharded.layers.mapped import Mapped
from penstock.data.sharded.layers.mixture import Mixture
from penstock.data.sharded.layers.mixture_schedule import parts_of, with_later_weights
from penstock.data.sharded.protocol import ShardedSource
from penstock.data.sharded.runs import take
from penstock.data.sharded.shard_cursors import HeldSample
from penstock.data.sharded.shard_keys import KeyStage, digest_of
from penstock.data.sharded.shard_states import described
from penstock.proto.errors import InvalidArgumentError, ReplayMismatchError, StateMismatchError
from penstock.proto.state.envelope import damaged_state

LoadSource = Callable[[str], Any]
"""From a name ("module:function") to the source that the user's function returns (`penstock mix --add`)."""
CHANGES = "mixture_changes"


class MixtureChange(msgspec.Struct, frozen=True):
    key: str
    position: Number
    """Position in the epoch at which the new weights begin."""
    parts: dict[str, Number]
    """New weight of each source; a missing name means 0."""
    added: dict[str, str] = {}
    """By name of each added source: the function ("module:function") that returns it."""
    required: bool = False
    """True if ordered in the run's present attempt: a state of a later position is refused unless it lists it."""
    epoch: Number = 0
    """First epoch to which the change applies, from `position` on, as in all later epochs."""

    @property
    def begins(self) -> tuple[int, int]:
        return self.epoch, self.position

    def drops(self, earlier: MixtureChange) -> bool:
        """Return True if `earlier` never applies: this change was ordered after it and begins no later."""
        return self.epoch <= earlier.epoch and self.position <= earlier.position

    def plain(self) -> dict[str, Any]:
        entry: dict[str, Any] = msgspec.to_builtins(self)
        del entry["required"]
        return entry


def listed(state: Mapping[str, Any]) -> list[MixtureChange]:
    try:
        return msgspec.convert(state.get(CHANGES, []), list[MixtureChange])
    except msgspec.ValidationError as error:
        raise damaged_state(f"the ShardLoader's state is damaged: {CHANGES}", error) from error


def in_epoch(changes: Iterable[MixtureChange], epoch: int) -> list[MixtureChange]:
    return [change for change in changes if change.epoch <= epoch]


def still_to_come(changes: Sequence[MixtureChange], reached: tuple[int, int]) -> list[MixtureChange]:
    """Return the changes that begin after `reached`, without those that a later one drops."""
    return [
        change
        for number, change in enumerate(changes)
        if change.begins >= reached and not any(later.drops(change) for later in changes[number + 1 :])
    ]


def merged(
    saved: Sequence[MixtureChange],
    assigned: Sequence[MixtureChange],
    reached: tuple[int, int],
    taken: tuple[int, int],
) -> list[MixtureChange]:
    """Return the changes that apply after a loader has loaded a state, in their order: those that the state lists, and
    those of the run that begin at its position (`reached`) or later; `required` ones also if they begin where the
    loader took the state (`taken`), which may have been advanced since.

    Other changes of the run do not apply: the state's attempt passed their positions before they were ordered. Raises
    ReplayMismatchError if the loader took the state beyond a required change that it does not list: its batches would
    differ from the delivered ones.
    """
    listed_keys, own_keys = {change.key for change in saved}, {change.key for change in assigned}
    for change in assigned:
        if change.required and change.begins < taken and change.key not in listed_keys:
            raise ReplayMismatchError(
                f"the state lies beyond position {change.position} of epoch {change.epoch}, but lacks the weights "
                "that `penstock mix` gave it there. Load a state from before, or one that was saved later"
            )
    before_the_run = [change for change in saved if change.key not in own_keys]
    later = [one for one in assigned if one.key in listed_keys or one.begins >= (taken if one.required else reached)]
    return [*before_the_run, *later]


def with_all_changes(
    states: Sequence[Mapping[str, Any]], taken: Sequence[tuple[int, int]]
) -> Sequence[Mapping[str, Any]]:
    """Return the workers' states with the changes and the order of the worker that knows most: a state may be older
    than a change. A state whose worker passed a change without it stays, because the orders differ. `taken`: for each
    worker, the epoch and position up to which its state lists all changes."""
    lists = [listed(state) for state in states]
    if not any(lists):
        return states
    newest = max(range(len(states)), key=lambda number: (states[number]["epoch"], len(lists[number])))
    found = []
    for state, known, until in zip(states, lists, taken, strict=True):
        keys = {change.key for change in known}
        if all(change.key in keys or change.begins >= until for change in lists[newest]):
            now = in_epoch(lists[newest], states[newest]["epoch"])
            was = {change.key for change in in_epoch(known, state["epoch"])}
            first = min((change.position for change in now if change.key not in was), default=NUMBER_LIMIT)
            order, newest_order = state["order"], states[newest]["order"]
            source = with_later_weights(order["source"], newest_order["source"], first, NUMBER_LIMIT)
            state = {**state, "order": {**order, "source": source}, CHANGES: states[newest][CHANGES]}
        found.append(state)
    return found


def refuse_to_import(name: str) -> Any:
    """LoadSource outside of a run: a name in a state must not lead to the import of any module."""
    raise StateMismatchError(
        f"the state has a source of {name!r} from `penstock mix --add`. Load it in a run of an Appliance"
    )


def mixture_of(source: ShardedSource) -> Mixture:
    """Return the mixture that `penstock mix` changes: the uppermost source, or the one below Mapped layers."""
    inner: Any = source
    while isinstance(inner, Mapped) and inner.one_to_one:
        inner = inner.source
    if not isinstance(inner, Mixture) or not inner.endless:
        got = "a Mixture with another stop" if isinstance(inner, Mixture) else type(inner).__name__
        got = f"{got} with skip_failures" if isinstance(inner, Mapped) else got
        raise InvalidArgumentError(
            f"the uppermost source must be a Mixture(stop='never'), or Mapped over one, got {got}"
        )
    return inner


def changed(source: ShardedSource, changes: Iterable[MixtureChange], load: LoadSource) -> ShardedSource:
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


def stages_of(
    code: ShardedSource, changes: Sequence[MixtureChange], load: LoadSource, order: Mapping[str, Any]
) -> list[KeyStage]:
    found = []
    for position in sorted({0, *(change.position for change in changes)}):
        # also the earlier orders for later positions, which the last of these drops: their sources count in the mixture
        last = max((number for number, change in enumerate(changes) if change.position <= position), default=-1)
        source = changed(code, changes[: last + 1], load)
        digest = digest_of({**order, "source": described(source)})
        mixture = mixture_of(source) if changes else None
        facts = (0, True) if mixture is None else (len(mixture.names), mixture.changes)
        found.append(KeyStage(position, source, digest, *facts))
    return found


def try_sources(source: ShardedSource, names: Iterable[str], seed: int) -> list[HeldSample]:
    """Return each named source's first sample, processed by the layers above: it is tried before it is added."""
    mixture, found = mixture_of(source), []
    for name in names:
        cursor = _around(source, mixture.changed_from(0, {name: 1}, {})).open(0, 0, seed)
        try:
            run = take(cursor, 1)
            found += [HeldSample(sample, origins=run.origins) for sample in run.samples]
        finally:
            cursor.close()
    return found


def new_parts(
    mixture: Mixture, position: int, weights: Mapping[str, Any], added: Iterable[str], retired: Sequence[str]
) -> dict[str, int]:
    """Return each source's weight after a command `penstock mix`, as whole numbers by name.

    Without `weights`, all sources that are not retired keep theirs. Raises InvalidArgumentError for invalid weights and
    unknown sources, and if a source that has a weight at `position` is neither in `weights` nor in `retired`.
    """
    names = [*mixture.names, *(name for name in added if name not in mixture.names)]
    before = dict(zip(mixture.names, mixture.parts_at(position), strict=True))
    for name in added:
        if name in mixture.names:
            raise InvalidArgumentError(f"--add must name a new source, got {name!r}. Use --weights for others")
        if name not in weights:
            raise InvalidArgumentError(f"--weights must have a weight for the added source {name!r}. Give one")
    for name in (*weights, *retired):
        if name not in names:
            raise InvalidArgumentError(
                f"a source must be one of {', '.join(names)}, got {name!r}. Use --add for new ones"
            )
    for name in retired:
        if name in weights:
            raise InvalidArgumentError(f"a source must be in --weights or --retire, got {name!r} in both")
    given: Mapping[str, Any] = weights or before
    missing = [name for name, part in before.items() if part and name not in given and name not in retired]
    if missing:
        raise InvalidArgumentError(f"--weights or --retire must name each source, got none for {', '.join(missing)}")
    values = [0 if name in retired else given.get(name, 0) for name in names]
    return dict(zip(names, parts_of(values, names), strict=True))
