"""Models of transformers with attn_implementation="flash_dmattn" against their eager attention."""

import copy
from types import SimpleNamespace

import pytest
import torch
from einops import rearrange
from torch import nn

transformers = pytest.importorskip("transformers", "5.17")

from helpers import inputs, rand_mask  # noqa: E402
from transformers import DynamicCache, PreTrainedModel, StaticCache, masking_utils  # noqa: E402
from transformers.models.doge.modeling_doge import DogeAttention  # noqa: E402

from flash_dmattn import KeyIntervalMask, flash_dmattn_func_auto  # noqa: E402
from flash_dmattn.integrations import doge  # noqa: E402
from flash_dmattn.integrations.transformers import attention, register, use_flash_dmattn  # noqa: E402
from flash_dmattn.integrations.visible_keys import VisibleKeys, require_version, visible_keys_mask  # noqa: E402

register()
VOCABULARY, BATCH, SEQLEN = 96, 2, 21
WINDOW = 5  # of the models that have one
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "pad_token_id": 0}
GROUPED = SIZES | {"num_key_value_heads": 2}
ENCODER = SIZES | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
T5 = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}

MODELS = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", GROUPED),
    "qwen2": (
        "Qwen2ForCausalLM",
        "Qwen2Config",
        GROUPED | {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", GROUPED | {"head_dim": 8}),
    "gemma2": (
        "Gemma2ForCausalLM",
        "Gemma2Config",
        GROUPED | {"head_dim": 8, "sliding_window": WINDOW, "attn_logit_softcapping": 0.5},
    ),
    "mistral": ("MistralForCausalLM", "MistralConfig", GROUPED | {"sliding_window": WINDOW}),
    "t5": ("T5ForConditionalGeneration", "T5Config", T5 | {"dropout_rate": 0.0, "decoder_start_token_id": 0}),
    # Its decoder's layers say that they are not causal.
    "umt5": ("UMT5ForConditionalGeneration", "UMT5Config", T5 | {"dropout_rate": 0.0, "decoder_start_token_id": 0}),
    "bert": ("BertForMaskedLM", "BertConfig", ENCODER),
    "gpt_oss": (
        "GptOssForCausalLM",
        "GptOssConfig",
        GROUPED | {"head_dim": 8, "sliding_window": WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "doge": ("DogeForCausalLM", "DogeConfig", GROUPED | {"keep_window_size": 6}),
    # Different head dimensions of key and value; and keys that an indexer chooses.
    "deepseek_v32": (
        "DeepseekV32ForCausalLM",
        "DeepseekV32Config",
        SIZES
        | {"num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
        | {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
        | {"moe_intermediate_size": 16, "index_topk": 4, "index_n_heads": 2, "index_head_dim": 16},
    ),
}
ENCODER_DECODERS = ("t5", "umt5")
DECODERS = [name for name in MODELS if name not in (*ENCODER_DECODERS, "bert")]


def build(name, **changes):
    """A small model with random weights, in eager attention."""
    model_class, config_class, sizes = MODELS[name]
    config = getattr(transformers, config_class)(**sizes | changes)
    model = getattr(transformers, model_class)._from_config(config, attn_implementation="eager")
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():  # those too that are 0 or 1 at first, as Doge's A and GPT-OSS's sinks
        with torch.no_grad():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    return model


def switched(model):
    return use_flash_dmattn(copy.deepcopy(model))


def tokens(batch=BATCH, seqlen=SEQLEN):
    """No token twice in a sequence: two keys of the same token have the same bias in Doge's first layer."""
    return torch.stack([torch.randperm(VOCABULARY - 3)[:seqlen] + 3 for _ in range(batch)])


def padding(side, batch=BATCH, seqlen=SEQLEN):
    real = torch.ones(batch, seqlen, dtype=torch.long)
    if side != "none":
        real[0, slice(0, 6) if side == "left" else slice(-6, None)] = 0
    return real


def labels_of(name, ids, real):
    """Labels for what is no padding; a decoder's row predicts the token after it."""
    labels = ids.masked_fill(real == 0, -100)
    if name in DECODERS:  # no row of padding predicts
        labels[:, 1:] = labels[:, 1:].masked_fill(real[:, :-1] == 0, -100)
    return labels


def step(model, **batch):
    """(logits, loss, gradient of every parameter)"""
    model.zero_grad()
    out = model(**batch)
    out.loss.backward()
    # Copies: a model that moves takes its gradients along.
    gradients = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    return out.logits.detach(), out.loss.detach(), gradients


def assert_same_step(ours, eager, rows):
    torch.testing.assert_close(ours[0][rows], eager[0][rows], rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(ours[1], eager[1], rtol=1e-5, atol=1e-5)
    # Of all gradients together: that of a bias of keys is 0 but for rounding.
    largest = max(grad.abs().max() for grad in eager[2].values() if grad is not None)
    assert largest > 0
    for name, expected in eager[2].items():
        assert (ours[2][name] is None) == (expected is None), name
        if expected is not None:
            torch.testing.assert_close(ours[2][name], expected, rtol=1e-3, atol=5e-6 * largest.item(), msg=name)


# Training


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("name", MODELS)
def test_a_training_step_is_that_of_eager(name, side):
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
def test_what_a_padding_mask_does_not_reach_is_padding(name):
    model, ids = build(name), tokens()
    short = torch.ones(BATCH, SEQLEN - 5, dtype=torch.long)
    batch = {"input_ids": ids, "attention_mask": short, "labels": ids}
    assert_same_step(step(switched(model), **batch), step(model, **batch), slice(None))


def test_packed_under_compile_is_a_mask_of_pairs():
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
    """In bfloat16, as near to float32 as eager is; without Doge's choice, which rounding turns over."""
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


@pytest.mark.gpu
@pytest.mark.parametrize("cache", [DynamicCache, StaticCache])
@pytest.mark.parametrize("name", ["llama", "mistral", "doge"])
def test_steps_with_a_cache_on_cuda(name, cache):
    model, ids = build(name).cuda().bfloat16().eval(), tokens().cuda()
    real = padding("left").cuda()
    with torch.no_grad():
        exact = build(name)(ids.cpu(), attention_mask=real.cpu()).logits
        logits = []
        for m in (switched(model), model):
            options = {"max_cache_len": 32} if cache is StaticCache else {}
            past, parts, first = cache(config=m.config, **options), [], 0
            for size in (12, 4, *[1] * 5):
                seen = {"attention_mask": real[:, : first + size], "past_key_values": past}
                positions = torch.arange(first, first + size, device="cuda")[None]
                parts.append(m(ids[:, first : first + size], position_ids=positions, **seen).logits)
                first += size
            logits.append(torch.cat(parts, dim=1))
    off, eager_off = ((x - exact.cuda())[real.bool()].abs().mean() for x in logits)
    assert off <= 1.5 * eager_off + 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama", "doge"])
def test_generation_on_cuda(name):
    """With a static cache generate compiles, and captures CUDA graphs."""
    model, ids = switched(build(name)).cuda().bfloat16().eval(), tokens(seqlen=12).cuda()
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    static, dynamic = (model.generate(ids, cache_implementation=c, **options) for c in ("static", "dynamic"))
    assert static.shape == dynamic.shape == (BATCH, 20)
    assert (static == dynamic).float().mean() > 0.8  # bfloat16 may round a choice to the other side


# Packed sequences

LENGTHS = (9, 4, 8)
POSITIONS = torch.cat([torch.arange(length) for length in LENGTHS])[None]
CU_SEQLENS = torch.tensor([0, 9, 13, 21], dtype=torch.int32)


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


# Masks


def offsets():
    """(q_length, kv_length, q_offset, kv_offset): training, decoding, chunks, static caches, sliding ones."""
    yield from [(9, 9, 0, 0), (1, 12, 11, 0), (4, 12, 8, 0), (9, 16, 0, 0), (1, 16, 7, 0), (3, 7, 9, 5), (1, 1, 0, 0)]
    yield from [(1, 16, torch.tensor(7), 0), (9, 16, torch.tensor(0), 0)]


PATTERNS = {
    "causal": masking_utils.causal_mask_function,
    "both ways": masking_utils.bidirectional_mask_function,
    "window": masking_utils.sliding_window_causal_mask_function(3),
    "window both ways": masking_utils.sliding_window_bidirectional_mask_function(2),
    "chunks that hold all": masking_utils.chunked_causal_mask_function(64, torch.zeros(BATCH, dtype=torch.long)),
    "chunks behind padding": masking_utils.chunked_causal_mask_function(64, torch.tensor([2, 0])),
}


PADDINGS = ["", "all real", "left", "right", "beyond"]
# transformers counts chunks from where the padding ends.
SEEN = [(name, padded) for name in PATTERNS for padded in PADDINGS if "behind" not in name or padded == "left"]


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("sizes", list(offsets()), ids=str)
@pytest.mark.parametrize(("pattern", "padded"), SEEN)
def test_visible_keys_are_those_of_the_mask_of_pairs(pattern, sizes, padded, gradients):
    q_length, kv_length, q_offset, kv_offset = sizes
    seen = int(q_offset) + q_length
    real = None
    if padded:
        real = torch.ones(BATCH, kv_length + kv_offset if padded == "beyond" else seen, dtype=torch.bool)
        hidden = {"left": slice(0, 2), "right": slice(seen - 2, None)}.get(padded, slice(0, 0))
        real[0, hidden] = False
    call = {"batch_size": BATCH, "q_length": q_length, "kv_length": kv_length, "q_offset": q_offset}
    call |= {"kv_offset": kv_offset, "mask_function": PATTERNS[pattern], "attention_mask": real}
    expected = masking_utils.sdpa_mask(**call, allow_is_causal_skip=False).expand(BATCH, 1, q_length, kv_length)

    with torch.set_grad_enabled(gradients):
        visible = visible_keys_mask(**call)
    assert isinstance(visible, VisibleKeys) and visible.shape == expected.shape
    torch.testing.assert_close(visible.to_dense(), expected)
    assert visible.cache_seqlens is None or not gradients

    # What goes to the kernels.
    query, key, value = inputs(BATCH, q_length, kv_length, 2, 2, 8)
    by_head = [rearrange(x, "b s h d -> b h s d") for x in (query, key, value)]
    layer = SimpleNamespace(is_causal="both" in pattern)  # wrong, as in some models: the mask says it
    with torch.no_grad():
        exact = flash_dmattn_func_auto("reference")(query, key, value, expected)
        torch.testing.assert_close(attention(layer, *by_head, visible)[0], exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", DECODERS[:-1])
def test_no_mask_of_pairs_is_made(name, monkeypatch):
    """Of deepseek_v32, whose indexer computes with the mask, one is."""
    model, ids = switched(build(name)), tokens()
    monkeypatch.setattr(KeyIntervalMask, "to_dense", lambda *_: pytest.fail("a mask of pairs"))
    monkeypatch.setattr(masking_utils, "sdpa_mask", lambda *_, **__: pytest.fail("a mask of pairs"))
    model(ids, labels=ids).loss.backward()
    model(ids, attention_mask=padding("left"))
    model(ids[:1], position_ids=POSITIONS, use_cache=False)
    for implementation in ("static", "dynamic"):
        options = {"max_new_tokens": 3, "cache_implementation": implementation, "eos_token_id": None}
        model.generate(ids, attention_mask=padding("left"), do_sample=False, **options)


def test_what_is_no_pattern_is_a_mask_of_pairs():
    either = masking_utils.or_masks(masking_utils.causal_mask_function, lambda b, h, q, k: (q < 4) & (k < 4))
    call = {"batch_size": BATCH, "q_length": 9, "kv_length": 9, "mask_function": either}
    mask = visible_keys_mask(**call)
    torch.testing.assert_close(mask, masking_utils.sdpa_mask(**call, allow_is_causal_skip=False))
    assert mask.dtype == torch.bool and mask[0, 0, 1, 3] and not mask[0, 0, 1, 4]
    both = masking_utils.and_masks(masking_utils.causal_mask_function, lambda b, h, q, k: k != 2)
    assert isinstance(visible_keys_mask(**call | {"mask_function": both}), torch.Tensor)
    chunks = masking_utils.chunked_causal_mask_function(4, torch.zeros(BATCH, dtype=torch.long))
    mask = visible_keys_mask(**call | {"mask_function": chunks})
    assert isinstance(mask, torch.Tensor) and not mask[0, 0, 5, 3]
    twice = masking_utils.and_masks(*[masking_utils.sliding_window_overlay(size) for size in (3, 2)])
    assert isinstance(visible_keys_mask(**call | {"mask_function": twice}), torch.Tensor)


def test_visible_keys_are_a_tensor_to_those_who_compute_with_them():
    visible = visible_keys_mask(BATCH, q_length=4, kv_length=6, q_offset=2)
    dense = visible.to_dense()
    assert visible.dtype == torch.bool and visible.ndim == 4 and len(visible) == BATCH and visible.size(3) == 6
    for ours, expected in (
        (visible[..., :2], dense[..., :2]),
        (~visible, ~dense),
        (visible & ~dense, dense & ~dense),
        (~dense | visible, dense.new_ones(dense.shape)),
        (visible == 0, ~dense),
        (visible != visible, dense & ~dense),
        (torch.where(visible, 0.0, 1.0), torch.where(dense, 0.0, 1.0)),
        (dense.float().masked_fill(visible, 2), dense.float() * 2),
        (visible.float(), dense.float()),
        (visible.to(torch.float64), dense.double()),
    ):
        torch.testing.assert_close(ours, expected)
    moved = visible.to("meta")
    assert isinstance(moved, VisibleKeys) and moved.device.type == "meta"
    assert isinstance(visible.to("cpu", non_blocking=True), VisibleKeys)
    with pytest.raises(AttributeError):
        visible.no_such_thing  # noqa: B018


def one_call(**sizes):
    query, key, value = (rearrange(x, "b s h d -> b h s d").contiguous() for x in inputs(**sizes))
    return SimpleNamespace(is_causal=False), query, key, value


def by_softmax(query, key, value, added, scaling=None, softcap=None, sinks=None):
    """out (B, Sq, H, D) written out; added: floating, broadcastable to (B, H, Sq, Sk)."""
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    scores = torch.einsum("bhid, bhjd -> bhij", query, key) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    scores = scores + added
    if sinks is not None:
        scores = torch.cat([scores, sinks[None, :, None, None].expand(*scores.shape[:3], 1)], dim=-1)
    return torch.einsum("bhij, bhjd -> bihd", scores.softmax(dim=-1)[..., : key.shape[2]], value)


@pytest.mark.parametrize("shape", [(2, 1, 9, 11), (1, 4, 9, 11), (2, 1, 1, 11), (2, 4, 9, 14)])
def test_additive_masks_and_position_biases(shape):
    layer, *tensors = one_call(batch=2, seqlen_q=9, seqlen_k=11, heads=4, kv_heads=2)
    hidden = ~rand_mask(*shape)
    hidden[..., 0] = False
    mask = torch.randn(shape).masked_fill(hidden, torch.finfo(torch.float32).min)
    bias = torch.randn(9, 11, 4).permute(2, 0, 1)[None].requires_grad_()  # as T5's
    leaves = [x.requires_grad_() for x in (*tensors, bias)]
    for given, added in ((mask, mask), (~hidden, torch.zeros(shape).masked_fill(hidden, -torch.inf))):
        ours, _ = attention(layer, *tensors, given, position_bias=bias, scaling=1.0, softcap=3.0)
        expected = by_softmax(*tensors, added[..., :11] + bias, scaling=1.0, softcap=3.0)
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)
        weights = torch.randn_like(ours)
        gradients = (torch.autograd.grad((x * weights).sum(), leaves) for x in (ours, expected))
        for a, b in zip(*gradients):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def test_layers_share_the_copy_of_a_position_bias():
    """T5 gives all layers one bias, with the heads innermost: it is kept for the backward once."""
    layer, *tensors = one_call(batch=2, seqlen_q=9, seqlen_k=11, heads=4, kv_heads=2)
    weights = torch.randn(9, 11, 4, requires_grad=True)

    def bias():
        return (2 * weights).permute(2, 0, 1)[None]

    def call(bias):
        return attention(layer, *tensors, None, position_bias=bias, scaling=1.0)[0]

    kept = set()
    shared = bias()
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: kept.add(x.data_ptr()) if x.shape == shared.shape else None, lambda _: None
    ):
        call(shared), call(shared)
    assert len(kept) == 1

    (gradient,) = torch.autograd.grad(call(shared).square().sum() + call(shared).sum(), weights)
    (expected,) = torch.autograd.grad(call(bias()).square().sum() + call(bias()).sum(), weights)
    torch.testing.assert_close(gradient, expected)

    with torch.no_grad():
        before = call(shared)
        shared.mul_(0)
        assert not torch.equal(call(shared), before)
    torch.testing.assert_close(call(shared), call(None))  # the copy was of what it had been


def test_an_additive_mask_in_another_dtype_hides():
    layer, *tensors = one_call(batch=2, seqlen_q=9, seqlen_k=11)
    hidden = ~rand_mask(2, 1, 9, 11)
    hidden[0, 0, 0] = True
    mask = torch.zeros(2, 1, 9, 11, dtype=torch.bfloat16).masked_fill(hidden, torch.finfo(torch.bfloat16).min)
    out = attention(layer, *tensors, mask)[0]
    torch.testing.assert_close(out, attention(layer, *tensors, ~hidden)[0])
    assert out[0, 0].eq(0).all()


def test_a_padding_mask_of_two_dimensions():
    layer, *tensors = one_call(batch=2, seqlen_q=9, seqlen_k=11)
    real = rand_mask(2, 13)
    out = attention(layer, *tensors, real.long())[0]
    torch.testing.assert_close(out, attention(layer, *tensors, real[:, None, None, :11])[0])


def test_sinks_take_part_of_the_softmax():
    layer, *tensors = one_call(batch=2, seqlen_q=9, seqlen_k=9, heads=4, kv_heads=2)
    sinks = torch.randn(4, requires_grad=True)
    visible = torch.ones(9, 9, dtype=torch.bool).tril(-1)[None, None]  # the first row sees its sink alone
    leaves = [x.double().requires_grad_() for x in (*tensors, sinks.detach())]
    ours, _ = attention(layer, *leaves[:3], visible, s_aux=leaves[3])
    expected = by_softmax(*leaves[:3], torch.zeros(9, 9).masked_fill(~visible, -torch.inf), sinks=leaves[3])
    torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-10)
    assert ours[:, 0].eq(0).all()
    weights = torch.randn_like(ours)
    for a, b in zip(*(torch.autograd.grad((x * weights).sum(), leaves) for x in (ours, expected))):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-9)


def test_a_sink_that_takes_nothing():
    """-inf beside a row that sees nothing is no NaN."""
    layer, *tensors = one_call(batch=2, seqlen_q=9, seqlen_k=9, heads=4, kv_heads=2)
    visible = torch.ones(9, 9, dtype=torch.bool).tril(-1)[None, None]
    leaves = [x.requires_grad_() for x in (*tensors, torch.full((4,), -torch.inf))]
    out, _ = attention(layer, *leaves[:3], visible, s_aux=leaves[3])
    torch.testing.assert_close(out, attention(layer, *tensors, visible)[0])
    assert all(x.isfinite().all() for x in torch.autograd.grad(out.square().sum(), leaves))


def test_values_of_another_head_dimension():
    layer, query, key, _ = one_call(batch=2, seqlen_q=9, seqlen_k=9, head_dim=24)
    for value_dim in (16, 40):
        value = torch.randn(2, 2, 9, value_dim)
        out, _ = attention(layer, query, key, value, None)
        torch.testing.assert_close(out, by_softmax(query, key, value, 0.0), rtol=1e-4, atol=1e-5)


# What is refused


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"dropout": 0.1}, "no dropout of attention weights, got 0.1"),
        ({"head_mask": torch.ones(2)}, "no masks of heads, got head_mask"),
        ({"layer_head_mask": torch.ones(2)}, "no masks of heads, got layer_head_mask"),
        ({"output_attentions": True}, "no attention weights"),
        ({"block_indices": torch.zeros(1)}, "got block_indices"),
        ({"position_bias": torch.zeros(1, 1, 9, 9), "cu_seq_lens_q": torch.tensor([0, 18])}, "position_bias"),
        ({"attention_mask": torch.ones(2, 9, 9)}, r"attention_mask must be .* got shape \(2, 9, 9\)"),
        (
            {"attention_mask": torch.ones(3, 9).bool()},
            r"attention_mask must be .* B = 2 and Sk = 9, got shape \(3, 9\)",
        ),
        (
            {"attention_mask": torch.ones(2, 8).bool()},
            r"attention_mask must be .* B = 2 and Sk = 9, got shape \(2, 8\)",
        ),
        ({"s_aux": torch.zeros(5)}, r"s_aux must have one sink for each of the 2 heads, got shape \(5,\)"),
        ({"attention_mask": torch.ones(2, 1, 9, 9), "cu_seq_lens_q": torch.tensor([0, 18])}, "must be None"),
    ],
    ids=lambda x: ", ".join(x) if isinstance(x, dict) else "",
)
def test_what_cannot_be_served_is_refused(options, says):
    layer, *tensors = one_call(batch=2, seqlen_q=9, seqlen_k=9)
    with pytest.raises(ValueError, match=says):
        attention(layer, *tensors, **{"attention_mask": None, **options})
    attention(layer, *tensors, None, dropout=0.0, head_mask=None, output_attentions=False)


