"""A sequence in contiguous shards."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor


def starts_of(lengths: Sequence[int]) -> tuple[int, ...]:
    """Where each shard starts, and at last where the last one ends."""
    return (0, *accumulate(lengths))


@functools.lru_cache(maxsize=256)
def constants(values: tuple[int, ...], device: torch.device) -> Tensor:
    """int64 (n), made once: copying to a GPU takes time, and is not allowed while a CUDA graph is captured."""
    return torch.tensor(values, dtype=torch.int64, device=device)


@dataclass(frozen=True)
class Shards:
    """A sequence in contiguous shards."""

    group: dist.ProcessGroup
    lengths: tuple[int, ...]  # rows and keys of each rank

    @property
    def rank(self) -> int:
        return self.group.rank()

    @property
    def size(self) -> int:
        return len(self.lengths)

    @functools.cached_property
    def starts(self) -> tuple[int, ...]:
        """Where each shard starts, and at last where the sequence ends."""
        return starts_of(self.lengths)

    @property
    def first(self) -> int:
        """The sequence's row that is this rank's first."""
        return self.starts[self.rank]

    @property
    def own(self) -> int:
        return self.lengths[self.rank]
