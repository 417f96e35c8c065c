"""Interval masks in the dense CUDA kernels: block skipping, the tile scheduler, and bounds of lists."""

import itertools
from dataclasses import replace

import pytest
import torch
from gpu_inputs import CAUSAL, NEEDS_CUDA, intervals, on_gpu, randn
from helpers import check, rand_mask
from torch.utils._pytree import tree_map_only

from flash_dmattn import KeyIntervalMask, KeyLists, flash_dmattn_func

pytestmark = NEEDS_CUDA


def offsets(lengths):
    return torch.tensor([0, *itertools.accumulate(lengths)], device="cuda", dtype=torch.int32)


@CAUSAL
@pytest.mark.parametrize("bias_shape", [(1, 2, 1, 1000), (1, 1, 1000, 1000)], ids=str)
def test_blocks_that_are_empty_full_and_mixed(bias_shape, causal):
    tensors = on_gpu(1, 1000, 1000, 4, 2, 64)
    documents = KeyIntervalMask.documents(offsets([130, 1, 509, 360]), 1000)
    window = KeyIntervalMask.sliding_window(1000, 1000, 300, device="cuda")
    for mask in (documents, window, documents & window):
        check(tensors, mask, randn(*bias_shape), is_causal=causal, sparse="tiles")


# More work tiles than SMs: the dynamic persistent tile scheduler


@CAUSAL
@pytest.mark.parametrize("bias_rows", ["none", "key", "dense"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_more_work_tiles_than_sms_of_all_lengths(head_dim, bias_rows, causal):
    tensors = on_gpu(2, 600, 4200, 16, 4, head_dim)
    bias = None if bias_rows == "none" else randn(1, 4, 1 if bias_rows == "key" else 600, 4200)
    mask = intervals(2, 4, 4200, rows=600, longest=20) if causal else intervals(1, 1, 4200, rows=600)
    check(tensors, mask, bias, is_causal=causal, sparse="tiles")


def test_the_tile_scheduler_restarts_at_every_call_and_replay():
    tensors = on_gpu(4, 2000, 2000, 16, 4, 128)[:3]
    lengths = [[700, 1, 99, 1200], [2000, 0, 0, 0], [64, 64, 64, 1808], [1, 1998, 1, 0]]
    ids = torch.stack([torch.repeat_interleave(torch.arange(4), torch.tensor(x)) for x in lengths]).cuda()
    masks = [KeyIntervalMask.documents(ids=ids), KeyIntervalMask.documents(ids=ids.flip(0))]
    mask = KeyIntervalMask(masks[0].start, masks[0].end)  # a copy
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    expected = [flash_dmattn_func(*tensors, m, is_causal=True, sparse="tiles") for m in masks]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        flash_dmattn_func(*tensors, mask, is_causal=True, sparse="tiles")
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph, stream=stream):
        out = flash_dmattn_func(*tensors, mask, is_causal=True, sparse="tiles")
    for i in (0, 1, 1, 0):
        mask.start.copy_(masks[i].start)
        mask.end.copy_(masks[i].end)
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, expected[i])
        assert torch.equal(flash_dmattn_func(*tensors, masks[i], is_causal=True, sparse="tiles"), expected[i])


# With 884 lists, more than four for each SM, a CTA builds those of several m_blocks; 3201 rows have 26.
SIZES = pytest.mark.parametrize("heads, keys", [(2, 3000), (17, 3201)], ids=["one m_block for each CTA", "several"])


