"""Cost of hashing the dict keys in a pickle, computed before Python's unpickler hashes them, to refuse pickles that
would take forever.

Python hashes a tuple again at each use as a key, with everything in the tuple. A pickle of 200 bytes can contain a
tuple that contains another one twice, which contains a third one twice, and so on. As a dict's key this tuple takes
centuries to hash, and nothing can interrupt that. So the pickle is replayed without making its objects: only the parts
of each object are recorded. Ordinary keys take a time to hash that is about proportional to their length in the pickle.

Replaying takes 0.8 us an opcode: 96 ms for the index of a checkpoint with 3,000 entries, as long as the rest of its
restore. Of an index that Penstock wrote (proto/state/checkpoint_index.py), only the head is replayed. The head has the
values that entries share: a few hundred opcodes for any number of entries. A regular expression checks that the rest of
the pickle, its tail, adds no shared values: the tail stores only strings in the memo, and changes only objects that it
makes itself. A key in such a tail costs at most its own length times the cost of the most expensive shared value. Any
other pickle is replayed to its end.
"""

from __future__ import annotations

import pickle
import pickletools
import re

__all__ = ["check_hashing"]

SHORTEST = 96
"""Length of a pickle in bytes below which it cannot contain a key that takes as long as a second to hash."""
COST = 64
"""Number of values to hash that a pickle may have for each of its bytes, in addition to `FREE`. (A reference to a
shared tuple takes two bytes.)"""
FREE = 1 << 20
LIGHT = COST // 2
"""Largest number of values in an object that the tail of an index (see the module's docstring) may refer to: half of
`COST`, because a key may contain another key."""

_Node = list["_Node | None"]
"""Stand-in for an object of the pickle: the list of its parts, each a list like this one. None: an object without
parts."""
_NO_OBJECT = {"PROTO", "FRAME", "STOP", "READONLY_BUFFER"}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_TO_MARK = {"TUPLE", "LIST", "DICT", "INST", "OBJ", "FROZENSET"}
_NEW = {"REDUCE": 2, "NEWOBJ": 2, "NEWOBJ_EX": 3, "STACK_GLOBAL": 2, "BINPERSID": 1}
"""Number of objects that an opcode pops from the stack to push one new object, by the opcode's name."""
_EMPTY = {"EMPTY_LIST", "EMPTY_DICT", "EMPTY_SET"}
_INTO = {"APPEND": 1, "SETITEM": 2, "BUILD": 1}
"""Number of objects that an opcode pops from the stack and adds to the object that is then on top, by the opcode's
name."""
_ALL_INTO = {"APPENDS", "SETITEMS", "ADDITEMS"}


def _tail() -> re.Pattern[bytes]:
    """Return the regular expression that matches the tail of an index that Penstock wrote (see the module's docstring):
    an object whose attributes are dicts of flat objects and tuples."""
    get = rb"h[^\0]|j(?!\0\0\0\0).{4}"  # never position 0 of the memo, which is the list of all shared values
    text = b"\x8c(?:%s)\x94" % b"|".join(b"%s.{%d}" % (re.escape(bytes([size])), size) for size in range(256))
    long = b"\x8a(?:%s)" % b"|".join(b"%s.{%d}" % (re.escape(bytes([size])), size) for size in range(9))
    leaf = b"%s|K.|M..|J.{4}|N|%s|%s" % (get, text, long)
    new = rb"(?:%s)\)\x81\}\(" % get
    flat = rb"%s(?:%s|\]\((?:%s)*+e)*+ub" % (new, leaf, get)
    item = rb"%s|%s|\((?:%s)*+t|[)\x85\x86\x87]" % (flat, leaf, leaf)
    # `u` and tuples take nothing from below the last mark, because the unpickler refuses it
    return re.compile(rb"(?s:%s(?:(?:%s)\}\((?:%s)*+u)*+(?:%s)*+ub\.)" % (new, get, item, leaf))


_TAIL = _tail()


