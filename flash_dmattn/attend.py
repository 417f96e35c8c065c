"""One call of attention: checks and prepares the inputs, calls a backend, and removes the padding."""

from __future__ import annotations

from types import ModuleType

import torch
from einops import reduce
from torch import Tensor
from torch.nn.functional import pad

from . import checks, fallbacks, ops
from .arguments import is_host_readable, lengths_of, require_tensor
from .backends import cpu, cuda, meta, reference
from .biases import cast_bias, is_masked
from .broadcast import expand_shared, scores_of_sequence
from .call import Call, Varlen
from .masks import Mask, Problem, as_mask, choice, selection
from .masks.dense import BoolMask
from .ops.conventions import HEAD_DIM_MULTIPLE, accumulation_dtype, padded_head_dim
from .ops.list_sizes import is_per_key
from .ops.schema import MaskTensors
from .sinks import apply_sinks, scale_of

COMPILED = {"cpu": cpu, "cuda": cuda, "meta": meta}


def attend(backend: ModuleType, call: Call) -> Tensor | tuple[Tensor, ...]:
    """Attention through a backend. Variable length is for the compiled ones. Changes `call`."""
    checks.check_options(call)
    autocast(call)
    mask = call.attn_mask = as_mask(call.attn_mask)
    if call.cache_seqlens is not None and call.query.ndim > 0:
        seqlen_k = call.key.shape[1] if is_strided_rows(call.key) else None
        call.cache_seqlens = lengths_of(call.cache_seqlens, call.query.shape[0], call.query.device, seqlen_k)
    checks.check_call(backend, call)
    apply_scale_tensor(call)
    make_lengths_contiguous(call)
    if call.cache_seqlens is not None and mask is None:
        trim_to_longest(call)
    query, bias, problem = call.query, call.attn_bias, call.problem()
    if call.window_size is not None:
        as_lists = backend.SPARSE_MASKS and call.sparse != "tiles" and not call.return_attn_probs
        mask = selection.select(
            *(bias, call.window_size, problem, call.cache_seqlens),
            as_lists=as_lists,
            must_mask=call.sparse == "lists",
        )
    row_bias = masked_rows = None
    if call.varlen is None and bias is not None and bias.shape[3] == 1 and problem.seqlen_k != 1:
        checks.check_row_bias(call)
        query, row_bias, masked_rows, unseen = split_row_bias(bias, query, call.key.shape[2])
        call.key, call.value, bias = call.key.masked_fill(unseen, 0), call.value.masked_fill(unseen, 0), None
    options = call.options()
    used = problem if call.keeps_max_seqlen else clamped_to_totals(query, call.key, mask, bias, problem)
    relative_bias = None if call.relative_bias is None else accumulated(call.relative_bias, query)
    leaves = (query, call.key, call.value, bias, relative_bias)
    needs_grad = torch.is_grad_enabled() and any(leaf is not None and leaf.requires_grad for leaf in leaves)
    operand = mask_operand(
        backend, mask, call.sparse, query, call.key, bias, used, needs_grad=needs_grad, deterministic=call.deterministic
    )
    if relative_bias is not None:
        options["relative_bias"] = relative_bias
    sequences = {}  # arguments of the compiled backends only
    if call.varlen is not None:
        sequences["varlen"] = Varlen(used.cu_seqlens_q, used.cu_seqlens_k, used.seqlen_q, used.seqlen_k)
    elif call.cache_seqlens is not None:
        sequences["cache_seqlens"] = call.cache_seqlens
    rows = kernel_rows(query, call.key, call.value)
    out, lse = backend.attention(*rows, operand, bias, **options, **sequences)
    out = without_padding(out, call.value.shape[-1])
    if row_bias is not None:
        out, lse = add_row_bias(out, lse, row_bias, masked_rows)
    if call.sinks is not None:
        out = apply_sinks(out, lse, call.sinks)
    if call.return_attn_probs:
        return out, lse, probabilities(call, query, mask, call.attn_bias, options)
    return (out, lse) if call.return_lse else out


