"""What the rows of a transformers model see, said without a mask of Sq x Sk."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from operator import and_
from types import CodeType
from typing import NamedTuple

import torch
import transformers
from packaging.version import Version
from torch import Tensor
from torch.nn.functional import pad
from torch.utils._pytree import tree_map
from transformers import masking_utils

from ..masks import KeyIntervalMask
from ..masks.topk import NEVER

OLDEST = "5.17"


def require_version(version: str) -> None:
    if Version(version) < Version(OLDEST):
        raise ImportError(f"flash_dmattn.integrations.transformers needs transformers {OLDEST} or newer, got {version}")


require_version(transformers.__version__)


class Pattern(NamedTuple):
    """The part of a mask that positions decide."""

    is_causal: bool = False
    window: tuple[int, int] | None = None  # how many keys a row sees before and after its own
    chunk: int | None = (
        None  # the size of the chunks, counted from the first key that is no padding, that see themselves
    )
    documents: Tensor | None = None  # integers (B, S): a run of equal ones is a document

    def __and__(self, other: Pattern) -> Pattern | None:
        """What both let be seen; None where both have a part of the same kind."""
        pairs = list(zip(self[1:], other[1:]))
        if any(mine is not None and theirs is not None for mine, theirs in pairs):
            return None
        return Pattern(self.is_causal or other.is_causal, *(theirs if mine is None else mine for mine, theirs in pairs))


def _overlays() -> list[tuple[CodeType, Callable[..., Pattern]]]:
    """The functions of indices by which transformers says what is seen, by their code, and what makes the Pattern of
    what such a function holds. One that holds something else than here is left out."""
    integers = torch.zeros(1, dtype=torch.int64)
    known = (
        (masking_utils.causal_mask_function, (), lambda: Pattern(is_causal=True)),
        (masking_utils.bidirectional_mask_function, (), Pattern),
        (
            masking_utils.sliding_window_overlay(1),
            ("sliding_window",),
            lambda size: Pattern(window=(size - 1, NEVER)),
        ),
        (
            masking_utils.sliding_window_bidirectional_overlay(1),
            ("sliding_window",),
            lambda size: Pattern(window=(size, size)),
        ),
        (
            masking_utils.chunked_overlay(1, integers),
            ("chunk_size", "left_padding"),
            lambda size, first: Pattern(chunk=size),
        ),
        (
            masking_utils.packed_sequence_mask_function(integers),
            ("packed_sequence_mask",),
            lambda ids: Pattern(documents=ids),
        ),
    )
    return [(function.__code__, make) for function, holds, make in known if function.__code__.co_freevars == holds]


_OVERLAYS = _overlays()
_BOTH = masking_utils.and_masks(masking_utils.causal_mask_function).__code__
# Later versions look at position_ids in the place of places, which within a document differ alike.
_BY_POSITION = (
    masking_utils.remap_positions_for_packed_sequence(masking_utils.causal_mask_function, None).__code__
    if hasattr(masking_utils, "remap_positions_for_packed_sequence")
    else None
)


def pattern_of(mask_function: Callable) -> Pattern | None:
    """What a mask function of transformers says; None where it is no Pattern."""
    code = getattr(mask_function, "__code__", None)
    for known, make in _OVERLAYS:  # no dict, whose lookups torch.compile cannot guard
        if code is known:
            return make(*held_by(mask_function))
    if code is not _BOTH or len(held_by(mask_function)) != 1:
        return None
    pattern, by_position = Pattern(), False
    for part in held_by(mask_function)[0]:
        if _BY_POSITION is not None and getattr(part, "__code__", None) is _BY_POSITION:
            part, by_position = held_by(part)[0], True
        part = pattern_of(part)
        pattern = None if pattern is None or part is None else pattern & part
    if by_position and pattern is not None and (pattern.documents is None or pattern.chunk is not None):
        return None
    return pattern


def held_by(function: Callable) -> list:
    return [cell.cell_contents for cell in function.__closure__ or ()]


def plain_pattern(mask_function: Callable, local_size: int | None, causal: bool, bidirectional: bool) -> Pattern | None:
    """The same under torch.compile, which cannot look into functions that were made within the graph: by what
    transformers lets SDPA leave out. causal, bidirectional: whether nothing but that and local_size, the size of a
    sliding window, is said, so that a mask may be skipped."""
    if getattr(mask_function, "__code__", None) is not _BOTH:
        return pattern_of(mask_function)
    if local_size is None or not (causal or bidirectional):
        return None
    window = (local_size - 1, NEVER) if causal else (local_size, local_size)
    return Pattern(is_causal=causal, window=window)


class VisibleKeys:
    """What stands in for the bool mask (B, 1, Sq, Sk) between transformers' mask functions and its attention.

    A model hands it on without looking. One that computes with it, or takes a part of it, finds the bool tensor: every
    function and method of PyTorch and every operator works on `to_dense()`.

    Args:
        batch, seqlen_q, seqlen_k: B, Sq and Sk.
        lead: row i stands at key i + lead. An int, or one integer on the device, as of a static cache.
        pattern: what positions decide; no chunk.
        real: bool (B, Sk), False = padding; None where there is none.
        device: where the mask is.

    Attributes:
        batch, seqlen_q, seqlen_k, lead, pattern, real, device: as given.
        intervals: KeyIntervalMask ({B|1}, 1, Sk); None where every row may see every key.
        is_causal: whether causality, aligned at the bottom right, comes beside the intervals.
        cache_seqlens: int32 (B), how many of the keys there are, where that says it and no gradients are wanted.
    """

    def __init__(
        self,
        batch: int,
        seqlen_q: int,
        seqlen_k: int,
        lead: int | Tensor,
        pattern: Pattern,
        real: Tensor | None,
        device: torch.device | str,
    ):
        self.batch, self.seqlen_q, self.seqlen_k = batch, seqlen_q, seqlen_k
        self.lead, self.pattern, self.real, self.device = lead, pattern, real, torch.device(device)
        at_the_end = not isinstance(lead, Tensor) and lead == seqlen_k - seqlen_q
        is_prefix = pattern.is_causal and pattern.window is None and pattern.documents is None
        by_length = is_prefix and not at_the_end and not torch.is_grad_enabled()
        self.cache_seqlens = self.filled() if by_length else None
        self.is_causal = pattern.is_causal and (at_the_end or by_length)
        self.intervals = self.intervals_of(pattern._replace(is_causal=pattern.is_causal and not self.is_causal))

    def filled(self) -> Tensor:
        """int32 (B): the number of keys up to that at which the last row stands."""
        rows = torch.full((self.batch,), self.seqlen_q, dtype=torch.int32, device=self.device)
        return (rows + self.lead).int()

    def with_documents(self, documents: Tensor) -> VisibleKeys:
        """Of rows that see only their own document, which integers (B, S) say; of the same rows as keys."""
        sizes = (self.batch, self.seqlen_q, self.seqlen_k, self.lead)
        return VisibleKeys(*sizes, self.pattern._replace(documents=documents), self.real, self.device)

    def intervals_of(self, pattern: Pattern) -> KeyIntervalMask | None:
        """What a pattern shows of the keys that are no padding."""
        masks = []
        if pattern.is_causal or pattern.window is not None:
            own = torch.arange(self.seqlen_k, dtype=torch.int32, device=self.device)[None, None] - self.lead  # rows
            left, right = pattern.window or (NEVER, NEVER)
            left, right = (
                min(size, self.seqlen_q + self.seqlen_k) for size in (left, 0 if self.pattern.is_causal else right)
            )
            start, end = (own - right).clamp(min=0).int(), (own + (left + 1)).clamp(min=0).int()
            masks.append(KeyIntervalMask(start, end, keys_per_row=left + right + 1, rows=self.seqlen_q))
        if pattern.documents is not None:
            masks.append(KeyIntervalMask.documents(ids=pattern.documents))
        if self.real is not None:
            masks.append(KeyIntervalMask.padding(self.real))
        return reduce(and_, masks) if masks else None

    # As a tensor

    ndim = 4
    dtype = torch.bool

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.batch, 1, self.seqlen_q, self.seqlen_k))

    def to_dense(self) -> Tensor:
        """bool (B, 1, Sq, Sk), True = visible."""
        intervals = self.intervals_of(self.pattern)
        if intervals is None:
            return torch.ones(self.shape, dtype=torch.bool, device=self.device)
        return intervals.to_dense(self.seqlen_q).expand(self.shape)

    def contiguous(self, **kwargs) -> VisibleKeys:
        """As generate asks of a mask."""
        return self

    def to(self, *args, **kwargs) -> VisibleKeys | Tensor:
        """As of a tensor: to another device it stays what it is, in another dtype it is dense."""
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        if dtype not in (None, torch.bool):
            return self.to_dense().to(*args, **kwargs)
        if device is None or device == self.device:
            return self

        def move(part):
            return part.to(device, non_blocking=non_blocking) if isinstance(part, Tensor) else part

        sizes = (self.batch, self.seqlen_q, self.seqlen_k)
        pattern = Pattern(*map(move, self.pattern))
        return VisibleKeys(*sizes, move(self.lead), pattern, move(self.real), device)

    def __getattr__(self, name: str):
        if name.startswith("__"):  # what Python asks of any object
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
    """transformers' mask function of attn_implementation="flash_dmattn", with the arguments of `sdpa_mask` there.

    Returns:
        VisibleKeys where positions and padding say what is seen; else bool (B, 1, Sq, Sk). Never None, which leaves
        causality to a flag of the layer: not every model of transformers sets it right.
    """
    if isinstance(attention_mask, VisibleKeys):  # made before the call of the model, as generate does for static caches
        return attention_mask
    if torch.compiler.is_compiling():
        pattern = plain_pattern(mask_function, local_size, allow_is_causal_skip, allow_is_bidirectional_skip)
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

    return VisibleKeys(
        *(batch_size, q_length, kv_length, q_offset - kv_offset, pattern),
        real_keys(attention_mask, kv_length, kv_offset, q_offset + q_length if pattern.is_causal else None),
        device,
    )


def real_keys(
    attention_mask: Tensor | None, kv_length: int, kv_offset: int, rows_end: int | Tensor | None
) -> Tensor | None:
    """bool (B, Sk) of a padding mask (B, Sk or less), beyond which all is padding; None where no key is that a row may
    see. rows_end: behind which key causality hides all, if it does."""
    if attention_mask is None:
        return None
    real = attention_mask[:, kv_offset : kv_offset + kv_length]
    missing = kv_length - real.shape[1]
    if not torch.compiler.is_compiling():
        # Of a static cache the mask does not reach the keys that are not there yet, but causality hides those.
        reaches = not missing or (rows_end is not None and attention_mask.shape[1] >= rows_end)
        if bool(real.all() & reaches):
            return None
    return pad(real, (0, missing)) if missing else real
