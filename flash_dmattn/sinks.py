"""Attention sinks: a logit of each head in the denominator of the softmax, of no key.

With Z = exp(lse) every probability is multiplied by Z / (Z + exp(sink)) = sigmoid(lse - sink), and so is the output.
lse stays that of the keys.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from .arguments import require_device, require_float32_or, shape_of
from .broadcast import is_one_of


def check_sinks(sinks: object, query: Tensor) -> None:
    require_float32_or(query.dtype, "sinks", sinks)
    heads = query.shape[-2]
    if sinks.ndim != 1 or not is_one_of(sinks.shape[0], heads, 1):
        raise ValueError(f"sinks must be ({{H|1}}) for H = {heads} heads, got shape {shape_of(sinks)}")
    require_device("sinks", sinks, query.device, "query")


def scale_of(lse: Tensor, sinks: Tensor) -> Tensor:
    """sigmoid(lse - sink), in the shape and dtype of lse.

    sinks: ({H|1}), or of the dimensions of lse, such as one for each row.
    """
    sinks = (sinks[:, None] if sinks.ndim == 1 else sinks).to(lse.dtype)
    is_empty, is_none = lse == -torch.inf, sinks == -torch.inf  # -inf - -inf is NaN
    # The derivative of sigmoid is 0 where it rounds to 1: a small share of a sink would get no gradient.
    scale = logsigmoid((lse - sinks).masked_fill(is_empty | is_none, 0)).exp()
    return scale.masked_fill(is_empty, 0).masked_fill(is_none, 1)


def apply_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """out (.., S, H, D) with sinks, from out without them and lse (.., H, S). Rounded once, to out's dtype."""
    scale = scale_of(lse, sinks).transpose(-2, -1)[..., None]
    return (out.to(scale.dtype) * scale).to(out.dtype)
