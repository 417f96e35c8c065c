"""Models that switch to flash_dmattn and back, and calls that are refused."""

import subprocess
import sys

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers", "5.17")

from small_models import GROUPED, MODELS, build, one_call, padding, switched, tokens  # noqa: E402
from transformers import PreTrainedModel  # noqa: E402

from flash_dmattn.integrations.transformers import attention, register, use_flash_dmattn  # noqa: E402
from flash_dmattn.integrations.versions import require_version  # noqa: E402


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
            r"attention_mask must be .* B = 2, H = 2, Sq = 9 and Sk = 9, got shape \(3, 9\)",
        ),
        (
            {"attention_mask": torch.ones(2, 8).bool()},
            r"attention_mask must be .* B = 2, H = 2, Sq = 9 and Sk = 9, got shape \(2, 8\)",
        ),
        ({"attention_mask": torch.ones(2, 1, 8, 9)}, r"attention_mask must be .*, got shape \(2, 1, 8, 9\)"),
        ({"attention_mask": torch.ones(2, 3, 9, 9).bool()}, r"attention_mask must be .*, got shape \(2, 3, 9, 9\)"),
        ({"attention_mask": torch.ones(2, 1, 9, 8)}, r"attention_mask must be .*, got shape \(2, 1, 9, 8\)"),
        ({"position_bias": torch.zeros(1, 2, 9, 8)}, r"position_bias must be .* Sk = 9, got shape \(1, 2, 9, 8\)"),
        ({"position_bias": torch.zeros(1, 3, 9, 9)}, r"position_bias must be .* H = 2, .*, got shape \(1, 3, 9, 9\)"),
        (
            {"position_bias": torch.zeros(1, 2, 8)},
            r"position_bias must be .* \(1, H, 2R \+ 1\), .*, got shape \(1, 2, 8\)",
        ),
        ({"position_bias": torch.zeros(9, 9)}, r"position_bias must be .*, got shape \(9, 9\)"),
        (
            {"cu_seq_lens_q": torch.tensor([0, 16])},
            r"cu_seq_lens_q must be .* 18, the rows .*, got cu_seq_lens_q\[-1\] = 16",
        ),
        (
            {"cu_seq_lens_q": torch.tensor([0, 18]), "cu_seq_lens_k": torch.tensor([0, 9, 18])},
            r"cu_seq_lens_q and cu_seq_lens_k must both have B \+ 1 elements, got 2 and 3",
        ),
        (
            {"cu_seq_lens_q": torch.tensor([0, 18]), "max_length_q": 8},
            "max_length_q must be at least the longest sequence 18, got 8",
        ),
        ({"indices": torch.full((2, 9, 3), 99)}, "indices must be from 0 to 8, got 99"),
        ({"indices": torch.full((2, 9, 3), -1)}, "indices must be from 0 to 8, got -1"),
        (
            {"indices": torch.zeros(2, 8, 3).long()},
            r"indices must be \(B, Sq, k\), .* Sq = 9 .*, got shape \(2, 8, 3\)",
        ),
        (
            {"indices": torch.zeros(2, 9, 3).long(), "cu_seq_lens_q": torch.tensor([0, 18])},
            "indices is for sequences that are not packed",
        ),
        ({"s_aux": torch.zeros(5)}, r"s_aux must be \(H\) or .* with B = 2, H = 2 and Sq = 9, got shape \(5,\)"),
        ({"sinks": torch.zeros(2, 2, 8, 1)}, r"sinks must be .*, got shape \(2, 2, 8, 1\)"),
        ({"sinks": torch.zeros(2), "s_aux": torch.zeros(2)}, "s_aux and sinks are two names"),
        ({"gate": torch.zeros(2)}, r"has no argument gate, got shape \(2,\)"),
        ({"attention_mask": torch.ones(2, 1, 9, 9), "cu_seq_lens_q": torch.tensor([0, 18])}, "must be None"),
    ],
    ids=lambda x: ", ".join(x) if isinstance(x, dict) else "",
)
def test_unsupported_arguments_are_refused(options, says):
    layer, *tensors = one_call(batch=2, seqlen_q=9, seqlen_k=9)
    with pytest.raises(ValueError, match=says):
        attention(layer, *tensors, **{"attention_mask": None, **options})
    attention(layer, *tensors, None, dropout=0.0, head_mask=None, output_attentions=False)