def require_device_with_kernels(name: str, tensor: Tensor) -> str:
    """The tensor's device type. Raises RuntimeError for a device without kernels."""
    device_type = tensor.device.type
    if device_type not in COMPILED:
        raise RuntimeError(f"{name} must be on a cpu, cuda or meta device, got {tensor.device}")
    return device_type


def kernels_for(query: Tensor) -> ModuleType:
    """The compiled backend of query's device. Raises RuntimeError where it was not built."""
    require_tensor("query", query)
    device_type = require_device_with_kernels("query", query)
    ops.compiled_module()
    return COMPILED[device_type]


def make_lengths_contiguous(call: Call) -> None:
    if call.cache_seqlens is not None:
        call.cache_seqlens = call.cache_seqlens.contiguous()
    if call.varlen is not None:
        offsets = {name: getattr(call.varlen, name).contiguous() for name in ("cu_seqlens_q", "cu_seqlens_k")}
        call.varlen = call.varlen._replace(**offsets)


def trim_to_longest(call: Call) -> None:
    """Removes the keys beyond the longest sequence of a cache from a call without a mask: unused capacity then costs
    nothing."""
    if not is_host_readable(call.cache_seqlens):
        return
    longest, capacity = max(call.cache_seqlens.tolist(), default=0), call.key.shape[1]
    call.key, call.value = call.key[:, :longest], call.value[:, :longest]
    if call.attn_bias is not None and call.attn_bias.shape[3] == capacity:
        call.attn_bias = call.attn_bias[..., :longest]


def mask_operand(
    backend: ModuleType,
    mask: Mask | None,
    sparse: choice.Sparse,
    query: Tensor,
    key: Tensor,
    bias: Tensor | None,
    problem: Problem,
    *,
    needs_grad: bool,
    deterministic: bool,
) -> MaskTensors | Tensor | None:
    """The mask as the backend takes it: the operators' tensors, or a bool tensor."""
    if mask is None:
        return None
    if not backend.SPARSE_MASKS:
        if sparse == "lists":
            raise ValueError(f"sparse='lists' is for the backends 'cuda' and 'cpu', got the backend '{backend.NAME}'")
        if fallbacks.enabled() and not isinstance(mask, BoolMask):
            text = f"the backend '{backend.NAME}' reads it as bool, Sq x Sk bytes: use 'cuda' or 'cpu'"
            fallbacks.report(f"dense form of a {type(mask).__name__}", text)
        return mask.as_bool(problem.seqlen_q)
    form = choice.choose(mask.unexpanded(), sparse, needs_grad, problem)
    if sparse == "auto" and not deterministic and choice.can_dispatch_on_device(form, bias, problem):
        form = choice.dispatch_on_device(form, query, key, bias, needs_grad, problem.is_causal)
    elif sparse == "auto" and fallbacks.enabled() and (reason := choice.why_tiles(form, deterministic, problem)):
        fallbacks.report("tiles instead of key lists", reason)
    return form.packed(problem)


def clamped_to_totals(query: Tensor, key: Tensor, mask: Mask | None, bias: Tensor | None, problem: Problem) -> Problem:
    """For variable length, lengths that are at most the total rows and keys: the given bounds may be far above."""
    if problem.cu_seqlens_q is None:
        return problem
    # A dense mask or bias has a column for each of the max_seqlen_k keys.
    column_per_key = (mask is not None and mask.has_column_per_key()) or (bias is not None and bias.ndim == 3)
    seqlen_k = problem.seqlen_k if column_per_key else min(problem.seqlen_k, key.shape[0])
    return problem._replace(seqlen_q=min(problem.seqlen_q, query.shape[0]), seqlen_k=seqlen_k)


def accumulated(relative_bias: Tensor, query: Tensor) -> Tensor:
    """A relative bias in the type in which the kernels compute, with -inf for what masks in its own dtype."""
    return cast_bias(relative_bias, accumulation_dtype(query.dtype))


