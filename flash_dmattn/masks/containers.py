"""Masks as containers of tensors: pytrees (torch.export, torch.func, tree_map), moves between devices, DataLoader's
collate and pinned memory, and `torch.load` with weights_only=True."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.serialization import add_safe_globals
from torch.utils import _pytree as pytree

from ..arguments import require_bool

Self = TypeVar("Self", bound="Container")


class Container:
    """Moves all tensors of a mask that `register` knows."""

    def to(self: Self, device: torch.device | str | int, non_blocking: bool = False) -> Self:
        """The same mask on another device. Its dtypes cannot be changed."""
        if not isinstance(device, (torch.device, str, int)):
            raise TypeError(
                f"device must be a torch.device, a str or an int, got {device}: the dtypes of a mask are fixed"
            )
        require_bool("non_blocking", non_blocking)
        return pytree.tree_map_only(Tensor, lambda tensor: tensor.to(device, non_blocking=non_blocking), self)

    def cpu(self: Self) -> Self:
        """A copy on the CPU."""
        return self.to("cpu")

    def cuda(self: Self, device: torch.device | str | int | None = None, non_blocking: bool = False) -> Self:
        """A copy on a CUDA device, by default the current one."""
        return self.to("cuda" if device is None else device, non_blocking)

    def pin_memory(self: Self, device: object = None) -> Self:
        """A copy in pinned memory; `device` is deprecated in PyTorch and ignored."""
        return pytree.tree_map_only(Tensor, Tensor.pin_memory, self)


def register(cls: type, tensors: tuple[str, ...], others: tuple[str, ...]) -> None:
    """Registers a class as a pytree whose children are the attributes `tensors`, and as safe to load."""

    def flatten(mask: Any) -> tuple[list, tuple]:
        return [getattr(mask, name) for name in tensors], tuple(getattr(mask, name) for name in others)

    def flatten_with_keys(mask: Any) -> tuple[list, tuple]:
        return [(pytree.GetAttrKey(name), getattr(mask, name)) for name in tensors], flatten(mask)[1]

    def unflatten(children: Any, context: tuple) -> Any:
        mask = cls.__new__(cls)
        mask.__dict__.update(zip(tensors + others, [*children, *context]))
        return mask

    pytree.register_pytree_node(
        cls,
        flatten,
        unflatten,
        serialized_type_name=f"{cls.__module__}.{cls.__qualname__}",
        to_dumpable_context=list,
        from_dumpable_context=tuple,
        flatten_with_keys_fn=flatten_with_keys,
    )
    add_safe_globals([cls])
