"""Process groups, and the exchange in which the ranks compare their arguments."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Union

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from . import collectives

Group = Union[dist.ProcessGroup, DeviceMesh, None]

MESSAGE_BYTES = 384  # maximal length of an error message that is sent to the other ranks
_host_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = weakref.WeakKeyDictionary()


class RankError(RuntimeError):
    """Another rank of the group rejected its arguments."""


def resolve_group(group: Group) -> dist.ProcessGroup:
    """The process group of a ProcessGroup, of a one-dimensional DeviceMesh, or of None: all processes."""
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError("group needs torch.distributed, which is not initialized: call init_process_group first")
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"group must be a DeviceMesh of one dimension, got {group.ndim} with the names "
                f"{group.mesh_dim_names}: pass the dimension that shards the sequence, such as mesh['context']"
            )
        group = group.get_group()
    group = dist.group.WORLD if group is None else group
    if isinstance(group, int) and group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("group must include this process, got a group of other ranks")
    if not isinstance(group, dist.ProcessGroup):
        accepted = "a torch.distributed.ProcessGroup, a DeviceMesh of one dimension or None"
        raise TypeError(f"group must be {accepted}, got {type(group).__name__}")
    return group


def host_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A group of the same ranks for CPU tensors: the group itself, or a cached gloo group."""
    if "cpu:" in dist.get_backend_config(group):
        return group
    if group not in _host_groups:
        ranks = dist.get_process_group_ranks(group)
        _host_groups[group] = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
    return _host_groups[group]


def exchange_on_host(
    group: dist.ProcessGroup, numbers: Sequence[int], error: Exception | None
) -> tuple[tuple[int, ...], ...]:
    """All-gathers the numbers of each rank, the same count on each. No GPU is synchronized.

    Raises:
        the local `error` on this rank, if it is not None.
        RankError: another rank has an error.
    """
    sent = torch.zeros(1 + len(numbers) + MESSAGE_BYTES // 8, dtype=torch.int64, device="cpu")
    if error is None:
        sent[1 : 1 + len(numbers)] = torch.tensor(numbers, device="cpu")
    else:
        text = list(f"{type(error).__name__}: {error}".encode()[:MESSAGE_BYTES])
        sent[0] = 1
        message = sent[1 + len(numbers) :].view(torch.uint8)
        message[: len(text)] = torch.tensor(text, dtype=torch.uint8, device="cpu")
    received = collectives.all_gather_on_host(sent, host_group(group))
    if error is not None:
        raise error
    failed = received[:, 0].nonzero().flatten().tolist()
    if failed:
        text = bytes(received[failed[0], 1 + len(numbers) :].contiguous().view(torch.uint8).tolist())
        text = text.rstrip(b"\0").decode(errors="replace")
        raise RankError(f"rank {failed[0]} of the group rejected its arguments: {text}")
    return tuple(map(tuple, received[:, 1 : 1 + len(numbers)].tolist()))
