"""The CUDA kernels on a GPU that is not the current device: forward, backward, masks, lists, selection, decoding."""

import functools

import pytest
import torch
from gpu_inputs import NEEDS_CUDA
from helpers import check, inputs, rand_intervals, rand_mask, reference
from indices import dense_of, rand_indices

from flash_dmattn import KeyIntervalMask, KeyLists, flash_dmattn_func, flash_dmattn_varlen_func

pytestmark = [*NEEDS_CUDA, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second GPU")]

SECOND = "cuda:1"
BATCH, ROWS, KEYS, HEADS, KV_HEADS, WINDOW = 2, 300, 2100, 4, 2, 64


@pytest.fixture(autouse=True)
def the_first_gpu_stays_the_current_device():
    assert torch.cuda.current_device() == 0
    yield
    assert torch.cuda.current_device() == 0


def tensors_of(rows=ROWS, keys=KEYS, head_dim=64):
    return inputs(BATCH, rows, keys, HEADS, KV_HEADS, head_dim, dtype=torch.bfloat16, device=SECOND)


def bias_of(*shape):
    return torch.randn(*shape, device=SECOND).bfloat16()


def intervals():
    return rand_intervals(BATCH, KV_HEADS, KEYS, rows=ROWS, device=SECOND)


@pytest.mark.parametrize("bias_rows", [1, ROWS], ids=["key bias", "dense bias"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("kind", ["none", "bool", "intervals"])
def test_masks_and_biases(kind, head_dim, bias_rows):
    mask = rand_mask(BATCH, 1, ROWS, KEYS, device=SECOND) if kind == "bool" else None
    mask = intervals() if kind == "intervals" else mask
    check(tensors_of(head_dim=head_dim), mask, bias_of(1, HEADS, bias_rows, KEYS), is_causal=True)


@pytest.mark.parametrize("kind", ["bool", "intervals", "device dispatch"])
def test_lists(kind):
    mask = intervals() if kind == "intervals" else rand_mask(BATCH, 1, ROWS, KEYS, visible=0.001, device=SECOND)
    sparse = "auto" if kind == "device dispatch" else "lists"
    function = functools.partial(flash_dmattn_func, sparse=sparse)
    check(tensors_of(), mask, bias_of(BATCH, KV_HEADS, 1, KEYS), function=function)


def test_lists_that_are_built_before():
    mask = intervals()
    lists = KeyLists.build(mask, ROWS)
    check(tensors_of(), lists, bias_of(BATCH, KV_HEADS, 1, KEYS), dense=mask.to_dense(ROWS))


@pytest.mark.parametrize("tile_rows", [1, 128])
def test_lists_of_indices(tile_rows):
    indices = rand_indices(BATCH, KV_HEADS, -(-ROWS // tile_rows), 40, keys=KEYS, device=SECOND)
    lists = KeyLists.from_indices(indices, ROWS, KEYS, tile_rows=tile_rows)
    check(tensors_of(), lists, dense=dense_of(indices, tile_rows, ROWS, KEYS))


def test_selection():
    bias = torch.randn(BATCH, KV_HEADS, 1, KEYS, device=SECOND)
    dense = KeyIntervalMask.topk(bias.cpu(), WINDOW).to_dense(KEYS).to(SECOND)

    def function(*tensors, **options):
        return flash_dmattn_func(*tensors, window_size=WINDOW, **options)

    check(tensors_of(rows=KEYS), None, bias, function=function, dense=dense, is_causal=True)


def test_decoding():
    query, key, value = tensors_of(rows=1)
    bias = torch.randn(BATCH, KV_HEADS, 1, KEYS, device=SECOND)
    for filled in (KEYS, 700):
        lengths = torch.full((BATCH,), filled, dtype=torch.int32, device=SECOND)
        options = {"is_causal": True, "window_size": WINDOW}
        with torch.no_grad():
            out = flash_dmattn_func(query, key, value, None, bias, cache_seqlens=lengths, **options)
        best = bias[..., :filled].topk(WINDOW, dim=-1).indices
        dense = torch.zeros(BATCH, KV_HEADS, 1, filled, dtype=torch.bool, device=SECOND).scatter_(-1, best, True)
        rows = [x.double() for x in (query, key[:, :filled], value[:, :filled])]
        exact = reference(*rows, dense, bias[..., :filled].double())
        torch.testing.assert_close(out.double(), exact, rtol=0.02, atol=0.02)


def test_variable_length_equals_the_first_gpu():
    lengths, longest = torch.tensor([0, 100, 130, 600]), 470
    tensors = [torch.randn(600, heads, 64).bfloat16() for heads in (HEADS, KV_HEADS, KV_HEADS)]
    bias, dout = torch.randn(600, KV_HEADS), torch.randn_like(tensors[0])

    def results(device, **options):
        leaves = [x.to(device).requires_grad_() for x in (*tensors, bias)]
        cu_seqlens = lengths.to(device, torch.int32)
        packed = (*leaves[:3], None, leaves[3], cu_seqlens, cu_seqlens, longest, longest)
        out = flash_dmattn_varlen_func(*packed, is_causal=True, deterministic=True, **options)
        return [x.cpu() for x in (out.detach(), *torch.autograd.grad(out, leaves, dout.to(device)))]

    for options in ({}, {"window_size": WINDOW}):
        assert all(torch.equal(x, y) for x, y in zip(results(SECOND, **options), results("cuda:0", **options)))