def autocast_is_on(device: torch.device) -> bool:
    # torch.is_autocast_enabled raises for devices without autocast, such as meta.
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def autocast(call: Call, *, keeps_float32: bool = False) -> None:
    """Casts the inputs of a call to the dtype of torch.autocast.

    A float32 relative bias, float32 sinks and a float32 bias per key stay, with keeps_float32 any float32 bias.
    """
    require_tensor("query", call.query)
    if not autocast_is_on(call.query.device):
        return
    for name in ("query", "key", "value"):
        tensor = getattr(call, name)
        require_tensor(name, tensor)
        setattr(call, name, tensor.to(autocast_dtype(tensor)))
    bias = call.attn_bias
    if isinstance(bias, Tensor) and not (bias.dtype == torch.float32 and (keeps_float32 or is_per_key(bias.shape))):
        call.attn_bias = cast_bias(bias, autocast_dtype(bias))
    if is_half(call.relative_bias):
        call.relative_bias = cast_bias(call.relative_bias, autocast_dtype(call.relative_bias))
    if is_half(call.sinks):
        call.sinks = call.sinks.to(autocast_dtype(call.sinks))


def autocast_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype that torch.autocast gives a tensor: its own without autocast, or if it is float64 or not floating."""
    if not autocast_is_on(tensor.device) or not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor.dtype
    return torch.get_autocast_dtype(tensor.device.type)


def is_half(tensor: object) -> bool:
    return isinstance(tensor, Tensor) and tensor.dtype in (torch.float16, torch.bfloat16)


def is_strided_rows(tensor: object) -> bool:
    """Whether it has a shape (B, S, H, D); the checks refuse other inputs."""
    return isinstance(tensor, Tensor) and tensor.ndim == 4 and tensor.layout == torch.strided and not tensor.is_nested


def apply_scale_tensor(call: Call) -> None:
    """Multiplies query by a softmax_scale that is a tensor, which so gets its gradient."""
    if isinstance(call.softmax_scale, Tensor):
        call.query, call.softmax_scale = scaled_query(call.query, call.softmax_scale), 1.0


def scaled_query(query: Tensor, scale: Tensor) -> Tensor:
    """query multiplied by a softmax_scale () or (H), rounded to query's dtype."""
    checks.check_scale(scale, query)
    dtype = accumulation_dtype(query.dtype)
    rows, per_head = query.to(dtype), (scale if scale.ndim == 0 else scale[:, None]).to(dtype)
    if torch.is_grad_enabled():  # masked rows may be NaN: to the gradient of the scale they add 0, not 0 * NaN
        scaled = torch.where(rows.isfinite(), rows.nan_to_num(0, 0, 0) * per_head, rows * per_head.detach())
    else:
        scaled = rows * per_head
    return scaled.to(query.dtype)


