"""Attention over a sequence that is sharded over ranks."""

from __future__ import annotations

import functools
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Union

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from .. import checks
from ..arguments import check_cu_seqlens, is_host_readable, require_bool, require_count, require_tensor, shape_of
from ..attend import add_row_bias, autocast, default_scale, kernel_rows, kernels_for, without_padding
from ..biases import hides
from ..broadcast import expand_shared
from ..call import Call as LocalCall
from ..interface import flash_dmattn_func
from ..masks import SPARSE, KeyIntervalMask, KeyLists, as_mask
from ..masks.topk import refuse_nan
from . import halo
from .dense import GatheredAttention, dense_problem
from .groups import Group, exchange_statements, resolve
from .layout import LAYOUTS, check_layout, zigzag_chunk_length
from .shards import Shards

Mask = Union[Tensor, KeyIntervalMask, None]

# How a mask or bias lies on the ranks, in the order in which it is looked for.
KINDS = ("key", "pair", "row")  # (.., 1, S_r), (.., S_r, S) and (.., {S_r|1}, 1)
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@torch.compiler.disable
def context_parallel_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Mask = None,
    attn_bias: Tensor | None = None,
    *,
    group: Group = None,
    softmax_scale: float | None = None,
    is_causal: bool = False,
    softcap: float = 0.0,
    deterministic: bool = False,
    return_lse: bool = False,
    window_size: int | None = None,
    sparse: str = "auto",
    cu_seqlens: Tensor | None = None,
    layout: str = "contiguous",
    fixed_shapes: bool | None = None,
    shard_lengths: Sequence[int] | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`flash_dmattn_func` of a sequence of S rows and keys, of which rank r of R holds S_r; each gets its rows' part.

    The gradients of keys, values and biases come back to the ranks that hold them; of a bias ({B|1}, {H|Hkv|1}, 1, 1),
    which all ranks hold alike, each gets the part of its own rows. Every rank of the group must make the call, and its
    backward, with the same arguments but for the tensors; a rank that refuses its arguments makes all raise. What fails
    later, as for want of memory, the others learn from the group's time-out.

    Causal top-w masks (`window_size`) and every KeyIntervalMask (sliding windows, documents) fetch the keys that the
    rows see, and nothing else; all other calls gather keys and values a few heads at a time (docs/parallel.md).

    Args:
        query: (B, S_r, H, D), in the dtypes of `flash_dmattn_func`. With cu_seqlens (S_r, H, D).
        key: (B, S_r, Hkv, D); as many keys as rows. With cu_seqlens (S_r, Hkv, D).
        value: as key.
        attn_mask: a KeyIntervalMask ({B|1}, {H|Hkv|1}, S_r) of the own keys, whose starts and ends count the rows of
            the whole sequence (`shard` takes a part of a whole one); or bool, True = visible, one a key
            ({B|1}, {H|Hkv|1}, 1, S_r) of the own keys, or one a pair ({B|1}, {H|Hkv|1}, S_r, S) of the own rows and
            all keys in the order of the sequence, or one a row ({B|1}, {H|Hkv|1}, {S_r|1}, 1). With cu_seqlens
            (S_r, {H|Hkv|1}), bool or a KeyIntervalMask that counts the rows of each key's own sequence.
        attn_bias: in the shapes of a bool mask, in query's dtype; one number a key may be float32.
        group: a torch.distributed.ProcessGroup, a DeviceMesh of one dimension, or None: all processes.
        softmax_scale, is_causal, softcap, deterministic, sparse: as in `flash_dmattn_func`.
        return_lse: also return lse, which is differentiable.
        window_size: the causal dynamic mask, as in `flash_dmattn_func`: each rank selects for its own rows, among its
            own keys and the window_size best of each rank before it. With cu_seqlens each sequence has its own
            window_size keys.
        cu_seqlens: int32 (sequences + 1), from 0 to S: packed sequences of different lengths, which may cross the
            borders of shards. The same on every rank; on the CPU the values are looked at.
        layout: "contiguous", shards of any lengths, rank by rank; or "zigzag" (`shard`, `unshard`, `positions`), which
            gives each rank as much causal work: for calls that gather.
        fixed_shapes: with window_size, whether room is sent for as many keys as there could be, so that nothing waits
            for the GPU and a CUDA graph can be captured: R - 1 times window_size keys a head at most. None: with two
            ranks, where that is no more than is needed.
        shard_lengths: S_r of every rank. None: the ranks tell each other, and compare their arguments, which takes the
            hosts an exchange. With them nothing is compared: arguments that do not fit are undefined behaviour, and a
            mask or bias (.., 1, 1) on a rank of one row is one a key.

    Returns:
        out (B, S_r, H, D), with cu_seqlens (S_r, H, D); with return_lse (out, lse), lse (B, H, S_r) or (H, S_r),
        float32 (float64 for float64), -inf where a row sees nothing.

    Raises:
        ValueError: a shape or value that does not fit, or that is not the same on every rank.
        TypeError: a dtype or type that does not fit.
        RuntimeError: tensors on different devices, kernels that were not built, torch.distributed not initialized;
            RankError, one of them, where another rank has refused its arguments.
    """
    group = resolve(group)
    error, call, stated = None, None, NOTHING
    try:
        call = checked_call(
            *(query, key, value, attn_mask, attn_bias, softmax_scale, is_causal, softcap, deterministic, return_lse),
            *(window_size, sparse, cu_seqlens, layout, fixed_shapes),
        )
        stated = statement_of(call)
    except Exception as caught:  # whatever it is, the others must not wait for this rank
        if shard_lengths is not None:
            raise
        error = caught
    if shard_lengths is None:
        lengths, mask_kind, bias_kind = agreement(exchange_statements(group, stated, error))
    else:
        lengths = check_lengths(shard_lengths, stated.rows, group)
        mask_kind, bias_kind = kinds((stated,), sum(lengths))
    check_whole(call, lengths)
    out, lse = attend(call, Shards(group, lengths), mask_kind, bias_kind)
    if cu_seqlens is not None:
        out, lse = out[0], lse[0]
    return (out, lse) if return_lse else out


@dataclass(frozen=True)
class Call:
    """The arguments of a call, in the layout of fixed length."""

    query: Tensor  # (B, S_r, H, D)
    key: Tensor
    value: Tensor
    mask: Mask  # bool (.., .., .., ..), or a KeyIntervalMask, of variable length where the call is
    bias: Tensor | None
    softmax_scale: float
    is_causal: bool
    softcap: float
    deterministic: bool
    window_size: int | None
    sparse: str
    cu_seqlens: Tensor | None
    layout: str
    fixed_shapes: bool | None


def checked_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask,
    bias: Tensor | None,
    softmax_scale: float | None,
    is_causal: bool,
    softcap: float,
    deterministic: bool,
    return_lse: bool,
    window_size: int | None,
    sparse: str,
    cu_seqlens: Tensor | None,
    layout: str,
    fixed_shapes: bool | None,
) -> Call:
    """What one rank can find wrong with its arguments."""
    for name, tensor in (("query", query), ("key", key), ("value", value), ("attn_mask", mask), ("attn_bias", bias)):
        if isinstance(tensor, DTensor):
            raise TypeError(f"{name} must be the rank's own part in a plain tensor, got a DTensor: take its to_local()")
    kernels_for(query)
    scalars = (softmax_scale, is_causal, softcap, deterministic)
    options = {"return_lse": return_lse, "window_size": window_size, "sparse": sparse}
    checks.check_options(LocalCall(query, key, value, mask, bias, *scalars, **options))
    check_layout(layout)
    if fixed_shapes is not None:
        require_bool("fixed_shapes", fixed_shapes)
    if isinstance(mask, KeyLists):
        raise TypeError("attn_mask must be bool or a KeyIntervalMask, got KeyLists, which are for one rank's rows")
    query, key, value, bias = autocast(query, key, value, bias)
    is_varlen = cu_seqlens is not None
    if is_varlen:
        check_cu_seqlens("cu_seqlens", cu_seqlens, query, "query")
        query, key, value, mask, bias = as_fixed(query, key, value, mask, bias)
    check_shapes(query, key, value, mask, bias)
    if query.shape[1] != key.shape[1]:
        raise ValueError(f"a rank must have as many keys as rows, got {query.shape[1]} rows and {key.shape[1]} keys")
    if window_size is not None:
        require_count("window_size", window_size)
        checks.check_window(mask, bias, query.shape[0], key.shape[1], is_causal)
        refuse_nan(bias)
    if layout == "zigzag" and (window_size is not None or isinstance(mask, KeyIntervalMask) or is_varlen):
        raise ValueError(
            "layout='zigzag' is for calls without window_size, KeyIntervalMask and cu_seqlens: those fetch few keys, "
            "and their work is as even in contiguous shards"
        )
    if is_varlen and bias is not None and bias.shape[3] != key.shape[1]:
        raise ValueError(f"attn_bias must have one number a key with cu_seqlens, got shape {shape_of(bias)}")
    return Call(
        *(query, key, value, mask, bias, default_scale(softmax_scale, query), bool(is_causal), softcap),
        *(bool(deterministic), window_size, sparse, cu_seqlens, layout, fixed_shapes),
    )


def as_fixed(query: Tensor, key: Tensor, value: Tensor, mask: Mask, bias: Tensor | None) -> tuple:
    """Packed sequences as one batch element: (S_r, heads, ..) to (1, S_r, heads, ..)."""
    for name, rows in (("query", query), ("key", key), ("value", value)):
        require_tensor(name, rows)
        if rows.ndim != 3:
            raise ValueError(f"{name} must be (S_r, heads, D) with cu_seqlens, got shape {shape_of(rows)}")

    def of_keys(name: str, pairs):
        if isinstance(pairs, Tensor):
            if pairs.ndim != 2:
                raise ValueError(f"{name} must be (S_r, {{H|Hkv|1}}) with cu_seqlens, got shape {shape_of(pairs)}")
            return pairs.T[None, :, None]
        return pairs

    return query[None], key[None], value[None], of_keys("attn_mask", mask), of_keys("attn_bias", bias)


def check_shapes(query: Tensor, key: Tensor, value: Tensor, mask: Mask, bias: Tensor | None) -> None:
    """All but how many rows and keys of the whole a mask or bias is for, which the ranks find out together."""
    checks.check_tensors(LocalCall(query, key, value), checks.NO_MASK, None)

    def check_beside(pairs: Mask, mask: Mask, bias: Tensor | None) -> None:
        keys = key
        if isinstance(pairs, Tensor) and pairs.ndim == 4 and pairs.shape[3] not in (1, key.shape[1]):
            keys = key.new_empty(1).expand(key.shape[0], pairs.shape[3], *key.shape[2:])
        operands = checks.NO_MASK if mask is None else as_mask(mask).operands()
        checks.check_tensors(LocalCall(query, keys, keys), operands, bias)

    if isinstance(mask, KeyIntervalMask):
        mask = mask.sequence(0, mask.keys) if mask.is_varlen else mask
        if mask.keys != key.shape[1]:
            raise ValueError(
                f"attn_mask must be of the rank's own {key.shape[1]} keys, got {mask.keys}: "
                "flash_dmattn.parallel.shard takes them of a whole mask"
            )
    check_beside(mask, mask, None)
    check_beside(bias, None, bias)


# What the ranks tell each other


class Statement(NamedTuple):
    """A call in numbers: first what must be the same on all ranks, then what each has of its own."""

    dtype_of_query: int
    batch_size: int
    heads_of_query: int
    heads_of_key: int
    head_dimension: int
    softmax_scale: int  # as all floats by its bits
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
    rows_for_which_attn_mask_was_made: int
    dtype_of_attn_bias: int
    batch_size_of_attn_bias: int
    heads_of_attn_bias: int
    gradients_of_query_key_value_and_bias: int  # which are needed: collectives of the backward need all ranks

    rows: int
    mask_rows: int
    mask_keys: int
    bias_rows: int
    bias_keys: int


NOTHING = Statement(*(0,) * len(Statement._fields))
MUST_AGREE = Statement._fields[: Statement._fields.index("rows")]
MASK_TYPES = ("none", "bool", "KeyIntervalMask", "KeyIntervalMask of variable length")
MEANINGS = {
    **dict.fromkeys(("dtype_of_query", "dtype_of_attn_bias"), lambda i: DTYPES[i] if i >= 0 else None),
    **dict.fromkeys(("softmax_scale", "softcap"), lambda bits: struct.unpack("<d", struct.pack("<q", bits))[0]),
    **dict.fromkeys(("is_causal", "deterministic"), bool),
    "sparse": SPARSE.__getitem__,
    "layout": LAYOUTS.__getitem__,
    "type_of_attn_mask": MASK_TYPES.__getitem__,
    "gradients_of_query_key_value_and_bias": lambda bits: f"{bits:04b}"[::-1],
    "cu_seqlens": lambda checksum: f"some with the checksum {checksum}" if checksum >= 0 else "none",
}


def statement_of(call: Call) -> Statement:
    def bits(number: float) -> int:
        return struct.unpack("<q", struct.pack("<d", number))[0]

    mask, bias = call.mask, call.bias
    is_bool, is_intervals = isinstance(mask, Tensor), isinstance(mask, KeyIntervalMask)
    mask_type = 0 if mask is None else 1 if is_bool else 3 if mask.is_varlen else 2
    leaves = (call.query, call.key, call.value, bias)
    needed = [torch.is_grad_enabled() and leaf is not None and leaf.requires_grad for leaf in leaves]

    def optional(number: int | None) -> int:
        return -1 if number is None else min(int(number), 1 << 62)

    return Statement(
        *(DTYPES.index(call.query.dtype), call.query.shape[0], call.query.shape[2], call.key.shape[2]),
        *(call.query.shape[3], bits(call.softmax_scale), int(call.is_causal), bits(call.softcap)),
        *(int(call.deterministic), optional(call.window_size), SPARSE.index(call.sparse), checksum(call.cu_seqlens)),
        *(LAYOUTS.index(call.layout), optional(call.fixed_shapes)),
        *(mask_type, 1 if mask_type in (0, 3) else mask.shape[0], 1 if mask is None else mask.shape[1]),
        *(optional(mask.rows if is_intervals else None), -1 if bias is None else DTYPES.index(bias.dtype)),
        *((1, 1) if bias is None else bias.shape[:2]),
        sum(is_needed << i for i, is_needed in enumerate(needed)),
        call.query.shape[1],
        *(mask.shape[2:] if is_bool else (-1, -1)),
        *((-1, -1) if bias is None else bias.shape[2:]),
    )


def checksum(cu_seqlens: Tensor | None) -> int:
    """-1 for none; of values that cannot be looked at without waiting, how many they are."""
    if cu_seqlens is None:
        return -1
    values = cu_seqlens.tolist() if is_host_readable(cu_seqlens) else [len(cu_seqlens)]
    return zlib.crc32(struct.pack(f"<{len(values)}q", *values))


@functools.lru_cache(maxsize=256)
def agreement(stated: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], str | None, str | None]:
    """The lengths of all shards, and how mask and bias lie on them; the same on all ranks, as is the error."""
    statements = tuple(Statement(*numbers) for numbers in stated)
    for name in MUST_AGREE:
        values = [getattr(statement, name) for statement in statements]
        differs = next((rank for rank, value in enumerate(values) if value != values[0]), None)
        if differs is not None:
            meaning = MEANINGS.get(name, lambda value: value if value >= 0 else None)
            raise ValueError(
                f"every rank of the group must be given the same {name.replace('_', ' ')}, "
                f"got {meaning(values[0])} on rank 0 and {meaning(values[differs])} on rank {differs}"
            )
    lengths = tuple(statement.rows for statement in statements)
    return lengths, *kinds(statements, sum(lengths))


def kinds(statements: Sequence[Statement], seqlen: int) -> tuple[str | None, str | None]:
    """How the mask and the bias lie on the ranks."""
    return kind("attn_mask", "mask", statements, seqlen), kind("attn_bias", "bias", statements, seqlen)


def kind(name: str, prefix: str, statements: Sequence[Statement], seqlen: int) -> str | None:
    """The first of KINDS that the shapes on all ranks are of: with one row, say, a shape may be of several."""
    if name == "attn_mask" and statements[0].type_of_attn_mask in (2, 3):
        return "intervals"
    shapes = [(getattr(stated, f"{prefix}_rows"), getattr(stated, f"{prefix}_keys")) for stated in statements]
    if shapes[0] == (-1, -1):
        return None

    def is_of(kind: str, rows: int, keys: int, own: int) -> bool:
        fits = {"key": (rows == 1 and keys == own), "pair": (rows == own and keys == seqlen), "row": keys == 1}
        return fits[kind] and rows in (1, own)

    for kind in KINDS:
        if all(is_of(kind, *shape, stated.rows) for shape, stated in zip(shapes, statements)):
            return kind
    rows = [stated.rows for stated in statements]
    raise ValueError(
        f"{name} must be (.., 1, S_r), one number a key of the rank, (.., S_r, S), one a pair of a row of the rank and "
        f"any key, or (.., {{S_r|1}}, 1), with S_r = {rows} and S = {seqlen} here, got the last two dimensions {shapes}"
    )


def check_lengths(lengths: Sequence[int], own: int, group: dist.ProcessGroup) -> tuple[int, ...]:
    lengths = tuple(lengths)
    for length in lengths:
        require_count("shard_lengths", length, "ints")
    if len(lengths) != group.size() or lengths[group.rank()] != own:
        raise ValueError(
            f"shard_lengths must be the rows of {group.size()} ranks, of which rank {group.rank()} has {own}, "
            f"got {lengths}"
        )
    return lengths


def check_whole(call: Call, lengths: tuple[int, ...]) -> None:
    """What can be found wrong when the lengths of all shards are known: by every rank."""
    seqlen = sum(lengths)
    if isinstance(call.mask, KeyIntervalMask):
        call.mask.require_rows("attn_mask", seqlen)
    if call.cu_seqlens is not None and is_host_readable(call.cu_seqlens):
        check_cu_seqlens("cu_seqlens", call.cu_seqlens, total=seqlen)
    if call.layout == "zigzag":
        zigzag_chunk_length(seqlen, len(lengths))
        if len(set(lengths)) > 1:
            raise ValueError(f"layout='zigzag' needs shards of the same length, got {list(lengths)}")


# What is computed


def attend(call: Call, shards: Shards, mask_kind: str | None, bias_kind: str | None) -> tuple[Tensor, Tensor]:
    """(out, lse) of fixed length."""
    is_varlen = call.cu_seqlens is not None
    if call.window_size is not None and not is_varlen and call.window_size >= sum(shards.lengths):
        call = replace(call, window_size=None)  # no row has more keys than causality gives it
    if shards.size == 1 and not is_varlen:
        return attend_here(call, call.key, call.value, call.mask, call.bias, call.window_size)
    if call.query.shape[0] == 0 or call.query.shape[2] == 0:  # no rank has anything
        out, lse = attend_here(call, call.key, call.value, None, None)
        # Gradients of the bias are zero, not None.
        return out if call.bias is None else out + call.bias[..., :0].sum().to(out.dtype), lse
    if call.window_size is not None or is_varlen or (mask_kind == "intervals" and bias_kind != "pair"):
        return attend_fetched(call, shards, bias_kind)
    return attend_gathered(call, shards, mask_kind, bias_kind)


def attend_here(
    call: Call, key: Tensor, value: Tensor, mask: Mask, bias: Tensor | None, window_size: int | None = None
) -> tuple[Tensor, Tensor]:
    """Of this rank's rows and the keys that it has here."""
    has_mask = mask is not None or window_size is not None
    return flash_dmattn_func(
        *(call.query, key, value, mask, bias, call.softmax_scale, call.is_causal, call.softcap, call.deterministic),
        return_lse=True,
        window_size=window_size,
        sparse=call.sparse if has_mask else "auto",
    )


