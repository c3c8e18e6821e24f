"""Types of other libraries whose instances arrive as that type, although they are neither leaves nor containers of
ours: a worker takes them apart, and the training process puts them together by functions that it has itself.

A `Pair` of such functions comes from torch's pytree registry, in which Hugging Face registers its ModelOutput and torch
its `return_types`, or from the table at the end of this module: types that are not registered, or with a context that
holds code. The table has names alone, so it imports no library, and torch's registry stays as it is, because additions
would change what the user's own `tree_map` does.

A type travels by its name, and is looked up among modules imported already, so a peer can cause no import. A peer can
choose what `make` gets; `unflatten_fn`'s context is plain values only (`is_plain`).

A user's registered function may lose part of a value. So `take` puts each value together again and compares (3 us for a
ModelOutput of three tensors, on a 2-core AMD EPYC)."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
import torch
from torch.utils import _pytree

from penstock.proto.batch.classes import MAIN_MODULES, find_class, qualified, slots_of
from penstock.proto.batch.structure import Leaf, Tree
from penstock.proto.errors import SAME_RELEASE, UnsupportedLeafError

_CONTAINERS: Final = (dict, OrderedDict, list, tuple)
"""Types of torch's registry that have an encoding of their own."""

_COMPARED_DEEP: Final = 6


@dataclass(frozen=True)
class Pair:
    take: Callable[[Any], list[Any]]
    """Return the values as which a value is sent: with `registered` its context, then its leaves. Raises
    UnsupportedLeafError, with the reason and the remedy, for a value that `make` would change."""
    make: Callable[[type, list[Any]], Any]
    registered: bool = False
    sent_as: Callable[[type], type] = lambda cls: cls


def pair_of(cls: type) -> Pair | None:
    known = _OURS.get(_name(cls))
    if known is not None:
        return known
    for base in cls.__mro__:
        known = _OURS_WITH_SUBCLASSES.get(_name(base))
        if known is not None:
            return known
    if getattr(cls, "_is_tensorclass", None) is True and "tensordict" in sys.modules:
        return _BY_ATTRIBUTES
    node = None if cls in _CONTAINERS else _pytree.SUPPORTED_NODES.get(cls)
    return None if node is None else _registered(node)


def maker(name: str, children: tuple[Tree, ...]) -> Callable[[list[Any]], Any]:
    """Return the function that makes a value of type `name` from values of the structures `children`. Raises
    UnsupportedLeafError, with the remedy, if this process has no such type, or no pair for it."""
    cls = find_class(name)
    if cls is None:
        module = name.partition(":")[0]
        remedy = "define it at the top of the main script" if module in MAIN_MODULES else f"import {module}"
        raise UnsupportedLeafError(f"the batch holds a {name!r}, unknown to this process; {remedy} before the loop")
    pair = pair_of(cls)
    if pair is None:
        remedy = "call torch.utils._pytree.register_pytree_node before the loop, as on the workers"
        raise UnsupportedLeafError(f"the batch holds a {name!r}, which is not registered here; {remedy}")
    if pair.registered and not (children and is_plain(children[0])):
        raise UnsupportedLeafError(f"the batch holds a {name!r} whose context is not of plain values. {SAME_RELEASE}")
    make = pair.make

    def checked(parts: list[Any]) -> Any:
        try:
            return make(cls, parts)
        except Exception as error:
            raise UnsupportedLeafError(
                f"the batch holds a {name!r} that cannot be put together here ({type(error).__name__}: "
                f"{str(error)[:200]}). Run the same version of its module on both sides"
            ) from error

    return checked


def is_plain(tree: Tree) -> bool:
    """True if a structure has only None, bool, int, float, str, bytes, and lists, tuples and dicts of these."""
    if isinstance(tree, Leaf):
        return tree.kind in "sbifo"
    return tree is None or (tree.kind in ("l", "u", "d", "od") and all(map(is_plain, tree.children)))


def extra_attributes(value: Any, known: tuple[str, ...] = ()) -> list[str]:
    """Return attributes that user code has set: not `known`, cached properties, or what typing sets on generics."""
    return [
        name
        for name in getattr(value, "__dict__", ())
        if name not in known
        and name != "__orig_class__"
        and not isinstance(getattr(type(value), name, None), cached_property)
    ]


def has_more(value: Any, kind: str, fields: tuple[str, ...]) -> bool:
    """True if an instance of a namedtuple or dataclass has attributes that are not fields."""
    return bool(extra_attributes(value, fields if kind == "dc" else ()))


