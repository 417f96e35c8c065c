"""The checks of the public functions' arguments, before anything is launched. csrc/torch/checks.cpp checks tensors.

ValueError reports shapes and values, TypeError dtypes and types, RuntimeError devices and backends. Each message names
the argument, what it got and what it accepts.
"""

from __future__ import annotations

from types import ModuleType
from typing import Union

import torch
from torch import Tensor

from . import ops
from .arguments import (
    names,
    require_bool,
    require_count,
    require_dense,
    require_device,
    require_float32_or,
    require_floating,
    require_given,
    require_max_seqlen,
    require_no_grad,
    require_number,
    require_tensor,
    shape_of,
)
from .broadcast import is_one_of, shares_batch
from .call import Call
from .deprecation import deprecated
from .masks import SPARSE, KeyIntervalMask, KeyLists, Mask
from .ops.list_sizes import is_per_key
from .ops.schema import NO_MASK, MaskTensors
from .sinks import check_sinks

FLOAT32_MAX = torch.finfo(torch.float32).max
AnyMask = Union[Tensor, KeyIntervalMask, KeyLists, None]
BIAS_DIMENSIONS = "({B|B/n|1}, {H|Hkv|1}, {Sq|1}, {Sk|1})"  # of fixed length
# None stands for these values, as in upstream's flash-dmattn.
NONE_MEANS = {"is_causal": False, "softcap": 0.0, "deterministic": False, "return_attn_probs": False}


def check_options(call: Call) -> None:
    """The arguments whose checks need no shapes. Replaces None by its meaning, and integers of other types by ints."""
    for name, default in NONE_MEANS.items():
        if getattr(call, name) is None:
            setattr(call, name, default)
    if call.scale is not None:
        if call.softmax_scale is not None:
            raise ValueError("scale is the former name of softmax_scale, got both")
        deprecated("the argument scale of upstream's flash-dmattn", "softmax_scale")
        call.softmax_scale, call.scale = call.scale, None
    refuse_mask_as_bias(call.attn_bias)
    refuse_bias_objects("attn_mask", call.attn_mask)
    refuse_bias_objects("attn_bias", call.attn_bias)
    if call.window_size is not None:
        refuse_sliding_window(call.window_size, call.sliding_window())
        call.window_size = require_count("window_size", call.window_size)
    if call.varlen is not None:
        refuse_offsets_as_mask(call.attn_mask)
        require_given(**call.varlen._asdict())
        require_tensor("cu_seqlens_q", call.varlen.cu_seqlens_q)
        require_tensor("cu_seqlens_k", call.varlen.cu_seqlens_k)
        bounds = {name: getattr(call.varlen, name) for name in ("max_seqlen_q", "max_seqlen_k")}
        call.varlen = call.varlen._replace(**{name: require_max_seqlen(name, bound) for name, bound in bounds.items()})
    if call.softmax_scale is not None and not isinstance(call.softmax_scale, Tensor):
        check_finite("softmax_scale", call.softmax_scale, or_tensor=True)
    check_softcap(call.softcap)
    require_bool("is_causal", call.is_causal)
    require_bool("deterministic", call.deterministic)
    require_bool("return_attn_probs", call.return_attn_probs)
    require_bool("return_lse", call.return_lse)
    if not isinstance(call.sparse, str) or call.sparse not in SPARSE:
        raise ValueError(f"sparse must be one of {', '.join(SPARSE)}, got {call.sparse!r}")
    if call.sparse == "lists" and call.attn_mask is None and call.window_size is None:
        raise ValueError("sparse='lists' needs attn_mask or window_size, got none")
    if call.sparse == "tiles" and isinstance(call.attn_mask, Mask) and call.attn_mask.needs_lists:
        raise ValueError("sparse='tiles' needs a mask, got attn_mask of KeyLists that were made from indices")


def refuse_mask_as_bias(bias: object) -> None:
    """Raises for a mask that is no tensor in attn_bias's place. csrc/torch/checks.cpp refuses bool tensors."""
    if isinstance(bias, Mask):
        raise TypeError(f"attn_bias must be a torch.Tensor, got {type(bias).__name__}: pass a mask as attn_mask")


