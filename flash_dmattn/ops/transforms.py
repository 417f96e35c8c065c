"""The attention operators under torch.func: grad, vjp, jacrev, vmap.

Transforms refuse autograd functions of C++ (csrc/torch/autograd.cpp). While a transform is active, the dispatcher calls
the autograd functions of this file instead.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import Tensor
from torch._C._functorch import TransformType, get_interpreter_stack

from .. import ops
from ..loading import NAMESPACE
from .schema import Arguments, BackwardArguments

INSTEAD = "use the backend 'reference' for it"

# Arguments with a part for every batch element, and the batch dimension of those that batch elements may share. A batch
# of calls whose other arguments differ is not folded into one call.
PER_BATCH = ("query", "key", "value", "dout", "dlse", "out", "lse")
SHARED_BATCH = {"bias": 0, "relative_bias": 0, "mask": 0, "intervals": 1}
GROUPS_SHARE = ("bias", "mask")  # groups of batch elements may share an entry, too


class Operator(torch.autograd.Function):
    """The common part of attention_forward and attention_backward."""

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
        if Arguments(*inputs).seqused_k is not None:
            for name, needs_grad in zip(Arguments._fields, ctx.needs_input_grad):
                if needs_grad:
                    raise ValueError(
                        f"{'attn_bias' if name == 'bias' else name} must not require grad: cache_seqlens is for "
                        "inference, and has no gradients; make the call under torch.no_grad()"
                    )
        ctx.set_materialize_grads(False)
        tensors = (x if isinstance(x, Tensor) else None for x in inputs)
        ctx.save_for_backward(*output, *map(savable, tensors))
        ctx.options = [None if isinstance(x, Tensor) else x for x in inputs]

    @staticmethod
    def backward(ctx, dout, dlse):
        out, lse, *tensors = ctx.saved_tensors
        inputs = [option if x is None else x for x, option in zip(tensors, ctx.options)]
        needed = Arguments(*ctx.needs_input_grad)
        dout = torch.zeros_like(out) if dout is None else dout
        gradients = Backward.apply(dout, dlse, out, lse, needed.bias, needed.relative_bias, *inputs)
        gradients = dict(zip(("query", "key", "value", "bias", "relative_bias"), gradients))
        return tuple(gradients.get(name) if needs else None for name, needs in zip(Arguments._fields, needed))

    @staticmethod
    def vmap(info, in_dims, *args):
        return batched(Forward, Arguments, info.batch_size, in_dims, args)


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
        given = BackwardArguments(*args)
        own = [name for name in ("bias", "relative_bias") if getattr(given, f"needs_d{name}")]
        return batched(Backward, BackwardArguments, info.batch_size, in_dims, args, own)


def batched(
    operator: type[Operator], fields: type, size: int, in_dims: tuple, args: tuple, own: Collection[str] = ()
) -> tuple[tuple[Tensor, ...], tuple]:
    """`size` calls of an operator: one call with `size` times the batch where that copies nothing large, else one after
    the other.

    fields: Arguments or BackwardArguments, of `in_dims` and `args`.
    own: the arguments that every call needs its own of, for its own gradient.
    """
    args = fields(*(x if dim is None else x.movedim(dim, 0) for x, dim in zip(args, in_dims)))
    is_mapped = fields(*(dim is not None for dim in in_dims))
    if size == 0:  # one call, of zeros, shows the shapes
        call = operator.apply(*(zeros_of_none(x) if mapped else x for x, mapped in zip(args, is_mapped)))
        return tuple(x[None][:0] for x in call), (0,) * len(call)
    folded = fold(size, is_mapped, args, own)
    if folded is None:
        calls = [
            operator.apply(*(contiguous_rows(x[i]) if mapped else x for x, mapped in zip(args, is_mapped)))
            for i in range(size)
        ]
        return tuple(map(torch.stack, zip(*calls))), (0,) * len(calls[0])
    outputs = operator.apply(*folded)
    # A gradient that is not needed is an empty tensor (0).
    dims = tuple(None if x.ndim == 1 else 0 for x in outputs)
    return tuple(
        x if dim is None else x.unflatten(0, (size, x.shape[0] // size)) for x, dim in zip(outputs, dims)
    ), dims


def zeros_of_none(x: Tensor) -> Tensor:
    """Zeros in the shape of an element of x, which has none; of the graph where x has a gradient."""
    return x.sum(0) if x.is_floating_point() else x.new_zeros(x.shape[1:])


def fold(size: int, is_mapped, args, own: Collection[str]) -> list | None:
    """The arguments with all calls in the batch dimension; None where that would copy an argument, or cannot be
    done."""
    batch = args.query.shape[1 if is_mapped.query else 0]
    result = []
    for name, x, mapped in zip(args._fields, args, is_mapped):
        if not isinstance(x, Tensor):
            result.append(x)
        elif name in PER_BATCH:
            x = x if mapped else x[None].expand(size, *x.shape)
            result.append(contiguous_rows(x.flatten(0, 1)))
        elif name not in SHARED_BATCH:
            return None  # lists and sequences of variable length
        else:
            at, per_call = SHARED_BATCH[name], mapped or name in own
            x = x[None].expand(size, *x.shape) if per_call and not mapped else x
            each = x.shape[at + per_call]
            divides = name in GROUPS_SHARE and each > 0 and batch % each == 0
            if not (each == batch or divides if per_call else each == 1):
                return None
            result.append(x.movedim(0, at).flatten(at, at + 1) if per_call else x)
    return result


def savable(x: Tensor | None) -> Tensor | None:
    """A tensor that autograd can save: one made in inference mode has no version counter, and is copied."""
    return x.clone() if x is not None and x.is_inference() else x


def contiguous_rows(rows: Tensor) -> Tensor:
    return rows if rows.ndim == 0 or rows.stride(-1) == 1 else rows.contiguous()


def transformed(function: type[Operator]) -> Callable[..., tuple[Tensor, ...]]:
    """The operator while transforms are active."""

    def call(*args):
        if any(interpreter.key() == TransformType.Functionalize for interpreter in get_interpreter_stack()):
            raise NotImplementedError(
                "flash_dmattn does not support torch.func.functionalize, whose transform has no rule for autograd "
                f"functions; torch.export and torch.compile need none, or {INSTEAD}"
            )
        return function.apply(*args)

    return call


if ops.attention_forward is not None:
    LIBRARY = torch.library.Library(NAMESPACE, "IMPL")
    for name, function in (("attention_forward", Forward), ("attention_backward", Backward)):
        # The dispatch key of active transforms.
        LIBRARY.impl(name, transformed(function), "FuncTorchDynamicLayerFrontMode")
