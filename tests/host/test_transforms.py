"""torch.func, forward-mode AD, biases that the softmax does not see, and tensors made in inference mode."""

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from helpers import inputs, rand_intervals, rand_mask, reference
from torch.func import functional_call, functionalize, grad, jacfwd, jacrev, jvp, vjp, vmap

from flash_dmattn import (
    KeyIntervalMask,
    KeyLists,
    flash_dmattn_func,
    flash_dmattn_varlen_func,
    flash_dmattn_with_kvcache,
)

CALLS = 3  # of vmap


def small(batch=2, seqlen=6, head_dim=8):
    return inputs(batch, seqlen, seqlen, 4, 2, head_dim, torch.float64)


def stacked(make):
    return torch.stack([make() for _ in range(CALLS)])


def assert_all_close(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def sum_of(function, *mask, **options):
    def total(query, key, value, bias=None):
        out, lse = function(query, key, value, *mask or (None,), bias, return_lse=True, **options)
        return (out.sin().sum() + lse.masked_fill(lse == -torch.inf, 0).cos().sum()).sum()

    return total


@pytest.mark.parametrize("bias_shape", [None, (1, 4, 1, 6), (2, 2, 6, 6), (1, 1, 6, 1)], ids=str)
def test_grad_vjp_and_jacrev(bias_shape):
    tensors = [*small(), *([] if bias_shape is None else [torch.randn(bias_shape, dtype=torch.float64)])]
    mask = rand_mask(2, 1, 6, 6)
    everything = tuple(range(len(tensors)))
    ours, theirs = (sum_of(function, mask, is_causal=True) for function in (flash_dmattn_func, reference))
    expected = grad(theirs, everything)(*tensors)
    assert_all_close(grad(ours, everything)(*tensors), expected)
    assert_all_close(vjp(ours, *tensors)[1](torch.ones((), dtype=torch.float64)), expected)

    def rows(function):
        def few(*tensors):
            bias = tensors[3] if bias_shape else None
            return function(*tensors[:3], mask, bias, return_lse=True)[0][:, :2, :1, :2]

        return jacrev(few, everything)(*tensors)

    assert_all_close(rows(flash_dmattn_func), rows(reference))


def test_functional_call_with_grad():
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.project = torch.nn.Linear(8, 8, bias=False, dtype=torch.float64)

        def forward(self, query, key, value):
            return flash_dmattn_func(self.project(query), key, value, is_causal=True).sin().sum()

    layer, tensors = Layer(), small()
    parameters = {name: x.detach() for name, x in layer.named_parameters()}
    gradients = grad(lambda p: functional_call(layer, p, tuple(tensors)))(parameters)
    layer(*tensors).backward()
    torch.testing.assert_close(gradients["project.weight"], layer.project.weight.grad)


VMAPPED = {  # shapes of mask and bias of one call, and whether each call has its own
    "plain": (None, None, 0),
    "own dense bias": (None, (2, 4, 6, 6), 0),
    "own key bias, one for the batch": (None, (1, 4, 1, 6), 0),
    "one bias": ((1, 1, 6, 6), (1, 2, 6, 6), None),
    "one bias for each of a batch": ((2, 1, 6, 6), (2, 2, 1, 6), None),
    "own mask": ((2, 4, 6, 6), (2, 4, 6, 6), 0),
}


@pytest.mark.parametrize("case", VMAPPED)
@pytest.mark.parametrize("dim", [0, 2, -1])
def test_vmap_and_gradients_of_each_call(case, dim):
    mask_shape, bias_shape, own = VMAPPED[case]
    tensors = [x.movedim(0, dim) for x in map(torch.stack, zip(*(small() for _ in range(CALLS))))]
    mask = bias = None
    if mask_shape:
        mask = rand_mask(*mask_shape) if own is None else stacked(lambda: rand_mask(*mask_shape))
    if bias_shape:
        shape = bias_shape if own is None else (CALLS, *bias_shape)
        bias = torch.randn(shape, dtype=torch.float64)
    wanted = (0, 1, 2) if bias is None else (0, 1, 2, 4)

    def total(function):
        return lambda query, key, value, mask, bias: sum_of(function, mask)(query, key, value, bias)

    in_dims = (dim, dim, dim, None if mask is None else own, None if bias is None else own)
    arguments = (*tensors, mask, bias)
    ours = vmap(grad(total(flash_dmattn_func), wanted), in_dims)(*arguments)
    each = []
    for i in range(CALLS):
        one = [x if d is None else x.select(d, i) for x, d in zip(arguments, in_dims)]
        each.append(grad(total(reference), wanted)(*one))
    assert_all_close(ours, map(torch.stack, zip(*each)))

    # grad of vmap: one gradient through all calls.
    leaves = [x for i, x in enumerate(arguments) if i in wanted]

    def through(function):
        def of_leaves(*leaves):
            bias = leaves[3] if len(leaves) > 3 else None
            return vmap(total(function), in_dims)(*leaves[:3], mask, bias).sum()

        return grad(of_leaves, tuple(range(len(leaves))))(*leaves)

    assert_all_close(through(flash_dmattn_func), through(reference))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("seqlen", [6, 600])
def test_vmap_with_every_kind_of_mask(seqlen):
    tensors = list(map(torch.stack, zip(*(small(1, seqlen) for _ in range(CALLS)))))
    bias = torch.randn(CALLS, 1, 2, 1, seqlen, dtype=torch.float64)
    mask = rand_mask(1, 1, seqlen, seqlen)
    intervals = rand_intervals(1, 2, seqlen, rows=seqlen)
    indices = torch.randint(-1, seqlen, (1, 2, seqlen, 4), dtype=torch.int32)
    cases = {
        "bool": lambda *x: flash_dmattn_func(*x[:3], mask, x[3]),
        "intervals": lambda *x: flash_dmattn_func(*x[:3], intervals, x[3]),
        "window": lambda *x: flash_dmattn_func(*x[:3], None, x[3], is_causal=True, window_size=4),
        "wide window": lambda *x: flash_dmattn_func(*x[:3], None, x[3], is_causal=True, window_size=seqlen),
        "lists": lambda *x: flash_dmattn_func(*x[:3], KeyLists.build(intervals, seqlen), x[3]),
        "indices": lambda *x: flash_dmattn_func(*x[:3], KeyLists.from_indices(indices, seqlen, seqlen), x[3]),
    }
    for name, function in cases.items():

        def gradient(*x, function=function):
            return grad(lambda *x: function(*x).sin().sum(), 3)(*x)

        expected = torch.stack([function(*(x[i] for x in (*tensors, bias))) for i in range(CALLS)])
        torch.testing.assert_close(vmap(function)(*tensors, bias), expected, msg=name)
        each = torch.stack([gradient(*(x[i] for x in (*tensors, bias))) for i in range(CALLS)])
        torch.testing.assert_close(vmap(gradient)(*tensors, bias), each, msg=name)


def test_grad_and_vmap_of_variable_length():
    cu = torch.tensor([0, 4, 9], dtype=torch.int32)
    tensors = [torch.randn(CALLS, 9, heads, 8, dtype=torch.float64) for heads in (4, 2, 2)]

    def total(*tensors):
        return flash_dmattn_varlen_func(*tensors, None, None, cu, cu, 5, 5, is_causal=True).sin().sum()

    leaves = [x.clone().requires_grad_() for x in tensors]
    sum(total(*(x[i] for x in leaves)) for i in range(CALLS)).backward()
    assert_all_close(vmap(grad(total, (0, 1, 2)))(*tensors), [x.grad for x in leaves])


def test_vmap_of_size_0():
    def windowed(bias, *tensors):
        return flash_dmattn_func(*tensors, None, bias, is_causal=True, window_size=3)

    tensors = [x.new_empty(0, *x.shape) for x in small()]
    bias = torch.zeros(2, 1, 1, tensors[1].shape[2])
    assert vmap(lambda *x: windowed(bias, *x))(*tensors).shape == tensors[0].shape
    with pytest.raises(RuntimeError, match="does not support vmap over dims of size 0"):
        vmap(windowed)(bias.expand(0, *bias.shape), *tensors)
    row_bias = torch.zeros(0, 2, 1, 1, 1)
    assert vmap(lambda bias, *x: flash_dmattn_func(*x, None, bias))(row_bias, *tensors).shape == tensors[0].shape


def test_functionalize_is_refused():
    tensors = small()

    def total(*tensors):
        return flash_dmattn_func(*tensors).sum()

    stacked_tensors = [torch.stack([x, x]) for x in tensors]
    for call, given in (
        (functionalize(total), tensors),
        (functionalize(grad(total)), tensors),
        (grad(functionalize(total)), tensors),
        (functionalize(vmap(total)), stacked_tensors),
    ):
        with pytest.raises(NotImplementedError, match="does not support torch.func.functionalize.* 'reference'"):
            call(*given)


@pytest.mark.parametrize("calls", [None, 2])
def test_compiled_transforms(calls):
    tensors = small() if calls is None else [torch.stack([x] * calls) for x in small()]
    gradients = grad(sum_of(flash_dmattn_func), (0, 1, 2))
    gradients = gradients if calls is None else vmap(gradients)
    compiled = torch.compile(lambda *x: gradients(*x), backend="aot_eager", fullgraph=True)
    torch._dynamo.reset()
    assert_all_close(compiled(*tensors), gradients(*tensors))


def test_double_backward_under_transforms_says_that_it_is_not_supported():
    query, key, value = small()
    once = grad(lambda query: flash_dmattn_func(query, key, value).sin().sum())
    with pytest.raises(RuntimeError, match="does not support double backward; use the backend 'reference'"):
        grad(lambda query: once(query).sum())(query)


@pytest.mark.parametrize("grad_mode", [True, False])
def test_forward_mode_is_refused(grad_mode):
    query, key, value = small()
    bias = torch.randn(1, 1, 6, 6, dtype=torch.float64)
    refused = pytest.raises(NotImplementedError, match="does not support forward-mode AD .* 'reference'")
    with torch.set_grad_enabled(grad_mode):
        with refused:
            jvp(lambda x: flash_dmattn_func(x, key, value), (query,), (query,))
        with refused:
            jvp(lambda x: flash_dmattn_func(query, key, value, None, x), (bias,), (bias,))
        with refused:
            jacfwd(lambda x: flash_dmattn_func(x, key, value))(query)
        with forward_ad.dual_level(), refused:
            flash_dmattn_func(query, forward_ad.make_dual(key, key), value)


@pytest.mark.parametrize("shape", [(2, 4, 6, 1), (1, 1, 1, 1)], ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_a_bias_that_the_softmax_does_not_see_gets_zeros(shape, masked):
    bias = torch.randn(shape, dtype=torch.float64)
    bias = (bias.index_fill(2, torch.tensor([0]), -torch.inf) if masked else bias).requires_grad_()
    query, key, value = small()
    flash_dmattn_func(query, key, value, None, bias).sum().backward()
    assert torch.equal(bias.grad, torch.zeros(shape, dtype=torch.float64))


def test_a_bias_that_the_softmax_does_not_see_without_query_heads():
    key, bias = torch.randn(1, 7, 2, 8), torch.randn(1, 2, 5, 1)
    assert flash_dmattn_func(torch.randn(1, 5, 0, 8), key, key, None, bias).shape == (1, 5, 0, 8)


MADE_IN_INFERENCE_MODE = {
    "bool mask": lambda: rand_mask(2, 1, 300, 300),
    "intervals": lambda: KeyIntervalMask.sliding_window(300, 300, 9),
    "lists of intervals": lambda: KeyLists.build(KeyIntervalMask.sliding_window(300, 300, 9), 300),
    "lists of a bool mask": lambda: KeyLists.build(rand_mask(2, 1, 300, 300), 300),
    "lists of indices": lambda: KeyLists.from_indices(torch.randint(-1, 300, (2, 1, 300, 9)).int(), 300, 300),
}


@pytest.mark.parametrize("transformed", [False, True])
@pytest.mark.parametrize("kind", MADE_IN_INFERENCE_MODE)
def test_masks_made_in_inference_mode_train(kind, transformed):
    torch.manual_seed(0)
    with torch.inference_mode():
        mask = MADE_IN_INFERENCE_MODE[kind]()
    torch.manual_seed(0)
    expected_mask = MADE_IN_INFERENCE_MODE[kind]()
    tensors = [x.requires_grad_() for x in small(seqlen=300)]
    expected = torch.autograd.grad(sum_of(flash_dmattn_func, expected_mask)(*tensors), tensors)
    if transformed:
        ours = grad(sum_of(flash_dmattn_func, mask), (0, 1, 2))(*(x.detach() for x in tensors))
    else:
        ours = torch.autograd.grad(sum_of(flash_dmattn_func, mask)(*tensors), tensors)
    assert all(torch.equal(a, b) for a, b in zip(ours, expected))


def test_lengths_made_in_inference_mode_train():
    with torch.inference_mode():
        cu = torch.tensor([0, 5, 12], dtype=torch.int32)
    tensors = [x.flatten(0, 1).requires_grad_() for x in small()]
    flash_dmattn_varlen_func(*tensors, None, None, cu, cu, 7, 7).sum().backward()
    assert all(x.grad is not None for x in tensors)


def test_rows_made_in_inference_mode_say_what_to_do():
    query, _, value = (x.requires_grad_() for x in small())
    with torch.inference_mode():
        key = torch.randn(2, 6, 2, 8, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward.* make a clone"):
        flash_dmattn_func(query, key, value)


def test_lists_move_without_blocking():
    lists = KeyLists.build(KeyIntervalMask.causal(200, 200), 200)
    moved = lists.to("cpu", non_blocking=True)
    assert torch.equal(moved.kv_indices, lists.kv_indices) and moved.seqlen_q == 200


@pytest.mark.parametrize("bias_dims", [None, 0])
def test_vmap_over_no_elements(bias_dims):
    query, key, value = (torch.randn(0, 2, 9, 2, 8, requires_grad=True) for _ in range(3))
    bias = torch.randn(2, 2, 1, 9) if bias_dims is None else torch.randn(0, 2, 2, 1, 9)

    def call(query, key, value, bias):
        return flash_dmattn_func(query, key, value, attn_bias=bias)

    out = torch.func.vmap(call, in_dims=(0, 0, 0, bias_dims))(query, key, value, bias)
    assert out.shape == query.shape
    (dquery,) = torch.autograd.grad(out.sum(), query)
    assert dquery.shape == query.shape


@pytest.mark.parametrize("transform", ["jvp", "vmap", "functionalize"])
def test_calls_that_write_to_a_cache_have_no_transforms(transform):
    query, cache = torch.randn(2, 1, 4, 8), torch.randn(2, 20, 2, 8)

    def call(query):
        return flash_dmattn_with_kvcache(query, cache, cache, cache_seqlens=20)

    transformed = {
        "jvp": lambda: jvp(call, (query,), (query,)),
        "vmap": lambda: vmap(call)(query[None]),
        "functionalize": lambda: functionalize(call)(query),
    }[transform]
    with pytest.raises(NotImplementedError, match="no rule for transforms of torch.func, got query"):
        transformed()
