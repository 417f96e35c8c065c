"""Interval masks in the CUDA kernels that go over tiles, and the key lists that CUDA builds."""

import itertools

import pytest
import torch
from gpu_inputs import intervals, on_gpu, randn
from helpers import check, rand_mask

from flash_dmattn import KeyIntervalMask, KeyLists, flash_dmattn_func, ops

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not ops.cuda_is_built(), reason="flash_dmattn was built without CUDA kernels"),
]

CAUSAL = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


def offsets(lengths):
    return torch.tensor([0, *itertools.accumulate(lengths)], device="cuda", dtype=torch.int32)


# Tiles


@CAUSAL
@pytest.mark.parametrize("bias_shape", [(1, 2, 1, 1000), (1, 1, 1000, 1000)], ids=str)
def test_tiles_that_are_empty_full_and_mixed(bias_shape, causal):
    tensors = on_gpu(1, 1000, 1000, 4, 2, 64)
    documents = KeyIntervalMask.documents(offsets([130, 1, 509, 360]), 1000)
    window = KeyIntervalMask.sliding_window(1000, 1000, 300, device="cuda")
    for mask in (documents, window, documents & window):
        check(tensors, mask, randn(*bias_shape), is_causal=causal, sparse="tiles")


@pytest.mark.parametrize("heads", [1, 2, 8])
@pytest.mark.parametrize("seqlen_q", [1, 3, 15, 40])
def test_decoding_splits_the_keys(seqlen_q, heads):
    tensors = on_gpu(2, seqlen_q, 4000, 8, 2, 128)
    mask = intervals(2, heads, 4000, rows=seqlen_q)
    check(tensors, mask, randn(2, 2, 1, 4000), is_causal=True, sparse="tiles")


# More works than a GPU has multiprocessors, of which blocks take the next as they are done with the last


