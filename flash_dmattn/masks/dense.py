"""bool masks."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import ops
from ..broadcast import scores_of_sequence
from ..ops.schema import MaskTensors
from .base import Mask, Problem


class BoolMask(Mask):
    """A bool tensor ({B|B/n|1}, {H|Hkv|1}, {Sq|1}, {Sk|1}), (total_k, heads) or (total_q, heads, max_seqlen_k)."""

    def __init__(self, tensor: Tensor):
        self.tensor = tensor

    @property
    def shape(self) -> torch.Size:
        return self.tensor.shape

    @property
    def device(self) -> torch.device:
        return self.tensor.device

    def operands(self) -> MaskTensors:
        return MaskTensors(self.tensor)

    def packed(self, problem: Problem) -> MaskTensors:
        if self.device.type == "cpu":
            return self.operands()
        seqlen_q, seqlen_k, is_causal, cu_seqlens_q, cu_seqlens_k = problem
        return MaskTensors(*ops.pack_mask(self.tensor, seqlen_q, seqlen_k, is_causal, cu_seqlens_q, cu_seqlens_k))

    def as_bool(self, seqlen_q: int) -> Tensor:
        return self.tensor

    def sequence_as_bool(self, number: int, rows: slice, keys: slice) -> Tensor:
        return scores_of_sequence(self.tensor, rows, keys)

    def unexpanded(self) -> BoolMask:
        tensor = self.tensor
        # With variable length, dimension 0 holds the rows or keys of all sequences.
        for dim in (0, 1, 2) if tensor.ndim == 4 else (1,):
            if tensor.stride(dim) == 0 and tensor.shape[dim] > 1:
                tensor = tensor.narrow(dim, 0, 1)
        return BoolMask(tensor)
