"""Every combination of sequence lengths against the float64 reference."""

import itertools

import helpers
import pytest
import torch
from helpers import LENGTHS
from paths import CAUSAL, LISTS, Path, both, case, cpu, cuda, on, triton, with_common_keys

from flash_dmattn import KeyLists

ALL_PAIRS = list(itertools.product(LENGTHS, LENGTHS))
SOME_PAIRS = [*zip(LENGTHS, reversed(LENGTHS)), (129, 1000), (1000, 65)]
CUDA_PAIRS = [*SOME_PAIRS, (1, 7), (2, 1), (129, 127), (255, 1000), (1000, 255)]
# The Triton interpreter is slow.
TRITON_PAIRS = [(1, 1), (1, 65), (65, 1), (63, 64), (64, 63), (33, 129), (129, 33), (96, 128)]

BIASES = ("none", "key", "dense")


def make_bias(path, kind, batch, heads, seqlen_q, seqlen_k):
    """No bias, one number per key, or one per score."""
    return None if kind == "none" else path.randn(batch, heads, 1 if kind == "key" else seqlen_q, seqlen_k)


def length_cases():
    lists = [(*lengths, "key") for lengths in (*SOME_PAIRS, (0, 9), (9, 0))]
    groups = [
        (both("bool"), [(*lengths, "key") for lengths in ALL_PAIRS]),
        (cpu("intervals", *LISTS), lists),
        (cuda("intervals", *LISTS), [(*lengths, bias) for lengths in CUDA_PAIRS for bias in BIASES]),
        (triton("none"), [(*lengths, "none") for lengths in TRITON_PAIRS]),
    ]
    return [case(path, *values) for paths, rest in groups for path in paths for values in rest]


@CAUSAL
@pytest.mark.parametrize("path, seqlen_q, seqlen_k, bias", length_cases())
def test_lengths(path, seqlen_q, seqlen_k, bias, causal):
    batch, heads = (2 if path.on_cuda and path.mask != "bool" else 1), (2 if path.mask == "bool" else 4)
    heads = 1 if path.backend else heads
    tensors = path.inputs(batch, seqlen_q, seqlen_k, heads, min(heads, 2), 64 if path.on_cuda else 8)
    mask = path.make_mask(batch, 2, seqlen_q, seqlen_k)
    bias = make_bias(path, bias, batch, 2 if bias == "key" else heads, seqlen_q, seqlen_k)
    out, lse, dq, *_ = path.check(tensors, mask, bias, is_causal=causal)
    blind = max(seqlen_q - seqlen_k, 0) if causal else 0
    assert (out[:, :blind] == 0).all() and (dq[:, :blind] == 0).all() and (lse[..., :blind] == -torch.inf).all()
    if path.on_cuda and path.by_lists:
        mask = with_common_keys(mask, seqlen_q)
        path.check(tensors, mask, bias, is_causal=causal)
        if causal:  # lists that leave causality to the kernels
            lists = KeyLists.build(mask, seqlen_q, seqlen_k)
            helpers.check(tensors, lists, bias, dense=mask, is_causal=True)


@pytest.mark.hopper
@on(Path("cuda", "bool", "tiles", "sm90"))
@CAUSAL
@pytest.mark.parametrize("kind", BIASES)
@pytest.mark.parametrize("seqlen_k", [1, 63, 64, 65, 127, 128, 129, 200, 257])
@pytest.mark.parametrize("seqlen_q", [65, 127, 128, 129, 191, 192, 193, 385])
def test_lengths_around_the_blocks_of_sm90(seqlen_q, seqlen_k, kind, causal, path):
    """With a dense bias the number of keys is a multiple of 8: TMA needs bias rows of a multiple of 16 bytes."""
    keys = -(-seqlen_k // 8) * 8 if kind == "dense" else seqlen_k
    tensors, mask = path.inputs(1, seqlen_q, keys, 2, 1, 64), path.make_mask(1, 2, seqlen_q, keys)
    path.check(tensors, mask, make_bias(path, kind, 1, 2, seqlen_q, keys), is_causal=causal)
