"""flash_dmattn as an attention implementation of Hugging Face transformers, 5.17 and newer.

    from flash_dmattn.integrations.transformers import register, use_flash_dmattn

    register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="flash_dmattn")

    model = use_flash_dmattn(model)  # of a model that is there, and what Doge's dynamic mask needs

Needs the extra `[transformers]`.
"""

from __future__ import annotations

import functools

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from ..arguments import names, shape_of
from ..biases import hides
from ..checks import AnyMask
from ..interface import flash_dmattn_func, flash_dmattn_varlen_func
from ..masks import KeyIntervalMask
from ..masks.topk import sequence_of_keys
from .visible_keys import VisibleKeys, visible_keys_mask

NAME = "flash_dmattn"


def register() -> None:
    """Makes `attn_implementation="flash_dmattn"` known to transformers, for every model on its attention interface.

    It may be called any number of times. A model that does not go through the interface refuses the name with a
    ValueError. What a call of attention cannot be served with is refused there, as `attention` says.
    """
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, visible_keys_mask)
    checked = PreTrainedModel._check_and_adjust_attn_implementation
    if not hasattr(checked, "without_flash_dmattn"):
        PreTrainedModel._check_and_adjust_attn_implementation = _knowing_flash_dmattn(checked)


def _knowing_flash_dmattn(check):
    """transformers' check of a name, which takes every one with "flash" in it for a build of FlashAttention, to be
    loaded from the hub or exchanged for another that the model prefers."""

    @functools.wraps(check)
    def checked(self, attn_implementation, *args, **kwargs):
        if attn_implementation != NAME:
            return check(self, attn_implementation, *args, **kwargs)
        if not self._can_set_attn_implementation():
            raise ValueError(
                f"attn_implementation={NAME!r} is for models on transformers' attention interface, "
                f"got {type(self).__name__}, which computes its attention itself"
            )
        return self.get_correct_attn_implementation(NAME)

    checked.without_flash_dmattn = check
    return checked


