"""merge_attention: attention over chunks of keys equals attention over all of them."""

import pytest
import torch
from helpers import SLACK, inputs, run

from flash_dmattn import flash_dmattn_func, flash_dmattn_varlen_func, merge_attention

CUTS = [0, 13, 14, 14, 40, 55]  # a chunk of one key, and one without keys


def in_chunks(query, key, value, mask, bias, **options):
    parts = [slice(*ends) for ends in zip(CUTS, CUTS[1:])]
    chunks = [
        flash_dmattn_func(query, key[:, p], value[:, p], mask[..., p], bias[..., p], return_lse=True) for p in parts
    ]
    return merge_attention(*zip(*chunks))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_chunks_of_keys(dtype):
    """Some rows see no key of a chunk, and one row sees no key at all."""
    query, key, value = inputs(2, 33, 55, 4, 2, 16, dtype=dtype)
    mask, bias = torch.rand(2, 4, 33, 55) < 0.2, torch.randn(2, 4, 33, 55).to(dtype)
    mask[:, :, 7], mask[:, :, 9, :40] = False, False
    dout, dlse = torch.randn_like(query) / 8, torch.randn(2, 4, 33) / 8
    tensors = query, key, value
    ours = run(in_chunks, tensors, mask, bias, dout, dlse)
    whole = run(flash_dmattn_func, tensors, mask, bias, dout, dlse)
    exact = run(flash_dmattn_func, [x.double() for x in tensors], mask, bias.double(), dout, dlse)
    for x, y, z in zip(ours, whole, exact):
        assert x.shape == y.shape and x.dtype == y.dtype and not x.isnan().any()
        masked = z == -torch.inf
        assert torch.equal(x == -torch.inf, masked)
        x, y, z = (t.double().masked_fill(masked, 0) for t in (x, y, z))
        # The chunks' outputs and gradients are each rounded to dtype before they are added.
        assert (x - z).abs().max() <= 2 * len(CUTS) * (y - z).abs().max() + SLACK[dtype]


def test_variable_length_and_one_chunk():
    query, key, value = torch.randn(3, 20, 2, 8, dtype=torch.float64)
    cu = torch.tensor([0, 5, 20], dtype=torch.int32)
    lengths = (cu, cu, 15, 15)
    expected = flash_dmattn_varlen_func(query, key, value, None, None, *lengths, return_lse=True)
    visible = torch.rand(20, 1) < 0.5
    chunks = [
        flash_dmattn_varlen_func(query, key, value, mask, None, *lengths, return_lse=True)
        for mask in (visible, ~visible)
    ]
    for merged in (merge_attention(*zip(*chunks)), merge_attention([expected[0]], [expected[1]])):
        for x, y in zip(merged, expected):
            torch.testing.assert_close(x, y, rtol=0, atol=1e-12)


@pytest.mark.parametrize("garbage", [0.0, torch.nan, torch.inf])
def test_rows_without_keys_are_never_nan(garbage):
    outs = torch.randn(3, 1, 4, 2, 8, dtype=torch.float64)
    lses = torch.randn(3, 1, 2, 4, dtype=torch.float64)
    lses[0], lses[:, :, :, 1], lses[1, :, :, 2] = -torch.inf, -torch.inf, 1e30
    outs[0], outs[:, :, 1] = garbage, garbage
    outs.requires_grad_(), lses.requires_grad_()
    out, lse = merge_attention(outs.unbind(), lses.unbind())
    assert (out[:, 1] == 0).all() and (lse[:, :, 1] == -torch.inf).all()
    assert out.isfinite().all() and (lse[:, :, [0, 2, 3]]).isfinite().all()
    assert torch.equal(out[:, 2], outs[1, :, 2])
    for gradient in torch.autograd.grad([out, lse], [outs, lses], [torch.randn_like(out), torch.randn_like(lse)]):
        assert gradient.isfinite().all() and (gradient[0] == 0).all()


def test_gradients():
    outs = torch.randn(3, 2, 4, 2, 3, dtype=torch.float64, requires_grad=True)
    lses = torch.randn(3, 2, 2, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda outs, lses: merge_attention(outs.unbind(), lses.unbind()), (outs, lses))


OUT, LSE = torch.zeros(2, 5, 4, 8), torch.zeros(2, 4, 5)
ERRORS = {
    "no chunk": (([], []), ValueError, "outs and lses must have one tensor for each chunk, at least one, got 0 and 0"),
    "an lse too few": (([OUT, OUT], [LSE]), ValueError, "one tensor for each chunk, at least one, got 2 and 1"),
    "no sequence": ((None, None), TypeError, "outs must be a sequence of tensors, one per chunk, got NoneType"),
    "stacked": ((OUT, LSE), TypeError, "outs must be a sequence of tensors, one per chunk, got Tensor"),
    "pairs": (
        ((OUT, LSE), (OUT, LSE)),
        ValueError,
        r"got shape \(2, 4, 5\): pass zip\(\*chunks\) of \(out, lse\) pairs",
    ),
    "a list": (([OUT], [[0.0]]), TypeError, r"lses\[0\] must be a torch.Tensor, got list"),
    "integers": (([OUT], [LSE.int()]), TypeError, r"lses\[0\] must be floating, got int32"),
    "dtypes": (([OUT, OUT.half()], [LSE] * 2), TypeError, r"outs\[1\] must have the dtype of outs\[0\], float32, got"),
    "dimensions": (([OUT[0, 0]], [LSE]), ValueError, r"outs\[0\] must be \(B, Sq, H, D\) or .*, got shape \(4, 8\)"),
    "shapes": (([OUT, OUT[:1]], [LSE] * 2), ValueError, r"outs\[1\] must be of shape \(2, 5, 4, 8\), got shape \(1,"),
    "lse of rows and heads": (([OUT], [LSE.mT]), ValueError, r"lses\[0\] must be of shape \(2, 4, 5\), got shape"),
    "devices": (([OUT], [LSE.to("meta")]), RuntimeError, r"lses\[0\] must be on outs\[0\]'s device cpu, got meta"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case):
    chunks, error, message = ERRORS[case]
    with pytest.raises(error, match=message):
        merge_attention(*chunks)
