"""Check of pickles that other programs may have written, before Python's unpickler allocates the memory that such a
pickle requests.

The unpickler allocates memory for any length, or position in its memo, that a pickle names, before it checks whether
the data exist: five bytes make it allocate 32 GiB. A pickler never writes a length or position above the pickle's own
length, so larger numbers are refused here. Which classes a pickle may use is not checked here; the unpickler's
`find_class` does that.

One regular expression skips the opcodes with an argument of fixed length, or of at most 255 bytes. An index of 3,000
entries, with 120,000 opcodes, takes 3 ms; with Python's own `pickletools.genops` it takes 38 ms.
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
"""Length in bytes of the argument of each opcode of pickles; a negative number is one of pickletools' constants for
variable lengths."""
_STOP, _PUT, _LONG_PUT = b".", b"p", b"r"
"""Opcodes for the end of a pickle (STOP) and for storing an object in the memo (PUT, LONG_BINPUT). PUT belongs to
protocol 0, which neither torch nor Penstock writes."""
_COUNTED = {code: _LENGTHS[size] for code, size in _SIZES.items() if size in _LENGTHS} | {_LONG_PUT: 4}
"""Length in bytes of the number after each opcode that has one. The number is the length of the data that follow, or a
position in the memo."""
_LINES = {code: 2 if code in b"ci" else 1 for code, size in _SIZES.items() if size == pickletools.UP_TO_NEWLINE}
"""Number of lines of text that are the arguments of an opcode, for opcodes with such arguments."""
del _LINES[_PUT]


def _fixed() -> re.Pattern[bytes]:
    """Return the regular expression that matches a run of opcodes which need no check: their arguments have a fixed
    length, or begin with their length as one byte."""
    kinds = []
    for size in (0, 1, 2, 4, 8):
        codes = b"".join(re.escape(code) for code, known in _SIZES.items() if known == size and code not in _COUNTED)
        kinds.append(b"[%s].{%d}" % (codes.replace(re.escape(_STOP), b""), size))
    short = b"".join(re.escape(code) for code, size in _SIZES.items() if size == pickletools.TAKEN_FROM_ARGUMENT1)
    texts = b"|".join(b"%s.{%d}" % (re.escape(bytes([length])), length) for length in range(256))
    return re.compile(b"(?s:%s|[%s](?:%s))*+" % (b"|".join(kinds), short, texts))


_FIXED = _fixed()


def bounded(data: bytes) -> bytes:
    """Return `data`, unchanged, after a check of the pickle at its beginning: unpickling must take no more memory, and
    no more time for hashing keys, than the pickle's length justifies.

    Raises pickle.UnpicklingError if it would take more, or if the pickle has no end.
    """
    at = 0
    while True:
        found = _FIXED.match(data, at)
        assert found is not None  # the pattern also matches an empty text
        code = data[found.end() : found.end() + 1]
        at = found.end() + 1
        if code == _STOP:
            check_hashing(data, at)
            return data
        if code in _COUNTED:
            number = int.from_bytes(data[at : at + _COUNTED[code]], "little")
            at += _COUNTED[code]
            follows = 0 if code == _LONG_PUT else number
            if max(number, at + follows) > len(data):
                raise pickle.UnpicklingError(
                    f"the pickle is damaged: it has {len(data):,} bytes, but names a length or memo position of "
                    f"{number:,} before byte {at:,}"
                )
            at += follows
        elif code in _LINES:
            for _ in range(_LINES[code]):
                at = data.find(b"\n", at) + 1
                if not at:
                    raise pickle.UnpicklingError("the pickle is damaged: a line of text in it has no end")
        else:
            raise pickle.UnpicklingError(
                f"the pickle is damaged: byte {found.end():,} of {len(data):,} is not a pickle opcode"
            )
