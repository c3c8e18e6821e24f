"""States of a process's random generators as bytes: Python's `random`, numpy's legacy global, torch's CPU default.

The record includes the second gaussian that `random.gauss` and `numpy.random.normal` keep for their next call (without
it a resume after an odd number of draws would differ).

    offset  size  field                                        all integers little-endian
    0       8     magic                                        b"PENRNGST"
    8       4     format version                               RNG_FORMAT_VERSION
    12      4     flags                                        1: `random` caches a gaussian, 2: numpy does
    16      8     Python's cached gaussian (double)            0.0 if none
    24      8     numpy's cached gaussian (double)             kept even if unused: get_state() has it
    32      4     numpy's position in its block                0..624
    36      4     N, length of torch's state                   5056 in torch 2.13; torch's own layout, not ours
    40      2500  Python: 624 words, and the position          MT19937
    2540    2496  numpy: 624 words                             MT19937
    5036    N     torch
    5036+N  8     checksum                                     xxh3_64 of everything before it

Those of CUDA are left out: processes that run input code do not use CUDA.

Seeds are derived by hashing, never by arithmetic. With seed + rank, two different seeds would give equal streams on
different ranks. torch's CPU generator keeps only the low 32 bits of a seed, so two of n seeds coincide with a
probability of n^2 / 2^33."""

from __future__ import annotations

import gc
import hashlib
import operator
import random
import struct

import numpy as np
import torch
import xxhash

from penstock.proto.errors import InvalidArgumentError, StateCorruptError, StateVersionError, UnsupportedStateError

RNG_FORMAT_VERSION = 1

_MAGIC = b"PENRNGST"
_HEADER = struct.Struct("<8sIIddII")
_PYTHON = struct.Struct("<625I")
_WORDS = 624
_CHECKSUM_BYTES = 8
_FIXED = _HEADER.size + _PYTHON.size + 4 * _WORDS + _CHECKSUM_BYTES
_PYTHON_GAUSS, _NUMPY_GAUSS = 1, 2
_DAMAGED = "a captured random state is damaged. Load an older state"
_OTHER_BITS = (
    "numpy's global generator must be MT19937, not set_bit_generator()'s. Keep a Generator of your own instead."
)


def capture_rng() -> bytes:
    """Return the three states as 10,100 bytes, in 37 us. Raises UnsupportedStateError if numpy's is not MT19937."""
    _, python, python_gauss = random.getstate()
    numpy = np.random.get_state(legacy=False)
    if numpy["bit_generator"] != "MT19937":
        raise UnsupportedStateError(_OTHER_BITS)
    words: bytes = numpy["state"]["key"].astype("<u4", copy=False).tobytes()
    torch_state = torch_rng_state().numpy().tobytes()  # numpy() on a fresh copy: not the user's storage
    header = _HEADER.pack(
        _MAGIC,
        RNG_FORMAT_VERSION,
        (0 if python_gauss is None else _PYTHON_GAUSS) | (_NUMPY_GAUSS if numpy["has_gauss"] else 0),
        0.0 if python_gauss is None else python_gauss,
        numpy["gauss"],
        numpy["state"]["pos"],
        len(torch_state),
    )
    body = b"".join((header, _PYTHON.pack(*python), words, torch_state))
    return body + xxhash.xxh3_64_digest(body)


def torch_rng_state(generator: torch.Generator | None = None) -> torch.Tensor:
    """Return the state of a CPU generator (None: the global one), without garbage collection: get_state() makes a
    Python object under the generator's lock, and a finalizer that uses it would deadlock."""
    collects = gc.isenabled()
    gc.disable()
    try:
        return torch.get_rng_state() if generator is None else generator.get_state()
    finally:
        if collects:
            gc.enable()


