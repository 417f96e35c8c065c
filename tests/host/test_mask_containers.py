"""Masks as containers of tensors: pytrees, moves, indexing, unions, batches of a DataLoader, saved files, export."""

import io

import pytest
import torch
from helpers import rand_intervals, rand_mask
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader

from flash_dmattn import KeyIntervalMask, KeyLists, flash_dmattn_func

INDICES = torch.randint(-1, 9, (2, 1, 9, 4), dtype=torch.int32)
MASKS = {
    "intervals": lambda: KeyIntervalMask.topk(torch.randn(2, 1, 9), 3),
    "lists of intervals": lambda: KeyLists.build(KeyIntervalMask.topk(torch.randn(2, 1, 9), 3), 9),
    "lists of bool": lambda: KeyLists.build(rand_mask(2, 1, 9, 9), 9),
    "lists of indices": lambda: KeyLists.from_indices(INDICES, 9, 9, mask=rand_intervals(2, 1, 9, rows=9)),
}
EVERY_KIND = pytest.mark.parametrize("make", MASKS.values(), ids=MASKS)


def attend(mask, seed=0):
    torch.manual_seed(seed)
    query, key, value = (torch.randn(2, 9, 2, 8) for _ in range(3))
    return flash_dmattn_func(query, key, value, mask)


@EVERY_KIND
def test_a_mask_is_a_pytree(make):
    mask = make()
    leaves, structure = pytree.tree_flatten(mask)
    assert any(isinstance(leaf, torch.Tensor) for leaf in leaves)
    again = pytree.tree_unflatten(leaves, structure)
    assert type(again) is type(mask) and repr(again) == repr(mask)
    assert torch.equal(attend(again), attend(mask))


@EVERY_KIND
def test_moves(make):
    mask = make()
    assert torch.equal(attend(mask.cpu()), attend(mask)) and repr(mask.cpu()) == repr(mask)
    there = mask.to("meta")
    assert {leaf.device.type for leaf in pytree.tree_leaves(there) if isinstance(leaf, torch.Tensor)} == {"meta"}
    with pytest.raises(TypeError, match="device must be a torch.device, a str or an int, got torch.float32"):
        mask.to(torch.float32)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@EVERY_KIND
def test_moves_to_a_gpu(make):
    mask = make()
    assert mask.cuda().device == torch.device("cuda", torch.cuda.current_device())
    assert mask.pin_memory().cuda(0, non_blocking=True).device.index == 0


@EVERY_KIND
def test_a_saved_mask_loads_with_weights_only(make):
    mask, file = make(), io.BytesIO()
    torch.save({"mask": mask}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)["mask"]
    assert repr(loaded) == repr(mask) and torch.equal(attend(loaded), attend(mask))


def test_a_batch_of_masks():
    masks = [KeyIntervalMask.topk(torch.randn(1, 2, 9), window) for window in (2, 3, 4, 5)]
    first, second = DataLoader(masks, batch_size=2)
    assert (first.shape, first.keys_per_row, second.keys_per_row, first.rows) == ((2, 2, 9), 3, 5, 9)
    assert torch.equal(second.to_dense(), torch.cat([mask.to_dense() for mask in masks[2:]]))
    with pytest.raises(ValueError, match="collate needs masks .* with the same heads, keys and rows"):
        next(iter(DataLoader([masks[0], KeyIntervalMask.causal(9, 9)], batch_size=2)))


def test_batch_elements():
    mask = rand_intervals(4, 2, 9, rows=9)
    dense = mask.to_dense(9)
    for index in (slice(1, 3), torch.tensor([3, 0])):
        assert torch.equal(mask[index].to_dense(9), dense[index])
    assert torch.equal(mask[2].to_dense(9), dense[2:3]) and torch.equal(mask[-1].to_dense(9), dense[3:])


def test_and_with_a_bool_tensor():
    intervals, mask = rand_intervals(2, 1, 9, rows=9), rand_mask(1, 4, 9, 9)
    expected = intervals.to_dense(9) & mask
    assert torch.equal(intervals & mask, expected) and torch.equal(mask & intervals, expected)
    assert torch.equal(attend(intervals & mask[:, :2]), attend(intervals.to_dense(9) & mask[:, :2]))


def test_or():
    window, prefix = KeyIntervalMask.sliding_window(9, 9, 3), KeyIntervalMask.causal(9, 9)
    assert torch.equal((window | prefix).to_dense(), window.to_dense() | prefix.to_dense())
    start = torch.randint(0, 9, (2, 1, 40), dtype=torch.int32)
    middle = start + torch.randint(0, 3, start.shape, dtype=torch.int32)
    a, b = KeyIntervalMask(start, middle), KeyIntervalMask(middle, middle + 2)
    assert torch.equal((a | b).to_dense(12), a.to_dense(12) | b.to_dense(12))
    empty = KeyIntervalMask(torch.full_like(start, 7), torch.full_like(start, -3))
    assert torch.equal((a | empty).to_dense(12), a.to_dense(12)) and torch.equal(
        (empty | a).to_dense(12), a.to_dense(12)
    )


class Layer(torch.nn.Module):
    def forward(self, query, key, value, mask):
        return flash_dmattn_func(query, key, value, mask)


def test_a_mask_is_an_input_of_an_exported_program():
    query, key, value = (torch.randn(2, 9, 2, 8) for _ in range(3))
    mask, other = (
        KeyIntervalMask(m.start, m.end) for m in (rand_intervals(2, 1, 9, rows=9), rand_intervals(2, 1, 9, rows=9))
    )
    file = io.BytesIO()
    torch.export.save(torch.export.export(Layer(), (query, key, value, mask)), file)
    file.seek(0)
    program = torch.export.load(file).module()
    assert torch.equal(program(query, key, value, other), flash_dmattn_func(query, key, value, other))
