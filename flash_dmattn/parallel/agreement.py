"""What the ranks exchange before a call: its signature as integers, which must agree, and the lengths of the shards."""

from __future__ import annotations

import functools
import struct
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..arguments import is_host_readable
from ..masks import SPARSE, KeyIntervalMask
from .call import ShardedCall
from .layout import LAYOUTS

# How a mask or bias is sharded: key (.., 1, S_r), dense (.., S_r, S), row (.., {S_r|1}, 1). The first that fits counts.
KINDS = ("key", "dense", "row")
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
MASK_TYPES = ("none", "bool", "KeyIntervalMask", "KeyIntervalMask of variable length")


class CallSignature(NamedTuple):
    """A call as integers. The fields before `rows` must be equal on all ranks; error messages use their names."""

    dtype_of_query: int
    batch_size: int
    heads_of_query: int
    heads_of_key: int
    head_dimension: int
    head_dimension_of_value: int
    softmax_scale: int  # the bits of a float64, as softcap
    is_causal: int
    softcap: int
    deterministic: int
    window_size: int
    sparse: int
    cu_seqlens: int
    layout: int
    fixed_shapes: int
    type_of_attn_mask: int
    batch_size_of_attn_mask: int
    heads_of_attn_mask: int
    rows_of_attn_mask: int  # of a KeyIntervalMask
    dtype_of_attn_bias: int
    batch_size_of_attn_bias: int
    heads_of_attn_bias: int
    batch_size_of_relative_bias: int
    heads_of_relative_bias: int
    entries_of_relative_bias: int
    gradients_of_query_key_value_and_biases: int  # one bit each: the collectives of the backward need all ranks

    rows: int
    mask_rows: int
    mask_keys: int
    bias_rows: int
    bias_keys: int


EMPTY_SIGNATURE = CallSignature(*(0,) * len(CallSignature._fields))
MUST_AGREE = CallSignature._fields[: CallSignature._fields.index("rows")]
DECODERS = {
    **dict.fromkeys(("dtype_of_query", "dtype_of_attn_bias"), lambda i: DTYPES[i] if i >= 0 else None),
    **dict.fromkeys(("softmax_scale", "softcap"), lambda bits: struct.unpack("<d", struct.pack("<q", bits))[0]),
    **dict.fromkeys(("is_causal", "deterministic"), bool),
    "sparse": SPARSE.__getitem__,
    "layout": LAYOUTS.__getitem__,
    "type_of_attn_mask": MASK_TYPES.__getitem__,
    "gradients_of_query_key_value_and_biases": lambda bits: f"{bits:05b}"[::-1],
    "cu_seqlens": lambda checksum: f"cu_seqlens with checksum {checksum}" if checksum >= 0 else "none",
}


def signature_of(call: ShardedCall) -> CallSignature:
    def bits(number: float) -> int:
        return struct.unpack("<q", struct.pack("<d", number))[0]

    mask, bias = call.attn_mask, call.attn_bias
    is_bool, is_intervals = isinstance(mask, Tensor), isinstance(mask, KeyIntervalMask)
    mask_type = 0 if mask is None else 1 if is_bool else 3 if mask.is_varlen else 2
    leaves = (call.query, call.key, call.value, bias, call.relative_bias)
    needs_grad = [torch.is_grad_enabled() and leaf is not None and leaf.requires_grad for leaf in leaves]

    def optional(number: int | None) -> int:
        return -1 if number is None else min(int(number), 1 << 62)

    return CallSignature(
        *(DTYPES.index(call.query.dtype), call.query.shape[0], call.query.shape[2], call.key.shape[2]),
        *(call.query.shape[3], call.value.shape[3], bits(call.softmax_scale), int(call.is_causal), bits(call.softcap)),
        *(int(call.deterministic), optional(call.window_size), SPARSE.index(call.sparse), checksum(call.cu_seqlens)),
        *(LAYOUTS.index(call.layout), optional(call.fixed_shapes)),
        *(mask_type, 1 if mask_type in (0, 3) else mask.shape[0], 1 if mask is None else mask.shape[1]),
        *(optional(mask.rows if is_intervals else None), -1 if bias is None else DTYPES.index(bias.dtype)),
        *((1, 1) if bias is None else bias.shape[:2]),
        *((1, 1, -1) if call.relative_bias is None else call.relative_bias.shape),
        sum(is_needed << i for i, is_needed in enumerate(needs_grad)),
        call.query.shape[1],
        *(mask.shape[2:] if is_bool else (-1, -1)),
        *((-1, -1) if bias is None else bias.shape[2:]),
    )


def checksum(cu_seqlens: Tensor | None) -> int:
    """-1 for None. Values that are not readable without synchronization are replaced by their number."""
    if cu_seqlens is None:
        return -1
    values = cu_seqlens.tolist() if is_host_readable(cu_seqlens) else [len(cu_seqlens)]
    return zlib.crc32(struct.pack(f"<{len(values)}q", *values))


@functools.lru_cache(maxsize=256)
def agree(gathered: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], str | None, str | None]:
    """The lengths of all shards, the kind of the mask and that of the bias, from the signatures of all ranks.

    Raises the same ValueError on all ranks if the signatures differ.
    """
    signatures = tuple(CallSignature(*numbers) for numbers in gathered)
    for name in MUST_AGREE:
        values = [getattr(signature, name) for signature in signatures]
        differs = next((rank for rank, value in enumerate(values) if value != values[0]), None)
        if differs is not None:
            decode = DECODERS.get(name, lambda value: value if value >= 0 else None)
            raise ValueError(
                f"every rank of the group must pass the same {name.replace('_', ' ')}, "
                f"got {decode(values[0])} on rank 0 and {decode(values[differs])} on rank {differs}"
            )
    lengths = tuple(signature.rows for signature in signatures)
    return lengths, *kinds_of(signatures, sum(lengths))


def kinds_of(signatures: Sequence[CallSignature], seqlen: int) -> tuple[str | None, str | None]:
    """The kinds of the mask and of the bias: one of KINDS, "intervals" for a KeyIntervalMask, or None."""
    is_intervals = signatures[0].type_of_attn_mask in (2, 3)
    mask_kind = "intervals" if is_intervals else kind_of("attn_mask", "mask", signatures, seqlen)
    return mask_kind, kind_of("attn_bias", "bias", signatures, seqlen)


def kind_of(name: str, prefix: str, signatures: Sequence[CallSignature], seqlen: int) -> str | None:
    """The first of KINDS that fits the shapes on all ranks; a shard of one row, for example, can fit several."""
    shapes = [(getattr(signature, f"{prefix}_rows"), getattr(signature, f"{prefix}_keys")) for signature in signatures]
    if shapes[0] == (-1, -1):
        return None

    def fits(kind: str, rows: int, keys: int, length: int) -> bool:
        if kind == "row":
            return keys == 1 and rows in (1, length)
        return (rows, keys) == ((1, length) if kind == "key" else (length, seqlen))

    for kind in KINDS:
        if all(fits(kind, *shape, signature.rows) for shape, signature in zip(shapes, signatures)):
            return kind
    lengths = [signature.rows for signature in signatures]
    raise ValueError(
        f"{name} must be (.., 1, S_r) for the keys of the rank, (.., S_r, S) for its rows and all keys, or "
        f"(.., {{S_r|1}}, 1), with S_r = {lengths} and S = {seqlen}, got the last two dimensions {shapes}"
    )
