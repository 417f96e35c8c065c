"""KeyLists: for each tile of query rows the keys that any of its rows sees."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NoReturn

import torch
from torch import Tensor
from torch.utils.data._utils.collate import default_collate_fn_map

from .. import ops
from ..arguments import (
    INT32_MAX,
    as_tensor_hint,
    batch_slice,
    check_cu_seqlens,
    check_same_sequences,
    is_host_readable,
    names,
    require_bool,
    require_dense,
    require_device,
    require_length,
    require_tensor,
    shape_of,
    statically_true,
)
from ..broadcast import is_one_of, shares_batch
from ..ops.list_sizes import LIST_ROWS, MAX_TILE_ROWS, is_per_key
from ..ops.schema import MaskTensors
from .base import Mask, Problem
from .containers import Container, register
from .dense import BoolMask
from .indices import KeyIndices
from .interval import KeyIntervalMask


def as_mask(mask: Tensor | Mask | None, name: str = "attn_mask") -> Mask | None:
    """A mask as one object. Raises TypeError for any other type."""
    if isinstance(mask, Tensor):
        return BoolMask(mask)
    if mask is not None and not isinstance(mask, Mask):
        raise TypeError(
            f"{name} must be a bool torch.Tensor, a KeyIntervalMask or KeyLists, got {type(mask).__name__}"
            f"{as_tensor_hint(name, mask)}"
        )
    return mask


@dataclass(frozen=True, eq=False, repr=False)
class KeyLists(Container, Mask):
    """A mask as lists of keys, one for each batch element, head and tile of 128 (or 64) query rows.

    The kernels gather the listed keys and skip all others, so the cost is proportional to the number of listed keys.
    Built once, from a mask (`build`) or from an indexer's keys (`from_indices`), the lists serve any number of layers
    and their backward passes, as `attn_mask`. They copy the intervals of a mask, but no bool mask and no indices: if
    these are edited in place, they no longer fit the lists.

    Attributes:
        kv_indices: int32 (capacity): list after list, each padded with -1 to a multiple of 64. A list ascends; on CUDA,
            of an interval mask with `keys_per_row`, two parts do, the second of keys that not all of its rows see.
        kv_indptr: int64 (2, batches, heads, m_blocks): where each list begins and ends in `kv_indices`.
        kv_row_bits: int32 (capacity, 4): a bit for each of the 128 rows that may see a key. None where all rows see
            it, or where intervals show it; (0, 4) or (0, 2) for indices that whole tiles of rows share.
        mask: what the lists were built from: the bool tensor, the KeyIntervalMask, or the indices.
        seqlen_q, seqlen_k: the number of query rows and of keys; for variable length bounds on the sequences.
        is_causal: whether the lists leave out keys that causality masks.
        cu_seqlens_q, cu_seqlens_k: int32 (B + 1), or None for fixed length.
    """

    kv_indices: Tensor
    kv_indptr: Tensor
    kv_row_bits: Tensor | None
    mask: Tensor | KeyIntervalMask | KeyIndices
    seqlen_q: int
    seqlen_k: int
    is_causal: bool = False
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
            mask: a KeyIntervalMask, or bool ({B|B/n|1}, {H|Hkv|1}, {Sq|1}, {Sk|1}); for variable length
                (total_k, {H|Hkv|1}) or (total_q, {H|Hkv|1}, max_seqlen_k).
            seqlen_q: the number of query rows; for variable length max_seqlen_q. The lists of a bool mask
                (.., 1, Sk) serve any number of rows.
            seqlen_k: the number of keys, by default the mask's last dimension; for variable length max_seqlen_k.
            is_causal: leaves out keys that causality masks. The lists then serve calls with is_causal=True only.
            cu_seqlens_q, cu_seqlens_k: int32 (B + 1), for variable length. Their values are not checked on CUDA.

        Returns:
            Lists of the mask's batch elements, for variable length of the B sequences, and of the mask's heads.

        Raises:
            ValueError: an invalid shape or value, or only one of cu_seqlens_q and cu_seqlens_k.
            TypeError: a mask that is neither bool nor a KeyIntervalMask, a length that is not an int, cu_seqlens that
                are not int32 tensors.
            RuntimeError: tensors on different devices.
        """
        seqlen_q = require_length("seqlen_q", seqlen_q)
        check_buildable(mask, seqlen_q, is_varlen(cu_seqlens_q, cu_seqlens_k))
        require_bool("is_causal", is_causal)
        if seqlen_k is None:
            if len(mask.shape) == 2:
                raise ValueError("seqlen_k must be given for variable length, got None: the longest sequence of keys")
            seqlen_k = mask.shape[-1]
        seqlen_k = require_length("seqlen_k", seqlen_k)
        mask = as_mask(mask)
        if cu_seqlens_q is not None:
            dims = len(mask.shape)
            total_q = (mask.shape[0], "the rows of mask") if dims == 3 else None
            total_k = (mask.shape[0], "the keys of mask") if dims == 2 else None
            operands = mask.operands()
            reference = (operands.intervals if operands.mask is None else operands.mask, "mask")
            lengths = cu_seqlens_q, cu_seqlens_k, seqlen_q, seqlen_k
            cu_seqlens_q, cu_seqlens_k = checked_cu_seqlens(*lengths, *reference, total_q, total_k)
        elif isinstance(mask, KeyIntervalMask):
            mask._require_rows("mask", seqlen_q)
        mask = mask.copy() if isinstance(mask, KeyIntervalMask) else mask
        return build_lists(mask, Problem(seqlen_q, seqlen_k, bool(is_causal), cu_seqlens_q, cu_seqlens_k))

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
        """The lists of an indexer's keys: the indices of the keys that each query row, or each tile of rows, sees.

        A row sees the keys of its indices unless causality, `mask` or the bias masks them. Repeated indices count once.
        Indices have no gradient. No memory of size Sq x Sk is allocated, and nothing is read back from the device: the
        lists take up to 20 bytes per index where each row has its own indices, and 4 bytes per index that 64 rows or a
        multiple of 64 share.

        Neighbouring rows should select similar keys: for each tile of 128 rows the kernels gather the keys that any of
        the rows sees. Where 64 rows, or a multiple of 64, share their indices, no row gathers another's keys.

        Args:
            indices: int32 ({B|B/n|1}, {H|Hkv|1}, ceil(Sq / tile_rows), k), in any order: key positions from 0 to
                Sk - 1, -1 for none; with a mask that differs by batch element, B or 1 batch elements. For variable
                length int32 (total_q, {H|Hkv|1}, k), with tile_rows of 1, or
                ({B|1}, {H|Hkv|1}, ceil(seqlen_q / tile_rows), k), where entries beyond the rows of a sequence are
                ignored; positions count from the first key of the sequence.
            seqlen_q: the number of query rows; for variable length max_seqlen_q.
            seqlen_k: the number of keys; for variable length max_seqlen_k.
            is_causal: leaves out keys that causality masks. The lists then serve calls with is_causal=True only.
            cu_seqlens_q, cu_seqlens_k: int32 (B + 1), for variable length. Their values are not checked on CUDA.
            tile_rows: the number of consecutive query rows, counted from the first of the sequence, that share a row of
                indices.
            mask: a KeyIntervalMask that masks indexed keys: documents, padding, a window.

        Returns:
            Lists of the batch elements and heads of indices and mask, for variable length of the B sequences.

        Raises:
            ValueError: an invalid shape or value. An index out of range raises on the CPU, and on CUDA with
                FLASH_DMATTN_CHECK=1 in the environment; otherwise it counts as none on CUDA.
            TypeError: indices that are not an int32 tensor, a mask that is not a KeyIntervalMask, a length that is not
                an int.
            RuntimeError: tensors on different devices.
        """
        require_tensor("indices", indices)
        require_bool("is_causal", is_causal)
        seqlen_q, seqlen_k = require_length("seqlen_q", seqlen_q), require_length("seqlen_k", seqlen_k)
        tile_rows = require_length("tile_rows", tile_rows)
        if mask is not None and not isinstance(mask, KeyIntervalMask):
            got = f"a {names([mask.dtype])} tensor" if isinstance(mask, Tensor) else type(mask).__name__
            raise TypeError(f"mask must be a KeyIntervalMask, got {got}: set the indices of masked keys to -1")
        has_sequences = is_varlen(cu_seqlens_q, cu_seqlens_k)
        if has_sequences:
            lengths = cu_seqlens_q, cu_seqlens_k, seqlen_q, seqlen_k
            cu_seqlens_q, cu_seqlens_k = checked_cu_seqlens(*lengths, indices, "indices")
        if mask is not None:
            require_device("mask", mask.intervals, indices.device, "indices")
            mask._require_rows("mask", seqlen_q)
            mask._require_kind("mask", has_sequences)
            if not has_sequences and mask.keys != seqlen_k:
                raise ValueError(f"mask must be ({{B|1}}, {{H|Hkv|1}}, {seqlen_k}), got shape {shape_of(mask)}")
            mask = mask.copy()
        problem = Problem(seqlen_q, seqlen_k, bool(is_causal), cu_seqlens_q, cu_seqlens_k)
        return list_indices(KeyIndices(indices, tile_rows, mask, seqlen_k), problem)

    # The protocol of a mask

    has_lists = True

    @property
    def source(self) -> Mask:
        return as_mask(self.mask)

    @property
    def needs_lists(self) -> bool:
        return isinstance(self.mask, KeyIndices)

    def operands(self) -> MaskTensors:
        return self.source.operands()

    def packed(self, problem: Problem) -> MaskTensors:
        return MaskTensors(None, None, self.intervals, self.kv_indices, self.kv_indptr, self.kv_row_bits)

    def as_bool(self, seqlen_q: int) -> Tensor:
        return self.source.as_bool(seqlen_q)

    def sequence_as_bool(self, number: int, rows: slice, keys: slice) -> Tensor:
        return self.source.sequence_as_bool(number, rows, keys)

    def without_lists(self) -> Mask:
        return self.source

    def check(self, check_tensors, call) -> None:
        check_tensors(MaskTensors())
        check_lists(self, call.query, call.key, call.problem())
        self.source.check(check_tensors, call)

    # Properties

    @property
    def batches(self) -> int:
        """The batch elements, for variable length the sequences, that have lists of their own."""
        return self.kv_indptr.shape[1]

    @property
    def heads(self) -> int:
        """H, Hkv or 1."""
        return self.kv_indptr.shape[2]

    @property
    def num_m_blocks(self) -> int:
        """The lists of a head: one for each tile of rows, or 1."""
        return self.kv_indptr.shape[3]

    @property
    def intervals(self) -> Tensor | None:
        """int32 (2, ...), or None: the intervals that the kernels apply in addition to the lists."""
        return self.source.list_intervals

    @property
    def row_broadcast(self) -> bool:
        """Whether one list serves every row of a head."""
        return self.kv_row_bits is None and self.intervals is None

    @property
    def device(self) -> torch.device:
        """The device of the lists."""
        return self.kv_indices.device

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> KeyLists:
        """The same lists on another device. On the CPU they ascend, also if they were moved or loaded there before."""
        on_cpu = isinstance(device, (str, torch.device)) and torch.device(device).type == "cpu"
        lists = replace(self, kv_indices=ascending(self)) if on_cpu and self.intervals is not None else self
        return super(KeyLists, lists).to(device, non_blocking)

    def lengths(self) -> Tensor:
        """int64 (batches, heads, m_blocks): the length of each list, with its padding."""
        return self.kv_indptr[1] - self.kv_indptr[0]

    def density(self) -> float:
        """The mean length of a list, with its padding, divided by `seqlen_k`: it may be above 1. 0 without lists. Not
        the visible share of all scores, which is `KeyIntervalMask.density`.

        Waits for the device.
        """
        return float(self.lengths().double().mean()) / max(self.seqlen_k, 1) if self.kv_indptr.numel() else 0.0

    def to_dense(self) -> Tensor:
        """The mask that the lists were built from, as bool ({B|B/n|1}, {H|Hkv|1}, {Sq|1}, {Sk|1}).

        For lists built with is_causal=True (.., Sq, Sk), where keys that causality masks are False. Raises ValueError
        for lists of variable length, which have no dense form.
        """
        if self.cu_seqlens_q is not None:
            raise ValueError("to_dense is for lists of fixed length")
        mask = self.as_bool(self.seqlen_q)
        if not self.is_causal:
            return mask
        mask = mask.expand(-1, -1, self.seqlen_q, self.seqlen_k)
        return mask.tril(self.seqlen_k - self.seqlen_q)

    def __getitem__(self, index: int | slice) -> KeyLists:
        """The lists of some batch elements: `lists[2]` and `lists[2:4]` keep the batch dimension and copy no list.

        Raises:
            TypeError: an index that is neither an int nor a slice.
            IndexError: an int out of range.
            ValueError: lists of variable length.
        """
        if self.cu_seqlens_q is not None:
            raise ValueError("lists of variable length have no batch elements: build them of some sequences")
        index = batch_slice(index, self.batches)
        if not isinstance(index, slice):
            raise TypeError(f"lists are indexed by an int or a slice, got {type(index).__name__}")
        return replace(self, kv_indptr=self.kv_indptr[:, index].contiguous(), mask=self.mask[index])

    def __and__(self, other: object) -> NoReturn:
        raise TypeError("KeyLists cannot be combined: combine masks, then build the lists of the result")

    __rand__ = __or__ = __ror__ = __and__

    def __invert__(self) -> NoReturn:
        raise TypeError("~lists of KeyLists are no KeyLists: use ~lists.to_dense()")

    def __repr__(self) -> str:
        causal, room = ", causal" if self.is_causal else "", self.kv_indices.shape[0]
        return (
            f"KeyLists({self.batches} x {self.heads} x {self.num_m_blocks} lists, room for {room} keys, "
            f"seqlen_q={self.seqlen_q}, seqlen_k={self.seqlen_k}{causal}, device={str(self.device)!r})"
        )


