"""Continuous batching of transformers (`model.generate_batch`): attention over the pages of its cache.

A batch packs rows of several requests: chunks of prompts and single tokens. The cache holds keys and values in pages.
transformers has no pages for the biases of a dynamic mask. They are in separate pages with the same page numbers.
"""

from __future__ import annotations

import functools
import inspect
from typing import NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary
from transformers.generation.continuous_batching import PagedAttentionCache, initialization
from transformers.generation.continuous_batching.model_runner import ModelRunner
from transformers.generation.continuous_batching.offloading_manager import OffloadingManager

from ..interface import flash_dmattn_varlen_func
from ..kvcache import flash_dmattn_with_kvcache
from ..masks import KeyIntervalMask
from ..masks.topk import sequence_of_keys
from .versions import CACHE

SLIDING = "sliding_attention"
update_and_gather = PagedAttentionCache.update  # of transformers, which pass_new_keys wraps

# Models whose layers split or repeat the keys or values that the cache's `update` returns. transformers gathers theirs
# from the pages; before 5.24 it does not.
GATHERED = ("diffllama", "jetmoe")


def uses_pages(config, names: tuple[str, ...]) -> bool:
    """Whether attend_to_pages computes the attention of a model in continuous batching; names: of flash_dmattn."""
    return config._attn_implementation in names and config.model_type not in GATHERED


def unsupported(what: str) -> ValueError:
    return ValueError(f"generate_batch with flash_dmattn does not support {what}: use generate")


class CacheLayer(NamedTuple):
    """The cache of one layer.

    Attributes:
        group: the index of the group of layers that share page tables.
        is_first: whether it is the first layer of its group.
        pages: keys and values (pages, page_size, Hkv, D).
        window: the number of keys that a sliding-window layer sees, else None.
    """

    group: int
    is_first: bool
    pages: tuple[Tensor, Tensor] | None
    window: int | None

    @classmethod
    def of(cls, cache: PagedAttentionCache, layer_idx: int) -> CacheLayer:
        if hasattr(cache, "layer_to_allocator"):  # transformers 5.18 and newer
            allocator = cache.layer_to_allocator[layer_idx]
            window = getattr(allocator, "sliding_window", None)
            pages = allocator.get_cache_for_block_table(layer_idx) if window is None else None
            return cls(allocator.index, layer_idx == allocator.layer_indices[0], pages, window)
        group, number = cache.layer_index_to_group_indices[layer_idx]
        shape = (-1, cache.block_size, cache.num_key_value_heads, cache.head_dim)
        pages = cache.key_cache[number].view(shape), cache.value_cache[number].view(shape)
        window = cache.sliding_windows[layer_idx]
        return cls(group, number == 0, pages, None if window == 1 else window)

    @property
    def kind(self) -> str:
        """The layer type, by which transformers passes lengths."""
        return "full_attention" if self.window is None else SLIDING


class Sequences(NamedTuple):
    """The requests of a batch.

    Attributes:
        cu_seqlens_q: int32 (B + 1), the offsets of their rows.
        cu_seqlens_k: int32 (B + 1), the offsets of their keys, those of the new rows included.
        max_seqlen_q, max_seqlen_k: upper bounds of their lengths.
    """

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int

    @classmethod
    def of(cls, batch: dict, kind: str) -> Sequences:
        """Those of transformers' arguments, for layers of one kind.

        Versions before 5.19 have other names, and no dict by kind where all layers are of one.
        """
        max_seqlen_q, *of_keys = (batch.get(f"max_length_{x}", batch.get(f"max_seqlen_{x}")) for x in "qk")
        cu_seqlens_k, max_seqlen_k = (x[kind] if isinstance(x, dict) else x for x in (batch["cu_seq_lens_k"], *of_keys))
        return cls(batch["cu_seq_lens_q"].int(), cu_seqlens_k.int(), max_seqlen_q, max_seqlen_k)


_attended = WeakSet()  # caches that a layer has attended to


