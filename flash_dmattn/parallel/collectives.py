"""Collectives on torch.distributed. All communication passes through this file, which counts its bytes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

# PyTorch 2.13 renamed it.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass
class Traffic:
    """What this rank exchanged with other ranks inside a `count_traffic` context.

    Attributes:
        sent: bytes sent.
        received: bytes received.
        collectives: the number of collectives.
    """

    sent: int = 0
    received: int = 0
    collectives: int = 0


_counters: list[Traffic] = []  # process-wide, because the backward runs in other threads


@contextlib.contextmanager
def count_traffic() -> Iterator[Traffic]:
    """Counts the bytes that `flash_dmattn.parallel` sends and receives on this rank inside the context.

    Excludes the exchange between the hosts in which the ranks compare their arguments: a few hundred bytes per rank,
    not on the device. An all-gather counts each shard as sent once to every other rank.
    """
    traffic = Traffic()
    _counters.append(traffic)
    try:
        yield traffic
    finally:
        _counters.remove(traffic)


def _count(sent: int, received: int) -> None:
    for traffic in _counters:
        traffic.sent += sent
        traffic.received += received
        traffic.collectives += 1


class PendingCollective:
    """A collective in flight. On CUDA `wait` blocks the current stream, not the host."""

    def __init__(self, received: Tensor, sent: Tensor, work):
        self._received, self._sent, self._work = received, sent, work  # keeps `sent` alive until `wait`

    def wait(self) -> Tensor:
        if self._work is not None:
            self._work.wait()
            self._work = self._sent = None
        return self._received


def start_all_gather(shard: Tensor, group: dist.ProcessGroup) -> PendingCollective:
    """`wait` returns (R, *shard.shape): the shards of all ranks, which must have the same shape."""
    shard = shard.contiguous()
    size = group.size()
    gathered = shard.new_empty(size, *shard.shape)
    _count(sent=(size - 1) * shard.nbytes, received=(size - 1) * shard.nbytes)
    work = _all_gather(gathered.view(-1), shard.view(-1), group=group, async_op=True)
    return PendingCollective(gathered, shard, work)


def all_gather(shard: Tensor, group: dist.ProcessGroup) -> Tensor:
    """(R, *shard.shape)"""
    return start_all_gather(shard, group).wait()


def all_gather_on_host(words: Tensor, group: dist.ProcessGroup) -> Tensor:
    """(R, n) of int64 (n) on the CPU. Not counted as traffic."""
    gathered = words.new_empty(group.size() * words.numel())
    _all_gather(gathered, words, group=group)
    return gathered.view(group.size(), -1)


def pad_to(shard: Tensor, length: int, dim: int) -> Tensor:
    """The shard with zeros appended along `dim` up to `length`."""
    missing = length - shard.shape[dim]
    if not missing:
        return shard
    return torch.cat([shard, shard.new_zeros(*shard.shape[:dim], missing, *shard.shape[dim + 1 :])], dim)


def concat_shards(gathered: Tensor, lengths: Sequence[int], dim: int) -> Tensor:
    """Concatenates padded shards (R, .., max(lengths), ..) along the shard's dimension `dim`, without the padding."""
    longest = gathered.shape[dim + 1]
    if all(length == longest for length in lengths):
        return gathered.movedim(0, dim).flatten(dim, dim + 1)  # a view if all dimensions before `dim` have size 1
    return torch.cat([shard.narrow(dim, 0, length) for shard, length in zip(gathered, lengths)], dim)


def start_all_to_all(
    rows: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int], group: dist.ProcessGroup
) -> PendingCollective:
    """Sends send_counts[q] of `rows` to rank q, in order. `wait` returns (sum of recv_counts, ..), in rank order."""
    rows = rows.contiguous()
    received = rows.new_empty(sum(recv_counts), *rows.shape[1:])
    row_bytes = rows[:1].nbytes if rows.shape[0] else received[:1].nbytes
    rank = group.rank()
    _count(
        sent=(sum(send_counts) - send_counts[rank]) * row_bytes,
        received=(sum(recv_counts) - recv_counts[rank]) * row_bytes,
    )
    work = dist.all_to_all_single(received, rows, list(recv_counts), list(send_counts), group=group, async_op=True)
    return PendingCollective(received, rows, work)


def all_to_all(
    rows: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int], group: dist.ProcessGroup
) -> Tensor:
    return start_all_to_all(rows, send_counts, recv_counts, group).wait()
