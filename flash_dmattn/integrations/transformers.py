"""flash_dmattn as an attention implementation of Hugging Face transformers, 5.17 to 5.24.

    from flash_dmattn.integrations.transformers import register, use_flash_dmattn

    register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="flash_dmattn")

    model = use_flash_dmattn(model)  # an existing model; required for Doge's dynamic mask
    model.generate_batch(prompts)  # continuous batching, as attn_implementation="paged|flash_dmattn"

Requires the extra `[transformers]`.
"""

from __future__ import annotations

from . import versions as versions  # before transformers, which may be missing or of another version

# isort: split
import functools
import inspect
import sys
from typing import TypeVar

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from ..arguments import (
    check_cu_seqlens,
    check_same_sequences,
    is_host_readable,
    names,
    require_floating,
    require_integers,
    shape_of,
)
from ..biases import is_masked, key_contiguous
from ..broadcast import is_one_of, shares_batch
from ..checks import AnyMask
from ..interface import flash_dmattn_func, flash_dmattn_varlen_func
from ..masks import KeyIntervalMask
from ..masks.topk import sequence_of_keys
from ..ops.conventions import accumulation_dtype
from ..relative import shifted
from ..sinks import apply_sinks
from . import paged
from .model_parts import reason_to_refuse, split_parts, switch
from .visible_keys import VisibleKeys, visible_keys_mask

NAME = "flash_dmattn"
NAMES = (NAME, f"paged|{NAME}")
NOT_SUPPORTED = f"attn_implementation={NAME!r} is for models on transformers' attention interface"
Model = TypeVar("Model", bound=nn.Module)


def register() -> None:
    """Registers `attn_implementation="flash_dmattn"` with transformers' attention interface.

    "paged|flash_dmattn" is the same: transformers before 5.19 uses this name for continuous batching.

    Repeated calls have no effect. Models that flash_dmattn does not support raise a ValueError for these names.
    Unsupported options, such as attention dropout, raise a ValueError when attention is called.
    """
    for name in NAMES:
        AttentionInterface.register(name, attention)
        AttentionMaskInterface.register(name, visible_keys_mask)
    if not hasattr(PreTrainedModel._check_and_adjust_attn_implementation, "accepts_flash_dmattn"):
        for name, wrapper in (
            ("_check_and_adjust_attn_implementation", _accept_flash_dmattn),
            ("get_correct_attn_implementation", _refuse_unsupported_models),
        ):
            setattr(PreTrainedModel, name, wrapper(getattr(PreTrainedModel, name)))
        paged.pass_new_keys(NAMES)
        paged.require_attention_to_pages(NAMES)
        paged.accept_page_tables(NAMES)
        paged.recompute_biases()


def _accept_flash_dmattn(check):
    """Wraps transformers' check of `attn_implementation`.

    The original treats every name that contains "flash" as a FlashAttention build: it loads one from the Hub or
    replaces the name by another.
    """

    @functools.wraps(check)
    def checked(self, attn_implementation, *args, **kwargs):
        if attn_implementation in NAMES:
            has_paged_names = "paged|sdpa" in AttentionInterface._global_mapping  # before transformers 5.19
            return self.get_correct_attn_implementation(attn_implementation if has_paged_names else NAME)
        return check(self, attn_implementation, *args, **kwargs)

    checked.accepts_flash_dmattn = True
    return checked


def _refuse_unsupported_models(check):
    """Wraps transformers' check of one model: of the whole model and of each part that it switches."""

    @functools.wraps(check)
    def checked(self, requested_attention, *args, **kwargs):
        reason = reason_to_refuse(type(self)) if requested_attention in NAMES else None
        if reason is not None:
            raise ValueError(f"{NOT_SUPPORTED}, got {type(self).__name__}, {reason}")
        return check(self, requested_attention, *args, **kwargs)

    return checked


