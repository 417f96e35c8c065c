"""The calls that the sm90 kernels take, and those that fall back to the sm80 kernels."""

import re

import pytest
import torch
from generate_kernels import HEAD_DIMS
from gpu_inputs import CAUSAL, intervals, mask_of, on_gpu, randn
from helpers import check
from sm90 import BIASES, bias_of, biases_of, generations, kernels_of

from flash_dmattn import KeyLists

pytestmark = [pytest.mark.gpu, pytest.mark.hopper, pytest.mark.usefixtures("use")]


@BIASES
@pytest.mark.parametrize("head_dim", [8, *HEAD_DIMS])
def test_sm90_kernels_are_selected(head_dim, pairs, use):
    tensors, mask = on_gpu(2, 200, 264, 4, 2, head_dim), mask_of(2, 1, 200, 264)
    bias = bias_of(pairs, 2, 4, 200, 264)
    for deterministic in (False, True):
        served = generations(tensors, mask, bias, is_causal=True, deterministic=deterministic)
        assert served == ({"sm90"}, {"sm90"})
    use("sm80")
    assert generations(tensors, mask, bias_of(pairs, 2, 4, 200, 264)) == ({"sm80"}, {"sm80"})


@pytest.mark.parametrize("pairs", ["none", "key", "dense", "relative"])
@pytest.mark.parametrize("head_dim", [32, 64, 128, 192, 256])
def test_the_backward_without_masks_and_softcap_has_kernels_of_its_own(head_dim, pairs):
    bias, relative_bias = biases_of(pairs, 4, 264, 264)

    def serves_masks(mask=None, **options):
        tensors = on_gpu(1, 264, 264, 4, 2, head_dim)
        names = kernels_of(tensors, mask, bias, relative_bias=relative_bias, **options)[1]
        return re.search(r"\bbwd_kernel<.*BwdKernelTraits<[^>]*, (true|false)>", names)[1] == "true"

    assert not serves_masks() and not serves_masks(is_causal=True)
    assert serves_masks(mask_of(1, 1, 264, 264)) and serves_masks(intervals(1, 1, 264, rows=264), sparse="tiles")
    if pairs in ("none", "key"):
        assert serves_masks(softcap=4.0)


@pytest.mark.parametrize("pairs", ["none", "key"])
@pytest.mark.parametrize("head_dim", [40, 64, 96, 128])
def test_sm90_kernels_take_key_lists(head_dim, pairs):
    tensors, mask = on_gpu(2, 200, 264, 4, 2, head_dim), intervals(1, 2, 264, rows=200)
    bias = bias_of(pairs, 2, 4, 200, 264)
    assert generations(tensors, mask, bias, is_causal=True, sparse="lists") == ({"sm90"}, {"sm90"})
    assert generations(tensors, mask, bias, sparse="lists", deterministic=True)[1] == {"sm80"}


@pytest.mark.parametrize("pairs", ["none", "key"])
@pytest.mark.parametrize("kv_heads", [2, 4])
@pytest.mark.parametrize("head_dim", [136, 192, 200, 256])
def test_sm90_kernels_take_shared_key_lists_of_large_heads(head_dim, kv_heads, pairs):
    tensors, mask = on_gpu(2, 200, 264, 4, kv_heads, head_dim), intervals(1, kv_heads, 264, rows=200)
    bias = bias_of(pairs, 2, kv_heads, 200, 264)
    forward, backward = kernels_of(tensors, mask, bias, is_causal=True, sparse="lists")
    assert "sm80" not in forward + backward and "grouped_sparse_bwd" in backward
    assert generations(tensors, mask, bias, sparse="lists", deterministic=True)[1] == {"sm80"}
    # Each head has lists of its own.
    if kv_heads == 2:
        assert generations(tensors, intervals(1, 4, 264, rows=200), bias, sparse="lists")[1] == {"sm80"}


def test_the_kernel_of_shared_lists_is_selected_for_long_or_64_row_lists():
    """Shared lists use the group kernel if they are long or have 64 rows."""

    def takes_groups(kv_heads, mask, keys=1000, bias_heads=1, **options):
        tensors = on_gpu(1, 600, keys, 4, kv_heads, 64)
        return "grouped_sparse_bwd" in kernels_of(tensors, mask, randn(1, bias_heads, 1, keys), **options)[1]

    assert takes_groups(2, mask_of(1, 2, 600, 1000), sparse="lists")
    assert not takes_groups(2, mask_of(1, 2, 600, 400), 400, sparse="lists")
    assert not takes_groups(2, mask_of(1, 4, 600, 1000), sparse="lists")
    assert not takes_groups(2, mask_of(1, 2, 600, 1000), bias_heads=4, sparse="lists")
    assert not takes_groups(4, mask_of(1, 4, 600, 1000), sparse="lists")
    indices = torch.rand(1, 4, 10, 1000, device="cuda").topk(50).indices.int()
    for kv_heads, heads, shared in ((2, 2, True), (2, 4, False), (4, 4, True)):
        lists = KeyLists.from_indices(indices[:, :heads], 600, 1000, tile_rows=64)
        assert takes_groups(kv_heads, lists) == shared