def use_flash_dmattn(model: PreTrainedModel) -> PreTrainedModel:
    """Switches a model to flash_dmattn, in place.

    Every model on transformers' attention interface gets `attn_implementation="flash_dmattn"`. Doge's attention, which
    makes an S x S mask of the `keep_window_size` keys of largest bias for each row, then gives bias and window to the
    kernels instead, in training and generation; weights, outputs and gradients stay what they were.

    Args:
        model: a model of transformers, with or without weights on a GPU.

    Returns:
        The model.

    Raises:
        TypeError: no model of transformers.
        ValueError: a model that does not go through the attention interface.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model must be a transformers.PreTrainedModel, got {type(model).__name__}")
    register()
    # Each by itself: transformers leaves out parts that have the whole's class of config, as T5's encoder and decoder.
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            part._check_and_adjust_attn_implementation(NAME)
            part.set_attn_implementation(NAME)
    if any(type(module).__name__ == "DogeAttention" for module in model.modules()):
        from .doge import use_window

        use_window(model)
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
    position_bias: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    indices: Tensor | None = None,
    deterministic: bool | None = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """transformers' attention function.

    Args:
        module: the attention layer; its `is_causal` counts where the argument is None.
        query: (B, H, Sq, D).
        key: (B, Hkv, Sk, D), H a multiple of Hkv.
        value: (B, Hkv, Sk, Dv).
        attention_mask: VisibleKeys, of the mask function; or what a user made: bool ({B|1}, {H|1}, {Sq|1}, Sk),
            True = visible, or floating, added to the scores, of these shapes (more keys than Sk are cut off); or a
            padding mask (B, Sk), bool or integers, not 0 = a real key; or None. Masks of four dimensions say all,
            causality too.
        scaling: of the scores, 1 / sqrt(D) by default.
        dropout: 0.
        is_causal: whether row i sees the keys j <= i + (Sk - Sq) only, where no mask of four dimensions says it.
        softcap: bounds the scaled scores; None or 0: no bound.
        s_aux: sinks (H): each row's softmax has one more score, this one, whose probability is dropped. Exact:
            out * sigmoid(lse - s_aux), so that it has its gradient.
        position_bias: floating ({B|1}, {H|1}, {Sq|1}, Sk), added to the scores; it gets a gradient.
        cu_seq_lens_q, cu_seq_lens_k: integers (sequences + 1): the B * S rows and keys are these sequences, packed one
            after the other.
        max_length_q, max_length_k: at least the longest of them; by default as many as there are rows and keys.
        indices: integers (B, Sq, k), the keys that an indexer has left to each row. By a bool mask of Sq x Sk.
        deterministic: the same inputs give bitwise the same gradients; by default as
            torch.use_deterministic_algorithms says.

    Returns:
        (B, Sq, H, Dv) and None, in the place of attention weights. A row that sees nothing gives 0.

    Raises:
        ValueError: dropout, head masks or attention weights are asked for; shapes that do not fit.
        TypeError: dtypes that do not fit.
    """
    refuse(dropout, kwargs)
    if s_aux is not None and shape_of(s_aux) != (query.shape[1],):
        raise ValueError(
            f"s_aux must have one sink for each of the {query.shape[1]} heads, got shape {shape_of(s_aux)}"
        )
    head_dim, value_dim = query.shape[-1], value.shape[-1]
    query, key, value = (rearrange(x, "b h s d -> b s h d") for x in (query, key, value))
    if value_dim != head_dim:  # zeros change neither scores nor the part of the output that is kept
        query, key, value = (pad(x, (0, max(head_dim, value_dim) - x.shape[-1])) for x in (query, key, value))
    options = {
        "softmax_scale": head_dim**-0.5 if scaling is None else scaling,
        "softcap": softcap or 0.0,
        "deterministic": torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic,
        "return_lse": s_aux is not None,
    }
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if indices is not None:
        attention_mask = at_indices(indices, attention_mask, key.shape[1])
    if cu_seq_lens_q is not None:
        if position_bias is not None:
            raise ValueError("position_bias is for sequences that are not packed, got cu_seq_lens_q too")
        lengths = (cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k)
        out = packed_attention(query, key, value, attention_mask, *lengths, is_causal, options)
    else:
        seen = what_is_seen(attention_mask, position_bias, query, key, is_causal)
        out = flash_dmattn_func(query, key, value, **seen, **options)
    if s_aux is not None:
        out = with_sinks(*out, s_aux)
    return out[..., :value_dim], None


def at_indices(indices: Tensor, attention_mask: VisibleKeys | Tensor | None, keys: int) -> Tensor:
    """A mask (B, 1, Sq, Sk) that leaves each row the keys at its indices, of those that it would see without."""
    chosen = torch.zeros(*indices.shape[:2], keys, dtype=torch.bool, device=indices.device)
    chosen = rearrange(chosen.scatter_(-1, indices.long(), True), "b rows keys -> b 1 rows keys")
    if attention_mask is None:
        return chosen
    if attention_mask.dtype == torch.bool:
        return chosen & attention_mask
    return attention_mask[..., :keys].masked_fill(~chosen, -torch.inf)


REFUSED = {
    "head_mask": "masks of heads",
    "layer_head_mask": "masks of heads",
    "cross_attn_head_mask": "masks of heads",
    "block_indices": "choice of blocks by an indexer",
    "output_attentions": "attention weights, which are never there as a whole",
}


def refuse(dropout: float, options: dict) -> None:
    """What the kernels cannot do is not left out silently."""
    if dropout:
        raise ValueError(
            f"attn_implementation={NAME!r} has no dropout of attention weights, got {dropout}: set it to 0 in the "
            "model's config, or call model.eval()"
        )
    for name, what in REFUSED.items():
        value = options.get(name)
        if value is not None and value is not False:
            raise ValueError(f"attn_implementation={NAME!r} has no {what}, got {name}: use 'eager'")


def what_is_seen(
    attention_mask: VisibleKeys | Tensor | None,
    position_bias: Tensor | None,
    query: Tensor,
    key: Tensor,
    is_causal: bool,
) -> dict[str, AnyMask | bool]:
    """The arguments of flash_dmattn_func that say which keys a row sees, and what is added to their scores."""
    keys = key.shape[1]
    mask, bias, cache_seqlens = None, position_bias, None
    if isinstance(attention_mask, VisibleKeys):
        mask, is_causal, cache_seqlens = (
            attention_mask.intervals,
            attention_mask.is_causal,
            attention_mask.cache_seqlens,
        )
    elif attention_mask is not None:
        require_mask(attention_mask, key.shape[0], keys)
        if attention_mask.ndim == 2:
            mask = KeyIntervalMask.padding(attention_mask[:, :keys])
        elif attention_mask.dtype == torch.bool:
            mask, is_causal = attention_mask[..., :keys], False
        else:
            added, is_causal = additive(attention_mask[..., :keys], query.dtype), False
            bias = added if bias is None else bias + added
    if bias is not None:
        bias = rows_of(bias if bias.shape[-1] == keys else bias[..., :keys]).to(query.dtype)
    return {"attn_mask": mask, "attn_bias": bias, "is_causal": bool(is_causal), "cache_seqlens": cache_seqlens}


ROWS = WeakTensorKeyDictionary()  # what rows_of made of a bias, as long as that lives


def rows_of(bias: Tensor) -> Tensor:
    """The bias as the kernels read it, row by row.

    T5's lies with the heads innermost, and all its layers are given the same: where they train it they share one copy,
    which is kept for the backward once, and whose gradient is turned once.
    """
    if bias.stride(-1) == 1:
        return bias
    # A copy of a leaf would keep the leaf, its key, alive.
    if not (bias.requires_grad and torch.is_grad_enabled()) or bias.is_leaf or torch.compiler.is_compiling():
        return bias.contiguous()
    version, rows = ROWS.get(bias, (None, None))
    if version != bias._version:
        rows = bias.contiguous()
        ROWS[bias] = bias._version, rows
    return rows


def require_mask(mask: Tensor, batch: int, keys: int) -> None:
    accepted = "bool or floating ({B|1}, {H|1}, {Sq|1}, Sk), or a padding mask (B, Sk), bool or integers"
    fits = mask.ndim == 4 or (mask.ndim == 2 and mask.shape[0] == batch and mask.shape[1] >= keys)
    if not fits:
        sizes = f"B = {batch} and Sk = {keys}"
        raise ValueError(f"attention_mask must be {accepted}, with {sizes}, got shape {shape_of(mask)}")
    if mask.dtype != torch.bool and mask.is_floating_point() != (mask.ndim == 4):
        raise TypeError(f"attention_mask must be {accepted}, got {names([mask.dtype])} of shape {shape_of(mask)}")


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A floating mask in another dtype, in which what hides still does."""
    return mask if mask.dtype == dtype else mask.to(dtype).masked_fill(hides(mask), -torch.inf)


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
    """out (B, S, H, D), or (out, lse) with lse (B, H, S), of sequences packed into B * S rows."""
    batch = query.shape[0]
    cu_seqlens_q = cu_seq_lens_q.int()
    cu_seqlens_k = cu_seqlens_q if cu_seq_lens_k is None or cu_seq_lens_k is cu_seq_lens_q else cu_seq_lens_k.int()
    query, key, value = (rearrange(x, "b s h d -> (b s) h d") for x in (query, key, value))
    mask = None
    if isinstance(attention_mask, VisibleKeys):
        mask, is_causal = in_sequences(attention_mask, cu_seqlens_k, key.shape[0]), attention_mask.is_causal
    elif attention_mask is not None:
        raise ValueError(
            f"attention_mask must be None where cu_seq_lens_q says what is seen, got shape {shape_of(attention_mask)}"
        )
    longest_q = query.shape[0] if max_length_q is None else int(max_length_q)
    longest_k = key.shape[0] if max_length_k is None else int(max_length_k)
    out = flash_dmattn_varlen_func(
        *(query, key, value, mask, None, cu_seqlens_q, cu_seqlens_k, longest_q, longest_k),
        is_causal=bool(is_causal),
        **options,
    )
    if not options["return_lse"]:
        return rearrange(out, "(b s) h d -> b s h d", b=batch)
    out, lse = out
    return rearrange(out, "(b s) h d -> b s h d", b=batch), rearrange(lse, "h (b s) -> b h s", b=batch)


