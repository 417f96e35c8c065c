"""Attention by the formulas of docs/semantics.md, materialized, in plain PyTorch: the reference of all other backends.

Differentiable any number of times, in any dtype. In float64 it is the reference of the tests, in a tested dtype it is
the "eager" result of their tolerance.
"""

from __future__ import annotations

import torch
from einops import einsum, reduce, repeat
from torch import Tensor

from ..biases import is_masked
from ..broadcast import expand_shared
from ..relative import dense

NAME = "reference"
SPARSE_MASKS = False


def why_unavailable() -> str | None:
    return None


def for_heads(rows: Tensor, heads: int) -> Tensor:
    """Keys or values (B, Sk, Hkv, D) as (B, Sk, H, D): repeats them for the query heads of a group."""
    return repeat(rows, "b j h d -> b j (h group) d", group=heads // max(rows.shape[2], 1))


def biases_of(query: Tensor, key: Tensor, bias: Tensor | None, relative_bias: Tensor | None) -> list[Tensor]:
    """The biases of the scores, each ({B|1}, {H|1}, {Sq|1}, {Sk|1})."""
    relative = None if relative_bias is None else dense(relative_bias, query.shape[1], key.shape[1])
    return [expand_shared(x, query.shape[0], query.shape[2]) for x in (bias, relative) if x is not None]


def visible_scores(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    is_causal: bool,
    relative_bias: Tensor | None = None,
) -> Tensor:
    """bool (B, H, Sq, Sk): mask_ij and causal_ij, and no bias of the score masks it."""
    batch, seqlen_q, heads, _ = query.shape
    seqlen_k = key.shape[1]
    visible = torch.ones(batch, heads, seqlen_q, seqlen_k, dtype=torch.bool, device=query.device)
    if mask is not None:
        visible = visible & expand_shared(mask, batch, heads)
    for added in biases_of(query, key, bias, relative_bias):
        visible = visible & ~is_masked(added)
    if is_causal:
        visible = visible.tril(seqlen_k - seqlen_q)
    return visible


def probabilities(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    *,
    relative_bias: Tensor | None = None,
    **options,
) -> tuple[Tensor, Tensor]:
    """p_ij (B, H, Sq, Sk) and lse_i (B, H, Sq), in the precision of the inputs."""
    heads = query.shape[2]
    visible = visible_scores(query, key, mask, bias, options["is_causal"], relative_bias)
    scores = einsum(query, for_heads(key, heads), "b i h d, b j h d -> b h i j") * options["softmax_scale"]
    if (softcap := options["softcap"]) > 0:
        scores = softcap * torch.tanh(scores / softcap)
    for added in biases_of(query, key, bias, relative_bias):
        scores = scores + added

    # The softmax of an empty row has a NaN gradient, so its scores become 0.
    empty = ~visible.any(dim=-1)
    scores = scores.masked_fill(~visible, -torch.inf).masked_fill(empty[..., None], 0)
    if not scores.shape[-1]:
        return scores, scores.sum(dim=-1).masked_fill(empty, -torch.inf)
    # Relative to the row's largest score: lse rounds log N away for scores of -1e9.
    largest = scores.detach().amax(dim=-1)
    weights = torch.exp(scores - largest[..., None]).masked_fill(~visible, 0)
    total = weights.sum(dim=-1).masked_fill(empty, 1)
    return weights / total[..., None], (largest + torch.log(total)).masked_fill(empty, -torch.inf)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    *,
    relative_bias: Tensor | None = None,
    **options,
) -> tuple[Tensor, Tensor]:
    """out (B, Sq, H, D) in query's dtype and lse (B, H, Sq) in float32 (float64 for float64)."""
    heads, kv_heads = query.shape[2], key.shape[2]
    # Rows and keys that are not visible may hold NaN, and zero times NaN must not reach a sum.
    visible = visible_scores(query, key, mask, bias, options["is_causal"], relative_bias)
    if heads:
        sees = reduce(visible, "b h i j -> b i h 1", "any")
        seen = reduce(visible, "b (h group) i j -> b j h 1", "any", h=kv_heads)
        query, key, value = query.masked_fill(~sees, 0), key.masked_fill(~seen, 0), value.masked_fill(~seen, 0)

    probs, lse = probabilities(query, key, mask, bias, relative_bias=relative_bias, **options)
    out = einsum(probs.to(value.dtype), for_heads(value, heads), "b h i j, b j h d -> b i h d")
    return out, lse if lse.dtype == torch.float64 else lse.float()
