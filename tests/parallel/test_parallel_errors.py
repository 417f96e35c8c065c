"""An error on one rank is raised on all ranks, and names the argument."""

import contextlib
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from sharded_cases import Case, check
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from flash_dmattn import KeyIntervalMask, KeyLists
from flash_dmattn.parallel import context_parallel_attention

pytestmark = pytest.mark.xdist_group("ranks")  # the processes are started by one worker


def attend(changes, common=()):
    """A call whose tensor shapes or options differ by rank."""
    changes = {**dict(common), **changes.get(dist.get_rank(), changes.get("all", {}))}
    sizes = {"query": (1, 8, 4, 8), "key": (1, 8, 2, 8), "value": (1, 8, 2, 8), "attn_bias": None, "attn_mask": None}
    tensors = {}
    for name, shape in sizes.items():
        shape = changes.pop(name, shape)
        if isinstance(shape, tuple):
            tensors[name] = torch.zeros(shape, dtype=torch.bool if name == "attn_mask" else torch.float32)
        else:
            tensors[name] = shape
    if (dtype := changes.pop("key_dtype", None)) is not None:
        tensors["key"] = tensors["key"].to(dtype)
    if changes.pop("nan", False):
        tensors["attn_bias"][0, 0, 0, 3] = torch.nan
    if changes.pop("dtensor", False):
        mesh = DeviceMesh.from_group(dist.new_group([dist.get_rank()], use_local_synchronization=True), "cpu")
        tensors["value"] = DTensor.from_local(tensors["value"], mesh)
    if changes.pop("requires_grad", False):
        tensors["key"].requires_grad_()
    return context_parallel_attention(**tensors, **changes).shape


WINDOW = {"attn_bias": (1, 2, 1, 8), "is_causal": True, "window_size": 3}
PACKED = {
    "cu_seqlens": torch.tensor([0, 16], dtype=torch.int32),
    **{"query": (8, 4, 8), "key": (8, 2, 8), "value": (8, 2, 8)},
}
REFUSED_BY_ONE = [
    ({"key_dtype": torch.float64}, {}, "TypeError", "key"),
    ({"key": (1, 9, 2, 8)}, {}, "ValueError", "value"),
    ({"key": (1, 9, 2, 8), "value": (1, 9, 2, 8)}, {}, "ValueError", "as many keys as rows"),
    ({"query": 3}, {}, "TypeError", "query"),
    ({"nan": True}, WINDOW, "ValueError", "attn_bias must not be NaN where window_size selects by it"),
    ({"is_causal": False}, WINDOW, "ValueError", "is_causal"),
    ({"softcap": -1.0}, {}, "ValueError", "softcap"),
    ({"layout": "ring"}, {}, "ValueError", "layout"),
    ({"layout": "zigzag"}, WINDOW, "ValueError", "layout='zigzag' does not support window_size, got it: use layout="),
    (
        {"layout": "zigzag", "attn_mask": KeyIntervalMask(*torch.zeros(2, 1, 1, 8, dtype=torch.int32))},
        {"attn_bias": (1, 1, 8, 16)},
        "ValueError",
        "layout='zigzag' does not support KeyIntervalMask, got it: use layout='contiguous'",
    ),
    ({"layout": "zigzag"}, PACKED, "ValueError", "layout='zigzag' does not support cu_seqlens, got it"),
    ({"attn_bias": (1, 3, 1, 8)}, WINDOW, "ValueError", "attn_bias"),
    ({"window_size": (3, 0)}, {}, "TypeError", "attn_mask=shard(KeyIntervalMask.sliding_window(S, S, (left, right)))"),
    ({"window_size": (3, 0)}, PACKED, "TypeError", "attn_mask=shard(KeyIntervalMask.sliding_window_varlen(cu_seqlens"),
    (
        {"attn_mask": KeyLists.build(KeyIntervalMask.causal(8, 8), 8)},
        {},
        "TypeError",
        "attn_mask must be a bool torch.Tensor or a KeyIntervalMask, got KeyLists",
    ),
    ({"attn_mask": "x"}, {}, "TypeError", "attn_mask must be a bool torch.Tensor or a KeyIntervalMask, got str"),
    ({"attn_mask": KeyIntervalMask.causal(16, 16)}, {}, "ValueError", "shard"),
    ({"dtensor": True}, {}, "TypeError", "to_local"),
    ({"cu_seqlens": torch.tensor([0, 16])}, {}, "TypeError", "cu_seqlens"),
    (
        {"relative_bias": torch.zeros(1, 4, 9)},
        WINDOW,
        "ValueError",
        "relative_bias is for calls that all-gather K and V",
    ),
    ({"relative_bias": torch.zeros(1, 4, 3, 9)}, {}, "ValueError", "relative_bias of a grid is for one rank"),
    ({"relative_bias": torch.zeros(1, 4, 8)}, {}, "ValueError", "relative_bias must have an odd number"),
    ({"sinks": torch.zeros(3)}, {}, "ValueError", "sinks must be"),
    ({"fixed_shapes": "yes"}, WINDOW, "TypeError", "fixed_shapes"),
    (
        {"attn_mask": KeyIntervalMask(*torch.zeros(2, 8, 1, dtype=torch.int32))},
        {},
        "ValueError",
        "attn_mask must be a KeyIntervalMask ({B|1}, {H|Hkv|1}, S_r) without cu_seqlens, got shape (8, 1)",
    ),
    (
        {"attn_mask": KeyIntervalMask(*torch.zeros(2, 1, 1, 8, dtype=torch.int32))},
        PACKED,
        "ValueError",
        "attn_mask must be a KeyIntervalMask (S_r, {H|Hkv|1}) with cu_seqlens, got shape (1, 1, 8)",
    ),
    ({"attn_mask": (1, 1)}, PACKED, "ValueError", "attn_mask must have one value per key with cu_seqlens"),
]