def use_flash_dmattn(model: Model, partial: bool = False) -> Model:
    """Switches a transformers model to flash_dmattn in place.

    Sets `attn_implementation="flash_dmattn"` on the model and all its parts. Doge's attention then passes its key bias
    and `keep_window_size` to the kernels, in training and generation, and no longer creates an S x S mask. T5 and the
    models that copy its attention pass a relative bias, and no longer create an S x S bias. Weights stay the same;
    outputs and gradients agree up to rounding.

    Args:
        model: a transformers model on any device, or a module that contains one, such as a PEFT model.
        partial: switch the parts that can be switched, such as the language model of a vision model. The others keep
            their attention implementation. By default a part that cannot be switched raises an error.

    Returns:
        The model.

    Raises:
        TypeError: `model` neither is nor contains a transformers.PreTrainedModel.
        ValueError: the model, or a part of it, does not use the attention interface. Nothing is switched.
    """
    if not isinstance(model, nn.Module) or not any(isinstance(part, PreTrainedModel) for part in model.modules()):
        raise TypeError(f"model must be or contain a transformers.PreTrainedModel, got {type(model).__name__}")
    register()
    switchable, refused = split_parts(model)
    if refused and not (partial and switchable):
        got = ", and ".join(f"{part}, {part.reason}" for part in refused)
        others = ", ".join(part.name for part in switchable if part.has_attention())
        raise ValueError(f"{NOT_SUPPORTED}, got {got}" + (f"; partial=True switches {others} only" if others else ""))
    switch(switchable, refused, NAME)
    if any(map(is_doge_attention, model.modules())):
        from .doge import use_window_attention

        use_window_attention(model)
    from .t5 import use_relative_bias

    use_relative_bias(model)
    return model


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: VisibleKeys | Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sinks: Tensor | None = None,
    position_bias: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    indices: Tensor | None = None,
    deterministic: bool | None = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """transformers' attention function for attn_implementation="flash_dmattn".

    Args:
        module: the attention layer. Its `is_causal` applies if the argument is None.
        query: ({B|1}, H, Sq, D).
        key: (B, Hkv, Sk, D), H a multiple of Hkv.
        value: (B, Hkv, Sk, Dv).
        attention_mask: VisibleKeys from the mask function; or bool ({B|1}, {H|1}, {Sq|1}, Sk), True = visible; or
            floating of the same shapes, added to the scores; or a padding mask (B, Sk), bool or integers, nonzero = a
            token; or None. Keys beyond Sk are cut off. A 4-dimensional mask replaces `is_causal`.
        scaling: scale of the scores, default 1 / sqrt(D).
        dropout: must be 0.
        is_causal: row i sees the keys j <= i + (Sk - Sq) only. Ignored with a 4-dimensional mask.
        softcap: bound of the scaled scores; None or 0: no bound.
        s_aux, sinks: attention sinks, one extra logit in the softmax denominator, differentiable: (H), one per head; or
            ({B|1}, H, {Sq|1}, 1), one per head and row. Models use either name.
        position_bias: floating ({B|1}, {H|1}, {Sq|1}, Sk), added to the scores, differentiable; or a relative bias
            (1, H, 2R + 1) of the positions that attention_mask has, or of rows that end at the last key.
        cu_seq_lens_q, cu_seq_lens_k: integers (sequences + 1): boundaries of sequences packed into B * S rows and keys.
        max_length_q, max_length_k: upper bounds of the sequence lengths, default B * S.
        indices: integers (B, Sq, k): the keys that each row may see, from an indexer. Creates a bool mask Sq x Sk. Not
            for packed sequences.
        deterministic: bitwise reproducible gradients; default: torch.are_deterministic_algorithms_enabled().
        kwargs: other arguments of the model, which do not affect attention. A tensor that the model's eager attention
            uses is refused. With "cache", or cu_seq_lens_k by kind of layer, those of continuous batching.

    Returns:
        (out (B, Sq, H, Dv), None); None stands for the attention weights. Rows without a visible key are 0.

    Raises:
        ValueError: a shape that does not fit; dropout, head masks or attention weights requested; an unknown tensor
            argument; with continuous batching a mask of one's own, a position bias, sinks per row or an indexer.
        TypeError: a dtype that does not fit.
    """
    require_supported(dropout, kwargs)
    require_known_tensors(module, kwargs)
    sinks = require_sinks(s_aux, sinks, query)
    cache = kwargs.get("cache")
    if cache is None and isinstance(cu_seq_lens_k, dict):  # continuous batching of transformers 5.24
        cache = paged.cache_of(module, key, value)
    if cache is not None:
        require_pageable(module, attention_mask, sinks, {"position_bias": position_bias, "indices": indices})
        rows = (rearrange(x, "1 h s d -> s h d") for x in (query, key, value))
        batch = kwargs | {"cache": cache, "cu_seq_lens_q": cu_seq_lens_q, "cu_seq_lens_k": cu_seq_lens_k}
        if max_length_q is not None:  # versions before 5.19 have other names
            batch |= {"max_length_q": max_length_q, "max_length_k": max_length_k}
        options = {"softmax_scale": scaling, "softcap": softcap or 0.0, "sinks": sinks}
        return paged.attend_to_pages(*rows, module.layer_idx, batch, **options)[None], None
    if query.shape[0] == 1:
        query = query.expand(key.shape[0], -1, -1, -1)
    query, key, value = (rearrange(x, "b h s d -> b s h d") for x in (query, key, value))
    options = {
        "softmax_scale": scaling,
        "softcap": softcap or 0.0,
        "deterministic": torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic,
        "return_lse": sinks is not None and sinks.ndim == 4,
        "sinks": None if sinks is None or sinks.ndim == 4 else sinks,
    }
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if position_bias is not None:
        require_position_bias(position_bias, query, key)
        if position_bias.ndim == 3:
            options["relative_bias"] = relative_bias_of(position_bias, attention_mask, query, key)
            position_bias = None
    if cu_seq_lens_q is not None:
        for name, value_of_padded in (("position_bias", position_bias), ("indices", indices)):
            if value_of_padded is not None:
                raise ValueError(f"{name} is for sequences that are not packed, got cu_seq_lens_q too")
        lengths = (cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k)
        out = packed_attention(query, key, value, attention_mask, *lengths, is_causal, options)
    else:
        arguments = mask_arguments(attention_mask, position_bias, query, key, is_causal)
        if indices is not None:
            arguments["attn_mask"] = select_indices(indices, arguments["attn_mask"], query, key)
        out = flash_dmattn_func(query, key, value, **arguments, **options)
    if options["return_lse"]:
        out = apply_sinks(*out, sinks.squeeze(-1))
    return out, None