register(
    KeyLists,
    ("kv_indices", "kv_indptr", "kv_row_bits", "mask", "cu_seqlens_q", "cu_seqlens_k"),
    ("seqlen_q", "seqlen_k", "is_causal"),
)


def collate(lists: list[KeyLists], *, collate_fn_map: object = None) -> KeyLists:
    """torch.utils.data.default_collate of lists."""
    raise TypeError("KeyLists cannot be collated: collate the masks or the indices, then build the lists of the batch")


default_collate_fn_map[KeyLists] = collate


# Checks


def checked_cu_seqlens(
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    seqlen_q: int,
    seqlen_k: int,
    reference: Tensor,
    whose: str,
    total_q: tuple[int, str] | None = None,
    total_k: tuple[int, str] | None = None,
) -> tuple[Tensor, Tensor]:
    """Both, contiguous as the kernels read them. reference, whose and totals: as in `check_cu_seqlens`."""
    check_same_sequences(cu_seqlens_q, cu_seqlens_k)
    check_cu_seqlens("cu_seqlens_q", cu_seqlens_q, reference, whose, total_q, longest=("seqlen_q", seqlen_q))
    check_cu_seqlens("cu_seqlens_k", cu_seqlens_k, reference, whose, total_k, longest=("seqlen_k", seqlen_k))
    return cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous()