@CAUSAL
@pytest.mark.parametrize("bias_rows", ["none", "key", "dense"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_many_works_of_all_lengths(head_dim, bias_rows, causal):
    tensors = on_gpu(2, 600, 4200, 16, 4, head_dim)
    bias = None if bias_rows == "none" else randn(1, 4, 1 if bias_rows == "key" else 600, 4200)
    mask = intervals(2, 4, 4200, rows=600, longest=20) if causal else intervals(1, 1, 4200, rows=600)
    check(tensors, mask, bias, is_causal=causal, sparse="tiles")


def test_many_works_are_shared_out_anew_by_every_call_and_replay():
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


# Lists


def brute_force_list(visible):
    """The keys that any of the rows of bool (rows, keys) sees, and which: int32 (keys, 4)."""
    keys = visible.any(0).nonzero()[:, 0]
    seen = torch.zeros(keys.numel(), 128, dtype=torch.int64)
    seen[:, : visible.shape[0]] = visible[:, keys].T
    words = (seen.view(-1, 4, 32) << torch.arange(32)).sum(-1)
    return keys.int(), torch.where(words >= 2**31, words - 2**32, words).int()


def check_lists(lists, sequences):
    """sequences: of each batch element the visible pairs, bool (heads, rows, keys)."""
    spans, keys = lists.spans.cpu().flatten(1), lists.keys.cpu()
    rows = None if lists.rows is None else lists.rows.cpu()
    at = 0
    for visible in sequences:
        visible = visible.cpu()
        for head, tile in itertools.product(range(lists.heads), range(lists.row_tiles)):
            expected, seeing = brute_force_list(visible[head, 128 * tile : 128 * (tile + 1)])
            begin, end = spans[:, at].tolist()
            assert end - begin == -(-expected.numel() // 64) * 64
            assert torch.equal(keys[begin : begin + expected.numel()], expected)
            assert (keys[begin + expected.numel() : end] == -1).all()
            if rows is not None:
                assert torch.equal(rows[begin : begin + expected.numel()], seeing)
            at += 1
    assert at == spans.shape[1]


def causal_part(visible):
    rows, keys = visible.shape[-2:]
    return visible.tril(keys - rows)


@CAUSAL
@pytest.mark.parametrize("kind", ["intervals", "bool", "rows alike"])
@pytest.mark.parametrize("seqlen_q, seqlen_k", [(1, 1), (128, 64), (129, 255), (700, 300), (300, 5000)])
def test_lists(seqlen_q, seqlen_k, kind, causal):
    if kind == "intervals":
        mask = intervals(2, 3, seqlen_k, rows=seqlen_q, longest=max(seqlen_q // 3, 1))
        visible = mask.to_dense(seqlen_q)
    else:
        mask = rand_mask(2, 3, 1 if kind == "rows alike" else seqlen_q, seqlen_k, visible=0.01, device="cuda")
        visible = mask
    lists = KeyLists.build(mask, seqlen_q, is_causal=causal)
    check_lists(lists, causal_part(visible) if causal and kind != "rows alike" else visible)


@CAUSAL
@pytest.mark.parametrize("kind", ["intervals", "bool", "rows alike"])
def test_lists_of_variable_length(kind, causal):
    lengths_q, lengths_k = [3, 0, 129, 1, 300], [5, 4, 65, 0, 600]
    total_q, total_k = sum(lengths_q), sum(lengths_k)
    if kind == "intervals":
        mask = intervals(total_k, 2, rows=300, longest=100)
    else:
        shape = (total_k, 2) if kind == "rows alike" else (total_q, 2, 600)
        mask = rand_mask(*shape, visible=0.05, device="cuda")
    lists = KeyLists.build(mask, 300, 600, causal, offsets(lengths_q), offsets(lengths_k))
    sequences, row, key = [], 0, 0
    for rows, keys in zip(lengths_q, lengths_k):
        if kind == "intervals":
            i = torch.arange(rows, device="cuda")[:, None]
            start, end = (x[key : key + keys].T[:, None] for x in (mask.start, mask.end))
            visible = (start <= i) & (i < end)
        elif kind == "bool":
            visible = mask[row : row + rows, :, :keys].transpose(0, 1)
        else:
            visible = mask[key : key + keys].T[:, None]
        sequences.append(causal_part(visible) if causal and kind != "rows alike" else visible)
        row, key = row + rows, key + keys
    check_lists(lists, sequences)


@CAUSAL
def test_lists_are_those_of_the_cpu(causal):
    bias = torch.randn(2, 2, 3000).cuda()
    for mask in (KeyIntervalMask.topk(bias, 100), rand_mask(2, 2, 500, 3000, visible=0.02, device="cuda")):
        rows = 3000 if isinstance(mask, KeyIntervalMask) else 500
        ours, cpu = KeyLists.build(mask, rows, is_causal=causal), KeyLists.build(_to_cpu(mask), rows, is_causal=causal)
        assert torch.equal(ours.lengths().cpu(), cpu.lengths())
        for a, b in zip(ours.spans.cpu().flatten(1).T.tolist(), cpu.spans.flatten(1).T.tolist()):
            assert torch.equal(ours.keys[slice(*a)].cpu(), cpu.keys[slice(*b)])
            assert cpu.rows is None or causal or torch.equal(ours.rows[slice(*a)].cpu(), cpu.rows[slice(*b)])


def _to_cpu(mask):
    return mask.to("cpu") if isinstance(mask, KeyIntervalMask) else mask.cpu()


def test_a_bound_that_is_wrong_cuts_lists_short():
    mask = intervals(1, 2, 2000, rows=500)
    lists = KeyLists.build(mask, 500)
    room = 64 * 3
    cut = KeyLists.build(KeyIntervalMask(mask.start, mask.end, keys_per_row=room - 127), 500)
    assert cut.keys.numel() == 2 * 4 * room
    for a, b in zip(cut.spans.cpu().flatten(1).T.tolist(), lists.spans.cpu().flatten(1).T.tolist()):
        size = min(b[1] - b[0], room)
        assert a[1] - a[0] == size
        assert torch.equal(cut.keys[slice(*a)], lists.keys[b[0] : b[0] + size])
