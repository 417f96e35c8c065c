"""KeyIntervalMask: one interval of query rows for each key. O(Sk) memory, where a bool mask takes O(Sq Sk)."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import NoReturn, overload

import torch
from torch import Tensor
from torch.utils.data._utils.collate import default_collate_fn_map

from ..arguments import (
    batch_slice,
    check_cu_seqlens,
    check_same_sequences,
    has_integers,
    is_host_readable,
    names,
    require_bool,
    require_count,
    require_count_or_tensor,
    require_int,
    require_integers,
    require_length,
    require_max_seqlen,
    require_tensor,
    shape_of,
)
from ..broadcast import is_one_of
from ..ops.schema import MaskTensors
from .base import Mask
from .combined import FIXED, VARLEN, intersection, intersection_with_bool, union
from .containers import Container, register
from .topk import NEVER, check_topk, operator_for, own_rows, require_position, sequence_of_keys


class KeyIntervalMask(Container, Mask):
    """For each key the half-open interval of query rows that see it: row i sees key j where start_j <= i < end_j.

    Causal masks, sliding windows, packed documents, padding and the causal top-k dynamic mask have this form. `a & b`,
    the scores that both masks allow, has it too. Pass it as attn_mask to `flash_dmattn_func` and its other forms. Its
    attributes cannot be assigned.

    Args:
        start: int32 ({B|1}, {H|Hkv|1}, Sk); for variable length (total_k, {H|Hkv|1}). Rows count from the first row of
            the batch element, for variable length from the first row of the key's sequence.
        end: int32 in start's shape. Ends may lie beyond the rows; no row sees a key whose end is not above its start.
        keys_per_row: a bound that is known without reading the values: for every n, any n consecutive rows together see
            at most keys_per_row + n - 1 different keys; a bound for each row alone is not enough. It saves reading the
            number back from the device. Too small a bound truncates the key lists: on the CPU that is an error where
            all lists together lack room; on CUDA the results are wrong and no error is raised.
        unstructured: whether the visible keys of a row lie far apart, so that hardly any tile of keys is fully masked,
            as in the masks of `topk`. Affects only the speed.
        rows: Sq, for fixed length, where the intervals fit only that number of rows, as those of `causal`,
            `sliding_window`, `prefix_lm`, `documents` and `topk`. Calls with another number of rows raise an error.

    Attributes:
        start, end, keys_per_row, unstructured, rows: as given.
        intervals: int32 (2, ...), starts and ends in one tensor.

    Raises:
        TypeError: start or end is not an int32 tensor, keys_per_row or rows not an int, unstructured not a bool.
        ValueError: shapes that do not match, a negative keys_per_row or rows, rows with variable length.
        RuntimeError: start and end are on different devices.
    """

    def __init__(
        self,
        start: Tensor,
        end: Tensor,
        *,
        keys_per_row: int | None = None,
        unstructured: bool = False,
        rows: int | None = None,
    ):
        for name, tensor in (("start", start), ("end", end)):
            require_tensor(name, tensor)
            if tensor.dtype != torch.int32:
                raise TypeError(f"{name} must be int32, got {names([tensor.dtype])}: pass {name}.int()")
        if start.ndim not in (2, 3):
            raise ValueError(f"start must be {FIXED}, or {VARLEN}, got shape {shape_of(start)}")
        if end.shape != start.shape:
            raise ValueError(f"end must have start's shape {shape_of(start)}, got {shape_of(end)}")
        if end.device != start.device:
            raise RuntimeError(f"end must be on start's device {start.device}, got {end.device}")
        if keys_per_row is not None:
            keys_per_row = require_count("keys_per_row", keys_per_row)
        require_bool("unstructured", unstructured)
        if rows is not None:
            rows = require_count("rows", rows)
            if start.ndim == 2:
                raise ValueError(f"rows is for fixed length, got {rows} with start of shape {shape_of(start)}")
        self._set(torch.stack((start, end)), keys_per_row, bool(unstructured), rows)

    @classmethod
    def _of(
        cls, intervals: Tensor, keys_per_row: int | None = None, unstructured: bool = False, rows: int | None = None
    ) -> KeyIntervalMask:
        """The mask of intervals (2, ...): starts and ends in one tensor, as the kernels read them."""
        mask = cls.__new__(cls)
        mask._set(intervals, keys_per_row, unstructured, rows)
        return mask

    def _set(self, intervals: Tensor, keys_per_row: int | None, unstructured: bool, rows: int | None) -> None:
        """Sets the attributes. torch.compile of PyTorch 2.11 traces no update of __dict__."""
        attributes = {"intervals": intervals, "keys_per_row": keys_per_row, "unstructured": unstructured, "rows": rows}
        for name, value in attributes.items():
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise FrozenInstanceError(f"cannot assign to field {name!r}")  # as a frozen dataclass, such as KeyLists

    def __delattr__(self, name: str) -> NoReturn:
        raise FrozenInstanceError(f"cannot delete field {name!r}")

    def _require_rows(self, name: str, seqlen_q: int) -> None:
        """Raises ValueError where the intervals are for another number of rows."""
        if self.rows is not None and self.rows != seqlen_q:
            raise ValueError(
                f"{name} was made for {self.rows} query rows, got {seqlen_q}: make it for {seqlen_q} rows, which are "
                "aligned with the last keys (seqlen_q of causal, sliding_window, prefix_lm and topk; documents is for "
                "Sq = Sk)"
            )

    def _require_kind(self, name: str, is_varlen: bool) -> None:
        """Raises ValueError for a mask of fixed length where one of variable length is required, or the reverse."""
        if self.is_varlen == is_varlen:
            return
        if is_varlen:
            accepted, got = f"variable length {VARLEN}", f"fixed length {shape_of(self)}"
            hint = "sliding_window_varlen and topk_varlen make such masks"
        else:
            accepted, got = f"fixed length {FIXED}", f"variable length {shape_of(self)}"
            hint = "sequence(first, last) of it is the mask of one sequence"
        raise ValueError(f"{name} must be a KeyIntervalMask of {accepted}, got one of {got}: {hint}")

    # The protocol of a mask

    @property
    def list_intervals(self) -> Tensor:
        return self.intervals

    def operands(self) -> MaskTensors:
        return MaskTensors(intervals=self.intervals)

    def as_bool(self, seqlen_q: int) -> Tensor:
        return self.to_dense(seqlen_q)

    def sequence_as_bool(self, number: int, rows: slice, keys: slice) -> Tensor:
        return self.sequence(keys.start, keys.stop).to_dense(rows.stop - rows.start)

    def check(self, check_tensors, call) -> None:
        self._require_kind("attn_mask", call.varlen is not None)
        super().check(check_tensors, call)
        self._require_rows("attn_mask", call.problem().seqlen_q)

    # Properties

    @property
    def start(self) -> Tensor:
        return self.intervals[0]

    @property
    def end(self) -> Tensor:
        return self.intervals[1]

    @property
    def shape(self) -> torch.Size:
        """The shape of start and end."""
        return self.intervals.shape[1:]

    @property
    def is_varlen(self) -> bool:
        """Whether the mask is for variable length: (total_k, {H|Hkv|1})."""
        return self.intervals.ndim == 3

    @property
    def batches(self) -> int | None:
        """B or 1; None for variable length."""
        return None if self.is_varlen else self.shape[0]

    @property
    def heads(self) -> int:
        """H, Hkv or 1."""
        return self.shape[1]

    @property
    def keys(self) -> int:
        """Sk; for variable length total_k."""
        return self.shape[0 if self.is_varlen else 2]

    @property
    def device(self) -> torch.device:
        """The device of start and end."""
        return self.intervals.device

    def __repr__(self) -> str:
        # Sizes only: reading values would wait for the GPU.
        sizes = {name: getattr(self, name) for name in ("batches", "heads", "rows", "keys", "keys_per_row")}
        known = "".join(f"{name}={size}, " for name, size in sizes.items() if size is not None)
        return f"KeyIntervalMask({known}device='{self.device}')"

    def __getitem__(self, index: int | slice | Tensor) -> KeyIntervalMask:
        """The mask of some batch elements: `mask[2]` and `mask[2:4]` keep the batch dimension.

        Args:
            index: an int, a slice, or an int64 or bool tensor (n).

        Raises:
            TypeError: an index of another type or dtype.
            IndexError: an index out of range, or a tensor of other dimensions.
            ValueError: a mask of variable length.
        """
        if self.is_varlen:
            raise ValueError(f"a mask {VARLEN} has no batch elements; take sequence(first, last) of it")
        index = batch_slice(index, self.shape[0])
        accepted = "an int, a slice, or an int64 or bool tensor (n)"
        is_tensor = isinstance(index, Tensor)
        if not isinstance(index, slice) and not (is_tensor and index.dtype in (torch.int64, torch.bool)):
            got = f"a {names([index.dtype])} tensor" if is_tensor else type(index).__name__
            raise TypeError(f"a mask is indexed by {accepted}, got {got}")
        if is_tensor and index.ndim != 1:
            raise IndexError(f"a mask is indexed by {accepted}, got shape {shape_of(index)}")
        if is_tensor and index.dtype == torch.bool and len(index) != self.shape[0]:
            raise IndexError(
                f"a bool index must have {self.shape[0]} elements, one per batch element, got {len(index)}"
            )
        return self._of_same_kind(self.intervals[:, index])

    @overload
    def __and__(self, other: KeyIntervalMask) -> KeyIntervalMask: ...
    @overload
    def __and__(self, other: Tensor) -> Tensor: ...

    def __and__(self, other):
        """The scores that both masks allow. Batch sizes must be equal or 1; one head count must divide the other.

        With a bool tensor ({B|1}, {H|Hkv|1}, {Sq|1}, {Sk|1}) a bool tensor. Where the mask has no `rows` and the tensor
        one row, Sq is Sk. In a graph of torch.compile with fullgraph=True write `a.to_dense(Sq) & b`.
        """
        if isinstance(other, Tensor):
            return intersection_with_bool(self, other)
        return intersection(self, other) if isinstance(other, KeyIntervalMask) else NotImplemented

    __rand__ = __and__

    def __or__(self, other: KeyIntervalMask) -> KeyIntervalMask:
        """The scores that either mask allows, where the rows that see a key are one interval. Waits for the device.

        It has keys_per_row, counted from the values, where both masks have it and one has rows. Under torch.compile it
        has none.

        Raises ValueError where a key's two intervals leave a gap: use `to_dense`. Under torch.compile and torch.export
        a gap fails an assertion on the device.
        """
        if isinstance(other, Tensor):
            raise TypeError("a | b of a KeyIntervalMask and a tensor is no KeyIntervalMask: use a.to_dense() | b")
        return union(self, other) if isinstance(other, KeyIntervalMask) else NotImplemented

    __ror__ = __or__

    def __invert__(self) -> NoReturn:
        raise TypeError("~mask of a KeyIntervalMask is no KeyIntervalMask: use ~mask.to_dense()")

    def to_dense(self, seqlen_q: int | None = None) -> Tensor:
        """bool ({B|1}, {H|Hkv|1}, Sq, Sk), True = visible. Sq is by default `rows`, or Sk where `rows` is None.

        A mask of variable length has no dense form; use `sequence` for each of its sequences.

        Raises:
            ValueError: a mask of variable length, a negative seqlen_q, one other than `rows`.
            TypeError: a seqlen_q that is not an int.
        """
        rows = torch.arange(self._rows(seqlen_q), dtype=torch.int32, device=self.device)[:, None]
        return (self.start[:, :, None] <= rows) & (rows < self.end[:, :, None])

    def density(self, seqlen_q: int | None = None) -> Tensor:
        """float32 scalar tensor: the visible share of all scores, at most 1; rows as in `to_dense`. Does not wait for
        the device."""
        rows = self._rows(seqlen_q)
        visible = (self.end.clamp(0, rows) - self.start.clamp(0, rows)).clamp_(min=0)
        return visible.sum().to(torch.float32) / max(rows * visible.numel(), 1)

    def sequence(self, first: int, last: int) -> KeyIntervalMask:
        """The keys first .. last - 1 of a mask of variable length, one sequence, as a mask (1, {H|Hkv|1}, Sk).

        Raises:
            ValueError: a mask of fixed length; keys that are not in order or not of the mask.
            TypeError: a key that is not an int or an integer tensor (), as an element of cu_seqlens.
        """
        if not self.is_varlen:
            raise ValueError(f"only a mask {VARLEN} has sequences, got {tuple(self.shape)}")
        first, last = require_key("first", first), require_key("last", last)
        if not 0 <= first <= last <= self.shape[0]:
            raise ValueError(f"first and last must be in order, from 0 to {self.shape[0]} keys, got {first} and {last}")
        return self._of_same_kind(self.intervals[:, first:last].transpose(1, 2)[:, None])

    def copy(self) -> KeyIntervalMask:
        """The same mask in memory of its own."""
        return self._of_same_kind(self.intervals.clone())

    def _of_same_kind(self, intervals: Tensor) -> KeyIntervalMask:
        """A mask of other intervals with the same keys_per_row, unstructured and rows."""
        return self._of(intervals, self.keys_per_row, self.unstructured, self.rows)

    def _rows(self, seqlen_q: int | None) -> int:
        if self.is_varlen:
            raise ValueError(f"a mask {VARLEN} does not hold its sequences' rows; take sequence(first, last) of it")
        if seqlen_q is None:
            return self.keys if self.rows is None else self.rows
        seqlen_q = require_length("seqlen_q", seqlen_q)
        self._require_rows("the mask", seqlen_q)
        return seqlen_q

    # Constructors

    @classmethod
    def causal(cls, seqlen_q: int, seqlen_k: int, device: torch.device | str | None = None) -> KeyIntervalMask:
        """Row i sees the keys j <= i + (Sk - Sq): aligned to the bottom right corner. (1, 1, Sk).

        Raises:
            TypeError, ValueError: a length that is not an int, is negative or is above 2^30.
        """
        start = own_rows(seqlen_q, seqlen_k, device).clamp_(min=0)
        return cls(start, torch.full_like(start, NEVER), rows=seqlen_q)

    @classmethod
    def sliding_window(
        cls,
        seqlen_q: int,
        seqlen_k: int,
        window_size: int | tuple[int | None, int | None],
        device: torch.device | str | None = None,
    ) -> KeyIntervalMask:
        """Row i sees the keys around key i + (Sk - Sq). (1, 1, Sk).

        Args:
            seqlen_q, seqlen_k: Sq and Sk.
            window_size: the number of keys that a row sees, up to key i + (Sk - Sq); or (left, right): the number of
                keys before and after that key, None for no limit.
            device: the device of the mask.

        Raises:
            TypeError, ValueError: a length that is not an int, is negative or is above 2^30; a window_size that is
                neither an int nor two, or negative.
        """
        left, right = window_sides(window_size)
        if isinstance(device, int):  # PyTorch takes it as the number of a GPU
            raise TypeError(
                f"device must be a torch.device or a str, got {device}: pass both sides of a window as a tuple"
            )
        start, end = window_around(own_rows(seqlen_q, seqlen_k, device), left, right)
        return cls(start, end, keys_per_row=keys_of_window(left, right, seqlen_k), rows=seqlen_q)

    @classmethod
    def sliding_window_varlen(
        cls,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        total_k: int,
        window_size: int | tuple[int | None, int | None],
    ) -> KeyIntervalMask:
        """`sliding_window` for packed sequences: row i of a sequence sees the keys around its key i + (Sk - Sq).

        Args:
            cu_seqlens_q: int32 (B + 1): sequence b has the rows cu_seqlens_q[b] to cu_seqlens_q[b + 1] - 1.
            cu_seqlens_k: int32 (B + 1), the same for keys.
            total_k: the number of all keys.
            window_size: as in `sliding_window`.

        Returns:
            (total_k, 1). No row sees the keys after the last sequence.

        Raises:
            TypeError, ValueError: an invalid argument; the values of cu_seqlens are checked on the CPU only.
        """
        left, right = window_sides(window_size)
        total_k = require_position("total_k", total_k)
        check_same_sequences(cu_seqlens_q, cu_seqlens_k)
        check_cu_seqlens("cu_seqlens_k", cu_seqlens_k, total=(total_k, "the given total_k"), or_less=True)
        check_cu_seqlens("cu_seqlens_q", cu_seqlens_q, cu_seqlens_k, "cu_seqlens_k")
        sequence = sequence_of_keys(cu_seqlens_k, total_k)
        more_keys = torch.nn.functional.pad((cu_seqlens_k - cu_seqlens_q).diff(), (0, 1))
        position = torch.arange(total_k, dtype=torch.int32, device=cu_seqlens_k.device) - cu_seqlens_k[sequence]
        start, end = window_around(position - more_keys[sequence], left, right)
        end = torch.where(sequence < len(cu_seqlens_k) - 1, end, 0)
        return cls(start[:, None], end[:, None], keys_per_row=keys_of_window(left, right, total_k))

    @classmethod
    def prefix_lm(
        cls, prefix_lens: Tensor | int, seqlen_q: int, seqlen_k: int, device: torch.device | str | None = None
    ) -> KeyIntervalMask:
        """Every row sees the first keys, the prefix; the keys after it are causal, as in `causal`.

        Args:
            prefix_lens: integers (B): the number of keys in the prefix of each batch element, from 0 to Sk, which is
                checked on the CPU; or an int for all of them.
            seqlen_q, seqlen_k: Sq and Sk.
            device: the device of the mask, by default that of prefix_lens.

        Returns:
            (B, 1, Sk); (1, 1, Sk) for an int.

        Raises:
            TypeError, ValueError: prefix_lens that are neither integers (B) nor an int, or are out of range; a length
                that is not an int, is negative or is above 2^30.
        """
        if not isinstance(prefix_lens, Tensor):
            prefix_lens = torch.full((1,), require_count_or_tensor("prefix_lens", prefix_lens), device=device)
        require_integers("prefix_lens", prefix_lens)
        if prefix_lens.ndim != 1:
            raise ValueError(f"prefix_lens must be (B), got shape {shape_of(prefix_lens)}")
        prefix_lens = prefix_lens if device is None else prefix_lens.to(device=device)
        causal = cls.causal(seqlen_q, seqlen_k, prefix_lens.device)
        is_prefix = first_keys(prefix_lens, seqlen_k, "prefix_lens must be")
        start = causal.start.masked_fill(is_prefix[:, None], 0)
        return cls(start, causal.end.expand_as(start), rows=seqlen_q)

    @classmethod
    def documents(
        cls, cu_seqlens: Tensor | None = None, seqlen: int | None = None, *, ids: Tensor | None = None
    ) -> KeyIntervalMask:
        """Every row sees the keys of its document; Sq = Sk. Takes `cu_seqlens` and `seqlen`, or `ids`.

        For fewer rows than keys, aligned with the last ones: KeyIntervalMask(mask.start - n, mask.end - n) with
        n = Sk - Sq.

        Args:
            cu_seqlens: int32 (documents + 1), non-decreasing from 0: document d has the keys cu_seqlens[d] to
                cu_seqlens[d + 1] - 1. No row sees the keys after the last document.
            seqlen: the number of keys.
            ids: integers (S) or (B, S), one for each token: each run of equal ids is a document.

        Returns:
            (1, 1, seqlen), or ({B|1}, 1, S).

        Raises:
            TypeError, ValueError: an invalid argument; the values of cu_seqlens are checked on the CPU only.
        """
        if (cu_seqlens is None) == (ids is None) or (cu_seqlens is None) != (seqlen is None):
            arguments = {"cu_seqlens": cu_seqlens, "seqlen": seqlen, "ids": ids}
            given = [name for name, argument in arguments.items() if argument is not None]
            alone = " alone" if len(given) == 1 else ""
            got = " and ".join(given) or "none of them"
            raise ValueError(f"documents takes cu_seqlens and seqlen, or ids by name, got {got}{alone}")
        if ids is None:
            seqlen = require_length("seqlen", seqlen)
            check_cu_seqlens("cu_seqlens", cu_seqlens, total=(seqlen, "the given seqlen"), or_less=True)
            sequence = sequence_of_keys(cu_seqlens, seqlen)
            end = torch.cat([cu_seqlens[1:], cu_seqlens[-1:]])
            return cls(cu_seqlens[sequence][None, None], end[sequence][None, None], rows=seqlen)

        require_integers("ids", ids)
        if ids.ndim not in (1, 2):
            raise ValueError(f"ids must be (S) or (B, S), got shape {shape_of(ids)}")
        ids = ids if ids.ndim == 2 else ids[None]
        batch, seqlen = ids.shape
        position = torch.arange(seqlen, dtype=torch.int32, device=ids.device)
        changes = ids[:, 1:] != ids[:, :-1]
        edge = changes.new_ones(batch, min(seqlen, 1))
        start = torch.where(torch.cat([edge, changes], dim=1), position, 0).cummax(dim=1).values
        end = torch.where(torch.cat([changes, edge], dim=1), position + 1, seqlen).flip(1).cummin(dim=1).values.flip(1)
        return cls(start[:, None], end[:, None], rows=seqlen)

    @classmethod
    def padding(cls, real: Tensor, seqlen_k: int | None = None) -> KeyIntervalMask:
        """Every row sees the keys that are not padding. (B, 1, Sk).

        Args:
            real: bool or integers (B, Sk), nonzero = a real key; or integers (B): the number of real keys, which come
                first. On the CPU the lengths are checked: 0 to Sk.
            seqlen_k: Sk, with lengths (B).

        Raises:
            TypeError: real that is neither bool nor integers, a seqlen_k that is not an int.
            ValueError: a shape that is neither, lengths without seqlen_k; on the CPU lengths out of range.
        """
        require_integers("real", real, or_bool=True)
        if seqlen_k is not None:
            seqlen_k = require_length("seqlen_k", seqlen_k)
        if real.ndim == 1 and real.dtype != torch.bool and seqlen_k is not None:
            real = first_keys(real, seqlen_k, "real must be lengths")
        if real.ndim != 2 or not is_one_of(seqlen_k, None, real.shape[1]):
            raise ValueError(
                "real must be a mask (B, Sk), or lengths (B) with seqlen_k, "
                f"got {names([real.dtype])} of shape {shape_of(real)} and seqlen_k {seqlen_k}"
            )
        end = torch.where(real[:, None] != 0, NEVER, 0).int()
        return cls(torch.zeros_like(end), end)

    @classmethod
    def topk(cls, bias: Tensor, window_size: int, seqlen_q: int | None = None) -> KeyIntervalMask:
        """The causal top-k mask of a bias: row i sees the w keys of largest bias among the keys j <= i + (Sk - Sq).

        If biases are equal, the later key is selected, so a constant bias makes a sliding window. A key whose bias is
        -inf or `finfo.min` is never visible. The w-th largest bias never decreases from row to row, so an
        evicted key never returns, and an interval per key is exact. O(N log N) operations and O(N) memory, for all
        batch elements and heads at once.

        Args:
            bias: floating, one number per key: ({B|1}, {H|Hkv|1}, 1, Sk) or ({B|1}, {H|Hkv|1}, Sk).
            window_size: w, at least 0. A row with fewer keys sees all of them.
            seqlen_q: Sq, by default Sk. Rows are aligned to the bottom right corner, so 1 is a decoding step.

        Returns:
            ({B|1}, {H|Hkv|1}, Sk). It carries no gradient.

        Raises:
            TypeError, ValueError: an invalid argument.
            ValueError: a NaN in the bias, on the CPU. On CUDA and under torch.compile a NaN fails an assertion on the
                device, which a later call reports.
        """
        return cls._topk("bias", bias, window_size, seqlen_q)

    @classmethod
    def _topk(cls, name: str, bias: Tensor, window_size: int, seqlen_q: int | None = None) -> KeyIntervalMask:
        """`topk`, whose errors call the bias by the name that it has in the user's call."""
        layout = "({B|1}, {H|Hkv|1}, 1, Sk) or " + FIXED
        window_size = check_topk(name, layout, bias, window_size, ndims=(3, 4), of_keys="[None, None]")
        keys = bias.shape[-1]
        rows = keys if seqlen_q is None else require_position("seqlen_q", seqlen_q)
        intervals = operator_for(bias)(bias, min(window_size, keys), rows, None, None, None, name)
        return cls._of(intervals, window_size, unstructured=True, rows=rows)

    @classmethod
    def topk_varlen(
        cls,
        bias: Tensor,
        window_size: int,
        cu_seqlens_k: Tensor,
        *,
        cu_seqlens_q: Tensor | None = None,
        max_seqlen_k: int | Tensor | None = None,
    ) -> KeyIntervalMask:
        """`topk` for packed sequences of different lengths: each sequence has its own w keys per row.

        Args:
            bias: floating (total_k, {H|Hkv|1}).
            window_size: w, at least 0.
            cu_seqlens_k: int32 (B + 1): sequence b has the keys cu_seqlens_k[b] to cu_seqlens_k[b + 1] - 1.
            cu_seqlens_q: int32 (B + 1), the same for rows; by default cu_seqlens_k.
            max_seqlen_k: at least the longest sequence of keys, optional: selecting from short sequences is then
                faster. Checked on the CPU only.

        Returns:
            (total_k, {H|Hkv|1}). It carries no gradient.

        Raises:
            As `topk`.
        """
        return cls._topk_varlen("bias", bias, window_size, cu_seqlens_k, cu_seqlens_q, max_seqlen_k)

    @classmethod
    def _topk_varlen(
        cls,
        name: str,
        bias: Tensor,
        window_size: int,
        cu_seqlens_k: Tensor,
        cu_seqlens_q: Tensor | None,
        max_seqlen_k: int | Tensor | None,
    ) -> KeyIntervalMask:
        """`topk_varlen`, with names as in `_topk`."""
        window_size = check_topk(name, VARLEN, bias, window_size, ndims=(2,), of_keys="[:, None]")
        longest = None
        if max_seqlen_k is not None:
            max_seqlen_k = require_max_seqlen("max_seqlen_k", max_seqlen_k)
            longest = ("max_seqlen_k", max_seqlen_k)
        total = (bias.shape[0], f"the keys of {name}")
        require_tensor("cu_seqlens_k", cu_seqlens_k)
        cu_seqlens_q = cu_seqlens_k if cu_seqlens_q is None else cu_seqlens_q
        check_same_sequences(cu_seqlens_q, cu_seqlens_k)
        check_cu_seqlens("cu_seqlens_k", cu_seqlens_k, bias, name, total, longest)
        check_cu_seqlens("cu_seqlens_q", cu_seqlens_q, bias, name)
        window = min(window_size, bias.shape[0])
        intervals = operator_for(bias)(bias, window, 0, cu_seqlens_q, cu_seqlens_k, max_seqlen_k, name)
        return cls._of(intervals, window_size, unstructured=True)


