"""Attention within the windows of images, whose masks and biases repeat for every image, as in Swin.

from flash_dmattn.integrations.windows import window_attention
"""

from __future__ import annotations

from einops import rearrange
from torch import Tensor

from ..arguments import require_dense, require_tensor, shape_of
from ..broadcast import is_one_of
from ..interface import flash_dmattn_func
from ..masks.choice import Sparse


def window_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    attn_bias: Tensor | None = None,
    softmax_scale: float | Tensor | None = None,
    is_causal: bool | None = False,
    softcap: float | None = 0.0,
    deterministic: bool | None = False,
    *,
    return_lse: bool = False,
    sparse: Sparse = "auto",
    relative_bias: Tensor | None = None,
    grid: tuple[int, int] | None = None,
    sinks: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`flash_dmattn_func` whose masks and biases repeat cyclically along the batch.

    Swin partitions each of B / nW images into nW windows: batch element b is window b % nW of image b // nW, and uses
    entry b % nW of a mask or bias of nW entries. `flash_dmattn_func` uses entry b // n of B / n entries instead.

    query, key, value and out are copied once, ordered by window. A mask or bias of nW entries is neither copied nor
    repeated.

    Args:
        query: (B, Sq, H, D), in the dtypes of `flash_dmattn_func`.
        key: (B, Sk, Hkv, D) in query's dtype.
        value: (B, Sk, Hkv, Dv) in query's dtype.
        attn_mask: bool tensor ({B|nW|1}, {H|Hkv|1}, {Sq|1}, {Sk|1}), True = visible; no other kind of mask. nW divides
            B. For a mask of 0 and -100, as Swin makes it, (nW, N, N): `(mask == 0).unsqueeze(1)`.
        attn_bias: ({B|nW|1}, {H|Hkv|1}, {Sq|1}, {Sk|1}), as in `flash_dmattn_func`, such as Swin's relative position
            bias (1, H, N, N). Its gradient is summed over the images.
        relative_bias, grid: as in `flash_dmattn_func`: Swin's table as (1, H, 2h - 1, 2w - 1) for windows of
            grid=(h, w) tokens.
        softmax_scale, is_causal, softcap, deterministic, return_lse, sparse, sinks: as in `flash_dmattn_func`.

    Returns:
        out (B, Sq, H, Dv), or (out, lse) with lse (B, H, Sq).

    Raises:
        As `flash_dmattn_func`.
    """
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        require_tensor(name, tensor)
        if tensor.ndim != 4 or tensor.shape[0] != query.shape[0]:
            raise ValueError(f"{name} must have 4 dimensions and query's batch size, got shape {shape_of(tensor)}")
    for name, tensor in (("attn_mask", attn_mask), ("attn_bias", attn_bias), ("relative_bias", relative_bias)):
        if isinstance(tensor, Tensor):
            require_dense(name, tensor)
    batch = query.shape[0]
    windows = number_of_windows(batch, {"attn_mask": attn_mask, "attn_bias": attn_bias})

    def by_window(x: Tensor | None) -> Tensor | None:
        if windows == 1 or not isinstance(x, Tensor) or x.shape[:1] != (batch,):
            return x
        return rearrange(x, "(images windows) ... -> (windows images) ...", windows=windows)

    def by_image(x: Tensor) -> Tensor:
        return rearrange(x, "(windows images) ... -> (images windows) ...", windows=windows)

    results = flash_dmattn_func(
        *map(by_window, (query, key, value, attn_mask, attn_bias)),
        *(softmax_scale, is_causal, softcap, deterministic),
        return_lse=return_lse,
        sparse=sparse,
        relative_bias=by_window(relative_bias),
        grid=grid,
        sinks=sinks,
    )
    return tuple(map(by_image, results)) if return_lse else by_image(results)


def number_of_windows(batch: int, masks: dict[str, Tensor | None]) -> int:
    """nW, the batch size of the mask and the bias that repeat; 1 if none repeats."""
    windows = 1
    for name, mask in masks.items():
        if mask is None:
            continue
        require_tensor(name, mask)
        entries = mask.shape[0] if mask.ndim == 4 else 0
        if is_one_of(entries, 1, batch) and mask.ndim == 4:
            continue
        if entries == 0 or batch % entries or not is_one_of(windows, 1, entries):
            accepted = "({B|nW|1}, {H|Hkv|1}, {Sq|1}, {Sk|1})"
            sizes = f"B = {batch} and {f'nW = {windows}' if windows > 1 else 'an nW that divides B'}"
            raise ValueError(f"{name} must be {accepted} with {sizes}, got shape {shape_of(mask)}")
        windows = entries
    return windows
