"""A batch <-> one flat, 64-byte aligned region of memory. No pickle.

    runner:    flat = flattener.flatten(batch)          the structure (interned), the shapes, the bytes needed
               flat.write_to(address)                   the one memcpy, straight into the ring
    receiver:  assembler = Assembler(structure)         once per structure
               batch = assembler.assemble(shapes, ring, offset, nbytes, released, slot)

This is the hot path, and everything here is shaped by microseconds. `flatten` makes one pass that collects leaves,
shapes and a *signature* (types, keys, dtypes, ranks in order); only a signature not seen lately builds a Structure.
Nothing is checked twice: a batch with a known signature can hold no unsupported dtype. When the pass meets anything
it does not like it gives up, and the slow pass, which knows paths, says what and where. Copies are `memmove`: as
fast as torch's `copy_` (1 MiB 18 us, 8 MiB 225 us on the machine of benchmarks/lanes.md), with 1.5 us less around
it. Below 256 KiB it keeps the interpreter lock, for a waiting thread might keep it for 5 ms.

**Leaves are views.** Each tensor and array of an assembled batch wraps its own slice of the ring, so that
`torch.save` of one leaf saves that leaf. All have one `_Region` as their base object, whose death (of the last leaf
and the last view of a leaf) appends the batch's token to `release`: no lock (the garbage collector may run inside
one), no socket, and nothing in a forked child, which drops views too. numpy shortens chains of bases of equal type;
that is why the region and the ring beneath it are two subclasses of ndarray: no step of the chain can be skipped.
`release` must be a deque or another object whose append is atomic.

**What travels.** torch.Tensor (CPU, strided, plain dtypes), numpy arrays and scalars, str, bytes, int, float, bool,
None in dict, OrderedDict, list, tuple, namedtuple and dataclass. Exactly these types come back; other subclasses are
refused, because they could not be rebuilt faithfully (defaultdict, IntEnum, ModelOutput: the message says how to
convert), with three exceptions that come back as what they wrap: nn.Parameter as Tensor, numpy.memmap as ndarray, and
dataclass or namedtuple instances lose attributes that are no fields. Values, dtype and shape are exact, to the bit;
memory layout is not kept (leaves arrive contiguous in C order), nor is requires_grad, and two leaves that shared memory
arrive apart.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from math import prod
from operator import attrgetter
from typing import Any, Final

import numpy as np
import torch

from penstock.proto.classes import class_fields, class_name, qualified, register_class, resolve_class
from penstock.proto.errors import InvalidArgumentError, ProtocolError, StructureChangedError, UnsupportedLeafError
from penstock.proto.structure import (
    ALIGN,
    MAX_DEPTH,
    MAX_INT_BYTES,
    MAX_LEAVES,
    MAX_RANK,
    TORCH_DTYPES,
    Leaf,
    Node,
    Path,
    Structure,
    Tree,
    numpy_dtype,
    numpy_dtype_name,
    render_path,
    required_nbytes,
)

__all__ = [
    "ALIGN",
    "Assembler",
    "FlatBatch",
    "Flattener",
    "Structure",
    "register_class",
    "required_nbytes",
    "wrap_buffer",
]
