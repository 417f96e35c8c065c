"""Context parallel attention under checkpointing, determinism, autocast and torch.compile."""

import pytest
import torch
import torch.distributed as dist
from sharded_cases import Case, lengths_for, of_rank, on_both, sharded

from flash_dmattn import flash_dmattn_func
from flash_dmattn.parallel import context_parallel_attention

pytestmark = pytest.mark.xdist_group("ranks")  # the processes are started by one worker


def checkpointed(case):
    """Whether gradients with activation checkpointing equal those without."""
    from torch.utils.checkpoint import checkpoint

    rank = dist.get_rank()
    rows, _, bias, dout, _ = case.make()
    tensors = [of_rank(case, x, 1, rank) for x in rows] + [of_rank(case, bias, 3, rank)]
    dout = of_rank(case, dout, 1, rank)

    def gradients(wrap):
        leaves = [x.clone().requires_grad_() for x in tensors]
        out = wrap(lambda q, k, v, b: context_parallel_attention(q, k, v, attn_bias=b, **case.options), *leaves)
        return torch.autograd.grad(out, leaves, dout)

    again = gradients(lambda function, *args: checkpoint(function, *args, use_reentrant=False))
    return all(map(torch.equal, gradients(lambda function, *args: function(*args)), again))


def test_checkpointing(two):
    for options in ({"is_causal": True, "window_size": 9}, {"is_causal": True}):
        assert two.results(checkpointed, Case((24, 24), bias=(1, 1, 1, "S"), options=options)) == [True, True]


def repeated(case):
    (first, _), (second, _) = sharded(case), sharded(case)
    return all(map(torch.equal, first, second))


@on_both
def test_deterministic_gradients_are_bitwise_reproducible(ranks):
    sizes = {"heads": 4, "kv_heads": 2, "dtype": torch.float32, "bias": (1, 2, 1, "S")}
    for options in ({"window_size": 15}, {}):
        case = Case(lengths_for(ranks, False), options={"is_causal": True, "deterministic": True, **options}, **sizes)
        assert all(ranks.results(repeated, case))


def scale_gradients(problem):
    """The gradient of a softmax_scale per head: the sum over the ranks, and that of one process."""
    case = Case((24, 24), heads=2, bias=(1, 1, 1, "S"), options={"is_causal": True, **problem})
    rank = dist.get_rank()
    rows, _, bias, dout, _ = case.make()
    scale = torch.tensor([0.3, -0.2], dtype=torch.float64, requires_grad=True)
    whole = flash_dmattn_func(*rows, None, bias, scale, **case.options)
    (expected,) = torch.autograd.grad(whole, scale, dout)
    parts = [of_rank(case, x, 1, rank) for x in rows] + [None, of_rank(case, bias, 3, rank)]
    out = context_parallel_attention(*parts, softmax_scale=scale, **case.options)
    (gradient,) = torch.autograd.grad(out, scale, of_rank(case, dout, 1, rank))
    dist.all_reduce(gradient)
    return torch.allclose(out, of_rank(case, whole, 1, rank)) and torch.allclose(gradient, expected)


@pytest.mark.parametrize("problem", [{"window_size": 9}, {}], ids=str)
def test_a_scale_with_a_gradient(two, problem):
    assert two.results(scale_gradients, problem) == [True, True]


def under_autocast():
    rows = [torch.randn(1, 8, 2, 8) for _ in range(3)]
    bias = torch.randn(1, 2, 1, 8)
    with torch.autocast("cpu", torch.bfloat16):
        return [
            context_parallel_attention(*rows, attn_bias=bias, is_causal=True, **options).dtype
            for options in ({"window_size": 3}, {})
        ]


def test_autocast(two):
    assert two.results(under_autocast) == [[torch.bfloat16] * 2] * 2


def learned_biases_under_autocast():
    """Whether 16-bit relative biases and sinks are cast as query is."""
    torch.manual_seed(0)
    rows = [torch.randn(1, 8, 2, 8) for _ in range(3)]
    biases = {"relative_bias": torch.randn(1, 2, 9).half(), "sinks": torch.randn(2).half()}
    with torch.autocast("cpu", torch.bfloat16):
        out = context_parallel_attention(*rows, **biases)
    cast = {name: x.bfloat16() for name, x in biases.items()}
    return torch.equal(out, context_parallel_attention(*(x.bfloat16() for x in rows), **cast))


def test_autocast_of_learned_biases(two):
    assert two.results(learned_biases_under_autocast) == [True, True]


def one_row_under_autocast():
    """The dtypes of the outputs for a dense bias and one per row in float32. Rank 0 has one row."""
    length = (1, 11)[dist.get_rank()]
    rows = [torch.randn(1, length, 2, 8) for _ in range(3)]
    with torch.autocast("cpu", torch.bfloat16):
        return [context_parallel_attention(*rows, attn_bias=torch.randn(1, 2, length, n)).dtype for n in (12, 1)]


def test_autocast_of_a_shard_of_one_row(two):
    assert two.results(one_row_under_autocast) == [[torch.bfloat16] * 2] * 2


def with_a_mask_of_inference_mode():
    rows = [torch.randn(1, 8, 2, 8, requires_grad=True) for _ in range(3)]
    with torch.inference_mode():
        mask = torch.ones(1, 1, 8, 16, dtype=torch.bool)
    out = context_parallel_attention(*rows, mask)
    return all(x.isfinite().all() for x in torch.autograd.grad(out.sum(), rows))


def test_a_mask_made_in_inference_mode_serves_training(two):
    assert two.results(with_a_mask_of_inference_mode) == [True, True]


def compiled():
    """torch.compile makes a graph before and one after the call."""
    rows = [torch.randn(1, 8, 2, 8) for _ in range(3)]

    def model(query, key, value):
        return context_parallel_attention(query * 2, key, value, is_causal=True) + 1

    return torch.allclose(torch.compile(model, backend="eager")(*rows), model(*rows))


def test_compile(two):
    assert two.results(compiled) == [True, True]
