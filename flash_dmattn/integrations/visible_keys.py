"""Attention masks of transformers models in O(Sk) memory: VisibleKeys and the mask function that creates it."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from operator import and_
from types import CodeType
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils._pytree import tree_map
from transformers import masking_utils

from .. import fallbacks
from ..masks import KeyIntervalMask
from ..masks.topk import NEVER


class Pattern(NamedTuple):
    """The part of a mask that depends on positions only."""

    is_causal: bool = False
    window: tuple[int, int] | None = None  # keys visible before and after the row's own position
    chunk: int | None = None  # chunk size; chunks start at the first key that is not padding
    documents: Tensor | None = None  # integers (B, S): document ids

    def __and__(self, other: Pattern) -> Pattern | None:
        """The intersection, or None if both define the same field."""
        fields = list(zip(self[1:], other[1:]))
        if any(left is not None and right is not None for left, right in fields):
            return None
        return Pattern(self.is_causal or other.is_causal, *(right if left is None else left for left, right in fields))


def _pattern_factories() -> list[tuple[CodeType, Callable[..., Pattern]]]:
    """Pairs (code of a transformers mask function, function from its closure values to a Pattern).

    Skips mask functions whose free variables differ from the parameters here.
    """
    utils, integers = masking_utils, torch.zeros(1, dtype=torch.int64)
    known = (
        (utils.causal_mask_function, lambda: Pattern(is_causal=True)),
        (utils.bidirectional_mask_function, lambda: Pattern()),
        (utils.sliding_window_overlay(1), lambda sliding_window: Pattern(window=(sliding_window - 1, NEVER))),
        (
            utils.sliding_window_bidirectional_overlay(1),
            lambda sliding_window: Pattern(window=(sliding_window, sliding_window)),
        ),
        (utils.chunked_overlay(1, integers), lambda chunk_size, left_padding: Pattern(chunk=chunk_size)),
        (
            utils.packed_sequence_mask_function(integers),
            lambda packed_sequence_mask: Pattern(documents=packed_sequence_mask),
        ),
    )
    codes = [(function.__code__, factory) for function, factory in known]
    return [(code, factory) for code, factory in codes if code.co_freevars == factory.__code__.co_varnames]


_PATTERN_FACTORIES = _pattern_factories()
_AND_MASKS = masking_utils.and_masks(masking_utils.causal_mask_function).__code__
# Newer transformers versions compare position_ids instead of indices; within a document the differences are equal.
_REMAP_POSITIONS = (
    masking_utils.remap_positions_for_packed_sequence(masking_utils.causal_mask_function, None).__code__
    if hasattr(masking_utils, "remap_positions_for_packed_sequence")
    else None
)


def pattern_of(mask_function: Callable) -> Pattern | None:
    """The Pattern of a transformers mask function, or None if it has no equivalent Pattern."""
    code = getattr(mask_function, "__code__", None)
    for known, factory in _PATTERN_FACTORIES:  # not a dict: torch.compile cannot guard its lookups
        if code is known:
            return factory(*closure_values(mask_function))
    if code is not _AND_MASKS or len(closure_values(mask_function)) != 1:
        return None
    pattern, is_remapped = Pattern(), False
    for part in closure_values(mask_function)[0]:
        if _REMAP_POSITIONS is not None and getattr(part, "__code__", None) is _REMAP_POSITIONS:
            part, is_remapped = closure_values(part)[0], True
        part = pattern_of(part)
        pattern = None if pattern is None or part is None else pattern & part
    if is_remapped and pattern is not None and (pattern.documents is None or pattern.chunk is not None):
        return None
    return pattern


def closure_values(function: Callable) -> list:
    return [cell.cell_contents for cell in function.__closure__ or ()]


def traced_pattern(mask_function: Callable, local_size: int | None, causal: bool, full: bool) -> Pattern | None:
    """`pattern_of` under torch.compile, which cannot inspect closures that are created inside the graph.

    Args:
        mask_function: the mask function of transformers.
        local_size: sliding window size, or None.
        causal, full: whether transformers allows SDPA to skip a causal or bidirectional mask: the mask then consists
            of that and the sliding window only.
    """
    if getattr(mask_function, "__code__", None) is not _AND_MASKS:
        return pattern_of(mask_function)
    if local_size is None or not (causal or full):
        return None
    window = (local_size - 1, NEVER) if causal else (local_size, local_size)
    return Pattern(is_causal=causal, window=window)


class VisibleKeys:
    """Replaces the bool mask (B, 1, Sq, Sk) between transformers' mask functions and its attention functions.

    Models pass it through unchanged. A model that indexes it or computes with it gets the bool tensor: PyTorch
    functions, methods and operators apply to `to_dense()`.

    Args:
        batch, seqlen_q, seqlen_k: B, Sq and Sk.
        q_offset: row i has the position of key i + q_offset. An int, or an integer tensor with one element for static
            caches.
        pattern: the mask by position, without a chunk.
        padding_mask: bool (B, Sk), False = padding; None if there is no padding.
        device: the device of the mask.

    Attributes:
        batch, seqlen_q, seqlen_k, q_offset, pattern, padding_mask, device: the arguments.
        intervals: KeyIntervalMask ({B|1}, 1, Sk), or None if every row sees every key.
        is_causal: whether a causal mask, aligned to the bottom right corner, applies in addition to `intervals`.
        cache_seqlens: int32 (B), the number of keys in use, or None. Replaces intervals for causal static caches
            without gradients.
    """

    def __init__(
        self,
        batch: int,
        seqlen_q: int,
        seqlen_k: int,
        q_offset: int | Tensor,
        pattern: Pattern,
        padding_mask: Tensor | None,
        device: torch.device | str,
    ):
        self.batch, self.seqlen_q, self.seqlen_k = batch, seqlen_q, seqlen_k
        self.q_offset, self.pattern, self.padding_mask = q_offset, pattern, padding_mask
        self.device = torch.device(device)
        is_bottom_right = not isinstance(q_offset, Tensor) and q_offset == seqlen_k - seqlen_q
        is_prefix = pattern.is_causal and pattern.window is None and pattern.documents is None
        use_cache_seqlens = is_prefix and not is_bottom_right and not torch.is_grad_enabled()
        self.cache_seqlens = self.key_lengths() if use_cache_seqlens else None
        self.is_causal = pattern.is_causal and (is_bottom_right or use_cache_seqlens)
        self._has_intervals = False

    @property
    def intervals(self) -> KeyIntervalMask | None:
        if not self._has_intervals:  # made on first use: continuous batching uses none
            is_causal = self.pattern.is_causal and not self.is_causal
            self._intervals = self.build_intervals(self.pattern._replace(is_causal=is_causal))
            self._has_intervals = True
        return self._intervals

    def key_lengths(self) -> Tensor:
        """int32 (B): the number of keys up to the position of the last row."""
        rows = torch.full((self.batch,), self.seqlen_q, dtype=torch.int32, device=self.device)
        return (rows + self.q_offset).int()

    def with_documents(self, documents: Tensor) -> VisibleKeys:
        """The same mask with document ids, integers (B, S). Needs Sq = Sk."""
        sizes = (self.batch, self.seqlen_q, self.seqlen_k, self.q_offset)
        return VisibleKeys(*sizes, self.pattern._replace(documents=documents), self.padding_mask, self.device)

    def build_intervals(self, pattern: Pattern) -> KeyIntervalMask | None:
        """`pattern` and the padding mask as intervals; None if every row sees every key."""
        masks = []
        if pattern.is_causal or pattern.window is not None:
            rows = torch.arange(self.seqlen_k, dtype=torch.int32, device=self.device)[None, None] - self.q_offset
            left, right = pattern.window or (NEVER, NEVER)
            left, right = (
                min(size, self.seqlen_q + self.seqlen_k) for size in (left, 0 if self.pattern.is_causal else right)
            )
            start, end = (rows - right).clamp(min=0).int(), (rows + (left + 1)).clamp(min=0).int()
            masks.append(KeyIntervalMask(start, end, keys_per_row=left + right + 1, rows=self.seqlen_q))
        if pattern.documents is not None:
            masks.append(KeyIntervalMask.documents(ids=pattern.documents))
        if self.padding_mask is not None:
            masks.append(KeyIntervalMask.padding(self.padding_mask))
        return reduce(and_, masks) if masks else None

    # Tensor interface

    ndim = 4
    dtype = torch.bool

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.batch, 1, self.seqlen_q, self.seqlen_k))

    def to_dense(self) -> Tensor:
        """bool (B, 1, Sq, Sk), True = visible."""
        if fallbacks.enabled():
            text = "the model computes with it, at Sq x Sk bytes: pass it to the attention unchanged"
            fallbacks.report("dense form of a VisibleKeys", text)
        intervals = self.build_intervals(self.pattern)
        if intervals is None:
            return torch.ones(self.shape, dtype=torch.bool, device=self.device)
        return intervals.to_dense(self.seqlen_q).expand(self.shape)

    def contiguous(self, **kwargs) -> VisibleKeys:
        """transformers' generate calls this."""
        return self

    def to(self, *args, **kwargs) -> VisibleKeys | Tensor:
        """torch.Tensor.to. Returns a VisibleKeys for another device, a dense mask for another dtype."""
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        if dtype not in (None, torch.bool):
            return self.to_dense().to(*args, **kwargs)
        if device is None or device == self.device:
            return self

        def move(part):
            return part.to(device, non_blocking=non_blocking) if isinstance(part, Tensor) else part

        sizes = (self.batch, self.seqlen_q, self.seqlen_k)
        pattern = Pattern(*map(move, self.pattern))
        return VisibleKeys(*sizes, move(self.q_offset), pattern, move(self.padding_mask), device)

    def __getattr__(self, name: str):
        if name.startswith("__"):  # Python protocols, such as copying
            raise AttributeError(f"{type(self).__name__} has no attribute {name}")
        return getattr(self.to_dense(), name)

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        args, kwargs = tree_map(lambda x: x.to_dense() if isinstance(x, cls) else x, (args, kwargs or {}))
        return function(*args, **kwargs)

    def __len__(self) -> int:
        return self.batch

    __hash__ = object.__hash__


