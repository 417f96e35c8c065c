"""Masks that give every key one interval of query rows: O(Sk) memory where a bool mask takes O(Sq Sk)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from . import ops, prefix_topk
from .arguments import (
    check_cu_seqlens,
    check_same_sequences,
    names,
    require_count,
    require_floating,
    require_integers,
    require_tensor,
    shape_of,
    values_at_hand,
)
from .backends.reference import expand_shared

FIXED, VARLEN = "({B|1}, {H|Hkv|1}, Sk)", "(total_k, {H|Hkv|1})"
EVERY_ROW = prefix_topk.NEVER  # the end of a key that stays visible


class KeyIntervalMask:
    """For each key the half-open interval of query rows that may see it: row i sees key j where start_j <= i < end_j.

    Causal masks, sliding windows, packed documents, padding and the causal top-w dynamic mask are of this form, and so
    is `a & b`, what both let be seen. `flash_dmattn_func` and its other forms take it as attn_mask.

    Args:
        start: int32 ({B|1}, {H|Hkv|1}, Sk); of variable length (total_k, {H|Hkv|1}). Rows count from the first of the
            batch element, of variable length from the first of the key's own sequence.
        end: int32 in start's shape. Ends may lie beyond the rows; no row sees a key whose end is not above its start.
        keys_per_row: a bound, where one is known without looking at the values: no n rows that follow each other see
            more than keys_per_row + n - 1 different keys. It saves reading back from the device how many they are. A
            bound that is too small cuts lists of keys short: an error on the CPU, where they lack room in all; on CUDA
            the results are wrong without a word.
        scattered: whether the keys of a row lie scattered among those that it does not see, so that walking over the
            keys in tiles finds hardly any to skip. The masks of `topk` do. Only the speed depends on it.
        rows: of fixed length Sq, where the intervals are right for that number of rows alone, as those of `causal`,
            `sliding_window`, `documents` and `topk` are: with another they are refused.

    Attributes:
        start, end, keys_per_row, scattered, rows: as given.
        intervals: int32 (2, ...), starts and ends in one tensor.

    Raises:
        TypeError: start or end is no int32 tensor, keys_per_row or rows no int.
        ValueError: shapes that do not fit, a negative keys_per_row or rows, rows of variable length.
        RuntimeError: start and end are on different devices.
    """

    def __init__(
        self,
        start: Tensor,
        end: Tensor,
        *,
        keys_per_row: int | None = None,
        scattered: bool = False,
        rows: int | None = None,
    ):
        for name, tensor in (("start", start), ("end", end)):
            require_tensor(name, tensor)
            if tensor.dtype != torch.int32:
                raise TypeError(f"{name} must be int32, got {names([tensor.dtype])}")
        if start.ndim not in (2, 3):
            raise ValueError(f"start must be {FIXED}, or {VARLEN}, got shape {shape_of(start)}")
        if end.shape != start.shape:
            raise ValueError(f"end must have start's shape {shape_of(start)}, got {shape_of(end)}")
        if end.device != start.device:
            raise RuntimeError(f"end must be on start's device {start.device}, got {end.device}")
        if keys_per_row is not None:
            require_count("keys_per_row", keys_per_row)
        if rows is not None:
            require_count("rows", rows)
            if start.ndim == 2:
                raise ValueError(f"rows is of fixed length, got {rows} with start of shape {shape_of(start)}")
        self._set(torch.stack((start, end)), keys_per_row, scattered, rows)

    def _set(self, intervals: Tensor, keys_per_row: int | None, scattered: bool, rows: int | None) -> None:
        self.intervals = intervals
        self.keys_per_row = keys_per_row
        self.scattered = scattered
        self.rows = rows

    @classmethod
    def _of(
        cls, intervals: Tensor, keys_per_row: int | None = None, scattered: bool = False, rows: int | None = None
    ) -> KeyIntervalMask:
        """The mask of starts and ends that lie in one tensor (2, ...), as the kernels take them."""
        mask = cls.__new__(cls)
        mask._set(intervals, keys_per_row, scattered, rows)
        return mask

    def require_rows(self, name: str, seqlen_q: int) -> None:
        """Refuses a number of rows for which the intervals were not made."""
        if self.rows is not None and self.rows != seqlen_q:
            raise ValueError(
                f"{name} was made for {self.rows} query rows, got {seqlen_q}: make it for {seqlen_q}, which then stand "
                "at the last keys (seqlen_q of causal, sliding_window and topk)"
            )

    # What it is

    @property
    def start(self) -> Tensor:
        return self.intervals[0]

    @property
    def end(self) -> Tensor:
        return self.intervals[1]

    @property
    def shape(self) -> torch.Size:
        """That of start and end."""
        return self.intervals.shape[1:]

    @property
    def is_varlen(self) -> bool:
        """Whether it is of variable length: (total_k, {H|Hkv|1})."""
        return self.intervals.ndim == 3

    @property
    def batches(self) -> int | None:
        """B or 1; None of variable length."""
        return None if self.is_varlen else self.shape[0]

    @property
    def heads(self) -> int:
        """H, Hkv or 1."""
        return self.shape[1]

    @property
    def keys(self) -> int:
        """Sk; of variable length total_k."""
        return self.shape[0 if self.is_varlen else 2]

    @property
    def device(self) -> torch.device:
        """Where start and end are."""
        return self.intervals.device

    def __repr__(self) -> str:
        # Sizes only: a GPU need not be waited for.
        sizes = {name: getattr(self, name) for name in ("batches", "heads", "rows", "keys", "keys_per_row")}
        known = "".join(f"{name}={size}, " for name, size in sizes.items() if size is not None)
        return f"KeyIntervalMask({known}device='{self.device}')"

    def to(self, device: torch.device | str, non_blocking: bool = False) -> KeyIntervalMask:
        """The same mask on that device."""
        return self._of_same_kind(self.intervals.to(device, non_blocking=non_blocking))

    def __and__(self, other: KeyIntervalMask) -> KeyIntervalMask:
        """What both let be seen. Batch sizes must be the same or 1; of two head counts one must divide the other."""
        if not isinstance(other, KeyIntervalMask):
            return NotImplemented
        heads = max(self.heads, other.heads)
        fit = (
            self.is_varlen == other.is_varlen
            and self.keys == other.keys
            and (self.batches == other.batches or 1 in (self.batches, other.batches))
            and all(mask.heads == heads or (mask.heads and heads % mask.heads == 0) for mask in (self, other))
        )
        if not fit:
            raise ValueError(
                f"a & b needs masks {FIXED}, or {VARLEN}, with the same keys, with the same batch size or 1, and with "
                f"head counts of which one divides the other, got {tuple(self.shape)} and {tuple(other.shape)}"
            )
        if self.device != other.device:
            raise RuntimeError(f"a & b needs masks on the same device, got {self.device} and {other.device}")

        if None not in (self.rows, other.rows) and self.rows != other.rows:
            raise ValueError(f"a & b needs masks of the same rows, got {self.rows} and {other.rows}")

        bounds = [mask.keys_per_row for mask in (self, other) if mask.keys_per_row is not None]

        (start, end), (others_start, others_end) = (
            (expand_shared(rows, rows.shape[0], heads) for rows in mask.intervals) for mask in (self, other)
        )
        return KeyIntervalMask(
            torch.maximum(start, others_start),
            torch.minimum(end, others_end),
            keys_per_row=min(bounds) if bounds else None,
            scattered=self.scattered or other.scattered,
            rows=other.rows if self.rows is None else self.rows,
        )

    def to_dense(self, seqlen_q: int | None = None) -> Tensor:
        """bool ({B|1}, {H|Hkv|1}, Sq, Sk), True = visible. Sq is `rows`, or as many as keys where that is not known.

        A mask of variable length has no dense form: take that of each `sequence`.
        """
        rows = torch.arange(self._rows(seqlen_q), dtype=torch.int32, device=self.device)[:, None]
        return (self.start[:, :, None] <= rows) & (rows < self.end[:, :, None])

    def density(self, seqlen_q: int | None = None) -> Tensor:
        """float32, without dimensions: the part of all pairs that is visible; rows as in `to_dense`."""
        rows = self._rows(seqlen_q)
        visible = (self.end.clamp(0, rows) - self.start.clamp(0, rows)).clamp_(min=0)
        return visible.sum() / max(rows * visible.numel(), 1)

    def sequence(self, first: int, last: int) -> KeyIntervalMask:
        """Of a mask of variable length the sequence with the keys first .. last - 1, as a mask (1, {H|Hkv|1}, Sk)."""
        if not self.is_varlen:
            raise ValueError(f"only a mask {VARLEN} has sequences, got {tuple(self.shape)}")
        return self._of_same_kind(self.intervals[:, first:last].transpose(1, 2)[:, None])

    def _of_same_kind(self, intervals: Tensor) -> KeyIntervalMask:
        """Other intervals, of which the same is known."""
        return self._of(intervals, self.keys_per_row, self.scattered, self.rows)

    def _rows(self, seqlen_q: int | None) -> int:
        if self.is_varlen:
            raise ValueError(f"a mask {VARLEN} does not know its sequences' rows; take sequence(first, last) of it")
        if seqlen_q is None:
            return self.keys if self.rows is None else self.rows
        require_count("seqlen_q", seqlen_q)
        self.require_rows("the mask", seqlen_q)
        return seqlen_q

    # How it is made

    @classmethod
    def causal(cls, seqlen_q: int, seqlen_k: int, device: torch.device | str | None = None) -> KeyIntervalMask:
        """Row i sees the keys j <= i + (Sk - Sq): aligned to the bottom right corner. (1, 1, Sk)."""
        start = own_rows(seqlen_q, seqlen_k, device).clamp_(min=0)
        return cls(start, torch.full_like(start, EVERY_ROW), rows=seqlen_q)

    @classmethod
    def sliding_window(
        cls,
        seqlen_q: int,
        seqlen_k: int,
        window_size: int | tuple[int, int],
        device: torch.device | str | None = None,
    ) -> KeyIntervalMask:
        """Row i sees the keys around its own, which is key i + (Sk - Sq). (1, 1, Sk).

        Args:
            seqlen_q, seqlen_k: Sq and Sk.
            window_size: how many keys a row sees, of which its own is the last; or (left, right): how many it sees
                before and how many after its own.
            device: where to make it.
        """
        accepted = "an int or a tuple (left, right)"
        if isinstance(window_size, tuple):
            if len(window_size) != 2:
                raise ValueError(f"window_size must be {accepted}, got {window_size}")
            left, right = window_size
            require_count("window_size[0]", left)
            require_count("window_size[1]", right)
        else:
            require_count("window_size", window_size, accepted)
            left, right = window_size - 1, 0
        own = own_rows(seqlen_q, seqlen_k, device)
        left, right = min(left, EVERY_ROW - 1), min(right, EVERY_ROW)  # int32 holds their sums with any row
        start, end = (own - right).clamp_(min=0), (own + (left + 1)).clamp_(min=0)
        return cls(start, end, keys_per_row=left + right + 1, rows=seqlen_q)

    @classmethod
    def documents(
        cls, cu_seqlens: Tensor | None = None, seqlen: int | None = None, *, ids: Tensor | None = None
    ) -> KeyIntervalMask:
        """Every row sees the keys of its own document; as many rows as keys. From `cu_seqlens` and `seqlen`, or `ids`.

        Args:
            cu_seqlens: int32 (documents + 1), rising from 0: document d has the keys cu_seqlens[d] to
                cu_seqlens[d + 1] - 1. No row sees the keys after the last document.
            seqlen: how many keys there are.
            ids: integers (S) or (B, S): a run of equal ones is a document.

        Returns:
            (1, 1, seqlen), or ({B|1}, 1, S).

        Raises:
            TypeError, ValueError: an argument that does not fit; the values of cu_seqlens are looked at on the CPU.
        """
        if (cu_seqlens is None) == (ids is None) or (cu_seqlens is None) != (seqlen is None):
            raise ValueError("documents takes cu_seqlens and seqlen, or ids")
        if ids is None:
            require_count("seqlen", seqlen)
            check_cu_seqlens("cu_seqlens", cu_seqlens, total=seqlen, or_less=True)
            sequence = sequence_of_keys(cu_seqlens, seqlen)
            behind = torch.cat([cu_seqlens[1:], cu_seqlens[-1:]])
            return cls(cu_seqlens[sequence][None, None], behind[sequence][None, None], rows=seqlen)

        require_integers("ids", ids)
        if ids.ndim not in (1, 2):
            raise ValueError(f"ids must be (S) or (B, S), got shape {shape_of(ids)}")
        ids = ids if ids.ndim == 2 else ids[None]
        batch, seqlen = ids.shape
        place = torch.arange(seqlen, dtype=torch.int32, device=ids.device)
        changes = ids[:, 1:] != ids[:, :-1]
        edge = changes.new_ones(batch, min(seqlen, 1))
        start = torch.where(torch.cat([edge, changes], dim=1), place, 0).cummax(dim=1).values
        end = torch.where(torch.cat([changes, edge], dim=1), place + 1, seqlen).flip(1).cummin(dim=1).values.flip(1)
        return cls(start[:, None], end[:, None], rows=seqlen)

    @classmethod
    def padding(cls, real: Tensor, seqlen_k: int | None = None) -> KeyIntervalMask:
        """Every row sees the keys that are no padding. (B, 1, Sk).

        Args:
            real: bool or integers (B, Sk), not 0 = a real key; or integers (B): how many keys, counted from the first,
                are real; on the CPU they are looked at: 0 to Sk.
            seqlen_k: Sk, with lengths (B).
        """
        require_integers("real", real, or_bool=True)
        if real.ndim == 1 and real.dtype != torch.bool and seqlen_k is not None:
            require_count("seqlen_k", seqlen_k)
            if values_at_hand(real) and ((real < 0) | (real > seqlen_k)).any():
                raise ValueError(f"real must be lengths from 0 to seqlen_k {seqlen_k}, got {real.tolist()}")
            real = torch.arange(seqlen_k, device=real.device) < real[:, None]
        if real.ndim != 2 or seqlen_k not in (None, real.shape[1]):
            raise ValueError(
                "real must be a mask (B, Sk), or lengths (B) with seqlen_k, "
                f"got {names([real.dtype])} of shape {shape_of(real)} and seqlen_k {seqlen_k}"
            )
        end = torch.where(real[:, None] != 0, EVERY_ROW, 0).int()
        return cls(torch.zeros_like(end), end)

    @classmethod
    def topk(cls, bias: Tensor, window_size: int, seqlen_q: int | None = None) -> KeyIntervalMask:
        """The causal top-w mask of a bias: row i sees, of the keys j <= i + (Sk - Sq), the w of largest bias.

        Of equal biases that of the later key is the larger, so a constant bias gives a sliding window. No row sees a
        key whose bias is -inf or the least finite number of its dtype. From row to row the w-th largest bias never
        falls, so a key that has dropped out does not return, and an interval says all. Exact; O(N log N) operations and
        O(N) memory, all batch elements and heads at once.

        Args:
            bias: floating, one number a key: ({B|1}, {H|Hkv|1}, 1, Sk) or ({B|1}, {H|Hkv|1}, Sk).
            window_size: w, at least 0. A row that has no more keys sees them all.
            seqlen_q: Sq, by default Sk. The rows stand at the bottom right, so 1 is a step of decoding.

        Returns:
            ({B|1}, {H|Hkv|1}, Sk). No gradient passes through it.

        Raises:
            TypeError, ValueError: an argument that does not fit.
            ValueError: a bias of NaN, on the CPU. On CUDA and under torch.compile nothing waits to look: there NaN
                fails an assertion on the device, which a later call reports.
        """
        check_topk("({B|1}, {H|Hkv|1}, 1, Sk) or " + FIXED, bias, window_size, ndims=(3, 4))
        keys = bias.shape[-1]
        rows = keys if seqlen_q is None else seqlen_q
        require_count("seqlen_q", rows)
        intervals = operator_for(bias)(bias, min(window_size, keys), rows, None, None, None)
        return cls._of(intervals, window_size, scattered=True, rows=rows)

    @classmethod
    def topk_varlen(
        cls,
        bias: Tensor,
        window_size: int,
        cu_seqlens_k: Tensor,
        cu_seqlens_q: Tensor | None = None,
        max_seqlen_k: int | None = None,
    ) -> KeyIntervalMask:
        """`topk` of sequences of different lengths, packed one after the other: each has its own w keys.

        Args:
            bias: floating (total_k, {H|Hkv|1}).
            window_size: w, at least 0.
            cu_seqlens_k: int32 (B + 1): sequence b has the keys cu_seqlens_k[b] to cu_seqlens_k[b + 1] - 1.
            cu_seqlens_q: int32 (B + 1), the same for rows; by default cu_seqlens_k.
            max_seqlen_k: at least the longest sequence of keys, where that is known: short ones are selected faster.

        Returns:
            (total_k, {H|Hkv|1}). No gradient passes through it.

        Raises:
            As `topk`.
        """
        check_topk(VARLEN, bias, window_size, ndims=(2,))
        check_cu_seqlens("cu_seqlens_k", cu_seqlens_k, bias, "bias", total=bias.shape[0])
        cu_seqlens_q = cu_seqlens_k if cu_seqlens_q is None else cu_seqlens_q
        check_cu_seqlens("cu_seqlens_q", cu_seqlens_q, bias, "bias")
        check_same_sequences(cu_seqlens_q, cu_seqlens_k)
        window = min(window_size, bias.shape[0])
        intervals = operator_for(bias)(bias, window, 0, cu_seqlens_q, cu_seqlens_k, max_seqlen_k)
        return cls._of(intervals, window_size, scattered=True)


# Selection


def operator_for(bias: Tensor) -> Callable[..., Tensor]:
    """The operator topk_intervals; what runs it where there is none."""
    is_operator = prefix_topk.has_kernels(bias) or (bias.device.type != "cuda" and ops.topk_intervals is not None)
    return ops.topk_intervals if is_operator else topk_intervals


def topk_intervals(
    bias: Tensor,
    window_size: int,
    seqlen_q: int,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    longest: int | None,
) -> Tensor:
    """int32 (2, ...): starts and ends of `KeyIntervalMask.topk`, or with cu_seqlens of `topk_varlen`."""
    refuse_nan(bias)
    bias = bias.detach()
    if cu_seqlens_k is None:
        bias = bias.squeeze(2) if bias.ndim == 4 else bias
        end = prefix_topk.topk_ends_of_last(bias.flatten(0, 1), window_size, seqlen_q).view(bias.shape).clamp_(min=0)
        start = own_rows(seqlen_q, bias.shape[-1], bias.device).clamp_(min=0)
        return torch.stack((start.expand(bias.shape), end))
    keys = bias.shape[0]
    sequence = sequence_of_keys(cu_seqlens_k, keys)
    first = cu_seqlens_k[sequence]
    end = prefix_topk.topk_ends(bias.T, window_size, first).T
    place = torch.arange(keys, dtype=torch.int32, device=bias.device) - first
    lead = torch.nn.functional.pad((cu_seqlens_k - cu_seqlens_q).diff(), (0, 1))[sequence]
    start, end = (place - lead)[:, None].clamp_(min=0), (end - lead[:, None]).clamp_(min=0)
    return torch.stack((start.expand(end.shape), end))


if ops.topk_intervals is not None:
    torch.library.impl(f"{ops.NAMESPACE}::topk_intervals", "cpu")(topk_intervals)


# Checks and places


def check_topk(layout: str, bias: object, window_size: object, ndims: tuple[int, ...]) -> None:
    require_count("window_size", window_size)
    require_floating("bias", bias)
    if bias.ndim not in ndims or (bias.ndim == 4 and bias.shape[2] != 1):
        raise ValueError(f"bias must be {layout}, got shape {shape_of(bias)}")


def refuse_nan(bias: Tensor) -> None:
    """A bias to select from has an order. Kernels look themselves."""
    if values_at_hand(bias):
        if bias.detach().isnan().any():
            raise ValueError("bias must not be NaN: it has no order")
    elif not prefix_topk.has_kernels(bias) and (
        torch.compiler.is_compiling() or not torch._C._are_functorch_transforms_active()  # which know no assertions
    ):
        torch._assert_async(~bias.detach().isnan().any(), "KeyIntervalMask.topk: bias must not be NaN")


def own_rows(seqlen_q: int, seqlen_k: int, device: torch.device | str | None) -> Tensor:
    """int32 (1, 1, Sk): the row that stands at each key, j - (Sk - Sq); before the first it is negative."""
    require_count("seqlen_q", seqlen_q)
    require_count("seqlen_k", seqlen_k)
    return torch.arange(seqlen_q - seqlen_k, seqlen_q, dtype=torch.int32, device=device)[None, None]


def sequence_of_keys(cu_seqlens: Tensor, keys: int) -> Tensor:
    """int64 (keys): the number of the sequence that a key belongs to; that of keys after the last is B."""
    places = torch.arange(keys, dtype=torch.int32, device=cu_seqlens.device)
    return torch.searchsorted(cu_seqlens.contiguous(), places, right=True) - 1
