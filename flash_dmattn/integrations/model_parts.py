"""Which models of transformers flash_dmattn supports, and the parts of a model that can be switched to it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import NamedTuple

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

SUPPORT_FLAGS = ("_supports_sdpa", "_supports_flash_attn", "_supports_flex_attn", "_supports_attention_backend")

# All support flags of these base classes are False. tests/integrations/test_transformers_models.py shows that they
# compute what eager attention computes.
TESTED = frozenset(
    {
        "AlignPreTrainedModel",
        "ClapPreTrainedModel",
        "Inkling2PreTrainedModel",
        "LongT5PreTrainedModel",
        "MarkupLMPreTrainedModel",
        "PatchTSMixerPreTrainedModel",
        "Speech2TextPreTrainedModel",
        "SplinterPreTrainedModel",
        "SwitchTransformersPreTrainedModel",
        "TimeSeriesTransformerPreTrainedModel",
    }
)

# The support flags of these base classes do not say what makes them unsupported.
UNSUPPORTED_MODELS = {
    "DeepseekV4PreTrainedModel": "whose layers append compressed keys and extend the additive mask of eager attention",
}


def reason_to_refuse(model_class: type[PreTrainedModel]) -> str | None:
    """Why flash_dmattn may compute the wrong attention for a model class; None if it is supported."""
    bases = {base.__name__ for base in model_class.__mro__}
    for name in bases & UNSUPPORTED_MODELS.keys():
        return UNSUPPORTED_MODELS[name]
    if not model_class._can_set_attn_implementation():
        return "which has its own attention code"
    has_flag = any(getattr(model_class, flag, False) for flag in SUPPORT_FLAGS)
    if has_flag or bases & TESTED or not computes_attention_by_interface(model_class):
        return None
    return "which supports eager attention only: all its _supports_* flags are False"


def computes_attention_by_interface(model_class: type[PreTrainedModel]) -> bool:
    """Whether the file of the class, or of a base class, uses transformers' attention interface."""
    bases = (base for base in model_class.__mro__ if issubclass(base, PreTrainedModel) and base is not PreTrainedModel)
    return any(hasattr(sys.modules.get(base.__module__), "ALL_ATTENTION_FUNCTIONS") for base in bases)


class Part(NamedTuple):
    """A PreTrainedModel within a model."""

    name: str  # "" for the model itself
    model: PreTrainedModel
    reason: str | None  # reason_to_refuse

    def __str__(self) -> str:
        return type(self.model).__name__ + (f" ({self.name})" if self.name else "")

    def has_attention(self) -> bool:
        """Whether the part has attention layers other than those of the parts within it."""
        return any("Attention" in type(module).__name__ for module in modules_outside_parts(self.model))


def modules_outside_parts(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if not isinstance(child, PreTrainedModel):
            yield child
            yield from modules_outside_parts(child)


def split_parts(model: nn.Module) -> tuple[list[Part], list[Part]]:
    """(the parts that can be switched, the parts with attention that cannot).

    A part that shares its config with one that cannot be switched cannot be switched either. If no part can be
    switched, the second list is the outermost part that is refused.
    """
    models = [(name, part) for name, part in model.named_modules() if isinstance(part, PreTrainedModel)]
    parts = [Part(name, part, reason_to_refuse(type(part))) for name, part in models]
    refused = [part for part in parts if part.reason and part.has_attention()]
    configs = {id(part.model.config) for part in refused}
    switchable = [part for part in parts if not part.reason and id(part.model.config) not in configs]
    return switchable, refused if switchable else [part for part in parts if part.reason][:1]


def configs_within(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    """The config and its sub-configs: parts that are not a PreTrainedModel read theirs, too."""
    yield config
    for name in config.sub_configs:
        if (sub_config := getattr(config, name, None)) is not None:
            yield from configs_within(sub_config)


def switch(parts: list[Part], refused: list[Part], implementation: str) -> None:
    """Sets the attention implementation of the parts' configs and sub-configs, except those of refused parts."""
    unchanged = {id(part.model.config) for part in refused}
    for part in parts:
        part.model._check_and_adjust_attn_implementation(implementation)
    for part in parts:
        for config in configs_within(part.model.config):
            if id(config) not in unchanged:
                config._attn_implementation_internal = implementation
