"""Bad input raises an error that names the argument, the value and what is accepted."""

import copy
import inspect
import pickle

import pytest
import torch
from helpers import inputs, on_xpu
from torch.nn.attention.bias import causal_lower_right

import flash_dmattn
from flash_dmattn import KeyIntervalMask, KeyLists, flash_dmattn_func, flash_dmattn_func_auto, flash_dmattn_varlen_func

Q, K, V = inputs(2, 5, 7, 4, 2, 8)
THREE = inputs(3, 5, 7, 4, 2, 8)  # B is neither H nor Hkv


class LowerTriangularMask:
    __module__ = "xformers.ops.fmha.attn_bias"


def call(query=Q, key=K, value=V, *args, **kwargs):
    return flash_dmattn_func(query, key, value, *args, **kwargs)


FIXED = {
    "query is no tensor": (lambda: call([1.0]), TypeError, "query must be a torch.Tensor, got list"),
    "a list of masks": (
        lambda: call(attn_mask=[KeyIntervalMask.causal(5, 5)]),
        TypeError,
        "attn_mask must be .*, got list$",
    ),
    "scale is a list": (
        lambda: call(softmax_scale=[1.0] * 4),
        TypeError,
        r"softmax_scale must be a number or a torch.Tensor, got list: pass torch.as_tensor\(softmax_scale\)",
    ),
    "softcap is a list": (lambda: call(softcap=[1.0]), TypeError, "softcap must be a number, got list$"),
    "key is no tensor": (lambda: call(key=None), TypeError, "key must be a torch.Tensor, got NoneType"),
    "query of 3 dimensions": (
        lambda: call(Q[0]),
        ValueError,
        r"query must have 4 dimensions \(B, Sq, H, D\), got shape \(5, 4, 8\)",
    ),
    "integer query": (
        lambda: call(Q.int()),
        TypeError,
        "query must be one of float16, bfloat16, float32, float64, got int32",
    ),
    "key in another dtype": (lambda: call(key=K.half()), TypeError, "key must have query's dtype float32, got float16"),
    "key and value differ": (
        lambda: call(value=V[:, :-1]),
        ValueError,
        r"key and value must have the same shape except for the head dimension, got \(2, 7, 2, 8\) and \(2, 6, 2, 8\)",
    ),
    "batch sizes differ": (
        lambda: call(key=K[:1], value=V[:1]),
        ValueError,
        "key must have query's batch size 2, got 1",
    ),
    "head dimensions differ": (
        lambda: call(Q[..., :4]),
        ValueError,
        "key must have query's head dimension 4, got 8",
    ),
    "head dimension of 264": (
        lambda: call(*inputs(1, 2, 2, 1, 1, 264)),
        ValueError,
        "query must have a head dimension from 1 to 256, got 264",
    ),
    "value with a head dimension of 264": (
        lambda: call(value=torch.zeros(2, 7, 2, 264)),
        ValueError,
        "value must have a head dimension from 1 to 256, got 264",
    ),
    "heads that do not divide": (
        lambda: call(Q[:, :, :3]),
        ValueError,
        "query's head count must be a multiple of key's, got 3 and 2",
    ),
    "no key heads": (
        lambda: call(key=K[:, :, :0], value=V[:, :, :0]),
        ValueError,
        "query's head count must be a multiple of key's, got 4 and 0",
    ),
    "float mask": (
        lambda: call(attn_mask=torch.zeros(1, 1, 5, 7)),
        TypeError,
        r"attn_mask must be bool \(True = visible\), got float32: pass a mask of 0 and 1 as attn_mask.bool\(\), "
        "an additive one as attn_bias",
    ),
    "int64 mask": (
        lambda: call(attn_mask=torch.ones(2, 7).long()),
        TypeError,
        r"attn_mask must be bool \(True = visible\), got int64: pass attn_mask.bool\(\)",
    ),
    "uint16 mask": (
        lambda: call(attn_mask=torch.ones(1, 1, 5, 7).to(torch.uint16)),
        TypeError,
        r"attn_mask must be bool \(True = visible\), got uint16: pass attn_mask.bool\(\)",
    ),
    "float8 bias": (
        lambda: call(attn_bias=torch.zeros(1, 1, 5, 7).to(torch.float8_e4m3fn)),
        TypeError,
        "attn_bias must be float32, got float8_e4m3fn",
    ),
    "uint8 mask": (
        lambda: call(attn_mask=torch.ones(1, 1, 5, 7).byte()),
        TypeError,
        r"attn_mask must be bool \(True = visible\), got uint8: pass attn_mask.bool\(\)",
    ),
    "complex mask": (
        lambda: call(attn_mask=torch.ones(1, 1, 5, 7, dtype=torch.complex64)),
        TypeError,
        r"attn_mask must be bool \(True = visible\), got complex64$",
    ),
    "mask (Sq, Sk)": (
        lambda: call(attn_mask=torch.ones(5, 7, dtype=torch.bool)),
        ValueError,
        r"attn_mask must have 4 dimensions \({B\|B/n\|1}, {H\|Hkv\|1}, {Sq\|1}, {Sk\|1}\), got shape \(5, 7\): pass "
        r"attn_mask\[None, None\]$",
    ),
    "mask (B, Sk)": (
        lambda: call(attn_mask=torch.ones(2, 7, dtype=torch.bool)),
        ValueError,
        r"attn_mask must have 4 dimensions .*, got shape \(2, 7\): pass KeyIntervalMask.padding\(attn_mask\)$",
    ),
    "mask (B, Sq, Sk)": (
        lambda: call(*THREE, attn_mask=torch.ones(3, 5, 7, dtype=torch.bool)),
        ValueError,
        r"attn_mask must have 4 dimensions .*, got shape \(3, 5, 7\): pass attn_mask\[:, None\]$",
    ),
    "mask (Sq, Sk) where Sq is H": (
        lambda: call(Q[:, :4], attn_mask=torch.ones(4, 7, dtype=torch.bool)),
        ValueError,
        r"attn_mask must have 4 dimensions .*, got shape \(4, 7\)$",
    ),
    "mask (B, Sk) where B is Sq": (
        lambda: call(Q[:, :2], attn_mask=torch.ones(2, 7, dtype=torch.bool)),
        ValueError,
        r"attn_mask must have 4 dimensions .*, got shape \(2, 7\)$",
    ),
    "mask of 2 dimensions": (
        lambda: call(attn_mask=torch.ones(5, 6, dtype=torch.bool)),
        ValueError,
        r"attn_mask must have 4 dimensions .*, got shape \(5, 6\)$",
    ),
    "bias (Sq, Sk)": (
        lambda: call(attn_bias=torch.zeros(5, 7)),
        ValueError,
        r"attn_bias must have 4 dimensions .*, got shape \(5, 7\): pass attn_bias\[None, None\]$",
    ),
    "bias (B, Sk)": (
        lambda: call(*THREE, attn_bias=torch.zeros(3, 7)),
        ValueError,
        r"attn_bias must have 4 dimensions .*, got shape \(3, 7\): pass attn_bias\[:, None, None\]$",
    ),
    "bias (B, Sk) or (Hkv, Sk)": (
        lambda: call(attn_bias=torch.zeros(2, 7)),
        ValueError,
        r"attn_bias must have 4 dimensions .*, got shape \(2, 7\)$",
    ),
    "bias (H, Sq, Sk)": (
        lambda: call(attn_bias=torch.zeros(4, 5, 7)),
        ValueError,
        r"attn_bias must have 4 dimensions .*, got shape \(4, 5, 7\): pass attn_bias\[None\]$",
    ),
    "a mask of xFormers": (
        lambda: call(attn_mask=LowerTriangularMask()),
        TypeError,
        "attn_mask must be a bool torch.Tensor, .*, got LowerTriangularMask of xFormers: docs/guides/from-xformers.md",
    ),
    "a bias of xFormers": (
        lambda: call(attn_bias=LowerTriangularMask()),
        TypeError,
        "attn_bias must be a torch.Tensor, got LowerTriangularMask of xFormers: docs/guides/from-xformers.md",
    ),
    "CausalBias as attn_mask": (
        lambda: call(attn_mask=causal_lower_right(5, 7)),
        TypeError,
        "attn_mask must be a plain torch.Tensor, got CausalBias: pass is_causal=True",
    ),
    "CausalBias as attn_bias": (
        lambda: call(attn_bias=causal_lower_right(5, 7)),
        TypeError,
        "attn_bias must be a plain torch.Tensor, got CausalBias: pass is_causal=True",
    ),
    "bool mask as attn_bias": (
        lambda: call(Q, K, V, None, torch.ones(2, 7, dtype=torch.bool)),
        TypeError,
        "attn_bias must be float32, got bool: pass a mask as attn_mask",
    ),
    "intervals as attn_bias": (
        lambda: call(Q, K, V, None, KeyIntervalMask.causal(5, 7)),
        TypeError,
        "attn_bias must be a torch.Tensor, got KeyIntervalMask: pass a mask as attn_mask",
    ),
    "lists as attn_bias": (
        lambda: call(Q, K, V, None, KeyLists.build(KeyIntervalMask.causal(5, 7), 5)),
        TypeError,
        "attn_bias must be a torch.Tensor, got KeyLists: pass a mask as attn_mask",
    ),
    "mask of the wrong heads": (
        lambda: call(attn_mask=torch.ones(1, 3, 5, 7, dtype=torch.bool)),
        ValueError,
        r"attn_mask must be .*: dimension 1 must be 1 or 2 or 4, got shape \(1, 3, 5, 7\)",
    ),
    "bias of the wrong keys": (
        lambda: call(attn_bias=torch.zeros(1, 1, 5, 6)),
        ValueError,
        r"attn_bias must be .*: dimension 3 must be 1 or 7, got shape \(1, 1, 5, 6\)",
    ),
    "dense bias in another dtype": (
        lambda: call(Q.half(), K.half(), V.half(), attn_bias=torch.zeros(1, 1, 5, 7).bfloat16()),
        TypeError,
        "attn_bias must be float16 or float32, got bfloat16",
    ),
    "key bias in another dtype": (
        lambda: call(attn_bias=torch.zeros(1, 1, 1, 7).half()),
        TypeError,
        "attn_bias must be float32, got float16",
    ),
    "scale is no number": (
        lambda: call(softmax_scale="1"),
        TypeError,
        "softmax_scale must be a number or a torch.Tensor, got str",
    ),
    "scale is a bool": (
        lambda: call(Q, K, V, None, None, True),
        TypeError,
        "softmax_scale must be a number or a torch.Tensor, got bool",
    ),
    "softcap is a bool": (lambda: call(softcap=True), TypeError, "softcap must be a number, got bool"),
    "is_causal is a number": (lambda: call(is_causal=0.5), TypeError, "is_causal must be a bool, got float"),
    "deterministic is a number": (lambda: call(deterministic=1), TypeError, "deterministic must be a bool, got int"),
    "return_attn_probs is a tensor": (
        lambda: call(return_attn_probs=torch.tensor(True)),
        TypeError,
        "return_attn_probs must be a bool, got Tensor",
    ),
    "return_lse is None": (lambda: call(return_lse=None), TypeError, "return_lse must be a bool, got NoneType"),
    "scale is NaN": (
        lambda: call(softmax_scale=float("nan")),
        ValueError,
        "softmax_scale must be finite in float32, got nan",
    ),
    "scale is infinite in float32": (
        lambda: call(softmax_scale=1e39),
        ValueError,
        r"softmax_scale must be finite in float32, got 1e\+39",
    ),
    "softcap is infinite in float32": (
        lambda: call(softcap=1e39),
        ValueError,
        r"softcap must be finite in float32, got 1e\+39",
    ),
    "the inverse of softcap is infinite in float32": (
        lambda: call(softcap=1e-40),
        ValueError,
        r"softcap must be 0 \(none\) or have a finite inverse in float32, got 1e-40",
    ),
    "sparse query": (
        lambda: call(Q.to_sparse()),
        TypeError,
        "query must be a dense torch.Tensor, got a sparse_coo one",
    ),
    "sparse key": (
        lambda: call(key=K.to_sparse()),
        TypeError,
        "key must be a dense torch.Tensor, got a sparse_coo one",
    ),
    "sparse mask": (
        lambda: call(attn_mask=torch.ones(1, 1, 5, 7).bool().to_sparse()),
        TypeError,
        "attn_mask must be a dense torch.Tensor, got a sparse_coo one",
    ),
    "sparse mask of lists": (
        lambda: KeyLists.build(torch.ones(1, 1, 5, 7).bool().to_sparse(), 5),
        TypeError,
        "mask must be a dense torch.Tensor, got a sparse_coo one",
    ),
    "sparse bias": (
        lambda: call(attn_bias=torch.ones(1, 1, 5, 7).to_sparse()),
        TypeError,
        "attn_bias must be a dense torch.Tensor, got a sparse_coo one",
    ),
    "sparse bias of topk": (
        lambda: KeyIntervalMask.topk(torch.ones(1, 1, 7).to_sparse(), 3),
        TypeError,
        "bias must be a dense torch.Tensor, got a sparse_coo one",
    ),
    "sparse qkv": (
        lambda: flash_dmattn.flash_dmattn_qkvpacked_func(torch.zeros(2, 5, 3, 4, 8).to_sparse()),
        TypeError,
        "qkv must be a dense torch.Tensor, got a sparse_coo one",
    ),
    "nested query": (
        lambda: call(torch.nested.nested_tensor([*Q])),
        TypeError,
        "query must be a dense torch.Tensor, got a nested one",
    ),
    "jagged query": (
        lambda: call(torch.nested.nested_tensor([*Q], layout=torch.jagged)),
        TypeError,
        "query must be a dense torch.Tensor, got a nested one",
    ),
    "jagged value": (
        lambda: call(value=torch.nested.nested_tensor([*V], layout=torch.jagged)),
        TypeError,
        "value must be a dense torch.Tensor, got a nested one",
    ),
    "nested mask": (
        lambda: call(attn_mask=torch.nested.nested_tensor([torch.ones(1, 5, 7).bool()])),
        TypeError,
        "attn_mask must be a dense torch.Tensor, got a nested one",
    ),
    "negative softcap": (
        lambda: call(softcap=-1.0),
        ValueError,
        r"softcap must be 0 \(none\) or positive, got -1.0",
    ),
    "another device": (lambda: call(key=K.to("meta")), RuntimeError, "key must be on query's device cpu, got meta"),
    "mask on another device": (
        lambda: call(attn_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool, device="meta")),
        RuntimeError,
        "attn_mask must be on query's device cpu, got meta",
    ),
    "a device without kernels": (
        lambda: call(on_xpu(2, 5, 4, 8), K, V),
        RuntimeError,
        "query must be on a cpu, cuda or meta device, got xpu:0",
    ),
    "qkv of 4 dimensions": (
        lambda: flash_dmattn.flash_dmattn_qkvpacked_func(torch.zeros(2, 5, 4, 8)),
        ValueError,
        r"qkv must have 5 dimensions \(B, S, 3, H, D\), got shape \(2, 5, 4, 8\)",
    ),
    "qkv is no tensor": (
        lambda: flash_dmattn.flash_dmattn_qkvpacked_func([1.0]),
        TypeError,
        r"qkv must be a torch.Tensor, got list: pass torch.as_tensor\(qkv\)",
    ),
    "qkv with 2 parts": (
        lambda: flash_dmattn.flash_dmattn_qkvpacked_func(torch.zeros(2, 5, 2, 4, 8)),
        ValueError,
        r"qkv must be \(B, S, 3, H, D\), got shape \(2, 5, 2, 4, 8\)",
    ),
    "kv with 3 parts": (
        lambda: flash_dmattn.flash_dmattn_kvpacked_func(Q, torch.zeros(2, 7, 3, 2, 8)),
        ValueError,
        r"kv must be \(B, Sk, 2, Hkv, D\), got shape \(2, 7, 3, 2, 8\)",
    ),
    "qkv of integers": (
        lambda: flash_dmattn.flash_dmattn_qkvpacked_func(torch.zeros(2, 5, 3, 4, 8).int()),
        TypeError,
        "qkv must be one of float16, bfloat16, float32, float64, got int32",
    ),
    "qkv with a head dimension of 264": (
        lambda: flash_dmattn.flash_dmattn_qkvpacked_func(torch.zeros(2, 5, 3, 4, 264)),
        ValueError,
        "qkv must have a head dimension from 1 to 256, got 264",
    ),
    "qkv on a device without kernels": (
        lambda: flash_dmattn.flash_dmattn_qkvpacked_func(on_xpu(2, 5, 3, 4, 8)),
        RuntimeError,
        "qkv must be on a cpu, cuda or meta device, got xpu:0",
    ),
    "kv with other heads": (
        lambda: flash_dmattn.flash_dmattn_kvpacked_func(Q, torch.zeros(2, 7, 2, 3, 8)),
        ValueError,
        "query's head count must be a multiple of kv's, got 4 and 3",
    ),
    "kv in another dtype": (
        lambda: flash_dmattn.flash_dmattn_kvpacked_func(Q, torch.zeros(2, 7, 2, 2, 8).half()),
        TypeError,
        "kv must have query's dtype float32, got float16",
    ),
    "kv with another batch size": (
        lambda: flash_dmattn.flash_dmattn_kvpacked_func(Q, torch.zeros(3, 7, 2, 2, 8)),
        ValueError,
        "kv must have query's batch size 2, got 3",
    ),
    "meta tensors for the reference": (
        lambda: flash_dmattn_func_auto("reference")(Q.to("meta"), K, V),
        RuntimeError,
        "key must be on query's device meta, got cpu",
    ),
    "an unknown backend": (
        lambda: flash_dmattn_func_auto("cudnn"),
        ValueError,
        "backend must be one of cuda, cpu, triton, flex, reference, got 'cudnn'",
    ),
    "relative_bias is no tensor": (
        lambda: call(relative_bias=[0.0]),
        TypeError,
        "relative_bias must be a torch.Tensor, got list",
    ),
    "relative_bias of two dimensions": (
        lambda: call(relative_bias=torch.zeros(4, 9)),
        ValueError,
        r"relative_bias must be \({B\|1}, {H\|Hkv\|1}, 2R \+ 1\), .*, got shape \(4, 9\): pass relative_bias\[None\]$",
    ),
    "relative_bias (H, 2R + 1) where H is B": (
        lambda: call(relative_bias=torch.zeros(2, 9)),
        ValueError,
        r"relative_bias must be .*, got shape \(2, 9\)$",
    ),
    "relative_bias of T5's buckets": (
        lambda: call(relative_bias=torch.zeros(32, 4)),
        ValueError,
        r"relative_bias must be .*, got shape \(32, 4\): flash_dmattn.relative.t5 makes the table of an embedding",
    ),
    "relative_bias is an embedding": (
        lambda: call(relative_bias=torch.nn.Embedding(32, 4)),
        TypeError,
        "relative_bias must be a torch.Tensor, got Embedding: flash_dmattn.relative.t5 makes the table",
    ),
    "relative_bias of a grid without a batch": (
        lambda: call(relative_bias=torch.zeros(4, 3, 5), grid=(2, 3)),
        ValueError,
        r"relative_bias must be .* with grid=\(2, 3\), got shape \(4, 3, 5\): pass relative_bias\[None\]$",
    ),
    "relative_bias of one dimension": (
        lambda: call(relative_bias=torch.zeros(9)),
        ValueError,
        r"relative_bias must be .*, got shape \(9,\): pass relative_bias\[None, None\]$",
    ),
    "relative_bias of an even number": (
        lambda: call(relative_bias=torch.zeros(1, 4, 8)),
        ValueError,
        r"relative_bias must have an odd number of entries in dimension 2, 2R \+ 1, got shape \(1, 4, 8\)",
    ),
    "relative_bias of no entries": (
        lambda: call(relative_bias=torch.zeros(1, 4, 0)),
        ValueError,
        "relative_bias must have an odd number of entries in dimension 2",
    ),
    "relative_bias of 2^31 + 1 entries": (
        lambda: call(relative_bias=torch.zeros(()).expand(1, 1, 2**31 + 1)),
        ValueError,
        r"relative_bias must have fewer than 2\^31 entries per head, got shape \(1, 1, 2147483649\)",
    ),
    "relative_bias of 3 heads": (
        lambda: call(relative_bias=torch.zeros(1, 3, 9)),
        ValueError,
        "relative_bias must be .*: dimension 1 must be 1 or 2 or 4, got shape",
    ),
    "relative_bias of 3 batch elements": (
        lambda: call(relative_bias=torch.zeros(3, 4, 9)),
        ValueError,
        "relative_bias must be .*: dimension 0 must be 1 or 2, got shape",
    ),
    "relative_bias in another dtype": (
        lambda: call(relative_bias=torch.zeros(1, 4, 9).half()),
        TypeError,
        "relative_bias must be float32, got float16",
    ),
    "relative_bias of integers": (
        lambda: call(Q.half(), K.half(), V.half(), relative_bias=torch.zeros(1, 4, 9).int()),
        TypeError,
        "relative_bias must be float16 or float32, got int32",
    ),
    "relative_bias elsewhere": (
        lambda: call(relative_bias=torch.zeros(1, 4, 9, device="meta")),
        RuntimeError,
        "relative_bias must be on query's device cpu, got meta",
    ),
    "relative_bias of a grid alone": (
        lambda: call(relative_bias=torch.zeros(1, 4, 3, 9)),
        ValueError,
        r"relative_bias of four dimensions comes with grid=\(h, w\), got shape \(1, 4, 3, 9\) alone",
    ),
    "grid alone": (lambda: call(grid=(1, 5)), ValueError, r"grid comes with relative_bias .*, got grid=\(1, 5\) alone"),
    "grid of one number": (
        lambda: call(relative_bias=torch.zeros(1, 4, 9), grid=5),
        TypeError,
        r"grid must be a pair of ints \(h, w\), got 5",
    ),
    "grid of floats": (
        lambda: call(relative_bias=torch.zeros(1, 4, 1, 9), grid=(1.0, 5)),
        TypeError,
        r"grid must be a pair of ints \(h, w\), got float",
    ),
    "grid of no rows": (
        lambda: call(relative_bias=torch.zeros(1, 4, 1, 9), grid=(0, 5)),
        ValueError,
        r"grid must be a pair of positive ints \(h, w\), got \(0, 5\)",
    ),
    "grid of another table": (
        lambda: call(relative_bias=torch.zeros(1, 4, 1, 7), grid=(1, 5)),
        ValueError,
        r"relative_bias must be \(\{B\|1\}, \{H\|Hkv\|1\}, 1, 9\) with grid=\(1, 5\), got shape \(1, 4, 1, 7\)",
    ),
    "grid of other lengths": (
        lambda: call(relative_bias=torch.zeros(1, 4, 1, 9), grid=(1, 5)),
        ValueError,
        r"grid must be of the query rows and of the keys, got grid=\(1, 5\) of 5 tokens for 5 rows and 7 keys",
    ),
    "grid with a cache": (
        lambda: call(
            key=K[:, :5],
            value=V[:, :5],
            relative_bias=torch.zeros(1, 4, 1, 9),
            grid=(1, 5),
            cache_seqlens=torch.tensor([5, 5], dtype=torch.int32),
        ),
        ValueError,
        r"grid does not support cache_seqlens, got grid=\(1, 5\) and cache_seqlens",
    ),
    "grid of variable length": (
        lambda: flash_dmattn_varlen_func(
            *(Q[0], K[0, :5], V[0, :5], None, None, *(torch.tensor([0, 5], dtype=torch.int32),) * 2, 5, 5),
            relative_bias=torch.zeros(1, 4, 1, 9),
            grid=(1, 5),
        ),
        ValueError,
        r"grid is for fixed length, got grid=\(1, 5\) and cu_seqlens_q",
    ),
    "relative_bias for the backend 'triton'": (
        lambda: flash_dmattn_func_auto("triton")(Q, K, V, relative_bias=torch.zeros(1, 4, 9)),
        (ValueError, RuntimeError),
        "the backend 'triton' (takes no relative_bias|is not available)",
    ),
    "sinks is no tensor": (lambda: call(sinks=1.0), TypeError, "sinks must be a torch.Tensor, got float"),
    "sinks of integers": (lambda: call(sinks=torch.zeros(4).int()), TypeError, "sinks must be floating, got int32"),
    "sinks of 3 heads": (
        lambda: call(sinks=torch.zeros(3)),
        ValueError,
        r"sinks must be \(\{H\|1\}\) for H = 4 heads, got shape \(3,\)",
    ),
    "sinks in another dtype": (
        lambda: call(sinks=torch.zeros(4).half()),
        TypeError,
        "sinks must be float32, got float16",
    ),
    "sinks elsewhere": (
        lambda: call(sinks=torch.zeros(4, device="meta")),
        RuntimeError,
        "sinks must be on query's device cpu, got meta",
    ),
}