def select_indices(indices: Tensor, mask: KeyIntervalMask | Tensor | None, query: Tensor, key: Tensor) -> Tensor:
    """The mask restricted to the keys in `indices` (B, Sq, k), as a bool tensor (B, {H|1}, Sq, Sk)."""
    keys = key.shape[1]
    require_integers("indices", indices)
    if indices.ndim != 3 or indices.shape[:2] != query.shape[:2]:
        raise ValueError(f"indices must be (B, Sq, k), with {sizes_of(query, key)}, got shape {shape_of(indices)}")
    if is_host_readable(indices) and ((indices < 0) | (indices >= keys)).any():
        wrong = indices[(indices < 0) | (indices >= keys)][0].item()
        raise ValueError(f"indices must be from 0 to {keys - 1}, got {wrong}")
    selected = torch.zeros(*indices.shape[:2], keys, dtype=torch.bool, device=indices.device)
    selected = rearrange(selected.scatter_(-1, indices.long(), True), "b rows keys -> b 1 rows keys")
    if isinstance(mask, KeyIntervalMask):
        mask = mask.to_dense(indices.shape[1])
    return selected if mask is None else selected & mask


UNSUPPORTED = {
    "head_mask": "masks of heads",
    "layer_head_mask": "masks of heads",
    "cross_attn_head_mask": "masks of heads",
    "block_indices": "block selection by an indexer",
    "output_attentions": "attention weights, which are never materialized",
}


def require_supported(dropout: float, options: dict) -> None:
    """Raises ValueError for options of transformers that the kernels do not support."""
    if dropout:
        raise ValueError(
            f"attn_implementation={NAME!r} has no dropout of attention weights, got {dropout}: set it to 0 in the "
            "model's config, or call model.eval()"
        )
    for name, feature in UNSUPPORTED.items():
        value = options.get(name)
        if value is not None and value is not False:
            raise ValueError(f"attn_implementation={NAME!r} has no {feature}, got {name}: use 'eager'")


