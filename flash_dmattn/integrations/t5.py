"""T5's attention with a table of relative biases in place of its dense bias, and that of the models that copy it."""

from __future__ import annotations

import importlib

from torch import Tensor, nn

from .. import relative
from .transformers import NAME, register
from .versions import CACHE
from .visible_keys import VisibleKeys

register()  # a process that unpickles a converted model imports this file alone

# The attention classes of transformers that get a subclass here, "Relative" + name, and their files.
FILES = {
    "T5Attention": "t5.modeling_t5",
    "MT5Attention": "mt5.modeling_mt5",
    "UMT5Attention": "umt5.modeling_umt5",
    "LongT5Attention": "longt5.modeling_longt5",
    "Pop2PianoAttention": "pop2piano.modeling_pop2piano",
    "SwitchTransformersAttention": "switch_transformers.modeling_switch_transformers",
}


def use_relative_bias(model: nn.Module) -> None:
    """Converts every attention layer of FILES in the model to its subclass in place. The weights stay the same."""
    for module in model.modules():
        kind = type(module)
        if kind.__module__ == f"transformers.models.{FILES.get(kind.__name__)}":
            module.__class__ = relative_class(kind.__name__)


def relative_class(name: str) -> type[nn.Module]:
    if (own := f"Relative{name}") not in globals():
        base = getattr(importlib.import_module(f"transformers.models.{FILES[name]}"), name)
        bases = (ComputesTable if name == "UMT5Attention" else PassesTable, base)
        globals()[own] = type(own, bases, {"__module__": __name__})
    return globals()[own]


def __getattr__(name: str) -> type[nn.Module]:
    """A subclass that this process has not made yet: a pickled model names it."""
    if name.removeprefix("Relative") in FILES:
        return relative_class(name.removeprefix("Relative"))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def table_of(layer: nn.Module) -> Tensor:
    """The layer's relative bias (1, H, 2R + 1); for a layer without one, such as cross-attention, (1, H, 1)."""
    if not layer.has_relative_attention_bias:
        return layer.q.weight.new_zeros(1, layer.n_heads, 1)
    weight = layer.relative_attention_bias.weight
    return relative.t5(weight, not layer.is_decoder, layer.relative_attention_max_distance)


class PassesTable(nn.Module):
    """For layers that take and return `position_bias`: it is a table (1, H, 2R + 1), which `attention` recognizes by
    its three dimensions."""

    def forward(
        self,
        hidden_states: Tensor,
        mask: VisibleKeys | Tensor | None = None,
        key_value_states: Tensor | None = None,
        position_bias: Tensor | None = None,
        **kwargs,
    ):
        # With a static cache only VisibleKeys knows how many keys are in use.
        cache = kwargs.get(CACHE)
        is_known = isinstance(mask, VisibleKeys) or cache is None or not cache.is_compileable
        if position_bias is None and is_known and self.config._attn_implementation == NAME:
            position_bias = table_of(self)
        return super().forward(
            hidden_states,
            mask=mask,
            key_value_states=key_value_states,
            position_bias=position_bias,
            **kwargs,
        )


class ComputesTable(nn.Module):
    """For layers that each compute a bias of their own."""

    def compute_bias(
        self, query_length: int, key_length: int, device=None, past_seen_tokens: int | Tensor = 0
    ) -> Tensor:
        is_static = isinstance(past_seen_tokens, Tensor) or query_length + past_seen_tokens != key_length
        if is_static or self.config._attn_implementation != NAME:
            return super().compute_bias(query_length, key_length, device, past_seen_tokens)
        return table_of(self)