@pytest.mark.parametrize(("head_dim", "pairs"), [(64, "dense"), (192, "key"), (256, "dense")])
def test_other_key_lists_fall_back_to_sm80(head_dim, pairs):
    """Lists with a dense bias, and lists of large heads with a bias per query head."""
    tensors, mask = on_gpu(2, 200, 264, 4, 2, head_dim), mask_of(1, 2, 200, 264)
    bias = bias_of(pairs, 2, 4, 200, 264)
    assert generations(tensors, mask, bias, sparse="lists")[1] == {"sm80"}


def test_sm90_is_selected_automatically_for_long_sequences(monkeypatch):
    monkeypatch.delenv("FLASH_DMATTN_ARCH")
    assert generations(on_gpu(1, 2048, 2048, 4, 4, 128), None, randn(1, 4, 1, 2048)) == ({"sm90"}, {"sm90"})


@pytest.mark.parametrize(("relative", "least"), [(False, 256), (True, 128)])
def test_the_sm90_backward_of_small_heads_is_selected_from_a_length_on(relative, least, monkeypatch):
    monkeypatch.delenv("FLASH_DMATTN_ARCH")
    table = torch.randn(1, 4, 2 * 30 + 1, device="cuda") if relative else None
    for keys in (least - 8, least):
        served = generations(on_gpu(2, 100, keys, 4, 4, 32), relative_bias=table)[1]
        assert served == {"sm90" if keys == least else "sm80"}


def test_an_unknown_architecture_is_an_error(monkeypatch):
    monkeypatch.setenv("FLASH_DMATTN_ARCH", "hopper")
    with pytest.raises(RuntimeError, match="FLASH_DMATTN_ARCH must be sm90 or sm80, got hopper"):
        generations(on_gpu(1, 200, 200, 4, 4, 64), None)


@pytest.mark.parametrize(("keys", "generation"), [(512, "sm80"), (1024, "sm90")])
def test_sm90_is_selected_automatically_for_lists_of_large_heads_and_many_keys(keys, generation, monkeypatch):
    monkeypatch.delenv("FLASH_DMATTN_ARCH")
    tensors, mask = on_gpu(1, 200, keys, 4, 2, 256), intervals(1, 2, keys, rows=200)
    assert generations(tensors, mask, sparse="lists")[1] == {generation}


# Strides that TMA cannot read: functions of (query, key, value) that return (tensors, bias).
UNCOPIED = {
    "rows of 1001 biases": lambda q, k, v: ((q, *on_gpu(2, 1, 1001, 4, 4, 64)[1:]), randn(2, 4, 200, 1001)),
    "a bias that is not aligned": lambda q, k, v: ((q, k, v), randn(2, 4, 200, 272)[..., 3:267]),
    "a transposed bias": lambda q, k, v: ((q, k, v), randn(2, 4, 264, 200).transpose(-1, -2)),
    "a bias expanded along rows": lambda q, k, v: ((q, k, v), randn(2, 4, 1, 264).expand(2, 4, 200, 264)),
    "a bias expanded along heads": lambda q, k, v: ((q, k, v), randn(2, 1, 200, 264).expand(2, 4, 200, 264)),
    "every other bias": lambda q, k, v: ((q, k, v), randn(2, 4, 200, 528)[..., ::2]),
    "values expanded along heads": lambda q, k, v: ((q, k, v[:, :, :1].expand_as(v)), randn(2, 4, 200, 264)),
    "keys expanded along the batch": lambda q, k, v: ((q, k[:1].expand_as(k), v), None),
    "queries expanded along rows": lambda q, k, v: ((q[:, :1].expand_as(q), k, v), None),
}


@CAUSAL
@pytest.mark.parametrize("what", UNCOPIED)
def test_strides_that_tma_cannot_read_fall_back_to_sm80(what, causal):
    tensors, bias = UNCOPIED[what](*on_gpu(2, 200, 264, 4, 4, 64))
    check(tensors, mask_of(2, 1, 1, tensors[1].shape[1]), bias, is_causal=causal)
    assert generations(tensors, None, bias, is_causal=causal) == ({"sm80"}, {"sm80"})


def test_few_rows_fall_back_to_sm80():
    assert generations(on_gpu(2, 64, 264, 4, 4, 64))[0] == {"sm80"}