def test_numbers_of_numpy():
    numpy = pytest.importorskip("numpy")
    options = {"softmax_scale": numpy.float32(0.5), "is_causal": numpy.bool_(True), "softcap": numpy.float64(2)}
    expected = call(softmax_scale=0.5, is_causal=True, softcap=2.0)
    torch.testing.assert_close(call(**options, deterministic=numpy.bool_(True)), expected)


@pytest.mark.parametrize("case", FIXED)
def test_fixed(case):
    function, error, message = FIXED[case]
    with pytest.raises(error, match=message):
        function()


CU = torch.tensor([0, 2, 5], dtype=torch.int32)
ROWS = torch.randn(5, 2, 8)


# Argument by argument as in flash-attn.
FLASH_ATTN = {
    "sliding window": (
        lambda: call(window_size=(-1, 0)),
        r"window_size must be an int, got \(-1, 0\): it is top-k selection; a sliding window is attn_mask=Key",
    ),
    "sliding window of variable length": (
        lambda: flash_dmattn_varlen_func(ROWS, ROWS, ROWS, None, None, CU, CU, 3, 3, window_size=(2, 0)),
        r"a sliding window is attn_mask=KeyIntervalMask.sliding_window_varlen\(cu_seqlens_q, cu_seqlens_k,",
    ),
    "lengths after value": (
        lambda: flash_dmattn_varlen_func(ROWS, ROWS, ROWS, CU, CU, 3, 3),
        "attn_mask must be bool, got int32 of one dimension: attn_mask and attn_bias come before cu_seqlens",
    ),
    "lengths after qkv": (
        lambda: flash_dmattn.flash_dmattn_varlen_qkvpacked_func(torch.stack([ROWS] * 3, dim=1), CU, 3),
        "attn_mask must be bool, got int32 of one dimension: attn_mask and attn_bias come before cu_seqlens",
    ),
}


