"""What ranks send to each other: no more keys than rows see, and the same number at any sequence length."""

import itertools
import weakref

import pytest
import torch
import torch.distributed as dist
from sharded_cases import Case, check, of_rank, on_both

from flash_dmattn import KeyIntervalMask

pytestmark = pytest.mark.xdist_group("ranks")  # the processes are started by one worker


def halo(case, fixed_shapes):
    """(fetched keys per head, received keys, keys that its rows see per head, shape of the mask) of this rank."""
    from flash_dmattn.parallel.shards import Shards
    from flash_dmattn.parallel.topk import plan_for_topk

    rank = dist.get_rank()
    bias = of_rank(case, case.make()[2], 3, rank)
    plan, mask = plan_for_topk(
        *(Shards(weakref.ref(dist.group.WORLD), case.lengths), bias, case.options["window_size"], None),
        *(case.kv_heads, fixed_shapes),
    )
    first = sum(case.lengths[:rank])
    # Keys of other ranks that rows of this rank see, by the definition of the mask.
    dense = KeyIntervalMask.topk(case.make()[2], case.options["window_size"]).to_dense()
    needed = dense[:, :, first : first + case.lengths[rank], :first].any(dim=2).sum(dim=-1)
    return plan.num_slots, sum(plan.recv_counts), needed, mask.end.shape


@on_both
def test_no_more_keys_are_fetched_than_rows_see(ranks):
    case = Case((64,) * ranks.size, heads=4, kv_heads=4, bias=(1, 4, 1, "S"), options={"window_size": 20})
    for rank, (fetched, received, needed, shape) in enumerate(ranks.results(halo, case, False)):
        assert received == needed.sum() and fetched == needed.max() <= 20
        assert shape == (1, 4, fetched + 64)
        assert rank == 0 or fetched > 0
    for rank, (fetched, received, *_) in enumerate(ranks.results(halo, case, True)):
        assert fetched == 20 * rank and received == 4 * fetched


def check_topk_keys(device):
    """topk_keys returns, sorted, the keys that the last row sees, and masked keys only where there are no others."""
    from flash_dmattn.parallel.topk import topk_keys

    generator = torch.Generator().manual_seed(0)
    for masked, tied in ((0.0, 0), (0.3, 0), (0.0, 4), (0.97, 4)):
        bias = torch.randn(2, 3, 700, generator=generator)
        bias = (bias * tied).round() if tied else bias
        bias = bias.masked_fill(torch.rand(bias.shape, generator=generator) < masked, -torch.inf)
        for count in (0, 1, 64, 100, 699):
            keys, is_one = (x.cpu() for x in topk_keys(bias.to(device), count))
            assert keys.shape == is_one.shape == (2, 3, count) and keys.dtype == torch.int64
            is_one &= bias.gather(-1, keys) > -torch.inf
            wanted = KeyIntervalMask.topk(bias, count, 1).to_dense()[:, :, 0]
            for head in itertools.product(range(2), range(3)):
                assert torch.equal(keys[head][is_one[head]], wanted[head].nonzero().flatten())


def test_best_keys():
    check_topk_keys("cpu")


@pytest.mark.gpu
def test_best_keys_on_gpus():
    check_topk_keys("cuda")


@on_both
@pytest.mark.parametrize("fixed_shapes", [None, False])
def test_bytes_of_a_window(ranks, fixed_shapes):
    """Together the ranks send at most 1.2 times `w` keys and values a rank, their gradients, and the bias."""
    heads, head_dim, window = 2, 64, 32
    options = {"is_causal": True, "window_size": window, "fixed_shapes": fixed_shapes}
    case = Case(
        (128,) * ranks.size,
        heads=4,
        kv_heads=heads,
        head_dim=head_dim,
        dtype=torch.bfloat16,
        bias=(1, heads, 1, "S"),
        bias_dtype=torch.float32,
        options=options,
    )
    traffic = check(ranks, case)
    keys = window * heads * head_dim * 2  # bytes
    bias = (case.seqlen - 128) * heads * 4
    assert sum(t.sent for t in traffic) == sum(t.received for t in traffic)
    assert sum(t.sent for t in traffic) <= 1.2 * ranks.size * (4 * keys + bias)
    assert max(t.collectives for t in traffic) <= 4  # bias, the worst keys, keys and values; their gradients


@on_both
@pytest.mark.parametrize("length", [40, 100, 300])
def test_a_window_sends_the_visible_keys_at_any_length(ranks, length):
    """Each key that rows of another rank see is sent once with its value and bias, and their gradients come back."""
    window, head_dim, size = 16, 8, 8  # size: bytes of a float64
    options = {"is_causal": True, "window_size": window}
    case = Case((length,) * ranks.size, head_dim=head_dim, bias=(1, 1, 1, "S"), options=options)
    visible = sum(int(needed.sum()) for _, _, needed, _ in ranks.results(halo, case, False))
    assert window <= visible <= window * (ranks.size - 1)
    keys = 2 * visible * (2 * head_dim + 1) * size
    selection = ranks.size * (ranks.size - 1) * (window + 2) * size  # the best biases of each rank, and the worst keys
    traffic = check(ranks, case)
    assert keys < sum(t.sent for t in traffic) <= keys + selection
    assert sum(t.received for t in traffic) == sum(t.sent for t in traffic)