@torch.compiler.disable  # caches by tensor, and writes into views of the cache
def attend_to_pages(
    query: Tensor, key: Tensor, value: Tensor, layer_idx: int, batch: dict, bias: Tensor | None = None, **options
) -> Tensor:
    """Writes the new keys, values and biases into the cache, and returns the attention over it, out (rows, H, D).

    Args:
        query: (rows, H, D), the packed rows of all requests.
        key, value: (rows, Hkv, D).
        layer_idx: the number of the layer in the cache.
        batch: transformers' arguments of continuous batching: "cache", "cu_seq_lens_q", ...
        bias: (rows, Hkv): one number per key, added to the scores, or None. NaN masks its key: the warm-up of
            transformers attends to pages that nothing has written, whose NaN reaches the biases of the next layers.
        options: further arguments of flash_dmattn_with_kvcache.

    Raises:
        ValueError: no cache of continuous batching, a model in GATHERED, or a bias in a sliding-window layer.
    """
    cache = batch["cache"]
    if not isinstance(cache, PagedAttentionCache):
        raise ValueError(f"cache must be transformers' PagedAttentionCache, got {type(cache).__name__}")
    if cache.config.model_type in GATHERED:
        raise unsupported(f"{cache.config.model_type} before transformers 5.24")
    _attended.add(cache)
    layer = CacheLayer.of(cache, layer_idx)
    sequences = Sequences.of(batch, layer.kind)
    if layer.window is not None:
        if bias is not None:
            raise ValueError(
                "continuous batching has no dynamic mask in sliding-window layers, whose cache overwrites keys, got "
                f"sliding_window={layer.window}"
            )
        return attend_to_window(query, key, value, layer_idx, batch, sequences, layer.window, options)
    if bias is not None:  # selection refuses NaN, on a GPU by ending the process: one request would stop all others
        bias = bias.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    block_table, cache_seqlens = page_table(layer, batch, sequences)
    return flash_dmattn_with_kvcache(
        *(query, *layer.pages, key, value),
        bias=bias,
        bias_cache=None if bias is None else bias_pages(cache, layer.pages[0], bias.dtype),
        cache_seqlens=cache_seqlens,
        block_table=block_table,
        cu_seqlens_q=sequences.cu_seqlens_q,
        max_seqlen_q=sequences.max_seqlen_q,
        batch_invariant=torch.are_deterministic_algorithms_enabled(),
        **options,
    )


_page_tables = WeakKeyDictionary()  # cache: {group: (cu_seq_lens_q of the batch, block table, lengths)}


def page_table(layer: CacheLayer, batch: dict, sequences: Sequences) -> tuple[Tensor, Tensor]:
    """(block_table, cache_seqlens) of flash_dmattn_with_kvcache.

    The first layer of a batch computes them. It computes them again while a CUDA graph is captured: the batch of the
    eager run before it has the same tensors.
    """
    tables = _page_tables.setdefault(batch["cache"], {})
    source, *table = tables.get(layer.group, (None,))
    if layer.is_first or source is not batch["cu_seq_lens_q"]:
        table = (block_table(layer, batch, sequences), sequences.cu_seqlens_k.diff() - sequences.cu_seqlens_q.diff())
        tables[layer.group] = (batch["cu_seq_lens_q"], *table)
    return tuple(table)


