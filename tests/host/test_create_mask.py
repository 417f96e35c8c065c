"""create_mask against a row-by-row construction, and its errors."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flash_dmattn import create_mask, flash_dmattn_func, ops

MIN = torch.finfo(torch.float32).min


def brute_force(bias, visible, window_size, kind):
    """Row after row, key after key."""
    mask = torch.zeros_like(visible)
    for place in torch.cartesian_prod(*(torch.arange(n) for n in bias.shape[:3])).reshape(-1, 3).tolist():
        row, seen = bias[tuple(place)], visible[tuple(place)]
        keys = [j for j in range(len(row)) if seen[j] and row[j] > MIN]
        if kind == "relu":
            chosen = [j for j in keys if row[j] > 0]
        else:
            chosen = sorted(keys, key=lambda j: (row[j].item(), j))[max(len(keys) - window_size, 0) :]
        mask[tuple(place)][chosen] = True
    return mask


@settings(deadline=None, max_examples=60)
@given(
    batch=st.integers(1, 2),
    heads=st.integers(1, 2),
    query_len=st.integers(1, 5),
    key_len=st.integers(1, 9),
    window_size=st.integers(0, 11),
    kind=st.sampled_from(["topk", "relu"]),
    one_row=st.booleans(),
    masked=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_against_brute_force(batch, heads, query_len, key_len, window_size, kind, one_row, masked, seed):
    generator = torch.Generator().manual_seed(seed)
    # Few values, so that there are ties; the lowest is never chosen.
    values = torch.tensor([MIN, -1.0, 0.0, 0.5, 2.0])
    shape = (batch, heads, 1 if one_row else query_len, key_len)
    bias = values[torch.randint(0, 5, shape, generator=generator)]
    mask = torch.rand(1, 1, query_len, key_len, generator=generator) < 0.7 if masked else None
    got = create_mask(bias, mask, batch, query_len, key_len, window_size, MIN, type=kind)
    full = (batch, heads, query_len, key_len)
    visible = torch.ones(full, dtype=torch.bool) if mask is None else mask.expand(full).clone()
    assert torch.equal(got, brute_force(bias.expand(full), visible, window_size, kind))


@pytest.mark.parametrize("is_compiled", [True, False], ids=["compiled", "PyTorch"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_long_rows(dtype, is_compiled, monkeypatch):
    """With more keys than the kernel converts at once, with and without ties, rising and falling."""
    if not is_compiled:
        monkeypatch.setattr(ops, "topk_mask", None)
    bias, visible = torch.randn(2, 4, 2, 2500).to(dtype), torch.rand(2, 1, 2, 2500) < 0.7
    bias[:, 1] = bias[:, 1].round()
    bias[:, 2], bias[:, 3] = bias[:, 2].sort(dim=-1).values, bias[:, 3].sort(dim=-1, descending=True).values
    bias[0, 0, 0, 7], bias[0, 0, 0, 9:11] = torch.inf, torch.nan  # NaN is above nothing: never a candidate
    for window_size in (1, 31, 700, 1900):
        expected = brute_force(bias, visible.expand(2, 4, 2, 2500), window_size, "topk")
        assert torch.equal(create_mask(bias, visible, 2, 2, 2500, window_size, MIN), expected)


def test_opcheck():
    bias = torch.randn(5, 70)
    torch.library.opcheck(ops.topk_mask, (bias, bias > 0, 8))
    torch.library.opcheck(ops.topk_mask, (bias.T, (bias > 0).T, 3))
    for candidates, message in ((bias > 0, "bias's shape"), (bias.T, "candidates must be bool")):
        with pytest.raises((ValueError, TypeError), match=message):
            ops.topk_mask(bias.T, candidates, 3)


def test_what_a_bias_masks_is_not_chosen():
    for dtype in (torch.float32, torch.bfloat16):
        bias = torch.tensor([[[[-torch.inf, torch.finfo(dtype).min, -3e38, 1.0]]]], dtype=dtype)
        assert create_mask(bias, None, 1, 1, 4, 4, -torch.inf).tolist() == [[[[False, False, True, True]]]]


def test_ties_go_to_the_later_key():
    causal = torch.ones(6, 6, dtype=torch.bool).tril()[None, None]
    mask = create_mask(torch.zeros(1, 1, 1, 6), causal, 1, 6, 6, 2, MIN)
    window = torch.ones(6, 6, dtype=torch.bool).tril().triu(-1)
    assert torch.equal(mask[0, 0], window)


def test_a_padding_mask():
    padding = torch.tensor([[1, 1, 0], [1, 1, 1]])
    mask = create_mask(torch.tensor([[[[1.0, 2.0, 3.0]]]]), padding, 2, 1, 3, 1, MIN)
    assert mask[:, 0, 0].tolist() == [[False, True, False], [False, False, True]]


def test_blocks_are_kept_whole_or_dropped():
    bias = torch.tensor([[[[1.0, 1.0, 1.0, -1.0, 1.0, -1.0, -1.0, -1.0, 1.0]]]])
    mask = create_mask(bias, None, 1, 1, 9, 0, MIN, block_size=4, type="relu")
    assert mask.flatten().tolist() == [True] * 4 + [False] * 4 + [True]
    masked = torch.ones(1, 1, 1, 9, dtype=torch.bool)
    masked[..., 3] = False
    mask = create_mask(bias, masked, 1, 1, 9, 0, MIN, block_size=4, type="relu")
    assert mask.flatten().tolist() == [True] * 3 + [False] * 5 + [True]


def test_no_gradient_and_no_keys():
    bias = torch.randn(1, 2, 3, 0, requires_grad=True)
    assert create_mask(bias, None, 1, 3, 0, 4, MIN).shape == (1, 2, 3, 0)


def test_heads_of_query_and_of_key():
    """Query head h uses key/value head h // (H / Hkv)."""
    bias, mask = torch.randn(2, 2, 3, 9), torch.rand(1, 4, 3, 9) < 0.7
    for own, others in ((bias, mask), (bias.repeat_interleave(2, dim=1), mask[:, :2])):
        expected = create_mask(*(x.repeat_interleave(4 // x.shape[1], dim=1) for x in (own, others)), 2, 3, 9, 4, MIN)
        assert torch.equal(create_mask(own, others, 2, 3, 9, 4, MIN), expected)


BIAS = torch.zeros(2, 2, 3, 4)
ERRORS = {
    "type": ({"type": "best"}, ValueError, "type must be 'topk' or 'relu', got 'best'"),
    "window": ({"window_size": -1}, ValueError, "window_size must not be negative, got -1"),
    "window of text": ({"window_size": "3"}, TypeError, "window_size must be an int, got str"),
    "float window": ({"window_size": 3.0}, TypeError, "window_size must be an int, got float"),
    "float block": ({"block_size": 2.5}, TypeError, "block_size must be an int, got float"),
    "dtype for its least number": (
        {"min_dtype": torch.float32},
        TypeError,
        "min_dtype must be a number, got dtype",
    ),
    "min_dtype is NaN": (
        {"min_dtype": float("nan")},
        ValueError,
        "min_dtype must fit in a float and not be NaN, got nan",
    ),
    "a large min_dtype": (
        {"min_dtype": -(2**2000)},
        ValueError,
        "min_dtype must fit in a float and not be NaN, got -1",
    ),
    "query length": ({"query_len": -5}, ValueError, "query_len must not be negative, got -5"),
    "bias type": ({"attention_bias": [0.0]}, TypeError, "attention_bias must be a torch.Tensor, got list"),
    "mask type": ({"attention_mask": [True]}, TypeError, "attention_mask must be a torch.Tensor, got list"),
    "mask device": (
        {"attention_mask": torch.ones(2, 4, dtype=torch.bool, device="meta")},
        RuntimeError,
        "attention_mask must be on attention_bias's device cpu, got meta",
    ),
    "block": ({"block_size": 0}, ValueError, "block_size must be at least 1 or None, got 0"),
    "bias dtype": (
        {"attention_bias": BIAS.int()},
        TypeError,
        "attention_bias must be floating, got int32",
    ),
    "bias shape": (
        {"attention_bias": BIAS[..., :3]},
        ValueError,
        r"attention_bias must be .* with B = 2, Sq = 3, Sk = 4, got shape \(2, 2, 3, 3\)",
    ),
    "mask dtype": ({"attention_mask": BIAS}, TypeError, "attention_mask must be bool .* got float32"),
    "mask shape": (
        {"attention_mask": BIAS[:, :, :2] > 0},
        ValueError,
        r"attention_mask must be .* or a padding mask \(B, Sk\) with B = 2, Sq = 3, Sk = 4, got shape \(2, 2, 2, 4\)",
    ),
    "heads that do not go together": (
        {"attention_mask": torch.ones(2, 3, 3, 4, dtype=torch.bool)},
        ValueError,
        "attention_bias and attention_mask must have head counts of which one divides the other, got 2 and 3",
    ),
    "padding shape": ({"attention_mask": torch.ones(2, 3)}, ValueError, r"must be \(B, Sk\) = \(2, 4\), got \(2, 3\)"),
    "padding dtype": ({"attention_mask": torch.ones(2, 4)}, TypeError, "must be bool or integers, got float32"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case):
    changed, error, message = ERRORS[case]
    arguments = {
        "attention_bias": BIAS,
        "attention_mask": None,
        "batch_size": 2,
        "query_len": 3,
        "key_len": 4,
        "window_size": 2,
        "min_dtype": MIN,
    }
    with pytest.raises(error, match=message):
        create_mask(**{**arguments, **changed})


@pytest.mark.parametrize("sparse", ["auto", "tiles", "lists"])
@pytest.mark.parametrize("shape", [(1, 2, 130, 700), (1, 1, 1, 700), (1, 1, 130, 1)], ids=str)
def test_any_byte_but_0_is_true(shape, sparse):
    query, key, value = (torch.randn(1, n, 2, 8) for n in (130, 700, 700))
    bytes_ = (torch.rand(shape) < 0.02).byte()
    true = [bytes_ * n for n in (1, 2, 128, 255)]
    for strides in (lambda mask: mask, lambda mask: mask.mT.contiguous().mT):
        out, *others = (
            flash_dmattn_func(query, key, value, strides(x.view(torch.bool)), sparse=sparse).clone() for x in true
        )
        assert out.any() and all(torch.equal(out, other) for other in others)