def test_tensors_that_eager_attention_uses_are_refused(monkeypatch):
    """Other tensors pass through a model to its attention in eager attention, too."""
    from transformers.models.llama import modeling_llama

    model, ids = switched(build("llama")), tokens()
    logits = model(ids).logits
    assert torch.equal(model(ids, gate=torch.zeros(2), seq_idx=torch.zeros(2)).logits, logits)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(ids, padding("none"), gate=torch.zeros(2)).logits, logits)

    def eager_attention_forward(module, query, key, value, attention_mask, gate=None, **kwargs):
        """A newer version of the model."""

    monkeypatch.setattr(modeling_llama, "eager_attention_forward", eager_attention_forward)
    with pytest.raises(ValueError, match=r"has no argument gate, got shape \(2,\)"):
        model(ids, gate=torch.zeros(2))


def test_a_padding_mask_of_another_batch_is_refused():
    mask = torch.ones(3, 9, dtype=torch.long)
    mask[:, 0] = 0
    with pytest.raises(ValueError, match="attention_mask must have the batch size 2 or 1, got 3"):
        switched(build("llama"))(tokens(batch=2, seqlen=9), mask)


def test_a_causal_mask_for_other_keys_is_refused():
    """A layer that appends keys of its own: aligned to the bottom right corner, causality would mask others."""
    model = switched(build("llama"))
    layer, *tensors = one_call(batch=2, seqlen_q=9, seqlen_k=12)
    model.model.layers[0].self_attn.register_forward_pre_hook(
        lambda module, args, kwargs: attention(layer, *tensors, kwargs["attention_mask"]), with_kwargs=True
    )
    with pytest.raises(ValueError, match=r"attention_mask must be for the 12 keys, got shape \(2, 1, 9, 9\)"):
        model(tokens(seqlen=9))


@pytest.mark.parametrize("mask", [torch.ones(2, 1, 9, 9, dtype=torch.long), torch.ones(2, 9)], ids=lambda x: x.ndim)
def test_ambiguous_masks_are_refused(mask):
    """Integers of 4 dimensions and floats of 2: a 1 could mean visible, or be added."""
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
    """Marks this file as a model that computes attention itself."""


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


@pytest.mark.parametrize("version", ["5.16.1", "5.25.0", "6.0.0.dev0"])
def test_other_versions_are_refused(version):
    with pytest.raises(ImportError, match=rf"needs transformers 5.17 to 5.24, got {version}"):
        require_version(version)


def test_without_transformers():
    program = "import sys; sys.modules['transformers'] = None; import flash_dmattn.integrations.transformers"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    error = result.stderr.strip().splitlines()[-1]
    assert error.startswith("ModuleNotFoundError: flash_dmattn.integrations.transformers needs transformers 5.17 to ")
    assert error.endswith(': run `pip install "transformers>=5.17,<5.25" psutil`')


@pytest.mark.parametrize("version", ["5.17.0", "5.24.0", "5.24.4"])
def test_versions_that_are_accepted(version):
    require_version(version)


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
def test_the_attention_implementation_keeps_its_name(name):
    """GPT-OSS prefers kernels of the hub to whatever has "flash" in its name; T5 holds three configs."""
    model = switched(build(name))
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            assert part.config._attn_implementation == "flash_dmattn"


@pytest.mark.parametrize("name", ["doge", "t5", "umt5"])
def test_another_process_unpickles_switched_models(name, tmp_path):
    """It imports the file of the layer's class alone."""
    model, ids = switched(build(name)).eval(), tokens()
    arguments = {"input_ids": ids, "attention_mask": padding("left")}
    if name != "doge":
        arguments["decoder_input_ids"] = ids
    path = tmp_path / "model.pt"
    torch.save((model, arguments), path)
    script = (
        "import sys, torch\n"
        "model, arguments = torch.load(sys.argv[1], weights_only=False)\n"
        "torch.save(model(**arguments).logits.detach(), sys.argv[1])\n"
    )
    subprocess.run([sys.executable, "-c", script, str(path)], check=True)
    with torch.no_grad():
        expected = model(**arguments).logits
    real = torch.ones_like(ids) if name != "doge" else arguments["attention_mask"]
    torch.testing.assert_close(torch.load(path)[real.bool()], expected[real.bool()])
