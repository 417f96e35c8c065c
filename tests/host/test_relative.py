"""flash_dmattn.relative: the tables of published methods. And relative_bias in programs of PyTorch."""

import pytest
import torch
from helpers import inputs

from flash_dmattn import (
    KeyIntervalMask,
    flash_dmattn_func,
    flash_dmattn_func_auto,
    flash_dmattn_kvpacked_func,
    flash_dmattn_qkvpacked_func,
    flash_dmattn_varlen_qkvpacked_func,
    relative,
)


def test_dense():
    table = torch.arange(7.0)[None, None]
    assert relative.dense(table, 2, 4)[0, 0].tolist() == [[1, 2, 3, 4], [0, 1, 2, 3]]
    assert relative.dense(table[..., 2:5], 2, 4)[0, 0].tolist() == [[2, 2, 3, 4], [2, 2, 2, 3]]
    grid = torch.arange(9.0).view(1, 1, 3, 3)  # 2 x 2 tokens
    assert relative.dense(grid, 4, 4)[0, 0].tolist() == [[4, 3, 1, 0], [5, 4, 2, 1], [7, 6, 4, 3], [8, 7, 5, 4]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_16_bits_are_summed_in_float32(dtype):
    """PyTorch sums those of an index in 16 bits, where adding 1 has no effect from 256 or 2048 on."""
    table = torch.zeros(1, 1, 2 * 64 + 1, dtype=dtype, requires_grad=True)
    relative.dense(table, 200, 200).sum().backward()
    far = torch.tensor(sum(range(1, 137)), dtype=dtype).item()  # rows 64 to 199 see 1 to 136 keys at an end
    assert table.grad.dtype == dtype and table.grad[0, 0, [0, -1]].tolist() == [far, far]
    grid = torch.zeros(1, 1, 63, 63, dtype=dtype, requires_grad=True)
    relative.dense(grid, 1024, 1024).sum().backward()
    assert grid.grad[0, 0, 31, 30:33].tolist() == [992, 1024, 992]
    shifted = torch.zeros(1, 1, 2 * 4 + 1, dtype=dtype, requires_grad=True)
    relative.shifted(shifted, 3000).sum().backward()
    assert shifted.grad[0, 0, -1] == torch.tensor(6001, dtype=dtype) and shifted.grad[0, 0, 0] == 1


def test_shifted():
    table = torch.randn(1, 2, 2 * 6 + 1)
    for shift in (-9, -1, 0, 4, 30):
        by_keys = relative.dense(table, 20, 20 + abs(shift))
        # As rows that stand `shift` keys later than bottom right.
        ours = relative.dense(relative.shifted(table, shift), 20, 20 + abs(shift))
        rows, keys = torch.arange(20)[:, None], torch.arange(20 + abs(shift))
        expected = table[:, :, (keys - rows - abs(shift) + shift).clamp(-6, 6) + 6]
        assert by_keys.shape == ours.shape and torch.equal(ours, expected)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("buckets, max_distance", [(32, 128), (32, 20), (8, 50), (64, 256)])
def test_t5(bidirectional, buckets, max_distance):
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    table = torch.randn(buckets, 4)
    seqlen = 2 * max_distance + 7
    distance = torch.arange(seqlen) - torch.arange(seqlen)[:, None]
    bucket = t5.T5Attention._relative_position_bucket(distance, bidirectional, buckets, max_distance)
    ours = relative.dense(relative.t5(table, bidirectional, max_distance), seqlen, seqlen)
    assert torch.equal(ours, table[bucket].permute(2, 0, 1)[None])


@pytest.mark.parametrize("heads", [1, 2, 6, 8, 12, 16])
def test_alibi_of_bloom(heads):
    bloom = pytest.importorskip("transformers.models.bloom.modeling_bloom")
    bias = bloom.build_alibi_tensor(torch.ones(1, 50), heads, torch.float32).view(heads, 50)
    ours = relative.dense(relative.alibi(relative.alibi_slopes(heads), 60), 50, 50)[0]
    # Bloom's is one number per key: apart from a constant for each row the same for the keys up to it.
    for row in range(50):
        torch.testing.assert_close(ours[:, row, : row + 1], bias[:, : row + 1] - bias[:, row, None])


@pytest.mark.parametrize("heads", [4, 6, 12])
def test_alibi_of_mpt(heads):
    mpt = pytest.importorskip("transformers.models.mpt.modeling_mpt")
    bias = mpt.build_mpt_alibi_tensor(heads, 40)[..., 0, :]  # slope * (key - last key)
    slopes = torch.linalg.lstsq(torch.arange(-39.0, 1)[:, None], bias.reshape(heads, 40).T).solution[0]
    ours = relative.alibi(slopes, 40)
    torch.testing.assert_close(relative.dense(ours, 40, 40)[0, :, -1], bias.reshape(heads, 40))


def test_kerple():
    scale, shape = torch.rand(3) + 0.1, torch.rand(3) + 0.1
    distance = relative.distances(9).abs()
    log, power = (relative.kerple(scale, shape, 9, kind) for kind in ("log", "power"))
    for h in range(3):
        torch.testing.assert_close(log[0, h], -scale[h] * (1 + shape[h] * distance).log())
        torch.testing.assert_close(power[0, h], -scale[h] * distance ** shape[h])
    with pytest.raises(ValueError, match="kind must be 'log' or 'power', got 'linear'"):
        relative.kerple(scale, shape, 9, "linear")
    with pytest.raises(RuntimeError, match="shape must be on scale's device cpu, got meta"):
        relative.kerple(scale, shape.to("meta"), 9)


def test_sandwich():
    heads, dim, seqlen = 3, 8, 40
    # From the embeddings themselves: position m has sin and cos of m / 10000 ** (2 i / dim).
    angle = torch.arange(seqlen).double()[:, None] / 10000.0 ** (torch.arange(1, dim // 2 + 1) * 2 / dim)
    embedding = torch.cat([angle.sin(), angle.cos()], dim=1)
    expected = (embedding @ embedding.T - dim / 2) * heads / (8 * torch.arange(1, heads + 1)[:, None, None])
    ours = relative.dense(relative.sandwich(heads, seqlen, dim), seqlen, seqlen)[0]
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours.double(), expected, rtol=0, atol=1e-6)
    for wrong in (0, 7):
        with pytest.raises(ValueError, match=f"dim must be even and positive, got {wrong}"):
            relative.sandwich(heads, seqlen, wrong)


def test_alibi_of_each_batch_element():
    slopes = torch.rand(2, 4).requires_grad_()
    query, key, value = inputs(2, 30, 40, 4, 2, 8)
    table = relative.alibi(slopes, 40)
    assert table.shape == (2, 4, 81) and torch.equal(relative.alibi(slopes[1], 40), table[1:])
    out = flash_dmattn_func(query, key, value, relative_bias=table)
    each = [
        flash_dmattn_func(query[b, None], key[b, None], value[b, None], relative_bias=relative.alibi(slopes[b], 40))
        for b in range(2)
    ]
    torch.testing.assert_close(out, torch.cat(each))
    dslopes = [torch.autograd.grad(x.square().sum(), slopes, retain_graph=True)[0] for x in (out, torch.cat(each))]
    torch.testing.assert_close(*dslopes)


def test_window():
    table = relative.window(9, 3, 1)
    assert table.shape == (1, 1, 19) and (table[0, 0, 6:11] == 0).all()
    assert (table == -torch.inf).sum() == 14
    with pytest.raises(ValueError, match="max_distance must be above left and right, got 9, 9 and 0"):
        relative.window(9, 9)
    for left, right in ((None, 1), (3, None), (None, None)):
        mask = KeyIntervalMask.sliding_window(5, 8, (left, right)).to_dense()
        assert torch.equal(relative.dense(relative.window(9, left, right), 5, 8) == 0, mask)


def test_tables_have_gradients():
    parameters = {
        "table": (torch.randn(8, 2), lambda x: relative.t5(x, max_distance=20)),
        "slopes": (torch.rand(2), lambda x: relative.alibi(x, 20)),
        "scale": (torch.rand(2), lambda x: relative.kerple(x, torch.ones(2), 20)),
        "shape": (torch.rand(2) + 0.1, lambda x: relative.kerple(torch.ones(2), x, 20, "power")),
    }
    query, key, value = inputs(1, 30, 40, 2, 2, 8, torch.float64)
    for name, (parameter, make) in parameters.items():
        parameter = parameter.double().requires_grad_()
        gradients = []
        for function in (flash_dmattn_func, flash_dmattn_func_auto("reference")):
            out = function(query, key, value, relative_bias=make(parameter))
            gradients.append(torch.autograd.grad(out.square().sum(), parameter)[0])
        assert gradients[0].abs().sum() > 0, name
        torch.testing.assert_close(*gradients)


def test_wrong_parameters_are_refused():
    for call, error, message in (
        (lambda: relative.t5(torch.zeros(8)), ValueError, r"table must be \(buckets, H\), got shape \(8,\)"),
        (lambda: relative.t5(torch.zeros(8, 2).int()), TypeError, "table must be floating, got int32"),
        (lambda: relative.t5(torch.nn.Embedding(8, 2)), TypeError, "got Embedding: pass table.weight"),
        (lambda: relative.t5(torch.zeros(64, 2), max_distance=16), ValueError, "max_distance must be above the 16"),
        (lambda: relative.t5(torch.zeros(2, 2)), ValueError, r"table must have at least 4 buckets, got shape \(2, 2\)"),
        (lambda: relative.t5(torch.zeros(8, 2), "no"), TypeError, "bidirectional must be a bool, got str"),
        (
            lambda: relative.kerple(torch.rand(4), torch.rand(3), 5),
            ValueError,
            r"scale and shape must both be \(H\), got shapes \(4,\) and \(3,\)",
        ),
        (
            lambda: relative.alibi(torch.zeros(2, 2, 2), 9),
            ValueError,
            r"slopes must be \(H\) or \(\{B\|1\}, H\), got shape \(2, 2, 2\)",
        ),
        (lambda: relative.alibi(torch.zeros(2), -1), ValueError, "max_distance must not be negative, got -1"),
        (lambda: relative.window(9, -1), ValueError, "left must not be negative, got -1"),
        (lambda: relative.dense([0.0], 3, 3), TypeError, "relative_bias must be a torch.Tensor, got list"),
        (lambda: relative.dense(torch.zeros(3), 3, 3), ValueError, r"relative_bias must be .*, got shape \(3,\)"),
        (lambda: relative.dense(torch.zeros(1, 1, 4), 3, 3), ValueError, r"2R \+ 1\) .*, got shape \(1, 1, 4\)"),
        (lambda: relative.dense(torch.zeros(1, 1, 3, 4), 4, 4), ValueError, r"2w - 1\), got shape \(1, 1, 3, 4\)"),
        (
            lambda: relative.dense(torch.zeros(1, 1, 3, 3), 4, 5),
            ValueError,
            "the 4 tokens of a grid of 2 x 2, got 4 and 5",
        ),
        (lambda: relative.dense(torch.zeros(1, 1, 3), -1, 5), ValueError, "seqlen_q must not be negative, got -1"),
    ):
        with pytest.raises(error, match=message):
            call()


def test_packed_forms():
    qkv, bias = torch.randn(2, 9, 3, 4, 8), torch.randn(1, 4, 2 * 5 + 1)
    expected = flash_dmattn_func(*qkv.unbind(2), relative_bias=bias)
    assert torch.equal(flash_dmattn_qkvpacked_func(qkv, relative_bias=bias), expected)
    assert torch.equal(flash_dmattn_kvpacked_func(qkv[:, :, 0], qkv[:, :, 1:], relative_bias=bias), expected)
    cu = torch.tensor([0, 9, 18], dtype=torch.int32)
    out = flash_dmattn_varlen_qkvpacked_func(qkv.flatten(0, 1), None, None, cu, 9, relative_bias=bias)
    torch.testing.assert_close(out.view_as(expected), expected)


@pytest.mark.parametrize("shape, grid", [((2, 4, 11), None), ((1, 2, 5, 7), (3, 4))], ids=str)
def test_probabilities(shape, grid):
    query, key, value = inputs(2, 12, 12, 4, 2, 8, torch.float64)
    bias = torch.randn(shape).double()
    out, _, probs = flash_dmattn_func(query, key, value, relative_bias=bias, grid=grid, return_attn_probs=True)
    values = value.repeat_interleave(2, dim=2)
    torch.testing.assert_close(torch.einsum("bhij,bjhd->bihd", probs, values), out)


@pytest.mark.parametrize("shape, grid", [((2, 4, 11), None), ((1, 2, 5, 7), (3, 4))], ids=str)
def test_flex(shape, grid):
    pytest.importorskip("torch.nn.attention.flex_attention")
    query, key, value = inputs(2, 12, 12, 4, 2, 16)
    bias = torch.randn(shape)
    bias[..., 0] = -torch.inf
    flex = flash_dmattn_func_auto("flex")(query, key, value, relative_bias=bias, grid=grid)
    torch.testing.assert_close(flex, flash_dmattn_func(query, key, value, relative_bias=bias, grid=grid))


def layer(query, key, value, bias):
    return flash_dmattn_func(query, key, value, relative_bias=bias.exp(), is_causal=True).sin().sum()


def test_compile_with_dynamic_shapes():
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for batch, seqlen, size in ((2, 33, 9), (3, 65, 131), (1, 129, 1)):
        leaves = [x.requires_grad_() for x in (*inputs(batch, seqlen, seqlen, 4, 2, 12), torch.randn(1, 4, size))]
        results = [torch.autograd.grad(f(*leaves), leaves) for f in (layer, compiled)]
        for x, y in zip(*results):
            torch.testing.assert_close(x, y)


def test_export():
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Parameter(torch.randn(1, 2, 9))

        def forward(self, query, key, value):
            return flash_dmattn_func(query, key, value, relative_bias=self.table)

    tensors, model = tuple(inputs(2, 5, 7, 2, 2, 8)), Layer()
    exported = torch.export.export(model, tensors)
    torch.testing.assert_close(exported.module()(*tensors), model(*tensors))


def test_torch_func():
    leaves = (*inputs(2, 9, 11, 4, 2, 8), torch.randn(1, 4, 7))
    expected = torch.autograd.grad(layer(*(x.requires_grad_() for x in leaves)), leaves)
    leaves = tuple(x.detach() for x in leaves)
    for x, y in zip(torch.func.grad(layer, argnums=(0, 1, 2, 3))(*leaves), expected):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("mapped", [True, False], ids=["a table for each", "one table"])
@pytest.mark.parametrize("batch, shape", [(2, (2, 4, 7)), (2, (1, 4, 7)), (1, (1, 1, 7))], ids=str)
def test_gradients_of_vmap(batch, shape, mapped):
    tensors = [torch.stack(x) for x in zip(*(inputs(batch, 9, 11, 4, 2, 8) for _ in range(3)))]
    bias = torch.randn(3, *shape) if mapped else torch.randn(shape)
    gradient = torch.func.grad(layer, argnums=(0, 1, 2, 3))
    ours = torch.func.vmap(gradient, in_dims=(0, 0, 0, 0 if mapped else None))(*tensors, bias)
    for i in range(3):
        one = gradient(*(x[i] for x in tensors), bias[i] if mapped else bias)
        for x, y in zip(ours, one):
            torch.testing.assert_close(x[i], y)


@pytest.mark.parametrize("name", ["relative_bias", "sinks"])
def test_autocast_casts_16_bits(name):
    query, key, value = inputs(1, 9, 9, 2, 2, 8, dtype=torch.float16)
    given = torch.randn((1, 2, 9) if name == "relative_bias" else 2).half()
    with torch.autocast("cpu", torch.bfloat16):
        out = flash_dmattn_func(query, key, value, **{name: given})
    rows = (x.bfloat16() for x in (query, key, value))
    assert torch.equal(out, flash_dmattn_func(*rows, **{name: given.bfloat16()}))


BIASES = {"key": (1, 1, 1, 9), "dense": (1, 2, 9, 9), "row": (1, 2, 9, 1), "relative_bias": (1, 2, 17)}


@pytest.mark.parametrize("kind", BIASES)
def test_autocast_keeps_what_a_bias_masks(kind):
    """finfo.min of float16 is no minimum of bfloat16."""
    query, key, value = inputs(1, 9, 9, 2, 2, 8, dtype=torch.float16)
    bias = torch.full(BIASES[kind], torch.finfo(torch.float16).min, dtype=torch.float16)
    given = {"relative_bias" if kind == "relative_bias" else "attn_bias": bias}
    with torch.autocast("cpu", torch.bfloat16):
        out, lse = flash_dmattn_func(query, key, value, return_lse=True, **given)
    assert not out.any() and (lse == -torch.inf).all()


def test_autocast_leaves_the_table():
    query, key, value = inputs(1, 9, 9, 2, 2, 8)
    bias = torch.randn(1, 2, 9, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = flash_dmattn_func(query, key, value, relative_bias=bias)
    expected = flash_dmattn_func(query.bfloat16(), key.bfloat16(), value.bfloat16(), relative_bias=bias)
    assert torch.equal(out, expected)
    assert torch.autograd.grad(out.float().sum(), bias)[0].dtype == torch.float32