def is_varlen(cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None) -> bool:
    if (cu_seqlens_q is None) != (cu_seqlens_k is None):
        given, missing = ("cu_seqlens_q", "cu_seqlens_k") if cu_seqlens_k is None else ("cu_seqlens_k", "cu_seqlens_q")
        raise ValueError(f"{given} requires {missing}, got {given} alone")
    return cu_seqlens_q is not None


def check_buildable(mask: object, seqlen_q: int, has_sequences: bool) -> None:
    if isinstance(mask, KeyIntervalMask):
        mask._require_kind("mask", has_sequences)
        return
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        got = names([mask.dtype]) if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"mask must be a bool tensor or a KeyIntervalMask, got {got}{as_tensor_hint('mask', mask)}")
    require_dense("mask", mask)
    hint = ""
    if has_sequences:
        ndims, accepted = (2, 3), "variable length (total_k, {H|Hkv|1}) or (total_q, {H|Hkv|1}, max_seqlen_k)"
    else:
        ndims, accepted = (4,), "fixed length ({B|B/n|1}, {H|Hkv|1}, {Sq|1}, {Sk|1})"
        if mask.ndim == 2 and statically_true(mask.shape[0] == seqlen_q):
            hint = ": pass mask[None, None]"
    if mask.ndim not in ndims:
        raise ValueError(f"mask must be of {accepted}, got shape {shape_of(mask)}{hint}")