@CAUSAL
@SIZES
def test_lists_equal_those_of_the_cpu(heads, keys, causal):
    bias = torch.randn(2, heads, keys).cuda()
    for mask in (KeyIntervalMask.topk(bias, 100), rand_mask(2, 2, 500, keys, visible=0.02, device="cuda")):
        rows = keys if isinstance(mask, KeyIntervalMask) else 500
        ours, cpu = KeyLists.build(mask, rows, is_causal=causal), KeyLists.build(_to_cpu(mask), rows, is_causal=causal)
        assert torch.equal(ours.lengths().cpu(), cpu.lengths())
        for a, b in zip(ours.kv_indptr.cpu().flatten(1).T.tolist(), cpu.kv_indptr.flatten(1).T.tolist()):
            assert torch.equal(in_order(ours.kv_indices[slice(*a)]).cpu(), cpu.kv_indices[slice(*b)])
            assert (
                cpu.kv_row_bits is None
                or causal
                or torch.equal(ours.kv_row_bits[slice(*a)].cpu(), cpu.kv_row_bits[slice(*b)])
            )


def in_order(keys):
    """A list's keys ascending, with the padding behind."""
    return keys.sort().values.roll(int((keys >= 0).sum()))


def check_order(lists, mask):
    """A list has two parts that ascend: the last has the first 256 keys that not all of its rows see."""
    for batch, head, tile in itertools.product(
        range(lists.batches), range(0, lists.heads, 8), range(lists.num_m_blocks)
    ):
        begin, end = lists.kv_indptr[:, batch, head, tile].tolist()
        listed = lists.kv_indices[begin:end]
        listed = listed[listed >= 0].long()
        first, last = tile * 128, min(tile * 128 + 128, lists.seqlen_q) - 1
        start, end = mask.start[batch % mask.start.shape[0], head], mask.end[batch % mask.end.shape[0], head]
        keys = listed.sort().values
        partial = keys[(start[keys] > first) | (end[keys] <= last)][:256]
        assert torch.equal(listed, torch.cat([keys[~torch.isin(keys, partial)], partial]))


@CAUSAL
@SIZES
@pytest.mark.parametrize("window", [100, 1000])
def test_lists_end_with_keys_that_not_all_rows_see(window, heads, keys, causal):
    mask = KeyIntervalMask.topk(torch.randn(2, heads, keys).cuda(), window)
    check_order(KeyLists.build(mask, keys, is_causal=causal), mask)


def test_at_most_256_keys_come_last():
    for batch, heads in ((1, 2), (8, 40)):  # a CTA for each list, or for several
        mask = intervals(batch, heads, 2000, rows=2500)
        lists = KeyLists.build(KeyIntervalMask(mask.start, mask.end, keys_per_row=2000), 2500)
        check_order(lists, mask)


def test_many_m_blocks_in_a_cta():
    mask = KeyIntervalMask.topk(torch.randn(4, 50, 4200).cuda(), 60)  # 200 heads of 33 m_blocks
    check_order(KeyLists.build(mask, 4200, is_causal=True), mask)


def test_the_order_of_a_list_depends_on_the_list_alone():
    bias = torch.randn(40, 16, 700).cuda()
    many = KeyLists.build(KeyIntervalMask.topk(bias, 200), 700, is_causal=True)
    for batch in (0, 17):
        one = KeyLists.build(KeyIntervalMask.topk(bias[batch : batch + 1], 200), 700, is_causal=True)
        for head, tile in itertools.product(range(16), range(6)):
            a, b = one.kv_indptr[:, 0, head, tile].tolist(), many.kv_indptr[:, batch, head, tile].tolist()
            assert torch.equal(one.kv_indices[slice(*a)], many.kv_indices[slice(*b)])
    rows = KeyLists.build(KeyIntervalMask.topk(bias[:1, :, :100], 50), 100, is_causal=True)
    check_order(rows, KeyIntervalMask.topk(bias[:1, :, :100], 50))  # of one m_block, too


