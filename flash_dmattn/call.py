"""The arguments of one call."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from typing import NamedTuple, TypedDict

from torch import Tensor

from .masks import Mask, Problem
from .masks.choice import Sparse
from .ops.conventions import default_scale


class Options(TypedDict):
    """The keyword arguments of every backend's `attention`. The operators have the same names."""

    softmax_scale: float
    is_causal: bool
    softcap: float
    deterministic: bool


class Varlen(NamedTuple):
    """The sequences of a packed batch."""

    cu_seqlens_q: Tensor  # int32 (B + 1)
    cu_seqlens_k: Tensor  # int32 (B + 1)
    max_seqlen_q: int
    max_seqlen_k: int


@dataclass(eq=False)
class Call:
    """The arguments of `flash_dmattn_func`, or with `varlen` those of `flash_dmattn_varlen_func`.

    `checks.check_options` replaces None where it stands for another value; `attend.apply_scale_tensor` replaces a
    softmax_scale that is a tensor.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | Mask | None = None
    attn_bias: Tensor | None = None
    softmax_scale: float | Tensor | None = None
    is_causal: bool | None = False
    softcap: float | None = 0.0
    deterministic: bool | None = False
    return_attn_probs: bool | None = False
    _: KW_ONLY
    return_lse: bool = False
    window_size: int | None = None
    sparse: Sparse = "auto"
    cache_seqlens: Tensor | int | None = None  # for fixed length
    relative_bias: Tensor | None = None
    grid: tuple[int, int] | None = None
    sinks: Tensor | None = None
    scale: float | Tensor | None = None  # deprecated: softmax_scale
    # Set after construction: users pass arguments to Call (`flash_dmattn_func_auto`). dataclasses.replace drops it.
    varlen: Varlen | None = field(default=None, init=False)
    keeps_max_seqlen: bool = field(default=False, init=False)  # max_seqlen_* are not reduced to the total rows and keys

    def options(self) -> Options:
        """Needs query of at least one dimension, and a softmax_scale that is not a tensor."""
        scale = default_scale(self.query.shape[-1]) if self.softmax_scale is None else self.softmax_scale
        return {
            "softmax_scale": float(scale),
            "is_causal": bool(self.is_causal),
            "softcap": float(self.softcap),
            "deterministic": bool(self.deterministic),
        }

    def sliding_window(self) -> str:
        """How a user passes a sliding window, for errors."""
        if self.varlen is None:
            return "attn_mask=KeyIntervalMask.sliding_window(seqlen_q, seqlen_k, (left, right))"
        return "attn_mask=KeyIntervalMask.sliding_window_varlen(cu_seqlens_q, cu_seqlens_k, total_k, (left, right))"

    @property
    def batch(self) -> int:
        """The batch elements, or the sequences of variable length."""
        return self.query.shape[0] if self.varlen is None else self.varlen.cu_seqlens_q.shape[0] - 1

    def problem(self) -> Problem:
        """The lengths as given. Needs query and key of the right number of dimensions."""
        if self.varlen is None:
            return Problem(self.query.shape[1], self.key.shape[1], bool(self.is_causal))
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k = self.varlen
        return Problem(max_seqlen_q, max_seqlen_k, bool(self.is_causal), cu_seqlens_q, cu_seqlens_k)
