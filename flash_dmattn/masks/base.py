"""The protocol of a mask: what the functions, the checks and the backends ask of every kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Optional

import torch
from torch import Tensor

from ..ops.schema import MaskTensors

if TYPE_CHECKING:
    from ..call import Call


class Problem(NamedTuple):
    """The lengths of a call. For variable length seqlen_q and seqlen_k bound every sequence."""

    seqlen_q: int
    seqlen_k: int
    is_causal: bool = False
    cu_seqlens_q: Optional[Tensor] = None
    cu_seqlens_k: Optional[Tensor] = None


class Mask:
    """A mask of fixed or variable length.

    A kind of its own defines `operands` and the dense forms `as_bool` and `sequence_as_bool`. The other members have
    defaults: no bound on the keys of a row, no further checks, no lists.
    """

    shape: torch.Size  # ({B|B/n|1}, {H|Hkv|1}, ...); of variable length (total_k or total_q, heads, ...)
    device: torch.device

    # A bound: no n consecutive rows see more than keys_per_row + n - 1 different keys. None where it is unknown.
    keys_per_row: int | None = None
    # Whether the visible keys of a row lie far apart, so that hardly any tile of keys is fully masked.
    unstructured: bool = False
    # Whether the kernels gather listed keys (KeyLists), and whether only lists can represent the mask.
    has_lists: bool = False
    needs_lists: bool = False
    # int32 (2, ...): the intervals that the kernels apply in addition to lists of this mask.
    list_intervals: Tensor | None = None

    def operands(self) -> MaskTensors:
        """The mask as the argument checks and `build_key_lists` read it: its bool tensor or its intervals."""
        raise NotImplementedError

    def packed(self, problem: Problem) -> MaskTensors:
        """The mask as the attention operators read it."""
        return self.operands()

    def as_bool(self, seqlen_q: int) -> Tensor:
        """bool ({B|B/n|1}, {H|Hkv|1}, {Sq|1}, {Sk|1}), for fixed length."""
        raise NotImplementedError

    def sequence_as_bool(self, number: int, rows: slice, keys: slice) -> Tensor:
        """One sequence of a mask of variable length: bool (1, {H|Hkv|1}, {rows|1}, keys)."""
        raise NotImplementedError

    def check(self, check_tensors: Callable[[MaskTensors], None], call: Call) -> None:
        """Raises where the mask does not fit the call. `check_tensors` checks the call with a mask's tensors."""
        check_tensors(self.operands())

    def unexpanded(self) -> Mask:
        """The same mask with size 1 in place of expanded dimensions: the kernels then read them once."""
        return self

    def without_lists(self) -> Mask:
        """The mask that lists were built from; any other mask itself."""
        return self

    def has_column_per_key(self) -> bool:
        """Whether a mask of variable length has a column for each of the max_seqlen_k keys."""
        tensor = self.operands().mask
        return tensor is not None and tensor.ndim == 3


class PackedMask(Mask):
    """A mask in the operators' form: lists that a kernel selected, or a packed mask with its lists."""

    has_lists = True

    def __init__(self, tensors: MaskTensors):
        self.tensors = tensors

    def packed(self, problem: Problem) -> MaskTensors:
        return self.tensors
