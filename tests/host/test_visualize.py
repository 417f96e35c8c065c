"""flash_dmattn.visualize: densities against dense masks, pictures, and refused arguments."""

import builtins

import pytest
import torch

from flash_dmattn import KeyIntervalMask, KeyLists
from flash_dmattn.visualize import densities, picture_of, plot

torch.manual_seed(0)
ROWS, KEYS = 300, 421
BOOL = torch.rand(2, 3, ROWS, KEYS) < 0.1
TOPK = KeyIntervalMask.topk(torch.randn(2, 3, 1, KEYS), 40, ROWS)
WINDOW = KeyIntervalMask.sliding_window(ROWS, KEYS, 50)
INDICES = torch.randint(-1, KEYS, (2, 3, ROWS, 9), dtype=torch.int32)
TILE_INDICES = torch.randint(0, KEYS, (1, 3, -(-ROWS // 64), 20), dtype=torch.int32)
MASKS = {
    "bool": BOOL,
    "key mask": BOOL[:, :, :1],
    "intervals": TOPK,
    "shared intervals": WINDOW,
    "lists": KeyLists.build(TOPK, ROWS, is_causal=True),
    "lists of a bool mask": KeyLists.build(BOOL, ROWS),
    "lists of a key mask": KeyLists.build(BOOL[:, :, :1], ROWS),
    "indices": KeyLists.from_indices(INDICES, ROWS, KEYS, mask=WINDOW),
    "indices of tiles": KeyLists.from_indices(TILE_INDICES, ROWS, KEYS, is_causal=True, tile_rows=64),
}


def dense(mask, is_causal):
    """bool (Sq, Sk) of batch element 1 and head 2."""
    if not isinstance(mask, torch.Tensor):
        mask = mask.to_dense()
    scores = mask[-1, -1].expand(ROWS, KEYS)
    return scores.tril(KEYS - ROWS) if is_causal else scores


def means(scores, cell):
    """The mean of each cell, cut off at the edges."""
    return torch.stack([
        torch.stack([part.double().mean() for part in rows.split(cell, dim=1)]) for rows in scores.split(cell, dim=0)
    ])  # fmt: skip


@pytest.mark.parametrize("cells", [1000, 100, 3])  # cells of 1, 8 and 256 scores
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("name", MASKS)
def test_densities(name, is_causal, cells):
    mask = MASKS[name]
    lists = mask if isinstance(mask, KeyLists) else None
    is_causal = is_causal or (lists is not None and lists.is_causal)
    found = densities(picture_of(mask, ROWS, 1, 2, is_causal), lists, cells)
    scores = dense(mask, is_causal)
    torch.testing.assert_close(found.visible.double(), means(scores, found.cell), atol=1e-6, rtol=0)

    tile_rows = 64 if name == "indices of tiles" else 128
    computed = torch.zeros_like(scores)
    for first in range(0, ROWS, tile_rows):
        rows = slice(first, first + tile_rows)
        seen = scores[rows].any(dim=0)
        if lists is None:
            for keys in range(0, KEYS, 128):
                computed[rows, keys : keys + 128] = seen[keys : keys + 128].any()
        else:  # lists that were built without causality hold what it masks
            computed[rows] = dense(mask, lists.is_causal)[rows].any(dim=0)
    if name == "indices of tiles":  # a tile's indices are listed as a whole, if some row of the tile sees them
        assert (found.computed.double() >= means(computed, found.cell) - 1e-6).all()
    else:
        torch.testing.assert_close(found.computed.double(), means(computed, found.cell), atol=1e-6, rtol=0)


def test_a_long_mask_takes_little_memory_and_time():
    """2^40 scores: a dense form would take a tebibyte."""
    mask = KeyIntervalMask.sliding_window(2**20, 2**20, 4096)
    found = densities(picture_of(mask, None, 0, 0, False), None, 64)
    assert found.cell == 2**14 and found.visible.shape == (64, 64)
    assert float(found.visible.double().sum() * found.cell**2) == pytest.approx(
        2**20 * 4096 - 4096 * 4095 / 2, rel=1e-5
    )


def test_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    axes = plot(TOPK, batch=1, head=2)
    axes.figure.savefig(tmp_path / "mask.svg")
    text = (tmp_path / "mask.svg").read_text()
    assert text.startswith("<?xml") and (axes.get_xlabel(), axes.get_ylabel()) == ("key", "query row")
    assert [label.get_text() for label in axes.get_legend().get_texts()] == ["visible", "computed, masked", "skipped"]
    assert (axes.get_xlim(), axes.get_ylim()) == ((0, KEYS), (ROWS, 0))
    assert plot(MASKS["lists"], ax=axes) is axes


def test_a_picture_beside_a_default_dtype_that_numpy_lacks():
    pytest.importorskip("matplotlib")
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        plot(TOPK)
    finally:
        torch.set_default_dtype(dtype)


REFUSED = [
    ((torch.ones(1, 1, 4, 4),), {}, TypeError, "mask must be bool, got float32"),
    (([1],), {}, TypeError, "^mask must be a bool torch.Tensor, a KeyIntervalMask or KeyLists, got list"),
    ((None,), {}, TypeError, "a KeyIntervalMask or KeyLists, got None"),
    ((BOOL[0, 0],), {}, ValueError, r"mask must have 4 dimensions, got shape \(300, 421\): pass mask\[None, None\]"),
    ((BOOL[0],), {}, ValueError, r"fixed length, got \(3, 300, 421\): plot one sequence"),
    ((BOOL[:, :, :0],), {}, ValueError, "mask must have rows and keys, got 0 rows and 421 keys"),
    ((BOOL, 7), {}, ValueError, "seqlen_q must be the mask's 300, got 7"),
    ((BOOL,), {"batch": 2}, ValueError, "batch must be below the mask's 2, got 2"),
    ((TOPK,), {"head": 3}, ValueError, "head must be below the mask's 3, got 3"),
    ((TOPK,), {"head": -1}, ValueError, "head must not be negative, got -1"),
    ((TOPK,), {"cells": 0}, ValueError, "cells must be at least 1, got 0"),
    ((TOPK,), {"is_causal": 1}, TypeError, "is_causal must be a bool"),
]


@pytest.mark.parametrize(("arguments", "options", "error", "message"), REFUSED)
def test_refused_arguments(arguments, options, error, message):
    pytest.importorskip("matplotlib")
    with pytest.raises(error, match=message):
        plot(*arguments, **options)


def test_lists_of_variable_length_are_refused():
    pytest.importorskip("matplotlib")
    cu_seqlens = torch.tensor([0, 3, 8], dtype=torch.int32)
    mask = KeyIntervalMask.topk_varlen(torch.randn(8, 1), 2, cu_seqlens)
    for varlen in (mask, KeyLists.build(mask, 5, 5, True, cu_seqlens, cu_seqlens)):
        with pytest.raises(ValueError, match=r"mask must be of fixed length, got .*: plot one sequence"):
            plot(varlen)
    assert plot(mask.sequence(3, 8))


def test_without_matplotlib_the_error_names_it(monkeypatch):
    found = builtins.__import__

    def import_without(name, *more, **options):
        if name.startswith("matplotlib"):
            raise ModuleNotFoundError(f"No module named '{name}'")
        return found(name, *more, **options)

    monkeypatch.setattr(builtins, "__import__", import_without)
    with pytest.raises(ImportError, match="flash_dmattn.visualize needs matplotlib: pip install matplotlib"):
        plot(TOPK)
