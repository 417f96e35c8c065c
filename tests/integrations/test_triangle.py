"""Attention with a pair bias, in cuEquivariance's and DeepSpeed4Science's shapes, against their formulas."""

import itertools

import pytest
import torch

from flash_dmattn.integrations.triangle import MASK_THRESHOLD, DS4Sci_EvoformerAttention, triangle_attention

B, N, H, ROWS, KEYS, D = 2, 5, 3, 20, 26, 8


def triangle_inputs(dtype=torch.float64, device="cpu", batch=B, rows=ROWS, keys=KEYS, head_dim=D, n=N):
    def randn(*shape):
        return torch.randn(*shape, device=device).to(dtype).requires_grad_()

    q, k, v = (randn(batch, n, H, length, head_dim) for length in (rows, keys, keys))
    return q, k, v, randn(batch, 1, H, rows, keys), torch.rand(batch, n, 1, 1, keys, device=device) < 0.7


def as_cuequivariance(q, k, v, bias, mask=None, scale=None):
    """Its documented formula."""
    scores = (q.shape[-1] ** -0.5 if scale is None else scale) * q @ k.transpose(-1, -2) + bias
    return (scores if mask is None else scores.masked_fill(~mask, -1e9)).softmax(-1) @ v


def as_evoformer(query, key, value, mask_bias, pairs):
    """The formula of its test, (B, N, S, H, D)."""
    scores = torch.einsum("bnihd,bnjhd->bnhij", query, key) * query.shape[-1] ** -0.5
    for bias in (mask_bias, pairs):
        scores = scores if bias is None else scores + bias
    return torch.einsum("bnhij,bnjhd->bnihd", scores.softmax(-1), value)


def gradients(out, leaves):
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return torch.autograd.grad(out, leaves, dout.to(out))


def assert_same(ours, wanted, leaves, tolerance=1e-10):
    torch.testing.assert_close(ours, wanted, rtol=tolerance, atol=tolerance)
    for x, y in zip(gradients(ours, leaves), gradients(wanted, leaves), strict=True):
        assert x.shape == y.shape
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("masked", ["by row", "alike", "not"])
def test_triangle_attention(masked, scale):
    q, k, v, bias, mask = triangle_inputs()
    mask = {"by row": mask, "alike": mask[:, :1], "not": None}[masked]
    ours = triangle_attention(q, k, v, bias, mask, scale)
    assert ours.shape == (B, N, H, ROWS, D)
    assert_same(ours, as_cuequivariance(q, k, v, bias, mask, scale), (q, k, v, bias))