def in_sequences(visible: VisibleKeys, cu_seqlens: Tensor, total: int) -> KeyIntervalMask | None:
    """Intervals whose rows count from the first of all, with rows that count from the first of the key's sequence."""
    mask = visible.intervals
    if mask is None:
        return None
    if mask.batches != 1 or visible.seqlen_q != total:
        raise ValueError(
            f"cu_seq_lens_q beside a mask is for one batch element of {total} rows and keys, "
            f"got a mask of shape {tuple(visible.shape)}"
        )
    first = cu_seqlens[sequence_of_keys(cu_seqlens, total)]
    start, end = (rearrange((rows - first).clamp(min=0), "1 h keys -> keys h") for rows in (mask.start, mask.end))
    return KeyIntervalMask(start, end, keys_per_row=mask.keys_per_row)


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """out (B, S, H, D) of softmax with one more score a row, whose probability is dropped. lse (B, H, S), sinks (H).

    With Z = exp(lse) the sum of all weights, every probability is Z / (Z + exp(sink)) of what it was.
    """
    lse = lse.masked_fill(lse == -torch.inf, 0)  # of a row that sees nothing: beside a sink of -inf it would give NaN
    kept = torch.sigmoid(lse - rearrange(sinks.to(lse.dtype), "h -> h 1"))
    return (out * rearrange(kept, "b h s -> b s h 1")).to(out.dtype)
