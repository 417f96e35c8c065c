"""Random shapes, broadcasts and strides."""

import torch
from helpers import check
from hypothesis import assume, given, settings
from hypothesis import strategies as st

LENGTHS = st.sampled_from([0, 1, 2, 3, 5, 17, 33, 70])


def as_strided_somehow(tensor, kind):
    """The same values with other strides."""
    if kind == "reversed" and tensor.ndim > 2:
        dims = list(range(tensor.ndim))
        order = [*reversed(dims[:-1]), dims[-1]]
        inverse = [order.index(d) for d in dims]
        return tensor.permute(order).contiguous().permute(inverse)
    if kind == "gaps":
        wide = torch.empty(*tensor.shape[:-1], tensor.shape[-1] * 2, dtype=tensor.dtype)
        wide.fill_(True if tensor.dtype == torch.bool else float("nan"))
        view = wide[..., ::2]
        view.copy_(tensor)
        return view
    return tensor


@settings(deadline=None, max_examples=150)
@given(
    batch=st.integers(0, 3),
    seqlen_q=LENGTHS,
    seqlen_k=LENGTHS,
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    head_dim=st.sampled_from([1, 7, 8, 16, 40]),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
    pairs=st.fixed_dictionaries(
        {name: st.lists(st.integers(0, 2), min_size=4, max_size=4) for name in ("mask", "bias")}
    ),
    present=st.fixed_dictionaries({name: st.booleans() for name in ("mask", "bias")}),
    layouts=st.lists(st.sampled_from(["plain", "reversed", "gaps"]), min_size=6, max_size=6),
    is_causal=st.booleans(),
    softcap=st.sampled_from([0.0, 4.0]),
    visible=st.sampled_from([0.0, 0.1, 0.9]),
    seed=st.integers(0, 10_000),
)
def test_any_shape_broadcast_and_stride(
    batch,
    seqlen_q,
    seqlen_k,
    kv_heads,
    group,
    head_dim,
    dtype,
    pairs,
    present,
    layouts,
    is_causal,
    softcap,
    visible,
    seed,
):
    # The error of eager bfloat16, which bounds ours, is random where numbers are few.
    assume(dtype != torch.bfloat16 or seqlen_q * seqlen_k == 0 or batch * seqlen_q * kv_heads * group >= 30)
    torch.manual_seed(seed)
    heads = kv_heads * group
    shapes = [(batch, seqlen_q, heads), (batch, seqlen_k, kv_heads), (batch, seqlen_k, kv_heads)]
    tensors = [torch.randn(*shape, head_dim).to(dtype) for shape in shapes]

    def pair_shape(choice):
        return (
            [batch, 1, batch][choice[0]],
            [heads, kv_heads, 1][choice[1]],
            [seqlen_q, 1, seqlen_q][choice[2]],
            [seqlen_k, 1, seqlen_k][choice[3]],
        )

    mask = torch.rand(pair_shape(pairs["mask"])) < visible if present["mask"] else None
    bias = torch.randn(pair_shape(pairs["bias"])).to(dtype) if present["bias"] else None
    dout = torch.randn(batch, seqlen_q, heads, head_dim).to(dtype) / 8
    *tensors, mask, bias, dout = (
        None if x is None else as_strided_somehow(x, layout) for x, layout in zip((*tensors, mask, bias, dout), layouts)
    )
    check(tensors, mask, bias, dout=dout, is_causal=is_causal, softcap=softcap)