def is_doge_attention(module: nn.Module) -> bool:
    """Whether it is transformers' own, which use_flash_dmattn converts. By name: not every model needs its import."""
    return type(module).__name__ == "DogeAttention"


def require_pageable(
    module: nn.Module, mask: VisibleKeys | Tensor | None, sinks: Tensor | None, others: dict[str, Tensor | None]
) -> None:
    """Raises ValueError for what attention over transformers' paged cache does not support."""
    if mask is not None and not isinstance(mask, VisibleKeys):
        hint = (
            "call use_flash_dmattn(model)"
            if is_doge_attention(module)
            else "if the model has a persistent manager from another attention implementation, call "
            "model.destroy_cached_continuous_batching_manager()"
        )
        raise ValueError(f"attention_mask must be None in continuous batching, got shape {shape_of(mask)}: {hint}")
    if sinks is not None and sinks.ndim != 1:
        raise ValueError(f"sinks must be (H) in continuous batching, got shape {shape_of(sinks)}")
    for name, value in others.items():
        if value is not None:
            raise ValueError(f"{name} must be None in continuous batching, got shape {shape_of(value)}")


# Tensors that transformers passes to the attention of any model, and that do not affect it.
IGNORED = ("position_ids", "cache_position", "seq_idx", "num_items_in_batch")
# Additional tensors of continuous batching.
IGNORED += ("block_table", "logits_indices", "logits_processor_args")


def require_known_tensors(module: nn.Module, options: dict) -> None:
    """Raises ValueError for a tensor that eager attention uses and this function would ignore.

    A model passes unknown arguments to its attention. The signature of the model's
    `eager_attention_forward` shows which of them attention uses. Without that function no unknown tensor is accepted.
    """
    for name, value in options.items():
        if isinstance(value, Tensor) and name not in IGNORED:
            used = eager_arguments(type(module).__module__)
            if used is None or name in used:
                raise ValueError(f"attn_implementation={NAME!r} has no argument {name}, got shape {shape_of(value)}")


@torch.compiler.assume_constant_result
def eager_arguments(model_file: str) -> tuple[str, ...] | None:
    """The arguments of the eager attention in a file of transformers, or None if it has none of that name."""
    eager = getattr(sys.modules.get(model_file), "eager_attention_forward", None)
    return None if eager is None else tuple(inspect.signature(eager).parameters)


def require_sinks(s_aux: Tensor | None, sinks: Tensor | None, query: Tensor) -> Tensor | None:
    """The attention sinks under the name that the model uses."""
    if s_aux is not None and sinks is not None:
        raise ValueError("s_aux and sinks are two names of one argument, got both")
    name, sinks = ("sinks", sinks) if s_aux is None else ("s_aux", s_aux)
    if sinks is None:
        return None
    batch, heads, rows, _ = query.shape
    shape = shape_of(sinks)
    is_per_row = (
        len(shape) == 4 and shape[1] == heads and is_one_of(shape[0], 1, batch) and is_one_of(shape[2], 1, rows)
    )
    if shape != (heads,) and not (is_per_row and shape[3] == 1):
        accepted = f"(H) or ({{B|1}}, H, {{Sq|1}}, 1) with B = {batch}, H = {heads} and Sq = {rows}"
        raise ValueError(f"{name} must be {accepted}, got shape {shape}")
    return sinks if sinks.dtype == query.dtype else sinks.to(accumulation_dtype(query.dtype))


def relative_bias_of(
    table: Tensor, attention_mask: VisibleKeys | Tensor | None, query: Tensor, key: Tensor
) -> Tensor | None:
    """flash_dmattn_func's relative_bias, which counts distances from the last key, from a table of distances between
    positions. None for a table of one entry, which adds the same to all scores of a row."""
    if table.shape[-1] == 1:
        return None
    if not isinstance(attention_mask, VisibleKeys) or attention_mask.cache_seqlens is not None:
        return table
    shift = key.shape[1] - query.shape[1] - attention_mask.q_offset
    if isinstance(shift, Tensor):
        return shifted(table, shift, max_shift=key.shape[1])
    return table if shift == 0 else shifted(table, shift)