def kernel_rows(query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
    """query, key and value as the kernels read them: D contiguous, and zero-padded to one multiple of 8 for all."""
    own, of_key = query.shape[-1], key.shape[-1]
    if own != of_key:  # where `ops.checker` is None, padding would hide it
        raise ValueError(f"key must have query's head dimension {own}, got {of_key}")
    head_dim = padded_head_dim(own, value.shape[-1])
    if fallbacks.enabled():
        report_copies(query, key, value, head_dim)
    rows = [x if x.shape[-1] == head_dim else pad(x, (0, head_dim - x.shape[-1])) for x in (query, key, value)]
    return [x if x.stride(-1) == 1 else x.contiguous() for x in rows]


def report_copies(query: Tensor, key: Tensor, value: Tensor, head_dim: int) -> None:
    if {query.shape[-1], value.shape[-1]} != {head_dim}:
        text = f"it differs or is not a multiple of {HEAD_DIM_MULTIPLE}: use one multiple for query, key and value"
        fallbacks.report("padding of the head dimension", text)
    for name, rows in (("query", query), ("key", key), ("value", value)):
        if rows.shape[-1] == head_dim and rows.stride(-1) != 1:
            text = "its head dimension is not contiguous: make it the innermost dimension of the projection's output"
            fallbacks.report(f"copy of {name}", text)


def without_padding(out: Tensor, head_dim: int) -> Tensor:
    """Removes the padding of `kernel_rows`."""
    return out if out.shape[-1] == head_dim else out[..., :head_dim]


def split_row_bias(bias: Tensor, query: Tensor, kv_heads: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Prepares attention without a bias (.., 1), which is constant along the keys: the softmax does not depend on it.

    Returns:
        query, 0 in the rows that the bias masks: NaN in them must not reach the gradients.
        The bias ({B|1}, {H|1}, {Sq|1}, 1) and whether it masks a row, for `add_row_bias`.
        The keys to set to 0: `unseen_keys`.
    """
    row_bias = expand_shared(bias, query.shape[0], query.shape[2])
    masked_rows = is_masked(row_bias)
    query = query.masked_fill(masked_rows.transpose(1, 2), 0)
    return query, row_bias, masked_rows, unseen_keys(masked_rows, kv_heads)


def unseen_keys(masked_rows: Tensor, kv_heads: int) -> Tensor:
    """bool ({B|1}, 1, {Hkv|1}, 1): keys of which every row is masked; they may hold NaN.

    masked_rows: bool ({B|1}, {H|1}, {Sq|1}, 1).
    """
    unseen = masked_rows.all(dim=2, keepdim=True)
    if unseen.shape[1] != 1 and kv_heads > 0:
        unseen = reduce(unseen, "b (h group) 1 1 -> b h 1 1", "all", h=kv_heads)
    return unseen.transpose(1, 2)


def add_row_bias(out: Tensor, lse: Tensor, row_bias: Tensor, masked_rows: Tensor) -> tuple[Tensor, Tensor]:
    """A bias ({B|1}, {H|1}, {Sq|1}, 1) shifts lse (B, H, Sq) and nothing else, or masks its whole row."""
    # A zero that depends on the bias, so that its gradient is zero, not None, where lse is not used.
    zero = row_bias[..., :0].sum()
    row_bias, masked = row_bias[..., 0].to(lse.dtype), masked_rows[..., 0]
    empty = masked | (lse == -torch.inf)  # no gradient, whatever the gradient of lse is
    lse = (lse + row_bias.masked_fill(empty, 0)).masked_fill(masked, -torch.inf)
    return torch.where(masked.transpose(1, 2)[..., None], zero.to(out.dtype), out), lse


@torch.no_grad()
def probabilities(call: Call, query: Tensor, mask: Mask | None, bias: Tensor | None, options: dict) -> Tensor:
    """probs (B, H, Sq, Sk) in query's dtype; for variable length (B, H, max_seqlen_q, max_seqlen_k), zero beyond the
    ends of a sequence."""
    problem = call.problem()
    if call.varlen is None:
        dense = None if mask is None else mask.as_bool(problem.seqlen_q)
        return probabilities_of(query, call.key, dense, bias, call.sinks, options)
    offsets_q, offsets_k = problem.cu_seqlens_q.tolist(), problem.cu_seqlens_k.tolist()
    probs = query.new_zeros(len(offsets_q) - 1, query.shape[1], problem.seqlen_q, problem.seqlen_k)
    table = options.get("relative_bias")
    for b in range(len(probs)):
        rows, keys = slice(*offsets_q[b : b + 2]), slice(*offsets_k[b : b + 2])
        dense = None if mask is None else mask.sequence_as_bool(b, rows, keys)
        own_bias = None if bias is None else scores_of_sequence(bias, rows, keys)
        own = options if table is None or table.shape[0] == 1 else options | {"relative_bias": table[b : b + 1]}
        one = probabilities_of(query[None, rows], call.key[None, keys], dense, own_bias, call.sinks, own)
        probs[b, :, : one.shape[2], : one.shape[3]] = one[0]
    return probs


def probabilities_of(
    query: Tensor, key: Tensor, mask: Tensor | None, bias: Tensor | None, sinks: Tensor | None, options: dict
) -> Tensor:
    probs, lse = reference.probabilities(query, key, mask, bias, **options)
    return (probs if sinks is None else probs * scale_of(lse, sinks)[..., None]).to(query.dtype)
