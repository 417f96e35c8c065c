"""The implementations that the suites compare: each function takes inputs and returns an Operation.

SDPA takes mask and bias as one float mask and FlexAttention takes a block mask; both are made beforehand and not timed.
For a packed batch flash_dmattn and FlashAttention-4 get the sequences' boundaries as a tensor on the device. The others
know that all sequences have one length, or get packed documents as a mask.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from problem import Inputs, causal_pairs
from timing import Call, Operation, captured
from torch import Tensor
from torch._functorch import config as functorch_config
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from flash_dmattn import KeyLists, flash_dmattn_func_auto, flash_dmattn_varlen_func
from flash_dmattn.backends import flex, reference

OURS = "flash_dmattn"
OURS_TILES = f"{OURS}, tiles"
SDPA, FLEX, FLASH2, FLASH4, CUDNN = "SDPA", "FlexAttention", "FlashAttention-2", "FlashAttention-4", "cuDNN"
CUDNN_ALL, CUDNN_DENSE = "cuDNN, all keys", "cuDNN, dense S x w"
BY_HAND, DENSE = "top-k by hand", "SDPA, all keys"
FLEX_SCORES = 2**31

Build = Callable[[Inputs], Operation]


# flash_dmattn


def ours(backend: str, inputs: Inputs) -> Operation:
    if inputs.problem.packed and backend == inputs.query.device.type:  # the other backends take no packed batches
        return packed(inputs)
    attention = flash_dmattn_func_auto(backend)
    return Operation(lambda: inputs.attend(attention)[0], list(inputs.leaves().values()))


def packed(inputs: Inputs) -> Operation:
    problem, leaves = inputs.problem, [inputs.query, inputs.key, inputs.value]
    cu_seqlens = inputs.cu_seqlens()

    def forward() -> Tensor:
        tensors = [leaf.flatten(0, 1) for leaf in leaves]
        lengths = (cu_seqlens, cu_seqlens, *problem.max_seqlens)
        out = flash_dmattn_varlen_func(*tensors, None, None, *lengths, is_causal=problem.is_causal)
        return out.unflatten(0, (problem.batch, -1))

    return Operation(forward, leaves)


def ours_sparse(backend: str, sparse: str, inputs: Inputs) -> Operation:
    """The call builds its key lists from the mask. For a single row they are built beforehand."""
    if inputs.problem.seqlen_q == 1 and sparse != "tiles":
        inputs = replace(inputs, mask=KeyLists.build(inputs.bool_mask(), 1))
    attention = flash_dmattn_func_auto(backend)
    return Operation(lambda: inputs.attend(attention, sparse=sparse)[0], list(inputs.leaves().values()))


def ours_indexed(backend: str, inputs: Inputs) -> Operation:
    """The call builds its key lists from indices made beforehand."""
    attention, make_lists = flash_dmattn_func_auto(backend), lists_of_indices(inputs)

    def forward() -> Tensor:
        return replace(inputs, mask=make_lists()).attend(attention)[0]

    return Operation(forward, list(inputs.leaves().values()))


def lists_of_indices(inputs: Inputs) -> Callable[[], KeyLists]:
    problem = inputs.problem
    indices, lengths = problem.indices(inputs.mask), (problem.seqlen_q, problem.seqlen_k)
    return lambda: KeyLists.from_indices(indices, *lengths, problem.is_causal, tile_rows=problem.tile_rows)


def whole_call(attention: Callable[..., Tensor], inputs: Inputs, **options) -> Operation:
    """A call as a user writes it: with `window_size` it selects the keys itself."""
    problem, mask = inputs.problem, inputs.mask
    if problem.window is not None:
        mask, options = None, options | {"window_size": problem.window}
    tensors = (inputs.query, inputs.key, inputs.value, mask, inputs.bias)
    options = options | {"is_causal": problem.is_causal}
    leaves = [leaf for leaf in inputs.leaves().values() if leaf.requires_grad]
    return Operation(lambda: attention(*tensors, **options), leaves)


def takes_lengths(attention: Callable[..., Tensor]) -> bool:
    return "cache_seqlens" in inspect.signature(attention).parameters


def from_cache(attention: Callable[..., Tensor], inputs: Inputs, divisor: int, device: str) -> Call:
    """One CUDA graph for a preallocated cache, to be timed with 1 / divisor of it filled.

    Its results are compared with those of calls that get only the filled part.
    """
    problem = inputs.problem
    lengths = torch.full((problem.batch,), problem.seqlen_k, dtype=torch.int32, device=device)
    replay = captured(whole_call(attention, inputs, cache_seqlens=lengths).forward, device)
    for part in (8, 3, 1):
        length = max(1, problem.seqlen_k // part)
        lengths.fill_(length)
        expected = whole_call(attention, filled(inputs, length)).forward()
        torch.testing.assert_close(replay(), expected, rtol=2e-2, atol=1e-3)
    lengths.fill_(max(1, problem.seqlen_k // divisor))
    return replay


def filled(inputs: Inputs, length: int) -> Inputs:
    """The first keys of a cache."""
    key, value = (cache[:, :length] for cache in (inputs.key, inputs.value))
    return replace(inputs, key=key, value=value, bias=inputs.bias[..., :length])


# SDPA, with the mask and bias


def needs_float_mask(inputs: Inputs) -> bool:
    problem = inputs.problem
    # PyTorch aligns causality to the top left corner.
    causal_in_mask = problem.is_causal and problem.seqlen_q != problem.seqlen_k
    return inputs.mask is not None or inputs.bias is not None or causal_in_mask


def sdpa(inputs: Inputs) -> Operation:
    problem = inputs.problem
    leaves = [inputs.query, inputs.key, inputs.value]
    needs_mask = needs_float_mask(inputs)
    mask = float_mask(inputs).requires_grad_(inputs.query.requires_grad) if needs_mask else None

    def forward() -> Tensor:
        query, key, value = leaves
        if problem.kv_heads < problem.heads:  # not all of its kernels take enable_gqa=True
            key, value = (x.repeat_interleave(problem.heads // problem.kv_heads, dim=2) for x in (key, value))
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        is_causal = problem.is_causal and not needs_mask
        return scaled_dot_product_attention(query, key, value, mask, is_causal=is_causal).transpose(1, 2)

    return Operation(forward, [*leaves, mask] if needs_mask else leaves)


@torch.no_grad()
def float_mask(inputs: Inputs) -> Tensor:
    """Mask, bias and causality as SDPA takes them: added to the scores, in query's dtype."""
    problem, query = inputs.problem, inputs.query
    visible = causal_pairs(problem, query.device) if problem.is_causal else query.new_ones(1, 1, 1, 1, dtype=torch.bool)
    if inputs.mask is not None:
        visible = visible & reference.expand_shared(inputs.bool_mask(), problem.batch, problem.heads)
    bias = query.new_zeros(1, 1, 1, problem.seqlen_k)
    if inputs.bias is not None:
        bias = reference.expand_shared(inputs.bias, problem.batch, problem.heads).to(query.dtype)
    return torch.where(visible, bias, -torch.inf)


