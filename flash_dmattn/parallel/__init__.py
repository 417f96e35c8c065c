"""Context parallelism: attention over a sequence that is sharded over the ranks of a torch.distributed group."""

from . import dtensor  # noqa: F401, registers sharding rules
from .attention import context_parallel_attention
from .collectives import Traffic, count_traffic
from .groups import RankError
from .layout import positions, shard, unshard

__all__ = [
    "RankError",
    "Traffic",
    "context_parallel_attention",
    "count_traffic",
    "positions",
    "shard",
    "unshard",
]
