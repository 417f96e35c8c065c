"""Lists of keys: for each tile of query rows the keys that any of its rows sees, and when to go by them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from . import ops
from .interval_mask import KeyIntervalMask

SPARSE = ("auto", "tiles", "lists")


@dataclass(frozen=True, eq=False, repr=False)
class KeyLists:
    """A mask as sorted lists of keys, one for each batch element, head and tile of 128 query rows.

    The kernels gather the keys of a list instead of walking over all of them: they cost as much as there are listed
    keys, wherever these lie. Made once by `build`, it serves any number of layers and their backward, as `attn_mask`.
    """

    keys: Tensor  # int32 (capacity): list after list, each padded with -1 to a multiple of 64
    starts: Tensor  # int64 (batches * heads * row tiles + 1)
    rows: Tensor | None  # int32 (capacity, 4): which of the 128 rows see a key; None where `mask` need not be asked so
    batches: int
    heads: int
    mask: Tensor | KeyIntervalMask  # what they were made from
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
            mask: a KeyIntervalMask, or bool ({B|1}, {H|Hkv|1}, {Sq|1}, {Sk|1}); of variable length (total_k, {H|Hkv|1})
                or (total_q, {H|Hkv|1}, max_seqlen_k).
            seqlen_q: the number of query rows; of variable length max_seqlen_q. Where the mask is the same for every
                row the lists serve any number of rows.
            seqlen_k: the number of keys, the mask's by default; of variable length max_seqlen_k.
            is_causal: leaves out keys that causality hides. The lists then serve calls with is_causal=True only.
            cu_seqlens_q, cu_seqlens_k: int32 (B + 1), of variable length.
        """
        is_varlen = cu_seqlens_q is not None
        if is_varlen != (cu_seqlens_k is not None):
            raise ValueError("cu_seqlens_q and cu_seqlens_k must be given together")
        intervals = mask if isinstance(mask, KeyIntervalMask) else None
        if intervals is None and (not isinstance(mask, Tensor) or mask.dtype != torch.bool):
            got = str(mask.dtype).removeprefix("torch.") if isinstance(mask, Tensor) else type(mask).__name__
            raise TypeError(f"mask must be a bool tensor or a KeyIntervalMask, got {got}")
        shape = mask.shape if intervals is None else intervals.start.shape
        accepted = ((2, 3) if is_varlen else (4,)) if intervals is None else ((2,) if is_varlen else (3,))
        if len(shape) not in accepted:
            kind = "variable" if is_varlen else "fixed"
            sizes = " or ".join(map(str, accepted))
            raise ValueError(f"mask must have {sizes} dimensions of {kind} length, got shape {tuple(shape)}")
        if seqlen_k is None:
            if is_varlen and len(shape) == 2:
                raise ValueError("seqlen_k must be given of variable length: the longest sequence of keys")
            seqlen_k = shape[-1]

        batches = cu_seqlens_q.shape[0] - 1 if is_varlen else shape[0]
        heads = shape[1]
        keys, starts, rows = ops.build_key_lists(
            *((mask, None) if intervals is None else (None, interval_tensor(intervals))),
            *(seqlen_q, seqlen_k, is_causal, cu_seqlens_q, cu_seqlens_k),
            capacity_of(intervals, batches * heads, seqlen_q, seqlen_k) if intervals is not None else None,
        )
        rows = rows if intervals is None and not rows_are_alike(mask) else None
        problem = (seqlen_q, seqlen_k, is_causal, cu_seqlens_q, cu_seqlens_k)
        return KeyLists(keys, starts, rows, batches, heads, mask, *problem)

    @property
    def rows_alike(self) -> bool:
        """Whether one list serves every row of a head."""
        return self.rows is None and not isinstance(self.mask, KeyIntervalMask)

    @property
    def row_tiles(self) -> int:
        return 1 if self.rows_alike else -(-self.seqlen_q // ops.LIST_ROWS)

    @property
    def device(self) -> torch.device:
        return self.keys.device

    def lengths(self) -> Tensor:
        """int64 (batches, heads, row tiles): the length of each list, with its padding."""
        return self.starts.diff().view(self.batches, self.heads, self.row_tiles)

    def density(self) -> float:
        """The part of all keys that a list names on average, its padding counted. Waits for the device."""
        return float(self.lengths().double().mean()) / max(self.seqlen_k, 1) if self.starts.shape[0] > 1 else 0.0

    def to_dense(self) -> Tensor:
        """The mask as bool ({B|1}, {H|Hkv|1}, {Sq|1}, Sk), of fixed length only; causal where the lists are."""
        if self.cu_seqlens_q is not None:
            raise ValueError("to_dense is for lists of fixed length")
        mask = self.mask.to_dense(self.seqlen_q) if isinstance(self.mask, KeyIntervalMask) else self.mask
        if not self.is_causal:
            return mask
        mask = mask.expand(-1, -1, self.seqlen_q, self.seqlen_k)
        return mask.tril(self.seqlen_k - self.seqlen_q)

    def to(self, device: torch.device | str) -> KeyLists:
        def move(value):
            return value.to(device) if isinstance(value, (Tensor, KeyIntervalMask)) else value

        names = ("keys", "starts", "rows", "mask", "cu_seqlens_q", "cu_seqlens_k")
        return replace(self, **{name: move(getattr(self, name)) for name in names})

    def __repr__(self) -> str:
        causal = ", causal" if self.is_causal else ""
        return (
            f"KeyLists({self.batches} x {self.heads} x {self.row_tiles} lists, room for {self.keys.shape[0]} keys, "
            f"seqlen_q={self.seqlen_q}, seqlen_k={self.seqlen_k}{causal}, device={str(self.device)!r})"
        )


def rows_are_alike(mask: Tensor) -> bool:
    """Whether a bool mask, of fixed or variable length, is one number a key."""
    return mask.ndim == 2 or (mask.ndim == 4 and mask.shape[2] == 1)


def interval_tensor(mask: KeyIntervalMask) -> Tensor:
    """int32 (2, ...): starts and ends, as the ops take them."""
    return torch.stack((mask.start, mask.end))


def capacity_of(mask: KeyIntervalMask, heads: int, seqlen_q: int, seqlen_k: int) -> int | None:
    """Room for all lists of `heads` batch elements and heads, where the mask knows how many keys a row sees at most."""
    if mask.keys_per_row is None:
        return None
    longest = min(mask.keys_per_row + min(ops.LIST_ROWS, seqlen_q) - 1, seqlen_k) if seqlen_q else 0
    return heads * -(-seqlen_q // ops.LIST_ROWS) * -(-longest // ops.LIST_ALIGN) * ops.LIST_ALIGN


def choose(
    mask: Tensor | KeyIntervalMask | KeyLists | None,
    sparse: str,
    seqlen_q: int,
    seqlen_k: int,
    is_causal: bool,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
) -> Tensor | KeyIntervalMask | KeyLists | None:
    """The mask in the form by which a compiled kernel goes: KeyLists for lists, anything else for tiles."""
    if isinstance(mask, KeyLists):
        return mask.mask if sparse == "tiles" else mask
    if mask is None or sparse != "lists":
        return mask
    return KeyLists.build(mask, seqlen_q, seqlen_k, is_causal, cu_seqlens_q, cu_seqlens_k)