@pytest.mark.parametrize("mask", [torch.ones(2, 1, 9, 9, dtype=torch.long), torch.ones(2, 9)], ids=lambda x: x.ndim)
def test_a_mask_that_could_mean_either_is_refused(mask):
    """Integers of four dimensions, or floating numbers of two: 1 may be visible, or added."""
    layer, *tensors = one_call(batch=2, seqlen_q=9, seqlen_k=9)
    with pytest.raises(TypeError, match=f"attention_mask must be .* got {str(mask.dtype)[6:]} of shape"):
        attention(layer, *tensors, mask)


@pytest.mark.parametrize("name", ["llama", "doge"])
def test_dropout_of_a_model_is_refused_in_training_only(name):
    model, ids = switched(build(name, attention_dropout=0.5)), tokens()
    with pytest.raises(ValueError, match="no dropout of attention weights, got 0.5"):
        model.train()(ids)
    model.eval()(ids)


class OwnAttention(nn.Module):
    """Makes this file one of a model that computes attention itself."""


class OwnModel(PreTrainedModel):
    config_class = transformers.LlamaConfig

    def __init__(self, config):
        super().__init__(config)
        self.layer = OwnAttention()


def test_a_model_off_the_interface_is_refused():
    says = "is for models on transformers' attention interface, got OwnModel"
    with pytest.raises(ValueError, match=says):
        use_flash_dmattn(OwnModel(transformers.LlamaConfig(**GROUPED, attn_implementation="eager")))
    with pytest.raises(ValueError, match=says):
        OwnModel(transformers.LlamaConfig(**GROUPED, attn_implementation="flash_dmattn"))
    with pytest.raises(TypeError, match="got Linear"):
        use_flash_dmattn(nn.Linear(2, 2))


