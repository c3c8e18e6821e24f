"""What the keys of a pickle cost to hash, found out before Python's unpickler hashes them.

A tuple is hashed anew each time, with all that is in it. One that holds another twice, which holds a third twice, and
so on, takes 200 bytes of a pickle and, as a key, longer than anybody lives; and nothing interrupts it. So the pickle is
played without making anything: of each object only what it consists of is noted. Keys that picklers write cost about as
much as they are long.
"""

from __future__ import annotations

import pickle
import pickletools

__all__ = ["check_hashing"]

SHORTEST = 96
"""Bytes: a shorter pickle makes no key that costs a second."""
COST = 64
"""Values to hash for each byte of the pickle, beyond `FREE`; a reference to a shared tuple is two bytes."""
FREE = 1 << 20

_Node = list["_Node | None"]
"""What an object consists of; None: nothing that has parts."""
_NO_OBJECT = {"PROTO", "FRAME", "STOP", "READONLY_BUFFER"}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_TO_MARK = {"TUPLE", "LIST", "DICT", "INST", "OBJ", "FROZENSET"}
_NEW = {"REDUCE": 2, "NEWOBJ": 2, "NEWOBJ_EX": 3, "STACK_GLOBAL": 2, "BINPERSID": 1}
"""Objects that are made of so many on the stack."""
_EMPTY = {"EMPTY_LIST", "EMPTY_DICT", "EMPTY_SET"}
_INTO = {"APPEND": 1, "SETITEM": 2, "BUILD": 1}
"""So many on the stack go into the object below them."""
_ALL_INTO = {"APPENDS", "SETITEMS", "ADDITEMS"}


def check_hashing(data: bytes, size: int) -> None:
    """Raise pickle.UnpicklingError for a pickle with a key that takes longer to hash than its length accounts for.

    size: bytes of the pickle, with which `data` begins.
    """
    if size < SHORTEST:
        return
    play = _Play()
    try:
        for opcode, argument, _ in pickletools.genops(data):
            play.step(opcode.name, argument)
    except (ValueError, IndexError, KeyError, TypeError) as error:
        raise pickle.UnpicklingError(f"it is no pickle: {error or type(error).__name__}") from error
    if play.cost() > FREE + COST * size:
        raise pickle.UnpicklingError("it has a key that would take very long to hash: tuples in tuples")


class _Play:
    """The unpickler's stack and memo."""

    def __init__(self) -> None:
        self._stack: list[_Node | None] = []
        self._marks: list[int] = []
        self._memo: dict[int, _Node | None] = {}
        self._keys: list[_Node] = []

    def step(self, name: str, argument: object) -> None:
        stack = self._stack
        if name == "MARK":
            self._marks.append(len(stack))
        elif name in _TUPLES:
            self._make(len(stack) - _TUPLES[name])
        elif name in _NEW:
            self._make(len(stack) - _NEW[name])
        elif name in _TO_MARK:
            self._keyed(name, self._make(self._marks.pop()))
        elif name in _INTO:
            self._keyed(name, self._put_in(len(stack) - _INTO[name]))
        elif name in _ALL_INTO:
            self._keyed(name, self._put_in(self._marks.pop()))
        elif name in _EMPTY:
            stack.append([])
        elif name in ("PUT", "BINPUT", "LONG_BINPUT"):
            self._memo[int(argument)] = stack[-1]  # type: ignore[call-overload]
        elif name == "MEMOIZE":
            self._memo[len(self._memo)] = stack[-1]
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(self._memo[int(argument)])  # type: ignore[call-overload]
        elif name == "DUP":
            stack.append(stack[-1])
        elif name == "POP_MARK" or (name == "POP" and self._marks and self._marks[-1] == len(stack)):
            del stack[self._marks.pop() :]
        elif name == "POP":
            stack.pop()
        elif name not in _NO_OBJECT:
            stack.append(None)

    def _taken(self, begin: int) -> _Node:
        if begin < 0:
            raise IndexError("its stack is empty")
        taken = self._stack[begin:]
        del self._stack[begin:]
        return taken

    def _make(self, begin: int) -> _Node:
        taken = self._taken(begin)
        self._stack.append([*taken])
        return taken

    def _put_in(self, begin: int) -> _Node:
        taken = self._taken(begin)
        below = self._stack[-1]
        if below is not None:
            below.extend(taken)
        return taken

    def _keyed(self, name: str, taken: _Node) -> None:
        if name in ("SETITEM", "SETITEMS", "DICT"):
            taken = taken[::2]
        elif name not in ("ADDITEMS", "FROZENSET"):
            return
        self._keys.extend(key for key in taken if key is not None)

    def cost(self) -> int:
        """Values that are hashed for all keys together, as the objects are in the end."""
        known: dict[int, int] = {}
        return sum(_weight(key, known) for key in self._keys)


def _weight(root: _Node, known: dict[int, int]) -> int:
    """Objects below this one, each as often as it is come to. Raise UnpicklingError for one that is in itself."""
    above: set[int] = set()
    left: list[tuple[_Node, bool]] = [(root, False)]
    while left:
        node, ready = left.pop()
        if id(node) in known:
            continue
        parts = [part for part in node if part is not None]
        if ready:
            above.discard(id(node))
            known[id(node)] = 1 + len(node) - len(parts) + sum(known[id(part)] for part in parts)
            continue
        if id(node) in above:
            raise pickle.UnpicklingError("it has a key that is in itself")
        above.add(id(node))
        left.append((node, True))
        left += [(part, False) for part in parts if id(part) not in known]
    return known[id(root)]
