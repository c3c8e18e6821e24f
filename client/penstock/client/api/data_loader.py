"""DataLoader: a description of a stream, and later the stream with its position.

A loader is new (its state is made in this process), loaded and not started (its state is the loaded one), or streaming
(its state is fetched from the workers). A stream ends when its appliance is closed, at an error, at `load_state_dict`,
or at `close`; only after the last two does an executor start another one, so that a position is never lost silently."""

from __future__ import annotations

import copy
import itertools
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal, ParamSpec, Protocol, cast, get_args, overload

import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset

from penstock.client.api.appliance import Appliance, current_settings
from penstock.client.api.loader_stream import LoaderStream
from penstock.client.api.loop import Loop
from penstock.client.api.session import Session
from penstock.client.states.batch_sizes import batch_size_of
from penstock.client.states.code_reference import check_arguments, copied, ship
from penstock.client.states.local_loader import LocalLoader, check_strict, no_length
from penstock.client.states.saved_state import KEY, Layers, SavedState, blank, is_to_be_filled, read
from penstock.client.states.worker_records import checkpoints_of, saved_of
from penstock.client.stream.checkpoint_schedule import checked_int
from penstock.proto.batch.digest import DigestCover
from penstock.proto.errors import (
    InvalidArgumentError,
    NotRestartableError,
    PenstockError,
    StateMismatchError,
    StateUnavailableError,
)
from penstock.proto.rpc.calls import FetchedState
from penstock.proto.state.assignment import Assignment
from penstock.proto.state.codec import decode_state, encode_state
from penstock.proto.state.position import MOST
from penstock.proto.state.restartable import DataLoaderCheckpoint, by_own_methods
from penstock.runtime.moved_names import says_where

_Arguments = ParamSpec("_Arguments")


class Rows(Protocol):
    """What torch takes for a map-style dataset: a list, or a dataset of another library."""

    def __len__(self) -> int: ...
    def __getitem__(self, number: Any, /) -> Any: ...


_ids = itertools.count(1)
_log = logging.getLogger("penstock.client")


