"""Doge's attention by bias and window in place of its S x S mask."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicLayer, StaticLayer
from transformers.models.doge.modeling_doge import DogeAttention, apply_rotary_pos_emb

from ..biases import least
from ..interface import flash_dmattn_func
from ..masks import KeyIntervalMask, create_mask
from ..masks.selection import topk_of_cache
from ..masks.topk import sequence_of_keys
from .transformers import NAME, refuse
from .visible_keys import Pattern, VisibleKeys


def use_window(model: nn.Module) -> None:
    """Every DogeAttention in the model becomes a DogeWindowAttention, with the same weights."""
    for module in model.modules():
        if type(module) is DogeAttention:
            module.__class__ = DogeWindowAttention


class DogeWindowAttention(DogeAttention):
    """DogeAttention with attn_implementation="flash_dmattn"; with any other it is DogeAttention.

    The bias of a key depends on its value alone, so that generation keeps it: in one more layer of the cache for each
    layer of the model, behind them, where all that befalls a cache (beam search, cropping) befalls it too.
    """

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: VisibleKeys | Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs,
    ) -> tuple[Tensor, Tensor | None]:
        if self.config._attn_implementation != NAME:
            return super().forward(hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs)
        refuse(self.attention_dropout if self.training else 0.0, kwargs)
        query, key, value = (
            rearrange(proj(hidden_states), "b s (h d) -> b s h d", d=self.head_dim)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = apply_rotary_pos_emb(self.q_norm(query), self.k_norm(key), *position_embeddings, unsqueeze_dim=2)
        if past_key_values is None:
            bias = self.key_bias(value)
        else:
            key, value, bias = self.with_past(key, value, past_key_values)
        visible = self.visible(attention_mask, query, key, kwargs)
        out = flash_dmattn_func(
            *(query, key, value),
            **chosen_keys(bias, self.keep_window_size, visible, query.shape[1]),
            softmax_scale=self.scaling,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        return self.o_proj(rearrange(out, "b s h d -> b s (h d)")), None

    def key_bias(self, value: Tensor) -> Tensor:
        """(B, S, Hkv, D) -> (B, Hkv, 1, S): what is added to the scores of each key, and what the rows choose by."""
        logits = self.dt_proj(rearrange(value, "b s h d -> b s (h d)"))
        return rearrange(torch.exp(self.A * F.softplus(logits)), "b s h -> b h 1 s")

    def with_past(self, key: Tensor, value: Tensor, past: Cache) -> tuple[Tensor, Tensor, Tensor]:
        """The keys and values (B, Sk, Hkv, D) and the bias (B, Hkv, 1, Sk) of all that the cache then holds."""
        bias_layer = self.bias_layer(past)
        new = (rearrange(x, "b s h d -> b h s d") for x in (key, value))
        keys, values = (rearrange(x, "b h s d -> b s h d") for x in past.update(*new, self.layer_idx))
        if bias_layer is None:
            return keys, values, self.key_bias(values)
        new = rearrange(self.key_bias(value), "b h 1 s -> b h s 1")
        bias, _ = bias_layer.update(new, new[..., :0])
        return keys, values, rearrange(bias, "b h s 1 -> b h 1 s")

    def bias_layer(self, past: Cache) -> DynamicLayer | StaticLayer | None:
        """Where the cache keeps the bias of this layer; None where it is made of all values again."""
        layers, count = past.layers, self.config.num_hidden_layers
        if self.layer_idx == 0 and len(layers) <= count and not past.offloading:
            while len(layers) < count:
                layers.append(past.layer_class_to_replicate())
            empty_ones = not any(layer.is_initialized for layer in layers)
            if empty_ones and all(type(layer) in (DynamicLayer, StaticLayer) for layer in layers):
                layers.extend([like(layer) for layer in layers])
        return layers[count + self.layer_idx] if len(layers) == 2 * count else None

    def visible(self, attention_mask: VisibleKeys | Tensor | None, query: Tensor, key: Tensor, options: dict):
        """What the rows may choose from, as VisibleKeys where nothing else was given."""
        cu_seqlens = options.get("cu_seq_lens_q")
        batch, seqlen_q, seqlen_k = *query.shape[:2], key.shape[1]
        if attention_mask is None:
            pattern = Pattern(is_causal=True)
            attention_mask = VisibleKeys(batch, seqlen_q, seqlen_k, seqlen_k - seqlen_q, pattern, None, query.device)
        if cu_seqlens is None or not isinstance(attention_mask, VisibleKeys):
            return attention_mask
        ids = rearrange(sequence_of_keys(cu_seqlens.int(), batch * seqlen_k), "(b s) -> b s", b=batch)
        return attention_mask.with_documents(ids)


def like(layer: DynamicLayer | StaticLayer) -> DynamicLayer | StaticLayer:
    """Another layer of a cache with as much room."""
    return StaticLayer(layer.max_cache_len) if type(layer) is StaticLayer else DynamicLayer()


def chosen_keys(bias: Tensor, window_size: int, visible: VisibleKeys | Tensor, seqlen_q: int) -> dict[str, object]:
    """The arguments of flash_dmattn_func by which each row sees the window_size keys of largest bias among the visible.

    bias: (B, Hkv, 1, Sk).
    """
    batch, _, _, keys = bias.shape
    if not isinstance(visible, VisibleKeys):  # Doge hides what an additive mask adds anything to
        visible = visible[..., :keys]
        candidates = visible if visible.dtype == torch.bool else visible == 0
        return chosen_of_each_row(bias, window_size, candidates, batch, seqlen_q, keys)
    is_causal, window, _, documents = visible.pattern
    if not is_causal or (window is not None and window[0] >= window_size):  # keys that drop out may return
        return chosen_of_each_row(bias, window_size, visible.to_dense(), batch, seqlen_q, keys)

    if visible.real is not None:
        bias = bias.masked_fill(~rearrange(visible.real, "b keys -> b 1 1 keys"), -torch.inf)
    is_prefix = window is None and documents is None
    if is_prefix and visible.is_causal:
        choice = {"window_size": window_size, "cache_seqlens": visible.cache_seqlens}
        return {"attn_bias": bias, "is_causal": True, **choice}
    if is_prefix:  # of a static cache, with gradients
        mask = topk_of_cache(bias.detach().squeeze(2), window_size, seqlen_q, visible.filled())
        return {"attn_mask": mask, "attn_bias": bias}
    mask = visible.intervals
    if window is None and window_size < keys:
        mask = mask & KeyIntervalMask.topk(ranks_by_document(bias, documents), window_size, seqlen_q)
    return {"attn_mask": mask, "attn_bias": bias, "is_causal": visible.is_causal}


def chosen_of_each_row(
    bias: Tensor, window_size: int, candidates: Tensor, batch: int, seqlen_q: int, keys: int
) -> dict[str, object]:
    """By a bool mask of Sq x Sk: for what rows may see that no prefix of the keys is."""
    mask = create_mask(bias, candidates, batch, seqlen_q, keys, window_size, least(bias.dtype))
    return {"attn_mask": mask, "attn_bias": bias}


@torch.no_grad()
def ranks_by_document(bias: Tensor, documents: Tensor) -> Tensor:
    """float (B, Hkv, 1, S): every key of a document above all before it, and by their bias within it.

    The best w up to a row, of which those of earlier documents are hidden, are then the best of its own document.
    """
    order = bias.argsort(dim=-1, stable=True)
    documents = rearrange(documents, "b keys -> b 1 1 keys").expand(bias.shape)
    order = order.gather(-1, documents.gather(-1, order).argsort(dim=-1, stable=True))
    keys = bias.shape[-1]
    ranks = torch.arange(keys, device=bias.device, dtype=torch.float32 if keys < 2**24 else torch.float64)
    ranks = torch.empty_like(bias, dtype=ranks.dtype).scatter_(-1, order, ranks.expand(bias.shape))
    return ranks.masked_fill(bias <= least(bias.dtype), -torch.inf)
