"""An attention problem: its sizes, its mask and bias, and the tensors made from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flash_dmattn import KeyIntervalMask, create_mask

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}


# Values of a mask, from uniform random numbers of its shape.


def half_visible(uniform: Tensor) -> Tensor:
    return uniform < 0.5


def padded(uniform: Tensor) -> Tensor:
    """The keys up to a random length, at least one."""
    positions = torch.arange(uniform.shape[-1], device=uniform.device)
    return positions <= uniform[..., :1] * uniform.shape[-1]


def blank_rows(uniform: Tensor) -> Tensor:
    mask = half_visible(uniform)
    mask[:, :, ::3] = False
    return mask


def blank_tiles(uniform: Tensor) -> Tensor:
    """The first half of the rows sees no key, and no row sees the first half of the keys."""
    mask = half_visible(uniform)
    mask[:, :, : mask.shape[2] // 2] = False
    mask[..., : mask.shape[3] // 2] = False
    return mask


def blank_head(uniform: Tensor) -> Tensor:
    mask = half_visible(uniform)
    mask[:, 0] = False
    return mask


def nothing_visible(uniform: Tensor) -> Tensor:
    return torch.zeros_like(uniform, dtype=torch.bool)


# Values of a bias, from normal random numbers of its shape.


def unchanged(normal: Tensor) -> Tensor:
    return normal


def some_minus_inf(normal: Tensor) -> Tensor:
    return normal.masked_fill(normal < -0.5, -torch.inf)


def all_minus_inf_at_head(normal: Tensor) -> Tensor:
    bias = some_minus_inf(normal)
    bias[:, 0] = -torch.inf
    return bias


@dataclass(frozen=True)
class Problem:
    """Masks and biases are given by their shapes, as "B Hkv Sq Sk" or "1 H 1 Sk"."""

    name: str
    batch: int
    heads: int
    kv_heads: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    is_causal: bool = False
    softmax_scale: float | None = None
    softcap: float = 0.0
    mask: str | None = None
    mask_values: Callable[[Tensor], Tensor] = half_visible
    bias: str | None = None
    bias_values: Callable[[Tensor], Tensor] = unchanged
    bias_dtype: torch.dtype | None = None  # None: query's
    window: int | None = None  # a row sees this many keys of largest bias; instead of `mask`
    as_intervals: bool = False  # whether the mask of `window` is a KeyIntervalMask, not a bool one
    intervals: Callable[[int, str], KeyIntervalMask] | None = None  # from length and device; instead of `mask`
    packed: bool = False  # whether flash_dmattn takes the batch elements, or the documents of one, as packed sequences
    max_seqlen: int | None = None  # of a packed call; None: their length
    uses_lse: bool = True  # whether lse has a gradient

    @property
    def max_seqlens(self) -> tuple[int, int]:
        """max_seqlen_q and max_seqlen_k of a packed call."""
        return self.max_seqlen or self.seqlen_q, self.max_seqlen or self.seqlen_k

    def shape_of(self, layout: str) -> tuple[int, ...]:
        sizes = {"B": self.batch, "H": self.heads, "Hkv": self.kv_heads, "Sq": self.seqlen_q, "Sk": self.seqlen_k}
        return tuple(sizes.get(label) if label != "1" else 1 for label in layout.split())


@dataclass(frozen=True)
class Inputs:
    problem: Problem
    query: Tensor  # (B, Sq, H, D)
    key: Tensor  # (B, Sk, Hkv, D)
    value: Tensor  # (B, Sk, Hkv, D)
    mask: Tensor | KeyIntervalMask | None
    bias: Tensor | None
    dout: Tensor  # (B, Sq, H, D)
    dlse: Tensor  # (B, H, Sq)

    def map(self, function: Callable[[Tensor], Tensor]) -> Inputs:
        """`function` applied to every tensor."""
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **{name: function(tensor) for name, tensor in tensors.items()})

    def requiring_grad(self) -> Inputs:
        leaves = {name: tensor.detach().requires_grad_() for name, tensor in self.leaves().items()}
        return replace(self, **leaves)

    def leaves(self) -> dict[str, Tensor]:
        """The tensors that have a gradient, by name."""
        leaves = {"query": self.query, "key": self.key, "value": self.value, "bias": self.bias}
        return {name: tensor for name, tensor in leaves.items() if tensor is not None}

    def cu_seqlens(self) -> Tensor:
        """The boundaries of a packed call: of the batch elements, or of the documents of one."""
        if self.problem.intervals is None:
            ends = torch.arange(1, self.problem.batch + 1, device=self.query.device) * self.problem.seqlen_q
        else:
            assert self.problem.batch == 1, self.problem
            ends = self.mask.end.unique()
        return torch.cat([ends.new_zeros(1), ends]).int()

    def bool_mask(self) -> Tensor | None:
        """The mask as a bool tensor."""
        sparse = isinstance(self.mask, KeyIntervalMask)
        return self.mask.to_dense(self.problem.seqlen_q) if sparse else self.mask

    def attend(self, attention: Callable[..., tuple[Tensor, Tensor]], **options) -> tuple[Tensor, Tensor]:
        """(out, lse) of a function with `flash_dmattn_func`'s arguments."""
        return attention(
            *(self.query, self.key, self.value, self.mask, self.bias),
            softmax_scale=self.problem.softmax_scale,
            is_causal=self.problem.is_causal,
            softcap=self.problem.softcap,
            return_lse=True,
            **options,
        )


