"""Model classes: those that flash_dmattn supports though transformers' flags do not say so, those that it refuses, and
composite models."""

import copy

import pytest
import torch

transformers = pytest.importorskip("transformers", "5.17")

from small_models import ENCODER, GROUPED, SIZES, T5, VOCABULARY, build, padding, step, tokens  # noqa: E402

from flash_dmattn.integrations.model_parts import TESTED  # noqa: E402
from flash_dmattn.integrations.transformers import register, use_flash_dmattn  # noqa: E402

SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
BART = {"vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 48}
BART |= {"decoder_ffn_dim": 48, "encoder_attention_heads": 4, "decoder_attention_heads": 4, **SPECIAL}
BART |= {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0, "max_position_embeddings": 64}
ENCODER_SIZES = ENCODER | {"max_position_embeddings": 64, "eos_token_id": 2, "bos_token_id": 1}
T5_SIZES = T5 | {"dropout_rate": 0.0, "decoder_start_token_id": 0}
EXPERTS = {"num_experts": 2, "router_jitter_noise": 0.0}
VISION = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 16, "patch_size": 8}
SERIES = BART | {"prediction_length": 4, "context_length": 8, "lags_sequence": [1, 2, 3], "num_time_features": 1}


def text():
    return {"input_ids": tokens(), "attention_mask": padding("right")}


def encoder_decoder():
    return text() | {"decoder_input_ids": tokens()}


def image(size=16):
    return {"pixel_values": torch.randn(2, 3, size, size)}


def marked(count):
    """Text in which the token 1 stands for `count` features of an image or of audio."""
    batch = text()
    batch["input_ids"][:, 1 : count + 1] = 1
    return batch


def speech():
    real = torch.ones(2, 60, dtype=torch.long)
    real[0, 40:] = 0
    return {"input_features": torch.randn(2, 60, 8), "attention_mask": real, "decoder_input_ids": tokens()}


def series():
    past = {"past_values": torch.randn(2, 11), "past_observed_mask": torch.ones(2, 11)}
    times = {"past_time_features": torch.randn(2, 11, 1), "future_time_features": torch.randn(2, 4, 1)}
    return past | times | {"future_values": torch.randn(2, 4)}