def test_old_versions_are_refused():
    with pytest.raises(ImportError, match=r"needs transformers 5.17 or newer, got 5.16.1"):
        require_version("5.16.1")
    require_version("6.0.0.dev0")


# Switching


def test_register_is_enough_and_may_be_called_again(tmp_path):
    register()
    register()
    model, ids = build("llama"), tokens()
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="flash_dmattn")
    assert loaded.config._attn_implementation == "flash_dmattn"
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits, rtol=1e-4, atol=2e-5)
    with pytest.raises(ValueError, match="flash_no_such_thing"):
        model.set_attn_implementation("flash_no_such_thing")


@pytest.mark.parametrize("name", MODELS)
def test_the_name_stays_what_was_asked_for(name):
    """GPT-OSS prefers kernels of the hub to whatever has "flash" in its name; T5 holds three configs."""
    model = switched(build(name))
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            assert part.config._attn_implementation == "flash_dmattn"


def test_doge_on_the_interface_alone():
    """Without use_flash_dmattn Doge's own S x S bias goes to the kernels."""
    model, ids = build("doge"), tokens()
    registered = copy.deepcopy(model)
    registered.set_attn_implementation("flash_dmattn")
    for real in (None, padding("left")):
        rows = padding("none" if real is None else "left").bool()
        batch = {"input_ids": ids, "attention_mask": real, "labels": labels_of("doge", ids, rows.long())}
        assert_same_step(step(registered, **batch), step(model, **batch), rows)