@SIZES
def test_lists_on_the_cpu_ascend(heads, keys):
    mask = KeyIntervalMask.topk(torch.randn(2, heads, keys).cuda(), 500)
    on_cuda = KeyLists.build(mask, keys, is_causal=True)
    moved, built = on_cuda.cpu(), KeyLists.build(mask.cpu(), keys, is_causal=True)
    for a, b in zip(moved.kv_indptr.flatten(1).T.tolist(), built.kv_indptr.flatten(1).T.tolist()):
        assert torch.equal(moved.kv_indices[slice(*a)], built.kv_indices[slice(*b)])
    loaded = tree_map_only(torch.Tensor, torch.Tensor.cpu, on_cuda)  # as torch.load does
    query, key, value = (torch.randn(2, keys, heads, 8) for _ in range(3))
    with pytest.raises(ValueError, match="KeyLists.to..cpu.. sorts lists that were built on CUDA"):
        flash_dmattn_func(query, key, value, loaded, is_causal=True)
    expected = flash_dmattn_func(query, key, value, built, is_causal=True)
    for lists in (moved, loaded.to("cpu")):
        assert torch.equal(flash_dmattn_func(query, key, value, lists, is_causal=True), expected)


@SIZES
def test_deterministic_gradients_over_lists(heads, keys):
    """Additions to dK and dV have the order of the keys, which the lists do not have."""
    tensors = [x.requires_grad_() for x in on_gpu(2, keys, keys, heads, heads, 32)]
    mask = KeyIntervalMask.topk(torch.randn(2, heads, keys).cuda(), 300)
    lists, tiles = (
        torch.autograd.grad(
            flash_dmattn_func(*tensors, mask, is_causal=True, sparse=sparse, deterministic=True),
            tensors,
            torch.ones_like(tensors[0]),
        )
        for sparse in ("lists", "tiles")
    )
    for _ in range(3):
        out = flash_dmattn_func(*tensors, mask, is_causal=True, sparse="lists", deterministic=True)
        again = torch.autograd.grad(out, tensors, torch.ones_like(out))
        assert all(map(torch.equal, again, lists))
    for a, b in zip(lists, tiles):
        assert (a - b).norm() <= 1e-2 * b.norm()


def test_deterministic_gradients_over_lists_in_any_order():
    """Of a caller, with intervals: each listed key counts once, whatever the order."""
    tensors = [x.requires_grad_() for x in on_gpu(1, 600, 600, 2, 2, 64)]
    lists = KeyLists.build(KeyIntervalMask.topk(torch.randn(1, 2, 600).cuda(), 150), 600, is_causal=True)
    mixed = lists.kv_indices.clone()
    for begin, end in lists.kv_indptr.flatten(1).T.tolist():
        count = int((mixed[begin:end] >= 0).sum())
        mixed[begin : begin + count] = mixed[begin : begin + count][torch.randperm(count, device="cuda")]
    grads = []
    for given in (lists, replace(lists, kv_indices=mixed)):
        out = flash_dmattn_func(*tensors, given, is_causal=True, deterministic=True)
        grads.append(torch.autograd.grad(out, tensors, torch.ones_like(out)))
    for a, b in zip(*grads):
        assert (a - b).norm() <= 1e-2 * a.norm()


def _to_cpu(mask):
    return mask.to("cpu") if isinstance(mask, KeyIntervalMask) else mask.cpu()


def test_a_wrong_bound_truncates_lists():
    mask = intervals(1, 2, 2000, rows=500)
    lists = KeyLists.build(mask, 500)
    room = 64 * 3
    cut = KeyLists.build(KeyIntervalMask(mask.start, mask.end, keys_per_row=room - 127), 500)
    assert cut.kv_indices.numel() == 2 * 4 * room
    for a, b in zip(cut.kv_indptr.cpu().flatten(1).T.tolist(), lists.kv_indptr.cpu().flatten(1).T.tolist()):
        size = min(b[1] - b[0], room)
        assert a[1] - a[0] == size
        kept, listed = cut.kv_indices[slice(*a)], lists.kv_indices[slice(*b)]
        kept = kept[kept >= 0]
        assert len(kept) == min(int((listed >= 0).sum()), room) == len(kept.unique())
        assert torch.isin(kept, listed).all()
