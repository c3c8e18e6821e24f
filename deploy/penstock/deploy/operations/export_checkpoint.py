"""`penstock checkpoint export`: a checkpoint's values in one file, of safetensors or of torch.save."""

from __future__ import annotations

import io
import json
import os
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from penstock.client.checkpoint.restoring.whole import read_state
from penstock.deploy.operations.checkpoint_folders import one_checkpoint
from penstock.proto.errors import CheckpointError, InvalidArgumentError
from penstock.runtime.telemetry.units import size

SHOWN = 5
"""Most values that an error names."""
PLAIN = (type(None), bool, int, float, str, bytes)
TORCH_DICTS: tuple[type, ...] = (dict, OrderedDict, Counter)
"""Classes of dicts that torch.load(weights_only=True) makes."""


class _Leaf(NamedTuple):
    name: str
    holder: Any
    """Dict or list that has the value under `key`."""
    key: Any
    value: Any

    @property
    def is_plain_tensor(self) -> bool:
        return type(self.value) in (torch.Tensor, torch.nn.Parameter)


def show_export(where: str, to: Path, key: str | None, leave_out: bool, as_json: bool) -> None:
    """Write a checkpoint's values to a file, and print how many. The file appears complete, or not at all."""
    if to.suffix not in (".safetensors", ".pt") or not to.parent.is_dir():
        raise InvalidArgumentError(f"--to must be FILE.safetensors or FILE.pt in an existing folder, got {to}")
    is_torchs = to.suffix == ".pt"
    refusal = _torch_refusal if is_torchs else _safetensors_refusal()
    place, path = one_checkpoint(where)
    state = read_state(place, path, key)
    values = state if key is None or not isinstance(state[key], dict) else state[key]
    leaves = list(_leaves(values, "", TORCH_DICTS if is_torchs else (*TORCH_DICTS, defaultdict)))
    refused = {leaf.name: why for leaf in leaves if (why := refusal(leaf))}
    if refused and not leave_out:
        more = f"; and {len(refused) - SHOWN} more" if len(refused) > SHOWN else ""
        named = "; ".join(f"{name!r}: {why}" for name, why in list(refused.items())[:SHOWN])
        raise CheckpointError(f"{to} cannot hold {named}{more}. Choose what goes in by --key, or pass --leave-out")
    for leaf in leaves:
        if leaf.name in refused and isinstance(leaf.holder, list):
            leaf.holder[leaf.key] = None  # what follows in the list keeps its place
        elif leaf.name in refused:
            del leaf.holder[leaf.key]
    kept = {leaf.name: leaf.value for leaf in leaves if leaf.name not in refused}
    _write(to, values if is_torchs else kept)
    tensors = sum(isinstance(value, torch.Tensor) for value in kept.values())
    nbytes = to.stat().st_size
    if as_json:
        found = {"file": str(to), "checkpoint": path, "tensors": tensors, "objects": len(kept) - tensors}
        print(json.dumps({**found, "bytes": nbytes, "left_out": list(refused)}, indent=2))
        return
    print(f"{to}: {tensors} tensors and {len(kept) - tensors} objects of {path}, {size(nbytes)}")
    for name, why in refused.items():
        print(f"left out: {name!r}: {why}")


def _leaves(holder: Any, above: str, dicts: tuple[type, ...]) -> Iterator[_Leaf]:
    """Yield the values in nested `dicts`, and in lists of tensors and dicts, by the names that they have in `show`."""
    for key, value in list(holder.items() if isinstance(holder, dict) else enumerate(holder)):
        name = f"{above}.{key}" if above else str(key)
        if (type(value) in dicts and value) or _has_parts(value):
            yield from _leaves(value, name, dicts)
        else:
            yield _Leaf(name, holder, key, value)


def _has_parts(value: Any) -> bool:
    return type(value) is list and any(isinstance(part, torch.Tensor | dict) or _has_parts(part) for part in value)


def _torch_refusal(leaf: _Leaf) -> str:
    """Return why torch.load(weights_only=True) does not load this value as it is; "" if it does."""
    if leaf.is_plain_tensor or type(leaf.value) in PLAIN:
        return ""
    file = io.BytesIO()
    try:
        torch.save(leaf.value, file)
        file.seek(0)
        torch.load(file, map_location="cpu", weights_only=True)
    except Exception:  # objects of any class can raise any error
        return f"{_kind(leaf.value)}, which torch.load(weights_only=True) refuses"
    return ""


def _safetensors_refusal() -> Callable[[_Leaf], str]:
    try:
        from safetensors.torch import save
    except ImportError as error:
        raise InvalidArgumentError("--to FILE.safetensors needs a package: pip install safetensors") from error

    def refusal(leaf: _Leaf) -> str:
        if not leaf.is_plain_tensor:
            return f"{_kind(leaf.value)}, no plain tensor"
        try:
            save({"value": torch.empty(0, dtype=leaf.value.dtype)})
        except Exception:  # it depends on its version which error it raises for a dtype that it lacks
            return f"a tensor of {leaf.value.dtype}, which safetensors lacks"
        return ""

    return refusal


def _kind(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


def _write(to: Path, values: dict[str, Any]) -> None:
    part = to.with_name(f".{to.name}.{os.urandom(4).hex()}")  # a name that nobody can put a link at
    try:
        if to.suffix == ".pt":
            torch.save(values, part)
        else:
            from safetensors.torch import save_file

            save_file({name: value.contiguous() for name, value in values.items()}, part, metadata={"format": "pt"})
        os.replace(part, to)
    except Exception as error:  # OSError, RuntimeError of torch, SafetensorError: a full disk, a folder without rights
        raise CheckpointError(f"{to} cannot be written: {type(error).__name__}: {error}") from error
    finally:
        with suppress(OSError):
            part.unlink()