def test_doge_goes_back_and_forth():
    model, ids = build("doge"), tokens()
    expected = model(ids).logits
    ours = switched(model)
    assert all(type(layer.self_attn) is doge.DogeWindowAttention for layer in ours.model.layers)
    assert ours.state_dict().keys() == model.state_dict().keys()
    assert use_flash_dmattn(ours) is ours
    ours.set_attn_implementation("eager")
    torch.testing.assert_close(ours(ids).logits, expected, rtol=0, atol=0)
    copied = copy.deepcopy(use_flash_dmattn(ours))
    torch.testing.assert_close(copied(ids).logits, expected, rtol=1e-4, atol=2e-5)
    assert all(isinstance(layer.self_attn, DogeAttention) for layer in copied.model.layers)


@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("window", [3, 6, 9])
def test_doge_with_a_sliding_window(window, side):
    """Of 6 keys that are kept: where the window has more, keys that drop out may return."""
    model, ids, real = build("doge", sliding_window=window), tokens(), padding(side)
    batch = {"input_ids": ids, "attention_mask": real, "labels": labels_of("doge", ids, real)}
    assert_same_step(step(switched(model), **batch), step(model, **batch), real.bool())


@pytest.mark.parametrize("kind", ["bool", "additive"])
def test_doge_with_a_mask_of_pairs(kind):
    model, ids = build("doge"), tokens()
    visible = rand_mask(BATCH, 1, SEQLEN, SEQLEN) | torch.eye(SEQLEN, dtype=torch.bool)
    mask = visible if kind == "bool" else torch.zeros(visible.shape).masked_fill(~visible, torch.finfo().min)
    torch.testing.assert_close(
        switched(model)(ids, attention_mask=mask).logits, model(ids, attention_mask=mask).logits, rtol=1e-4, atol=2e-5
    )


