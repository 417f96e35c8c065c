"""FLASH_DMATTN_LOG=1 on a GPU: what the compiled module and the choice between tiles and lists report."""

import os
import subprocess
import sys

import pytest
from gpu_inputs import NEEDS_CUDA, runs_hopper_kernels
from programs import ROOT

pytestmark = NEEDS_CUDA

PROGRAM = """
import torch
from flash_dmattn import flash_dmattn_func, flash_dmattn_with_kvcache

def rows(batch, seqlen, heads, head_dim):
    return torch.randn(batch, seqlen, heads, head_dim, device="cuda", dtype=torch.bfloat16)

def call(rows_q, rows_k, **options):
    return flash_dmattn_func(rows(1, rows_q, 4, 128), rows(1, rows_k, 4, 128), rows(1, rows_k, 4, 128), **options)

for _ in range(2):
"""
CALLS = {
    # Rows of 129 elements: their strides are no multiple of 16 bytes.
    "unaligned rows": (
        "x = rows(1, 256, 4, 129)[..., :128]; flash_dmattn_func(x, x, x)",
        ["copy of rows: query, key, value or the gradient of out is copied"],
        False,
    ),
    # Bias rows of 257 elements.
    "unaligned bias": (
        "call(256, 257, attn_bias=rows(1, 4, 256, 257))",
        ["forward on the sm80 kernels: the sm90 kernels do not run this call: TMA cannot read the strides"],
        True,
    ),
    "few rows": (
        "call(1, 4096)",
        ["forward on the sm80 kernels: the sm90 kernels do not run this call: they do not support it"],
        True,
    ),
    "few keys": (
        "call(256, 64)",
        ["forward on the sm80 kernels: the sm90 kernels do not run this call: they are not faster for these sizes"],
        True,
    ),
    "bool mask beside a dense bias": (
        "call(256, 2048, attn_mask=torch.rand(1, 4, 256, 2048, device='cuda') < 0.1, attn_bias=rows(1, 4, 256, 2048))",
        ["tiles instead of key lists: with a dense bias the device does not count the keys of a bool mask"],
        False,
    ),
    "bool mask of a deterministic call": (
        "call(256, 2048, attn_mask=torch.rand(1, 4, 256, 2048, device='cuda') < 0.1, deterministic=True)",
        ["tiles instead of key lists: with deterministic=True the device does not count the keys of a bool mask"],
        False,
    ),
    "dense bias in float32": (
        "call(256, 2048, attn_bias=torch.randn(1, 4, 256, 2048, device='cuda'))",
        [
            "float32 bias: a dense attn_bias in float32 beside a 16-bit query is read score by score",
            "forward on the sm80 kernels: the sm90 kernels do not run this call: they do not support it",
        ],
        True,
    ),
    "an ordinary call": ("call(256, 2048, is_causal=True)", [], False),
}


def run(program, **variables):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])} | variables
    environment.pop("FLASH_DMATTN_ARCH", None)
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done


def reported(call, **variables):
    done = run(f"{PROGRAM}    {call}\ntorch.cuda.synchronize()", **variables)
    return [line for line in done.stderr.splitlines() if line.startswith("flash_dmattn: ")]


@pytest.mark.parametrize("name", CALLS)
def test_each_fallback_is_reported_once(name):
    call, said, needs_hopper = CALLS[name]
    if needs_hopper and not runs_hopper_kernels():
        pytest.skip("reports what the sm90 kernels do not run")
    lines = reported(call, FLASH_DMATTN_LOG="1")
    assert len(lines) == len(said), lines
    for line, text in zip(lines, said):
        assert line.startswith(f"flash_dmattn: {text}")


def test_nothing_is_reported_without_the_variable():
    assert reported(CALLS["unaligned rows"][0], FLASH_DMATTN_LOG="0") == []


def test_a_handler_gets_what_the_compiled_module_reports():
    """In place of stderr, from the thread of the caller and from autograd's."""
    program = (
        "import logging, sys\n"
        "logging.getLogger('flash_dmattn').addHandler(logging.StreamHandler(sys.stdout))\n"
        f"{PROGRAM}    x = rows(1, 256, 4, 128).requires_grad_()\n"
        "    flash_dmattn_func(x, x, x).backward(rows(1, 256, 4, 129)[..., :128])\n"
        "torch.cuda.synchronize()"
    )
    done = run(program, FLASH_DMATTN_LOG="1")
    (line,) = done.stdout.splitlines()
    assert line.startswith("flash_dmattn: copy of rows: query, key, value or the gradient of out is copied")
    assert "flash_dmattn: " not in done.stderr


PAGES = (
    "rows(8, 64, 4, 128), rows(8, 64, 4, 128), block_table=torch.arange(8, dtype=torch.int32, device='cuda')[None], "
)
PAGES += "bias_cache=rows(8, 64, 1, 4)[:, :, 0]"
CONTIGUOUS = "rows(1, 512, 4, 128), rows(1, 512, 4, 128), bias_cache=rows(1, 512, 1, 4)[:, :, 0]"
RELATIVE_BIAS = ", relative_bias=rows(1, 4, 1, 9)[:, :, 0]"


def reported_over_a_cache(cache, more=""):
    """What is reported of the keys of a chunk, beside what is reported of the kernels that attend to them."""
    call = f"flash_dmattn_with_kvcache(rows(1, 40, 4, 128), {cache}, cache_seqlens=512, window_size=32{more})"
    lines = reported(call, FLASH_DMATTN_LOG="1")
    return [line for line in lines if "attention over a cache by other operators" in line]


def test_keys_of_a_cache_that_are_gathered_are_reported():
    (line,) = reported_over_a_cache(PAGES, RELATIVE_BIAS)
    assert "no kernel reads the cache in place for this call" in line
    assert "with window_size and relative_bias these are all keys" in line


@pytest.mark.parametrize(
    "cache, more",
    [(CONTIGUOUS, ""), (PAGES, ""), (CONTIGUOUS, RELATIVE_BIAS)],
    ids=["contiguous", "pages", "contiguous, relative bias"],
)
def test_keys_that_are_read_in_place_are_not_reported(cache, more):
    assert not reported_over_a_cache(cache, more)