@pytest.mark.parametrize("name", FLASH_ATTN)
def test_calls_of_flash_attn(name):
    function, message = FLASH_ATTN[name]
    with pytest.raises(TypeError, match=message):
        function()


def varlen(mask=None, bias=None, cu_q=CU, cu_k=CU, max_q=3, max_k=3, rows=ROWS):
    return flash_dmattn_varlen_func(rows, rows, rows, mask, bias, cu_q, cu_k, max_q, max_k)


def packed(mask=None, bias=None, cu_seqlens=CU, max_seqlen=3, **options):
    qkv = torch.stack([ROWS] * 3, dim=1)
    return flash_dmattn.flash_dmattn_varlen_qkvpacked_func(qkv, mask, bias, cu_seqlens, max_seqlen, **options)


VARLEN = {
    "query of 4 dimensions": (
        lambda: varlen(rows=Q),
        ValueError,
        r"query must have 3 dimensions \(total_q, H, D\), got shape \(2, 5, 4, 8\)",
    ),
    "cu_seqlens is no tensor": (
        lambda: varlen(cu_q=[0, 5]),
        TypeError,
        r"cu_seqlens_q must be a torch.Tensor, got list: pass torch.as_tensor\(cu_seqlens_q, dtype=torch.int32\)",
    ),
    "cu_seqlens are missing": (lambda: varlen(cu_q=None), TypeError, "cu_seqlens_q is required, got None"),
    "max_seqlen is missing": (lambda: varlen(max_k=None), TypeError, "max_seqlen_k is required, got None"),
    "packed cu_seqlens are missing": (lambda: packed(cu_seqlens=None), TypeError, "cu_seqlens is required, got None"),
    "packed max_seqlen is missing": (lambda: packed(max_seqlen=None), TypeError, "max_seqlen is required, got None"),
    "cu_seqlens in int64": (
        lambda: varlen(cu_k=CU.long()),
        TypeError,
        r"cu_seqlens_k must be int32, got int64: pass cu_seqlens_k.int\(\)$",
    ),
    "cu_seqlens of 2 dimensions": (
        lambda: varlen(cu_q=CU[None]),
        ValueError,
        r"cu_seqlens_q must have 1 dimension \(B \+ 1\), got shape \(1, 3\)",
    ),
    "no cu_seqlens": (
        lambda: varlen(cu_q=CU[:0], cu_k=CU[:0]),
        ValueError,
        r"cu_seqlens_q must have B \+ 1 elements, at least 1, got 0",
    ),
    "cu_seqlens that end early": (
        lambda: varlen(cu_q=CU[:2], cu_k=CU[:2]),
        ValueError,
        r"cu_seqlens_q must be non-decreasing from 0 to 5, the rows of query, got cu_seqlens_q\[-1\] = 2: "
        "if the rest is padding, make it a sequence of its own$",
    ),
    "cu_seqlens that fall": (
        lambda: varlen(cu_k=torch.tensor([0, 6, 5], dtype=torch.int32)),
        ValueError,
        r"cu_seqlens_k must be non-decreasing from 0 to 5, the number of keys, got cu_seqlens_k\[1:3\] = \[6, 5\]$",
    ),
    "cu_seqlens without the first offset": (
        lambda: varlen(cu_q=CU[1:], cu_k=CU[1:]),
        ValueError,
        r"got cu_seqlens_q\[0\] = [0-9]+: pass torch.nn.functional.pad\(cu_seqlens_q, \(1, 0\)\)$",
    ),
    "a packed batch of one": (
        lambda: varlen(rows=ROWS[None]),
        ValueError,
        r"query must have 3 dimensions \(total_q, H, D\), got shape \(1, .*\): pass query\[0\]$",
    ),
    "cu_seqlens that start late": (
        lambda: varlen(cu_q=torch.tensor([1, 3, 5], dtype=torch.int32)),
        ValueError,
        r"cu_seqlens_q must be non-decreasing from 0 to 5, the rows of query, got cu_seqlens_q\[0\] = 1: pass",
    ),
    "lengths as cu_seqlens": (
        lambda: varlen(cu_q=CU.diff(), cu_k=CU.diff()),
        ValueError,
        r"got cu_seqlens_q\[0\] = 2: if these are lengths, pass torch.nn.functional.pad\(cu_seqlens_q.cumsum\(0, "
        r"dtype=torch.int32\), \(1, 0\)\)$",
    ),
    "batch sizes differ": (
        lambda: varlen(cu_k=torch.tensor([0, 5], dtype=torch.int32)),
        ValueError,
        r"cu_seqlens_q and cu_seqlens_k must both have B \+ 1 elements, got 3 and 2",
    ),
    "batch sizes of lists differ": (
        lambda: KeyLists.build(torch.ones(5, 1).bool(), 3, 3, cu_seqlens_q=CU[[0, 2]], cu_seqlens_k=CU),
        ValueError,
        r"cu_seqlens_q and cu_seqlens_k must both have B \+ 1 elements, got 2 and 3",
    ),
    "batch sizes of indices differ": (
        lambda: KeyLists.from_indices(torch.zeros(5, 1, 2).int(), 3, 3, cu_seqlens_q=CU, cu_seqlens_k=CU[[0, 2]]),
        ValueError,
        r"cu_seqlens_q and cu_seqlens_k must both have B \+ 1 elements, got 3 and 2",
    ),
    "batch sizes of a selection differ": (
        lambda: KeyIntervalMask.topk_varlen(torch.zeros(5, 1), 2, CU[[0, 2]], cu_seqlens_q=CU, max_seqlen_k=3),
        ValueError,
        r"cu_seqlens_q and cu_seqlens_k must both have B \+ 1 elements, got 3 and 2",
    ),
    "grid without relative_bias": (
        lambda: flash_dmattn_varlen_func(ROWS, ROWS, ROWS, None, None, CU, CU, 3, 3, grid=(1, 5)),
        ValueError,
        r"grid is for fixed length, got grid=\(1, 5\) and cu_seqlens_q",
    ),
    "bool mask as attn_bias": (
        lambda: varlen(bias=torch.ones(5, 1, dtype=torch.bool)),
        TypeError,
        "attn_bias must be float32, got bool: pass a mask as attn_mask",
    ),
    "max_seqlen too short": (
        lambda: varlen(max_q=2),
        ValueError,
        "max_seqlen_q must be at least the longest sequence 3, got 2",
    ),
    "max_seqlen is no int": (lambda: varlen(max_k=3.0), TypeError, "max_seqlen_k must be an int, got float"),
    "max_seqlen below 0": (lambda: varlen(max_k=-1), ValueError, "max_seqlen_k must not be negative, got -1"),
    "packed cu_seqlens in int64": (
        lambda: packed(cu_seqlens=CU.long()),
        TypeError,
        "cu_seqlens must be int32, got int64",
    ),
    "packed cu_seqlens that end early": (
        lambda: packed(cu_seqlens=CU[:2]),
        ValueError,
        r"cu_seqlens must be non-decreasing from 0 to 5, the rows of qkv, got cu_seqlens\[-1\] = 2: if the rest is pad",
    ),
    "packed max_seqlen too short": (
        lambda: packed(max_seqlen=2),
        ValueError,
        "max_seqlen must be at least the longest sequence 3, got 2",
    ),
    "packed mask of other rows": (
        lambda: packed(mask=torch.ones(4, 1, dtype=torch.bool)),
        ValueError,
        r"attn_mask must be \(total, {H\|1}\) or .* with total = 5, H = 2 and max_seqlen = 3, got shape \(4, 1\)",
    ),
    "packed bias of other keys": (
        lambda: packed(bias=torch.zeros(5, 1, 4)),
        ValueError,
        r"attn_bias must be .* or \(total, {H\|1}, max_seqlen\) with .*, got shape \(5, 1, 4\)",
    ),
    "packed bias of other heads": (
        lambda: packed(bias=torch.zeros(5, 4)),
        ValueError,
        r"attn_bias must be \(total, {H\|1}\) or .* with total = 5, H = 2 and .*, got shape \(5, 4\)",
    ),
    "sparse packed mask": (
        lambda: packed(mask=torch.ones(5, 1, dtype=torch.bool).to_sparse()),
        TypeError,
        "attn_mask must be a dense torch.Tensor, got a sparse_coo one",
    ),
    "window with a bias per score": (
        lambda: flash_dmattn_varlen_func(
            *(ROWS, ROWS, ROWS, None, torch.zeros(5, 1, 3), CU, CU, 3, 3), is_causal=True, window_size=2
        ),
        ValueError,
        r"window_size needs attn_bias of one number per key, \(5, {2\|1}\), got shape \(5, 1, 3\)",
    ),
    "packed kv with another head dimension": (
        lambda: flash_dmattn.flash_dmattn_varlen_kvpacked_func(ROWS, torch.zeros(5, 2, 2, 4), None, None, CU, CU, 3, 3),
        ValueError,
        "kv must have query's head dimension 8, got 4",
    ),
    "mask of 4 dimensions": (
        lambda: varlen(mask=torch.ones(1, 1, 1, 5, dtype=torch.bool)),
        ValueError,
        r"attn_mask must be \(total_k, {H\|Hkv\|1}\) or \(total_q, {H\|Hkv\|1}, max_seqlen_k\), got shape",
    ),
    "intervals of fixed length": (
        lambda: varlen(mask=KeyIntervalMask.causal(5, 5)),
        ValueError,
        r"attn_mask must be a KeyIntervalMask of variable length \(total_k, {H\|Hkv\|1}\), got one of fixed length "
        r"\(1, 1, 5\): sliding_window_varlen and topk_varlen make such masks$",
    ),
    "float mask": (lambda: varlen(mask=torch.ones(5, 1)), TypeError, "attn_mask must be bool"),
    "key bias of the wrong length": (
        lambda: varlen(bias=torch.zeros(4, 1)),
        ValueError,
        r"attn_bias must be \(total_k, .*\): dimension 0 must be 5, got shape \(4, 1\)",
    ),
    "dense bias of the wrong length": (
        lambda: varlen(bias=torch.zeros(5, 1, 4)),
        ValueError,
        r"attn_bias must be \(total_q, .*, max_seqlen_k\): dimension 2 must be 3, got shape \(5, 1, 4\)",
    ),
}