def attend_fetched(call: Call, shards: Shards, bias_kind: str | None) -> tuple[Tensor, Tensor]:
    """Where rows see few keys of other ranks: by a halo."""
    bias, key_heads = call.bias, call.key.shape[2]
    own = mask = None
    if call.window_size is None:
        own = intervals_of(call, shards)
        plan = halo.plan_of_intervals(shards, own, key_heads)
    else:
        fixed_shapes = shards.size == 2 if call.fixed_shapes is None else call.fixed_shapes
        plan, mask = halo.plan_of_selection(shards, bias, call.window_size, call.cu_seqlens, key_heads, fixed_shapes)
    rows = [call.key, call.value]
    if bias_kind == "key":
        # Of batch elements and heads that have keys of their own, the bias has numbers of its own.
        sizes = max(bias.shape[0], plan.batches), max(bias.shape[1], plan.heads)
        bias = expand_shared(bias, *sizes).expand(*sizes, -1, -1)
        rows.append(bias[:, :, 0].transpose(1, 2))
    if own is not None:
        rows.append(halo.interval_rows(own.intervals))
    key, value, *rest = halo.Fetch.apply(plan, *rows)
    if own is not None:
        mask = halo.mask_of_rows(shards, rest.pop(), own)
    if rest:
        bias = rest.pop().transpose(1, 2).unsqueeze(2).contiguous()
    return attend_here(call, key, value, mask, bias)


