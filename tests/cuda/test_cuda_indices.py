"""Key lists from an indexer's selection on the GPU equal those of the CPU."""

import os
import subprocess
import sys

import pytest
import torch
from gpu_inputs import CAUSAL, NEEDS_CUDA, on_gpu
from indices import rand_indices

from flash_dmattn import KeyIntervalMask, KeyLists, flash_dmattn_func, flash_dmattn_varlen_func

pytestmark = NEEDS_CUDA

TILE_ROWS = pytest.mark.parametrize("tile_rows", [1, 3, 64, 96, 128, 192, 256, 1000])


def assert_same_lists(ours, cpu):
    """Compares the lists; the unused capacity between them may hold anything."""
    assert torch.equal(ours.kv_indptr.cpu(), cpu.kv_indptr) and ours.kv_row_bits.shape == cpu.kv_row_bits.shape
    for begin, end in cpu.kv_indptr.flatten(1).T.tolist():
        assert torch.equal(ours.kv_indices[begin:end].cpu(), cpu.kv_indices[begin:end])
        if cpu.kv_row_bits.shape[0]:
            assert torch.equal(ours.kv_row_bits[begin:end].cpu(), cpu.kv_row_bits[begin:end])


@CAUSAL
@TILE_ROWS
@pytest.mark.parametrize(
    "seqlen_q, seqlen_k, count", [(1, 65, 9), (300, 200, 70), (513, 1000, 30), (256, 300_000, 900)]
)
def test_lists_equal_those_of_the_cpu(seqlen_q, seqlen_k, count, tile_rows, causal):
    indices = rand_indices(2, 2, -(-seqlen_q // tile_rows), count, keys=seqlen_k)
    start = torch.randint(-5, seqlen_q, (1, 4, seqlen_k), dtype=torch.int32)
    mask = KeyIntervalMask(start, start + torch.randint(0, 200, start.shape, dtype=torch.int32))
    for shown in (None, mask):
        on_cpu, on_gpu = (
            KeyLists.from_indices(
                indices.to(device), seqlen_q, seqlen_k, causal, tile_rows=tile_rows, mask=shown and shown.to(device)
            )
            for device in ("cpu", "cuda")
        )
        assert_same_lists(on_gpu, on_cpu)


@TILE_ROWS
def test_of_variable_length(tile_rows):
    rows, keys = [3, 0, 129, 1, 300], [5, 4, 65, 0, 200]
    cu_q, cu_k = (torch.tensor([0, *x]).cumsum(0).int() for x in (rows, keys))
    indices = torch.full((5, 2, -(-300 // tile_rows), 12), -1, dtype=torch.int32)
    for b in range(5):
        indices[b, :, : -(-rows[b] // tile_rows)] = rand_indices(2, -(-rows[b] // tile_rows), 12, keys=keys[b])
    # One sequence has seqlen_q rows, so that CPU and GPU make the same number of lists.
    on_cpu, on_gpu = (
        KeyLists.from_indices(indices.to(device), 300, 200, True, cu_q.to(device), cu_k.to(device), tile_rows=tile_rows)
        for device in ("cpu", "cuda")
    )
    assert_same_lists(on_gpu, on_cpu)
    tensors = [torch.randn(n, h, 64) for n, h in ((sum(rows), 4), (sum(keys), 2), (sum(keys), 2))]
    expected = flash_dmattn_varlen_func(*tensors, on_cpu, None, cu_q, cu_k, 300, 200, is_causal=True)
    tensors = [x.cuda().bfloat16() for x in tensors]
    ours = flash_dmattn_varlen_func(*tensors, on_gpu, None, cu_q.cuda(), cu_k.cuda(), 300, 200, is_causal=True)
    torch.testing.assert_close(ours.cpu().float(), expected, rtol=0.05, atol=0.05)


@TILE_ROWS
def test_intervals_of_the_largest_and_least_numbers(tile_rows):
    """Rows relative to a list's first row do not overflow."""
    low, high = -(2**31), 2**31 - 1
    start = torch.tensor([low, low, high, 0, 300, low, 5, high], dtype=torch.int32).repeat(32).view(1, 1, 256)
    end = torch.tensor([low, high, low, low, high, 200, 130, high], dtype=torch.int32).repeat(32).view(1, 1, 256)
    mask = KeyIntervalMask(start, end)
    indices = rand_indices(1, 1, -(-400 // tile_rows), 60, keys=256)
    on_cpu, on_gpu = (
        KeyLists.from_indices(indices.to(device), 400, 256, tile_rows=tile_rows, mask=mask.to(device))
        for device in ("cpu", "cuda")
    )
    assert_same_lists(on_gpu, on_cpu)


def test_indices_out_of_range_are_ignored():
    indices = torch.tensor([0, 5, 7, 8, 2**31 - 1, -2, -(2**31), 5], dtype=torch.int32, device="cuda")
    for tile_rows in (1, 64):
        given = indices.expand(1, 1, -(-100 // tile_rows), 8)
        lists = KeyLists.from_indices(given, 100, 8, tile_rows=tile_rows)
        for begin, end in lists.kv_indptr.flatten(1).T.tolist():
            assert lists.kv_indices[begin:end].tolist() == [0, 5, 7] + [-1] * 61
        tensors = on_gpu(1, 100, 8)
        named = tensors[1][:, [0, 5, 7]], tensors[2][:, [0, 5, 7]]
        expected = flash_dmattn_func(tensors[0], *named)
        torch.testing.assert_close(flash_dmattn_func(*tensors, lists), expected, rtol=0.02, atol=0.02)


def test_building_lists_can_be_captured_in_a_graph():
    """Neither building the lists nor attention over them synchronizes."""
    tensors = on_gpu(1, 512, 512, 4, 2, 64)
    indices = rand_indices(1, 2, 512, 16, keys=512, device="cuda")

    def call():
        return flash_dmattn_func(*tensors, KeyLists.from_indices(indices, 512, 512))

    expected = call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    graph.replay()
    torch.testing.assert_close(out, expected)


def test_indices_on_the_gpu_are_checked_on_request():
    program = """
import torch
from flash_dmattn import KeyLists
for wrong in (-2, 8, 1 << 30):
    indices = torch.tensor([3, -1, wrong], device="cuda", dtype=torch.int32).expand(1, 1, 5, 3)
    try:
        KeyLists.from_indices(indices, 5, 8)
    except ValueError as error:
        assert f"indices must be from 0 to 7, or -1 for none, got {wrong}" in str(error), error
        print("refused")
"""
    environment = {**os.environ, "FLASH_DMATTN_CHECK": "1"}
    ran = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert ran.stdout.split() == ["refused"] * 3, ran.stderr