def block_table(layer: CacheLayer, batch: dict, sequences: Sequences) -> Tensor:
    """int32 (B, pages of a sequence): the pages of each sequence. Entries beyond its keys have any value.

    transformers passes page tables for batches of single tokens only. For others it passes the cache slot of every key,
    sequence by sequence: the first slot of each page determines the page number.
    """
    if batch["block_table"] is not None:
        return batch["block_table"][layer.group]
    slots = batch["read_index"][layer.group]
    if slots.numel() == 0:  # no request has keys in the cache
        slots = batch["write_index"][layer.group]
    page_size = layer.pages[0].shape[1]
    firsts = torch.arange(0, sequences.max_seqlen_k, page_size, device=slots.device)
    positions = rearrange(sequences.cu_seqlens_k[:-1], "b -> b 1") + firsts
    return (slots[positions.clamp_(max=slots.numel() - 1)] // page_size).int()


_bias_pages = WeakKeyDictionary()  # cache: {address of keys and values: biases of all pages there}


def bias_pages(cache: PagedAttentionCache, key_pages: Tensor, dtype: torch.dtype) -> Tensor:
    """(pages, page_size, Hkv): the biases of a layer, in pages with the numbers of key_pages; those of a head are
    contiguous in a page.

    Since 5.18 one tensor holds the keys and values of all layers, and page numbers run over all of them: the biases of
    all layers share one tensor, too.
    """
    biases = _bias_pages.setdefault(cache, {})
    storage, page = key_pages.untyped_storage(), key_pages[0].numel()
    address = storage.data_ptr()
    if address not in biases:
        pages = storage.nbytes() // (page * key_pages.itemsize)
        _, page_size, kv_heads, _ = key_pages.shape
        heads_first = torch.zeros(pages, kv_heads, page_size, dtype=dtype, device=key_pages.device)
        biases[address] = heads_first.transpose(1, 2)
    return biases[address].narrow(0, key_pages.storage_offset() // page, key_pages.shape[0])


def attend_to_window(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layer_idx: int,
    batch: dict,
    sequences: Sequences,
    window: int,
    options: dict,
) -> Tensor:
    """attend_to_pages of a sliding-window layer: its cache holds the last keys of each request, in any order of pages,
    and transformers gathers them together with the new ones."""
    cache = batch["cache"]
    key, value = (rearrange(x, "rows h d -> 1 h rows d") for x in (key, value))
    if "kwargs" in inspect.signature(update_and_gather).parameters:  # transformers 5.19 and newer
        key, value = update_and_gather(cache, key, value, layer_idx, dict(batch))
        key, value = (rearrange(x, "1 h keys d -> keys h d") for x in (key, value))
    else:
        key, value = update_and_gather(cache, key, value, layer_idx, batch["read_index"], batch["write_index"])
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k = sequences
    sequence = sequence_of_keys(cu_seqlens_k, key.shape[0]).clamp_(max=cu_seqlens_k.shape[0] - 2)
    last = cu_seqlens_k[1:] - cu_seqlens_q.diff()  # the key of each sequence's first row
    own = torch.arange(key.shape[0], dtype=torch.int32, device=key.device) - last[sequence]  # the row of each key
    end = rearrange(own + window, "keys -> keys 1").clamp(min=0)
    mask = KeyIntervalMask(torch.zeros_like(end), end, keys_per_row=window)
    return flash_dmattn_varlen_func(
        *(query, key, value, mask, None, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k),
        is_causal=True,
        **options,
    )


def has_biases(cache: PagedAttentionCache) -> bool:
    return cache in _bias_pages


_caches = WeakTensorKeyDictionary()  # new keys and values of a layer: the cache that they belong to


@torch.compiler.disable
def set_cache(cache: PagedAttentionCache, key: Tensor, value: Tensor) -> None:
    _caches[key] = _caches[value] = cache


@torch.compiler.disable
def cache_of(module: nn.Module, key: Tensor, value: Tensor) -> PagedAttentionCache:
    """The cache that new keys and values belong to. Layers that share keys do not call `update`: theirs are found, too.

    Raises:
        ValueError: the layer has changed them since `update`: changed ones do not belong into the cache.
    """
    if key not in _caches or value not in _caches:
        raise unsupported(f"{type(module).__name__}, which changes the keys or values that its cache returns")
    return _caches[key]


def pass_new_keys(names: tuple[str, ...]) -> None:
    """Makes models pass their new keys and values to the attention function, as before transformers 5.24.

    Since then they pass what `update` of the cache returns: for a batch with chunks of prompts the keys and values of
    all requests, gathered from the pages.
    """
    if CACHE != "cache":
        return

    @functools.wraps(update_and_gather)
    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, kwargs: dict) -> tuple[Tensor, Tensor]:
        if not uses_pages(self.config, names):
            return update_and_gather(self, key_states, value_states, layer_idx, kwargs)
        set_cache(self, key_states, value_states)
        return key_states, value_states

    PagedAttentionCache.update = update


def require_attention_to_pages(names: tuple[str, ...]) -> None:
    """Makes a batch fail if no layer has attended to the cache.

    A few models do not pass the cache to the attention function, which then takes the batch for one sequence.
    """
    compute = ModelRunner.compute_batch

    @functools.wraps(compute)
    def computed(self, model: nn.Module, batch_data: dict) -> None:
        compute(self, model, batch_data)
        if uses_pages(self.cache.config, names) and self.cache not in _attended:
            raise unsupported(f"{type(model).__name__}, which does not pass its cache to the attention function")

    ModelRunner.compute_batch = computed


def accept_page_tables(names: tuple[str, ...]) -> None:
    """Makes transformers pass page tables for batches of single tokens, which it does for FlashAttention 2 and 3 only.
    transformers then prepares the page numbers of a request instead of the cache slots of all its keys."""
    check = initialization.ensure_decode_fast_path_is_available

    @functools.wraps(check)
    def checked(config, cb_config, *args, **kwargs):
        if config._attn_implementation not in names:
            check(config, cb_config, *args, **kwargs)
        elif uses_windows(config) or config.model_type in GATHERED:
            cb_config.max_blocks_per_request = 0

    initialization.ensure_decode_fast_path_is_available = checked


def uses_windows(config) -> bool:
    kinds = getattr(config, "layer_types", None)
    return getattr(config, "sliding_window", None) is not None if kinds is None else SLIDING in kinds


def recompute_biases() -> None:
    """Makes transformers compute the prompt again where it would copy pages: it copies keys and values only.

    It copies them for further sequences of one prompt, and when it moves requests to the CPU and back.
    """

    def unless(has_biases, method, otherwise):
        @functools.wraps(method)
        def wrapped(self, *args, **kwargs):
            return otherwise if has_biases(self) else method(self, *args, **kwargs)

        return wrapped

    for owner, name, holds, otherwise in (
        (PagedAttentionCache, "prepare_fork_request", has_biases, []),
        (PagedAttentionCache, "compute_max_num_forks", has_biases, 0),  # before 5.18
        (OffloadingManager, "_offload_to_cpu", lambda manager: has_biases(manager.cache), set()),
    ):
        if hasattr(owner, name):
            setattr(owner, name, unless(holds, getattr(owner, name), otherwise))