def check_lists(lists: KeyLists, query: Tensor, key: Tensor, problem: Problem) -> None:
    """Raises where lists were built for another problem. query and key have been checked."""
    seqlen_q, seqlen_k, is_causal, cu_seqlens_q, _ = problem
    if (lists.cu_seqlens_q is None) != (cu_seqlens_q is None):
        built, given = ("fixed", "variable") if lists.cu_seqlens_q is None else ("variable", "fixed")
        raise ValueError(f"attn_mask holds lists of {built} length, got inputs of {given} length")
    heads, kv_heads = query.shape[-2], key.shape[-2]
    batches = query.shape[0] if lists.cu_seqlens_q is None else lists.batches
    if lists.needs_lists and not (shares_batch(lists.batches, batches) and is_one_of(lists.heads, heads, kv_heads, 1)):
        raise ValueError(
            f"attn_mask must hold lists of {batches} batch elements, or a number that divides them, and of {heads}, "
            f"{kv_heads} or 1 heads, got {lists.batches} and {lists.heads}"
        )
    if lists.seqlen_k != seqlen_k or (lists.seqlen_q != seqlen_q and not lists.row_broadcast):
        raise ValueError(
            f"attn_mask holds lists for {lists.seqlen_q} rows and {lists.seqlen_k} keys, "
            f"got {seqlen_q} rows and {seqlen_k} keys"
        )
    if lists.is_causal and not is_causal:
        raise ValueError("attn_mask holds lists that were built with is_causal=True, got a call with is_causal=False")
    if lists.device != query.device:
        raise RuntimeError(f"attn_mask must be on query's device {query.device}, got {lists.device}")
    for name in ("cu_seqlens_q", "cu_seqlens_k") if cu_seqlens_q is not None else ():
        built, given = getattr(lists, name), getattr(problem, name)
        if built.shape != given.shape:
            raise ValueError(f"attn_mask holds lists of {built.shape[0] - 1} sequences, got {given.shape[0] - 1}")
        # Lists that serve every row depend on the sequences of keys only.
        matters = name == "cu_seqlens_k" or not lists.row_broadcast
        if matters and is_host_readable(built) and not torch.equal(built, given):
            raise ValueError(f"attn_mask holds lists of other sequences: {name} differs")