def test_doge_packed_is_a_choice_within_each_document():
    documents = torch.tensor([[0] * 9 + [1] * 4 + [2] * 8])
    bias = torch.randn(2, 3, 1, 21)
    bias[:, :, :, 5] = bias[:, :, :, 3]  # the later of equal ones
    bias[0, 0, 0, 15] = -torch.inf
    ranks = doge.ranks_by_document(bias, documents.expand(2, -1))
    mask = KeyIntervalMask.topk(ranks, 3) & KeyIntervalMask.documents(ids=documents)
    cu_seqlens = CU_SEQLENS.tolist()
    for first, last in zip(cu_seqlens, cu_seqlens[1:]):
        own = KeyIntervalMask.topk(bias[..., first:last].contiguous(), 3).to_dense()
        torch.testing.assert_close(mask.to_dense()[..., first:last, first:last], own)
    assert mask.to_dense()[..., 13:, :13].sum() == 0


def test_doge_with_a_static_cache_and_gradients():
    model, ids = build("doge"), tokens()
    ours = switched(model)
    caches = [StaticCache(config=model.config, max_cache_len=32) for _ in range(2)]
    logits = [m(ids, past_key_values=cache).logits for m, cache in zip((ours, model), caches)]
    torch.testing.assert_close(*logits, rtol=1e-4, atol=2e-5)