@dataclass(frozen=True)
class Indexed(Problem):
    """Keys named by indices: each run of `tile_rows` query rows has the keys that its last row sees."""

    tile_rows: int = 1
    at_random: bool = False  # any `window` keys instead, so that neighbouring rows share keys only by chance

    def indices(self, mask: KeyIntervalMask) -> Tensor:
        """int32 (1, heads of the mask, tiles of rows, window), -1 for none."""
        rows = torch.arange(self.seqlen_q, device=mask.device).split(self.tile_rows)
        last = torch.stack([tile[-1] for tile in rows])
        return torch.stack([self._of_head(*interval, last) for interval in mask.intervals[:, 0].unbind(1)])[None]

    def _of_head(self, start: Tensor, end: Tensor, rows: Tensor) -> Tensor:
        def of_some(row: Tensor) -> Tensor:
            seen = (start <= row[:, None]) & (row[:, None] < end)
            scores = torch.rand(seen.shape, device=seen.device) if self.at_random else seen.byte()
            best = scores.topk(self.window, sorted=False)
            return best.indices.int().masked_fill(best.values == 0, -1)

        return torch.cat(list(map(of_some, rows.split(1024))))  # a bool for each score may not fit


def square(name: str, batch: int, heads: int, seqlen: int, head_dim: int, **options) -> Problem:
    """As many keys as rows, and as many KV heads as query heads unless the options differ."""
    options = {"kv_heads": heads, "seqlen_q": seqlen, "seqlen_k": seqlen} | options
    return Problem(name, batch=batch, heads=heads, head_dim=head_dim, **options)


