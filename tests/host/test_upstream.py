"""The calls and import paths of upstream's flash-dmattn."""

import importlib
import inspect
import os
import subprocess
import sys
import warnings

import pytest
import torch
from helpers import inputs, reference
from programs import ROOT

import flash_dmattn
from flash_dmattn import KeyIntervalMask, flash_dmattn_func, flash_dmattn_func_auto, flash_dmattn_varlen_func

# What upstream's modules export, with the names of the arguments in their order.
TENSORS = ["query", "key", "value", "attn_mask", "attn_bias"]
OPTIONS = ["softmax_scale", "is_causal", "softcap", "deterministic", "return_attn_probs"]
LENGTHS = ["cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"]
MASK = ["attention_bias", "attention_mask"]
EXPORTS = {
    "flash_dmattn_interface": {
        "flash_dmattn_func": TENSORS + OPTIONS,
        "flash_dmattn_varlen_func": TENSORS[:3] + LENGTHS + OPTIONS + ["block_table"],
        "flash_dmattn_qkvpacked_func": ["qkv", *TENSORS[3:], *OPTIONS],
        "flash_dmattn_kvpacked_func": ["query", "kv", *TENSORS[3:], *OPTIONS],
    },
    "flash_dmattn_triton": {"triton_dmattn_func": [*TENSORS, "is_causal", "softmax_scale"]},
    "flash_dmattn_flex": {"flex_dmattn_func": [*TENSORS, "is_causal", "softmax_scale"]},
    "utils.mask": {
        "create_mask": [*MASK, "batch_size", "query_len", "key_len", "window_size", "min_dtype", "block_size", "type"],
        "topk_mask": [*MASK, "window_size", "min_dtype", "block_size"],
        "relu_mask": [*MASK, "min_dtype", "block_size"],
        "block_smooth": ["attention_mask", "key_len", "block_size"],
        "topk_indices": ["attention_bias", "window_size"],
    },
    "utils.padding": {
        "index_first_axis": ["tensor", "indices"],
        "unpad_input": ["hidden_states", "attention_mask", "unused_mask"],
        "pad_input": ["hidden_states", "indices", "batch", "seqlen"],
        "get_unpad_data": ["attention_mask"],
        "upad_input": [f"{name}_layer" for name in TENSORS[:3]]
        + ["attention_mask", "query_length", "unpad_input_func"],
    },
    "integrations.flash_dynamic_mask_attention": {
        "flash_dynamic_mask_attention_forward": [
            *(
                "module",
                "query",
                "key",
                "value",
                "attention_mask",
                "attention_bias",
                "scaling",
                "window_size",
                "softcap",
            )
        ],
    },
}


def imported(name):
    """A module of upstream's, imported anew; its import warns here."""
    if name.startswith("integrations"):
        pytest.importorskip("transformers")
    name = f"flash_dmattn.{name}"
    sys.modules.pop(name, None)
    with pytest.warns(DeprecationWarning, match=f"{name}.* is deprecated: use ") as caught:
        module = importlib.import_module(name)
    assert {warning.filename for warning in caught} == {__file__}
    return module


@pytest.mark.parametrize("name", EXPORTS)
def test_import_paths(name):
    module = imported(name)
    for function, arguments in EXPORTS[name].items():
        parameters = inspect.signature(getattr(module, function)).parameters.values()
        assert [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD] == arguments


@pytest.mark.parametrize("name", ["triton", "flex"])
def test_the_functions_of_backends(name):
    sys.modules.pop(f"flash_dmattn.flash_dmattn_{name}", None)
    with pytest.warns(DeprecationWarning, match=f"{name}_dmattn_func is deprecated"):
        function = getattr(flash_dmattn, f"{name}_dmattn_func")
    if name not in flash_dmattn.get_available_backends():
        pytest.skip(f"the backend {name} is not available")
    query, key, value = inputs(1, 20, 20, 2, 2, 16)
    bias = torch.randn(1, 2, 20, 20)
    with torch.no_grad():
        ours = function(query, key, value, None, bias, True, 0.3)
        torch.testing.assert_close(ours, reference(query, key, value, None, bias, 0.3, True))
        with pytest.warns(DeprecationWarning, match="scale .* is deprecated: use softmax_scale"):
            assert torch.equal(function(query, key, value, None, bias, True, scale=0.3), ours)
        by_default = function(query, key, value)
        torch.testing.assert_close(by_default, reference(query, key, value, is_causal=name == "flex"))


