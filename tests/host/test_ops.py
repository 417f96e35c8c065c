"""The operators under autograd, torch.compile and autocast."""

import pytest
import torch
from helpers import inputs, rand_mask
from torch.utils._python_dispatch import TorchDispatchMode

from flash_dmattn import flash_dmattn_func, flash_dmattn_kvpacked_func, flash_dmattn_varlen_func, ops
from flash_dmattn.ops.schema import Arguments, BackwardArguments

PAIRS = {
    "none": (None, None),
    "key": ((1, 1, 1, 7), (2, 4, 1, 7)),
    "dense": ((2, 2, 5, 7), (1, 2, 5, 7)),
    "broadcast": ((1, 4, 5, 7), (1, 1, 5, 7)),
    "row": (None, (2, 1, 5, 1)),
}


def leaves_of(*tensors):
    return [x.detach().clone().requires_grad_() for x in tensors]


@pytest.mark.parametrize("causal, softcap", [(False, 0.0), (True, 2.0)])
@pytest.mark.parametrize("pairs", PAIRS)
def test_gradcheck(pairs, causal, softcap):
    mask_shape, bias_shape = PAIRS[pairs]
    mask = None if mask_shape is None else rand_mask(*mask_shape, visible=0.7)
    leaves = leaves_of(*inputs(2, 5, 7, 4, 2, 8, torch.float64))
    if bias_shape is not None:
        leaves += leaves_of(torch.randn(bias_shape, dtype=torch.float64))

    def function(query, key, value, bias=None):
        out, lse = flash_dmattn_func(query, key, value, mask, bias, is_causal=causal, softcap=softcap, return_lse=True)
        return out, lse.masked_fill(lse == -torch.inf, 0)

    assert torch.autograd.gradcheck(function, leaves)


@pytest.mark.parametrize("pair_shape", [None, (11, 2), (9, 4, 7)], ids=str)
def test_gradcheck_varlen(pair_shape):
    cu_q, cu_k = torch.tensor([0, 5, 9], dtype=torch.int32), torch.tensor([0, 7, 11], dtype=torch.int32)
    shapes = [(9, 4, 8), (11, 2, 8), (11, 2, 8), *([pair_shape] if pair_shape else [])]
    leaves = leaves_of(*(torch.randn(shape, dtype=torch.float64) for shape in shapes))

    def function(query, key, value, bias=None):
        return flash_dmattn_varlen_func(query, key, value, None, bias, cu_q, cu_k, 5, 7, return_lse=True)

    assert torch.autograd.gradcheck(function, leaves)


def test_double_backward_says_that_it_is_not_supported():
    leaves = leaves_of(*inputs(1, 5, 7, 2, 2, 8, torch.float64))
    (dquery,) = torch.autograd.grad(flash_dmattn_func(*leaves).sum(), leaves[0], create_graph=True)
    with pytest.raises(RuntimeError, match="does not support double backward; use the backend 'reference'"):
        dquery.sum().backward()
    with pytest.raises(RuntimeError, match="does not support double backward"):
        torch.autograd.gradgradcheck(flash_dmattn_func, leaves)


@pytest.mark.parametrize("wanted", range(4))
def test_only_the_gradients_that_are_wanted(wanted):
    tensors = [*inputs(1, 9, 9, 2, 2, 8), torch.randn(1, 2, 9, 9)]
    tensors[wanted].requires_grad_()
    flash_dmattn_func(*tensors[:3], None, tensors[3]).sum().backward()
    assert [x.grad is not None for x in tensors] == [i == wanted for i in range(4)]


