"""The user's loader in the training process, for its methods (states, len(), samples by key). It is never iterated.
Building it restores the random generators, from which an input_fn may draw."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from torch.utils import data as torch_data

from penstock.client.states.code_reference import CodeReference
from penstock.proto.errors import InputFnError, NotRestartableError
from penstock.proto.state.assignment import NEUTRAL, Assignment, assigned
from penstock.proto.state.generators import capture_rng, restore_rng
from penstock.proto.state.restartable import DataLoaderCheckpoint, state_methods, takes_strict, worker_state


class LocalLoader:
    """Holder of the loader that input_fn returns. Methods that depend on the seed or an assignment build others.
    `purpose`: why it is needed, for errors."""

    def __init__(
        self, reference: CodeReference, input_fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._reference, self._name = reference, reference.label
        self.input_fn = input_fn
        self.arguments = args, kwargs
        self._instance: Any = None
        self._seeded: tuple[int, Any] | None = None

    @property
    def maker(self) -> Callable[[], Any]:
        """Return a function that keeps no reference to this LocalLoader."""
        return partial(_call, self.input_fn, *self.arguments)

    def instance(self, purpose: str) -> Any:
        """Return the loader. Raises InputFnError if input_fn fails, and TypeError if only one loading method takes
        `strict`: the user's choice would reach only that one."""
        instance = self._get(purpose)
        takes_strict(instance)
        return instance

    def methods(self, purpose: str) -> int:
        """Return the number of the loader's state methods: 4, 2 (state_dict and load_state_dict) or 0."""
        return state_methods(self._get(purpose))

    @property
    def can_be_built(self) -> bool:
        """False if input_fn fails here, for example because only the workers have the data."""
        try:
            self._get("aggregate_state_dict")
        except InputFnError:
            return False
        return True

    def aggregate(self, states: list[Any]) -> Any:
        """Aggregate the states of all workers' loaders, in the order of global_worker_id."""
        instance = self.instance("aggregate_state_dict")
        with _undisturbed():
            return instance.aggregate_state_dict(states)

    def initial_state(self, seed: int) -> Any:
        instance = self._build(replace(NEUTRAL, seed=seed), "the state before the first step")
        takes_strict(instance)
        with _undisturbed():
            with worker_state(DataLoaderCheckpoint(0, 1, 1, 0, 0, 0, 0)):
                state = instance.state_dict()
            return instance.aggregate_state_dict([state])

    def length(self, assignments: list[Assignment]) -> int:
        """Return the sum of these workers' len(). Raises TypeError if one has none, or raises any error."""
        total = 0
        for assignment in assignments:
            with _undisturbed():
                loader = self._build(assignment, "len()")
                try:
                    total += len(loader)
                except Exception as error:
                    raised = f"{type(error).__name__}: {error}" if hasattr(type(loader), "__len__") else ""
                    raise TypeError(no_length(self._name, raised)) from error
        return total

    def config(self, seed: int) -> dict[str, Any]:
        own = getattr(self._of_seed(seed, "config()"), "config", None)
        return {"input_fn": self._reference.name, "loader": own() if callable(own) else None}

    def can_restore_sample(self, seed: int) -> bool:
        loader = self._of_seed(seed, "can_restore_sample()")
        own = getattr(loader, "can_restore_sample", None)
        return callable(getattr(loader, "restore_sample", None)) and (bool(own()) if callable(own) else True)

    def restore_sample(self, seed: int, key: Any) -> Any:
        if not self.can_restore_sample(seed):
            raise NotRestartableError(
                f"the loader of {self._name} has no restore_sample(key), or its can_restore_sample() is "
                "False: use a loader of penstock.data with keys="
            )
        with _undisturbed():
            return self._of_seed(seed, "restore_sample()").restore_sample(key)

    def _of_seed(self, seed: int, purpose: str) -> Any:
        """Return the loader in a run with this seed, kept until another is requested."""
        if self._seeded is None or self._seeded[0] != seed:
            self._seeded = (seed, self._build(replace(NEUTRAL, seed=seed), purpose))
        return self._seeded[1]

    def _get(self, purpose: str) -> Any:
        if self._instance is None:
            self._instance = self._build(NEUTRAL, purpose)
        return self._instance

    def _build(self, assignment: Assignment, purpose: str) -> Any:
        try:
            with _undisturbed(), assigned(assignment):
                args, kwargs = self.arguments
                instance = self.input_fn(*args, **kwargs)
                if isinstance(instance, torch_data.DataLoader) and instance.num_workers > 0:
                    # This process takes the place of the DataLoader's worker 0.
                    if instance.worker_init_fn is not None:
                        instance.worker_init_fn(0)
                    instance.num_workers = 0
        except Exception as error:
            raise InputFnError(
                f"{purpose} of {self._name} needs the loader in the training process, where input_fn failed with "
                f"{type(error).__name__}: {error}. It needs the data there too"
            ) from error
        if instance is None:
            raise InputFnError(
                f"{self._name} must return a torch DataLoader or an iterable of batches, got None: add a return"
            )
        return instance


def no_length(name: str, raised: str) -> str:
    """Return the text of an error. `raised`: what its len() raised; "": it has none."""
    why = f" (it raised {raised})" if raised else ""
    return f"the loader of {name} has no len(){why}: add a __len__ to the loader, or pass num_steps"


def _call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    args, kwargs = copy.deepcopy((args, kwargs))
    return fn(*args, **kwargs)


def check_strict(input_fn: Callable[..., Any]) -> None:
    """Check the loader's class, if input_fn is or is annotated to return it, so that no user code runs."""
    made = input_fn
    if not isinstance(input_fn, type):
        try:
            made = inspect.signature(input_fn, eval_str=True).return_annotation
        except (TypeError, ValueError, NameError, AttributeError, SyntaxError):
            return  # the function has no annotations, or names that only type checkers import
    if isinstance(made, type):
        takes_strict(made)


@contextmanager
def _undisturbed() -> Iterator[None]:
    before = capture_rng()
    try:
        yield
    finally:
        restore_rng(before)
