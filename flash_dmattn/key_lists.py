"""Lists of keys: for each tile of query rows the keys that any of its rows sees, and when to go by them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from . import ops
from .arguments import (
    check_cu_seqlens,
    check_same_sequences,
    is_known,
    names,
    require_bool,
    require_count,
    require_dense,
    require_device,
    require_tensor,
    shape_of,
    values_at_hand,
)
from .backends.reference import expand_shared
from .interval_mask import KeyIntervalMask

SPARSE = ("auto", "tiles", "lists")

# Lists are taken where they hold less than this part of the keys that tiles would walk over. Measured on the CPU (AVX2,
# float32, S from 2048 to 8192, D = 64, causal top-w and random masks; forward + backward, lists against tiles): 0.28 to
# 0.36 of the time where they hold 0.27 to 0.33 of the keys, 0.5 at 0.5, 0.75 to 0.9 at 0.8, 0.95 to 1.1 at 1 and above.
# Making them takes 1 % of it, of a bool mask with a head for every query head 3 %; where that would be in vain, a look
# at some rows mostly tells.
CPU_CROSSOVER = 0.9
# With fewer keys there is nothing to win.
CPU_MIN_KEYS = 512
# Measured on an H200 (bf16, S from 64 to 32768, w from S / 8 to 3 S / 4; H32/8, H32/32 D128, H16/16, H8/2 D64; causal
# top-w selected in the call, as CUDA graphs), lists against tiles: the forward is 0.7 to 1.0 times as fast with
# fewer keys than this, 1.0 to 1.2 times with 256, 1.0 to 1.5 with 512, 1.1 to 3.2 and more from 1024 on; forward and
# backward are 1.0 to 5.3 times as fast from 64 keys on, whatever the window. Of sliding windows, whose tiles are empty
# or full, lists are slower by up to a third: there they are for masks that are scattered.
CUDA_MIN_KEYS = 256
# Of a bool mask on CUDA the device looks whether lists are short (`where_short`): where they hold at most half of all
# keys, and at most so many percent of those in tiles that are not empty, by the head dimensions up to which that holds.
# Measured on an H200 (bf16, S8192, causal top-w and random masks), forward and backward, with the lists' making: they
# take as long as tiles at 67 % (D32), 80 % (D64), 73 to 90 % (D128), 88 % (D256; 50 to 60 % where query heads do not
# share lists and biases: those are left to the kernels of sm80); the forward alone above 90 %.
CUDA_PERCENT = {32: 60, 64: 75, 128: 80, 256: 70}
CUDA_PERCENT_APART = {**CUDA_PERCENT, 256: 45}
CUDA_PERCENT_FORWARD = 90
# To look, and to launch what then ends at once, takes 0.02 ms each of a forward and a backward there: little beside the
# attention of so many rows and keys.
CUDA_MIN_OF_BOOLS = (256, 2048)


@dataclass(frozen=True, eq=False)
class KeyIndices:
    """What an indexer has chosen, as `KeyLists.from_indices` takes it."""

    indices: Tensor
    tile_rows: int
    shown: KeyIntervalMask | None  # of its choice a row sees what this shows

    def to_dense(self, seqlen_q: int, seqlen_k: int) -> Tensor:
        """bool ({B|1}, {H|Hkv|1}, Sq, Sk), of fixed length."""
        dense = _dense(self.indices, seqlen_k).repeat_interleave(min(self.tile_rows, seqlen_q), dim=2)[:, :, :seqlen_q]
        if self.shown is None:
            return dense
        shown = self.shown.to_dense(seqlen_q)
        heads = max(dense.shape[1], shown.shape[1])
        return expand_shared(dense, len(dense), heads) & expand_shared(shown, len(shown), heads)

    def sequence(self, number: int, rows: slice, keys: slice) -> KeyIndices:
        """Of variable length those of one sequence, as of fixed length."""
        if self.indices.ndim == 3:
            own = self.indices[rows].transpose(0, 1)[None]
        else:
            of_sequence = self.indices[number if self.indices.shape[0] > 1 else 0]
            own = of_sequence[None, :, : -(-(rows.stop - rows.start) // self.tile_rows)]
        return KeyIndices(own, self.tile_rows, self.shown and self.shown.sequence(keys.start, keys.stop))

    def to(self, device: torch.device | str, non_blocking: bool = False) -> KeyIndices:
        shown = self.shown and self.shown.to(device, non_blocking=non_blocking)
        return KeyIndices(self.indices.to(device, non_blocking=non_blocking), self.tile_rows, shown)


def _dense(indices: Tensor, keys: int) -> Tensor:
    """bool (.., keys): which keys are named."""
    named = (indices >= 0) & (indices < keys)
    dense = torch.zeros(*indices.shape[:-1], keys + 1, dtype=torch.bool, device=indices.device)
    return dense.scatter_(-1, torch.where(named, indices, keys).long(), True)[..., :keys]


@dataclass(frozen=True, eq=False, repr=False)
class KeyLists:
    """A mask as sorted lists of keys, one for each batch element, head and tile of 128 (or 64) query rows.

    The kernels gather the keys of a list instead of walking over all of them: they cost as much as there are listed
    keys, wherever these lie. Made once, by `build` of a mask or by `from_indices` of what an indexer has chosen, it
    serves any number of layers and their backward, as `attn_mask`.
    """

    keys: Tensor  # int32 (capacity): list after list, each padded with -1 to a multiple of 64
    spans: Tensor  # int64 (2, batches, heads, row tiles): where in `keys` each list begins and ends
    rows: Tensor | None  # int32 (capacity, 4): which of the 128 rows see a key; None where `mask` need not be asked so;
    # of indices that whole tiles of rows share (0, 4) or (0, 2)
    mask: Tensor | KeyIntervalMask | KeyIndices  # what they were made from
    seqlen_q: int  # of variable length, as seqlen_k, the longest
    seqlen_k: int
    is_causal: bool = False  # whether they leave out what causality hides
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None

    @staticmethod
    def build(
        mask: Tensor | KeyIntervalMask,
        seqlen_q: int,
        seqlen_k: int | None = None,
        is_causal: bool = False,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
    ) -> KeyLists:
        """The lists of a mask.

        Args:
            mask: a KeyIntervalMask, or bool ({B|B/n|1}, {H|Hkv|1}, {Sq|1}, {Sk|1}); of variable length
                (total_k, {H|Hkv|1}) or (total_q, {H|Hkv|1}, max_seqlen_k).
            seqlen_q: the number of query rows; of variable length max_seqlen_q. Where the mask is the same for every
                row the lists serve any number of rows.
            seqlen_k: the number of keys, by default the mask's last dimension; of variable length max_seqlen_k.
            is_causal: leaves out keys that causality hides. The lists then serve calls with is_causal=True only.
            cu_seqlens_q, cu_seqlens_k: int32 (B + 1), of variable length. On CUDA their values are the caller's to get
                right: looking at them would make the GPU wait.

        Raises:
            ValueError: a shape or value that does not fit, or only one of cu_seqlens_q and cu_seqlens_k.
            TypeError: a mask that is neither bool nor a KeyIntervalMask, a length that is no int, cu_seqlens that are
                no int32 tensors.
            RuntimeError: tensors on different devices.
        """
        is_varlen = cu_seqlens_q is not None
        if is_varlen != (cu_seqlens_k is not None):
            raise ValueError("cu_seqlens_q and cu_seqlens_k must be given together")
        check_buildable(mask, is_varlen)
        require_bool("is_causal", is_causal)
        require_count("seqlen_q", seqlen_q)
        if seqlen_k is None:
            seqlen_k = keys_of(mask)
        require_count("seqlen_k", seqlen_k)
        if is_varlen:
            dims = len(mask.shape)
            total_q, total_k = (mask.shape[0] if dims == 3 else None), (mask.shape[0] if dims == 2 else None)
            where = (mask.intervals if isinstance(mask, KeyIntervalMask) else mask, "mask")
            check_cu_seqlens("cu_seqlens_q", cu_seqlens_q, *where, total_q, longest=("seqlen_q", seqlen_q))
            check_cu_seqlens("cu_seqlens_k", cu_seqlens_k, *where, total_k, longest=("seqlen_k", seqlen_k))
            check_same_sequences(cu_seqlens_q, cu_seqlens_k)
        elif isinstance(mask, KeyIntervalMask):
            mask.require_rows("mask", seqlen_q)
        return build(mask, seqlen_q, seqlen_k, bool(is_causal), cu_seqlens_q, cu_seqlens_k)

    @staticmethod
    def from_indices(
        indices: Tensor,
        seqlen_q: int,
        seqlen_k: int,
        is_causal: bool = False,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
        *,
        tile_rows: int = 1,
        mask: KeyIntervalMask | None = None,
    ) -> KeyLists:
        """The lists of what an indexer has chosen: which keys each query row sees, or each tile of query rows.

        A row sees the keys that its indices name, each once however often it is named, so far as causality, `mask` and
        the bias show them. Which keys are named has no gradient. Nothing of the size of Sq x Sk is made, and nothing is
        read back from the device: the lists take up to 20 bytes for each index of indices for single rows, and 4 for
        each index that 64 rows or a multiple share.

        Rows that are neighbours should choose alike: the kernels gather, for each 128 rows, the keys that any of them
        sees, for all of them. Where 64 rows, or a multiple, share their indices, no row pays for another's.

        Args:
            indices: int32 ({B|B/n|1}, {H|Hkv|1}, ceil(Sq / tile_rows), k), in any order: places of keys from 0 to
                Sk - 1, -1 for none; beside a mask that differs by batch element, B or 1 of them. Of variable length
                int32 (total_q, {H|Hkv|1}, k), with tile_rows of 1, or
                ({B|1}, {H|Hkv|1}, ceil(seqlen_q / tile_rows), k), where what lies beyond the rows of a sequence is
                not looked at; places count from the first key of the sequence.
            seqlen_q: the number of query rows; of variable length max_seqlen_q.
            seqlen_k: the number of keys; of variable length max_seqlen_k.
            is_causal: leaves out keys that causality hides. The lists then serve calls with is_causal=True only.
            cu_seqlens_q, cu_seqlens_k: int32 (B + 1), of variable length. On CUDA their values are the caller's to get
                right.
            tile_rows: how many query rows that follow each other, counted from the sequence's first, share a row of
                indices: 1 where each has its own.
            mask: of the keys that it chose a row sees those that this KeyIntervalMask shows: documents, padding, a
                window.

        Raises:
            ValueError: a shape or value that does not fit; on the CPU, and on CUDA with FLASH_DMATTN_CHECK=1 in the
                environment, an index that is out of range. Else such indices count as none on CUDA.
            TypeError: indices that are no int32 tensor, a mask that is no KeyIntervalMask, a length that is no int.
            RuntimeError: tensors on different devices.
        """
        require_tensor("indices", indices)
        require_bool("is_causal", is_causal)
        for name, count in (("seqlen_q", seqlen_q), ("seqlen_k", seqlen_k), ("tile_rows", tile_rows)):
            require_count(name, count)
        if mask is not None and not isinstance(mask, KeyIntervalMask):
            got = f"a {names([mask.dtype])} tensor" if isinstance(mask, Tensor) else type(mask).__name__
            raise TypeError(f"mask must be a KeyIntervalMask, got {got}: set the indices of hidden keys to -1")
        is_varlen = cu_seqlens_q is not None
        if is_varlen != (cu_seqlens_k is not None):
            raise ValueError("cu_seqlens_q and cu_seqlens_k must be given together")
        if is_varlen:
            check_cu_seqlens("cu_seqlens_q", cu_seqlens_q, indices, "indices", longest=("seqlen_q", seqlen_q))
            check_cu_seqlens("cu_seqlens_k", cu_seqlens_k, indices, "indices", longest=("seqlen_k", seqlen_k))
        if mask is not None:
            require_device("mask", mask.intervals, indices.device, "indices")
            mask.require_rows("mask", seqlen_q)
            if mask.is_varlen != is_varlen or (not is_varlen and mask.keys != seqlen_k):
                accepted = "(total_k, {H|Hkv|1})" if is_varlen else f"({{B|1}}, {{H|Hkv|1}}, {seqlen_k})"
                raise ValueError(f"mask must be {accepted}, got shape {shape_of(mask)}")
        problem = (seqlen_q, seqlen_k, bool(is_causal), cu_seqlens_q, cu_seqlens_k)
        return list_indices(KeyIndices(indices, tile_rows, mask), *problem)

    @property
    def batches(self) -> int:
        return self.spans.shape[1]

    @property
    def heads(self) -> int:
        return self.spans.shape[2]

    @property
    def row_tiles(self) -> int:
        return self.spans.shape[3]

    @property
    def intervals(self) -> Tensor | None:
        """int32 (2, ...): which rows see a key, of a KeyIntervalMask that the lists were not made to heed."""
        mask = self.mask
        if isinstance(mask, KeyIndices) and not ops.has_list_rows(mask.tile_rows):
            mask = mask.shown
        return mask.intervals if isinstance(mask, KeyIntervalMask) else None

    @property
    def rows_alike(self) -> bool:
        """Whether one list serves every row of a head."""
        return self.rows is None and not isinstance(self.mask, KeyIntervalMask)

    @property
    def checked_mask(self) -> Tensor | KeyIntervalMask | None:
        """Of what they were made from the mask, which a call checks as such."""
        return self.mask.shown if isinstance(self.mask, KeyIndices) else self.mask

    @property
    def device(self) -> torch.device:
        return self.keys.device

    def lengths(self) -> Tensor:
        """int64 (batches, heads, row tiles): the length of each list, with its padding."""
        return self.spans[1] - self.spans[0]

    def density(self) -> float:
        """The part of `seqlen_k` keys that a list takes on average, its padding counted, so that it may be above 1.

        0 where there are no lists. Waits for the device.
        """
        return float(self.lengths().double().mean()) / max(self.seqlen_k, 1) if self.spans.numel() else 0.0

    def to_dense(self) -> Tensor:
        """The mask that the lists were made of, as bool ({B|B/n|1}, {H|Hkv|1}, {Sq|1}, {Sk|1}).

        Of lists that were built with is_causal=True (.., Sq, Sk), without what causality hides. Raises ValueError for
        lists of variable length, which have no dense form.
        """
        if self.cu_seqlens_q is not None:
            raise ValueError("to_dense is for lists of fixed length")
        mask = dense_mask(self, self.seqlen_q)
        if not self.is_causal:
            return mask
        mask = mask.expand(-1, -1, self.seqlen_q, self.seqlen_k)
        return mask.tril(self.seqlen_k - self.seqlen_q)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> KeyLists:
        """The same lists on that device."""

        def move(value):
            return value.to(device, non_blocking=non_blocking) if value is not None else None

        fields = ("keys", "spans", "rows", "mask", "cu_seqlens_q", "cu_seqlens_k")
        return replace(self, **{name: move(getattr(self, name)) for name in fields})

    def __repr__(self) -> str:
        causal = ", causal" if self.is_causal else ""
        return (
            f"KeyLists({self.batches} x {self.heads} x {self.row_tiles} lists, room for {self.keys.shape[0]} keys, "
            f"seqlen_q={self.seqlen_q}, seqlen_k={self.seqlen_k}{causal}, device={str(self.device)!r})"
        )


def dense_mask(mask: Tensor | KeyIntervalMask | KeyLists | None, seqlen_q: int) -> Tensor | None:
    """A mask of fixed length as a bool tensor; of lists what they were made from."""
    if isinstance(mask, KeyLists):
        if isinstance(mask.mask, KeyIndices):
            return mask.mask.to_dense(seqlen_q, mask.seqlen_k)
        mask = mask.mask
    return mask.to_dense(seqlen_q) if isinstance(mask, KeyIntervalMask) else mask


def check_buildable(mask: object, is_varlen: bool) -> None:
    if not isinstance(mask, KeyIntervalMask) and (not isinstance(mask, Tensor) or mask.dtype != torch.bool):
        got = names([mask.dtype]) if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"mask must be a bool tensor or a KeyIntervalMask, got {got}")
    if isinstance(mask, Tensor):
        require_dense("mask", mask)
    of_intervals, of_bools = ((2,), (2, 3)) if is_varlen else ((3,), (4,))
    accepted = of_intervals if isinstance(mask, KeyIntervalMask) else of_bools
    if len(mask.shape) not in accepted:
        kind = "variable" if is_varlen else "fixed"
        sizes = " or ".join(map(str, accepted))
        raise ValueError(f"mask must have {sizes} dimensions of {kind} length, got shape {shape_of(mask)}")


def keys_of(mask: Tensor | KeyIntervalMask) -> int:
    """How many keys a mask is for."""
    if len(mask.shape) == 2:
        raise ValueError("seqlen_k must be given of variable length: the longest sequence of keys")
    return mask.shape[-1]


def build(
    mask: Tensor | KeyIntervalMask,
    seqlen_q: int,
    seqlen_k: int,
    is_causal: bool,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    limit: int | None = None,
) -> KeyLists:
    """`KeyLists.build` of checked inputs; limit as in ops.build_key_lists."""
    intervals, bound = None, None
    if isinstance(mask, KeyIntervalMask):
        # With a limit the lists are to be counted, whatever is known of them.
        intervals = mask.intervals
        bound = None if limit is not None or mask.keys_per_row is None else min(mask.keys_per_row, seqlen_k)
    sequences = (is_causal, cu_seqlens_q, cu_seqlens_k)
    held = held_lengths(mask, seqlen_q, seqlen_k, cu_seqlens_q, cu_seqlens_k)
    keys, spans, rows = ops.build_key_lists(
        mask if intervals is None else None, intervals, *held, *sequences, bound, limit
    )
    rows = None if intervals is not None or ops.is_per_key(mask.shape) else rows
    return KeyLists(keys, spans, rows, mask, seqlen_q, seqlen_k, *sequences)


def list_indices(
    chosen: KeyIndices,
    seqlen_q: int,
    seqlen_k: int,
    is_causal: bool,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
) -> KeyLists:
    """`KeyLists.from_indices` of checked inputs."""
    indices, tile_rows = chosen.indices, chosen.tile_rows
    sequences = (is_causal, cu_seqlens_q, cu_seqlens_k)
    held_q, held_k = seqlen_q, seqlen_k
    if cu_seqlens_q is not None:
        if values_at_hand(cu_seqlens_q):
            longest_q, longest_k = map(longest_sequence, (cu_seqlens_q, cu_seqlens_k))
        else:
            longest_q = indices.shape[0] if indices.ndim == 3 else seqlen_q
            longest_k = seqlen_k if chosen.shown is None else chosen.shown.keys
        held_q, held_k = min(seqlen_q, longest_q), min(seqlen_k, longest_k)
    by_tiles = cu_seqlens_q is None or indices.ndim == 4
    if by_tiles and tile_rows >= seqlen_q:  # all rows share their indices, as those of whole tiles of lists do
        tile_rows = -(-tile_rows // ops.LIST_ROWS) * ops.LIST_ROWS
        chosen = KeyIndices(indices, tile_rows, chosen.shown)
    intervals = None if chosen.shown is None else chosen.shown.intervals
    tensors = ops.index_key_lists(indices, intervals, tile_rows, held_q, held_k, *sequences)
    return KeyLists(*tensors, chosen, seqlen_q, seqlen_k, *sequences)


def longest_sequence(cu_seqlens: Tensor) -> int:
    return max(cu_seqlens.diff().tolist(), default=0)


def held_lengths(
    mask: Tensor | KeyIntervalMask,
    seqlen_q: int,
    seqlen_k: int,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
) -> tuple[int, int]:
    """seqlen_q and seqlen_k, of variable length no more than the sequences can have, so far as that is known without
    waiting: those that are given may lie far above."""
    if cu_seqlens_q is None:
        return seqlen_q, seqlen_k
    by_pair = len(mask.shape) == 3
    if values_at_hand(cu_seqlens_q):
        longest_q, longest_k = map(longest_sequence, (cu_seqlens_q, cu_seqlens_k))
    else:
        known = by_pair or cu_seqlens_q is cu_seqlens_k
        longest_q, longest_k = mask.shape[0] if known else seqlen_q, mask.shape[0]
    # A mask with a column for every key has seqlen_k of them.
    return min(seqlen_q, longest_q), seqlen_k if by_pair else min(seqlen_k, longest_k)


def walked_keys(rows: int, keys: int, is_causal: bool) -> float:
    """How many keys the tiles of LIST_ROWS rows walk over, all together, of one head and sequence without a mask."""
    return ops.count_visible_pairs(rows, keys, is_causal) / torch.sym_min(torch.sym_max(rows, 1), ops.LIST_ROWS)


def choose(
    mask: Tensor | KeyIntervalMask | KeyLists | None,
    sparse: str,
    needs_gradients: bool,
    seqlen_q: int,
    seqlen_k: int,
    is_causal: bool,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
) -> Tensor | KeyIntervalMask | KeyLists | None:
    """The mask in the form by which a compiled kernel goes: KeyLists for lists, anything else for tiles.

    Lists that are given are used. Else, on the CPU, they are made, and left again where they are not short enough. On
    CUDA, where looking would make the GPU wait, and under torch.compile, they are made where the mask knows how long
    they will be, and on CUDA that it is scattered. Of a bool mask on CUDA see `where_short`.
    """
    problem = (seqlen_q, seqlen_k, is_causal, cu_seqlens_q, cu_seqlens_k)
    if isinstance(mask, KeyLists):
        return mask.mask if sparse == "tiles" else mask  # of indices refused by then
    if mask is None or sparse == "tiles":
        return mask
    if sparse == "lists":
        return build(mask, *problem)
    if mask.device.type != "cpu":
        pays = isinstance(mask, KeyIntervalMask) and mask.scattered and mask.keys_per_row is not None
        few_keys = is_known(seqlen_k < CUDA_MIN_KEYS)
        return build(mask, *problem) if pays and (needs_gradients or not few_keys) else mask
    if is_known(seqlen_k < CPU_MIN_KEYS):
        return mask
    if values_at_hand(mask.intervals if isinstance(mask, KeyIntervalMask) else mask):
        return lists_if_short(mask, *problem)
    return build(mask, *problem) if knows_to_be_short(mask, seqlen_q, seqlen_k, is_causal) else mask


def may_be_short(
    mask: Tensor | KeyIntervalMask | KeyLists | None,
    bias: Tensor | None,
    seqlen_q: int,
    seqlen_k: int,
    is_causal: bool,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
) -> bool:
    """Whether a mask is one for `where_short`: a large bool mask whose rows differ, on CUDA, beside no dense bias.

    A subclass of Tensor is none: the lists of a DTensor's parts would have to lie as the query's do.
    """
    if type(mask) is not Tensor or mask.device.type != "cuda" or mask.ndim != 4 or cu_seqlens_q is not None:
        return False
    least_rows, least_keys = CUDA_MIN_OF_BOOLS
    whole = is_known(mask.shape[2] == seqlen_q) and is_known(mask.shape[3] == seqlen_k)
    large = is_known(seqlen_q >= least_rows) and is_known(seqlen_k >= least_keys)
    some = is_known(mask.shape[0] > 0) and is_known(mask.shape[1] > 0)
    return whole and large and some and (bias is None or is_known(bias.shape[2] == 1))


def where_short(
    mask: Tensor, query: Tensor, key: Tensor, bias: Tensor | None, needs_gradients: bool, is_causal: bool
) -> ops.MaskTensors:
    """A bool mask as tiles and, where these are short, as lists: the device looks at it, and goes by what is faster."""
    heads_share = all(pairs is None or pairs.shape[1] <= key.shape[2] for pairs in (mask, bias))
    of_both = CUDA_PERCENT if heads_share else CUDA_PERCENT_APART
    percent = CUDA_PERCENT_FORWARD
    if needs_gradients:
        percent = next((part for most, part in of_both.items() if query.shape[-1] <= most), 0)
    bits, tiles, *lists = ops.pack_and_list_mask(mask, mask.shape[2], mask.shape[3], is_causal, percent)
    return ops.MaskTensors(bits, tiles, None, *lists)


def knows_to_be_short(mask: Tensor | KeyIntervalMask, rows: int, keys: int, is_causal: bool) -> bool:
    """Whether lists are sure to be short; of a mask that is scattered, whether they are not sure to be long."""
    if not isinstance(mask, KeyIntervalMask) or mask.keys_per_row is None:
        return False
    longest = torch.sym_min(mask.keys_per_row + torch.sym_min(rows, ops.LIST_ROWS) - 1, keys)
    listed, walked = longest * ops.row_tiles(rows), CPU_CROSSOVER * walked_keys(rows, keys, is_causal)
    return not is_known(listed >= walked) if mask.scattered else is_known(listed < walked)


def looks_dense(mask: Tensor | KeyIntervalMask, seqlen_q: int, seqlen_k: int, is_causal: bool) -> bool:
    """Whether the rows in the middle of a bool mask see so many keys that reading all of it would be a waste."""
    if isinstance(mask, KeyIntervalMask) or mask.ndim != 4 or mask.shape[2] <= ops.LIST_ROWS:
        return False
    first = (seqlen_q - ops.LIST_ROWS) // 2
    keys = min(max(first + ops.LIST_ROWS + seqlen_k - seqlen_q, 1), seqlen_k) if is_causal else seqlen_k
    some = mask[:, :, first : first + ops.LIST_ROWS, :keys]
    seen = some.view(torch.uint8).amax(dim=2)  # any(dim=2) takes twenty times as long
    return seen.numel() > 0 and bool((seen != 0).float().mean() > CPU_CROSSOVER)


def lists_if_short(
    mask: Tensor | KeyIntervalMask,
    seqlen_q: int,
    seqlen_k: int,
    is_causal: bool,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
) -> Tensor | KeyIntervalMask | KeyLists:
    """The lists of a mask on the CPU, or the mask itself where they do not pay."""
    if looks_dense(mask, seqlen_q, seqlen_k, is_causal):
        return mask
    one_list = isinstance(mask, Tensor) and ops.is_per_key(mask.shape)
    if cu_seqlens_q is None:
        lengths = [(seqlen_q, seqlen_k)] * mask.shape[0]
    else:
        lengths = list(zip(cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist()))
    walked = sum(keys if one_list else walked_keys(rows, keys, is_causal) for rows, keys in lengths)
    limit = int(CPU_CROSSOVER * mask.shape[1] * walked)
    lists = build(mask, seqlen_q, seqlen_k, is_causal, cu_seqlens_q, cu_seqlens_k, limit=limit)
    return lists if lists.keys.shape[0] else mask