@says_where
class DataLoader:
    """Data loader whose batches are made on the workers, by the loader that `input_fn(*args, **kwargs)` returns there.

    Example::

        def make_loader(path, batch_size):
            return torch.utils.data.DataLoader(MyDataset(path), batch_size=batch_size)

        loader = DataLoader(make_loader, "/data/train", 32)
        for batch in loader:                     # one epoch
            ...
        torch.save(loader.state_dict(), "loader.pt")

        loader = DataLoader(dataset, batch_size=32, shuffle=True)    # with torch's own arguments

    Batches have the structure, shapes and dtypes that input_fn's loader yields: nested dicts, lists, tuples and
    dataclasses of tensors, arrays and plain values.

    Args:
        input_fn: callable that returns a torch DataLoader or an iterable of nested tensors: a function or class at the
            top level of a module that workers can import; in embedded mode any callable. Or a dataset: see
            docs/torch.md for the arguments of torch that are taken over.
        args, kwargs: arguments of input_fn on every worker, copied at once: plain values, tensors and arrays; in
            embedded mode also objects that can be pickled, and functions of any kind.

    Raises:
        TypeError: input_fn is not callable, or does not accept these arguments; or it is a class (or is annotated to
            return a class) that takes `strict` in only one of load_state_dict and deaggregate_state_dict.
        InvalidArgumentError, UnsupportedStateError: input_fn or an argument can be sent to workers neither by an
            importable name nor by value."""

    @overload
    def __init__(self, input_fn: Callable[_Arguments, Any], *args: _Arguments.args, **kwargs: _Arguments.kwargs): ...
    @overload
    def __init__(self, loader: TorchLoader[Any], /) -> None: ...
    @overload
    def __init__(
        self,
        dataset: Dataset[Any] | Rows,
        /,
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Iterable[Any] | None = None,
        batch_sampler: Iterable[Any] | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], Any] | None = None,
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: Literal[True] = True,
    ) -> None: ...
    def __init__(self, input_fn: Any, *args: Any, **kwargs: Any) -> None:
        replay, title = False, ""
        if isinstance(input_fn, Dataset) or not callable(input_fn):
            from penstock.client.torch_loaders import taken_over  # imported here, because it imports the data sources

            input_fn, args, kwargs, replay, title = taken_over(input_fn, *args, **kwargs)
        else:
            check_arguments(input_fn, args, kwargs)
            args, kwargs = copied(input_fn, args, kwargs)
        reference, arguments = ship(input_fn, args, kwargs)
        reference = replace(reference, title=title)
        self.name = reference.label
        """Name for people: "module:function", or that of a dataset, "ImageFolder, batch_size=64, shuffled"."""
        self.id = next(_ids)
        """Number that identifies the loader in this process, from 1."""
        check_strict(input_fn)
        self._local = LocalLoader(reference, input_fn, args, kwargs)
        self.stream = LoaderStream(reference, arguments, self._local, replay=replay)
        self._given: Any = None
        self._cached: tuple[int, Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "stream": copy.copy(self.stream)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, id=next(_ids))

    @property
    def _session(self) -> Session | None:
        return self.stream.session

    def __iter__(self) -> Iterator[Any]:
        """Iterate one epoch, or the rest of an epoch from which batches were taken before."""
        return iter(Loop(self.stream))

    def __len__(self) -> int:
        """Return the number of batches in an epoch of this box: the sum of len() over its workers' loaders. While no
        run is open, these are built in this process. Raises TypeError if a loader has no len(), or its len() raises any
        error."""
        if (session := self.stream.live_session) is not None:
            slots = session.capabilities()
            unsized = next((capabilities for capabilities in slots if capabilities.length < 0), None)
            if unsized is not None:
                raise TypeError(no_length(self.name, unsized.no_length))
            return sum(capabilities.length for capabilities in slots)
        settings = self.stream.settings
        seed = settings.seed if settings.seed is not None else 0
        assignments = [
            Assignment(settings.box, settings.num_boxes, slot, settings.slots_per_box, seed, self.step + 1)
            for slot in range(settings.slots_per_box)
        ]
        return self._local.length(assignments)

    # ---- description

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.name}, step {self.step}>"

    @property
    def input_fn(self) -> Callable[..., Any]:
        """Function that each worker calls to make its loader."""
        return self._local.input_fn

    @property
    def input_fn_params(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Copy of (args, kwargs), the arguments of input_fn."""
        return copy.deepcopy(self._local.arguments)

    @property
    def dataloader(self) -> Any:
        """Loader that input_fn returns in this process, as if it were the only worker, to inspect for example its
        dataset. It is built at the first access; a torch DataLoader gets num_workers=0. Raises InputFnError if input_fn
        fails here."""
        return self._local.instance("DataLoader.dataloader")

    @property
    def batch_size(self) -> int | None:
        """Number of rows of the last delivered batch, the first dimension that all tensors share; None if unknown."""
        layout = self._session.reader.layout if self._session is not None else None
        return None if layout is None else batch_size_of(*layout)

    def config(self) -> dict[str, Any]:
        """Return the settings that decide the samples and their order: {"input_fn": name, "loader": result of the
        loader's own config(), or None}. Loaders of penstock.data with equal configs accept each other's states."""
        return self._local.config(self._seed_of_keys)

    def can_restore_sample(self) -> bool:
        """Return True if input_fn's loader has restore_sample(), and its can_restore_sample(), if any, is not False."""
        return self._local.can_restore_sample(self._seed_of_keys)

    def restore_sample(self, key: Any) -> Any:
        """Read a sample again, in this process, with the seed of the run, of the loaded state, or of Appliance(seed=).
        `key`: restore key that the loader adds to each batch if it has keys=; one from a run with another seed is
        refused. Raises NotRestartableError for a loader without restore_sample, InputFnError, and errors of the
        loader's own method."""
        return self._local.restore_sample(self._seed_of_keys, key)

    @property
    def _seed_of_keys(self) -> int:
        known = [
            self._session.run.seed if self._session is not None else None,
            self.stream.loaded.seed if self.stream.loaded is not None else None,
            self.stream.settings.seed,
            self.stream.drawn,
        ]
        return next((seed for seed in known if seed is not None), 0)

    # ---- states

    @property
    def step(self) -> int:
        """Last delivered step over the whole life of the run; before the first loop that of the loaded state, or 0."""
        return self.stream.step

    @property
    def is_restartable(self) -> bool:
        """True if the loader can be saved: input_fn's loader has state methods, or its batches are replayed
        (Appliance(replay=True), or a torch IterableDataset). While no run is open, the loader is built in this
        process."""
        session = self.stream.live_session
        if session is None:
            ended = self._session
            settings = ended.appliance.settings if ended is not None else current_settings()
            return self.stream.replays(settings) or self._local.methods("is_restartable") > 0
        capabilities = session.capabilities()[0]
        if capabilities.not_restartable:
            return False
        return capabilities.state_methods > 0 or self.stream.replays(session.appliance.settings)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all boxes after the last delivered step; the same value on every box.

        Example::

            torch.save({"model": model.state_dict(), "loader": loader.state_dict()}, path)
            ...
            loader.load_state_dict(torch.load(path)["loader"])

        Before the first step it is the loaded state, or that of a new loader, which is built in this process.
        torch.distributed.checkpoint.load, which requests a state to load into, gets an empty one.

        Raises:
            NotRestartableError: the loader has no state methods, or cannot be saved for another reason.
            StateUnavailableError: the workers have dropped the state of this step; the run is closed; or several boxes
                have no common seed yet, before the first loop."""
        return self.state_at(self.step)

    def state_at(self, step: int) -> dict[str, Any]:
        """Return what state_dict() would have returned after an earlier step, one of the last
        PENSTOCK_RETENTION_STEPS (256). For loops whose wrapper reads ahead: see Lookahead. Raises the errors of
        state_dict(), StateUnavailableError also for a step outside these or before that of the loaded state."""
        if isinstance(step, bool) or not isinstance(step, int):
            raise TypeError(f"{self.name}: step of state_at(step) must be an integer, got {step!r}")
        if is_to_be_filled():
            return blank()
        session = self._session
        first = session.began_at if session is not None else self.step
        if not first <= step <= self.step:
            raise StateUnavailableError(
                f"{self.name}: state_at(): step must be from {first} to {self.step}, got {step}: pass one that was "
                "delivered since the loader was made or a state was loaded"
            )
        if session is None or step == first:
            if self.stream.loaded is not None:
                return cast(dict[str, Any], copy.deepcopy(self._given))
            return self._initial()
        if self._cached is None or self._cached[0] != step:
            self._cached = (step, self._saved(session, step).to_dict())
        return cast(dict[str, Any], copy.deepcopy(self._cached[1]))

    def _initial(self) -> dict[str, Any]:
        session = self._session
        settings = self.stream.settings
        methods = self._local.methods("the state before the first step")
        self._require_methods(methods, self.stream.replays(settings))
        seed = session.run.seed if session is not None else self.stream.seed_to_come(settings)
        reference = self.stream.reference
        saved = SavedState(0, reference.name, methods, 0, 0, seed, title=reference.title)
        if methods == 4:
            saved.aggregated = self._local.initial_state(seed)
        return saved.to_dict()

    def _require_methods(self, methods: int, replay: bool) -> None:
        if methods == 0 and not replay:
            raise NotRestartableError(
                f"the loader of {self.name} has no state_dict and load_state_dict, so it cannot be saved: "
                "add them, use a StatefulDataLoader or a loader of penstock.data, or pass Appliance(replay=True)"
            )

    def checkpoints(self, step: int | None = None) -> list[DataLoaderCheckpoint]:
        """Return a DataLoaderCheckpoint of each worker of all boxes after a step (None: the last), by global_worker_id.

        Counts are those of this launch, `lifetime_*` those of all launches. For a loader with the four state methods,
        `user_state_dict` is its state_dict() on that worker at that step. Else it is the state at the worker's restart
        point, which may lie before the step; None without state methods.

        Raises the errors of state_at(), and StateUnavailableError before the first step."""
        session, step = self._session, self.step if step is None else step
        if session is None or not session.began_at < step <= self.step:
            raise StateUnavailableError(
                f"{self.name}: checkpoints(): step must be one delivered since the loader was made or a state was "
                f"loaded, got {step}"
            )
        fetched, _ = self._fetch(session, step)
        return checkpoints_of(fetched, self.stream.loaded, step)

    def _fetch(self, session: Session, step: int) -> tuple[FetchedState, int]:
        """Return positions and WorkerRecords of all boxes at a step, and the number of state methods (0, 2, 4)."""
        settings, run = session.appliance.settings, session.run
        if run.error is not None:
            raise run.error
        if run.closed:
            raise StateUnavailableError(
                f"{self.name}: the state of step {step} is gone with its appliance: call state_dict() before it closes"
            )
        capabilities = session.capabilities()[0]
        if capabilities.not_restartable:
            raise NotRestartableError(f"{self.name} cannot be saved: {capabilities.not_restartable}")
        self._require_methods(capabilities.state_methods, self.stream.replays(settings))
        if threading.get_ident() == session.reader.thread:
            session.reader.flush()
        return run.fetch_state(step, settings.timeout_s), capabilities.state_methods

    def _saved(self, session: Session, step: int) -> SavedState:
        fetched, methods = self._fetch(session, step)
        run = session.run
        reference, full_digest = self.stream.reference, run.cover == DigestCover.FULL
        saved, users = saved_of(fetched, step, reference.name, methods, run.seed, full_digest=full_digest)
        saved.title = reference.title
        if methods == 4 and self._local.can_be_built:
            saved.aggregated = self._local.aggregate(users)
        elif methods == 4:
            timeout_s = session.appliance.settings.timeout_s
            saved.aggregated = decode_state(run.aggregate(encode_state(users), timeout_s))
        if by_own_methods(session.capabilities()[0]) and saved.slot_0_is_next:
            topology = saved.num_boxes, saved.num_workers_per_box
            run.offer(lambda: [saved.start(box, *topology, strict=True) for box in range(saved.num_boxes)])
        return saved

    def load_state_dict(self, sd: dict[str, Any], strict: bool = True, layers: Layers = "keep") -> None:
        """Load a state of this loader, from which the next executor resumes.

        Args:
            sd: result of state_dict(), from this process or another. A loader with the four state methods also accepts
                a dict that its deaggregate_state_dict understands: the first step is then step 1, and the run has a new
                seed unless Appliance(seed=) is given.
            strict: value for the argument `strict` of the loader's own methods, where they have this argument.
            layers: "restart" if a ShardLoader has other layers over the same documents (length, tokenizer, filter,
                window): the position in the documents stays, the layers begin anew, and no document is lost.

        Raises:
            StateMismatchError: sd is the state of another loader, or not a state.
            UnsupportedStateError: sd was made by hand and holds values that a state cannot hold.
            StateCorruptError, StateVersionError: sd is damaged, or of another version's format.
            RuntimeError: an executor is iterating.
            TypeError: only one of the loader's load_state_dict and deaggregate_state_dict takes `strict`."""
        if layers not in get_args(Layers):
            raise InvalidArgumentError(f"layers must be 'keep' or 'restart', got {layers!r}")
        saved = self._loadable(sd)
        if layers == "restart" and saved.methods != 4:
            raise InvalidArgumentError(f"layers='restart' needs a ShardLoader, and {self.name} is none. Leave it out")
        if saved.methods == 4:
            try:
                self._local.instance("load_state_dict")  # takes `strict` in both loading methods or in none
            except PenstockError:
                pass  # the loader cannot be built in this process; the workers make the same check
        given = copy.deepcopy(sd)
        loaded = replace(saved)
        if saved.methods == 4:
            loaded.aggregated = copy.deepcopy(saved.aggregated)
        self.stream.load(loaded, strict=strict, layers=layers)
        self._given, self._cached = given, None

    def _loadable(self, sd: dict[str, Any]) -> SavedState:
        """Return what load_state_dict(sd) would load, without loading it. Raises the errors of load_state_dict()."""
        if self.stream.iterated:
            raise RuntimeError(
                f"{self.name}: load_state_dict was called in a loop over the loader: leave it, or close() its iterator"
            )
        saved = self._made_by_hand(sd) or read(sd)
        if not self.stream.reference.same_as(saved.input_fn):
            raise StateMismatchError(
                f"the state must be one of the loader {self.name}, got one of the loader {saved.label}"
            )
        return saved

    def _made_by_hand(self, sd: object) -> SavedState | None:
        """Return `sd` for the loader's own deaggregate_state_dict; None if it has to be a state that Penstock saved."""
        if not isinstance(sd, Mapping) or KEY in sd:
            return None
        if self._local.can_be_built and self._local.methods("load_state_dict") != 4:
            return None
        encode_state(dict(sd))
        _log.warning(
            "%s: the loaded state was not made by DataLoader.state_dict(): the loader's deaggregate_state_dict alone "
            "decides where it resumes, from step 1, with a new seed unless Appliance(seed=) is passed",
            self.name,
        )
        return SavedState(0, self.stream.reference.name, 4, 0, 0, None, aggregated=dict(sd), by_hand=True)

    def close(self) -> None:
        """Close the run and free its workers. The next executor starts from the loaded state, or from the beginning."""
        self.stream.close()

    # ---- for loops and frameworks

    def set_epoch(self, epoch: int) -> None:
        """Give the next epoch that the loop begins its number, as Hugging Face's Trainer and Accelerate do, for pure
        loaders (docs/restarts.md); later epochs count on. An epoch that is resumed or opened already, and those of
        other loaders, keep Penstock's own numbers; this is logged once."""
        self.stream.asked_epoch = checked_int("epoch", epoch, least=0, most=MOST)

    @property
    def mid_epoch(self) -> bool:
        """True if the present epoch has, or without len() may have, batches after the last step; False before its
        first."""
        return self.stream.mid_epoch

    def leave_epoch(self, *, at_its_end: bool = False) -> None:
        """Leave the epoch of the loaded state: the next loop begins the next epoch, as after a `break`. For frameworks
        that limit the batches of an epoch.

        at_its_end: True if the state was saved after the last batch by len(): the next loop drops batches beyond len().
        On another topology the call then has no effect.

        Raises StateMismatchError without `at_its_end`, if the loader that saved the state lacks one of the four state
        methods."""
        self.stream.leave_epoch(at_its_end=at_its_end)

    @property
    def box_and_num_boxes(self) -> tuple[int, int]:
        """Number of this process's box, and number of boxes; before the run is open, by the settings."""
        settings = self.stream.settings
        return settings.box, settings.num_boxes

    def expect(self, appliance: Appliance) -> None:
        """Record the appliance that an executor will use: until it begins, its settings are those of the loader."""
        self.stream.expected = appliance.settings