@pytest.mark.parametrize("change, common, error, message", REFUSED_BY_ONE)
def test_an_error_on_one_rank_raises_on_all(two, change, common, error, message):
    other, one = two.run(attend, {1: change}, common)
    assert one.kind == error and message in one.message, one
    assert other.kind == "RankError" and "rank 1" in other.message and message in other.message, other
    assert all(isinstance(shape, torch.Size) for shape in two.run(attend, {}, common))  # the group is still usable


REFUSED_BY_ALL = [
    ({1: {"is_causal": True}}, {}, "is causal"),
    ({1: {"query": (1, 8, 2, 8)}}, {}, "heads of query"),
    ({1: {"value": (1, 8, 2, 16)}}, {}, "head dimension of value"),
    ({1: {"window_size": 4}}, WINDOW, "window size"),
    ({1: {"softmax_scale": 0.5}}, {}, "softmax scale"),
    ({1: {"requires_grad": True}}, {}, "gradients"),
    ({1: {"relative_bias": torch.zeros(1, 4, 7)}}, {"relative_bias": torch.zeros(1, 4, 9)}, "entries of relative bias"),
    ({1: {"attn_bias": None}}, {"attn_bias": (1, 2, 1, 8)}, "attn bias"),
    ({1: {"attn_bias": (1, 1, 1, 8)}}, {"attn_bias": (1, 2, 1, 8)}, "heads of attn bias"),
    ({"all": {"attn_bias": (1, 2, 8, 8)}}, {}, "attn_bias must be"),
    ({"all": {"attn_mask": (1, 2, 1, 16)}}, {}, "attn_mask must be"),
    ({1: {"attn_mask": (1, 1, 8, 16)}}, {"attn_mask": (1, 1, 1, 8)}, "attn_mask must be"),
    ({"all": {"attn_mask": KeyIntervalMask.causal(8, 8)}}, {}, "made for 8"),
    ({1: {"query": (1, 12, 4, 8), "key": (1, 12, 2, 8), "value": (1, 12, 2, 8)}}, {"layout": "zigzag"}, "same length"),
    ({"all": dict.fromkeys(("query", "key", "value"), (1, 7, 2, 8))}, {"layout": "zigzag"}, "2 x 2"),
]


@pytest.mark.parametrize("changes, common, message", REFUSED_BY_ALL)
def test_inconsistent_arguments_raise_on_all_ranks(two, changes, common, message):
    for failure in two.run(attend, changes, common):
        assert failure.kind == "ValueError" and message in failure.message, failure


def test_packed_sequences_must_be_the_same_and_end_with_the_rows(two):
    rows = dict.fromkeys(("query", "key", "value"), (8, 2, 8))

    def sequences(*cuts):
        return {"cu_seqlens": torch.tensor(cuts, dtype=torch.int32)}

    for failure in two.run(attend, {0: sequences(0, 5, 16), 1: sequences(0, 6, 16)}, rows):
        assert failure.kind == "ValueError" and "cu seqlens" in failure.message
    for failure in two.run(attend, {"all": sequences(0, 5, 15)}, rows):
        says = "cu_seqlens must be non-decreasing from 0 to 16, the rows of all ranks, got cu_seqlens[-1] = 15"
        assert failure.kind == "ValueError" and says in failure.message


def test_lengths_that_are_given_are_not_asked_for(two):
    for problem in ({"bias": (1, 1, 1, "S"), "options": {"is_causal": True, "window_size": 9}}, {}):
        options = {**problem.get("options", {}), "shard_lengths": (30, 27)}
        check(two, Case((30, 27), **{**problem, "options": options}))
    for failure in two.run(attend, {"all": {"shard_lengths": (8, 8, 8)}}):
        assert failure.kind == "ValueError" and "shard_lengths" in failure.message
    for failure in two.run(attend, {"all": {"shard_lengths": 8}}):
        assert failure.kind == "TypeError" and "shard_lengths must be a sequence of ints" in failure.message
    for failure in two.run(attend, {"all": {"shard_lengths": (9, 9)}}):
        assert failure.kind == "ValueError" and "shard_lengths" in failure.message


def fail_midway():
    """Rank 1 fails after the ranks have agreed; rank 0 waits for it no longer than the group's time-out."""
    import time
    from datetime import timedelta

    from flash_dmattn.parallel import collectives

    group = dist.new_group(timeout=timedelta(seconds=2))
    rows = [torch.zeros(1, 4, 2, 8) for _ in range(3)]
    started = time.perf_counter()
    with contextlib.ExitStack() as stack:
        if dist.get_rank() == 1:
            error = torch.OutOfMemoryError("no room")
            stack.enter_context(mock.patch.object(collectives, "start_all_gather", side_effect=error))
        try:
            context_parallel_attention(*rows, group=group)
        except RuntimeError as error:
            return type(error).__name__, str(error), time.perf_counter() - started


def test_a_rank_that_fails_midway_is_not_waited_for_forever(two):
    waiting, failed = two.results(fail_midway)
    assert failed[:2] == ("OutOfMemoryError", "no room")
    assert waiting is not None and waiting[2] < 20
