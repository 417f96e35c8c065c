"""FlopCounterMode counts the visible scores: 4 D operations each in the forward, 10 D in the backward."""

import subprocess
import sys

import pytest
import torch
from helpers import rand_intervals, rand_mask
from torch._subclasses import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from flash_dmattn import KeyIntervalMask, KeyLists, flash_dmattn_func, flash_dmattn_varlen_func

B, S, H, HKV, D = 2, 300, 4, 2, 16


def counted(call):
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


def attend(mask=None, is_causal=False, rows=S, device="cpu"):
    query = torch.randn(B, rows, H, D, device=device, requires_grad=True)
    key, value = (torch.randn(B, S, HKV, D, device=device, requires_grad=True) for _ in range(2))
    flash_dmattn_func(query, key, value, mask, is_causal=is_causal).sum().backward()


def visible(mask, is_causal):
    dense = mask if isinstance(mask, torch.Tensor) else mask.to_dense(S)
    dense = dense.expand(-1, -1, S, S)
    dense = dense.tril() if is_causal else dense
    return int(dense.sum()) * B * H // (dense.shape[0] * dense.shape[1])


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("make", [lambda: rand_mask(B, 1, S, S), lambda: rand_mask(1, HKV, 1, S)], ids=["rows", "keys"])
def test_bool_masks(make, is_causal):
    mask = make()
    assert counted(lambda: attend(mask, is_causal)) == 14 * D * visible(mask, is_causal)


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_intervals(is_causal):
    mask = rand_intervals(1, HKV, S, rows=S)
    assert counted(lambda: attend(mask, is_causal)) == 14 * D * visible(mask, is_causal)


def test_a_selection_by_lists():
    mask = KeyIntervalMask.topk(torch.randn(B, HKV, S), 20)
    assert counted(lambda: attend(KeyLists.build(mask, S))) == 14 * D * visible(mask, False)


def test_indices_that_tiles_share():
    indices = torch.arange(64, dtype=torch.int32).expand(1, 1, 3, 64)
    assert counted(lambda: attend(KeyLists.from_indices(indices, S, S, tile_rows=128))) == 14 * D * B * H * S * 64


def test_the_formulas_are_registered_whichever_module_is_imported_first():
    count = "from torch.utils.flop_counter import FlopCounterMode, flop_registry"
    for order in (["import flash_dmattn", count], [count, "import flash_dmattn"]):
        program = "; ".join([*order, "import torch; assert torch.ops.flash_dmattn.attention_forward in flop_registry"])
        subprocess.run([sys.executable, "-c", program], check=True)


def test_no_mask():
    assert counted(attend) == 14 * D * B * H * S * S
    assert counted(lambda: attend(is_causal=True)) == 14 * D * B * H * S * (S + 1) // 2
    # The first of the 2 S rows see nothing.
    assert counted(lambda: attend(is_causal=True, rows=2 * S)) == 14 * D * B * H * S * (S + 1) // 2


def test_variable_length():
    ends = torch.tensor([0, 3, 10], dtype=torch.int32)
    rows = [torch.randn(10, heads, D) for heads in (H, HKV, HKV)]
    flops = counted(lambda: flash_dmattn_varlen_func(*rows, None, None, ends, ends, 7, 7, is_causal=True))
    assert flops == 4 * D * H * (6 + 28)


def test_values_that_cannot_be_read():
    with FakeTensorMode():
        assert counted(lambda: attend(rand_mask(B, 1, S, S), True)) == 14 * D * B * H * S * (S + 1) // 2