def sdpa_by(backend: SDPBackend, name: str) -> Build:
    """SDPA by one of its kernels alone, without mask and bias."""

    def peer(inputs: Inputs) -> Operation:
        if needs_float_mask(inputs):
            raise ValueError(f"{name} is compared without mask and bias")
        operation = sdpa(inputs)

        def forward() -> Tensor:
            with sdpa_kernel(backend):
                return operation.forward()

        return Operation(forward, operation.leaves)

    return peer


def sdpa_in_its_layout(inputs: Inputs) -> Operation:
    """(B, H, S, D). With a window, which SDPA does not know, it gets neither mask nor bias."""
    problem = inputs.problem
    tensors = [inputs.query, inputs.key, inputs.value]
    leaves = [x.detach().transpose(1, 2).contiguous().requires_grad_(x.requires_grad) for x in tensors]
    if problem.window is None and inputs.bias is not None:
        leaves.append(float_mask(inputs).contiguous().requires_grad_(inputs.bias.requires_grad))
    options = {"is_causal": problem.is_causal and len(leaves) == 3, "enable_gqa": problem.kv_heads < problem.heads}
    return Operation(
        lambda: scaled_dot_product_attention(*leaves, **options),
        [leaf for leaf in leaves if leaf.requires_grad],
    )


