"""Blocks that a relative bias masks are not visited: there keys, queries and gradients may be NaN."""

import pytest
import torch
from gpu_inputs import CAUSAL, on_gpu
from helpers import check

from flash_dmattn import flash_dmattn_func, flash_dmattn_varlen_func

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("use")]
ARCHITECTURES = pytest.mark.parametrize("architecture", ["sm80", pytest.param("sm90", marks=pytest.mark.hopper)])


def table(radius: int, *visible: tuple[int, int]) -> torch.Tensor:
    """(1, heads, 2 radius + 1): the distances from first to last that each head sees."""
    distances = torch.arange(-radius, radius + 1, device="cuda")
    rows = [torch.where((first <= distances) & (distances <= last), 0.5, -torch.inf) for first, last in visible]
    bias = torch.stack(rows)[None]
    return bias + torch.randn_like(bias)


@CAUSAL
@ARCHITECTURES
@pytest.mark.parametrize("rows", [1, 20, 128, 1500])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_keys_that_the_bias_masks_are_not_read(head_dim, rows, architecture, causal, use):
    use(architecture)
    query, key, value = on_gpu(2, rows, 4000, 4, 2, head_dim)
    bias = table(301, (-200, 200), (-301, -100), (-90, 0), (-280, -30))
    bias[:, 1, 0] = -torch.inf
    masked = 4000 - rows - 301 - 128  # no block with one of these has a key that a row sees
    expected = flash_dmattn_func(query, key, value, relative_bias=bias, is_causal=causal)
    key[:, :masked] = value[:, :masked] = torch.nan
    assert torch.equal(flash_dmattn_func(query, key, value, relative_bias=bias, is_causal=causal), expected)


@CAUSAL
@pytest.mark.parametrize("architecture, deterministic", [("sm80", False), ("sm90", False), ("sm90", True)])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_rows_that_the_bias_masks_are_not_read(head_dim, architecture, deterministic, causal, use):
    use(architecture)
    tensors = [x.requires_grad_() for x in on_gpu(2, 4000, 3000, 4, 2, head_dim)]
    bias = table(301, (-200, 200), (-300, -100), (-90, 0), (-280, -30))

    def gradients(query, dout):
        out = flash_dmattn_func(query, *tensors[1:], relative_bias=bias, is_causal=causal, deterministic=deterministic)
        return torch.autograd.grad(out, tensors[1:], dout)

    dout = torch.randn_like(tensors[0])
    expected = gradients(tensors[0], dout)
    with torch.no_grad():
        query = tensors[0].clone()
        query[:, 3600:] = dout[:, 3600:] = torch.nan
    seen = 3600 - 1000 - 301 - 256  # keys before this are in no block that is visited with one of these rows
    for ours, exact in zip(gradients(query, dout), expected, strict=True):
        torch.testing.assert_close(ours[:, :seen], exact[:, :seen], rtol=1e-2, atol=1e-3)


@CAUSAL
@ARCHITECTURES
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("lengths", [(1100, 1300), (1400, 1024), (300, 2000)])
@pytest.mark.parametrize(
    "visible",
    [
        ((-40, 60), (100, 130), (-130, -70), (1, 0)),  # a window, later keys, earlier keys, nothing
        ((-200, 60), (-10, 200), (-200, 200), (-200, -199)),  # the ends of the table
        ((0, 0), (-1, -1), (199, 199), (-64, 64)),
    ],
)
def test_windows(visible, lengths, deterministic, architecture, causal, use):
    use(architecture)
    rows, keys = lengths
    check(
        on_gpu(2, rows, keys, 4, 2, 64),
        relative_bias=table(200, *visible),
        is_causal=causal,
        deterministic=deterministic,
    )


@ARCHITECTURES
def test_variable_length(architecture, use):
    """The distances count from each sequence's own last key, and short sequences have blocks of other ranges."""
    use(architecture)
    rows, keys = [700, 1, 0, 90, 1200], [1500, 40, 300, 64, 900]
    query, key, value = on_gpu(1, sum(rows), sum(keys), 4, 2, 64)
    bias = table(150, (-60, 40), (-150, -20), (100, 150), (-30, 0))
    query_parts, key_parts, value_parts = query[0].split(rows), key[0].split(keys), value[0].split(keys)
    out = flash_dmattn_varlen_func(
        *(query[0], key[0], value[0]),
        cu_seqlens_q=torch.tensor([0, *rows], device="cuda").cumsum(0).int(),
        cu_seqlens_k=torch.tensor([0, *keys], device="cuda").cumsum(0).int(),
        max_seqlen_q=max(rows),
        max_seqlen_k=max(keys),
        relative_bias=bias,
    )
    for ours, *parts in zip(out.split(rows), query_parts, key_parts, value_parts, strict=True):
        alone = flash_dmattn_func(*(x[None] for x in parts), relative_bias=bias)[0]
        torch.testing.assert_close(ours, alone, rtol=1e-2, atol=1e-2)


@CAUSAL
@ARCHITECTURES
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("mask", [None, "keys", "rows"])
@pytest.mark.parametrize(
    "radius, low, high",
    [(0, 3, 3), (5, 30, -30), (60, -30, 30), (60, -1e4, 2), (60, -1e9, 2), (60, 1, -1e38), (130, -1e38, 30)],
)
def test_far_keys_share_a_bias(radius, low, high, mask, head_dim, architecture, causal, use):
    """Blocks that read one end of the table alone leave it out of their scores: the base and lse account for it."""
    use(architecture)
    rows, keys = 1300, 1500
    bias = torch.randn(1, 4, 2 * radius + 1, device="cuda")
    bias[:, ::2, 0], bias[:, ::2, -1] = low, high
    shape = {None: None, "keys": (2, 1, 1, keys), "rows": (2, 2, rows, keys)}[mask]
    visible = None if shape is None else torch.rand(shape, device="cuda") < 0.7
    check(on_gpu(2, rows, keys, 4, 2, head_dim), visible, relative_bias=bias, is_causal=causal)


@pytest.mark.hopper
@pytest.mark.parametrize("head_dim", [64, 128])
def test_nan_at_an_end_of_the_table(head_dim, use):
    """A row is NaN if it sees the end, and only then."""
    use("sm90")
    query, key, value = on_gpu(1, 2000, 2000, 2, 2, head_dim)
    bias = torch.randn(1, 2, 2 * 100 + 1, device="cuda")
    expected = flash_dmattn_func(query, key, value, relative_bias=bias, is_causal=True)
    bias[:, 0, 0] = torch.nan
    out = flash_dmattn_func(query, key, value, relative_bias=bias, is_causal=True)
    assert out[:, 100:, 0].isnan().all() and torch.equal(out[:, :, 1], expected[:, :, 1])
    torch.testing.assert_close(out[:, :100, 0], expected[:, :100, 0])
