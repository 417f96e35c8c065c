"""Checks of single arguments. Each error names the argument, what it accepts and what it got."""

from __future__ import annotations

import numbers
import operator

import torch
from torch import Tensor

from . import ops

INT64_MAX = 2**63 - 1
INT32_MAX = 2**31 - 1
INT32_ARGUMENTS = ("cu_seqlens", "cache_seqlens", "cache_batch_idx", "block_table", "indices")


def names(dtypes) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def shape_of(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)


def require_given(**arguments: object) -> None:
    """Raises for arguments without a default that come after some that have one."""
    for name, value in arguments.items():
        if value is None:
            raise TypeError(f"{name} is required, got None")


def require_tensor(name: str, value: object, accepted: str = "a torch.Tensor") -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be {accepted}, got {type(value).__name__}{as_tensor_hint(name, value)}")
    require_dense(name, value)


def as_tensor_hint(name: str, value: object) -> str:
    """The end of an error for NumPy arrays and sequences in place of tensors."""
    if isinstance(value, (Tensor, int, numbers.Integral)):  # also an int of a traced graph, which has no attributes
        return ""
    if isinstance(value, (list, tuple)):  # not of masks
        converts = all(isinstance(x, (list, tuple, numbers.Number)) or hasattr(x, "__array__") for x in value)
    else:
        converts = hasattr(value, "__array__")
    if not converts:
        return ""
    dtype = ", dtype=torch.int32" if name.startswith(INT32_ARGUMENTS) else ""  # as_tensor makes int64
    return f": pass torch.as_tensor({name}{dtype})"


def require_dense(name: str, value: Tensor) -> None:
    if value.layout != torch.strided or value.is_nested:
        kind = "nested" if value.is_nested else str(value.layout).removeprefix("torch.").lstrip("_")
        raise TypeError(f"{name} must be a dense torch.Tensor, got a {kind} one")


def require_no_grad(name: str, tensor: Tensor | None, what: str) -> None:
    """For calls that have no gradients. `what` is what makes them so."""
    if tensor is not None and tensor.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{name} must not require grad: {what} is for inference, and has no gradients; make the call under "
            "torch.no_grad()"
        )


def require_floating(name: str, value: object) -> None:
    require_tensor(name, value)
    if not value.is_floating_point():
        raise TypeError(f"{name} must be floating, got {names([value.dtype])}")
    if value.dtype.itemsize < 2:
        raise TypeError(f"{name} must be floating of at least 16 bits, got {names([value.dtype])}")


def require_float32_or(dtype: torch.dtype, name: str, value: object) -> None:
    require_floating(name, value)
    if value.dtype not in (dtype, torch.float32):
        accepted = " or ".join(dict.fromkeys((names([dtype]), "float32")))
        raise TypeError(f"{name} must be {accepted}, got {names([value.dtype])}")


def has_integers(tensor: Tensor, or_bool: bool = False) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex()) and (or_bool or tensor.dtype != torch.bool)


def require_integers(name: str, value: object, or_bool: bool = False) -> None:
    require_tensor(name, value)
    if not has_integers(value, or_bool):
        accepted = "bool or integers" if or_bool else "integers"
        raise TypeError(f"{name} must be {accepted}, got {names([value.dtype])}")


def require_device(name: str, tensor: Tensor, device: torch.device, whose: str) -> None:
    if tensor.device != device:
        raise RuntimeError(f"{name} must be on {whose}'s device {device}, got {tensor.device}")


def require_int(name: str, value: object, accepted: str = "an int") -> int:
    """The value as an int, also for integers of NumPy; lengths of a traced graph stay symbolic."""
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt, numbers.Integral)):
        raise TypeError(f"{name} must be {accepted}, got {type(value).__name__}")
    return value if isinstance(value, (int, torch.SymInt)) else operator.index(value)


def require_count(name: str, value: object, accepted: str = "an int", hint: str = "") -> int:
    """`require_int`, not negative. hint: the end of the error for a negative value."""
    value = require_int(name, value, accepted)
    if true_if_known(value < 0):
        raise ValueError(f"{name} must not be negative, got {value}{hint}")
    return value


def require_count_or_tensor(name: str, value: object) -> int:
    """`require_count` of an argument that may also be a tensor, which the caller tests before."""
    accepted = "a torch.Tensor or an int"
    if as_tensor_hint(name, value):
        require_tensor(name, value, accepted)
    return require_count(name, value, accepted)


def lengths_of(cache_seqlens: object, batch: int, device: torch.device, seqlen_k: int | None = None) -> Tensor:
    """int32 (batch) of an int for all sequences, which is at most seqlen_k; a tensor as it is."""
    if isinstance(cache_seqlens, Tensor):
        return cache_seqlens
    length = require_count_or_tensor("cache_seqlens", cache_seqlens)
    if true_if_known(length > INT32_MAX):
        raise ValueError(f"cache_seqlens must fit in 32 bits, got {length}")
    if seqlen_k is not None and statically_true(length > seqlen_k):
        raise ValueError(f"cache_seqlens must be from 0 to {seqlen_k}, the number of keys, got {length}")
    return torch.full((batch,), length, dtype=torch.int32, device=device)


def batch_slice(index: object, batches: int) -> object:
    """An integer as the slice of one batch element, from the end if it is negative; any other index as it is."""
    if isinstance(index, bool) or not isinstance(index, numbers.Integral):
        return index
    if not -batches <= index < batches:
        raise IndexError(f"index {index} is out of range for {batches} batch elements")
    index = operator.index(index) % batches
    return slice(index, index + 1)