def restore_rng(data: bytes | bytearray | memoryview) -> None:
    """Set all three generators, or none, to what capture_rng() returned. Raises StateCorruptError, StateVersionError,
    and UnsupportedStateError if numpy's global generator is not MT19937."""
    view = memoryview(data)
    view = view.cast("B") if view.c_contiguous else memoryview(view.tobytes())
    end = len(view) - _CHECKSUM_BYTES
    if len(view) < _FIXED or view[:8] != _MAGIC or xxhash.xxh3_64_digest(view[:end]) != view[end:]:
        raise StateCorruptError(_DAMAGED)
    _, version, flags, python_gauss, numpy_gauss, position, torch_size = _HEADER.unpack_from(view)
    if version > RNG_FORMAT_VERSION:
        raise StateVersionError(f"a random state has format {version}, above {RNG_FORMAT_VERSION}: upgrade Penstock")
    python = _PYTHON.unpack_from(view, _HEADER.size)
    if (
        version != RNG_FORMAT_VERSION
        or flags & ~(_PYTHON_GAUSS | _NUMPY_GAUSS)
        or len(view) != _FIXED + torch_size
        or position > _WORDS  # numpy would read beyond its block
        or python[-1] > _WORDS
    ):
        raise StateCorruptError(_DAMAGED)
    start = _HEADER.size + _PYTHON.size
    words = np.frombuffer(view, "<u4", _WORDS, start).astype(np.uint32)
    torch_state = torch.from_numpy(np.frombuffer(view, np.uint8, torch_size, start + 4 * _WORDS).copy())
    try:
        torch.Generator().set_state(torch_state)
    except RuntimeError as error:
        raise StateCorruptError(f"torch {torch.__version__} cannot load the saved random state: {error}") from error
    try:
        np.random.set_state(("MT19937", words, position, 1 if flags & _NUMPY_GAUSS else 0, numpy_gauss))
    except ValueError as error:
        raise UnsupportedStateError(_OTHER_BITS) from error
    torch.set_rng_state(torch_state)
    random.setstate((3, python, python_gauss if flags & _PYTHON_GAUSS else None))


def seed_rng(seed: int) -> None:
    """Seed the three generators from one non-negative integer of any size; cached gaussians are dropped.

    Python's takes the whole integer; numpy's 8 words and torch's one 64-bit word, from independent children of
    numpy.random.SeedSequence(seed), which maps close seeds to distant ones (after M. E. O'Neill, "Developing a seed_seq
    Alternative", 2015). Raises InvalidArgumentError for another value."""
    seed = _integer(seed, "seed")
    if seed < 0:
        raise InvalidArgumentError(f"seed must be >= 0, got {seed}: pass a non-negative integer")
    for_numpy, for_torch = np.random.SeedSequence(seed).spawn(2)
    random.seed(seed)
    np.random.seed(for_numpy.generate_state(8))
    # Not torch.manual_seed(). Before CUDA is initialised, it queues each call with a formatted stack: 310 us instead of
    # 2, and memory that grows with each call. After that, it would also seed the caller's CUDA generators.
    torch.default_generator.manual_seed(int(for_torch.generate_state(1, np.uint64)[0]))


def derive_seed(seed: int, *path: int | str) -> int:
    """Return a seed in [0, 2**63) for one use, such as `derive_seed(run_seed, "shuffle", epoch)`. The algorithm never
    changes, because saved runs depend on it.

    It is the lowest 63 bits, read little-endian, of a BLAKE2b digest (RFC 7693, M.-J. Saarinen and J.-P. Aumasson,
    2015) of 8 bytes, personalised as b"penstock.seed", over `seed` and the parts of `path`, each as type (b"i" or
    b"s"), length (8 bytes, little-endian) and content (an int as format(n, "x"), a str in UTF-8), so that 1 and "1",
    and ("ab", "c") and ("a", "bc"), differ. Raises InvalidArgumentError for a part that is neither int nor str."""
    digest = hashlib.blake2b(digest_size=8, person=b"penstock.seed")
    for index, part in enumerate((seed, *path)):
        if isinstance(part, str):
            kind, content = b"s", part.encode("utf-8", "surrogatepass")
        else:
            name = f"path[{index - 1}]" if index else "seed"
            kind, content = b"i", format(_integer(part, name), "x").encode()
        digest.update(kind + struct.pack("<Q", len(content)) + content)
    return int.from_bytes(digest.digest(), "little") & (2**63 - 1)


def _integer(value: object, name: str) -> int:
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise InvalidArgumentError(f"{name} must be an integer, got {value!r}") from None
