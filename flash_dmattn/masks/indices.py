"""The keys that an indexer selects, as `KeyLists.from_indices` takes them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..broadcast import expand_shared
from ..ops.list_sizes import has_row_bits
from ..ops.schema import MaskTensors
from .base import Mask
from .containers import Container, register
from .interval import KeyIntervalMask


@dataclass(frozen=True, eq=False)
class KeyIndices(Container, Mask):
    """Which keys each query row, or each tile of query rows, sees. The kernels read it as lists only."""

    indices: Tensor  # int32 ({B|B/n|1}, {H|Hkv|1}, rows, k) or (total_q, {H|Hkv|1}, k), -1 for none
    tile_rows: int
    interval_mask: KeyIntervalMask | None  # masks indexed keys
    seqlen_k: int

    @property
    def list_intervals(self) -> Tensor | None:
        # Row bits include the intervals already.
        return None if self.interval_mask is None or has_row_bits(self.tile_rows) else self.interval_mask.intervals

    def __getitem__(self, index: slice) -> KeyIndices:
        """The indices and intervals of some batch elements. A part that is shared by all batch elements stays whole."""
        held = {"indices": self.indices, "interval_mask": self.interval_mask}
        batches = max(part.shape[0] for part in held.values() if part is not None)
        parts = {name: part[index] for name, part in held.items() if part is not None and part.shape[0] == batches}
        return replace(self, **parts)

    def operands(self) -> MaskTensors:
        return MaskTensors() if self.interval_mask is None else self.interval_mask.operands()

    def check(self, check_tensors, call) -> None:
        if self.interval_mask is None:
            super().check(check_tensors, call)
        else:
            self.interval_mask.check(check_tensors, call)

    def as_bool(self, seqlen_q: int) -> Tensor:
        dense = dense_indices(self.indices, self.seqlen_k)
        dense = dense.repeat_interleave(min(self.tile_rows, seqlen_q), dim=2)[:, :, :seqlen_q]
        if self.interval_mask is None:
            return dense
        other = self.interval_mask.to_dense(seqlen_q)
        heads = max(dense.shape[1], other.shape[1])
        return expand_shared(dense, len(dense), heads) & expand_shared(other, len(other), heads)

    def sequence_as_bool(self, number: int, rows: slice, keys: slice) -> Tensor:
        count = rows.stop - rows.start
        if self.indices.ndim == 3:
            own = self.indices[rows].transpose(0, 1)[None]
        else:
            of_sequence = self.indices[number if self.indices.shape[0] > 1 else 0]
            own = of_sequence[None, :, : -(-count // self.tile_rows)]
        interval_mask = self.interval_mask and self.interval_mask.sequence(keys.start, keys.stop)
        return KeyIndices(own, self.tile_rows, interval_mask, keys.stop - keys.start).as_bool(count)


register(KeyIndices, ("indices", "interval_mask"), ("tile_rows", "seqlen_k"))


def dense_indices(indices: Tensor, keys: int) -> Tensor:
    """bool (.., keys): whether a key is among the indices."""
    valid = (indices >= 0) & (indices < keys)
    dense = torch.zeros(*indices.shape[:-1], keys + 1, dtype=torch.bool, device=indices.device)
    return dense.scatter_(-1, torch.where(valid, indices, keys).long(), True)[..., :keys]