def _dense_operator(name: str) -> Callable:
    def operator(self, *others):
        return getattr(self.to_dense(), name)(*(x.to_dense() if isinstance(x, VisibleKeys) else x for x in others))

    return operator


for _name in ("getitem", "and", "rand", "or", "ror", "invert", "eq", "ne"):
    setattr(VisibleKeys, f"__{_name}__", _dense_operator(f"__{_name}__"))


def visible_keys_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable = masking_utils.causal_mask_function,
    attention_mask: Tensor | VisibleKeys | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    device: torch.device | str = "cpu",
    **kwargs,
) -> VisibleKeys | Tensor:
    """transformers' mask function for attn_implementation="flash_dmattn", with the arguments of `sdpa_mask`.

    Returns:
        VisibleKeys if positions and padding define the mask, else bool (B, 1, Sq, Sk). Never None: transformers would
        then use the layer's `is_causal`, which some models set incorrectly.
    """
    if isinstance(attention_mask, VisibleKeys):  # generate creates the mask before the model call for static caches
        return attention_mask
    if torch.compiler.is_compiling():
        pattern = traced_pattern(mask_function, local_size, allow_is_causal_skip, allow_is_bidirectional_skip)
    else:
        pattern = pattern_of(mask_function)
    if pattern is not None and pattern.chunk is not None:
        pattern = pattern._replace(chunk=None) if pattern.chunk >= kv_length + kv_offset else None
    if pattern is None:
        return masking_utils.sdpa_mask(
            *(batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask),
            allow_is_causal_skip=False,
            device=device,
            **kwargs,
        )
    if pattern.window is not None and kv_length - 1 <= min(pattern.window):
        pattern = pattern._replace(window=None)

    causal_end = q_offset + q_length if pattern.is_causal else None
    padding_mask = slice_padding_mask(attention_mask, kv_length, kv_offset, causal_end)
    return VisibleKeys(batch_size, q_length, kv_length, q_offset - kv_offset, pattern, padding_mask, device)


def slice_padding_mask(
    attention_mask: Tensor | None, kv_length: int, kv_offset: int, causal_end: int | Tensor | None
) -> Tensor | None:
    """The part (B, Sk) of a padding mask that covers these keys; None if it masks no key that a row can see.

    Args:
        attention_mask: bool (B, n), False = padding. Keys beyond n are padding.
        kv_length, kv_offset: number of keys and position of the first.
        causal_end: causality masks the keys from this position on; None without causality.
    """
    if attention_mask is None:
        return None
    padding_mask = attention_mask[:, kv_offset : kv_offset + kv_length]
    missing = kv_length - padding_mask.shape[1]
    if not torch.compiler.is_compiling():
        # With a static cache the mask does not cover the unused keys, but causality masks those.
        covers_visible = not missing or (causal_end is not None and attention_mask.shape[1] >= causal_end)
        if bool(padding_mask.all() & covers_visible):
            return None
    return pad(padding_mask, (0, missing)) if missing else padding_mask