@pytest.mark.parametrize(
    "device, dtype",
    [("cpu", torch.float16), ("cpu", torch.bfloat16), pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu)],
    ids=str,
)
def test_a_float32_bias_is_not_rounded(device, dtype):
    leaves = triangle_inputs(dtype, device)
    q, k, v, _, mask = leaves
    # Rounded to bfloat16 it would be up to 0.5 off.
    bias = (250 + torch.rand(B, 1, H, ROWS, KEYS, device=device)).requires_grad_()
    wide = [x.detach().double().requires_grad_() for x in (q, k, v, bias)]
    ours = triangle_attention(q, k, v, bias, mask)
    wanted = as_cuequivariance(*wide, mask)
    assert ours.dtype == dtype
    tolerance = {torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(ours.double(), wanted, rtol=tolerance, atol=tolerance)
    dbias, wanted_dbias = (gradients(out, [x])[0] for out, x in ((ours, bias), (wanted, wide[3])))
    assert dbias.dtype == torch.float32
    torch.testing.assert_close(dbias.double(), wanted_dbias, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("masked", ["by row", "alike", "not"])
def test_without_a_batch_dimension(masked):
    q, k, v, bias, mask = triangle_inputs(batch=1)
    mask = {"by row": mask, "alike": mask[:, :1], "not": None}[masked]
    ours = triangle_attention(q[0], k[0], v[0], bias[0], None if mask is None else mask[0])
    assert ours.shape == (N, H, ROWS, D)
    assert_same(ours, as_cuequivariance(q, k, v, bias, mask)[0], (q, k, v, bias))


def test_from_projections_of_pairs():
    """As a model has them: heads behind rows in memory, the bias's heads last, the ending node's pairs transposed."""
    pairs = torch.randn(B, KEYS, KEYS, H * D, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(H * D, H, dtype=torch.float64)

    def update(attention, z):
        q = z.unflatten(-1, (H, D)).transpose(2, 3)
        return attention(q, q, q, (z @ weight).permute(0, 3, 1, 2)[:, None])

    for transposed in (False, True):
        z = pairs.transpose(1, 2) if transposed else pairs
        assert_same(update(triangle_attention, z), update(as_cuequivariance, z), (pairs,))


def test_rows_that_see_nothing():
    q, k, v, bias, mask = triangle_inputs()
    mask[0, 2] = False
    out = triangle_attention(q, k, v, bias, mask)
    dq, dk, dv, dbias = torch.autograd.grad(out.sum(), (q, k, v, bias))
    assert out[0, 2].eq(0).all() and dq[0, 2].eq(0).all() and dk[0, 2].eq(0).all() and dv[0, 2].eq(0).all()
    assert not dbias.isnan().any()


def test_nothing_is_expanded():
    """Forward and backward take less memory than the scores of one head of every row would."""
    n = length = 128
    q, k, v = (torch.randn(1, n, 2, length, 8, requires_grad=True) for _ in range(3))
    bias, mask = torch.randn(1, 1, 2, length, length, requires_grad=True), torch.rand(1, n, 1, 1, length) < 0.9
    with torch.profiler.profile(profile_memory=True) as profile:
        triangle_attention(q, k, v, bias, mask).sum().backward()
    held = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    assert q.nbytes < peak < n * length * length * 4


def evoformer_inputs(dtype=torch.float64):
    shape = (B, N, ROWS, H, D)
    query, key, value = (torch.randn(shape).to(dtype).requires_grad_() for _ in range(3))
    masked = torch.rand(B, N, 1, 1, ROWS) < 0.3
    pairs = torch.randn(B, 1, H, ROWS, ROWS).to(dtype).requires_grad_()
    return query, key, value, masked, pairs


@pytest.mark.parametrize("least", [-1e9, -torch.inf, MASK_THRESHOLD, torch.finfo(torch.float64).min])
@pytest.mark.parametrize("with_pairs", [False, True])
def test_evoformer(with_pairs, least):
    query, key, value, masked, pairs = evoformer_inputs()
    mask_bias = torch.zeros(masked.shape, dtype=query.dtype).masked_fill_(masked, least)
    given = [mask_bias, pairs] if with_pairs else [mask_bias, None]
    wanted = as_evoformer(query, key, value, *given)
    leaves = (query, key, value, pairs)[: 4 if with_pairs else 3]
    assert_same(DS4Sci_EvoformerAttention(query, key, value, given), wanted, leaves)


@pytest.mark.parametrize("biases", [(), (None,), [None, None]])
def test_evoformer_without_biases(biases):
    query, key, value, *_ = evoformer_inputs()
    ours = DS4Sci_EvoformerAttention(query, key, value, biases)
    assert_same(ours, as_evoformer(query, key, value, None, None), (query, key, value))


def test_evoformer_with_pairs_alone():
    query, key, value, _, pairs = evoformer_inputs()
    ours = DS4Sci_EvoformerAttention(query, key, value, [None, pairs])
    assert_same(ours, as_evoformer(query, key, value, None, pairs), (query, key, value, pairs))


def test_a_mask_bias_alone_may_hold_anything_and_is_trained():
    query, key, value, masked, _ = evoformer_inputs()
    mask_bias = torch.randn(masked.shape, dtype=query.dtype).masked_fill_(masked, -1e9).requires_grad_()
    ours = DS4Sci_EvoformerAttention(query, key, value, [mask_bias])
    assert_same(ours, as_evoformer(query, key, value, mask_bias, None), (query, key, value, mask_bias))


@pytest.mark.parametrize("with_pairs", [False, True])
def test_evoformer_rows_that_see_nothing(with_pairs):
    query, key, value, masked, pairs = evoformer_inputs()
    mask_bias = torch.zeros(masked.shape, dtype=query.dtype)
    mask_bias[1, 3] = -1e9
    out = DS4Sci_EvoformerAttention(query, key, value, [mask_bias, pairs if with_pairs else None])
    assert out[1, 3].eq(0).all()
    assert torch.autograd.grad(out.sum(), query)[0][1, 3].eq(0).all()


def test_compiled():
    q, k, v, bias, mask = triangle_inputs(torch.float32)
    compiled = torch.compile(triangle_attention, fullgraph=True, backend="aot_eager", dynamic=True)
    for outer, n in ((B, N), (3, 4)):
        q, k, v, bias, mask = triangle_inputs(torch.float32, batch=outer, n=n)
        assert_same(compiled(q, k, v, bias, mask), triangle_attention(q, k, v, bias, mask), (q, k, v, bias), 1e-5)
    query, key, value, masked, pairs = evoformer_inputs(torch.float32)
    mask_bias = torch.zeros(masked.shape).masked_fill_(masked, -1e9)
    for dynamic in (False, True):
        wanted = DS4Sci_EvoformerAttention(query, key, value, [mask_bias, pairs])
        compiled = torch.compile(DS4Sci_EvoformerAttention, fullgraph=True, backend="aot_eager", dynamic=dynamic)
        assert_same(compiled(query, key, value, [mask_bias, pairs]), wanted, (query, key, value, pairs), 1e-5)


def test_autocast():
    q, k, v, bias, mask = triangle_inputs(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = triangle_attention(q, k, v.bfloat16(), bias, mask)
    assert out.dtype == torch.bfloat16
    assert (out.float() - as_cuequivariance(q, k, v, bias, mask)).abs().max() < 0.1


def test_vmap():
    q, k, v, bias, mask = (x.detach() for x in triangle_inputs(torch.float32))
    ours = torch.func.vmap(triangle_attention)(q[:, None], k[:, None], v[:, None], bias[:, None], mask[:, None])
    torch.testing.assert_close(ours[:, 0], triangle_attention(q, k, v, bias, mask))
    query, key, value, masked, pairs = (x.detach() for x in evoformer_inputs(torch.float32))
    mask_bias = torch.zeros(masked.shape).masked_fill_(masked, -1e9)
    wanted = DS4Sci_EvoformerAttention(query, key, value, [mask_bias, pairs])

    def one(query, key, value, mask_bias, pairs):
        return DS4Sci_EvoformerAttention(*(x[None] for x in (query, key, value)), [mask_bias[None], pairs[None]])[0]

    torch.testing.assert_close(torch.func.vmap(one)(query, key, value, mask_bias, pairs), wanted)


TRIANGLE = {
    "q is no tensor": ({"q": 3}, TypeError, "q must be a torch.Tensor, got int"),
    "q of 3 dimensions": (
        {"q": torch.zeros(3, 20, 8)},
        ValueError,
        r"q must be \(B, N, H, Q, D\) or \(N, H, Q, D\), got",
    ),
    "k without a batch": ({"k": torch.zeros(N, H, KEYS, D)}, ValueError, r"k must be \(B, N, H, K, D\) = .*got shape"),
    "q without a batch": (
        {"q": torch.zeros(N, H, ROWS, D)},
        ValueError,
        r"k must have 4 dimensions as q has, got shape",
    ),
    "v of other keys": (
        {"v": torch.zeros(B, N, H, KEYS + 1, D)},
        ValueError,
        r"v must be \(B, N, H, K, D\) = \(2, 5, 3, 26, 8\), got shape \(2, 5, 3, 27, 8\)",
    ),
    "expanded bias": (
        {"bias": torch.zeros(B, N, H, ROWS, KEYS)},
        ValueError,
        r"bias must be \(B, 1, H, Q, K\) = \(2, 1, 3, 20, 26\), got shape \(2, 5, 3, 20, 26\)",
    ),
    "bias in another dtype": (
        {"bias": torch.zeros(B, 1, H, ROWS, KEYS).half()},
        TypeError,
        "bias must have q's dtype float32, got float16",
    ),
    "bias in another 16-bit dtype": (
        {
            **dict.fromkeys("q", torch.zeros(B, N, H, ROWS, D).half()),
            **dict.fromkeys("kv", torch.zeros(B, N, H, KEYS, D).half()),
            "bias": torch.zeros(B, 1, H, ROWS, KEYS).bfloat16(),
        },
        TypeError,
        "bias must have q's dtype float16 or float32, got bfloat16",
    ),
    "float mask": (
        {"mask": torch.ones(B, N, 1, 1, KEYS)},
        TypeError,
        r"mask must be bool \(True = visible\), got float32",
    ),
    "mask of other keys": (
        {"mask": torch.ones(B, N, 1, 1, ROWS).bool()},
        ValueError,
        r"mask must be \(B, {N\|1}, 1, 1, K\) = \(2, 5, 1, 1, 26\), got shape \(2, 5, 1, 1, 20\)",
    ),
    "mask of other rows": (
        {"mask": torch.ones(B, 2, 1, 1, KEYS).bool()},
        ValueError,
        r"mask must be \(B, {N\|1}, 1, 1, K\) = \(2, 5, 1, 1, 26\), got shape \(2, 2, 1, 1, 26\)",
    ),
    "scale is infinite": ({"scale": torch.inf}, ValueError, "^scale must be finite in float32, got inf"),
    "scale is no number": ({"scale": "1"}, TypeError, "^scale must be a number, got str"),
    "integers": (
        {name: torch.zeros(B, N, H, KEYS if name in "kv" else ROWS, D).int() for name in "qkv"},
        TypeError,
        "^q must be one of float16, bfloat16, float32, float64, got int32",
    ),
    "head dimension of 300": (
        {name: torch.zeros(B, N, H, KEYS if name in "kv" else ROWS, 300) for name in "qkv"},
        ValueError,
        "^q must have a head dimension from 1 to 256, got 300",
    ),
    "k on another device": (
        {"k": torch.zeros(B, N, H, KEYS, D, device="meta")},
        RuntimeError,
        "k must be on q's device cpu, got meta",
    ),
}


@pytest.mark.parametrize("case", TRIANGLE)
def test_errors_of_triangle_attention(case):
    changes, error, message = TRIANGLE[case]
    given = dict(zip(("q", "k", "v", "bias", "mask"), triangle_inputs(torch.float32)))
    with pytest.raises(error, match=message):
        triangle_attention(**{**given, **changes})


WITHOUT_BATCH = {
    "k of other heads": (
        {"k": torch.zeros(N, H + 1, KEYS, D)},
        r"^k must be \(N, H, K, D\) = \(5, 3, 26, 8\), got shape \(5, 4, 26, 8\)",
    ),
    "bias for every row": (
        {"bias": torch.zeros(N, H, ROWS, KEYS)},
        r"^bias must be \(1, H, Q, K\) = \(1, 3, 20, 26\), got shape \(5, 3, 20, 26\)",
    ),
    "mask of other rows": (
        {"mask": torch.ones(2, 1, 1, KEYS).bool()},
        r"^mask must be \({N\|1}, 1, 1, K\) = \(5, 1, 1, 26\), got shape \(2, 1, 1, 26\)",
    ),
    "mask with a batch": (
        {"mask": torch.ones(1, N, 1, 1, KEYS).bool()},
        r"^mask must have 4 dimensions as q has, got shape \(1, 5, 1, 1, 26\)",
    ),
}


@pytest.mark.parametrize("case", WITHOUT_BATCH)
def test_errors_without_a_batch_dimension(case):
    changes, message = WITHOUT_BATCH[case]
    given = dict(zip(("q", "k", "v", "bias", "mask"), (x[0] for x in triangle_inputs(torch.float32, batch=1))))
    with pytest.raises(ValueError, match=message):
        triangle_attention(**{**given, **changes})


ZEROS = torch.zeros(B, N, 1, 1, ROWS)
PAIRS = torch.zeros(B, 1, H, ROWS, ROWS)
EVOFORMER = {
    "biases is a tensor": (PAIRS, TypeError, "biases must be a list or tuple of up to two biases, got Tensor"),
    "three biases": ([None] * 3, ValueError, "biases must be up to two, the mask bias and the pair bias, got 3"),
    "pair bias in the mask bias's place": (
        [PAIRS],
        ValueError,
        r"biases\[0\] must be \(B, N, 1, 1, Sk\) = \(2, 5, 1, 1, 20\), got shape \(2, 1, 3, 20, 20\)",
    ),
    "bool mask": ([ZEROS.bool(), PAIRS], TypeError, r"biases\[0\] must be floating, got bool"),
    "pair bias in another dtype": (
        [None, PAIRS.double()],
        TypeError,
        r"biases\[1\] must have Q's dtype float32, got float64",
    ),
    "mask bias that is not a mask": (
        [ZEROS - 2.5, PAIRS],
        ValueError,
        r"biases\[0\] must be 0 or at most -10000 with a pair bias, got -2.5",
    ),
    "NaN in a mask bias": ([ZEROS + torch.nan, PAIRS], ValueError, r"biases\[0\] must be 0 or .*, got nan"),
    "mask bias that requires a gradient": (
        [ZEROS.clone().requires_grad_(), PAIRS],
        ValueError,
        r"biases\[0\] must not require a gradient with a pair bias: pass its detach\(\)",
    ),
}


def test_integers_in_evoformer():
    integers = torch.zeros(B, N, ROWS, H, D).int()
    with pytest.raises(TypeError, match="^Q must be one of float16, bfloat16, float32, float64, got int32"):
        DS4Sci_EvoformerAttention(integers, integers, integers, [])


@pytest.mark.parametrize("case", EVOFORMER)
def test_errors_of_evoformer(case):
    biases, error, message = EVOFORMER[case]
    query, key, value, *_ = evoformer_inputs(torch.float32)
    with pytest.raises(error, match=message):
        DS4Sci_EvoformerAttention(query, key, value, biases)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "batch, n, length, head_dim", [(1, 40, 96, 32), (2, 33, 200, 32), (3, 2, 130, 64), (2, 4, 72, 24)]
)
def test_on_a_gpu(batch, n, length, head_dim):
    sizes = {"batch": batch, "n": n, "rows": length, "keys": length, "head_dim": head_dim, "device": "cuda"}
    *leaves, mask = triangle_inputs(torch.bfloat16, **sizes)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    ours, wanted = triangle_attention(*leaves, mask), as_cuequivariance(*exact, mask)
    eager = as_cuequivariance(*leaves, mask)
    results = ([out, *gradients(out, inputs)] for out, inputs in ((ours, leaves), (eager, leaves), (wanted, exact)))
    for x, y, z in zip(*results):
        assert (x - z).abs().max() <= 2 * (y - z).abs().max() + 1e-5


@pytest.mark.gpu
def test_evoformer_on_a_gpu():
    query, key, value, masked, pairs = (x.cuda() for x in evoformer_inputs(torch.bfloat16))
    leaves = [x.detach().requires_grad_() for x in (query, key, value, pairs)]
    mask_bias = torch.zeros(masked.shape, device="cuda", dtype=torch.bfloat16).masked_fill_(masked, -1e9)
    ours = DS4Sci_EvoformerAttention(*leaves[:3], [mask_bias, leaves[3]])
    exact = [x.detach().double().requires_grad_() for x in leaves]
    wanted = as_evoformer(*exact[:3], mask_bias, exact[3])
    for x, y in itertools.chain([(ours, wanted)], zip(gradients(ours, leaves), gradients(wanted, exact))):
        assert (x - y).abs().max() < 0.05 * y.abs().max()
