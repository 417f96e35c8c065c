"""Attention as Triton kernels: fp16, bf16 and fp32 on a GPU, or on the CPU under Triton's interpreter.

Each program owns its outputs, so there are no atomics and every gradient is bitwise reproducible:

    _forward_kernel      a tile of query rows     out, lse
    _delta_kernel        a tile of query rows     delta_i = <do_i, o_i> - dlse_i
    _dq_kernel           a tile of query rows     dq; dbias for a dense bias without broadcast dimensions
    _dkdv_kernel         a tile of keys           dk, dv; the column sums of dx for a key bias
    _dbias_kernel        a tile of the bias       dbias for a dense bias that batch elements or heads share

All of them compute the scores and their visibility with `_scores`.
"""

from __future__ import annotations

import functools
import os
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..arguments import names, shape_of
from ..biases import least
from ..ops.list_sizes import is_per_key

try:
    import triton
    import triton.language as tl
    from triton import jit

    INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
except ImportError:
    triton = tl = INTERPRETED = None

    def jit(function):
        return function


NAME = "triton"
SPARSE_MASKS = False
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def why_unavailable() -> str | None:
    if triton is None:
        return "triton is not installed"
    if not INTERPRETED.value and not torch.cuda.is_available():
        return "no GPU is visible, and TRITON_INTERPRET was not 1 when the backend was imported"
    return why_not_interpreted() if INTERPRETED.value else None


@jit
def _loop_kernel(end):
    for _ in range(0, end):
        pass


@functools.cache
def why_not_interpreted() -> str | None:
    """Triton's interpreter before 3.7 uses arrays of one element as loop bounds, which NumPy from 2.5 on rejects."""
    try:
        _loop_kernel[(1,)](1)
    except Exception as error:
        import numpy

        return (
            f"the interpreter of Triton {triton.__version__} does not work with NumPy {numpy.__version__} ({error}); "
            "install triton>=3.7 or numpy<2.5"
        )
    return None


# ---------------------------------------------------------------------------------------------------------------------
# Device functions. A tile of scores is (rows, keys) or (keys, rows); the index tensors `rows` and `keys` broadcast to
# it. Index arithmetic with strides is 64-bit.


@jit
def _dot(a, b):
    if INTERPRETED:
        # numpy has no bfloat16. Widening is exact, as are the products of a tensor core.
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@jit
def _add_product(total, a, b):
    """total + a b.

    Triton accumulates an added product into `total`: a gradient would be a chain of as many additions as it has rows,
    which costs float32 a digit. A subtracted product has its own accumulator.
    """
    if a.dtype == tl.float32:
        return total - _dot(-a, b)
    else:
        return total + _dot(a, b)


@jit
def _tanh(y):
    decay = tl.exp(-2.0 * tl.abs(y))
    far = (1.0 - decay) / (1.0 + decay)
    # Near zero 1 - decay cancels, so the odd series is used.
    z = y * y
    near = 1.0 + z * (-1 / 3 + z * (2 / 15 + z * (-17 / 315 + z * (62 / 2835 + z * (-1382 / 155925)))))
    return tl.where(z < 0.16, y * near, tl.where(y < 0, -far, far))


@jit
def _at_head(matrix, b, h):
    """(pointer, row stride) of the (seqlen, head_dim) matrix of batch `b` and head `h`."""
    base, strides = matrix
    return base + b.to(tl.int64) * strides[0] + h.to(tl.int64) * strides[2], strides[1]


@jit
def _row_pointers(matrix, rows, seqlen, call):
    """(pointers, whether they are inside) of (len(rows), BLOCK_D) of a (seqlen, HEAD_DIM) matrix of `_at_head`."""
    base, row_stride = matrix
    dims = tl.arange(0, call.BLOCK_D)
    inside = (rows < seqlen)[:, None] & (dims < call.HEAD_DIM)[None, :]
    return base + rows.to(tl.int64)[:, None] * row_stride + dims[None, :], inside


@jit
def _load_rows(matrix, rows, seqlen, call):
    """(len(rows), BLOCK_D); zero outside of the matrix, without reading there."""
    pointers, inside = _row_pointers(matrix, rows, seqlen, call)
    return tl.load(pointers, mask=inside, other=0.0)


