"""A training step with flash_dmattn equals one with eager attention."""

import copy
from types import SimpleNamespace

import pytest
import torch
from einops import rearrange

transformers = pytest.importorskip("transformers", "5.17")

from helpers import inputs  # noqa: E402
from small_models import (  # noqa: E402
    BATCH,
    CU_SEQLENS,
    ENCODER_DECODERS,
    LENGTHS,
    MODELS,
    POSITIONS,
    SEQLEN,
    assert_same_step,
    build,
    labels_of,
    padding,
    step,
    switched,
    tokens,
)

from flash_dmattn.integrations.transformers import attention  # noqa: E402


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("name", MODELS)
def test_a_training_step_equals_eager(name, side):
    model, ids, real = build(name), tokens(), padding(side)
    batch = {"input_ids": ids, "attention_mask": real, "labels": labels_of(name, ids, real)}
    rows = slice(None) if name in ENCODER_DECODERS else real.bool()  # their decoders have no padding
    assert_same_step(step(switched(model), **batch), step(model, **batch), rows)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", MODELS)
def test_a_loss_on_padding_is_finite_and_of_eagers_order(name, side):
    model, ids = build(name), tokens()
    batch = {"input_ids": ids, "attention_mask": padding(side), "labels": ids}
    ours, eager = step(switched(model), **batch), step(model, **batch)
    assert ours[0].isfinite().all()
    torch.testing.assert_close(ours[1], eager[1], rtol=0.1, atol=0)
    assert all(grad.isfinite().all() for grad in ours[2].values() if grad is not None)


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "doge"])
def test_bfloat16(name):
    model, ids, real = build(name), tokens(), padding("left")
    batch = {"input_ids": ids, "attention_mask": real, "labels": labels_of(name, ids, real)}
    exact = step(model, **batch)
    ours, eager = step(switched(model).bfloat16(), **batch), step(copy.deepcopy(model).bfloat16(), **batch)
    off, eager_off = ((logits - exact[0])[real.bool()].abs().mean() for logits in (ours[0], eager[0]))
    assert off <= 1.5 * eager_off
    with torch.autocast("cpu", torch.bfloat16):
        ours, eager = step(switched(model), **batch), step(model, **batch)
    off, eager_off = ((logits - exact[0])[real.bool()].abs().mean() for logits in (ours[0], eager[0]))
    assert off <= 1.5 * eager_off


@pytest.mark.parametrize("name", ["llama", "doge", "t5"])
def test_gradient_checkpointing(name):
    model, ids, real = build(name), tokens(), padding("left")
    batch = {"input_ids": ids, "attention_mask": real, "labels": labels_of(name, ids, real)}
    ours = switched(model)
    ours.gradient_checkpointing_enable()
    rows = slice(None) if name in ENCODER_DECODERS else real.bool()
    assert_same_step(step(ours.train(), **batch), step(model, **batch), rows)


