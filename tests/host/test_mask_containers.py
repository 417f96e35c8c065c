"""Masks as containers of tensors: pytrees, moves, indexing, unions, batches of a DataLoader, saved files, export."""

import copy
import io
import pickle

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


@EVERY_KIND
def test_copies(make):
    mask = make()
    for again in (copy.copy(mask), copy.deepcopy(mask), pickle.loads(pickle.dumps(mask))):
        assert repr(again) == repr(mask) and torch.equal(attend(again), attend(mask))


@EVERY_KIND
def test_masks_of_worker_processes(make):
    masks = [make(), make()]
    for again, mask in zip(DataLoader(masks, batch_size=None, num_workers=2), masks, strict=True):
        assert repr(again) == repr(mask) and torch.equal(attend(again), attend(mask))


def test_a_batch_of_masks():
    masks = [KeyIntervalMask.topk(torch.randn(1, 2, 9), window) for window in (2, 3, 4, 5)]
    for workers in (0, 2):
        first, second = DataLoader(masks, batch_size=2, num_workers=workers)
        assert (first.shape, first.keys_per_row, second.keys_per_row, first.rows) == ((2, 2, 9), 3, 5, 9)
        assert torch.equal(second.to_dense(), torch.cat([mask.to_dense() for mask in masks[2:]]))
    with pytest.raises(ValueError, match="collate needs masks .* with the same heads, keys and rows"):
        next(iter(DataLoader([masks[0], KeyIntervalMask.causal(9, 9)], batch_size=2)))


def test_a_batch_of_masks_of_variable_length():
    masks = [KeyIntervalMask(start, start + 2, keys_per_row=2) for start in torch.arange(9).int().view(3, 3, 1)]
    (both,) = DataLoader(masks[:2], batch_size=2)
    assert both.is_varlen and torch.equal(both.end.flatten(), torch.arange(6) + 2) and both.keys_per_row == 2
    with pytest.raises(ValueError, match="collate needs masks .* with the same heads"):
        next(iter(DataLoader([masks[0], KeyIntervalMask.causal(9, 9)], batch_size=2)))


def test_lists_are_not_collated():
    with pytest.raises(TypeError, match="KeyLists cannot be collated: collate the masks or the indices, then build"):
        next(iter(DataLoader([MASKS["lists of bool"]()], batch_size=1)))


@pytest.mark.parametrize("kind", ["lists of intervals", "lists of bool", "lists of indices"])
@pytest.mark.parametrize("index", [1, -2, slice(1, 2), slice(2, 2)])
def test_lists_of_some_batch_elements(kind, index):
    torch.manual_seed(1)
    lists, tensors = MASKS[kind](), [torch.randn(2, 9, 2, 8) for _ in range(3)]
    own = [x[index] if isinstance(index, slice) else x[index][None] for x in tensors]
    expected = flash_dmattn_func(*tensors, lists)
    assert torch.equal(flash_dmattn_func(*own, lists[index]), expected[index].view(own[0].shape))
    assert torch.equal(lists[index].to_dense(), lists.to_dense()[index].view(len(own[0]), *lists.to_dense().shape[1:]))


def test_lists_of_indices_beside_intervals_of_each_batch_element():
    shown = rand_intervals(2, 1, 9, rows=9)
    lists = KeyLists.from_indices(INDICES[:1], 9, 9, mask=shown)
    assert torch.equal(lists[1].to_dense(), lists.to_dense()[1:])


def test_lists_are_indexed_by_batch_elements_only():
    lists = MASKS["lists of bool"]()
    with pytest.raises(IndexError, match="index 2 is out of range for 2 batch elements"):
        lists[2]
    with pytest.raises(TypeError, match="lists are indexed by an int or a slice, got Tensor"):
        lists[torch.tensor([0])]
    cu = torch.tensor([0, 4, 9], dtype=torch.int32)
    start = torch.zeros(9, 1, dtype=torch.int32)
    packed = KeyLists.build(KeyIntervalMask(start, start + 9), 5, 5, cu_seqlens_q=cu, cu_seqlens_k=cu)
    with pytest.raises(ValueError, match="lists of variable length have no batch elements"):
        packed[0]


@pytest.mark.parametrize("is_causal", [False, True])
def test_lists_keep_their_intervals(is_causal):
    for make in (
        lambda mask: KeyLists.build(mask, 9, is_causal=is_causal),
        lambda mask: KeyLists.from_indices(INDICES, 9, 9, is_causal, mask=mask),
        lambda mask: KeyLists.from_indices(INDICES[:, :, :1], 9, 9, is_causal, tile_rows=64, mask=mask),
    ):
        mask = rand_intervals(2, 1, 9, rows=9)
        lists, tensors = make(mask), [torch.randn(2, 9, 2, 8) for _ in range(3)]
        before, dense = flash_dmattn_func(*tensors, lists, is_causal=True), lists.to_dense()
        mask.intervals.zero_()
        assert torch.equal(flash_dmattn_func(*tensors, lists, is_causal=True), before)
        assert torch.equal(lists.to_dense(), dense)


def test_batch_elements():
    mask = rand_intervals(4, 2, 9, rows=9)
    dense = mask.to_dense(9)
    for index in (slice(1, 3), torch.tensor([3, 0]), torch.tensor([True, False, False, True])):
        assert torch.equal(mask[index].to_dense(9), dense[index])
    assert torch.equal(mask[2].to_dense(9), dense[2:3]) and torch.equal(mask[-1].to_dense(9), dense[3:])


