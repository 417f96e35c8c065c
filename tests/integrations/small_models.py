"""Small models of transformers with random weights, and one call of the attention that is registered there."""

import copy
from types import SimpleNamespace

import pytest
import torch
from einops import rearrange

transformers = pytest.importorskip("transformers", "5.17")

from helpers import inputs  # noqa: E402

from flash_dmattn.integrations.transformers import register, use_flash_dmattn  # noqa: E402

register()
VOCABULARY, BATCH, SEQLEN = 96, 2, 21
WINDOW = 5  # the window size of models with a sliding window
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
    # The layers of its decoder have is_causal=False.
    "umt5": ("UMT5ForConditionalGeneration", "UMT5Config", T5 | {"dropout_rate": 0.0, "decoder_start_token_id": 0}),
    "bert": ("BertForMaskedLM", "BertConfig", ENCODER),
    "gpt_oss": (
        "GptOssForCausalLM",
        "GptOssConfig",
        GROUPED | {"head_dim": 8, "sliding_window": WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "doge": ("DogeForCausalLM", "DogeConfig", GROUPED | {"keep_window_size": 6}),
    # Key and value have different head dimensions, and an indexer selects the keys.
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
    for parameter in model.parameters():  # including those that start as 0 or 1, as Doge's A and GPT-OSS's sinks
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
    """Labels for real tokens; a decoder's row predicts the next token."""
    labels = ids.masked_fill(real == 0, -100)
    if name in DECODERS:  # no row of padding predicts
        labels[:, 1:] = labels[:, 1:].masked_fill(real[:, :-1] == 0, -100)
    return labels


def step(model, **batch):
    """(logits, loss, gradient of every parameter)"""
    model.zero_grad()
    out = model(**batch)
    out.loss.backward()
    # Copies, since a model that moves to another device moves its gradients.
    gradients = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    return out.logits.detach(), out.loss.detach(), gradients


def assert_same_step(ours, eager, rows):
    torch.testing.assert_close(ours[0][rows], eager[0][rows], rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(ours[1], eager[1], rtol=1e-5, atol=1e-5)
    # Relative to all gradients: that of a key projection's bias is 0 up to rounding.
    largest = max(grad.abs().max() for grad in eager[2].values() if grad is not None)
    assert largest > 0
    for name, expected in eager[2].items():
        assert (ours[2][name] is None) == (expected is None), name
        if expected is not None:
            torch.testing.assert_close(ours[2][name], expected, rtol=1e-3, atol=5e-6 * largest.item(), msg=name)


LENGTHS = (9, 4, 8)
POSITIONS = torch.cat([torch.arange(length) for length in LENGTHS])[None]
CU_SEQLENS = torch.tensor([0, 9, 13, 21], dtype=torch.int32)


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
        sinks = sinks[None, :, None, None] if sinks.ndim == 1 else sinks
        scores = torch.cat([scores, sinks.expand(*scores.shape[:3], 1)], dim=-1)
    return torch.einsum("bhij, bhjd -> bihd", scores.softmax(dim=-1)[..., : key.shape[2]], value)


PROMPT, NEW = 12, 10