@jit
def _store_rows(matrix, rows, seqlen, tile, call):
    pointers, inside = _row_pointers(matrix, rows, seqlen, call)
    tl.store(pointers, tile.to(pointers.dtype.element_ty), mask=inside)


@jit
def _store_dbias(dbias, index, rows, keys, tile, call):
    """Stores a tile of matrix `index` (Sq, Sk) of dbias."""
    pointers = dbias + (index.to(tl.int64) * call.seqlen_q + rows)[:, None] * call.seqlen_k + keys[None, :]
    inside = (rows < call.seqlen_q)[:, None] & (keys < call.seqlen_k)[None, :]
    tl.store(pointers, tile.to(dbias.dtype.element_ty), mask=inside)


@jit
def _scores_at_head(scores, b, h, KIND: tl.constexpr):
    """(pointer, row stride, key stride) of a mask's or bias's matrix."""
    base, strides = scores
    if KIND != "none":
        base += (b // strides[5]).to(tl.int64) * strides[0] + (h // strides[4]).to(tl.int64) * strides[1]
    return base, strides[2], strides[3]


@jit
def _load_scores(view, rows, keys, call, other, KIND: tl.constexpr, EDGE: tl.constexpr):
    """The tile of a dense mask or bias, or the one row of a key mask or key bias; `other` for keys past the end.

    A row past the end reads the last row: its results are dropped, and the scores need no bounds check.
    """
    base, row_stride, key_stride = view
    pointers = base + keys.to(tl.int64) * key_stride
    if KIND == "dense":
        pointers += tl.minimum(rows, call.seqlen_q - 1).to(tl.int64) * row_stride
    if EDGE:
        return tl.load(pointers, mask=keys < call.seqlen_k, other=other)
    else:
        return tl.load(pointers)


@jit
def _scores(product, rows, keys, mask, bias, call, EDGE: tl.constexpr):
    """(x, visible, slope) of a tile of scores from its `product` <q_i, k_j>.

    x is the score with softcap and bias, -inf where it is masked; slope is the derivative of the softcap. `visible`
    broadcasts to the tile: a mask that all rows share keeps one row. Only a tile with EDGE contains the end of the keys
    or the causal diagonal. Rows past the end are not masked: their owner drops them, see _dkdv_kernel.
    """
    s = product * call.softmax_scale
    slope = tl.full(product.shape, 1.0, tl.float32)
    if call.HAS_SOFTCAP:
        capped = _tanh(s / call.softcap)
        s = call.softcap * capped
        slope = 1.0 - capped * capped

    visible = tl.full([1, 1], 1, tl.int1)
    if EDGE:
        visible = keys < call.seqlen_k
        if call.IS_CAUSAL:
            visible = visible & (keys <= rows + (call.seqlen_k - call.seqlen_q))
    if call.MASK != "none":
        visible = visible & (_load_scores(mask, rows, keys, call, 0, call.MASK, EDGE) != 0)
    if call.BIAS != "none":
        bias_tile = _load_scores(bias, rows, keys, call, float("-inf"), call.BIAS, EDGE).to(tl.float32)
        visible = visible & ((bias_tile <= call.least_bias) == 0)
        s += bias_tile
    return tl.where(visible, s, float("-inf")), visible, slope


@jit
def _zero_unseen(tile, visible, is_finite):
    """`tile`, with a row for each key, with zeros for keys that no row of `visible` sees: 0 * NaN is NaN.

    Finding those keys is slow, and is skipped where the whole head `is_finite`.
    """
    if visible.shape[0] > 1:
        if not is_finite:
            tile = tl.where((tl.max(visible.to(tl.int32), axis=0) > 0)[:, None], tile, 0.0).to(tile.dtype)
    elif visible.shape[1] > 1:
        tile = tl.where(tl.trans(visible), tile, 0.0).to(tile.dtype)
    return tile


@jit
def _is_finite(sums, b, kv_head, call):
    """Whether all rows of a head are finite, from their sum. A False from an overflow costs only time."""
    total = tl.load(sums + b * (call.heads // call.qheads_per_kv) + kv_head)
    return total - total == 0.0


@jit
def _load_statistics(base, b, h, rows, call, other):
    """lse, delta or dlse of the rows of a head."""
    first = (b * call.heads + h).to(tl.int64) * call.seqlen_q
    return tl.load(base + first + rows, mask=rows < call.seqlen_q, other=other)


@jit
def _store_statistics(base, b, h, rows, call, values):
    first = (b * call.heads + h).to(tl.int64) * call.seqlen_q
    tl.store(base + first + rows, values, mask=rows < call.seqlen_q)


@jit
def _load_row_operands(inputs, of_rows, b, h, rows, call):
    """(q, do, lse, delta) of query rows."""
    q = _load_rows(_at_head(inputs.query, b, h), rows, call.seqlen_q, call)
    do = _load_rows(_at_head(of_rows.dout, b, h), rows, call.seqlen_q, call)
    lse = _load_statistics(of_rows.lse, b, h, rows, call, float("inf"))
    return q, do, lse, _load_statistics(of_rows.delta, b, h, rows, call, 0.0)


@jit
def _load_key_operands(inputs, b, kv_head, keys, call):
    """(k, v) of keys."""
    k = _load_rows(_at_head(inputs.key, b, kv_head), keys, call.seqlen_k, call)
    return k, _load_rows(_at_head(inputs.value, b, kv_head), keys, call.seqlen_k, call)


@jit
def _gradients(product, dp, lse, delta, rows, keys, mask, bias, call, EDGE: tl.constexpr):
    """(p, dx, ds, visible) of a tile of scores; dp is <do_i, v_j>. The other arguments are those of `_scores`."""
    x, visible, slope = _scores(product, rows, keys, mask, bias, call, EDGE)
    # In an empty row lse and every x are -inf: avoids -inf - -inf, which is NaN.
    p = tl.exp(x - tl.where(lse == float("-inf"), 0.0, lse))
    dx = tl.where(visible, p * (dp - delta), 0.0)
    ds = tl.where(visible, dx * slope, 0.0)
    return p, dx, ds, visible


# ---------------------------------------------------------------------------------------------------------------------
# Tile bounds


@jit
def _row_tile(call, HEAVY_FIRST: tl.constexpr, BLOCK_M: tl.constexpr):
    """(b, h, first row, rows) of a program that owns a tile of rows."""
    tiles = tl.cdiv(call.seqlen_q, BLOCK_M)
    tile, bh = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    if HEAVY_FIRST:
        tile = tiles - 1 - tile
    return bh // call.heads, bh % call.heads, tile * BLOCK_M, tile * BLOCK_M + tl.arange(0, BLOCK_M)


@jit
def _key_bounds(row, call, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """(whole, end): the rows of the tile at `row` see the keys before `end`; tiles before `whole` have no edge."""
    whole = call.seqlen_k
    end = call.seqlen_k
    if call.IS_CAUSAL:
        diagonal = row + (call.seqlen_k - call.seqlen_q)
        whole = tl.minimum(whole, tl.maximum(diagonal + 1, 0))
        end = tl.minimum(end, tl.maximum(diagonal + BLOCK_M, 0))
    return whole // BLOCK_N * BLOCK_N, end


@jit
def _row_bounds(key, call, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """(begin, whole): the rows from `begin` on see a key of the tile at `key`; tiles from `whole` on have no edge."""
    begin = 0
    whole = 0
    if call.IS_CAUSAL:
        diagonal = key - (call.seqlen_k - call.seqlen_q)
        begin = tl.maximum(diagonal, 0) // BLOCK_M * BLOCK_M
        whole = tl.cdiv(tl.maximum(diagonal + BLOCK_N - 1, 0), BLOCK_M) * BLOCK_M
    return begin, tl.where(key + BLOCK_N > call.seqlen_k, call.seqlen_q, tl.minimum(whole, call.seqlen_q))


# ---------------------------------------------------------------------------------------------------------------------
# Kernels. `inputs` is Inputs, `of_rows` is OfRows, `call` is CallParams. Matrices of rows (out, dq, ..) are (pointer,
# (batch, row, head) strides); lse, delta and dlse are contiguous (B, H, Sq); key_sums and value_sums, over rows and
# head dimension, are contiguous float32 (B, Hkv).


@jit
def _forward_kernel(inputs, value_sums, out, lse, call, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    b, h, row, rows = _row_tile(call, call.IS_CAUSAL, BLOCK_M)
    kv_head = h // call.qheads_per_kv
    key, value = _at_head(inputs.key, b, kv_head), _at_head(inputs.value, b, kv_head)
    mask = _scores_at_head(inputs.mask, b, h, call.MASK)
    bias = _scores_at_head(inputs.bias, b, h, call.BIAS)
    is_finite = _is_finite(value_sums, b, kv_head, call)
    q = _load_rows(_at_head(inputs.query, b, h), rows, call.seqlen_q, call)

    total = tl.zeros([BLOCK_M, call.BLOCK_D], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    whole, end = _key_bounds(row, call, BLOCK_M, BLOCK_N)
    for EDGE in tl.static_range(2):
        for start in range(whole if EDGE else 0, end if EDGE else whole, BLOCK_N):
            keys = start + tl.arange(0, BLOCK_N)
            k = _load_rows(key, keys, call.seqlen_k, call)
            product = _dot(q, tl.trans(k))
            x, visible, _ = _scores(product, rows[:, None], keys[None, :], mask, bias, call, EDGE)
            new_max = tl.maximum(row_max, tl.max(x, axis=1))
            anchor = tl.where(new_max == float("-inf"), 0.0, new_max)
            p = tl.exp(x - anchor[:, None])
            rescale = tl.exp(row_max - anchor)
            v = _zero_unseen(_load_rows(value, keys, call.seqlen_k, call), visible, is_finite)
            total = _add_product(total * rescale[:, None], p.to(v.dtype), v)
            row_sum = row_sum * rescale + tl.sum(p, axis=1)
            row_max = new_max

    is_empty = row_sum == 0.0
    total = total / tl.where(is_empty, 1.0, row_sum)[:, None]
    _store_rows(_at_head(out, b, h), rows, call.seqlen_q, total, call)
    row_lse = tl.where(is_empty, float("-inf"), row_max + tl.log(tl.where(is_empty, 1.0, row_sum)))
    _store_statistics(lse, b, h, rows, call, row_lse)


@jit
def _delta_kernel(out, dout, dlse, delta, call, BLOCK_M: tl.constexpr):
    b, h, _, rows = _row_tile(call, False, BLOCK_M)
    o = _load_rows(_at_head(out, b, h), rows, call.seqlen_q, call)
    do = _load_rows(_at_head(dout, b, h), rows, call.seqlen_q, call)
    row_delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), axis=1)
    row_delta -= _load_statistics(dlse, b, h, rows, call, 0.0)
    _store_statistics(delta, b, h, rows, call, row_delta)


@jit
def _dq_kernel(inputs, of_rows, key_sums, dq, dbias, call, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """dbias is None, or contiguous (B, H, Sq, Sk) and holds zeros in tiles that causality masks."""
    b, h, row, rows = _row_tile(call, call.IS_CAUSAL, BLOCK_M)
    kv_head = h // call.qheads_per_kv
    mask = _scores_at_head(inputs.mask, b, h, call.MASK)
    bias = _scores_at_head(inputs.bias, b, h, call.BIAS)
    is_finite = _is_finite(key_sums, b, kv_head, call)
    q, do, lse, delta = _load_row_operands(inputs, of_rows, b, h, rows, call)

    total = tl.zeros([BLOCK_M, call.BLOCK_D], tl.float32)
    whole, end = _key_bounds(row, call, BLOCK_M, BLOCK_N)
    for EDGE in tl.static_range(2):
        for start in range(whole if EDGE else 0, end if EDGE else whole, BLOCK_N):
            keys = start + tl.arange(0, BLOCK_N)
            k, v = _load_key_operands(inputs, b, kv_head, keys, call)
            _, dx, ds, visible = _gradients(
                *(_dot(q, tl.trans(k)), _dot(do, tl.trans(v)), lse[:, None], delta[:, None]),
                *(rows[:, None], keys[None, :], mask, bias, call, EDGE),
            )
            if dbias is not None:
                _store_dbias(dbias, b * call.heads + h, rows, keys, dx, call)
            k = _zero_unseen(k, visible, is_finite)
            total = _add_product(total, ds.to(k.dtype), k)

    total *= call.softmax_scale
    _store_rows(_at_head(dq, b, h), rows, call.seqlen_q, total, call)


@jit
def _dkdv_kernel(inputs, of_rows, dk, dv, column_sums, call, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """column_sums is None, or contiguous float32 (B, H, Sk): dx summed over the rows.

    Tiles of scores are (keys, rows), the operand layout of the products with do and q. A row past the end has lse =
    inf, hence p = dx = 0, and q = do = 0. Empty rows must hold no NaN in q and do.
    """
    tiles = tl.cdiv(call.seqlen_k, BLOCK_N)
    start_key = tl.program_id(0) % tiles * BLOCK_N
    kv_heads = call.heads // call.qheads_per_kv
    b, kv_head = tl.program_id(0) // tiles // kv_heads, tl.program_id(0) // tiles % kv_heads
    keys = start_key + tl.arange(0, BLOCK_N)
    k, v = _load_key_operands(inputs, b, kv_head, keys, call)

    total_dk = tl.zeros([BLOCK_N, call.BLOCK_D], tl.float32)
    total_dv = tl.zeros([BLOCK_N, call.BLOCK_D], tl.float32)
    begin, whole = _row_bounds(start_key, call, BLOCK_M, BLOCK_N)
    for member in range(0, call.qheads_per_kv):
        h = kv_head * call.qheads_per_kv + member
        mask = _scores_at_head(inputs.mask, b, h, call.MASK)
        bias = _scores_at_head(inputs.bias, b, h, call.BIAS)
        total_dx = tl.zeros([BLOCK_N], tl.float32)
        for EDGE in tl.static_range(2):
            for row in range(begin if EDGE else whole, whole if EDGE else call.seqlen_q, BLOCK_M):
                rows = row + tl.arange(0, BLOCK_M)
                q, do, lse, delta = _load_row_operands(inputs, of_rows, b, h, rows, call)
                p, dx, ds, _ = _gradients(
                    *(_dot(k, tl.trans(q)), _dot(v, tl.trans(do)), lse[None, :], delta[None, :]),
                    *(rows[None, :], keys[:, None], mask, bias, call, EDGE),
                )
                total_dv = _add_product(total_dv, p.to(do.dtype), do)
                total_dk = _add_product(total_dk, ds.to(q.dtype), q)
                if column_sums is not None:
                    total_dx += tl.sum(dx, axis=1)
        if column_sums is not None:
            first = (b * call.heads + h).to(tl.int64) * call.seqlen_k
            tl.store(column_sums + first + keys, total_dx, mask=keys < call.seqlen_k)

    total_dk *= call.softmax_scale
    _store_rows(_at_head(dk, b, kv_head), keys, call.seqlen_k, total_dk, call)
    _store_rows(_at_head(dv, b, kv_head), keys, call.seqlen_k, total_dv, call)


@jit
def _dbias_kernel(
    inputs,
    of_rows,
    dbias,
    bias_heads,
    batches_per_bias,
    heads_per_bias,
    call,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """dbias is contiguous (B / batches_per_bias, bias_heads, Sq, Sk): one tile of it, summed over all that share it."""
    key_tiles, row_tiles = tl.cdiv(call.seqlen_k, BLOCK_N), tl.cdiv(call.seqlen_q, BLOCK_M)
    start_key = tl.program_id(0) % key_tiles * BLOCK_N
    row = tl.program_id(0) // key_tiles % row_tiles * BLOCK_M
    bias_bh = tl.program_id(0) // key_tiles // row_tiles
    first_b, first_h = bias_bh // bias_heads * batches_per_bias, bias_bh % bias_heads * heads_per_bias
    rows = row + tl.arange(0, BLOCK_M)
    keys = start_key + tl.arange(0, BLOCK_N)

    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    end = _key_bounds(row, call, BLOCK_M, BLOCK_N)[1]
    sharers = tl.where(start_key < end, batches_per_bias * heads_per_bias, 0)
    for sharer in range(0, sharers):
        b, h = first_b + sharer // heads_per_bias, first_h + sharer % heads_per_bias
        mask = _scores_at_head(inputs.mask, b, h, call.MASK)
        bias = _scores_at_head(inputs.bias, b, h, call.BIAS)
        q, do, lse, delta = _load_row_operands(inputs, of_rows, b, h, rows, call)
        k, v = _load_key_operands(inputs, b, h // call.qheads_per_kv, keys, call)
        _, dx, _, _ = _gradients(
            *(_dot(q, tl.trans(k)), _dot(do, tl.trans(v)), lse[:, None], delta[:, None]),
            *(rows[:, None], keys[None, :], mask, bias, call, True),
        )
        total += dx
    _store_dbias(dbias, bias_bh, rows, keys, total, call)


# ---------------------------------------------------------------------------------------------------------------------
# Launches


class Tile(NamedTuple):
    """Query rows and keys of a tile of scores, and the launch options of its program."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


# Keyed by kernel, bytes of an element and padded head dimension (the smallest that is large enough). Measured on an
# H200, with a dense bias and without a bias; all fit into the 163 KB of shared memory of compute capability 8.0.
TILES = {
    "forward": {
        2: {64: Tile(128, 64, 4, 3), 128: Tile(128, 32, 4, 3), 256: Tile(64, 32, 4, 2)},
        4: {64: Tile(32, 32, 4, 2), 128: Tile(32, 32, 4, 2), 256: Tile(16, 32, 4, 1)},
    },
    "dq": {
        2: {64: Tile(128, 64, 8, 3), 128: Tile(64, 64, 4, 2), 256: Tile(64, 32, 4, 1)},
        4: {64: Tile(32, 32, 4, 2), 128: Tile(32, 32, 4, 1), 256: Tile(16, 16, 4, 1)},
    },
    "dkdv": {
        2: {64: Tile(64, 128, 8, 3), 128: Tile(64, 64, 4, 2), 256: Tile(32, 64, 8, 2)},
        4: {64: Tile(32, 32, 4, 2), 128: Tile(32, 32, 4, 1), 256: Tile(16, 16, 4, 1)},
    },
    "dbias": {
        2: {64: Tile(64, 64, 4, 2), 128: Tile(64, 64, 8, 2), 256: Tile(64, 64, 8, 1)},
        4: {64: Tile(32, 32, 4, 2), 128: Tile(32, 32, 4, 1), 256: Tile(16, 16, 4, 1)},
    },
}
# Small, so that short sequences have several tiles; unequal, so that a swap of rows and keys shows.
INTERPRETED_TILE = Tile(32, 64, 1, 1)
DELTA_ROWS = 64


def tile_for(kernel: str, query: Tensor) -> Tile:
    if INTERPRETED.value:
        return INTERPRETED_TILE
    tiles = TILES[kernel][query.element_size()]
    return next(tile for head_dim, tile in tiles.items() if query.shape[3] <= head_dim)


def tile_options(tile: Tile) -> dict[str, int]:
    return {"BLOCK_M": tile.rows, "BLOCK_N": tile.keys, "num_warps": tile.num_warps, "num_stages": tile.num_stages}


def score_kind(scores: Tensor | None) -> str:
    """The kind of a mask or bias: "none"; "key", one number per key for all rows; "dense"."""
    if scores is None:
        return "none"
    return "key" if is_per_key(scores.shape) else "dense"


class Inputs(NamedTuple):
    """(pointer, strides) of each input; see `matrix` and `scores_input`."""

    query: tuple
    key: tuple
    value: tuple
    mask: tuple
    bias: tuple


class OfRows(NamedTuple):
    """What the backward kernels read of each row in addition to query."""

    dout: tuple  # as an input
    lse: Tensor
    delta: Tensor


class CallParams(NamedTuple):
    """The numbers of a call: kernel arguments, then compile-time constants."""

    heads: int
    qheads_per_kv: int
    seqlen_q: int
    seqlen_k: int
    softmax_scale: float
    softcap: float
    least_bias: float  # the largest that masks
    IS_CAUSAL: Any  # as the following, tl.constexpr
    HAS_SOFTCAP: Any
    HEAD_DIM: Any
    BLOCK_D: Any  # HEAD_DIM, padded
    MASK: Any  # see score_kind
    BIAS: Any


def matrix(x: Tensor) -> tuple:
    return x, x.stride()[:3]


def scores_input(scores: Tensor | None, query: Tensor) -> tuple:
    """A mask or bias; its (batch, head, row, key) strides, 0 in broadcast dimensions, and the numbers of query heads
    and of batch elements that share an entry."""
    if scores is None:
        return query, (0, 0, 0, 0, 1, 1)  # device functions cannot return None; the kernels do not read this pointer
    strides = (0 if size == 1 else stride for size, stride in zip(scores.shape, scores.stride(), strict=True))
    return scores, (*strides, query.shape[2] // scores.shape[1], query.shape[0] // scores.shape[0])


def inputs_of(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, bias: Tensor | None) -> Inputs:
    return Inputs(*map(matrix, (query, key, value)), scores_input(mask, query), scores_input(bias, query))


def head_sums(x: Tensor) -> Tensor:
    """float32 (B, Hkv): finite only if the whole head is, see _is_finite."""
    return x.sum(dim=(1, 3), dtype=torch.float32)


def has_scores(query: Tensor, key: Tensor) -> bool:
    return query.numel() > 0 and key.numel() > 0


class _DifferentiatedOnce(torch.autograd.Function):
    """Passes the gradients of (dout, dlse, query, key, value, mask, bias, *gradients) on. Its backward raises."""

    @staticmethod
    def forward(ctx: Any, *inputs_and_gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return inputs_and_gradients[7:]

    @staticmethod
    def backward(ctx, *grads):
        raise RuntimeError("flash_dmattn does not support double backward; use the backend 'reference' for it")


class _Attention(torch.autograd.Function):
    """(out, lse) of (query, key, value, mask, bias, softmax_scale, is_causal, softcap); see `attention`."""

    @staticmethod
    def forward(ctx: Any, query, key, value, mask, bias, softmax_scale, is_causal, softcap) -> tuple[Tensor, Tensor]:
        (batch, seqlen_q, heads, _), (_, seqlen_k, kv_heads, _) = query.shape, key.shape
        if not has_scores(query, key):
            out = query.new_zeros(query.shape)
            lse = query.new_full((batch, heads, seqlen_q), float("-inf"), dtype=torch.float32)
            ctx.save_for_backward(query, key, value, mask, bias, out, lse)
            return out, lse

        if mask is not None:
            mask = mask.view(torch.uint8)  # a Triton pointer to bool would load single bits
        least_bias = 0.0 if bias is None else least(bias.dtype)
        block_d = max(16, triton.next_power_of_2(query.shape[3]))
        ctx.call = CallParams(
            *(heads, heads // kv_heads, seqlen_q, seqlen_k, softmax_scale, softcap, least_bias),
            *map(tl.constexpr, (is_causal, softcap > 0, query.shape[3], block_d, score_kind(mask), score_kind(bias))),
        )
        out = query.new_empty(query.shape)
        lse = query.new_empty((batch, heads, seqlen_q), dtype=torch.float32)
        tile = tile_for("forward", query)
        with torch.cuda.device_of(query):
            _forward_kernel[(triton.cdiv(seqlen_q, tile.rows) * batch * heads,)](
                *(inputs_of(query, key, value, mask, bias), head_sums(value), matrix(out), lse, ctx.call),
                **tile_options(tile),
            )
        ctx.save_for_backward(query, key, value, mask, bias, out, lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:
        with torch.no_grad():
            gradients = _Attention.gradients(ctx, dout, dlse)
        # once_differentiable raises no error for gradients that depend on the inputs only.
        return _DifferentiatedOnce.apply(dout, dlse, *ctx.saved_tensors[:5], *gradients)

    @staticmethod
    def gradients(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mask, bias, out, lse = ctx.saved_tensors
        needs_dq, needs_dk, needs_dv, _, needs_dbias, *_ = ctx.needs_input_grad
        if not has_scores(query, key):
            wanted = zip((query, key, value, mask, bias), ctx.needs_input_grad[:5], strict=True)
            return *(torch.zeros_like(x) if needed else None for x, needed in wanted), None, None, None

        (batch, seqlen_q, heads, _), (_, seqlen_k, kv_heads, _) = query.shape, key.shape
        if mask is not None or bias is not None or (ctx.call.IS_CAUSAL.value and seqlen_q > seqlen_k):
            # 0 * NaN is NaN: a NaN in an empty row must not reach the keys.
            is_empty = (lse == float("-inf")).transpose(1, 2)[..., None]
            query, dout = query.masked_fill(is_empty, 0), dout.masked_fill(is_empty, 0)
        dout = dout if dout.stride(-1) == 1 else dout.contiguous()
        bias_kind = ctx.call.BIAS.value if needs_dbias else "none"
        is_shared = bias_kind != "none" and bias.shape[:2] != (batch, heads)
        dq = dk = dv = dbias = column_sums = None
        if bias_kind == "key":
            column_sums = lse.new_empty((batch, heads, seqlen_k))
        elif bias_kind == "dense":
            # The dq kernel skips tiles that causality masks.
            dbias = bias.new_zeros(bias.shape) if ctx.call.IS_CAUSAL.value else bias.new_empty(bias.shape)

        with torch.cuda.device_of(query):
            delta = torch.empty_like(lse)
            _delta_kernel[(triton.cdiv(seqlen_q, DELTA_ROWS) * batch * heads,)](
                *(matrix(out), matrix(dout), dlse.contiguous(), delta, ctx.call),
                BLOCK_M=DELTA_ROWS,
            )
            inputs = inputs_of(query, key, value, mask, bias), OfRows(matrix(dout), lse, delta)

            stores_dbias = bias_kind == "dense" and not is_shared
            if needs_dq or stores_dbias:
                dq = query.new_empty(query.shape)
                tile = tile_for("dq", query)
                _dq_kernel[(triton.cdiv(seqlen_q, tile.rows) * batch * heads,)](
                    *(*inputs, head_sums(key), matrix(dq), dbias if stores_dbias else None, ctx.call),
                    **tile_options(tile),
                )
            if needs_dk or needs_dv or column_sums is not None:
                dk, dv = key.new_empty(key.shape), value.new_empty(value.shape)
                tile = tile_for("dkdv", query)
                _dkdv_kernel[(triton.cdiv(seqlen_k, tile.keys) * batch * kv_heads,)](
                    *(*inputs, matrix(dk), matrix(dv), column_sums, ctx.call),
                    **tile_options(tile),
                )
            if bias_kind == "dense" and is_shared:
                bias_batch, bias_heads = bias.shape[:2]
                tile = tile_for("dbias", query)
                tiles = triton.cdiv(seqlen_q, tile.rows) * triton.cdiv(seqlen_k, tile.keys)
                _dbias_kernel[(tiles * bias_batch * bias_heads,)](
                    *(*inputs, dbias, bias_heads, batch // bias_batch, heads // bias_heads, ctx.call),
                    **tile_options(tile),
                )
        if column_sums is not None:
            shared = (bias.shape[0], batch // bias.shape[0], bias.shape[1], heads // bias.shape[1], seqlen_k)
            dbias = column_sums.view(shared).sum(dim=(1, 3)).unsqueeze(2).to(bias.dtype)
        return dq, dk, dv, None, dbias, None, None, None


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    *,
    relative_bias: Tensor | None = None,
    **options,
) -> tuple[Tensor, Tensor]:
    """out (B, Sq, H, D) in query's dtype and lse (B, H, Sq) in float32, differentiable once.

    Ignores `deterministic`: no sum depends on the order in which programs run.

    Raises TypeError for a dtype other than float16, bfloat16 and float32; ValueError for a relative_bias; RuntimeError
    where Triton cannot run, for tensors on the CPU without Triton's interpreter, and where a gradient is differentiated
    again.
    """
    if (reason := why_unavailable()) is not None:
        raise RuntimeError(f"the backend 'triton' is not available: {reason}")
    if relative_bias is not None:
        raise ValueError(
            f"the backend 'triton' takes no relative_bias, got shape {shape_of(relative_bias)}: pass "
            "flash_dmattn.relative.dense of it as attn_bias"
        )
    if query.dtype not in DTYPES:
        raise TypeError(
            f"the backend 'triton' takes float16, bfloat16 and float32, got query in {names([query.dtype])}"
        )
    if query.device.type != "cuda" and not INTERPRETED.value:
        raise RuntimeError(
            f"the backend 'triton' takes tensors on a GPU, got query on {query.device}; "
            "set TRITON_INTERPRET=1 before it is imported to run its kernels in Triton's interpreter"
        )
    return _Attention.apply(
        query, key, value, mask, bias, options["softmax_scale"], options["is_causal"], options["softcap"]
    )
