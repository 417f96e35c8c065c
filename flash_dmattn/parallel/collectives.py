"""What goes from rank to rank on torch.distributed, and how much of it: every byte passes through this file."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

# PyTorch 2.13 has a new name for it.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass
class Traffic:
    """What this rank sent to others and received from them, in bytes, and in how many collectives."""

    sent: int = 0
    received: int = 0
    collectives: int = 0


_counting: list[Traffic] = []  # of the whole process: the backward runs in threads of its own


@contextlib.contextmanager
def count_traffic() -> Iterator[Traffic]:
    """Counts what this rank sends and receives for tensors in calls of `flash_dmattn.parallel` made inside.

    The small exchange between the hosts, by which the ranks compare their calls, is left out: it is a few hundred bytes
    a rank and not on the device. An all-gather counts as if each shard were sent once to every other rank.
    """
    traffic = Traffic()
    _counting.append(traffic)
    try:
        yield traffic
    finally:
        _counting.remove(traffic)


def _count(sent: int, received: int) -> None:
    for traffic in _counting:
        traffic.sent += sent
        traffic.received += received
        traffic.collectives += 1


class Pending:
    """A collective under way; `wait` gives what it brings. On CUDA the host does not wait, the current stream does."""

    def __init__(self, received: Tensor, sent: Tensor, work):
        self._received, self._sent, self._work = received, sent, work  # what is sent must live until then

    def wait(self) -> Tensor:
        if self._work is not None:
            self._work.wait()
            self._work = self._sent = None
        return self._received


def start_all_gather(shard: Tensor, group: dist.ProcessGroup) -> Pending:
    """`wait` gives (R, *shard.shape): the shards of all ranks, which have the same shape."""
    shard = shard.contiguous()
    size = group.size()
    gathered = shard.new_empty(size, *shard.shape)
    _count(sent=(size - 1) * shard.nbytes, received=(size - 1) * shard.nbytes)
    work = _all_gather(gathered.view(-1), shard.view(-1), group=group, async_op=True)
    return Pending(gathered, shard, work)


def all_gather(shard: Tensor, group: dist.ProcessGroup) -> Tensor:
    """(R, *shard.shape)"""
    return start_all_gather(shard, group).wait()


def gather_on_host(words: Tensor, group: dist.ProcessGroup) -> Tensor:
    """(R, n): what the hosts have to say, int64 (n) on the CPU each. It is not counted."""
    gathered = words.new_empty(group.size() * words.numel())
    _all_gather(gathered, words, group=group)
    return gathered.view(group.size(), -1)


def gather_along(shard: Tensor, lengths: Sequence[int], dim: int, group: dist.ProcessGroup) -> Tensor:
    """The shards of all ranks one after the other along dimension `dim`, where rank q has lengths[q]."""
    return joined(all_gather(padded(shard, max(lengths), dim), group), lengths, dim)


def padded(shard: Tensor, length: int, dim: int) -> Tensor:
    """With zeros behind, to a length in dimension `dim` that all ranks have."""
    missing = length - shard.shape[dim]
    if not missing:
        return shard
    return torch.cat([shard, shard.new_zeros(*shard.shape[:dim], missing, *shard.shape[dim + 1 :])], dim)


def joined(gathered: Tensor, lengths: Sequence[int], dim: int) -> Tensor:
    """Shards (R, .., the longest of lengths, ..), one after the other along the shard's dimension `dim`."""
    longest = gathered.shape[dim + 1]
    if all(length == longest for length in lengths):
        return gathered.movedim(0, dim).flatten(dim, dim + 1)  # a view where all dimensions before `dim` are of size 1
    return torch.cat([shard.narrow(dim, 0, length) for shard, length in zip(gathered, lengths)], dim)


def start_all_to_all(
    rows: Tensor, to_send: Sequence[int], to_receive: Sequence[int], group: dist.ProcessGroup
) -> Pending:
    """`wait` gives (sum of to_receive, ..): rank q sent to_receive[q] rows, and gets to_send[q] of `rows`, in order."""
    rows = rows.contiguous()
    received = rows.new_empty(sum(to_receive), *rows.shape[1:])
    width = rows[:1].nbytes if rows.shape[0] else received[:1].nbytes
    own = group.rank()
    _count(
        sent=(sum(to_send) - to_send[own]) * width,
        received=(sum(to_receive) - to_receive[own]) * width,
    )
    work = dist.all_to_all_single(received, rows, list(to_receive), list(to_send), group=group, async_op=True)
    return Pending(received, rows, work)


def all_to_all(rows: Tensor, to_send: Sequence[int], to_receive: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    return start_all_to_all(rows, to_send, to_receive, group).wait()