def ascending(lists: KeyLists) -> Tensor:
    """`kv_indices` of an interval mask with each list sorted, as the CPU kernels need it, and -1 between lists."""
    begins, ends = lists.kv_indptr.flatten(1)
    if not begins.numel():
        return lists.kv_indices
    at = torch.arange(len(lists.kv_indices), device=lists.device)
    owner = torch.searchsorted(begins.contiguous(), at, right=True) - 1  # -1 before the first list
    is_listed = (owner >= 0) & (at < ends[owner.clamp(min=0)]) & (lists.kv_indices >= 0)
    keys = torch.where(is_listed, lists.kv_indices, -1)
    order = (owner << 32 | torch.where(is_listed, keys, INT32_MAX)).argsort()
    return keys[order]


# Builders. Their inputs have been checked


def build_lists(mask: Mask, problem: Problem, limit: int | None = None) -> KeyLists:
    """The lists of a mask. limit: as in ops.build_key_lists."""
    seqlen_q, seqlen_k, *sequences = problem
    operands, bound = mask.operands(), None
    if limit is None and mask.keys_per_row is not None:  # with a limit the keys are counted
        bound = min(mask.keys_per_row, seqlen_k)
    lengths = clamped_seqlens(mask, problem)
    tensors = ops.build_key_lists(operands.mask, operands.intervals, *lengths, *sequences, bound, limit)
    kv_indices, kv_indptr, row_bits = tensors
    kv_row_bits = None if operands.mask is None or is_per_key(mask.shape) else row_bits
    return KeyLists(kv_indices, kv_indptr, kv_row_bits, mask if operands.mask is None else operands.mask, *problem)


