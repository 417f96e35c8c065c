"""The fast path from Python to the operator, and the calls that must not take it."""

import pytest
import torch
from helpers import inputs, rand_mask
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from flash_dmattn import flash_dmattn_func, interface, ops


@pytest.fixture
def without_short_way(monkeypatch):
    """Runs a call without the fast path."""

    def run(call):
        with monkeypatch.context() as patch:
            patch.setattr(ops, "fast_path", lambda *arguments: None)
            return call()

    return run


@pytest.fixture
def long_ways(monkeypatch):
    """Counts the calls that took the slow path."""
    taken, attend = [], interface.attend
    monkeypatch.setattr(interface, "attend", lambda *args: taken.append(1) or attend(*args))
    return taken


QUERY, KEY, VALUE = inputs(2, 9, 11, 4, 2, 16)
BIASES = {"none": None, "key": torch.randn(2, 2, 1, 11), "dense": torch.randn(1, 4, 9, 11)}
OPTIONS = [{}, {"is_causal": True, "softcap": 3.0}, {"softmax_scale": 0.3, "return_lse": True, "deterministic": True}]


@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "causal, softcap", "scale, lse"])
@pytest.mark.parametrize("bias", BIASES.values(), ids=BIASES.keys())
def test_the_fast_path_returns_the_same_bits(without_short_way, long_ways, bias, options):
    leaves = [x.clone().requires_grad_() for x in (QUERY, KEY, VALUE, bias) if x is not None]

    def call():
        result = flash_dmattn_func(*leaves[:3], None, *leaves[3:], **options)
        results = result if isinstance(result, tuple) else (result,)
        return (*results, *torch.autograd.grad([x.sum() for x in results], leaves))

    short = call()
    assert not long_ways
    long = without_short_way(call)
    assert len(long_ways) == 1 and len(short) == len(long)
    assert all(torch.equal(x, y) for x, y in zip(short, long))


LONG = {
    "mask": lambda: flash_dmattn_func(QUERY, KEY, VALUE, rand_mask(1, 1, 9, 11)),
    "probs": lambda: flash_dmattn_func(QUERY, KEY, VALUE, return_attn_probs=True),
    "head dimension of 12": lambda: flash_dmattn_func(QUERY[..., :12], KEY[..., :12], VALUE[..., :12]),
    "rows that are not contiguous": lambda: flash_dmattn_func(QUERY.transpose(2, 3).contiguous().mT, KEY, VALUE),
    "bias of rows": lambda: flash_dmattn_func(QUERY, KEY, VALUE, None, torch.randn(1, 1, 9, 1)),
    "whole number as scale": lambda: flash_dmattn_func(QUERY, KEY, VALUE, softmax_scale=1),
    "vmap": lambda: torch.vmap(flash_dmattn_func)(*(x[None] for x in (QUERY, KEY, VALUE))),
}


@pytest.mark.parametrize("call", LONG.values(), ids=LONG.keys())
def test_other_calls_take_the_slow_path(long_ways, call):
    call()
    assert long_ways


def test_autocast_takes_the_slow_path(long_ways):
    with torch.autocast("cpu", torch.bfloat16):
        assert flash_dmattn_func(QUERY, KEY, VALUE).dtype == torch.bfloat16
    assert long_ways


def test_modes_and_subclasses_see_the_operator():
    seen = []

    class Functions(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    class Dispatched(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    class Subclass(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            seen.append(function)
            return super().__torch_function__(function, types, args, kwargs or {})

    for mode in (Functions, Dispatched):
        seen.clear()
        with mode():
            flash_dmattn_func(QUERY, KEY, VALUE)
        assert ops.attention_forward in seen, mode
    seen.clear()
    flash_dmattn_func(QUERY, KEY.as_subclass(Subclass), VALUE)
    assert ops.attention_forward in seen