def refuse_bias_objects(name: str, value: object) -> None:
    """Raises for the masks of torch.nn.attention.bias, tensors without values of their own, and for those of
    xFormers."""
    if value is None:  # torch.compile of PyTorch 2.11 does not trace the name of its type's module
        return
    if type(value).__name__ == "CausalBias":  # its module is slow to import
        raise TypeError(
            f"{name} must be a plain torch.Tensor, got CausalBias: pass is_causal=True, the mask of causal_lower_right"
        )
    if type(value).__module__.startswith(("xformers.", "mslk.")):
        accepted = "a bool torch.Tensor, a KeyIntervalMask or KeyLists" if name == "attn_mask" else "a torch.Tensor"
        raise TypeError(
            f"{name} must be {accepted}, got {type(value).__name__} of xFormers: docs/guides/from-xformers.md says "
            "what to pass instead"
        )


def refuse_sliding_window(window_size: object, instead: str) -> None:
    """Raises for the window_size of flash-attn, (left, right). `instead`: the argument that makes such a window."""
    if isinstance(window_size, (tuple, list)):
        raise TypeError(
            f"window_size must be an int, got {window_size}: it is top-k selection; a sliding window is {instead}"
        )


def refuse_offsets_as_mask(mask: object) -> None:
    """Raises for the order of arguments of flash-attn, where cu_seqlens_q comes after value."""
    if isinstance(mask, Tensor) and mask.ndim == 1 and mask.dtype in (torch.int32, torch.int64):
        raise TypeError(
            f"attn_mask must be bool, got {names([mask.dtype])} of one dimension: attn_mask and attn_bias come before "
            "cu_seqlens; pass cu_seqlens and max_seqlen by name"
        )


def check_finite(name: str, value: float, or_tensor: bool = False) -> None:
    require_number(name, value, or_tensor)
    if not -FLOAT32_MAX <= value <= FLOAT32_MAX:  # the kernels compute with it in float32
        raise ValueError(f"{name} must be finite in float32, got {value}")


def check_softcap(softcap: float) -> None:
    check_finite("softcap", softcap)
    if softcap < 0:
        raise ValueError(f"softcap must be 0 (none) or positive, got {softcap}")
    if 0 < softcap < 1 / FLOAT32_MAX:
        raise ValueError(f"softcap must be 0 (none) or have a finite inverse in float32, got {softcap}")


def check_scale(scale: Tensor, query: Tensor) -> None:
    """A softmax_scale that is a tensor. Its values are not checked."""
    require_floating("softmax_scale", scale)
    heads = query.shape[-2]
    if scale.ndim > 1 or (scale.ndim == 1 and scale.shape[0] != heads):
        raise ValueError(
            f"softmax_scale must be a number, or a tensor () or (H) for H = {heads} heads, got shape {shape_of(scale)}"
        )
    if scale.ndim == 1 or scale.device.type != "cpu":  # a number on the CPU serves every device
        require_device("softmax_scale", scale, query.device, "query")


def check_call(backend: ModuleType, call: Call) -> None:
    """The tensors of a call, its mask and its lengths. call.attn_mask is None or a `Mask`."""

    def check_with(mask: MaskTensors) -> None:
        check_tensors(call, mask, call.attn_bias)

    if type(call.query) is not Tensor and hasattr(call.query, "device_mesh"):
        check_distributed(call)
    if call.attn_mask is None:
        check_with(NO_MASK)
    else:
        call.attn_mask.check(check_with, call)
    if backend.SPARSE_MASKS:
        compiled_check("check_kernels", call.query)
    if call.relative_bias is not None or call.grid is not None:
        check_relative_bias(call)
    if call.sinks is not None:
        check_sinks(call.sinks, call.query)
    if call.cache_seqlens is not None:
        if not backend.SPARSE_MASKS:
            raise ValueError(f"cache_seqlens is for the backends 'cuda' and 'cpu', got the backend '{backend.NAME}'")
        if call.return_attn_probs:
            raise ValueError("return_attn_probs does not support cache_seqlens, got both")
        # The operator checks the others; it gets neither sinks nor a bias that is constant along the keys.
        for name, tensor in (("attn_bias", call.attn_bias), ("sinks", call.sinks)):
            require_no_grad(name, tensor, "cache_seqlens")
    if call.window_size is not None:
        check_window(call.attn_mask, call.attn_bias, call.query, call.key, call.is_causal, call.varlen is not None)


