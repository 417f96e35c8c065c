"""The operators under torch.func: grad, vjp, jacrev, vmap and what is made of them.

Transforms refuse autograd functions of C++ (csrc/torch/autograd.cpp). While one is active the dispatcher therefore
gives the operators to the autograd functions of this file; without one it never comes here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import ops

INSTEAD = "use the backend 'reference' for it"
MASKS = len(ops.MaskTensors._fields)


class Operator(torch.autograd.Function):
    """What attention_forward and attention_backward have in common."""

    @staticmethod
    def jvp(ctx, *tangents):
        raise NotImplementedError(
            f"flash_dmattn does not support forward-mode AD (jvp, jacfwd, dual tensors); {INSTEAD}"
        )


class Forward(Operator):
    @staticmethod
    def forward(*args):
        return ops.attention_forward(*args)

    @staticmethod
    def setup_context(ctx, inputs, output):
        # As Attention in csrc/torch/autograd.cpp.
        query, key, value, bias, *rest = inputs
        *tensors, max_seqlen_q, max_seqlen_k, seqlens_k, softmax_scale, softcap, is_causal, deterministic = rest
        if seqlens_k is not None and any(ctx.needs_input_grad):
            raise ValueError("cache_seqlens is for inference, and has no gradients: call under torch.no_grad()")
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(query, key, value, bias, *output, *map(saveable, tensors))
        ctx.options = (max_seqlen_q, max_seqlen_k, softmax_scale, softcap, is_causal, deterministic)

    @staticmethod
    def backward(ctx, dout, dlse):
        saved, needs_dbias = ctx.saved_tensors, ctx.needs_input_grad[3]
        dout = torch.zeros_like(saved[4]) if dout is None else dout
        dquery, dkey, dvalue, dbias = Backward.apply(dout, dlse, *saved, *ctx.options, needs_dbias)
        none_of_rest = (None,) * (len(ctx.needs_input_grad) - 4)
        return dquery, dkey, dvalue, dbias if needs_dbias else None, *none_of_rest

    @staticmethod
    def vmap(info, in_dims, *args):
        return batched(Forward, info.batch_size, in_dims, args, (), 0, False)


class Backward(Operator):
    @staticmethod
    def forward(*args):
        return ops.attention_backward(*args)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *grads):
        raise RuntimeError(f"flash_dmattn does not support double backward; {INSTEAD}")

    @staticmethod
    def vmap(info, in_dims, *args):
        return batched(Backward, info.batch_size, in_dims, args, (0, 1, 6, 7), 2, args[-1])


def saveable(tensor: Tensor | None) -> Tensor | None:
    """Tensors made in inference mode cannot be saved: nothing counts how often they are changed."""
    return tensor.clone() if tensor is not None and tensor.is_inference() else tensor


def batched(
    operator: type[Operator], size: int, in_dims: tuple, args: tuple, rows: tuple, query: int, needs_dbias: bool
) -> tuple[tuple[Tensor, ...], tuple]:
    """`size` calls of an operator: as one with so many times the batch where that repeats nothing large, else one after
    the other.

    rows: where, beside query, key and value, args holds a part for every batch element.
    query: where the query, key, value and bias stand in args.
    needs_dbias: whether every call needs a bias of its own, for a gradient of its own.
    """
    rows = (query, query + 1, query + 2, *rows)
    args = tuple(x if dim is None else x.movedim(dim, 0) for x, dim in zip(args, in_dims))
    in_dims = tuple(None if dim is None else 0 for dim in in_dims)
    folded = fold(size, in_dims, args, rows, query + 3, needs_dbias)
    if folded is None:
        calls = [
            operator.apply(*(x if dim is None else contiguous_rows(x[i]) for x, dim in zip(args, in_dims)))
            for i in range(size)
        ]
        return tuple(map(torch.stack, zip(*calls))), (0,) * len(calls[0])
    outputs = operator.apply(*folded)
    # Where no gradient of the bias is asked for, that is an empty tensor (0).
    dims = tuple(None if x.ndim == 1 else 0 for x in outputs)
    return tuple(
        x if dim is None else x.unflatten(0, (size, x.shape[0] // size)) for x, dim in zip(outputs, dims)
    ), dims


def fold(size: int, in_dims: tuple, args: tuple, rows: tuple, bias: int, needs_dbias: bool) -> list | None:
    """The arguments with all calls in the batch dimension, None where some would have to be repeated or cannot be."""
    first_mask = bias + 1 if len(rows) == 3 else bias + 3  # the backward has out and lse in between
    pairs = {bias: 0, first_mask: 0, first_mask + 2: 1}  # bias, mask and intervals, and the dimension of their batch
    query = args[rows[0]]
    batch = query.shape[0 if in_dims[rows[0]] is None else 1]
    result = []
    for i, (x, dim) in enumerate(zip(args, in_dims)):
        if not isinstance(x, Tensor):
            result.append(x)
        elif i in rows:
            x = x[None].expand(size, *x.shape) if dim is None else x
            result.append(contiguous_rows(x.flatten(0, 1)))
        elif i not in pairs:
            return None  # lists and sequences of variable length
        else:
            at, own = pairs[i], dim is not None or (i == bias and needs_dbias)
            x = x[None].expand(size, *x.shape) if own and dim is None else x
            each = x.shape[at + own]
            # A call's own bias or mask may serve more than one of its batch elements; intervals may not.
            fits = each == 1 if not own else each == batch or (at == 0 and each > 0 and batch % each == 0)
            if not fits:
                return None
            result.append(x.movedim(0, at).flatten(at, at + 1) if own else x)
    return result


def contiguous_rows(rows: Tensor) -> Tensor:
    return rows if rows.ndim == 0 or rows.stride(-1) == 1 else rows.contiguous()


def transformed(name: str, function: type[Operator]) -> None:
    # The key by which a call comes to the transforms that are active.
    LIBRARY.impl(name, function.apply, "FuncTorchDynamicLayerFrontMode")


if ops.attention_forward is not None:
    LIBRARY = torch.library.Library(ops.NAMESPACE, "IMPL")
    transformed("attention_forward", Forward)
    transformed("attention_backward", Backward)