def check_hashing(data: bytes, size: int) -> None:
    """Raise pickle.UnpicklingError if hashing the dict keys in a pickle takes much longer than the pickle's length
    justifies.

    `size`: length in bytes of the pickle, which is at the beginning of `data`.
    """
    if size < SHORTEST:
        return
    play = _Play()
    in_head = True
    try:
        for opcode, argument, position in pickletools.genops(data):
            play.step(opcode.name, argument)
            if in_head and opcode.name == "POP" and play.is_empty:
                in_head = False
                if _TAIL.fullmatch(data, (position or 0) + 1, size) and play.shares_only_light():
                    break
    except (ValueError, IndexError, KeyError, TypeError) as error:
        raise pickle.UnpicklingError(f"the data cannot be read as a pickle: {error or type(error).__name__}") from error
    if play.cost() > FREE + COST * size:
        raise pickle.UnpicklingError("the pickle has a dict key of nested tuples that would take very long to hash")


class _Play:
    """Replay of a pickle without making its objects: the unpickler's stack and memo, with a list of parts (_Node) in
    place of each object."""

    def __init__(self) -> None:
        self._stack: list[_Node | None] = []
        self._marks: list[int] = []
        self._memo: dict[int, _Node | None] = {}
        self._keys: list[_Node] = []

    @property
    def is_empty(self) -> bool:
        return not self._stack and not self._marks

    def step(self, name: str, argument: object) -> None:
        """Replay one opcode: change stack and memo as the unpickler would. `name`, `argument`: those of the opcode."""
        stack = self._stack
        if name == "MARK":
            self._marks.append(len(stack))
        elif name in _TUPLES:
            self._make(len(stack) - _TUPLES[name])
        elif name in _NEW:
            self._make(len(stack) - _NEW[name])
        elif name in _TO_MARK:
            self._note_keys(name, self._make(self._marks.pop()))
        elif name in _INTO:
            self._note_keys(name, self._put_in(len(stack) - _INTO[name]))
        elif name in _ALL_INTO:
            self._note_keys(name, self._put_in(self._marks.pop()))
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

    def _take(self, begin: int) -> _Node:
        if begin < 0:
            raise IndexError("an opcode takes more objects from the stack than it holds")
        taken = self._stack[begin:]
        del self._stack[begin:]
        return taken

    def _make(self, begin: int) -> _Node:
        taken = self._take(begin)
        self._stack.append([*taken])
        return taken

    def _put_in(self, begin: int) -> _Node:
        taken = self._take(begin)
        below = self._stack[-1]
        if below is not None:
            below.extend(taken)
        return taken

    def _note_keys(self, name: str, taken: _Node) -> None:
        if name in ("SETITEM", "SETITEMS", "DICT"):
            taken = taken[::2]
        elif name not in ("ADDITEMS", "FROZENSET"):
            return
        self._keys.extend(key for key in taken if key is not None)

    def shares_only_light(self) -> bool:
        """Return True if each object in the memo has at most `LIGHT` values inside it. Position 0 of the memo, which a
        tail never refers to, is left out."""
        known: dict[int, int] = {}
        shared = [node for position, node in self._memo.items() if position and node is not None]
        try:
            return all(_weight(node, known) <= LIGHT for node in shared)
        # an object contains itself: replaying the whole pickle shows whether it is a key
        except pickle.UnpicklingError:
            return False

    def cost(self) -> int:
        """Return the number of values that Python hashes for all dict keys of the pickle together."""
        known: dict[int, int] = {}
        return sum(_weight(key, known) for key in self._keys)


def _weight(root: _Node, known: dict[int, int]) -> int:
    """Return the number of objects that are hashed for the object `root`: itself, and all inside it. An object that is
    inside it several times is counted each time.

    `known`: results for other objects, by id(); new ones are added. Raises UnpicklingError for an object that contains
    itself.
    """
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
            raise pickle.UnpicklingError("the pickle has a dict key that contains itself")
        above.add(id(node))
        left.append((node, True))
        left += [(part, False) for part in parts if id(part) not in known]
    return known[id(root)]