def check_distributed(call: Call) -> None:
    """Raises TypeError if query is a DTensor and another tensor is not. PyTorch's own error names no tensor."""
    mask = call.attn_mask
    of_mask = NO_MASK if mask is None else mask.packed(call.problem()) if mask.has_lists else mask.operands()
    others = [("key", call.key), ("value", call.value), ("attn_bias", call.attn_bias)]
    for name, tensor in others + [("attn_mask", tensor) for tensor in of_mask]:
        if isinstance(tensor, Tensor) and not hasattr(tensor, "device_mesh"):
            raise TypeError(
                f"{name} must be a DTensor, like query, got a plain tensor: make it of "
                f"distribute_tensor(tensor, mesh, placements), where [Replicate()] replicates it"
            )


def check_tensors(call: Call, mask: MaskTensors, bias: Tensor | None) -> None:
    """Types, dtypes, devices and shapes of a call's tensors with a mask and a bias: csrc/torch/module.cpp."""
    query, key, value = call.query, call.key, call.value
    checker = ops.checker()
    if checker is None:
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            require_tensor(name, tensor)
        if bias is not None:
            require_tensor("attn_bias", bias)
        if call.varlen is not None:
            check_totals(call, mask, bias)
        elif bias is not None and bias.ndim != 4:
            raise ValueError(f"attn_bias must be {BIAS_DIMENSIONS}, got shape {shape_of(bias)}")
    elif call.varlen is None:
        checker.check_fixed(query, key, value, mask.mask, mask.intervals, bias, call.cache_seqlens)
    else:
        checker.check_varlen(query, key, value, mask.mask, mask.intervals, bias, *call.varlen)


def check_scores_of_qkv(qkv: Tensor, max_seqlen: int, given: dict[str, object]) -> None:
    """The shapes of masks and biases of packed self-attention, which has one name for the lengths of rows and keys."""
    total, _, heads, _ = qkv.shape
    for name, scores in given.items():
        if not isinstance(scores, Tensor) or ops.checker() is None:
            continue
        require_dense(name, scores)
        shape = shape_of(scores)
        fits = shape[:1] == (total,) and is_one_of(shape[1] if len(shape) > 1 else 0, heads, 1)
        if not fits or shape[2:] not in ((), (max_seqlen,)):
            accepted = "(total, {H|1}) or (total, {H|1}, max_seqlen)"
            sizes = f"total = {total}, H = {heads} and max_seqlen = {max_seqlen}"
            raise ValueError(f"{name} must be {accepted} with {sizes}, got shape {shape}")


def check_row_bias(call: Call) -> None:
    """A fixed-length bias (.., 1) in a traced graph: no operator reads it."""
    query, bias = call.query, call.attn_bias
    if ops.checker() is not None:
        return
    require_float32_or(query.dtype, "attn_bias", bias)
    batch, rows, heads, _ = query.shape
    own = bias.shape[0]
    for dim, size, fits in (
        (0, batch, shares_batch(own, batch)),
        (1, heads, is_one_of(bias.shape[1], heads, call.key.shape[2], 1)),
        (2, rows, is_one_of(bias.shape[2], rows, 1)),
    ):
        if not fits:
            raise ValueError(
                f"attn_bias must be {BIAS_DIMENSIONS}: dimension {dim} does not fit {size}, got shape {shape_of(bias)}"
            )


def check_totals(call: Call, mask: MaskTensors, bias: Tensor | None) -> None:
    """Whether masks and biases of variable length are of the same sequences as query and key. In a traced graph
    operators that have neither of the two read them: those that pack a mask, build its lists or select keys."""
    for name, shape in (
        ("attn_mask", None if mask.mask is None else mask.mask.shape),
        ("attn_mask.start", None if mask.intervals is None else mask.intervals.shape[1:]),
        ("attn_bias", None if bias is None else bias.shape),
    ):
        if shape is None or len(shape) not in (2, 3):
            continue
        what, rows = ("keys", call.key) if len(shape) == 2 else ("rows", call.query)
        if shape[0] != rows.shape[0]:
            raise ValueError(f"{name} must have the {rows.shape[0]} {what} of all sequences, got shape {tuple(shape)}")