@pytest.mark.parametrize("case", VARLEN)
def test_varlen(case):
    function, error, message = VARLEN[case]
    with pytest.raises(error, match=message):
        function()


def backward_without_bias(kernels, lse, needs_dbias):
    """The compiled backward, called as the op calls it."""
    tensors = (Q, torch.zeros(2, 4, 5), Q, K, V, Q, lse, flash_dmattn.ops.MaskTensors(), None)
    return kernels.mha_bwd(*tensors, 1.0, 0.0, False, False, needs_dbias)


STRIDED = Q.transpose(-1, -2).contiguous().transpose(-1, -2)
COMPILED = {
    "shape": (
        lambda k: k.mha_fwd(Q, K[:, :, :, :4], V, flash_dmattn.ops.MaskTensors(), None, 1.0, 0.0, False),
        ValueError,
        "key must have query's head dimension 8, got 4",
    ),
    "head dimension of value": (
        lambda k: k.mha_fwd(Q, K, V[..., :4], flash_dmattn.ops.MaskTensors(), None, 1.0, 0.0, False),
        ValueError,
        "value must have query's head dimension 8, got 4",
    ),
    "head dimension": (
        lambda k: k.mha_fwd(Q[..., :4], K[..., :4], V[..., :4], flash_dmattn.ops.MaskTensors(), None, 1.0, 0.0, False),
        ValueError,
        "must be a multiple of 8 up to 256, got 4",
    ),
    "strides": (
        lambda k: k.mha_fwd(STRIDED, K, V, flash_dmattn.ops.MaskTensors(), None, 1.0, 0.0, False),
        ValueError,
        "query must be contiguous in its last dimension",
    ),
    "mask dtype": (
        lambda k: k.mha_fwd(Q, K, V, flash_dmattn.ops.MaskTensors(torch.ones(1, 1, 1, 7)), None, 1.0, 0.0, False),
        TypeError,
        r"attn_mask must be bool \(True = visible\), got float32: pass a mask of 0 and 1 as attn_mask.bool\(\), "
        "an additive one as attn_bias",
    ),
    "bias shape": (
        lambda k: k.mha_fwd(Q, K, V, flash_dmattn.ops.MaskTensors(), torch.ones(1, 1, 1, 6), 1.0, 0.0, False),
        ValueError,
        "attn_bias must be .*: dimension 3 must be 1 or 7",
    ),
    "bias gradient without bias": (
        lambda k: backward_without_bias(k, lse=torch.zeros(2, 4, 5), needs_dbias=True),
        ValueError,
        "there is no bias",
    ),
    "lse shape": (
        lambda k: backward_without_bias(k, lse=torch.zeros(2, 4, 4), needs_dbias=False),
        ValueError,
        "lse must have shape",
    ),
}