def intervals_of(call: Call, shards: Shards) -> KeyIntervalMask:
    """Which rows of the whole sequence see each of the own keys, as far as that is an interval."""
    mask = call.mask
    place = torch.arange(shards.first, shards.first + shards.own, dtype=torch.int32, device=call.key.device)
    keys_per_row, scattered = None, False
    if call.cu_seqlens is None:
        start, end = mask.intervals
    else:
        sequence = torch.searchsorted(call.cu_seqlens.contiguous(), place, right=True) - 1
        first, behind = call.cu_seqlens[sequence][None, None], call.cu_seqlens[sequence + 1][None, None]
        start, end = first, behind
        if isinstance(mask, KeyIntervalMask):
            start, end = (rows.T[None] + first for rows in mask.intervals)
            start, end = torch.maximum(start, first), torch.minimum(end, behind)
        elif mask is not None:
            end = end.where(mask[:, :, 0], 0)
    if isinstance(mask, KeyIntervalMask):
        keys_per_row, scattered = mask.keys_per_row, mask.scattered
    start = torch.maximum(start, place) if call.is_causal else start
    return KeyIntervalMask._of(torch.stack(torch.broadcast_tensors(start, end)), keys_per_row, scattered)


def attend_gathered(call: Call, shards: Shards, mask_kind: str | None, bias_kind: str | None) -> tuple[Tensor, Tensor]:
    """Where rows see most keys: keys and values are gathered."""
    query, bias, row_bias = call.query, call.bias, None
    if bias_kind == "row":  # as in attend.py
        row_bias, bias, bias_kind = expand_shared(bias, query.shape[0], query.shape[2]), None, None
        hidden_rows = hides(row_bias)
        query = query.masked_fill(hidden_rows.transpose(1, 2), 0)
    dense, bias = dense_problem(
        *(shards, call.layout == "zigzag", call.mask, mask_kind, bias, bias_kind, call.is_causal),
        softmax_scale=float(call.softmax_scale),
        softcap=float(call.softcap),
        deterministic=call.deterministic,
        sparse=call.sparse,
    )
    out, lse = GatheredAttention.apply(dense, *map(kernel_rows, (query, call.key, call.value)), bias)
    out = without_padding(out, query.shape[-1])
    return (out, lse) if row_bias is None else add_row_bias(out, lse, row_bias, hidden_rows)