def test_and_with_a_bool_tensor():
    intervals, mask = rand_intervals(2, 1, 9, rows=9), rand_mask(1, 4, 9, 9)
    expected = intervals.to_dense(9) & mask
    assert torch.equal(intervals & mask, expected) and torch.equal(mask & intervals, expected)
    assert torch.equal(attend(intervals & mask[:, :2]), attend(intervals.to_dense(9) & mask[:, :2]))


@pytest.mark.parametrize(
    "mask",
    [
        rand_mask(3, 1, 9, 9),
        rand_mask(1, 3, 9, 9),
        rand_mask(1, 1, 5, 9),
        rand_mask(1, 1, 9, 5),
        rand_mask(1, 1, 9, 9)[0],
    ],
)
def test_and_with_a_bool_tensor_that_does_not_fit(mask):
    a = rand_intervals(2, 2, 9, rows=9)
    a = KeyIntervalMask(a.start, a.end, rows=9)
    message = (
        r"the tensor of mask & tensor must be \({B\|1}, {H\|Hkv\|1}, {9\|1}, {9\|1}\), got shape "
        rf"\({mask.shape[0]}, .* with a mask of 2 batch elements and 2 heads"
    )
    with pytest.raises(ValueError, match=message):
        a & mask


def test_and_with_other_tensors():
    a = rand_intervals(2, 2, 9, rows=9)
    with pytest.raises(ValueError, match=r"got shape \(9, 9\) .*: pass x\[None, None\]"):
        torch.ones(9, 9, dtype=torch.bool) & a
    with pytest.raises(TypeError, match="the tensor of mask & tensor must be bool, got float32"):
        a & torch.ones(2, 2, 9, 9)
    with pytest.raises(RuntimeError, match="the tensor of mask & tensor must be on the mask's device cpu, got meta"):
        a & rand_mask(2, 2, 9, 9, device="meta")
    start = torch.zeros(9, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match="mask & tensor needs a mask of fixed length"):
        KeyIntervalMask(start, start) & rand_mask(1, 1, 9, 9)


def test_or_of_intervals_with_a_gap_outside_the_rows():
    start = torch.tensor([[[-9, 3, 0]]], dtype=torch.int32)
    a = KeyIntervalMask(start, start + torch.tensor([4, 7, 5], dtype=torch.int32), rows=9)
    b = KeyIntervalMask(torch.tensor([[[2, 12, 4]]]).int(), torch.tensor([[[5, 20, 6]]]).int())
    assert torch.equal((a | b).to_dense(), a.to_dense(9) | b.to_dense(9))
    with pytest.raises(ValueError, match="got 1 keys with a gap: use a.to_dense"):
        KeyIntervalMask(a.start, a.end) | b  # rows from 12 on may exist


def test_or_keeps_keys_per_row():
    def most(mask, rows):
        dense = mask.to_dense(rows)
        spans = [(i, j) for i in range(rows) for j in range(i + 1, rows + 1)]
        return max(int(dense[:, :, i:j].any(2).sum(-1).max()) - (j - i - 1) for i, j in spans)

    for rows in (1, 7, 40):
        start = torch.randint(-3, rows + 3, (2, 2, 30), dtype=torch.int32)
        middle = start + torch.randint(-1, 4, start.shape, dtype=torch.int32)
        a = KeyIntervalMask(start, middle, keys_per_row=30)
        b = KeyIntervalMask(middle, middle + 2, keys_per_row=30, rows=rows)
        assert (a | b).keys_per_row == most(a | b, rows)
        assert (a | KeyIntervalMask(middle, middle + 2, rows=rows)).keys_per_row is None
    window = KeyIntervalMask.sliding_window(40, 40, 4)
    assert (window | KeyIntervalMask.sliding_window(40, 40, 7)).keys_per_row == 7


def test_or_in_a_graph():
    def visible(start, middle, end):
        return (KeyIntervalMask(start, middle) | KeyIntervalMask(middle, end)).to_dense(12)

    start = torch.randint(0, 9, (2, 1, 12), dtype=torch.int32)
    compiled = torch.compile(visible, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(start, start + 1, start + 3), visible(start, start + 1, start + 3))
    with pytest.raises(RuntimeError, match="only where the intervals of each key overlap or touch"):
        torch.compile(lambda start: (KeyIntervalMask(start, start + 1) | KeyIntervalMask(start + 4, start + 5)).start)(
            start
        )


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


@EVERY_KIND
def test_attributes_are_not_assigned(make):
    mask = make()
    for name in vars(mask):
        with pytest.raises(AttributeError, match=f"cannot assign to field '{name}'"):
            setattr(mask, name, None)
        with pytest.raises(AttributeError, match=f"cannot delete field '{name}'"):
            delattr(mask, name)


def test_a_graph_makes_and_returns_masks():
    def window(seqlen):
        mask = KeyIntervalMask.sliding_window(seqlen, seqlen, 3)
        return mask & KeyIntervalMask(mask.start, mask.end, rows=seqlen)

    compiled = torch.compile(lambda x: (x + 1, window(x.shape[0])), fullgraph=True, backend="aot_eager", dynamic=True)
    for seqlen in (7, 9):
        mask = compiled(torch.zeros(seqlen))[1]
        assert repr(mask.copy()) == repr(window(seqlen)) and torch.equal(mask.intervals, window(seqlen).intervals)