@pytest.mark.parametrize("case", COMPILED)
def test_the_compiled_entry_points_check_their_arguments(case):
    function, error, message = COMPILED[case]
    with pytest.raises(error, match=message):
        function(flash_dmattn.ops.compiled_module())


def test_unavailable_backends_say_why():
    for name in flash_dmattn.backends.NAMES:
        reason = flash_dmattn.backends.load(name).why_unavailable()
        if reason is None:
            assert callable(flash_dmattn_func_auto(name)) and name in flash_dmattn.get_available_backends()
            continue
        assert name not in flash_dmattn.get_available_backends()
        with pytest.raises(RuntimeError, match=f"the backend '{name}' is not available: "):
            flash_dmattn_func_auto(name)


def test_a_backend_by_name_is_pickled_as_its_name(monkeypatch):
    function = flash_dmattn_func_auto("reference")
    saved = pickle.dumps(function)
    for again in (pickle.loads(saved), copy.deepcopy(function)):
        assert repr(again) == "flash_dmattn_func_auto('reference')" and again == function
        assert torch.equal(again(Q, K, V), function(Q, K, V))
        assert inspect.signature(again) == inspect.signature(flash_dmattn_func)
        assert again.__name__ == "flash_dmattn_func"
    monkeypatch.setattr(flash_dmattn.backends.reference, "why_unavailable", lambda: "it is on another machine")
    with pytest.raises(RuntimeError, match="the backend 'reference' is not available: it is on another machine"):
        pickle.loads(saved)