def _name(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def _registered(node: Any) -> Pair:
    def take(value: Any) -> list[Any]:
        leaves, context = node.flatten_fn(value)
        parts = [context, *leaves]
        changed = _difference(value, node.unflatten_fn(parts[1:], context), _COMPARED_DEEP)
        if changed is not None:
            raise UnsupportedLeafError(f", which its registered functions would change: {changed}; let them keep all")
        return parts

    def make(cls: type, parts: list[Any]) -> Any:
        made = node.unflatten_fn(parts[1:], parts[0])
        if type(made) is not cls:
            raise TypeError(f"the registered function made a {qualified(type(made))}")
        return made

    return Pair(take, make, registered=True)


def _difference(value: Any, copy: Any, depth: int) -> str | None:
    if value is copy or depth == 0:
        return None
    if type(value) is not type(copy):
        return f"a {qualified(type(value))} becomes a {qualified(type(copy))}"
    attributes = _state(copy)
    for name, attribute in _state(value).items():
        if name not in attributes:
            return f"attribute {name!r} is lost"
        changed = _difference(attribute, attributes[name], depth - 1)
        if changed is not None:
            return f"attribute {name!r}: {changed}"
    return None if _equal(value, copy, depth) else "its content differs"


def _state(value: Any) -> dict[str, Any]:
    state = {name: getattr(value, name) for name in sorted(slots_of(type(value))) if hasattr(value, name)}  # type: ignore[arg-type]
    return state | {name: value.__dict__[name] for name in extra_attributes(value)}


def _equal(value: Any, copy: Any, depth: int) -> bool:
    if isinstance(value, torch.Tensor):
        return torch.equal(value, copy)
    if isinstance(value, np.ndarray):
        return value.dtype == copy.dtype and np.array_equal(value, copy)
    if isinstance(value, dict):
        return list(value) == list(copy) and _all_equal(dict.values(value), dict.values(copy), depth)
    if isinstance(value, (list, tuple)):
        return len(value) == len(copy) and _all_equal(value, copy, depth)
    compares: Any = type(value).__eq__
    if compares is object.__eq__ or hasattr(value, "__dict__"):
        return True  # its attributes are all that can be compared
    return bool(value == copy) or value != value


def _all_equal(values: Any, copies: Any, depth: int) -> bool:
    return not any(_difference(value, copy, depth - 1) for value, copy in zip(values, copies, strict=True))


# ---- pairs of ours


def _attributes(value: Any) -> dict[str, Any]:
    return object.__getattribute__(value, "__dict__")  # type: ignore[no-any-return]


def _make_by_attributes(cls: type, parts: list[Any]) -> Any:
    (state,) = parts
    made: Any = object.__new__(cls)
    _attributes(made).update(state)
    return made


_BY_ATTRIBUTES: Final = Pair(lambda value: [_attributes(value)], _make_by_attributes)


def _check_attributes(value: Any, known: tuple[str, ...] = ()) -> None:
    """Raise UnsupportedLeafError if user code has set an attribute on a value. `known`: the type's own."""
    extra = [name for name in extra_attributes(value, known) if not name.startswith("_")]
    if extra:
        raise UnsupportedLeafError(f" with the attribute {extra[0]!r}, which is not sent; pass the attribute beside it")


def _take_tensordict(value: Any) -> list[Any]:
    _check_attributes(value)
    names = value.names if any(name is not None for name in value.names) else None
    items, size = dict(value.items()), tuple(map(int, value.batch_size))
    return [items, size, names, value.device is not None, bool(value.is_locked)]


def _make_tensordict(cls: Any, parts: list[Any]) -> Any:
    items, size, names, has_device, locked = parts
    # The device of the values, which may have been moved to the training process's.
    devices = (getattr(item, "device", None) for item in items.values())
    device = next((device for device in devices if device is not None), "cpu") if has_device else None
    return cls(items, batch_size=size, names=names, device=device, lock=locked)


def _take_lazy_stack(value: Any) -> list[Any]:
    _check_attributes(value, ("stack_dim", "tensordicts", "hook_in", "hook_out"))
    return [list(value.tensordicts), value.stack_dim, value.names[value.stack_dim], bool(value.is_locked)]


def _make_lazy_stack(cls: Any, parts: list[Any]) -> Any:
    stacked, dim, name, locked = parts
    made = cls(*stacked, stack_dim=dim, stack_dim_name=name)
    return made.lock_() if locked else made


_GRAPH: Final = "torch_geometric.data.data:Data"


def _graph_base(cls: type) -> type:
    """Data for a batch of Data, whose class exists only once the process has made such a batch."""
    return cls.__bases__[-1] if _name(cls.__bases__[0]) == "torch_geometric.data.batch:Batch" else cls


def _take_graph(value: Any) -> list[Any]:
    _check_attributes(value)
    store = _attributes(value._store)
    private = {name: store[name] for name in store if name not in ("_parent", "_cached_attr", "_mapping")}
    return [store["_mapping"], private, _graph_base(type(value)) is not type(value)]


def _make_graph(cls: Any, parts: list[Any]) -> Any:
    values, private, batched = parts
    base = next(base for base in cls.__mro__ if _name(base) == _GRAPH)
    if batched:
        cls = type(sys.modules["torch_geometric.data.batch"].Batch(_base_cls=cls))
    made = cls.__new__(cls)
    base.__init__(made)  # a subclass's own __init__ may need arguments
    store = _attributes(made._store)
    store.update(private)
    store["_mapping"].update(values)
    return made


def _make_encoding(cls: Any, parts: list[Any]) -> Any:
    (state,) = parts
    made = cls()
    made.__setstate__(state)  # JSON, in spite of the name
    return made


_OURS: Final = {
    "torch:Size": Pair(list, lambda cls, parts: cls(parts)),
    "tokenizers:Encoding": Pair(lambda value: [value.__getstate__()], _make_encoding),
    "transformers.tokenization_utils_base:BatchEncoding": _BY_ATTRIBUTES,
    "transformers.feature_extraction_utils:BatchFeature": _BY_ATTRIBUTES,
    "tensordict._td:TensorDict": Pair(_take_tensordict, _make_tensordict),
    "tensordict._lazy:LazyStackedTensorDict": Pair(_take_lazy_stack, _make_lazy_stack),
    "tensordict.tensorclass:NonTensorStack": Pair(_take_lazy_stack, _make_lazy_stack),
}

_OURS_WITH_SUBCLASSES: Final = {_GRAPH: Pair(_take_graph, _make_graph, sent_as=_graph_base)}