def mask_arguments(
    attention_mask: VisibleKeys | Tensor | None,
    position_bias: Tensor | None,
    query: Tensor,
    key: Tensor,
    is_causal: bool,
) -> dict[str, AnyMask | bool]:
    """flash_dmattn_func's mask, bias, is_causal and cache_seqlens."""
    keys = key.shape[1]
    mask, bias, cache_seqlens = None, position_bias, None
    if isinstance(attention_mask, VisibleKeys):
        mask, is_causal = attention_mask.intervals, attention_mask.is_causal
        if mask is not None and not is_one_of(mask.batches, key.shape[0], 1):
            raise ValueError(f"attention_mask must have the batch size {key.shape[0]} or 1, got {mask.batches}")
        if is_causal and attention_mask.seqlen_k != keys:
            raise ValueError(f"attention_mask must be for the {keys} keys, got shape {tuple(attention_mask.shape)}")
        cache_seqlens = attention_mask.cache_seqlens
    elif attention_mask is not None:
        require_mask(attention_mask, query, key)
        if attention_mask.ndim == 2:
            mask = KeyIntervalMask.padding(attention_mask[:, :keys])
        elif attention_mask.dtype == torch.bool:
            mask, is_causal = attention_mask[..., :keys], False
        else:
            mask_bias, is_causal = attention_mask[..., :keys], False
            bias = mask_bias if bias is None else masked_by_inf(bias) + masked_by_inf(mask_bias)
    if bias is not None:
        bias = bias if bias.shape[-1] == keys else bias[..., :keys]
        bias = shared_key_contiguous(bias if bias.dtype == query.dtype else masked_by_inf(bias)).to(query.dtype)
    return {"attn_mask": mask, "attn_bias": bias, "is_causal": bool(is_causal), "cache_seqlens": cache_seqlens}


def masked_by_inf(bias: Tensor) -> Tensor:
    """The bias with -inf in the place of its dtype's least finite number, which masks no key after an addition or in
    another dtype."""
    return bias.masked_fill(is_masked(bias), -torch.inf)


_contiguous_copies = WeakTensorKeyDictionary()  # bias: (its version, its copy)


def shared_key_contiguous(bias: Tensor) -> Tensor:
    """`key_contiguous` of a bias that all layers receive.

    T5's bias has the heads innermost. In training its layers share one copy: it is saved for the backward once, and its
    gradient is transposed once.
    """
    is_trained = bias.requires_grad and torch.is_grad_enabled()
    # A cached copy of a leaf would keep the leaf, its key, alive.
    if bias.stride(-1) == 1 or not is_trained or bias.is_leaf or torch.compiler.is_compiling():
        return key_contiguous(bias)
    version, copy = _contiguous_copies.get(bias, (None, None))
    if version != bias._version:
        copy = key_contiguous(bias)
        _contiguous_copies[bias] = bias._version, copy
    return copy


def fits_scores(scores: Tensor, query: Tensor, key: Tensor) -> bool:
    """Whether a mask or bias ({B|1}, {H|1}, {Sq|1}, Sk), which may have more keys, fits. Masks and biases that batch
    elements and heads share as those of `flash_dmattn_func` fit too. A traced graph leaves it to the operators."""
    if torch.compiler.is_compiling() or scores.ndim != 4:
        return scores.ndim == 4
    batch, rows, heads, _ = query.shape
    own_batch, own_heads, own_rows, own_keys = scores.shape
    fits_heads = is_one_of(own_heads, heads, key.shape[2], 1)
    fits_keys = own_keys == 1 or own_keys >= key.shape[1]
    return shares_batch(own_batch, batch) and fits_heads and is_one_of(own_rows, rows, 1) and fits_keys


def require_position_bias(bias: Tensor, query: Tensor, key: Tensor) -> None:
    require_floating("position_bias", bias)
    if bias.ndim == 3:
        batch, heads, entries = bias.shape
        fits = is_one_of(batch, query.shape[0], 1) and is_one_of(heads, query.shape[2], key.shape[2], 1) and entries % 2
    else:
        fits = fits_scores(bias, query, key)
    if not fits:
        accepted = "({B|1}, {H|1}, {Sq|1}, Sk), or a relative bias (1, H, 2R + 1)"
        raise ValueError(f"position_bias must be {accepted}, with {sizes_of(query, key)}, got shape {shape_of(bias)}")


