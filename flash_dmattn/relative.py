"""Tables for the argument `relative_bias`: biases that depend only on the distance of a key from its query row.

    relative_bias ({B|1}, {H|Hkv|1}, 2R + 1): score (i, j) reads entry R + clamp(d, -R, R), d = j - (i + Sk - Sq)

Each function makes such a table from the parameters of a published method, in float32 or float64, differentiably.
Tables of the same size add up: `alibi(slopes, R) + window(R, left, right)`. `dense` materializes the bias of a table.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import embedding

from .arguments import require_bool, require_count, require_device, require_floating, shape_of
from .ops.conventions import accumulation_dtype


def distances(max_distance: int, device: torch.device | str | None = None) -> Tensor:
    """int64 (2R + 1): -R to R, the distances of the entries of a table of radius R."""
    radius = require_count("max_distance", max_distance)
    return torch.arange(-radius, radius + 1, device=device)


def t5(table: Tensor, bidirectional: bool = True, max_distance: int = 128) -> Tensor:
    """The relative bias of T5 (Raffel et al., 2020, arXiv:1910.10683) from its embedding of distance buckets.

    Half of the buckets of a direction hold one distance each, the other half ranges that grow logarithmically up to
    max_distance. With n buckets for a direction and e = n // 2, distance a >= 0 is in bucket

        a                                                             if a < e
        min(e + floor(log(a / e) / log(max_distance / e) (n - e)), n - 1)    else

    bidirectional: keys after the row use the second half of the buckets; else they are in bucket 0.

    Args:
        table: (buckets, H), `relative_attention_bias.weight` of a T5 model. T5 does not scale its scores: with such
            weights pass `softmax_scale=1.0` to the attention function.
        bidirectional: True for an encoder, False for a decoder.
        max_distance: `relative_attention_max_distance` of the model's config. Farther keys share the last bucket.

    Returns:
        (1, H, 2 * max_distance + 1), float32; float64 for a float64 table.

    Raises:
        TypeError, ValueError: a table that is not floating, has another shape or has too few buckets, a
            bidirectional that is not a bool, a max_distance that is not an int or is not above the buckets of one
            distance each.
    """
    require_parameters("table", table, (2,), "(buckets, H)")
    require_bool("bidirectional", bidirectional)
    distance = distances(max_distance, table.device)
    buckets, first = table.shape[0], 0
    if bidirectional:
        buckets //= 2
        first, distance = torch.where(distance > 0, buckets, 0), distance.abs()
    else:
        distance = (-distance).clamp(min=0)
    exact = buckets // 2
    if exact == 0:
        fewest = 4 if bidirectional else 2
        raise ValueError(f"table must have at least {fewest} buckets, got shape {shape_of(table)}")
    if max_distance <= exact:
        raise ValueError(f"max_distance must be above the {exact} buckets of one distance each, got {max_distance}")
    # In float32, as transformers computes it: a distance at the edge of a bucket stays in its bucket.
    far = torch.log(distance.clamp(min=1).float() / exact) / math.log(max_distance / exact) * (buckets - exact)
    far = (exact + far.long()).clamp(max=buckets - 1)
    bucket = first + torch.where(distance < exact, distance, far)
    return embedding(bucket, wide(table)).T[None]  # an index has a slower backward, which sorts


def alibi(slopes: Tensor, max_distance: int) -> Tensor:
    """The linear bias of ALiBi (Press et al., 2022, arXiv:2108.12409): -slope_h |d|.

    Args:
        slopes: (H), such as `alibi_slopes(H)`, or ({B|1}, H); differentiable.
        max_distance: at least the longest distance in a call, max(Sq, Sk) - 1: farther keys have the bias of this one.

    Returns:
        ({B|1}, H, 2 * max_distance + 1), float32; float64 for float64 slopes.

    Raises:
        TypeError, ValueError: slopes that are not floating, or neither (H) nor ({B|1}, H), a max_distance that is not
            an int or is negative.
    """
    require_parameters("slopes", slopes, (1, 2), "(H) or ({B|1}, H)")
    return torch.atleast_2d(-wide(slopes))[..., None] * distances(max_distance, slopes.device).abs()


def alibi_slopes(heads: int, device: torch.device | str | None = None) -> Tensor:
    """float32 (H): the slopes of ALiBi's paper, 2 ** (-8 (h + 1) / H) for H a power of two. For other H those of the
    next lower power of two, followed by every second slope of the next higher one.

    Args:
        heads: H.
        device: the device of the slopes.

    Raises:
        TypeError, ValueError: heads that are not an int or are negative.
    """
    heads = require_count("heads", heads)
    lower = 1 << heads.bit_length() - 1 if heads else 0
    own = [2 ** (-8 * (h + 1) / lower) for h in range(lower)]
    between = [2 ** (-8 * (2 * h + 1) / (2 * lower)) for h in range(heads - lower)]
    return torch.tensor([*own, *between], dtype=torch.float32, device=device)


def kerple(scale: Tensor, shape: Tensor, max_distance: int, kind: Literal["log", "power"] = "log") -> Tensor:
    """The kernel biases of KERPLE (Chi et al., 2022, arXiv:2205.09921), with one scale and one shape a head:

        kind="log"      -scale_h log(1 + shape_h |d|)
        kind="power"    -scale_h |d| ** shape_h         shape_h in (0, 2]

    Args:
        scale, shape: (H), positive; differentiable.
        max_distance: at least the longest distance in a call: farther keys have the bias of this one.
        kind: "log" or "power".

    Returns:
        (1, H, 2 * max_distance + 1), float32; float64 for a float64 scale or shape.

    Raises:
        TypeError, ValueError: a scale or shape that is not floating or not (H), a max_distance that is not an int or is
            negative, a kind that is neither "log" nor "power".
        RuntimeError: scale and shape on different devices.
    """
    for name, parameter in (("scale", scale), ("shape", shape)):
        require_parameters(name, parameter, (1,), "(H)")
    if scale.shape != shape.shape:
        raise ValueError(f"scale and shape must both be (H), got shapes {shape_of(scale)} and {shape_of(shape)}")
    require_device("shape", shape, scale.device, "scale")
    scale, shape, distance = wide(scale)[:, None], wide(shape)[:, None], distances(max_distance, scale.device).abs()
    if kind == "log":
        return (-scale * torch.log1p(shape * distance))[None]
    if kind == "power":
        # 0 ** shape has no finite gradient for shapes below 1.
        return (-scale * torch.where(distance > 0, distance.clamp(min=1) ** shape, 0))[None]
    raise ValueError(f"kind must be 'log' or 'power', got {kind!r}")


def sandwich(heads: int, max_distance: int, dim: int = 128, device: torch.device | str | None = None) -> Tensor:
    """The bias of Sandwich (Chi et al., 2023, arXiv:2212.10356): the product of two sinusoidal position embeddings of
    width dim, divided by the compression ratio of the head, and 0 at distance 0. It has no parameters:

        (sum_i cos(d / 10000 ** (2 i / dim)) - dim / 2) H / (8 (h + 1)),    i = 1 to dim / 2

    Args:
        heads: H.
        max_distance: at least the longest distance in a call: farther keys have the bias of this one.
        dim: even; 128 in the paper.
        device: the device of the table.

    Returns:
        float32 (1, H, 2 * max_distance + 1).

    Raises:
        TypeError, ValueError: heads, a max_distance or a dim that is not an int or is negative, a dim that is odd or 0.
    """
    heads, dim = require_count("heads", heads), require_count("dim", dim)
    if dim == 0 or dim % 2:
        raise ValueError(f"dim must be even and positive, got {dim}")
    frequency = 10000.0 ** (-torch.arange(2, dim + 1, 2, dtype=torch.float64, device=device) / dim)
    # In float64: the angles of far distances are large.
    product = (distances(max_distance, device)[:, None] * frequency).cos().sum(1) - dim / 2
    ratio = 8 * torch.arange(1, heads + 1, dtype=torch.float64, device=device) / heads
    return (product / ratio[:, None]).float()[None]


def window(
    max_distance: int, left: int | None, right: int | None = 0, device: torch.device | str | None = None
) -> Tensor:
    """A sliding window: 0 for the keys from `left` before the row's own to `right` after it, -inf for the others.

    Blocks that it masks are skipped.

    Args:
        max_distance: above left and right, so that the clamped entries mask.
        left, right: the number of keys before and after the row's own; None for no limit.
        device: the device of the table.

    Returns:
        float32 (1, 1, 2 * max_distance + 1).

    Raises:
        TypeError, ValueError: an argument that is not an int or is negative, a max_distance that is not above left and
            right.
    """
    left, right = (
        keys if keys is None else require_count(name, keys, hint=": pass None for no limit")
        for name, keys in (("left", left), ("right", right))
    )
    distance = distances(max_distance, device)
    if any(keys is not None and keys >= max_distance for keys in (left, right)):
        raise ValueError(f"max_distance must be above left and right, got {max_distance}, {left} and {right}")
    table = torch.zeros_like(distance, dtype=torch.float32)
    if left is not None:
        table = table.masked_fill(distance < -left, -torch.inf)
    if right is not None:
        table = table.masked_fill(distance > right, -torch.inf)
    return table[None, None]


def dense(relative_bias: Tensor, seqlen_q: int, seqlen_k: int) -> Tensor:
    """The bias of a table, materialized: for other backends, tests and pictures.

    Args:
        relative_bias: ({B|1}, {H|Hkv|1}, 2R + 1), or of a grid of h x w tokens ({B|1}, {H|Hkv|1}, 2h - 1, 2w - 1).
        seqlen_q, seqlen_k: Sq and Sk; for a grid both h * w.

    Returns:
        ({B|1}, {H|Hkv|1}, Sq, Sk) in the table's dtype.

    Raises:
        TypeError, ValueError: a table that is not floating or has another shape, lengths that are not ints or are not
            those of the grid.
    """
    require_floating("relative_bias", relative_bias)
    if relative_bias.ndim not in (3, 4) or any(size % 2 == 0 for size in relative_bias.shape[2:]):
        raise ValueError(
            "relative_bias must be ({B|1}, {H|Hkv|1}, 2R + 1) or ({B|1}, {H|Hkv|1}, 2h - 1, 2w - 1), got shape "
            f"{shape_of(relative_bias)}"
        )
    seqlen_q, seqlen_k = require_count("seqlen_q", seqlen_q), require_count("seqlen_k", seqlen_k)
    rows = torch.arange(seqlen_q, device=relative_bias.device)[:, None]
    keys = torch.arange(seqlen_k, device=relative_bias.device)
    if relative_bias.ndim == 4:
        height, width = ((size + 1) // 2 for size in relative_bias.shape[2:])
        if not seqlen_q == seqlen_k == height * width:
            raise ValueError(
                f"seqlen_q and seqlen_k must be the {height * width} tokens of a grid of {height} x {width}, got "
                f"{seqlen_q} and {seqlen_k}"
            )
        down, right = rows // width - keys // width, rows % width - keys % width
        return entries_at(relative_bias, down + height - 1, right + width - 1)
    radius = relative_bias.shape[2] // 2
    return entries_at(relative_bias, (keys - rows - (seqlen_k - seqlen_q)).clamp(-radius, radius) + radius)


def shifted(relative_bias: Tensor, shift: int | Tensor, max_shift: int | None = None) -> Tensor:
    """The table whose entry of distance d is that of d + shift. Its radius is larger by `max_shift`, a bound on
    |shift| and by default |shift| itself, so that its clamped entries are those of `relative_bias`."""
    radius = relative_bias.shape[2] // 2
    distance = distances(radius + (abs(shift) if max_shift is None else max_shift), relative_bias.device)
    return entries_at(relative_bias, (distance + shift).clamp(-radius, radius) + radius)


def entries_at(relative_bias: Tensor, *indices: Tensor) -> Tensor:
    """The entries of a table at `indices` of its last dimensions, in its dtype. The gradient of an entry is summed in
    float32: PyTorch sums that of an index in the tensor's dtype, and a sum of 16 bits stops growing."""
    return wide(relative_bias)[(slice(None), slice(None), *indices)].to(relative_bias.dtype)


def wide(parameters: Tensor) -> Tensor:
    """In float32, or float64."""
    return parameters.to(accumulation_dtype(parameters.dtype))


def require_parameters(name: str, parameters: object, ndims: tuple[int, ...], layout: str) -> None:
    if isinstance(parameters, torch.nn.Embedding):
        raise TypeError(f"{name} must be a torch.Tensor, got Embedding: pass {name}.weight")
    require_floating(name, parameters)
    if parameters.ndim not in ndims:
        raise ValueError(f"{name} must be {layout}, got shape {shape_of(parameters)}")
