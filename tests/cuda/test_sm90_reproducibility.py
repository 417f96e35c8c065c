"""The sm90 kernels repeat their results bit by bit, and agree with the sm80 kernels on random calls."""

import random
import subprocess
import sys

import pytest
import torch
from generate_kernels import HEAD_DIMS
from gpu_inputs import intervals, mask_of, on_gpu, randn
from helpers import NAMES, run
from sm90 import BIASES, bias_of, distance, offsets

from flash_dmattn import KeyIntervalMask, flash_dmattn_func, flash_dmattn_varlen_func

pytestmark = [pytest.mark.gpu, pytest.mark.hopper, pytest.mark.usefixtures("use")]


@BIASES
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_the_forward_is_bitwise_reproducible(head_dim, pairs):
    tensors, mask = on_gpu(2, 700, 904, 16, 4, head_dim), mask_of(2, 1, 700, 904)
    bias = bias_of(pairs, 2, 16, 700, 904)
    for options in ({}, {"is_causal": True}, {"attn_mask": mask}, {"attn_mask": mask, "softcap": 5.0}):
        first = flash_dmattn_func(*tensors, attn_bias=bias, return_lse=True, **options)
        for _ in range(50):
            again = flash_dmattn_func(*tensors, attn_bias=bias, return_lse=True, **options)
            assert all(torch.equal(x, y) for x, y in zip(again, first))