@pytest.mark.parametrize("name", ["llama", "mistral", "t5", "doge"])
def test_one_graph(name):
    model, ids = switched(build(name)), tokens()
    batch = {"input_ids": ids, "attention_mask": padding("left"), "labels": ids}
    eager = step(model, **batch)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    compiled.zero_grad()
    try:
        out = compiled(**batch)
    except torch._dynamo.exc.Unsupported as error:
        if "copy.deepcopy" not in str(error):
            raise
        pytest.skip("T5 of this transformers copies its configuration, which this PyTorch cannot trace")
    torch.testing.assert_close(out.logits, eager[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(out.loss, eager[1])


@pytest.mark.parametrize("name", ["llama", "bert", "gpt_oss", "doge"])
def test_keys_beyond_a_padding_mask_are_padding(name):
    model, ids = build(name), tokens()
    short = torch.ones(BATCH, SEQLEN - 5, dtype=torch.long)
    batch = {"input_ids": ids, "attention_mask": short, "labels": ids}
    assert_same_step(step(switched(model), **batch), step(model, **batch), slice(None))


def test_packed_sequences_compile_with_a_dense_mask():
    model, ids = switched(build("llama")), tokens(1)
    positions = torch.cat([torch.arange(8), torch.arange(SEQLEN - 8)])[None]
    packed = {"position_ids": positions, "use_cache": False}
    expected = model(ids, **packed).logits
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(ids, **packed).logits, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("name", MODELS)
def test_a_training_step_on_cuda(name, side):
    """In bfloat16, as close to float32 as eager is; Doge keeps all keys, since rounding changes its selection."""
    changes = {"keep_window_size": SEQLEN} if name == "doge" else {}
    model, ids, real = build(name, **changes), tokens(), padding(side)
    batch = {"input_ids": ids, "attention_mask": real, "labels": labels_of(name, ids, real)}
    exact = step(model, **batch)
    batch = {key: value.cuda() for key, value in batch.items()}
    model = model.cuda().bfloat16()
    rows = slice(None) if name in ENCODER_DECODERS else real.bool()
    logits, losses, gradients = zip(*(step(m, **batch) for m in (switched(model), model)))
    off, eager_off = ((x.cpu() - exact[0])[rows].abs().mean() for x in logits)
    assert off <= 1.5 * eager_off + 1e-5
    assert (losses[0] - losses[1]).abs() < 0.1
    largest = max(grad.abs().max() for grad in exact[2].values() if grad is not None)
    for parameter, expected in exact[2].items():
        if expected is not None:
            off, eager_off = ((grads[parameter].cpu() - expected).abs().mean() for grads in gradients)
            assert off <= 2 * eager_off + 1e-3 * largest, parameter


@pytest.mark.parametrize("how", ["position_ids", "cu_seq_lens", "both"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gpt_oss", "doge"])
def test_packed_sequences_are_the_sequences_alone(name, how):
    if (name, how) == ("gpt_oss", "position_ids"):
        pytest.skip("transformers' GPT-OSS does not tell its masks of position_ids")
    model, ids = switched(build(name)), tokens(1)
    packed = {"use_cache": False}  # with a cache transformers does not look at position_ids
    if how != "cu_seq_lens":
        packed["position_ids"] = POSITIONS
    if how != "position_ids":
        packed |= {"cu_seq_lens_q": CU_SEQLENS, "cu_seq_lens_k": CU_SEQLENS, "max_length_q": 9, "max_length_k": 9}
    logits = model(ids, **packed).logits[0]
    alone = torch.cat([model(part[None]).logits[0] for part in ids[0].split(LENGTHS)])
    torch.testing.assert_close(logits, alone, rtol=1e-4, atol=2e-5)

    weights = torch.randn_like(logits)
    parameters = [p for p in model.parameters() if p.requires_grad]
    ours, expected = (torch.autograd.grad((x * weights).sum(), parameters, allow_unused=True) for x in (logits, alone))
    for a, b in zip(ours, expected):
        if b is not None:
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def test_packed_by_cu_seq_lens_as_vision_models_call_it():
    query, key, value = (rearrange(x, "b s h d -> b h s d") for x in inputs(1, 21, 21, 4, 2, 16))
    layer = SimpleNamespace(is_causal=True)
    lengths = {"cu_seq_lens_q": CU_SEQLENS.long(), "cu_seq_lens_k": CU_SEQLENS.long()}
    out, none = attention(layer, query, key, value, None, is_causal=False, **lengths)
    parts = [x.split(LENGTHS, dim=2) for x in (query, key, value)]
    alone = torch.cat([attention(layer, *part, None, is_causal=False)[0] for part in zip(*parts)], dim=1)
    torch.testing.assert_close(out, alone)
    assert none is None and out.shape == (1, 21, 4, 16)
    longest = {"max_length_q": 9, "max_length_k": torch.tensor(9)}
    torch.testing.assert_close(attention(layer, query, key, value, None, is_causal=False, **lengths, **longest)[0], out)