NONE = dict.fromkeys(OPTIONS)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_none_means_the_default(backend):
    query, key, value = inputs(2, 20, 24, 4, 2, 16)
    function = flash_dmattn_func_auto(backend)
    assert torch.equal(function(query, key, value, **NONE), function(query, key, value))
    assert torch.equal(function(query, key, value, None, None, *NONE.values()), function(query, key, value))
    cu_seqlens = torch.tensor([0, 5, 20], dtype=torch.int32)
    rows = query[0], key[0, :20], value[0, :20]
    lengths = dict(zip(LENGTHS, (cu_seqlens, cu_seqlens, 15, 15)))
    expected = flash_dmattn_varlen_func(*rows, None, None, *lengths.values())
    assert torch.equal(flash_dmattn_varlen_func(*rows, **lengths, **NONE), expected)
    upstream = imported("flash_dmattn_interface").flash_dmattn_varlen_func
    assert torch.equal(upstream(*rows, *lengths.values(), *NONE.values()), expected)
    with pytest.raises(ValueError, match="block_table is not supported"):
        upstream(*rows, *lengths.values(), block_table=cu_seqlens)


def test_scale_is_the_former_name_of_softmax_scale():
    tensors = inputs()
    expected = flash_dmattn_func(*tensors, softmax_scale=0.3)
    packed = torch.stack(tensors, dim=2)
    for call in (
        lambda: flash_dmattn_func(*tensors, scale=0.3),
        lambda: flash_dmattn.flash_dmattn_qkvpacked_func(packed, scale=0.3),
        lambda: flash_dmattn_func_auto("cpu")(*tensors, scale=0.3),
    ):
        with pytest.warns(DeprecationWarning, match="scale .* is deprecated: use softmax_scale") as (warning):
            assert torch.equal(call(), expected)
        assert warning[0].filename == __file__


def test_masks():
    module = imported("utils.mask")
    bias = torch.randn(2, 2, 4, 9)
    visible = torch.rand(2, 1, 4, 9) < 0.7
    least = torch.finfo(torch.float32).min
    expected = flash_dmattn.create_mask(bias, visible, 2, 4, 9, 3, least, 2)
    assert torch.equal(module.create_mask(bias, visible, 2, 4, 9, 3, least, block_size=2), expected)
    assert torch.equal(module.topk_mask(bias, visible, 3, least, 2), expected)
    relu = flash_dmattn.create_mask(bias, None, 2, 4, 9, 0, least, type="relu")
    assert torch.equal(module.relu_mask(bias, None, least), relu) and torch.equal(relu, bias > 0)
    last = torch.tensor([[1, 1, 1, 0], [0, 1, 1, 1]])
    whole = torch.cat([torch.ones(2, 5, dtype=torch.int64), last], dim=1)
    ours = module.create_mask(bias, last, 2, 4, 9, 3, least)
    assert torch.equal(ours, flash_dmattn.create_mask(bias, whole, 2, 4, 9, 3, least))
    mask = torch.tensor([[1, 1, 0, 0, 1, 0, 1]], dtype=torch.bool)
    assert module.block_smooth(mask, 7, 3) is mask
    assert mask.tolist() == [[True] * 3 + [False] * 3 + [True]]
    assert module.topk_indices(torch.tensor([[[3.0, 1.0, 2.0]]]), 2).tolist() == [[[0, 2]]]


def test_padding():
    module = imported("utils.padding")
    mask = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 0]])
    unused = torch.tensor([[0, 1, 0, 0], [0, 0, 0, 1]])
    rows = torch.randn(2, 4, 2, 8)
    packed, indices, cu_seqlens, longest, used = module.unpad_input(rows, mask, unused)
    assert torch.equal(packed, rows.flatten(0, 1)[[1, 2, 3, 5, 6, 7]]) and indices.tolist() == [1, 2, 3, 5, 6, 7]
    assert cu_seqlens.tolist() == [0, 3, 6] and longest == 3 and used.tolist() == [2, 2]
    assert torch.equal(module.pad_input(packed, indices, 2, 4)[(mask + unused) == 0], torch.zeros(2, 2, 8))
    indices, cu_seqlens, longest = module.get_unpad_data(mask)
    assert indices.tolist() == [2, 3, 5, 6] and cu_seqlens.tolist() == [0, 2, 4] and longest == 2
    for length in (4, 1, 2):
        query, key, value, indices, offsets, lengths = module.upad_input(
            rows[:, -length:], rows, rows, mask, length, module.unpad_input
        )
        expected = {4: [2, 3, 5, 6], 1: [0, 1], 2: [0, 1, 2]}[length]
        assert indices.tolist() == expected and offsets[0].tolist()[-1] == len(expected)
        assert torch.equal(query, rows[:, -length:].flatten(0, 1)[indices])
        assert torch.equal(key, rows.flatten(0, 1)[[2, 3, 5, 6]]) and torch.equal(key, value)
        assert lengths == ({4: 2, 1: 1, 2: 2}[length], 2)


