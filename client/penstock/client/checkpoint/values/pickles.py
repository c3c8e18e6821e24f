"""Pickles that others may have written: looked through before Python's unpickler takes memory at their word.

The unpickler makes room for whatever place in its memo, or length, a pickle names, before it looks whether there is
anything: five bytes are good for 32 GiB. What a pickler writes never names more than the pickle's own length, so that
is the bound. What can be *made* is the unpickler's to say (`find_class`).

The opcodes whose arguments are as long as they always are, or at most 255 bytes, are passed over by one regular
expression: an index of 3,000 entries, with 150,000 opcodes, takes 3 ms, and Python's own `pickletools.genops` 38 ms.
"""

from __future__ import annotations

import pickle
import pickletools
import re

from penstock.client.checkpoint.values.pickle_hashing import check_hashing

__all__ = ["bounded"]

_LENGTHS = {pickletools.TAKEN_FROM_ARGUMENT4: 4, pickletools.TAKEN_FROM_ARGUMENT4U: 4}
_LENGTHS[pickletools.TAKEN_FROM_ARGUMENT8U] = 8
_CODES = {opcode.code.encode("latin-1"): opcode for opcode in pickletools.opcodes}
_SIZES = {code: 0 if opcode.arg is None else opcode.arg.n for code, opcode in _CODES.items()}
"""Bytes of each opcode's argument; below 0, as pickletools says."""
_STOP, _PUT, _LONG_PUT = b".", b"p", b"r"
"""PUT is of protocol 0 alone, which neither torch nor Penstock writes."""
_COUNTED = {code: _LENGTHS[size] for code, size in _SIZES.items() if size in _LENGTHS} | {_LONG_PUT: 4}
"""Opcodes with a number of so many bytes, which is how long what follows is, or a place in the memo."""
_LINES = {code: 2 if code in b"ci" else 1 for code, size in _SIZES.items() if size == pickletools.UP_TO_NEWLINE}
"""Opcodes with so many lines of text."""
del _LINES[_PUT]


def _fixed() -> re.Pattern[bytes]:
    """Opcodes, as many as there are, whose argument has a length of its own or one byte that says it."""
    kinds = []
    for size in (0, 1, 2, 4, 8):
        codes = b"".join(re.escape(code) for code, known in _SIZES.items() if known == size and code not in _COUNTED)
        kinds.append(b"[%s].{%d}" % (codes.replace(re.escape(_STOP), b""), size))
    short = b"".join(re.escape(code) for code, size in _SIZES.items() if size == pickletools.TAKEN_FROM_ARGUMENT1)
    texts = b"|".join(b"%s.{%d}" % (re.escape(bytes([length])), length) for length in range(256))
    return re.compile(b"(?s:%s|[%s](?:%s))*+" % (b"|".join(kinds), short, texts))


_FIXED = _fixed()


def bounded(data: bytes) -> bytes:
    """`data`, which begins with a pickle that takes no more memory, and no longer to hash its keys, than its length
    accounts for.

    Raises pickle.UnpicklingError for one that asks for more than that, or does not end.
    """
    place = 0
    while True:
        found = _FIXED.match(data, place)
        assert found is not None  # it matches nothing, too
        code = data[found.end() : found.end() + 1]
        place = found.end() + 1
        if code == _STOP:
            check_hashing(data, place)
            return data
        if code in _COUNTED:
            number = int.from_bytes(data[place : place + _COUNTED[code]], "little")
            place += _COUNTED[code]
            follows = 0 if code == _LONG_PUT else number
            if max(number, place + follows) > len(data):
                raise pickle.UnpicklingError(f"byte {place:,} of {len(data):,} asks for room for {number:,}")
            place += follows
        elif code in _LINES:
            for _ in range(_LINES[code]):
                place = data.find(b"\n", place) + 1
                if not place:
                    raise pickle.UnpicklingError("a line has no end")
        else:
            raise pickle.UnpicklingError(f"there is no opcode at byte {found.end():,} of {len(data):,}")