# Generation

PROMPT, NEW = 12, 10


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss", "t5", "doge"])
def test_generation_gives_the_tokens_of_eager(name, cache, beams):
    model, ids = build(name).eval(), tokens(seqlen=PROMPT)
    options = {"cache_implementation": cache, "num_beams": beams, "do_sample": False, "eos_token_id": None}
    options |= {"max_new_tokens": NEW, "min_new_tokens": NEW, "disable_compile": True}
    for side in ("none", "left"):
        real = padding(side, seqlen=PROMPT)
        ours, expected = (m.generate(ids, attention_mask=real, **options) for m in (switched(model), model))
        assert torch.equal(ours, expected)
        assert ours.shape[1] == (1 if name == "t5" else PROMPT) + NEW


@pytest.mark.parametrize("cache", [DynamicCache, StaticCache])
@pytest.mark.parametrize("name", ["llama", "doge"])
def test_steps_with_a_cache_are_the_whole(name, cache):
    """A prompt, a few tokens at once, and one by one."""
    model, ids, real = switched(build(name)).eval(), tokens(), padding("left")
    past = cache(config=model.config, **({"max_cache_len": 32} if cache is StaticCache else {}))
    with torch.no_grad():
        whole = model(ids, attention_mask=real).logits
        parts, first = [], 0
        for size in (12, 4, *[1] * 5):
            seen = {"attention_mask": real[:, : first + size], "past_key_values": past}
            positions = torch.arange(first, first + size)[None]
            parts.append(model(ids[:, first : first + size], position_ids=positions, **seen).logits)
            first += size
    torch.testing.assert_close(torch.cat(parts, dim=1)[real.bool()], whole[real.bool()], rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_doge_makes_the_bias_of_a_key_once(cache):
    model, ids = switched(build("doge")).eval(), tokens(seqlen=PROMPT)
    rows = []
    for layer in model.model.layers:
        layer.self_attn.dt_proj.register_forward_hook(lambda module, given, out: rows.append(out.shape[1]))
    options = {"max_new_tokens": NEW, "cache_implementation": cache, "eos_token_id": None, "do_sample": False}
    model.generate(ids, attention_mask=padding("none", seqlen=PROMPT), **options)
    layers = len(model.model.layers)
    assert rows == [PROMPT] * layers + [1] * layers * (NEW - 1)


def test_doge_goes_on_with_a_cache_that_eager_began():
    model, ids = build("doge").eval(), tokens()
    ours, past = switched(model), DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:, :12], past_key_values=past)
        logits = ours(ids[:, 12:], past_key_values=past).logits
        torch.testing.assert_close(logits, model(ids).logits[:, 12:], rtol=1e-4, atol=2e-5)


def test_doge_with_a_cache_that_is_cut():
    """Assisted generation throws tokens away: the bias must go with them."""
    model, ids = switched(build("doge")).eval(), tokens()
    past = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids.flip(1), past_key_values=past)
        past.crop(-(SEQLEN - 8))
        logits = model(ids[:, 8:], past_key_values=past).logits
        together = torch.cat([ids.flip(1)[:, :8], ids[:, 8:]], dim=1)
        torch.testing.assert_close(logits, model(together).logits[:, 8:], rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("name", ["llama", "doge"])
def test_a_step_of_a_static_cache_is_compiled_once(name):
    model, ids = switched(build(name)).eval(), tokens(seqlen=PROMPT)
    options = {"max_new_tokens": 6, "cache_implementation": "static", "do_sample": False, "eos_token_id": None}
    expected = model.generate(ids, **options, disable_compile=True)
    compiled = transformers.CompileConfig(fullgraph=True, backend="aot_eager", mode=None)
    compiled._compile_all_devices = True
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    assert torch.equal(model.generate(ids, **options, compile_config=compiled), expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