class Layer(torch.nn.Module):
    is_causal = True

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.proj = torch.nn.Linear(4, 4, dtype=dtype)


def test_attention_of_transformers():
    forward = imported("integrations.flash_dynamic_mask_attention").flash_dynamic_mask_attention_forward
    query, key, value = inputs(2, 12, 12, 4, 2, 8)
    heads_first = [x.transpose(1, 2) for x in (query, key, value)]
    bias = torch.randn(2, 2, 1, 12)
    window = {"window_size": 5, "scale": 0.3}
    causal = torch.ones(12, 12).tril().bool()[None, None]
    real = torch.arange(12) >= torch.tensor([[0], [4]])

    out, weights = forward(Layer(), *heads_first, causal, bias, **window)
    best = KeyIntervalMask.topk(bias, 5).to_dense()
    assert weights is None
    torch.testing.assert_close(out, flash_dmattn_func(query, key, value, best, bias, 0.3, True))

    out, _ = forward(Layer(), *heads_first, real.long(), bias, softmax_scale=0.3, is_causal=False, softcap=2.0)
    torch.testing.assert_close(out, reference(query, key, value, real[:, None, None], bias, 0.3, softcap=2.0))
    out, _ = forward(Layer(), *heads_first, None, None)
    torch.testing.assert_close(out, reference(query, key, value, is_causal=True))
    assert forward(Layer(torch.bfloat16), *heads_first, None, None)[0].dtype == torch.bfloat16


@pytest.mark.parametrize(
    "options, message",
    [
        ({"dropout": 0.1}, "dropout"),
        ({"output_attentions": True}, "attention weights"),
        ({"cu_seq_lens_q": torch.tensor([0, 12])}, "packed sequences need .*, got cu_seq_lens_q"),
        ({"position_ids": torch.tensor([[0, 1, 2, 0, 1]])}, "packed sequences need .*, got position_ids that restart"),
    ],
)
def test_attention_of_transformers_refuses(options, message):
    forward = imported("integrations.flash_dynamic_mask_attention").flash_dynamic_mask_attention_forward
    with pytest.raises(ValueError, match=message):
        forward(Layer(), *torch.randn(3, 1, 2, 5, 8), None, None, **options)


IMPORTS = """
import importlib, pkgutil, sys, warnings
warnings.filterwarnings("error", category=DeprecationWarning, module="flash_dmattn")
import flash_dmattn

deprecated = {f"flash_dmattn.{name}" for name in sys.argv[1:]}
names = {module.name for module in pkgutil.walk_packages(flash_dmattn.__path__, "flash_dmattn.")}
for name in sorted(names - deprecated):
    importlib.import_module(name)
assert deprecated < names and not deprecated & sys.modules.keys()
"""


def test_the_package_itself_imports_no_deprecated_module():
    for module in ("transformers", "triton", "matplotlib"):
        pytest.importorskip(module)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    command = [sys.executable, "-c", IMPORTS, *EXPORTS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_submodules_are_imported_on_access():
    program = (
        "import sys, flash_dmattn; assert 'flash_dmattn.parallel' not in sys.modules; "
        "flash_dmattn.parallel.shard, flash_dmattn.visualize.plot, flash_dmattn.integrations; "
        "assert {'CUDA_AVAILABLE', 'parallel', 'flash_dmattn_func'} <= set(dir(flash_dmattn))"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_the_package_itself_uses_no_deprecated_name():
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeprecationWarning)
        flash_dmattn_func(*inputs())
        for name in flash_dmattn.__all__:
            getattr(flash_dmattn, name)