# FlexAttention, cuDNN


def flex_attention(inputs: Inputs) -> Operation:
    # Its compiled backward otherwise reuses saved tensors as scratch memory, and can run only once.
    functorch_config.donated_buffer = False
    problem = inputs.problem
    block_mask = flex.block_mask_of(inputs.query, inputs.key, inputs.mask, problem.is_causal)
    options = {"softmax_scale": problem.head_dim**-0.5, "is_causal": problem.is_causal, "softcap": problem.softcap}
    tensors = (inputs.query, inputs.key, inputs.value, None, inputs.bias)

    def forward() -> Tensor:
        return flex.attention(*tensors, **options, deterministic=False, block_mask=block_mask)[0]

    return Operation(forward, list(inputs.leaves().values()))


def flex_where_it_fits(inputs: Inputs) -> Operation:
    if inputs.problem.seqlen_q * inputs.problem.seqlen_k > FLEX_SCORES:
        raise ValueError("left out: FlexAttention evaluates the mask at every score to build its block mask")
    return flex_attention(inputs)


def cudnn(inputs: Inputs) -> Operation:
    """All keys up to the row's own, without mask and bias."""
    return by_cudnn(inputs, is_causal=inputs.problem.seqlen_q > 1)


def cudnn_of_window(inputs: Inputs) -> Operation:
    """Every row sees the first `window` keys: as many products as the top-k mask has."""
    first = {name: getattr(inputs, name)[:, : inputs.problem.window].detach() for name in ("key", "value")}
    needs_grad = inputs.query.requires_grad
    return by_cudnn(
        replace(inputs, **{name: x.requires_grad_(needs_grad) for name, x in first.items()}), is_causal=False
    )


def by_cudnn(inputs: Inputs, is_causal: bool) -> Operation:
    problem, leaves = inputs.problem, [inputs.query, inputs.key, inputs.value]
    options = {"is_causal": is_causal, "enable_gqa": problem.kv_heads < problem.heads}

    def forward() -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            rows = (leaf.transpose(1, 2) for leaf in leaves)
            return scaled_dot_product_attention(*rows, **options).transpose(1, 2)

    return Operation(forward, leaves)


# FlashAttention-4: the package flash-attn-4


def flash_attention_4(inputs: Inputs) -> Operation:
    problem, leaves = inputs.problem, [inputs.query, inputs.key, inputs.value]
    packs_documents = problem.packed and problem.intervals is not None
    if (inputs.mask is not None and not packs_documents) or inputs.bias is not None:
        raise ValueError(f"{FLASH4} is compared without mask and bias")
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

    options = {"causal": problem.is_causal}
    if not problem.packed:
        return Operation(lambda: out_of(flash_attn_func(*leaves, **options)), leaves)
    options |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), inputs.cu_seqlens())
    options |= dict(zip(("max_seqlen_q", "max_seqlen_k"), problem.max_seqlens))

    def forward() -> Tensor:
        rows = (leaf.flatten(0, 1) for leaf in leaves)
        return out_of(flash_attn_varlen_func(*rows, **options)).unflatten(0, (problem.batch, -1))

    return Operation(forward, leaves)


def out_of(result: Tensor | tuple[Tensor, ...]) -> Tensor:
    """Some versions return lse, too."""
    return result[0] if isinstance(result, tuple) else result


def has_flash_attention_4() -> bool:
    return bool(importlib.util.find_spec("flash_attn") and importlib.util.find_spec("flash_attn.cute"))


PEERS: dict[str, Build] = {
    SDPA: sdpa,
    FLASH2: sdpa_by(SDPBackend.FLASH_ATTENTION, FLASH2),
    FLASH4: flash_attention_4,
    CUDNN: sdpa_by(SDPBackend.CUDNN_ATTENTION, CUDNN),
    FLEX: flex_attention,
}


# A single row by hand: the keys of largest bias, or all keys, through SDPA