def top_k(name: str, seqlen: int, window: int, heads: int, kv_heads: int, head_dim: int, **options) -> Problem:
    """Causal; each row sees the `window` keys of largest bias up to its own. Each KV head has its own bias."""
    sizes = {"batch": 1, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    lengths = {"seqlen_q": seqlen, "seqlen_k": seqlen}
    mask = {"is_causal": True, "bias": "B Hkv 1 Sk", "window": window, "as_intervals": True}
    return Problem(name, **(sizes | lengths | mask | options))


def indexed(name: str, seqlen: int, window: int, *sizes: int, tile_rows: int, at_random: bool = False) -> Indexed:
    return Indexed(**vars(top_k(name, seqlen, window, *sizes)), tile_rows=tile_rows, at_random=at_random)


def named(label: str, problem: Problem) -> Problem:
    """With the sizes in its name, as "causal, B1 H32/8 S4096 D128": 32 query heads, 8 KV heads."""
    heads = f"H{problem.heads}" + (f"/{problem.kv_heads}" if problem.kv_heads != problem.heads else "")
    if problem.seqlen_q == problem.seqlen_k:
        seqlen = f"S{problem.seqlen_k}"
    else:
        seqlen = ("" if problem.seqlen_q == 1 else f"Sq{problem.seqlen_q} ") + f"Sk{problem.seqlen_k}"
    window = f" w{problem.window}" if problem.window else ""
    sizes = f"B{problem.batch} {heads} {seqlen} D{problem.head_dim}{window}"
    return replace(problem, name=f"{label}, {sizes}" if label else sizes)


def shrunk(workload, by: int):
    """The workload with its lengths and windows divided; a workload with a method `shrunk` uses that."""
    if by == 1:
        return workload
    if hasattr(workload, "shrunk"):
        return workload.shrunk(by)
    lengths = {
        name: getattr(workload, name, None) for name in ("seqlen", "seqlen_q", "seqlen_k", "max_seqlen", "window", "n")
    }
    return replace(workload, **{name: max(1, size // by) for name, size in lengths.items() if size})


def make_inputs(problem: Problem, dtype: torch.dtype, device: str, seed: int) -> Inputs:
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    rows = (problem.batch, problem.seqlen_q, problem.heads, problem.head_dim)
    keys = (problem.batch, problem.seqlen_k, problem.kv_heads, problem.head_dim)
    query, key, value = normal(*rows), normal(*keys), normal(*keys)
    lse_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    # Small, so that sums over many rows round within the absolute part of the tolerance (equivalence.py).
    dout, dlse = normal(*rows) / 8, normal(*problem.shape_of("B H Sq"), dtype=lse_dtype) / 8

    mask = bias = None
    if problem.bias is not None:
        bias = problem.bias_values(normal(*problem.shape_of(problem.bias), dtype=problem.bias_dtype or dtype))
    if problem.mask is not None:
        uniform = torch.rand(problem.shape_of(problem.mask), generator=generator, device=device)
        mask = problem.mask_values(uniform)
    elif problem.intervals is not None:
        mask = problem.intervals(problem.seqlen_k, device)
    elif problem.window is not None:
        mask = dynamic_mask(problem, bias)
    return Inputs(problem, query, key, value, mask, bias, dout, dlse)


def causal_pairs(problem: Problem, device: torch.device) -> Tensor:
    """bool (1, 1, Sq, Sk)"""
    pairs = torch.ones(1, 1, problem.seqlen_q, problem.seqlen_k, dtype=torch.bool, device=device)
    return pairs.tril(problem.seqlen_k - problem.seqlen_q)


def dynamic_mask(problem: Problem, bias: Tensor) -> Tensor | KeyIntervalMask:
    """Shows each row its `window` keys of largest bias."""
    if problem.as_intervals:
        return KeyIntervalMask.topk(bias, problem.window, problem.seqlen_q)
    allowed = causal_pairs(problem, bias.device) if problem.is_causal else None
    sizes = (problem.batch, problem.seqlen_q, problem.seqlen_k)
    return create_mask(bias, allowed, *sizes, problem.window, torch.finfo(bias.dtype).min)


def surrounded(tensor: Tensor) -> Tensor:
    """The same values as a slice of a larger buffer that holds NaN (True in a mask) everywhere else.

    A read beyond the tensor then changes the result. The last dimension's margin keeps rows aligned to 16 bytes.
    """
    margins = [1] * (tensor.ndim - 1) + [8]
    sizes = [size + 2 * margin for size, margin in zip(tensor.shape, margins)]
    buffer = tensor.new_full(sizes, True if tensor.dtype == torch.bool else torch.nan)
    inside = buffer[tuple(slice(margin, margin + size) for size, margin in zip(tensor.shape, margins))]
    return inside.copy_(tensor)
