"""Doge's dynamic-mask attention through attn_bias and window_size instead of an S x S mask."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicLayer, StaticLayer
from transformers.generation.continuous_batching import PagedAttentionCache
from transformers.models.doge.modeling_doge import DogeAttention, apply_rotary_pos_emb

from ..biases import least
from ..interface import flash_dmattn_func
from ..masks import KeyIntervalMask, create_mask
from ..masks.selection import topk_of_cache
from ..masks.topk import sequence_of_keys
from .paged import attend_to_pages
from .transformers import NAMES, register, require_supported
from .versions import CACHE
from .visible_keys import Pattern, VisibleKeys

register()  # a process that unpickles a converted model imports this file alone


def use_window_attention(model: nn.Module) -> None:
    """Converts every DogeAttention of the model to DogeWindowAttention in place. The weights stay the same."""
    for module in model.modules():
        if type(module) is DogeAttention:
            module.__class__ = DogeWindowAttention


class DogeWindowAttention(DogeAttention):
    """DogeAttention with attn_implementation="flash_dmattn". Other implementations use DogeAttention's forward.

    A key's bias depends on its value only, so generation caches it. The cache has one extra layer per model layer for
    the biases, appended after the model's layers, so that beam search and cropping apply to them too.
    """

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: VisibleKeys | Tensor | None = None,
        **kwargs,
    ) -> tuple[Tensor, Tensor | None]:
        if self.config._attn_implementation not in NAMES:
            return super().forward(hidden_states, position_embeddings, attention_mask, **kwargs)
        require_supported(self.attention_dropout if self.training else 0.0, kwargs)
        query, key, value = (
            rearrange(proj(hidden_states), "b s (h d) -> b s h d", d=self.head_dim)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = apply_rotary_pos_emb(self.q_norm(query), self.k_norm(key), *position_embeddings, unsqueeze_dim=2)
        if isinstance(kwargs.get("cache"), PagedAttentionCache):
            bias = rearrange(self.key_bias(value), "1 h 1 s -> s h")
            options = {"window_size": self.keep_window_size, "softmax_scale": self.scaling}
            out = attend_to_pages(query[0], key[0], value[0], self.layer_idx, kwargs, bias, **options)
            return self.o_proj(rearrange(out, "s h d -> 1 s (h d)")), None
        cache = kwargs.get(CACHE)
        if cache is None:
            bias = self.key_bias(value)
        else:
            key, value, bias = self.update_cache(key, value, cache)
        visible = self.visible_keys(attention_mask, query, key, kwargs)
        out = flash_dmattn_func(
            *(query, key, value),
            **topk_arguments(bias, self.keep_window_size, visible, query.shape[1]),
            softmax_scale=self.scaling,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        return self.o_proj(rearrange(out, "b s h d -> b s (h d)")), None

    def key_bias(self, value: Tensor) -> Tensor:
        """The key bias (B, Hkv, 1, S) of values (B, S, Hkv, D): it is added to the scores and ranks the keys."""
        logits = self.dt_proj(rearrange(value, "b s h d -> b s (h d)"))
        return rearrange(torch.exp(self.A * F.softplus(logits)), "b s h -> b h 1 s")

    def update_cache(self, key: Tensor, value: Tensor, cache: Cache) -> tuple[Tensor, Tensor, Tensor]:
        """Adds keys and values to the cache. Returns all keys and values (B, Sk, Hkv, D) and biases (B, Hkv, 1, Sk)."""
        bias_layer = self.bias_layer(cache)
        new = (rearrange(x, "b s h d -> b h s d") for x in (key, value))
        keys, values = (rearrange(x, "b h s d -> b s h d") for x in cache.update(*new, self.layer_idx))
        if bias_layer is None:
            return keys, values, self.key_bias(values)
        new = rearrange(self.key_bias(value), "b h 1 s -> b h s 1")
        bias, _ = bias_layer.update(new, new[..., :0])
        return keys, values, rearrange(bias, "b h s 1 -> b h 1 s")

    def bias_layer(self, cache: Cache) -> DynamicLayer | StaticLayer | None:
        """The cache layer for this layer's biases; None if they are recomputed from all values."""
        layers, count = cache.layers, self.config.num_hidden_layers
        if self.layer_idx == 0 and len(layers) <= count and not cache.offloading:
            while len(layers) < count:
                layers.append(cache.layer_class_to_replicate())
            is_empty = not any(layer.is_initialized for layer in layers)
            if is_empty and all(type(layer) in (DynamicLayer, StaticLayer) for layer in layers):
                layers.extend([type(x)(x.max_cache_len) if type(x) is StaticLayer else type(x)() for x in layers])
        return layers[count + self.layer_idx] if len(layers) == 2 * count else None

    def visible_keys(self, attention_mask: VisibleKeys | Tensor | None, query: Tensor, key: Tensor, options: dict):
        """The candidate keys of each row: the given mask, or causality as VisibleKeys, with packed sequences."""
        cu_seqlens = options.get("cu_seq_lens_q")
        batch, seqlen_q, seqlen_k = *query.shape[:2], key.shape[1]
        if attention_mask is None:
            pattern = Pattern(is_causal=True)
            attention_mask = VisibleKeys(batch, seqlen_q, seqlen_k, seqlen_k - seqlen_q, pattern, None, query.device)
        if cu_seqlens is None or not isinstance(attention_mask, VisibleKeys):
            return attention_mask
        ids = rearrange(sequence_of_keys(cu_seqlens.int(), batch * seqlen_k), "(b s) -> b s", b=batch)
        return attention_mask.with_documents(ids)


