"""Merges attention over disjoint sets of keys."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from einops import rearrange
from torch import Tensor

from .arguments import names, require_device, require_floating, shape_of


def merge_attention(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The attention over all keys, from the attention of the same rows over disjoint chunks of the keys.

    Differentiable in all outs and lses. Each chunk is a call with `return_lse=True`; its mask, bias and causality are
    those of its keys. A chunk without visible keys for a row, lse -inf, adds nothing to it: its out is not used.

    Args:
        outs: the output of each chunk: (B, Sq, H, D), or of variable length (total_q, H, D), all in one dtype.
        lses: the lse of each chunk: floating (B, H, Sq), or (H, total_q).

    Returns:
        (out, lse) in the shapes and dtypes of the chunks. A row without a visible key in any chunk has out 0, lse -inf
        and zero gradients.

    Raises:
        ValueError: no chunk, different numbers of outs and lses, or an invalid shape.
        TypeError: outs or lses that are not a sequence, an out or lse that is not a floating tensor, or chunks of
            different dtypes.
        RuntimeError: chunks on different devices.
    """
    for name, tensors in (("outs", outs), ("lses", lses)):
        if isinstance(tensors, Tensor) or not isinstance(tensors, Iterable):
            raise TypeError(f"{name} must be a sequence of tensors, one per chunk, got {type(tensors).__name__}")
    outs, lses = tuple(outs), tuple(lses)
    check_chunks(outs, lses)
    stacked = torch.stack(lses)
    largest = stacked.detach().amax(dim=0)
    largest = largest.masked_fill(largest == -torch.inf, 0)  # -inf - -inf is NaN
    weights = (stacked - largest).exp()
    total = weights.sum(dim=0)
    empty = total == 0
    total = total.masked_fill(empty, 1)
    lse = (largest + total.log()).masked_fill(empty, -torch.inf)
    dtype = torch.promote_types(outs[0].dtype, lse.dtype)
    merged = sum(
        rearrange(weight / total, "... h s -> ... s h 1").to(dtype)
        * out.masked_fill(rearrange(own == -torch.inf, "... h s -> ... s h 1"), 0).to(dtype)
        for out, own, weight in zip(outs, lses, weights)
    )
    return merged.to(outs[0].dtype), lse


def check_chunks(outs: tuple[Tensor, ...], lses: tuple[Tensor, ...]) -> None:
    if not outs or len(outs) != len(lses):
        raise ValueError(
            f"outs and lses must have one tensor for each chunk, at least one, got {len(outs)} and {len(lses)}"
        )
    for name, tensors in (("outs", outs), ("lses", lses)):
        for i, tensor in enumerate(tensors):
            require_floating(f"{name}[{i}]", tensor)
            require_device(f"{name}[{i}]", tensor, outs[0].device, "outs[0]")
            if tensor.dtype != tensors[0].dtype:
                got = names([tensor.dtype])
                raise TypeError(f"{name}[{i}] must have the dtype of {name}[0], {names([tensors[0].dtype])}, got {got}")
    shape = shape_of(outs[0])
    if len(shape) not in (3, 4):
        raise ValueError(f"outs[0] must be (B, Sq, H, D) or (total_q, H, D), got shape {shape}")
    rows = (*shape[:-3], shape[-2], shape[-3])
    for name, tensors, expected in (("outs", outs, shape), ("lses", lses, rows)):
        for i, tensor in enumerate(tensors):
            if tensor.shape != expected:
                hint = ": pass zip(*chunks) of (out, lse) pairs" if tensor.shape == rows else ""
                raise ValueError(f"{name}[{i}] must be of shape {expected}, got shape {shape_of(tensor)}{hint}")
