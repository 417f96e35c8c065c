"""How a bad argument is refused: by an error that names it, what came and what is accepted."""

from __future__ import annotations

import torch
from torch import Tensor


def names(dtypes) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def shape_of(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)


def require_tensor(name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}")


def require_integers(name: str, value: object, or_bool: bool = False) -> None:
    require_tensor(name, value)
    if value.is_floating_point() or value.is_complex() or (value.dtype == torch.bool and not or_bool):
        accepted = "bool or integers" if or_bool else "integers"
        raise TypeError(f"{name} must be {accepted}, got {names([value.dtype])}")


def require_ndim(name: str, tensor: Tensor, layout: str) -> None:
    ndim = layout.count(",") + 1
    if tensor.ndim != ndim:
        raise ValueError(f"{name} must have {ndim} dimensions {layout}, got shape {shape_of(tensor)}")


def require_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise TypeError(f"{name} must be an int, got {type(value).__name__}")
    if value < 0:
        raise ValueError(f"{name} must not be negative, got {value}")