def tiles_of(batch, rows, keys):
    """A mask in which each row block sees few key blocks, different ones per batch element, and some see none."""
    few = torch.rand(batch, 1, -(-rows // 128), -(-keys // 128), device="cuda") < 0.3
    few[:, :, 3] = False
    of_pairs = few.repeat_interleave(128, 2).repeat_interleave(128, 3)[:, :, :rows, :keys]
    return of_pairs & mask_of(batch, 1, rows, keys)


@pytest.mark.parametrize("bias_shape", [None, (2, 4, 1), (2, 8, 900), (1, 8, 900)], ids=str)
@pytest.mark.parametrize("head_dim", [32, 64, 128, 192, 256])
def test_deterministic_gradients_are_bitwise_reproducible(head_dim, bias_shape):
    """CTAs wait for their predecessors in the dQ order, where all or few of them visit a row block."""
    rows, keys = 900, 2568
    tensors, dout = on_gpu(2, rows, keys, 8, 4, head_dim), randn(2, rows, 8, head_dim) / 8
    bias = None if bias_shape is None else randn(*bias_shape, keys)
    dlse = torch.randn(2, 8, rows, device="cuda") / 8
    window = KeyIntervalMask.sliding_window(rows, keys, 300, device="cuda")
    masks = (None, mask_of(2, 1, rows, keys), tiles_of(2, rows, keys), window)
    for mask in masks:
        for causal in (False, True):

            def gradients(mask=mask, **options):
                given = {"sparse": "auto" if mask is None else "tiles", **options}
                return run(flash_dmattn_func, tensors, mask, bias, dout, dlse, **given)

            first = gradients(is_causal=causal, deterministic=True)
            for _ in range(50):
                again = gradients(is_causal=causal, deterministic=True)
                assert all(torch.equal(x, y) for x, y in zip(again, first))
            for name, x, y in zip(NAMES, first, gradients(is_causal=causal)):
                assert distance(x.float(), y.float()) < 2e-2, name


def test_deterministic_gradients_of_variable_length():
    rows, keys = [700, 0, 129, 70, 1, 500], [1300, 40, 129, 0, 65, 264]
    cu_q, cu_k = offsets(rows), offsets(keys)
    tensors = [randn(sum(n), h, 128).requires_grad_() for n, h in ((rows, 4), (keys, 2), (keys, 2))]
    dout, results = randn(sum(rows), 4, 128), []
    for _ in range(50):
        out = flash_dmattn_varlen_func(
            *tensors, None, None, cu_q, cu_k, max(rows), max(keys), is_causal=True, deterministic=True
        )
        results.append(torch.autograd.grad(out, tensors, dout))
    assert all(torch.equal(x, y) for again in results for x, y in zip(again, results[0]))


def random_call(chance: random.Random):
    """(tensors, mask, bias, options) of a random small call."""
    batch, (heads, kv_heads) = chance.choice([1, 2, 3, 4]), chance.choice([(1, 1), (2, 2), (4, 1), (4, 2), (8, 1)])
    rows = chance.choice([65, 100, 127, 128, 129, 191, 192, 193, 300, 449])
    keys = chance.choice([1, 8, 63, 64, 65, 128, 129, 200, 256, 384, 520])
    head_dim = chance.choice([8, 32, 40, 64, 64, 96, 128, 128, 192, 256])
    dtype = chance.choice([torch.bfloat16, torch.float16])

    def broadcast():
        return chance.choice([batch, 1]), chance.choice([heads, kv_heads, 1])

    mask = bias = None
    options = {"is_causal": chance.random() < 0.5, "softcap": chance.choice([0.0, 0.0, 4.0])}
    options["sparse"] = chance.choice(["tiles", "lists"])
    options["deterministic"] = chance.random() < 0.3
    kind = chance.choice(["none", "key", "dense", "intervals"])
    if kind == "intervals":
        mask = intervals(*broadcast(), keys, rows=rows)
    elif kind != "none":
        mask = mask_of(*broadcast(), 1 if kind == "key" else rows, keys, visible=chance.choice([0.02, 0.5, 0.98]))
    else:
        options["sparse"] = "auto"
    kind = chance.choice(["none", "key", "dense"])
    if kind != "none":
        bias = randn(*broadcast(), 1 if kind == "key" else rows, keys, dtype=dtype)
    return on_gpu(batch, rows, keys, heads, kv_heads, head_dim, dtype=dtype), mask, bias, options


@pytest.mark.parametrize("seed", range(5))
def test_random_calls_agree_with_the_sm80_kernels(seed, use):
    """A thousand calls per seed: no hang, no NaN, and no difference beyond rounding."""
    chance = random.Random(seed)
    for number in range(1000):
        tensors, mask, bias, options = random_call(chance)
        dout = torch.randn_like(tensors[0])
        dlse = torch.randn(dout.shape[0], dout.shape[2], dout.shape[1], device="cuda")
        results = []
        for architecture in ("sm90", "sm80"):
            use(architecture)
            results.append(run(flash_dmattn_func, tensors, mask, bias, dout, dlse, **options))
        apart = torch.stack([distance(x.float(), y.float()) for x, y in zip(*results)])
        assert (apart < 5e-2).all(), (
            f"call {number}, {options}: {dict(zip(NAMES, apart.tolist()))} of {[x.shape for x in tensors]}, "
            f"mask {type(mask)} {getattr(mask, 'shape', '')}, bias {getattr(bias, 'shape', None)}"
        )


def test_new_threads_without_a_cuda_context():
    """A server's thread and autograd's: encoding a TMA descriptor needs a CUDA context in the calling thread."""
    program = """
import threading
import torch
from flash_dmattn import flash_dmattn_func

def tensors(*shape):
    return [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in "qkv"]

def forward(out):
    with torch.no_grad():
        out.append(flash_dmattn_func(*long))

long, pairs = tensors(1, 512, 2, 128), tensors(64, 256, 2, 32)
bias = torch.randn(1, 2, 256, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
torch.cuda.synchronize()
out = []
thread = threading.Thread(target=forward, args=(out,))
thread.start()
thread.join()
assert torch.equal(out[0], flash_dmattn_func(*long))
flash_dmattn_func(*pairs, attn_bias=bias).sum().backward()
assert all(x.grad.isfinite().all() for x in (*pairs, bias))
print("done")
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.stdout.split() == ["done"], ran.stderr