def require_key(name: str, key: object) -> int:
    """The position of a key, also an element of cu_seqlens, which is read."""
    if not isinstance(key, Tensor):
        return require_int(name, key)
    if key.ndim > 0 or not has_integers(key):
        got = f"{names([key.dtype])} of shape {shape_of(key)}"
        raise TypeError(f"{name} must be an int or an integer tensor (), got {got}")
    return int(key)


def first_keys(lengths: Tensor, seqlen_k: int, must_be: str) -> Tensor:
    """bool (B, Sk): the first keys of each batch element, as many as `lengths`, integers (B), say. `must_be`: the start
    of the error for lengths out of range, which are found on the CPU only."""
    lengths = lengths.long()  # unsigned integers have no comparison
    if is_host_readable(lengths):
        wrong = lengths[(lengths < 0) | (lengths > seqlen_k)].tolist()
        if wrong:
            raise ValueError(f"{must_be} from 0 to seqlen_k {seqlen_k}, got {wrong[0]}")
    return torch.arange(seqlen_k, device=lengths.device) < lengths[:, None]


def window_sides(window_size: int | tuple[int | None, int | None]) -> tuple[int, int]:
    """(left, right), at most what int32 can add to the number of a row. left is -1 for a window of no keys."""
    accepted = "an int or a tuple (left, right)"
    if not isinstance(window_size, tuple):
        return min(require_count("window_size", window_size, accepted), NEVER) - 1, 0
    if len(window_size) != 2:
        raise ValueError(f"window_size must be {accepted}, got {window_size}")
    left, right = (
        NEVER if side is None else require_count(f"window_size[{i}]", side, hint=": pass None for no limit")
        for i, side in enumerate(window_size)
    )
    return min(left, NEVER - 1), min(right, NEVER)