def topk_arguments(bias: Tensor, window_size: int, visible: VisibleKeys | Tensor, seqlen_q: int) -> dict[str, object]:
    """flash_dmattn_func's mask arguments: each row sees its window_size visible keys of largest bias.

    Args:
        bias: (B, Hkv, 1, Sk).
        window_size: the number of keys per row.
        visible: the candidate keys; a Tensor is bool (True = visible) or additive (0 = visible).
        seqlen_q: Sq.
    """
    keys = bias.shape[3]
    if not isinstance(visible, VisibleKeys):
        visible = visible[..., :keys]
        candidates = visible if visible.dtype == torch.bool else visible == 0
        return dense_topk_arguments(bias, window_size, candidates, seqlen_q)
    is_causal, window, _, documents = visible.pattern
    if not is_causal or (window is not None and window[0] >= window_size):  # an evicted key can return
        return dense_topk_arguments(bias, window_size, visible.to_dense(), seqlen_q)

    if visible.padding_mask is not None:
        bias = bias.masked_fill(~rearrange(visible.padding_mask, "b keys -> b 1 1 keys"), -torch.inf)
    is_prefix = window is None and documents is None
    if is_prefix and visible.is_causal:
        topk = {"window_size": window_size, "cache_seqlens": visible.cache_seqlens}
        return {"attn_bias": bias, "is_causal": True, **topk}
    if is_prefix:  # a static cache with gradients
        mask = topk_of_cache(bias.detach().squeeze(2), window_size, seqlen_q, visible.key_lengths())
        return {"attn_mask": mask, "attn_bias": bias}
    mask = visible.intervals
    if window is None and window_size < keys:
        mask = mask & KeyIntervalMask.topk(ranks_by_document(bias, documents), window_size, seqlen_q)
    return {"attn_mask": mask, "attn_bias": bias, "is_causal": visible.is_causal}


def dense_topk_arguments(bias: Tensor, window_size: int, candidates: Tensor, seqlen_q: int) -> dict[str, object]:
    """The same through a bool mask (B, Hkv, Sq, Sk), for candidates that are not a prefix of the keys."""
    mask = create_mask(bias, candidates, bias.shape[0], seqlen_q, bias.shape[3], window_size, least(bias.dtype))
    return {"attn_mask": mask, "attn_bias": bias}


@torch.no_grad()
def ranks_by_document(bias: Tensor, documents: Tensor) -> Tensor:
    """float (B, Hkv, 1, S): ranks of the keys by (document, bias). Masked keys have -inf.

    The w keys of highest rank up to a row, without those of earlier documents, are the w best of the row's document.
    """
    order = bias.argsort(dim=-1, stable=True)
    documents = rearrange(documents, "b keys -> b 1 1 keys").expand(bias.shape)
    order = order.gather(-1, documents.gather(-1, order).argsort(dim=-1, stable=True))
    keys = bias.shape[-1]
    ranks = torch.arange(keys, device=bias.device, dtype=torch.float32 if keys < 2**24 else torch.float64)
    ranks = torch.empty_like(bias, dtype=ranks.dtype).scatter_(-1, order, ranks.expand(bias.shape))
    return ranks.masked_fill(bias <= least(bias.dtype), -torch.inf)
