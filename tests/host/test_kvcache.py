"""flash_dmattn_with_kvcache on the CPU: caches, appended tokens, mixed batches, and what no call may read."""

import pytest
import torch
from kvcaches import check, make_call, make_sequence, make_sequences, split

from flash_dmattn import flash_dmattn_func, flash_dmattn_with_kvcache

LAYOUTS = {
    "contiguous": {"permute": False, "spare": 0},
    "batch elements": {},
    "pages of 16": {"page_size": 16},
    "pages of 64": {"page_size": 64},
}
BATCHES = {
    "decoding": [(40, 1), (0, 1), (299, 1), (64, 1)],
    "few rows": [(40, 5), (0, 5), (299, 5)],
    "chunks": [(100, 40), (0, 40), (7, 40)],
    "mixed": [(40, 1), (130, 30), (0, 17), (64, 1), (12, 0), (0, 0), (33, 4)],
    "packed decoding": [(40, 1), (0, 0), (299, 1)],
}
OPTIONS = {
    "dense": {},
    "window 8": {"window_size": 8},
    "window 64": {"window_size": 64},
    "window beyond": {"window_size": 1000},
    "window 0": {"window_size": 0},
}
each_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
each_batch = pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
each_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


@pytest.mark.parametrize("appends", [True, False], ids=["append", "no append"])
@each_layout
@each_batch
@each_option
def test_equals_float64(layout, batch, options, appends):
    check(make_sequences(batch), options=options, appends=appends, **layout)


@each_layout
@each_batch
def test_writes_the_new_tokens_and_nothing_else(layout, batch):
    sequences = make_sequences(batch)
    torch.manual_seed(1)
    call = make_call(sequences, **layout)
    torch.manual_seed(1)
    filled = make_call(sequences, appends=False, **layout)
    call(window_size=8)
    for name, ours, expected in (
        ("k_cache", call.k_cache, filled.k_cache),
        ("v_cache", call.v_cache, filled.v_cache),
        ("bias_cache", call.arguments["bias_cache"], filled.arguments["bias_cache"]),
    ):
        torch.testing.assert_close(ours, expected, rtol=0, atol=0, equal_nan=True, msg=lambda m: f"{name}: {m}")