def require_dimension(name: str, tensor: Tensor, dim: object) -> int:
    """dim as a dimension of the tensor, counted from 0."""
    dim = require_int("dim", dim)
    if not -tensor.ndim <= dim < tensor.ndim:
        raise IndexError(f"dim must be a dimension of {name}, of shape {shape_of(tensor)}, got {dim}")
    return dim % tensor.ndim


def require_length(name: str, value: object) -> int:
    """A count that the operators take: `require_count` with a bound."""
    value = require_count(name, value)
    if true_if_known(value > INT64_MAX):
        raise ValueError(f"{name} must fit in 64 bits, got {value}")
    return value


def require_max_seqlen(name: str, value: object) -> int:
    """`require_length`, also of an integer tensor () on the CPU, which callers of flash-attn pass."""
    if isinstance(value, Tensor):
        accepted = "must be an int, or outside of compiled graphs an integer tensor () on the CPU"
        if value.ndim > 0 or not has_integers(value):
            raise TypeError(f"{name} {accepted}, got {names([value.dtype])} of shape {shape_of(value)}")
        if not is_host_readable(value):
            raise TypeError(f"{name} {accepted}, got one on {value.device} that is not read: pass {name}.item()")
        value = int(value)
    return require_length(name, value)


def require_number(name: str, value: object, or_tensor: bool = False) -> None:
    """or_tensor: whether the argument may also be a tensor, which the caller tests before."""
    if type(value) in (float, int):  # the common case: an abstract class takes longer
        return
    is_number = isinstance(value, (numbers.Real, torch.SymFloat, torch.SymInt)) and not isinstance(value, bool)
    if not is_number:
        accepted, hint = ("a number or a torch.Tensor", as_tensor_hint(name, value)) if or_tensor else ("a number", "")
        raise TypeError(f"{name} must be {accepted}, got {type(value).__name__}{hint}")


def require_bool(name: str, value: object) -> None:
    """Accepts Python's bool and NumPy's, which need not be installed."""
    if isinstance(value, bool):
        return
    if type(value).__module__ != "numpy" or type(value).__name__ not in ("bool", "bool_"):
        raise TypeError(f"{name} must be a bool, got {type(value).__name__}")


def is_host_readable(tensor: Tensor) -> bool:
    """Whether reading the values is free. Values on a GPU need a synchronization; a traced graph and a transform of
    torch.func have none."""
    if tensor.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    keys, key = torch._C._dispatch_keys(tensor), torch._C.DispatchKey
    return not (keys.has(key.Python) or keys.has(key.FuncTorchBatched) or keys.has(key.FuncTorchGradWrapper))


def assert_later(is_valid: Tensor, message: str) -> None:
    """Asserts values that the host does not read; of a DTensor this rank's. Transforms of torch.func have no assertions
    but in a traced graph."""
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        return
    if type(is_valid) is not Tensor and hasattr(is_valid, "device_mesh"):
        is_valid = is_valid.to_local()  # the assertion has no sharding rule
    torch._assert_async(is_valid.all(), message)


def true_if_known(condition: bool) -> bool:
    """A condition on lengths. In a traced graph it adds a guard, and is False where only the graph's data decides."""
    if isinstance(condition, bool) and not torch.compiler.is_compiling():
        return condition
    from torch.fx.experimental.symbolic_shapes import guard_or_false  # slow to import

    return guard_or_false(condition)


def statically_true(condition: bool) -> bool:
    """Whether a condition on lengths is known to hold. Adds no guard to a traced graph whose lengths may go either way:
    for early errors and for decisions that affect only the speed."""
    if isinstance(condition, bool) and not torch.compiler.is_compiling():
        return condition
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # slow to import

    return statically_known_true(condition)


def check_cu_seqlens(
    name: str,
    cu_seqlens: object,
    reference: Tensor | None = None,
    whose: str = "",
    total: tuple[int, str] | None = None,
    longest: tuple[str, object] | None = None,
    or_less: bool = False,
) -> None:
    """Checks the offsets of sequences, int32 (B + 1). Their values are checked on the CPU only.

    reference, whose: a tensor on the required device, and its name.
    total: the number of rows or keys, where known, and what they are, such as "the rows of query"; with `or_less` the
        last sequence may end before it.
    longest: the name and value of a bound on the length of a sequence, if any.
    """
    longest_name, bound = ("", None) if longest is None else (longest[0], require_length(*longest))
    checker = ops.checker()
    if checker is not None:
        count, counted = (None, "") if total is None else total
        checker.check_cu_seqlens(name, cu_seqlens, reference, whose, count, counted, or_less, longest_name, bound)


def check_same_sequences(cu_seqlens_q: object, cu_seqlens_k: object, name: str = "cu_seqlens") -> None:
    """Raises for different numbers of sequences. Called before `check_cu_seqlens`, which would report that the shorter
    one ends early."""
    require_tensor(f"{name}_q", cu_seqlens_q)
    require_tensor(f"{name}_k", cu_seqlens_k)
    if cu_seqlens_q.ndim == cu_seqlens_k.ndim == 1 and cu_seqlens_q.shape != cu_seqlens_k.shape:
        sizes = f"{cu_seqlens_q.shape[0]} and {cu_seqlens_k.shape[0]}"
        raise ValueError(f"{name}_q and {name}_k must both have B + 1 elements, got {sizes}")