@dataclass(frozen=True)
class RowKernel:
    """One way to compute a single row of all heads with SDPA.

    Attributes:
        backend: None lets PyTorch choose.
        is_grouped: SDPA gets `enable_gqa`; else the query heads of one KV head become rows.
    """

    name: str
    backend: SDPBackend | None
    is_grouped: bool = False
    uses: tuple[str, ...] = (BY_HAND, DENSE)

    def selected(self) -> contextlib.AbstractContextManager:
        """Entered around the timing, so that the calls do not pay for it."""
        return contextlib.nullcontext() if self.backend is None else sdpa_kernel(self.backend)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
        """query (B, 1, H, D), key and value (B, Hkv, Sk, D), bias (B, Hkv, 1, Sk); returns (B, 1, H, D)"""
        batch, _, heads, head_dim = query.shape
        group = heads // key.shape[1]
        if self.is_grouped:
            mask = None if bias is None else bias.repeat_interleave(group, dim=1)
            out = scaled_dot_product_attention(query.transpose(1, 2), key, value, mask, enable_gqa=group > 1)
            return out.transpose(1, 2)
        rows = query.view(batch, key.shape[1], group, head_dim)
        mask = None if bias is None else bias.expand(-1, -1, group, -1)
        return scaled_dot_product_attention(rows, key, value, mask).reshape(query.shape)


ROW_KERNELS = {
    "cpu": [RowKernel("rows", None), RowKernel("groups", None, is_grouped=True)],
    "cuda": [
        RowKernel("flash", SDPBackend.FLASH_ATTENTION, uses=(DENSE,)),  # it takes no bias
        RowKernel("flash groups", SDPBackend.FLASH_ATTENTION, is_grouped=True, uses=(DENSE,)),
        RowKernel("efficient", SDPBackend.EFFICIENT_ATTENTION),
        RowKernel("math", SDPBackend.MATH, uses=(BY_HAND,)),  # it copies keys and values to float32
        RowKernel("cudnn", SDPBackend.CUDNN_ATTENTION),
        RowKernel("cudnn groups", SDPBackend.CUDNN_ATTENTION, is_grouped=True),
    ],
}


def gather(inputs: Inputs) -> Callable[[Tensor], list[Tensor]]:
    """From indices of keys (B, Hkv, w) to those keys and values, each (B, Hkv, w, D)."""
    caches = [cache.transpose(1, 2) for cache in (inputs.key, inputs.value)]

    def take(keys: Tensor) -> list[Tensor]:
        index = keys[..., None].expand(-1, -1, -1, caches[0].shape[-1])
        return [cache.gather(2, index) for cache in caches]

    return take


def index_select(inputs: Inputs) -> Callable[[Tensor], list[Tensor]]:
    """The same as `gather`, from rows of D numbers."""
    batch, seqlen, kv_heads, head_dim = inputs.key.shape
    caches = [cache.view(-1, head_dim) for cache in (inputs.key, inputs.value)]
    element = torch.arange(batch, device=inputs.key.device)[:, None, None] * (seqlen * kv_heads)
    first = element + torch.arange(kv_heads, device=inputs.key.device)[:, None]

    def take(keys: Tensor) -> list[Tensor]:
        rows = torch.add(first, keys, alpha=kv_heads)
        return [cache.index_select(0, rows.flatten()).view(*keys.shape, head_dim) for cache in caches]

    return take


TAKES = {"gather": gather, "index_select": index_select}


def by_hand(inputs: Inputs, taking: str, kernel: RowKernel) -> Callable[[], Tensor]:
    """The keys of largest bias, gathered, their bias added to the scores."""
    problem, take = inputs.problem, TAKES[taking](inputs)
    window = min(problem.window, problem.seqlen_k)

    def forward() -> Tensor:
        bias, keys = inputs.bias[:, :, 0].topk(window, dim=-1, sorted=False)
        key, value = take(keys)
        return kernel.attend(inputs.query, key, value, bias[:, :, None])

    return forward


def dense(inputs: Inputs, kernel: RowKernel) -> Callable[[], Tensor]:
    """All keys, without a bias."""
    return lambda: kernel.attend(inputs.query, inputs.key.transpose(1, 2), inputs.value.transpose(1, 2), None)
