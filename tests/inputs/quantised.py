"""A tensor class of its own, as quantising libraries have: whole numbers with one scale for each row."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch.utils import _python_dispatch

corrected: Any = _python_dispatch.return_and_correct_aliasing


class Rows8(torch.Tensor):
    codes: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor) -> Rows8:
        made: Rows8 = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)
        return made

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor) -> None:
        self.codes, self.scale = codes, scale

    @classmethod
    def of(cls, values: torch.Tensor) -> Self:
        scale = values.abs().amax(1).clamp(min=1e-9) / 127
        return cls((values / scale[:, None]).round().to(torch.int8), scale)

    def dequantize(self) -> torch.Tensor:
        return self.codes.float() * self.scale[:, None]

    def __tensor_flatten__(self) -> tuple[list[str], list[Any]]:
        return ["codes", "scale"], [self.shape]

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], context: Any, size: Any, stride: Any) -> Rows8:
        assert context == [size]
        return cls(inner["codes"], inner["scale"])

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Rows8({self.codes}, {self.scale})"

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        aten = torch.ops.aten
        first = args[0]
        if function is aten.is_pinned.default:
            return False
        if function is aten.view.default and list(args[1]) == list(first.shape):
            return corrected(function, args, kwargs or {}, cls(first.codes, first.scale))
        if function is aten.copy_.default:
            source = args[1] if isinstance(args[1], Rows8) else cls.of(args[1])
            if not isinstance(first, Rows8):
                return first.copy_(source.dequantize())
            first.codes.copy_(source.codes)
            first.scale.copy_(source.scale)
            return first
        if function in (aten.detach.default, aten.clone.default, aten._to_copy.default, aten.alias.default):
            made = cls(*(function(part) for part in (first.codes, first.scale)))
            return corrected(function, args, kwargs or {}, made)
        raise NotImplementedError(f"Rows8 has no {function}")


torch.serialization.add_safe_globals([Rows8])