def check_relative_bias(call: Call) -> None:
    """relative_bias and grid. Their place in the call is checked here, the tensor in csrc/torch/checks.cpp."""
    bias, grid = call.relative_bias, call.grid
    if grid is not None and call.varlen is not None:
        raise ValueError(f"grid is for fixed length, got grid={grid} and cu_seqlens_q")
    if bias is None:
        raise ValueError(f"grid comes with relative_bias ({{B|1}}, {{H|Hkv|1}}, 2h - 1, 2w - 1), got grid={grid} alone")
    buckets = "flash_dmattn.relative.t5 makes the table of an embedding of distance buckets"
    if isinstance(bias, torch.nn.Embedding):
        raise TypeError(f"relative_bias must be a torch.Tensor, got Embedding: {buckets}")
    require_tensor("relative_bias", bias)
    heads = call.query.shape[-2]
    if grid is None and bias.ndim == 2 and bias.shape[1] == heads != bias.shape[0]:
        raise ValueError(f"relative_bias must be ({{B|1}}, {{H|Hkv|1}}, 2R + 1), got shape {shape_of(bias)}: {buckets}")
    if grid is None and bias.ndim == 4:
        raise ValueError(f"relative_bias of four dimensions comes with grid=(h, w), got shape {shape_of(bias)} alone")
    if grid is not None:
        height, width = call.grid = checked_grid(grid)
        if call.cache_seqlens is not None:
            raise ValueError(f"grid does not support cache_seqlens, got grid={call.grid} and cache_seqlens")
        if bias.ndim != 4 or bias.shape[2:] != (2 * height - 1, 2 * width - 1):
            fits = bias.ndim == 3 and bias.shape[1:] == (2 * height - 1, 2 * width - 1)
            hint = ": pass relative_bias[None]" if fits else ""
            raise ValueError(
                f"relative_bias must be ({{B|1}}, {{H|Hkv|1}}, {2 * height - 1}, {2 * width - 1}) with "
                f"grid={call.grid}, got shape {shape_of(bias)}{hint}"
            )
        lengths = call.query.shape[1], call.key.shape[1]
        if lengths != (height * width, height * width):
            raise ValueError(
                f"grid must be of the query rows and of the keys, got grid={call.grid} of {height * width} tokens for "
                f"{lengths[0]} rows and {lengths[1]} keys"
            )
    if ops.checker() is None:  # a traced graph converts it before an operator sees it
        require_float32_or(call.query.dtype, "relative_bias", bias)
    compiled_check("check_relative_bias", bias, call.query, call.key, call.batch)


def checked_grid(grid: object) -> tuple[int, int]:
    if not isinstance(grid, (tuple, list, torch.Size)) or len(grid) != 2:
        raise TypeError(f"grid must be a pair of ints (h, w), got {grid!r}")
    height, width = (require_count("grid", size, "a pair of ints (h, w)") for size in grid)
    if height == 0 or width == 0:
        raise ValueError(f"grid must be a pair of positive ints (h, w), got {(height, width)}")
    return height, width


def check_window(
    mask: Mask | None, bias: Tensor | None, query: Tensor, key: Tensor, is_causal: bool, varlen: bool
) -> None:
    """Checks the arguments of a call with window_size. KeyIntervalMask.topk checks window_size itself."""
    if mask is not None:
        raise ValueError(
            "window_size makes a mask of its own, got attn_mask too: mask keys by a bias of -inf, or select first and "
            "mask then by attn_mask=KeyIntervalMask.topk(attn_bias, window_size) & mask"
        )
    if not is_causal:
        raise ValueError("window_size selects among the keys up to a row: it needs is_causal=True, got False")
    per_key = bias is not None and is_per_key(bias.shape)
    batch, keys = query.shape[0], key.shape[-3]
    if per_key and bias.ndim == 4:
        per_key = bias.shape[3] == keys and is_one_of(bias.shape[0], batch, 1)
    if not per_key:
        got = "none" if bias is None else f"shape {shape_of(bias)}"
        heads = one_of(query.shape[-2], key.shape[-2], 1)
        layout = f"({keys}, {heads})" if varlen else f"({one_of(batch, 1)}, {heads}, 1, {keys})"
        raise ValueError(f"window_size needs attn_bias of one number per key, {layout}, got {got}")


def one_of(*sizes: int) -> str:
    """The accepted sizes of a dimension: "{4|1}", or "1"."""
    texts = list(dict.fromkeys(map(str, sizes)))
    return texts[0] if len(texts) == 1 else f"{{{'|'.join(texts)}}}"


def compiled_check(name: str, *arguments: object) -> None:
    """A check of csrc/torch/module.cpp. Skipped where `ops.checker` is None."""
    checker = ops.checker()
    if checker is not None:
        getattr(checker, name)(*arguments)
