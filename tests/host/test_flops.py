"""FlopCounterMode counts the visible scores: 4 D operations each in the forward, 10 D in the backward."""

import subprocess
import sys

import pytest
import torch
from helpers import inputs, rand_intervals, rand_mask
from indices import dense_of, rand_indices
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from flash_dmattn import KeyIntervalMask, KeyLists, flash_dmattn_func, flash_dmattn_varlen_func
from flash_dmattn.ops import flops
from flash_dmattn.ops.schema import Arguments

BATCH, ROWS, KEYS, HEADS, KV_HEADS, HEAD_DIM = 4, 150, 200, 4, 2, 16
FORWARD, BACKWARD = 4 * HEAD_DIM, 10 * HEAD_DIM  # per visible score


def flops_of(call):
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


def tensors(batch=BATCH, rows=ROWS, keys=KEYS):
    return inputs(batch, rows, keys, HEADS, KV_HEADS, HEAD_DIM)


def scores_of(dense, is_causal, rows=ROWS, keys=KEYS, batch=BATCH):
    """The visible scores of a dense mask, repeated for the batch elements and heads that share it."""
    dense = dense.expand(*dense.shape[:2], rows, keys)
    dense = dense.tril(keys - rows) if is_causal else dense
    return dense.sum().item() * (batch // dense.shape[0]) * (HEADS // dense.shape[1])


def indexed(tile_rows, mask=None):
    """Lists of random indices, and the dense mask that they stand for."""
    indices = rand_indices(2, KV_HEADS, -(-ROWS // tile_rows), 20, keys=KEYS)
    lists = KeyLists.from_indices(indices, ROWS, KEYS, tile_rows=tile_rows, mask=mask)
    return lists, dense_of(indices, tile_rows, ROWS, KEYS, mask)


def of_intervals(build, **options):
    mask = rand_intervals(BATCH, KV_HEADS, KEYS, rows=ROWS)
    return (KeyLists.build(mask, ROWS, **options) if build else mask), mask.to_dense(ROWS)


def of_bool(build, *shape):
    mask = rand_mask(*shape, visible=0.1)
    return (KeyLists.build(mask, ROWS, KEYS) if build else mask), mask


MASKS = {
    "none": lambda: (None, torch.ones(1, 1, ROWS, KEYS, dtype=torch.bool)),
    "bool": lambda: of_bool(False, BATCH, HEADS, ROWS, KEYS),
    "bool, shared": lambda: of_bool(False, 2, KV_HEADS, ROWS, KEYS),
    "bool per key": lambda: of_bool(False, 1, HEADS, 1, KEYS),
    "bool per row": lambda: of_bool(False, BATCH, 1, ROWS, 1),
    "intervals": lambda: of_intervals(False),
    "lists of intervals": lambda: of_intervals(True),
    "lists of bool": lambda: of_bool(True, 2, 1, ROWS, KEYS),
    "lists of bool per key": lambda: of_bool(True, BATCH, KV_HEADS, 1, KEYS),
    "indices of each row": lambda: indexed(1),
    "indices of 64 rows": lambda: indexed(64),
    "indices of 128 rows beside intervals": lambda: indexed(128, rand_intervals(1, 1, KEYS, rows=ROWS)),
}


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("kind", MASKS)
def test_forward_and_backward(kind, is_causal):
    mask, dense = MASKS[kind]()
    leaves = [x.requires_grad_() for x in tensors()]
    scores = scores_of(dense, is_causal)

    def forward():
        return flash_dmattn_func(*leaves, mask, is_causal=is_causal)

    assert scores > 0
    assert flops_of(forward) == FORWARD * scores
    assert flops_of(lambda: forward().sum().backward()) == (FORWARD + BACKWARD) * scores


def test_rows_that_see_nothing():
    leaves = tensors(rows=2 * KEYS)
    counted = flops_of(lambda: flash_dmattn_func(*leaves, is_causal=True))
    assert counted == FORWARD * BATCH * HEADS * KEYS * (KEYS + 1) // 2


@pytest.mark.parametrize("sparse", ["auto", "tiles", "lists"])
@pytest.mark.parametrize("rows", [ROWS, 3, 1])
def test_window_size(rows, sparse):
    bias = torch.randn(BATCH, KV_HEADS, 1, KEYS)
    dense = KeyIntervalMask.topk(bias, 20, rows).to_dense(rows)

    def call():
        flash_dmattn_func(*tensors(rows=rows), None, bias, is_causal=True, window_size=20, sparse=sparse)

    assert flops_of(call) == FORWARD * scores_of(dense, True, rows=rows)


@pytest.mark.parametrize("window_size", [None, 20])
def test_cache_seqlens(window_size):
    used, bias = [200, 17, 0, 90], torch.randn(BATCH, KV_HEADS, 1, KEYS)
    options = {"is_causal": True, "cache_seqlens": torch.tensor(used, dtype=torch.int32), "window_size": window_size}
    at_most = KEYS if window_size is None else window_size
    scores = HEADS * sum(min(max(keys - missing, 0), at_most) for keys in used for missing in (1, 0))
    assert flops_of(lambda: flash_dmattn_func(*tensors(rows=2), None, bias, **options)) == FORWARD * scores


def of_sequences(kind, cu_rows, cu_keys):
    if kind == "bool per key":
        return rand_mask(cu_keys[-1], KV_HEADS)
    if kind == "bool":
        return rand_mask(cu_rows[-1], 1, 70)
    mask = rand_intervals(cu_keys[-1], KV_HEADS, rows=60)
    return KeyLists.build(mask, 60, 70, False, *map(as_offsets, (cu_rows, cu_keys))) if kind == "lists" else mask


def as_offsets(cu_seqlens):
    return torch.tensor(cu_seqlens, dtype=torch.int32)


@pytest.mark.parametrize("kind", ["none", "bool per key", "bool", "intervals", "lists"])
def test_variable_length(kind):
    cu_rows, cu_keys = [0, 40, 40, 100], [0, 10, 30, 100]
    mask = None if kind == "none" else of_sequences(kind, cu_rows, cu_keys)
    packed = [x[0] for x in tensors(1, 100, 100)]
    scores = 0
    for first_row, row, first_key, key in zip(cu_rows, cu_rows[1:], cu_keys, cu_keys[1:]):
        rows, keys = row - first_row, key - first_key
        if kind == "none":
            dense = torch.ones(1, 1, rows, keys, dtype=torch.bool)
        elif kind == "bool per key":
            dense = mask[first_key:key].T[None, :, None]
        elif kind == "bool":
            dense = mask[first_row:row, :, :keys].transpose(0, 1)[None]
        else:
            intervals = mask if kind == "intervals" else mask.mask
            dense = intervals.sequence(first_key, key).to_dense(rows)
        scores += scores_of(dense, True, rows, keys, batch=1)

    def call():
        offsets = map(as_offsets, (cu_rows, cu_keys))
        flash_dmattn_varlen_func(*packed, mask, None, *offsets, 60, 70, is_causal=True)

    assert scores > 0 and flops_of(call) == FORWARD * scores


def packed(mask):
    """The bits of pack_mask: 128 keys in four words."""
    bools = torch.nn.functional.pad(mask, (0, -mask.shape[-1] % 128)).unflatten(-1, (-1, 8))
    return (bools * 2 ** torch.arange(8)).sum(-1).to(torch.uint8).view(torch.int32)


@pytest.mark.parametrize("shape", [(2, KV_HEADS, ROWS, KEYS), (BATCH, 1, 1, KEYS)], ids=str)
def test_packed_masks(shape):
    mask = rand_mask(*shape)
    given = Arguments(*tensors(), mask=packed(mask), is_causal=True)
    assert flops.visible_scores(given) == scores_of(mask, True)


def test_packed_masks_of_variable_length():
    cu_rows, cu_keys = as_offsets([0, 40, 100]), as_offsets([0, 30, 100])
    sequences = {"cu_seqlens_q": cu_rows, "cu_seqlens_k": cu_keys, "max_seqlen_q": 60, "max_seqlen_k": 70}
    mask = rand_mask(100, 1, 70)
    by_row = flops.visible_scores(Arguments(*(x[0] for x in tensors(1, 100, 100)), mask=packed(mask), **sequences))
    assert by_row == HEADS * (mask[:40, :, :30].sum() + mask[40:].sum()).item()
    mask = rand_mask(2, HEADS, 1, 70)
    by_key = flops.visible_scores(Arguments(*(x[0] for x in tensors(1, 100, 100)), mask=packed(mask), **sequences))
    assert by_key == (40 * mask[0, ..., :30].sum() + 60 * mask[1].sum()).item()


@pytest.mark.gpu
def test_a_packed_mask_on_cuda():
    mask = rand_mask(BATCH, KV_HEADS, ROWS, KEYS, device="cuda")
    on_cuda = [x.cuda().half() for x in tensors()]
    counted = flops_of(lambda: flash_dmattn_func(*on_cuda, mask, is_causal=True))
    assert counted == FORWARD * scores_of(mask, True)


def test_without_values_all_scores_that_causality_shows_count():
    scores = BATCH * HEADS * torch.ones(ROWS, KEYS).tril(KEYS - ROWS).sum().int().item()
    with FakeTensorMode():
        mask = rand_mask(BATCH, 1, ROWS, KEYS)
        assert flops_of(lambda: flash_dmattn_func(*tensors(), mask, is_causal=True)) == FORWARD * scores
        offsets = torch.zeros(3, dtype=torch.int32)  # two sequences, of at most 3 rows and 5 keys
        rows = [x[0] for x in tensors(1)]
        counted = flops_of(lambda: flash_dmattn_varlen_func(*rows, None, None, offsets, offsets, 3, 5))
        assert counted == FORWARD * HEADS * 2 * 15


def test_the_formulas_are_registered_whichever_module_is_imported_first():
    count = "from torch.utils.flop_counter import FlopCounterMode, flop_registry"
    find = "from importlib.util import find_spec; find_spec('torch.utils.flop_counter')"
    for order in (["import flash_dmattn", count], [count, "import flash_dmattn"], ["import flash_dmattn", find, count]):
        program = "; ".join([*order, "import torch; assert torch.ops.flash_dmattn.attention_forward in flop_registry"])
        subprocess.run([sys.executable, "-c", program], check=True)