# The base class of transformers, without "PreTrainedModel": (model, config, its arguments, inputs).
ACCEPTED = {
    "Align": ("AlignTextModel", "AlignTextConfig", ENCODER_SIZES, text),
    "Clap": ("ClapTextModel", "ClapTextConfig", ENCODER_SIZES, text),
    "Inkling2": (
        "Inkling2ForCausalLM",
        "Inkling2TextConfig",
        GROUPED
        | {"head_dim": 8, "swa_head_dim": 8, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "d_rel": 4}
        | {"rel_extent": 8, "sliding_window_size": 5, "moe_intermediate_size": 16, "n_routed_experts": 4}
        | {"num_experts_per_tok": 2, "layer_types": ["hybrid_sliding", "hybrid"]}
        | {"unpadded_vocab_size": GROUPED["vocab_size"]},
        text,
    ),
    "LongT5": ("LongT5ForConditionalGeneration", "LongT5Config", T5_SIZES | {"local_radius": 4}, encoder_decoder),
    "MarkupLM": ("MarkupLMForTokenClassification", "MarkupLMConfig", ENCODER_SIZES, text),
    "PatchTSMixer": (
        "PatchTSMixerModel",
        "PatchTSMixerConfig",
        {"context_length": 16, "patch_length": 4, "patch_stride": 4, "num_input_channels": 2, "d_model": 16}
        | {"self_attn": True, "self_attn_heads": 2, "num_layers": 2, "dropout": 0.0},
        lambda: {"past_values": torch.randn(2, 16, 2)},
    ),
    "Speech2Text": (
        "Speech2TextForConditionalGeneration",
        "Speech2TextConfig",
        BART | {"input_feat_per_channel": 8, "conv_channels": 16, "max_source_positions": 64},
        speech,
    ),
    "Splinter": ("SplinterModel", "SplinterConfig", ENCODER_SIZES, text),
    "SwitchTransformers": (
        "SwitchTransformersForConditionalGeneration",
        "SwitchTransformersConfig",
        T5_SIZES | EXPERTS | {"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
        encoder_decoder,
    ),
    "TimeSeriesTransformer": ("TimeSeriesTransformerModel", "TimeSeriesTransformerConfig", SERIES, series),
}

EAGER_ONLY = "which supports eager attention only"
REFUSED = {
    "Git": ("GitForCausalLM", "GitConfig", ENCODER_SIZES | {"vision_config": VISION}, EAGER_ONLY),
    "BigBirdPegasus": (
        "BigBirdPegasusForConditionalGeneration",
        "BigBirdPegasusConfig",
        BART | {"attention_type": "original_full"},
        EAGER_ONLY,
    ),
    "BridgeTower": (
        "BridgeTowerModel",
        "BridgeTowerConfig",
        {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 48}
        | {"text_config": ENCODER_SIZES | {"hidden_size": 64}, "vision_config": VISION},
        EAGER_ONLY,
    ),
    # Its router inverts the attention mask, which is additive in eager attention only.
    "NllbMoe": (
        "NllbMoeForConditionalGeneration",
        "NllbMoeConfig",
        BART | {"num_experts": 2, "encoder_sparse_step": 2, "decoder_sparse_step": 2},
        EAGER_ONLY,
    ),
    "Informer": ("InformerModel", "InformerConfig", SERIES, EAGER_ONLY),
    "DeepseekV4": (
        "DeepseekV4ForCausalLM",
        "DeepseekV4Config",
        SIZES | {"head_dim": 16, "n_routed_experts": 4, "moe_intermediate_size": 16},
        "whose layers append compressed keys",
    ),
    "Bloom": ("BloomModel", "BloomConfig", {"n_layer": 1, "n_head": 2, "hidden_size": 16}, "its own attention code"),
}

# (model, config, its arguments, inputs, the part that is refused, the part that can be switched)
COMPOSITE = {
    "GotOcr2": (
        "GotOcr2ForConditionalGeneration",
        "GotOcr2Config",
        {
            "text_config": GROUPED | {"model_type": "qwen2"},
            "vision_config": VISION
            | {"hidden_size": 32, "output_channels": 16, "image_size": 64, "window_size": 4, "mlp_dim": 48},
            "image_token_index": 1,
            "image_seq_length": 4,
        },
        lambda: marked(4) | image(64),
        "GotOcr2VisionEncoder (model.vision_tower), which has its own attention code",
        ["model.language_model"],
    ),
    "GraniteSpeech": (
        "GraniteSpeechForConditionalGeneration",
        "GraniteSpeechConfig",
        {
            "text_config": GROUPED | {"model_type": "granite"},
            "encoder_config": {"input_dim": 8, "num_layers": 2, "hidden_dim": 32, "num_heads": 4, "dim_head": 8}
            | {"output_dim": 6, "context_size": 10, "max_pos_emb": 16, "conv_kernel_size": 3},
            "projector_config": ENCODER
            | {"model_type": "blip_2_qformer", "num_hidden_layers": 1, "encoder_hidden_size": 32}
            | {"cross_attention_frequency": 1},
            "audio_token_index": 1,
            "has_lora_adapter": False,
        },
        lambda: marked(6) | {"input_features": torch.randn(2, 30, 8), "input_features_mask": torch.ones(2, 6).bool()},
        "GraniteSpeechCTCEncoder (model.encoder), which has its own attention code",
        ["model.projector.qformer", "model.language_model"],
    ),
}


def build_model(model_class, config_class, sizes):
    """A model with random weights in eager attention, without dropout, and with the gradients of training."""
    if not hasattr(transformers, config_class):
        pytest.skip(f"transformers {transformers.__version__} has no {config_class}")
    config = getattr(transformers, config_class)(**sizes)
    model = getattr(transformers, model_class)._from_config(config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


def outputs_and_gradients(model, batch):
    """Floating outputs by name, and the gradient of each parameter of a random sum of them."""
    model.zero_grad()
    outputs = {k: x for k, x in model(**batch).items() if isinstance(x, torch.Tensor) and x.is_floating_point()}
    generator = torch.Generator().manual_seed(2)
    sum((x * torch.randn(x.shape, generator=generator)).sum() for x in outputs.values() if x.requires_grad).backward()
    gradients = {k: p.grad.clone() for k, p in model.named_parameters() if p.grad is not None}
    return outputs, gradients


def assert_same_model(ours, eager, batch):
    (out, gradients), (wanted, wanted_gradients) = (outputs_and_gradients(model, batch) for model in (ours, eager))
    torch.testing.assert_close(out, wanted, rtol=1e-4, atol=2e-5)
    assert gradients.keys() == wanted_gradients.keys()
    largest = max(gradient.abs().max().item() for gradient in wanted_gradients.values())
    torch.testing.assert_close(gradients, wanted_gradients, rtol=1e-3, atol=5e-6 * largest)


def implementations(model):
    return {
        name: part.config._attn_implementation
        for name, part in model.named_modules()
        if isinstance(part, transformers.PreTrainedModel)
    }


def test_every_accepted_class_without_flags_is_tested():
    assert {f"{name}PreTrainedModel" for name in ACCEPTED} == TESTED


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted_models_equal_eager(name):
    *model, inputs = ACCEPTED[name]
    eager = build_model(*model)
    ours = use_flash_dmattn(copy.deepcopy(eager))
    assert set(implementations(ours).values()) == {"flash_dmattn"}
    assert_same_model(ours, eager, inputs())


def test_inkling2_generates_the_tokens_of_eager():
    eager = build_model(*ACCEPTED["Inkling2"][:3])
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    ids = tokens(seqlen=9)
    wanted = eager.generate(ids, **options)
    assert torch.equal(use_flash_dmattn(eager).generate(ids, **options), wanted)


@pytest.mark.parametrize("name", REFUSED)
def test_refused_models_name_the_reason(name):
    *arguments, reason = REFUSED[name]
    model = build_model(*arguments)
    before = implementations(model)
    for partial in (False, True):
        with pytest.raises(ValueError, match=f"transformers' attention interface, got {arguments[0]}, .*{reason}"):
            use_flash_dmattn(model, partial=partial)
    assert implementations(model) == before
    model_class, config = type(model), getattr(transformers, arguments[1])(**arguments[2])
    with pytest.raises(ValueError, match=reason):
        model_class._from_config(config, attn_implementation="flash_dmattn")


@pytest.mark.parametrize("name", COMPOSITE)
def test_parts_of_a_composite_model(name):
    *model, inputs, refused, switched = COMPOSITE[name]
    eager = build_model(*model)
    ours = copy.deepcopy(eager)
    with pytest.raises(ValueError) as error:
        use_flash_dmattn(ours)
    assert f"got {refused}; partial=True switches {', '.join(switched)} only" in str(error.value)
    assert set(implementations(ours).values()) == {"eager"}
    assert use_flash_dmattn(ours, partial=True) is ours
    for part, implementation in implementations(ours).items():
        assert (implementation == "flash_dmattn") == any(part.startswith(prefix) for prefix in switched), part
    assert_same_model(ours, eager, inputs())


def test_a_part_without_flags_is_not_switched_by_set_attn_implementation():
    """transformers switches the audio encoder of Gemma 4 with the whole model; its attention reads additive masks."""
    register()
    audio = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "output_proj_dims": 32}
    audio |= {"subsampling_conv_channels": [8, 4]}
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    vision |= {"num_key_value_heads": 4, "head_dim": 8}
    layers = {"head_dim": 8, "global_head_dim": 8, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0}
    layers |= {"vocab_size_per_layer_input": VOCABULARY, "layer_types": ["sliding_attention", "full_attention"]}
    sizes = {"text_config": GROUPED | layers, "vision_config": vision, "audio_config": audio}
    model = build_model("Gemma4ForConditionalGeneration", "Gemma4Config", sizes)
    if model.model.audio_tower._supports_sdpa:
        pytest.skip("the audio encoder of this transformers reads bool masks, and can be switched")
    with pytest.raises(ValueError, match="got Gemma4AudioModel, which supports eager attention only"):
        model.set_attn_implementation("flash_dmattn")
    with pytest.raises(ValueError, match=r"got Gemma4AudioModel \(model.audio_tower\), .* switches model.vision_tower"):
        use_flash_dmattn(model)
    use_flash_dmattn(model, partial=True)
    assert model.model.audio_tower.config._attn_implementation == "eager"
    assert model.model.language_model.config._attn_implementation == "flash_dmattn"


@pytest.mark.parametrize("name", ["llama", "doge"])
def test_peft_models(name):
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    eager = peft.get_peft_model(build(name), lora)
    ours = copy.deepcopy(eager)
    assert use_flash_dmattn(ours) is ours
    assert set(implementations(ours).values()) == {"flash_dmattn"}
    batch = text()
    batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    wanted, got = step(eager, **batch), step(ours, **batch)
    real = batch["attention_mask"].bool()
    torch.testing.assert_close(got[0][real], wanted[0][real], rtol=1e-4, atol=2e-5)
    assert any("lora" in key and gradient is not None for key, gradient in wanted[2].items())
    largest = max(gradient.abs().max().item() for gradient in wanted[2].values() if gradient is not None)
    torch.testing.assert_close(got[2], wanted[2], rtol=1e-3, atol=5e-6 * largest)


def test_a_wrapped_model_is_switched_in_place():
    model = torch.nn.Sequential(build("llama"))
    assert use_flash_dmattn(model) is model
    assert model[0].config._attn_implementation == "flash_dmattn"
