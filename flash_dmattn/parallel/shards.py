"""A sequence in contiguous shards, one per rank."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor


def starts_of(lengths: Sequence[int]) -> tuple[int, ...]:
    """The start of each shard, and the end of the last."""
    return (0, *accumulate(lengths))


@functools.lru_cache(maxsize=256)
def constants(values: tuple[int, ...], device: torch.device) -> Tensor:
    """int64 (n), cached: a copy to the GPU takes time and cannot be captured in a CUDA graph."""
    return torch.tensor(values, dtype=torch.int64, device=device)


@dataclass(frozen=True)
class Shards:
    """The shards of a sequence over a process group. "Local" refers to the calling rank.

    Autograd graphs hold shards, and so hold the group weakly: a group that outlives destroy_process_group leaves gloo's
    threads running until the interpreter exits, where they may abort the process.
    """

    group_ref: weakref.ref[dist.ProcessGroup]
    lengths: tuple[int, ...]  # rows and keys of each rank

    @property
    def group(self) -> dist.ProcessGroup:
        group = self.group_ref()
        if group is None:
            raise RuntimeError("the process group of this call has been destroyed: call backward before that")
        return group

    @property
    def rank(self) -> int:
        return self.group.rank()

    @property
    def size(self) -> int:
        return len(self.lengths)

    @functools.cached_property
    def starts(self) -> tuple[int, ...]:
        """The start of each shard, and the end of the sequence."""
        return starts_of(self.lengths)

    @property
    def local_start(self) -> int:
        return self.starts[self.rank]

    @property
    def local_length(self) -> int:
        return self.lengths[self.rank]

    def local_positions(self, device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
        """(S_r): positions of the local rows in the sequence."""
        return torch.arange(self.local_start, self.local_start + self.local_length, dtype=dtype, device=device)