@pytest.mark.skipif(torch.cuda.is_available(), reason="speaks of a machine without a GPU")
def test_without_a_gpu():
    assert flash_dmattn.CUDA_AVAILABLE is False and flash_dmattn.FLEX_AVAILABLE is True
    assert "cuda" not in flash_dmattn.get_available_backends()
    assert (
        flash_dmattn.get_available_backends()[0] == "cpu" and flash_dmattn.get_available_backends()[-1] == "reference"
    )


def test_flex_refuses_what_it_cannot_do():
    flex = flash_dmattn_func_auto("flex")
    query, key, value = inputs(1, 5, 5, 2, 2, 16)
    with pytest.raises(ValueError, match="'flex' has no deterministic gradient"):
        flex(query, key, value, deterministic=True)
    with pytest.raises(ValueError, match=r"'flex' takes no empty tensors, got key of shape \(1, 0, 2, 16\)"):
        flex(query, key[:, :0], value[:, :0])
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="'flex' has no gradients on the CPU"):
            flex(query.requires_grad_(), key, value)


def test_a_missing_compiled_module_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(flash_dmattn.ops, "WHY_NOT_BUILT", "flash_dmattn's compiled module is missing")
    with pytest.raises(RuntimeError, match="compiled module is missing"):
        call()
    with pytest.raises(RuntimeError, match="the backend 'cpu' is not available: flash_dmattn's compiled module is"):
        flash_dmattn_func_auto("cpu")


