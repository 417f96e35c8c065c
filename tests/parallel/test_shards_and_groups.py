"""Shards of tensors and masks, process groups and device meshes."""

import weakref

import pytest
import torch
import torch.distributed as dist
from helpers import reference
from sharded_cases import Case, lengths_for, of_rank, on_both

from flash_dmattn import KeyIntervalMask
from flash_dmattn.parallel import context_parallel_attention, positions, shard, unshard
from flash_dmattn.parallel.groups import exchange_on_host

pytestmark = pytest.mark.xdist_group("ranks")  # the processes are started by one worker


def shard_and_join(layout, lengths):
    whole = torch.arange(2 * sum(lengths) * 3).view(2, -1, 3)
    part = shard(whole, layout=layout)
    places = positions(whole.shape[1], layout=layout)
    uneven = whole.split(lengths, 1)[dist.get_rank()]
    joined_again = unshard(part, layout=layout), unshard(part.transpose(1, 2), -1, layout=layout).transpose(1, 2)
    return (
        torch.equal(part, whole[:, places]),
        all(torch.equal(x, whole) for x in joined_again),
        layout == "zigzag" or torch.equal(unshard(uneven), whole),
    )


@on_both
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_shards(ranks, layout):
    for results in ranks.results(shard_and_join, layout, lengths_for(ranks, layout == "zigzag")):
        assert results == (True, True, True)


def unshard_parts(kind):
    part = torch.zeros(1, 4, 1, dtype=(torch.int32, torch.float32)[dist.get_rank()] if kind == "dtypes" else None)
    return unshard(part, 3 if kind == "dim" else 1)


def test_parts_that_do_not_fit_are_refused(two):
    for failure in two.run(unshard_parts, "dtypes"):
        assert failure.kind == "ValueError" and "same dtype and shape on every rank" in failure.message
    for failure in two.run(unshard_parts, "dim"):
        assert failure.kind == "IndexError" and "dim must be a dimension of part" in failure.message


def shard_of(kind):
    whole, dim = {"dim": (torch.zeros(1, 4), 9), "type of dim": (torch.zeros(1, 4), "x"), "list": ([1], 0)}[kind]
    return shard(whole, dim)


@pytest.mark.parametrize(
    "kind, error, message",
    [
        ("dim", "IndexError", "dim must be a dimension of whole, of shape (1, 4), got 9"),
        ("type of dim", "TypeError", "dim must be an int, got str"),
        ("list", "TypeError", "whole must be a torch.Tensor or a KeyIntervalMask, got list"),
    ],
)
def test_wrong_arguments_of_shard(two, kind, error, message):
    for failure in two.run(shard_of, kind):
        assert failure.kind == error and message in failure.message, failure


def shard_of_mask(layout="contiguous"):
    mask = KeyIntervalMask.sliding_window(21, 21, 5)
    part, places = shard(mask, layout=layout), positions(21)
    same = torch.equal(part.start, mask.start[..., places]) and torch.equal(part.end, mask.end[..., places])
    return same and part.rows == 21 and part.keys_per_row == 5


def test_shards_of_a_mask(two):
    assert two.results(shard_of_mask) == [True, True]
    assert all("contiguous" in failure.message for failure in two.run(shard_of_mask, "zigzag"))


def attend_in(kind):
    """out and dkey of a window in a group of two ranks out of four, by a group and by a mesh."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "context"))
    group = {"group": mesh.get_group("context"), "mesh": mesh["context"]}[kind]
    rank = mesh.get_local_rank("context")
    case = Case((20, 20), bias=(1, 1, 1, "S"), options={"is_causal": True, "window_size": 7})
    rows, _, bias, *_ = case.make()
    key = of_rank(case, rows[1], 1, rank).requires_grad_()
    query, value, bias = of_rank(case, rows[0], 1, rank), of_rank(case, rows[2], 1, rank), of_rank(case, bias, 3, rank)
    out = context_parallel_attention(query, key, value, attn_bias=bias, group=group, **case.options)
    out.sum().backward()
    return out.detach(), key.grad


def group_of_a_graph(options):
    """Whether a destroyed group is gone while a graph that used it lives, and the error of its backward."""
    group = dist.new_group()
    rows = [torch.randn(1, 8, 2, 8, requires_grad=True) for _ in range(3)]
    bias = torch.randn(1, 1, 1, 8)
    out = context_parallel_attention(*rows, attn_bias=bias, is_causal=True, group=group, **options)
    reference_to_group = weakref.ref(group)
    dist.destroy_process_group(group)
    del group
    try:
        out.sum().backward()
    except RuntimeError as error:
        return reference_to_group() is None, str(error)


@pytest.mark.parametrize("options", [{}, {"window_size": 3}], ids=str)
def test_a_graph_does_not_keep_a_group_alive(two, options):
    """A group that outlives destroy_process_group may abort the process at its exit."""
    for is_gone, message in two.results(group_of_a_graph, options):
        assert is_gone and "the process group of this call has been destroyed" in message


def test_groups_and_meshes(four):
    rows, _, bias, *_ = Case((20, 20), bias=(1, 1, 1, "S")).make()
    key = rows[1].requires_grad_()
    out = reference(rows[0], key, rows[2], attn_bias=bias, is_causal=True, window_size=7)
    out.sum().backward()
    for kind in ("group", "mesh"):
        results = four.results(attend_in, kind)
        for pair in (results[:2], results[2:]):
            assert torch.allclose(torch.cat([x for x, _ in pair], 1), out, rtol=0, atol=1e-11)
            assert torch.allclose(torch.cat([x for _, x in pair], 1), key.grad, rtol=0, atol=1e-11)


def wrong_group(kind):
    from torch.distributed.device_mesh import init_device_mesh

    rows = [torch.zeros(1, 4, 2, 8) for _ in range(3)]
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "context"))
    of_each = [dist.new_group([rank]) for rank in range(2)]
    group = {"number": 3, "mesh": mesh, "of others": of_each[1 - dist.get_rank()]}[kind]
    context_parallel_attention(*rows, group=group)


@pytest.mark.parametrize(
    "kind, error, message",
    [
        ("number", "TypeError", "ProcessGroup"),
        ("mesh", "ValueError", "one dimension"),
        ("of others", "ValueError", "include"),
    ],
)
def test_wrong_groups_are_errors_on_every_rank(two, kind, error, message):
    for failure in two.run(wrong_group, kind):
        assert failure.kind == error and message in failure.message and "group must" in failure.message


def test_torch_distributed_must_be_initialized():
    rows = [torch.zeros(1, 4, 2, 8) for _ in range(3)]
    with pytest.raises(RuntimeError, match="init_process_group"):
        context_parallel_attention(*rows)


def exchange_beside_a_default_device(fails):
    """ "meta" stands for "cuda" in torch.set_default_device."""
    error = ValueError("mine") if fails and dist.get_rank() else None
    with torch.device("meta"):
        return exchange_on_host(dist.group.WORLD, (dist.get_rank(), 7), error)


def test_the_exchange_on_the_host_does_not_use_the_default_device(two):
    assert two.results(exchange_beside_a_default_device, False) == [((0, 7), (1, 7))] * 2
    messages = [failure.message for failure in two.run(exchange_beside_a_default_device, True)]
    assert messages == ["rank 1 of the group rejected its arguments: ValueError: mine", "mine"]