def sizes_of(query: Tensor, key: Tensor) -> str:
    batch, rows, heads, _ = query.shape
    return f"B = {batch}, H = {heads}, Sq = {rows} and Sk = {key.shape[1]}"


def require_mask(mask: Tensor, query: Tensor, key: Tensor) -> None:
    accepted = "bool or floating ({B|1}, {H|1}, {Sq|1}, Sk), or a padding mask (B, Sk), bool or integers"
    is_padding = mask.ndim == 2 and mask.shape[0] == key.shape[0] and mask.shape[1] >= key.shape[1]
    if not (is_padding or fits_scores(mask, query, key)):
        sizes = sizes_of(query, key)
        raise ValueError(f"attention_mask must be {accepted}, with {sizes}, got shape {shape_of(mask)}")
    if mask.dtype != torch.bool and mask.is_floating_point() != (mask.ndim == 4):
        raise TypeError(f"attention_mask must be {accepted}, got {names([mask.dtype])} of shape {shape_of(mask)}")


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: VisibleKeys | Tensor | None,
    cu_seq_lens_q: Tensor,
    cu_seq_lens_k: Tensor | None,
    max_length_q: int | Tensor | None,
    max_length_k: int | Tensor | None,
    is_causal: bool,
    options: dict,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of sequences packed into B * S rows: out (B, S, H, D), with return_lse also lse (B, H, S)."""
    batch = query.shape[0]
    shares_lengths = cu_seq_lens_k is None or cu_seq_lens_k is cu_seq_lens_q
    require_integers("cu_seq_lens_q", cu_seq_lens_q)
    if not shares_lengths:
        require_integers("cu_seq_lens_k", cu_seq_lens_k)
    cu_seqlens_q = cu_seq_lens_q.int()
    cu_seqlens_k = cu_seqlens_q if shares_lengths else cu_seq_lens_k.int()
    query, key, value = (rearrange(x, "b s h d -> (b s) h d") for x in (query, key, value))
    mask = None
    if isinstance(attention_mask, VisibleKeys):
        mask, is_causal = per_sequence_intervals(attention_mask, cu_seqlens_k, key.shape[0]), attention_mask.is_causal
    elif attention_mask is not None:
        raise ValueError(
            f"attention_mask must be None or VisibleKeys with cu_seq_lens_q, got shape {shape_of(attention_mask)}"
        )
    max_seqlen_q = query.shape[0] if max_length_q is None else int(max_length_q)
    max_seqlen_k = key.shape[0] if max_length_k is None else int(max_length_k)
    total_q, total_k = (query.shape[0], "the rows of query"), (key.shape[0], "the number of keys")
    check_same_sequences(cu_seqlens_q, cu_seqlens_k, "cu_seq_lens")
    check_cu_seqlens("cu_seq_lens_q", cu_seqlens_q, query, "query", total_q, ("max_length_q", max_seqlen_q))
    check_cu_seqlens("cu_seq_lens_k", cu_seqlens_k, query, "query", total_k, ("max_length_k", max_seqlen_k))
    out = flash_dmattn_varlen_func(
        *(query, key, value, mask, None, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k),
        is_causal=bool(is_causal),
        **options,
    )
    if not options["return_lse"]:
        return rearrange(out, "(b s) h d -> b s h d", b=batch)
    out, lse = out
    return rearrange(out, "(b s) h d -> b s h d", b=batch), rearrange(lse, "h (b s) -> b h s", b=batch)


def per_sequence_intervals(visible: VisibleKeys, cu_seqlens: Tensor, total: int) -> KeyIntervalMask | None:
    """The intervals of `visible` with rows counted from the first row of each key's sequence."""
    mask = visible.intervals
    if mask is None:
        return None
    if mask.batches != 1 or visible.seqlen_q != total:
        raise ValueError(
            f"with cu_seq_lens_q attention_mask must be for one batch element of {total} rows and keys, "
            f"got shape {tuple(visible.shape)}"
        )
    first = cu_seqlens[sequence_of_keys(cu_seqlens, total)]
    start, end = (rearrange((rows - first).clamp(min=0), "1 h keys -> keys h") for rows in (mask.start, mask.end))
    return KeyIntervalMask(start, end, keys_per_row=mask.keys_per_row)
