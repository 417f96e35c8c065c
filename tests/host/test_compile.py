"""torch.compile with dynamic shapes makes one graph; export, make_fx and fake tensors trace the operators."""

import pytest
import torch
from helpers import IS_PYTORCH_2_9, inputs, rand_mask
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from flash_dmattn import KeyIntervalMask, KeyLists, flash_dmattn_func, flash_dmattn_func_auto, ops

# Below and above the thresholds of the dispatch. PyTorch makes separate graphs for sizes of 1 and for sizes that are
# equal in the first call (the batch size and the number of heads).
BATCHES, SEQLENS = (3, 5, 6), (1025, 140, 200, 260, 300, 511, 513, 600, 777, 1000, 129, 1500, 20, 128)
LENGTHS = [(BATCHES[i % 3], seqlen) for i, seqlen in enumerate(SEQLENS)]
HEADS = 4

CASES = {
    "plain": (lambda b, s: None, lambda q, k, v, x: flash_dmattn_func(q, k, v)),
    "key bias": (lambda b, s: torch.randn(b, HEADS, 1, s), lambda q, k, v, x: flash_dmattn_func(q, k, v, None, x)),
    "dense bias": (lambda b, s: torch.randn(1, HEADS, s, s), lambda q, k, v, x: flash_dmattn_func(q, k, v, None, x)),
    "bool mask": (lambda b, s: rand_mask(b, 1, s, s), lambda q, k, v, x: flash_dmattn_func(q, k, v, x)),
    "intervals": (
        lambda b, s: None,
        lambda q, k, v, x: flash_dmattn_func(
            q, k, v, KeyIntervalMask.sliding_window(q.shape[1], k.shape[1], 16), is_causal=True
        ),
    ),
    "window": (
        lambda b, s: torch.randn(b, HEADS, 1, s),
        lambda q, k, v, x: flash_dmattn_func(q, k, v, None, x, is_causal=True, window_size=200),
    ),
    "lists": (
        lambda b, s: KeyLists.build(KeyIntervalMask.sliding_window(s, s, 16), s),
        lambda q, k, v, x: flash_dmattn_func(q, k, v, x),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_one_graph_for_all_lengths(case):
    make, function = CASES[case]
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()

    def layer(query, *rest):
        return function(query * 2, *rest)

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for batch, seqlen in LENGTHS:
        if case == "lists" and seqlen <= 128:
            continue  # one m_block: an input of size 1
        x = make(batch, seqlen)
        leaves = [y.requires_grad_() for y in inputs(batch, seqlen, seqlen, HEADS, 2, 8)]
        if isinstance(x, torch.Tensor) and x.is_floating_point():
            leaves.append(x.requires_grad_())
        expected, ours = (f(*leaves[:3], x) for f in (layer, compiled))
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
        gradients = (torch.autograd.grad(out.sin().sum(), leaves) for out in (ours, expected))
        for a, b in zip(*gradients):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    # PyTorch 2.9 tests whether a layout is contiguous for lengths up to 128 and above.
    assert graphs == (2 if case == "window" and IS_PYTORCH_2_9 else 1)


def layer(query, key, value, bias):
    return flash_dmattn_func(query, key, value, None, bias, is_causal=True)


def windowed(query, key, value, bias):
    return flash_dmattn_func(query, key, value, None, bias, is_causal=True, window_size=20)


def tensors_of(batch, seqlen):
    return (*inputs(batch, seqlen, seqlen, 4, 2, 8), torch.randn(batch, 4, 1, seqlen))


@pytest.mark.parametrize("function", [layer, windowed])
def test_mark_dynamic(function):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for batch, seqlen in ((3, 140), (5, 300), (6, 700)):
        given = tensors_of(batch, seqlen)
        for x in given:
            torch._dynamo.mark_dynamic(x, 0)
            torch._dynamo.mark_dynamic(x, 3 if x is given[3] else 1)
        torch.testing.assert_close(compiled(*given), function(*given), rtol=1e-4, atol=1e-4)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("name", ["softmax_scale", "sinks", "relative_bias", "attn_bias"])
def test_per_head_tensors_where_the_number_of_heads_is_dynamic(name):
    """PyTorch may know a size of one tensor while the same size of another is a symbol."""
    torch._dynamo.reset()
    compiled = torch.compile(flash_dmattn_func, fullgraph=True, backend="eager")
    shapes = {"relative_bias": (1, -1, 15), "attn_bias": (1, -1, 1, 20)}
    for heads, given in ((4, False), (6, False), (8, True)):
        query, key, value = inputs(1, 20, 20, heads, 2, 16)
        shape = shapes.get(name, (-1,))
        options = {name: torch.rand([heads if size < 0 else size for size in shape])} if given else {}
        torch.testing.assert_close(
            compiled(query, key, value, **options), flash_dmattn_func(query, key, value, **options)
        )


@pytest.mark.parametrize("function", [layer, windowed])
def test_export_with_dim(function):
    class Layer(torch.nn.Module):
        def forward(self, query, key, value, bias):
            return function(query, key, value, bias)

    batch, seqlen = torch.export.Dim("batch", min=2, max=64), torch.export.Dim("seqlen", min=130, max=4096)
    rows = {0: batch, 1: seqlen}
    exported = torch.export.export(
        Layer(), tensors_of(3, 140), dynamic_shapes=(rows, rows, rows, {0: batch, 3: seqlen})
    )
    for sizes in ((5, 300), (7, 700)):
        given = tensors_of(*sizes)
        torch.testing.assert_close(exported.module()(*given), function(*given), rtol=1e-4, atol=1e-4)


class Selected(torch.nn.Module):
    """A layer whose operators make tensors of one row per 64 or 128 rows."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def forward(self, query, key, value, bias):
        if self.kind == "window":
            return windowed(query, key, value, bias)
        seqlen = query.shape[1]
        mask = bias.squeeze(2)[..., None, :] > 0
        if self.kind == "packed":  # an operator of CUDA, which is traced anywhere
            return ops.pack_mask(mask.expand(-1, -1, seqlen, -1), seqlen, seqlen, True, None, None)[1]
        indices = (torch.arange(8, dtype=torch.int32) - 1).expand(1, 1, seqlen, 8)
        return flash_dmattn_func(query, key, value, KeyLists.from_indices(indices, seqlen, seqlen))


@pytest.mark.parametrize("first", [100, 140])
@pytest.mark.parametrize("kind", ["window", "indices", "packed"])
def test_export_for_one_row_tile_and_for_many(kind, first):
    model = Selected(kind)
    batch, seqlen = torch.export.Dim("batch", min=2, max=64), torch.export.Dim("seqlen", min=2, max=4096)
    rows = {0: batch, 1: seqlen}
    shapes = (rows, rows, rows, {0: batch, 3: seqlen})
    exported = torch.export.export(model, tensors_of(3, first), dynamic_shapes=shapes)
    for length in (7, 20, 64, 127, 128, 129, 300) if kind != "packed" else ():
        given = tensors_of(5, length)
        torch.testing.assert_close(exported.module()(*given), model(*given), rtol=1e-4, atol=1e-4)


def test_one_row_tile_or_many_without_fullgraph():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(windowed, dynamic=True, backend="aot_eager")
    for sizes in ((3, 1025), (5, 140), (6, 64), (3, 128), (5, 129)):
        leaves = [x.requires_grad_() for x in tensors_of(*sizes)]
        ours, expected = (torch.autograd.grad(f(*leaves).sin().sum(), leaves) for f in (compiled, windowed))
        torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-3)
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.parametrize("function", [layer, windowed])
def test_make_fx_symbolic(function):
    def gradients(*tensors):
        leaves = [x.detach().requires_grad_() for x in tensors]
        return torch.autograd.grad(function(*leaves).sin().sum(), leaves)

    traced = make_fx(gradients, tracing_mode="symbolic")(*tensors_of(3, 140))
    given = tensors_of(5, 300)
    for a, b in zip(traced(*given), gradients(*given)):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("function", [layer, windowed])
def test_fake_tensors(function):
    with FakeTensorMode():
        for seqlen in (20, 700):
            leaves = [x.requires_grad_() for x in tensors_of(2, seqlen)]
            out = function(*leaves)
            assert out.shape == (2, seqlen, 4, 8)
            assert [x.shape for x in torch.autograd.grad(out.sum(), leaves)] == [x.shape for x in leaves]


@pytest.mark.parametrize("backend", [None, "cpu"])
def test_a_backend_by_name_inside_a_graph(backend):
    def named(query, key, value, bias):
        return flash_dmattn_func_auto(backend)(query, key, value, None, bias)

    query, key, value, bias = tensors_of(2, 33)
    torch._dynamo.reset()
    compiled = torch.compile(named, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(query, key, value, bias), flash_dmattn_func(query, key, value, None, bias))


def test_a_backend_by_name_as_a_graph():
    query, key, value, _ = tensors_of(2, 33)
    torch._dynamo.reset()
    compiled = torch.compile(flash_dmattn_func_auto("cpu"), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(query, key, value), flash_dmattn_func(query, key, value))


def test_a_bias_of_nan_is_refused_in_a_graph():
    query, key, value, bias = tensors_of(2, 33)
    bias[0, 0, 0, 5] = torch.nan
    with pytest.raises(ValueError, match="attn_bias must not be NaN where window_size selects by it"):
        torch.compile(windowed, fullgraph=True, backend="aot_eager")(query, key, value, bias)


@pytest.mark.parametrize("shape", [(1, 1, 5, 1), (3, 1, 1, 1), (1, 3, 1, 1), (0, 1, 1, 1), (1, 1, 7)], ids=str)
def test_a_bias_constant_along_the_keys_is_checked(shape):
    """No operator reads it: a wrong size would change the size of the result."""
    query, key, value = inputs(1, 1, 7, 1, 1, 8)
    compiled = torch.compile(flash_dmattn_func, fullgraph=True, backend="aot_eager")
    for function in (flash_dmattn_func, compiled):
        with pytest.raises(Exception, match="attn_bias must (be|have) "):
            function(query, key, value, attn_bias=torch.zeros(shape))


@pytest.mark.parametrize("name, shape", [("attn_bias", (1, 1, 1, 1)), ("relative_bias", (1, 1, 3))])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int32], ids=str)
def test_biases_of_other_dtypes_are_refused(name, shape, dtype):
    query, key, value = inputs(1, 1, 7, 1, 1, 8)
    compiled = torch.compile(flash_dmattn_func, fullgraph=True, backend="aot_eager")
    for function in (flash_dmattn_func, compiled):
        with pytest.raises(Exception, match=f"{name} must be "):
            function(query, key, value, **{name: torch.zeros(shape, dtype=dtype)})