class OperatorCalls(TorchDispatchMode):
    """The names and arguments of the operators that are called."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.calls.append((str(function), args))
        return function(*args, **(kwargs or {}))


def test_a_bias_that_needs_no_gradient_costs_none():
    needs_dbias = []
    for needed in (False, True):
        tensors = [x.requires_grad_() for x in inputs(1, 9, 9, 2, 2, 8)]
        out = flash_dmattn_func(*tensors, None, torch.randn(1, 2, 9, 9, requires_grad=needed))
        with OperatorCalls() as seen:
            out.sum().backward()
        calls = [args for name, args in seen.calls if "attention_backward" in name]
        needs_dbias += [BackwardArguments(*args).needs_dbias for args in calls]
    assert needs_dbias == [False, True]


def test_a_dense_bias_of_one_column_is_refused():
    query, key, value = inputs(1, 70, 500, 2, 2, 8)
    with pytest.raises(ValueError, match=r"attn_bias must have a column for every key, got shape \(1, 1, 70, 1\)"):
        bias = torch.zeros(1, 1, 70, 1)
        ops.attention_forward(*Arguments(query, key, value, bias, softmax_scale=0.3))


def test_the_python_arguments_match_the_schemas():
    for operator, arguments in ((ops.attention_forward, Arguments), (ops.attention_backward, BackwardArguments)):
        assert [argument.name for argument in operator._schema.arguments] == list(arguments._fields)
    assert [name for name in Arguments._fields if name in ops.MaskTensors._fields] == list(ops.MaskTensors._fields)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile_fullgraph_with_dynamic_shapes(backend, monkeypatch, tmp_path):
    # Inductor's cache identifies an operator by name, and would return code for an older signature.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def layer(query, key, value, mask, bias):
        out, lse = flash_dmattn_func(query * 2, key, value, mask, bias.exp(), is_causal=True, return_lse=True)
        return out.sin(), lse

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=backend)
    torch._dynamo.reset()
    for batch, seqlen in ((2, 33), (3, 65), (1, 129)):
        tensors = inputs(batch, seqlen, seqlen, 4, 2, 12)
        mask, bias = rand_mask(batch, 1, 1, seqlen), torch.randn(1, 2, seqlen, seqlen)
        mask[..., 0] = True
        results = []
        for function in (layer, compiled):
            leaves = leaves_of(*tensors, bias)
            out, lse = function(*leaves[:3], mask, leaves[3])
            results.append((out, lse, *torch.autograd.grad((out.sum() + lse.sum()), leaves)))
        for a, b in zip(*results):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_compile_varlen_fullgraph():
    cu = torch.tensor([0, 4, 9], dtype=torch.int32)
    query, key, value = (torch.randn(9, 2, 8) for _ in range(3))

    def layer(query, key, value):
        return flash_dmattn_varlen_func(query, key, value, None, None, cu, cu, 5, 5).cos()

    torch.testing.assert_close(
        torch.compile(layer, fullgraph=True, backend="aot_eager")(query, key, value), layer(query, key, value)
    )


def test_autocast():
    query, key, value = inputs(1, 33, 33, 2, 2, 16)
    key_bias, dense_bias = torch.randn(1, 2, 1, 33), torch.randn(1, 2, 33, 33)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with_key, with_dense = (flash_dmattn_func(query, key, value, None, x) for x in (key_bias, dense_bias))
    halves = [x.bfloat16() for x in (query, key, value)]
    assert with_key.dtype == torch.bfloat16
    assert torch.equal(with_key, flash_dmattn_func(*halves, None, key_bias))
    assert torch.equal(with_dense, flash_dmattn_func(*halves, None, dense_bias.bfloat16()))


def test_autocast_of_packed_inputs_in_two_dtypes():
    query, key, value = inputs(1, 33, 33, 2, 2, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = flash_dmattn_kvpacked_func(query, torch.stack([key, value], dim=2).bfloat16())
    assert torch.equal(out, flash_dmattn_func(*(x.bfloat16() for x in (query, key, value))))


def test_autocast_gradients_come_in_the_inputs_dtypes():
    leaves = [*inputs(1, 9, 9, 2, 2, 8), torch.randn(1, 2, 9, 9)]
    leaves = leaves_of(*leaves)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = flash_dmattn_func(*leaves[:3], None, leaves[3])
    out.float().sum().backward()
    assert all(x.grad.dtype == torch.float32 for x in leaves)


def test_no_grad_and_inference_mode():
    tensors = [x.requires_grad_() for x in inputs(1, 9, 9)]
    expected = flash_dmattn_func(*tensors).detach()
    with torch.no_grad():
        assert not flash_dmattn_func(*tensors).requires_grad
    with torch.inference_mode():
        assert torch.equal(flash_dmattn_func(*tensors), expected)
