"""The operator topk_intervals, which selects the keys of the causal top-k mask from a bias, with its CPU kernel."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .. import ops
from ..arguments import is_host_readable, require_count, require_floating, shape_of
from . import prefix_topk
from .positions import own_rows, sequence_of_keys


def has_kernels(bias: Tensor) -> bool:
    """Whether CUDA kernels select from the bias."""
    return bias.device.type == "cuda" and ops.cuda_is_built()


def operator_for(bias: Tensor) -> Callable[..., Tensor]:
    """The operator topk_intervals, or without a compiled module its CPU kernel."""
    is_operator = has_kernels(bias) or (bias.device.type != "cuda" and ops.topk_intervals is not None)
    return ops.topk_intervals if is_operator else topk_intervals


def topk_intervals(
    bias: Tensor,
    window_size: int,
    seqlen_q: int,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    longest: int | None,
) -> Tensor:
    """int32 (2, ...): starts and ends of `KeyIntervalMask.topk`, or with cu_seqlens of `topk_varlen`."""
    refuse_nan(bias)
    bias = bias.detach()
    if cu_seqlens_k is None:
        bias = bias.squeeze(2) if bias.ndim == 4 else bias
        end = prefix_topk.topk_ends_of_last(bias.flatten(0, 1), window_size, seqlen_q).view(bias.shape).clamp_(min=0)
        start = own_rows(seqlen_q, bias.shape[-1], bias.device).clamp_(min=0)
        return torch.stack((start.expand(bias.shape), end))
    keys = bias.shape[0]
    sequence = sequence_of_keys(cu_seqlens_k, keys)
    first = cu_seqlens_k[sequence]
    end = prefix_topk.topk_ends(bias.T, window_size, first).T
    position = torch.arange(keys, dtype=torch.int32, device=bias.device) - first
    lead = torch.nn.functional.pad((cu_seqlens_k - cu_seqlens_q).diff(), (0, 1))[sequence]
    start, end = (position - lead)[:, None].clamp_(min=0), (end - lead[:, None]).clamp_(min=0)
    return torch.stack((start.expand(end.shape), end))


if ops.topk_intervals is not None:
    torch.library.impl(f"{ops.NAMESPACE}::topk_intervals", "cpu")(topk_intervals)


def check_topk(layout: str, bias: object, window_size: object, ndims: tuple[int, ...]) -> None:
    require_count("window_size", window_size)
    require_floating("bias", bias)
    if bias.ndim not in ndims or (bias.ndim == 4 and bias.shape[2] != 1):
        raise ValueError(f"bias must be {layout}, got shape {shape_of(bias)}")


def refuse_nan(bias: Tensor) -> None:
    """Raises where a bias to select from is NaN. CUDA kernels check it themselves."""
    if is_host_readable(bias):
        if bias.detach().isnan().any():
            raise ValueError("bias must not be NaN: it has no order")
    elif not has_kernels(bias) and (
        torch.compiler.is_compiling() or not torch._C._are_functorch_transforms_active()  # these lack assertions
    ):
        torch._assert_async(~bias.detach().isnan().any(), "KeyIntervalMask.topk: bias must not be NaN")
