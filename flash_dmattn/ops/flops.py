"""Floating-point operations of the attention operators, for torch.utils.flop_counter.FlopCounterMode."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from types import ModuleType

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from ..loading import NAMESPACE
from .list_sizes import LIST_ROWS, count_causal_scores
from .schema import Arguments, BackwardArguments

FORWARD_GEMMS, BACKWARD_GEMMS = 2, 5


def visible_scores(given: Arguments) -> int:
    """The visible scores of all batch elements and query heads. Reads the values of masks, which waits for a GPU.

    | mask | scores |
    | --- | --- |
    | bool on the CPU, key intervals | those that the mask and causality show |
    | key lists alone | the listed keys times the rows of a list |
    | packed masks on CUDA, variable length with a mask, values that cannot be read | all that causality shows |

    Biases that hide and cache_seqlens are not counted.
    """
    rows, heads = given.query.shape[-3:-1]
    keys = given.key.shape[-3]
    if given.cu_seqlens_q is not None:
        return heads * scores_of_sequences(given)
    batch = given.query.shape[0]
    shown, shared_by = None, 1
    if given.intervals is not None and is_readable(given.intervals):
        shown = scores_of_intervals(given.intervals, rows, keys, given.is_causal)
        shared_by = share(given, given.intervals.shape[1:3])
    elif given.kv_indptr is not None and given.mask is None and is_readable(given.kv_indptr):
        shown, shared_by = scores_of_lists(given, rows), share(given, given.kv_indptr.shape[1:3])
    elif given.mask is not None and given.mask.dtype == torch.bool and is_readable(given.mask):
        mask = given.mask.expand(-1, -1, rows, keys)
        shown = int((mask.tril(keys - rows) if given.is_causal else mask).sum())
        shared_by = share(given, given.mask.shape[:2])
    if shown is None:
        return batch * heads * int(count_causal_scores(rows, keys, given.is_causal))
    return shown * shared_by


def is_readable(tensor: Tensor) -> bool:
    return tensor.device.type != "meta" and not isinstance(tensor, FakeTensor)


def share(given: Arguments, of_mask: tuple[int, int]) -> int:
    """How many pairs of a batch element and a query head share each of the mask's (batches, heads)."""
    return given.query.shape[0] * given.query.shape[-2] // max(of_mask[0] * of_mask[1], 1)


def scores_of_intervals(intervals: Tensor, rows: int, keys: int, is_causal: bool) -> int:
    start, end = intervals.clamp(0, rows).long()
    if is_causal:
        start = start.maximum(torch.arange(keys, device=start.device) - (keys - rows))
    return int((end - start).clamp(min=0).sum())


def scores_of_lists(given: Arguments, rows: int) -> int:
    lengths = given.kv_indptr[1] - given.kv_indptr[0]  # (batches, heads, row tiles)
    if lengths.shape[2] == 1:
        return int(lengths.sum()) * rows
    bits = given.kv_row_bits
    tile = LIST_ROWS if bits is None else 32 * bits.shape[1]
    first = torch.arange(lengths.shape[2], device=lengths.device) * tile
    return int((lengths * (rows - first).clamp(max=tile)).sum())


def scores_of_sequences(given: Arguments) -> int:
    if not is_readable(given.cu_seqlens_q):
        return given.query.shape[0] * given.max_seqlen_k
    lengths = zip(given.cu_seqlens_q.diff().tolist(), given.cu_seqlens_k.diff().tolist())
    return sum(int(count_causal_scores(rows, keys, given.is_causal)) for rows, keys in lengths)


def forward(*args, out_val=None, **kwargs) -> int:
    given = Arguments(*args, **kwargs)
    return FORWARD_GEMMS * 2 * given.query.shape[-1] * visible_scores(given)


def backward(*args, out_val=None, **kwargs) -> int:
    given = BackwardArguments(*args, **kwargs)
    inputs = Arguments(*given[-len(Arguments._fields) :])
    return BACKWARD_GEMMS * 2 * inputs.query.shape[-1] * visible_scores(inputs)


# Registration


FLOP_COUNTER = "torch.utils.flop_counter"


def register() -> None:
    """Registers the formulas once torch.utils.flop_counter is imported. Importing it here would import Triton, too."""
    if FLOP_COUNTER in sys.modules:
        register_formulas(sys.modules[FLOP_COUNTER])
    else:
        sys.meta_path.insert(0, AfterImport())


def register_formulas(flop_counter: ModuleType) -> None:
    operators = getattr(torch.ops, NAMESPACE)
    flop_counter.register_flop_formula(operators.attention_forward, get_raw=True)(forward)
    flop_counter.register_flop_formula(operators.attention_backward, get_raw=True)(backward)


class AfterImport(importlib.abc.MetaPathFinder):
    """Lets the other finders import torch.utils.flop_counter, then registers the formulas."""

    def find_spec(self, name, path, target=None):
        if name != FLOP_COUNTER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            register_formulas(module)

        spec.loader.exec_module = exec_module
        return spec