def list_indices(source: KeyIndices, problem: Problem) -> KeyLists:
    """The lists of an indexer's keys."""
    seqlen_q, seqlen_k, *sequences = problem
    cu_seqlens_q, cu_seqlens_k = problem.cu_seqlens_q, problem.cu_seqlens_k
    indices, tile_rows, interval_mask = source.indices, source.tile_rows, source.interval_mask
    if cu_seqlens_q is not None:
        if is_host_readable(cu_seqlens_q):
            longest_q, longest_k = map(longest_sequence, (cu_seqlens_q, cu_seqlens_k))
        else:
            longest_q = indices.shape[0] if indices.ndim == 3 else seqlen_q
            longest_k = seqlen_k if interval_mask is None else interval_mask.keys
        seqlen_q, seqlen_k = min(seqlen_q, longest_q), min(seqlen_k, longest_k)
    # The operator reports a wrong number of rows of indices, for the given tile_rows.
    has_tiles = indices.ndim == 4 and (cu_seqlens_q is not None or indices.shape[2] <= 1)
    if has_tiles and min(tile_rows, MAX_TILE_ROWS) >= problem.seqlen_q:
        # All rows share their indices, like whole m_blocks.
        tile_rows = min(-(-tile_rows // LIST_ROWS) * LIST_ROWS, MAX_TILE_ROWS)
        source = KeyIndices(indices, tile_rows, interval_mask, problem.seqlen_k)
    intervals = None if interval_mask is None else interval_mask.intervals
    tensors = ops.index_key_lists(indices, intervals, tile_rows, seqlen_q, seqlen_k, *sequences)
    return KeyLists(*tensors, source, *problem)


def longest_sequence(cu_seqlens: Tensor) -> int:
    return max(cu_seqlens.diff().tolist(), default=0)


def clamped_seqlens(mask: Mask, problem: Problem) -> tuple[int, int]:
    """seqlen_q and seqlen_k, for variable length at most those of the longest sequences, as far as the host knows them:
    the given bounds may be far above."""
    seqlen_q, seqlen_k, _, cu_seqlens_q, cu_seqlens_k = problem
    if cu_seqlens_q is None:
        return seqlen_q, seqlen_k
    column_per_key = mask.has_column_per_key()
    if is_host_readable(cu_seqlens_q):
        longest_q, longest_k = map(longest_sequence, (cu_seqlens_q, cu_seqlens_k))
    else:
        knows_rows = column_per_key or cu_seqlens_q is cu_seqlens_k
        longest_q, longest_k = mask.shape[0] if knows_rows else seqlen_q, mask.shape[0]
    return min(seqlen_q, longest_q), seqlen_k if column_per_key else min(seqlen_k, longest_k)
