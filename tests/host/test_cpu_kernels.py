"""The CPU kernels of fixed length: packed forms, probabilities, long sums, reproducibility."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import inputs, rand_mask, run

from flash_dmattn import flash_dmattn_func, flash_dmattn_kvpacked_func, flash_dmattn_qkvpacked_func


def test_key_heads_without_query_heads():
    tensors = [torch.randn(2, 5, heads, 8, requires_grad=True) for heads in (0, 2, 2)]
    out = flash_dmattn_func(*tensors)
    assert out.shape == (2, 5, 0, 8)
    assert all((x == 0).all() for x in torch.autograd.grad(out.sum(), tensors))


def test_packed_forms_are_the_same_function():
    qkv = torch.randn(2, 33, 3, 4, 16, requires_grad=True)
    mask, bias = rand_mask(2, 4, 33, 33), torch.randn(2, 4, 33, 33)
    options = {"attn_mask": mask, "attn_bias": bias, "is_causal": True, "softcap": 2.0, "return_lse": True}
    out, lse = flash_dmattn_func(*qkv.unbind(2), **options)
    packed = [
        flash_dmattn_qkvpacked_func(qkv, **options),
        flash_dmattn_kvpacked_func(qkv[:, :, 0], qkv[:, :, 1:], **options),
    ]
    dout = torch.randn_like(out)
    (expected,) = torch.autograd.grad(out, qkv, dout)
    for packed_out, packed_lse in packed:
        assert torch.equal(packed_out, out) and torch.equal(packed_lse, lse)
        assert torch.equal(torch.autograd.grad(packed_out, qkv, dout)[0], expected)


def test_probabilities():
    query, key, value = inputs(2, 9, 12, 4, 2, 8)
    mask, bias = rand_mask(2, 2, 9, 12), torch.randn(2, 4, 1, 12)
    out, lse, probs = flash_dmattn_func(query, key, value, mask, bias, is_causal=True, return_attn_probs=True)
    assert probs.shape == (2, 4, 9, 12) and not probs.requires_grad
    torch.testing.assert_close(torch.einsum("bhij,bjhd->bihd", probs, value.repeat_interleave(2, dim=2)), out)
    torch.testing.assert_close(probs.sum(-1), (lse > -torch.inf).float())


@pytest.mark.parametrize("head_dim", [136, 192])
def test_long_sums_of_the_backward_are_split(head_dim):
    """<do, v> is a sum of D terms, from which D_i is subtracted: one chain of additions has twice this error."""
    dout, value = torch.rand(1, 32, 1, head_dim), torch.rand(1, 600, 1, head_dim)
    query, bias = torch.zeros_like(dout), torch.zeros(1, 1, 32, 600, requires_grad=True)
    (dbias,) = torch.autograd.grad(flash_dmattn_func(query, torch.zeros_like(value), value, None, bias), bias, dout)
    products = torch.einsum("bihd, bjhd -> bhij", dout.double(), value.double())
    errors = dbias * 600 - (products - products.mean(-1, keepdim=True))
    assert errors.square().mean().sqrt() <= 1.1 * torch.finfo(torch.float32).eps * products.mean()


@pytest.fixture
def any_number_of_threads():
    threads = torch.get_num_threads()
    yield (1, 2, 3, 4, 8, 16)
    torch.set_num_threads(threads)


def moved(tensor, numbers):
    """A copy of the tensor whose address is offset by some numbers from an allocation."""
    memory = torch.empty(tensor.numel() + numbers, dtype=tensor.dtype)
    return memory[numbers:].view(tensor.shape).copy_(tensor)


@pytest.mark.parametrize("sparse", ["tiles", "lists"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "batch, heads, kv_heads, seqlen_q, seqlen_k, head_dim",
    [
        *((1, 1, 1, 5, 257, 64), (1, 1, 1, 257, 257, 40), (1, 2, 1, 129, 600, 32), (2, 4, 2, 300, 300, 16)),
        *((2, 4, 2, 8, 700, 40), (3, 4, 4, 1, 1025, 24), (40, 2, 2, 49, 49, 32)),
        # Products of these sizes round otherwise where an operand is not aligned.
        *((1, 1, 1, 8, 513, 24), (1, 1, 1, 8, 257, 40), (1, 1, 1, 257, 257, 16)),
    ],
)
@pytest.mark.parametrize("bias_rows", ["none", "key", "dense"])
def test_the_same_bits_for_any_number_of_threads_and_any_address(
    any_number_of_threads, bias_rows, batch, heads, kv_heads, seqlen_q, seqlen_k, head_dim, dtype, sparse
):
    tensors = inputs(batch, seqlen_q, seqlen_k, heads, kv_heads, head_dim, dtype)
    mask = rand_mask(1, 1, seqlen_q, seqlen_k)
    bias = torch.randn(1, heads, 1 if bias_rows == "key" else seqlen_q, seqlen_k).to(dtype)
    bias = None if bias_rows == "none" else bias
    dout, dlse = torch.randn_like(tensors[0]), torch.randn(batch, heads, seqlen_q)

    def results(threads, numbers):
        torch.set_num_threads(threads)
        *there, bias_there, dout_there = (None if x is None else moved(x, numbers) for x in (*tensors, bias, dout))
        options = {"is_causal": True, "deterministic": True, "sparse": sparse}
        return run(flash_dmattn_func, there, mask, bias_there, dout_there, dlse, **options)

    first = results(1, 0)
    for threads in any_number_of_threads:
        assert all(torch.equal(a, b) for a, b in zip(results(threads, 0), first)), f"{threads} threads"
    for numbers in (1, 2, 3, 8):
        assert all(torch.equal(a, b) for a, b in zip(results(2, numbers), first)), f"{numbers} numbers away"


def test_the_same_bits_where_nothing_limits_the_threads():
    """Workers of pytest-xdist set MKL_NUM_THREADS (conftest.py): here the test above runs in a process without it."""
    limits = ("OMP_", "MKL_", "OPENBLAS_", "PYTEST_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(limits)}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    selected = "the_same_bits_for_any_number_of_threads and none and float32"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-k", selected, __file__]
    done = subprocess.run(command, cwd=Path(__file__).parent, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