def keys_of_window(left: int, right: int, keys: int) -> int:
    """The keys_per_row of `window_sides`: `keys` where a side has no limit. A limited width is not compared with
    `keys`, which may be symbolic."""
    width = left + right + 1
    return keys if width >= NEVER else width


def window_around(own_rows: Tensor, left: int, right: int) -> tuple[Tensor, Tensor]:
    """start and end of keys that the rows from `right` before to `left` after their own see."""
    return (own_rows - right).clamp_(min=0), (own_rows + (left + 1)).clamp_(min=0)


register(KeyIntervalMask, ("intervals",), ("keys_per_row", "unstructured", "rows"))


def collate(masks: list[KeyIntervalMask], *, collate_fn_map: object = None) -> KeyIntervalMask:
    """One mask of the batch elements of all, or of variable length of all sequences, for
    torch.utils.data.default_collate."""

    def kind(mask: KeyIntervalMask) -> tuple:
        return mask.is_varlen, mask.shape[1:], mask.rows

    first = masks[0]
    if any(kind(mask) != kind(first) for mask in masks):
        raise ValueError(
            f"collate needs masks {FIXED} with the same heads, keys and rows, or {VARLEN} with the same heads, got "
            f"{masks}"
        )
    bounds = [mask.keys_per_row for mask in masks]
    return KeyIntervalMask._of(
        torch.cat([mask.intervals for mask in masks], dim=1),
        keys_per_row=None if None in bounds else max(bounds),
        unstructured=any(mask.unstructured for mask in masks),
        rows=first.rows,
    )


default_collate_fn_map[KeyIntervalMask] = collate
