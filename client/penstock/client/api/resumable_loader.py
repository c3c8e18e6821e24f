"""Base class of DataLoader that saves and resumes: the state at a step, the DataLoaderCheckpoints of the workers at
that step, and the loaded state."""

from __future__ import annotations

import copy
import logging
import secrets
import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from penstock.client.api.appliance import current_settings
from penstock.client.api.appliance_settings import ApplianceSettings
from penstock.client.api.opened_loader import OpenedLoader
from penstock.client.api.session import Session
from penstock.client.states.saved_state import KEY, SavedState, blank, is_to_be_filled, read
from penstock.client.states.worker_records import checkpoints_of, saved_of
from penstock.proto.batch.digest import DigestCover
from penstock.proto.errors import (
    NotRestartableError,
    PenstockError,
    StateMismatchError,
    StateUnavailableError,
)
from penstock.proto.rpc.calls import FetchedState
from penstock.proto.state.codec import decode_state, encode_state
from penstock.proto.state.restartable import DataLoaderCheckpoint, by_own_methods

__all__ = ["ResumableLoader"]

_log = logging.getLogger("penstock.client")


class ResumableLoader(OpenedLoader):
    """Base class of DataLoader with the methods that save and load states."""

    @property
    def is_restartable(self) -> bool:
        """True if the loader can be saved: input_fn's loader has state methods, or its batches are counted and replayed
        (Appliance(replay=True), or a torch IterableDataset that Penstock took over). While no run is open, the loader
        is built in this process to find out."""
        session = self._session
        if session is None or session.run.closed or session.run.error is not None:
            settings = session.appliance.settings if session is not None else current_settings()
            return self._replays(settings) or self._local.methods("is_restartable") > 0
        capabilities = self._capabilities(session)[0]
        if capabilities.not_restartable:
            return False
        return capabilities.state_methods > 0 or self._replays(session.appliance.settings)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all boxes after the last delivered step; the same value on every box.

        Example::

            torch.save({"model": model.state_dict(), "loader": loader.state_dict()}, path)
            ...
            loader.load_state_dict(torch.load(path)["loader"])

        Before the first step the result is the loaded state, or without one the state of a new loader, which is built
        in this process. The method may be called inside a loop, between loops and after the last loop; the result
        depends only on the step. torch.distributed.checkpoint.load, which calls this method to get a state that it
        loads into, gets an empty state.

        Raises:
            NotRestartableError: the loader has no state methods, or cannot be saved for another reason.
            StateUnavailableError: the workers have dropped the state of this step; the run is closed; or several boxes
                have no common seed yet, before the first loop.
        """
        return self.state_at(self.step)

    def state_at(self, step: int) -> dict[str, Any]:
        """Return the state after an earlier step: what state_dict() returned, or would have returned, then. `step`: one
        of the last Appliance(retention_steps=) steps.

        Use it in loops whose batches come through a wrapper that reads ahead: see penstock.client.Lookahead.

        Raises:
            StateUnavailableError: the step is before that of the loaded state, is not delivered yet, or is more than
                retention_steps steps ago; or as for state_dict().
            NotRestartableError: as for state_dict().
            TypeError: step is not an int.
        """
        if isinstance(step, bool) or not isinstance(step, int):
            raise TypeError(f"{self.name}: step of state_at(step) must be an int, got {step!r}: pass a step number")
        if is_to_be_filled():
            return blank()
        session = self._session
        first = session.began_at if session is not None else self.step
        if not first <= step <= self.step:
            raise StateUnavailableError(
                f"{self.name}: state_at(): step must be from {first} to {self.step}, got {step}: pass a step "
                "that was delivered since the loader was made or a state was loaded"
            )
        if session is None or step == first:
            if self._loaded is not None:
                return cast(dict[str, Any], copy.deepcopy(self._given))
            return self._initial()
        if self._cached is None or self._cached[0] != step:
            self._cached = (step, self._saved(session, step).to_dict())
        return cast(dict[str, Any], copy.deepcopy(self._cached[1]))

    def _initial(self) -> dict[str, Any]:
        session = self._session
        settings = self._settings
        methods = self._local.methods("the state before the first step")
        self._require_methods(methods, self._replays(settings))
        seed = session.run.seed if session is not None else self._seed_to_come(settings)
        saved = SavedState(0, self.name, methods, 0, 0, seed)
        if methods == 4:
            saved.aggregated = self._local.initial_state(seed)
        return saved.to_dict()

    def _seed_to_come(self, settings: ApplianceSettings) -> int:
        """Return the seed that the run will have when it is opened, for a state that is requested before. If the user
        gave no seed, draw one now: a state without a seed could be resumed in a run with another order of samples."""
        if settings.seed is not None:
            return settings.seed
        if settings.num_boxes > 1:
            raise StateUnavailableError(
                f"{self.name}: no state is available before the first loop, because the boxes have not agreed on a "
                "random seed yet. Pass Appliance(seed=...), or take the state once the loop has begun"
            )
        if self._drawn is None:
            self._drawn = secrets.randbits(63)
        return self._drawn

    def _require_methods(self, methods: int, replay: bool) -> None:
        if methods == 0 and not replay:
            raise NotRestartableError(
                f"the loader that {self.name} returned cannot be saved, because it has no state_dict and "
                "load_state_dict. Add these two methods, use torchdata's StatefulDataLoader or a source of "
                "penstock.data, or pass Appliance(replay=True)"
            )

    def checkpoints(self, step: int | None = None) -> list[DataLoaderCheckpoint]:
        """Return a DataLoaderCheckpoint (counts and loader state) of each worker of all boxes after a step, in the
        order of global_worker_id.

        The counts are those of this launch, as get_worker_state() returned them on the workers; `lifetime_*` count all
        launches. For a loader with the four state methods (see RestartableDataLoader), `user_state_dict` is the result
        of its state_dict() on that worker at that step: the input of aggregate_state_dict. For another loader it is the
        state at the worker's restart point, the position from which a restart replays batches, which may lie before the
        step; None for a loader without state methods.

        Args:
            step: as for state_at(); None: the last delivered step.

        Raises the errors of state_at(), and StateUnavailableError before the first step.
        """
        session, step = self._session, self.step if step is None else step
        if session is None or not session.began_at < step <= self.step:
            first = session.began_at + 1 if session is not None else self.step + 1
            steps = f"steps {first} to {self.step} have" if first <= self.step else "no step has"
            raise StateUnavailableError(
                f"{self.name}: checkpoints() of step {step} are not available, because {steps} been delivered since "
                "the loader was made or a state was loaded: pass a step that was delivered since"
            )
        fetched, _ = self._fetch(session, step)
        return checkpoints_of(fetched, self._loaded, step)

    def _fetch(self, session: Session, step: int) -> tuple[FetchedState, int]:
        """Fetch the WorkerRecords (counts and loader states) of all boxes at a step. Return them, and the number of
        state methods that input_fn's loader has (0, 2 or 4)."""
        settings, run = session.appliance.settings, session.run
        if run.error is not None:
            raise run.error
        if run.closed:
            raise StateUnavailableError(
                f"{self.name}: the state of step {step} is not available, because the appliance is closed: call "
                "state_dict() before the appliance is closed"
            )
        capabilities = self._capabilities(session)[0]
        if capabilities.not_restartable:
            raise NotRestartableError(f"{self.name} cannot be saved: {capabilities.not_restartable}")
        self._require_methods(capabilities.state_methods, self._replays(settings))
        if threading.get_ident() == session.reader.thread:
            session.reader.flush()
        return run.fetch_state(step, settings.timeout_s), capabilities.state_methods

    def _saved(self, session: Session, step: int) -> SavedState:
        fetched, methods = self._fetch(session, step)
        run = session.run
        saved, users = saved_of(fetched, step, self.name, methods, run.seed, full_digest=run.cover == DigestCover.FULL)
        if methods == 4 and self._local.can_be_built:
            saved.aggregated = self._local.aggregate(users)
        elif methods == 4:
            timeout_s = session.appliance.settings.timeout_s
            saved.aggregated = decode_state(run.aggregate(encode_state(users), timeout_s))
        if by_own_methods(self._capabilities(session)[0]) and saved.slot_0_is_next:
            topology = saved.num_boxes, saved.num_workers_per_box
            run.offer(lambda: [saved.start(box, *topology, strict=True) for box in range(saved.num_boxes)])
        return saved

    def load_state_dict(self, sd: dict[str, Any], strict: bool = True) -> None:
        """Load a state of this loader, from which the next executor resumes.

        Args:
            sd: result of state_dict(), from this process or another. A loader with the four state methods also accepts
                a dict that its deaggregate_state_dict understands: made by hand, or by another system with the same
                protocol. The first step is then step 1, and the run has a new seed unless Appliance(seed=) is given.
            strict: value for the argument `strict` of the loader's own methods, where they have this argument.

        Raises:
            StateMismatchError: sd is the state of another loader, or not a state.
            UnsupportedStateError: sd was made by hand and holds values that a state cannot hold.
            StateCorruptError, StateVersionError: sd is damaged, or was saved by a version of Penstock with another
                format.
            RuntimeError: an executor is iterating.
            TypeError: only one of the loader's load_state_dict and deaggregate_state_dict takes `strict`.
        """
        if self._iterating:
            raise RuntimeError(
                f"{self.name}: load_state_dict was called while an executor iterates the loader: leave the loop first, "
                "or close() the executor's iterator"
            )
        saved = self._made_by_hand(sd) or read(sd)
        if not self._reference.same_as(saved.input_fn):
            raise StateMismatchError(
                f"the state must be one of the loader {self.name}, got one of the loader {saved.input_fn}: load each "
                "state into the loader that saved it"
            )
        if saved.methods == 4:
            try:
                self._local.check_strict("load_state_dict")
            except PenstockError:
                pass  # the loader cannot be built in this process; the workers make the same check
        given = copy.deepcopy(sd)
        self.close()
        self._leaves_epoch = self._ends_epoch = False
        self._drawn = None
        self._loaded, self._given, self._strict, self._cached = replace(saved), given, strict, None
        if saved.methods == 4:
            self._loaded.aggregated = copy.deepcopy(saved.aggregated)

    def _made_by_hand(self, sd: object) -> SavedState | None:
        """Return `sd` as a SavedState if Penstock did not save it, and the loader has all four state methods, so that
        its deaggregate_state_dict may read `sd`. (If the loader cannot be built in this process, it may have them.)
        Return None if `sd` has to be a state that Penstock saved."""
        if not isinstance(sd, Mapping) or KEY in sd:
            return None
        if self._local.can_be_built and self._local.methods("load_state_dict") != 4:
            return None
        encode_state(dict(sd))
        _log.warning(
            "%s: the loaded state was not made by DataLoader.state_dict(), so the loader's deaggregate_state_dict "
            "alone decides where the stream resumes; the first step is step 1, and the seed is new unless "
            "Appliance(seed=) is passed",
            self.name,
        )
        return SavedState(0, self.name, 4, 0, 0, None, aggregated=dict(sd), by_hand=True)