@pytest.mark.parametrize("backend", ["reference", "flex"])
@pytest.mark.parametrize("name", ["key", "value", "attn_bias"])
def test_what_is_no_tensor_without_a_compiled_module(monkeypatch, backend, name):
    monkeypatch.setattr(flash_dmattn.ops, "WHY_NOT_BUILT", "flash_dmattn's compiled module is missing")
    tensors = {"query": Q, "key": K, "value": V, name: [1.0]}
    with pytest.raises(TypeError, match=f"{name} must be a torch.Tensor, got list"):
        flash_dmattn_func_auto(backend)(**tensors)


ARGUMENTS = {
    "another name": ((Q, K, V), {"varlen": None}, "got an unexpected keyword argument 'varlen'"),
    "too few": ((Q, K), {}, "missing a required argument: 'value'"),
    "too many": ((Q, K, V, *[None] * 8), {}, "got too many positional arguments"),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_of_a_backend_by_name(name):
    args, options, message = ARGUMENTS[name]
    with pytest.raises(TypeError, match=rf"^flash_dmattn_func\(\) {message}"):
        flash_dmattn_func_auto("reference")(*args, **options)


def test_arguments_of_packed_functions():
    """The error names the function that was called, not the one that it calls; errors of tensors stay as they are."""
    qkv = torch.randn(1, 5, 3, 2, 8)
    for name, args, options, message in (
        ("flash_dmattn_qkvpacked_func", (qkv,), {"window": 3}, "got an unexpected keyword argument 'window'"),
        ("flash_dmattn_qkvpacked_func", (), {}, "missing a required argument: 'qkv'"),
        ("flash_dmattn_kvpacked_func", (qkv[:, :, 0], qkv[:, :, 1:]), {"key": K}, "got an unexpected .* 'key'"),
        ("flash_dmattn_kvpacked_func", (qkv[:, :, 0], qkv[:, :, 1:], *[None] * 9), {}, "got too many positional"),
        ("flash_dmattn_varlen_qkvpacked_func", (qkv[0],), {"cu_seqlens_q": CU}, "got an unexpected .* 'cu_seqlens_q'"),
    ):
        with pytest.raises(TypeError, match=rf"^{name}\(\) {message}"):
            getattr(flash_dmattn, name)(*args, **options)
    with pytest.raises(TypeError, match="^attn_mask must be a bool torch.Tensor"):
        flash_dmattn.flash_dmattn_qkvpacked_func(qkv, attn_mask=3)


def test_packed_tensors_with_cache_seqlens_must_not_require_grad():
    qkv, kv = torch.zeros(1, 5, 3, 2, 8, requires_grad=True), torch.zeros(1, 5, 2, 2, 8, requires_grad=True)
    with pytest.raises(ValueError, match="^qkv must not require grad: cache_seqlens is for inference"):
        flash_dmattn.flash_dmattn_qkvpacked_func(qkv, cache_seqlens=3)
    with pytest.raises(ValueError, match="^kv must not require grad: cache_seqlens is for inference"):
        flash_dmattn.flash_dmattn_kvpacked_func(torch.zeros(1, 5, 2, 8), kv, cache_seqlens=3)
    with torch.no_grad():
        assert flash_dmattn.flash_dmattn_qkvpacked_func(qkv, cache_seqlens=3).shape == (1, 5, 2, 8)


@pytest.mark.parametrize("rows", [5, 40])  # topk_lists is for up to 16
@pytest.mark.parametrize("window_size", [0, 3, 99])
def test_nan_names_the_bias_of_the_call(rows, window_size):
    query, key, value = inputs(1, rows, rows, 2, 2, 8)
    bias = torch.zeros(1, 1, 1, rows)
    bias[..., 2] = torch.nan
    options = {"is_causal": True, "window_size": window_size}
    cu_seqlens = torch.tensor([0, rows], dtype=torch.int32)
    lengths = (cu_seqlens, cu_seqlens, rows, rows)
    for function in (
        lambda: call(query, key, value, None, bias, **options),
        lambda: flash_dmattn_func_auto("cpu")(query, key, value, None, bias, **options),
        lambda: flash_dmattn_func_auto("reference")(query, key, value, None, bias, **options),
        lambda: flash_dmattn_varlen_func(query[0], key[0], value[0], None, bias[0, :, 0].T, *lengths, **options),
    ):
        with pytest.raises(ValueError, match="^attn_bias must not be NaN where window_size selects by it"):
            function()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_dtype_that_cuda_kernels_do_not_take_is_refused_before_selection(monkeypatch, dtype):
    """Fake tensors replace tensors on a GPU."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    def select(*args, **options):
        raise AssertionError("selected")

    monkeypatch.setattr(flash_dmattn.masks.selection, "select", select)
    with FakeTensorMode():
        query = torch.empty(1, 4, 2, 8, device="cuda", dtype=dtype)
        half, bias = query.half(), torch.empty(1, 2, 1, 4, device="cuda")
        with pytest.raises(TypeError, match=f"query must be float16 or bfloat16 on CUDA .*got {str(dtype)[6:]}"):
            call(query, query, query, attn_bias=bias.to(dtype), is_causal=True, window_size=2)
        with pytest.raises(AssertionError, match="selected"):
            call(half, half, half, attn_bias=bias, is_causal=True, window_size=2)
