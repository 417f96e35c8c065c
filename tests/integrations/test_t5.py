"""T5's relative bias as a table: no bias of Sq x Sk is made."""

import copy
import pickle

import pytest
import torch

transformers = pytest.importorskip("transformers", "5.17")

from small_models import MODELS, T5, assert_same_step, labels_of, padding, step, switched, tokens  # noqa: E402
from small_models import build as build_model  # noqa: E402
from transformers import EncoderDecoderCache, StaticCache  # noqa: E402

from flash_dmattn.integrations import t5  # noqa: E402
from flash_dmattn.integrations import transformers as integration  # noqa: E402
from flash_dmattn.integrations.versions import CACHE  # noqa: E402

SMALL = T5 | {"dropout_rate": 0.0, "decoder_start_token_id": 0, "relative_attention_max_distance": 18}
OTHERS = {"mt5": ("MT5ForConditionalGeneration", "MT5Config", SMALL | {"num_decoder_layers": 2})}


@pytest.fixture
def build(monkeypatch):
    monkeypatch.setitem(MODELS, "mt5", OTHERS["mt5"])
    return build_model


@pytest.fixture
def seen(monkeypatch):
    """The shapes of the relative and the dense biases that the kernels get."""
    shapes = []

    def spy(query, key, value, attn_mask=None, attn_bias=None, relative_bias=None, **options):
        shapes.append([None if x is None else tuple(x.shape) for x in (attn_bias, relative_bias)])
        return function(query, key, value, attn_mask, attn_bias, relative_bias=relative_bias, **options)

    function = integration.flash_dmattn_func
    monkeypatch.setattr(integration, "flash_dmattn_func", spy)
    return shapes


@pytest.mark.parametrize("name", ["t5", "mt5"])
@pytest.mark.parametrize("side", ["none", "left"])
def test_a_training_step_passes_tables(build, seen, name, side):
    model, ids, real = build(name).double(), tokens(), padding(side)
    batch = {"input_ids": ids, "attention_mask": real, "labels": labels_of(name, ids, real)}
    ours, eager = step(switched(model), **batch), step(model, **batch)
    assert_same_step(ours, eager, slice(None))
    radius = model.config.relative_attention_max_distance
    tables = [[None, (1, 4, 2 * radius + 1)]] * 2  # of two layers
    assert seen == [*tables, *([tables[0], [None, None]] * 2)]  # cross-attention has none
    assert all(grad.abs().sum() > 0 for key, grad in ours[2].items() if "relative_attention_bias" in key)


def test_umt5_computes_a_table_in_every_layer(build, seen):
    model, ids = build("umt5"), tokens()
    step(switched(model), input_ids=ids, labels=ids)
    relative = [table for _, table in seen if table is not None]
    assert relative == [(1, 4, 2 * model.config.relative_attention_max_distance + 1)] * 4


@pytest.mark.parametrize("with_grad", [True, False])
@pytest.mark.parametrize("dense_mask", [True, False])
def test_static_caches(build, with_grad, dense_mask):
    """A prompt of five tokens, then two at once and one, in a cache with room for nine."""
    model, ids = build("t5").eval(), tokens(seqlen=21)
    results = []
    for one in (switched(model), model):
        caches = [StaticCache(config=model.config, max_cache_len=size) for size in (9, 21)]
        cache, parts, first = EncoderDecoderCache(*caches), [], 0
        with torch.set_grad_enabled(with_grad):
            states = one.encoder(ids)
            for size in (5, 2, 1):
                mask = None
                if dense_mask:
                    mask = torch.zeros(2, 1, size, 9).masked_fill(
                        torch.arange(9) > torch.arange(first, first + size)[:, None], torch.finfo(torch.float32).min
                    )
                rows = ids[:, first : first + size]
                seen = {"decoder_attention_mask": mask, CACHE: cache}
                out = one(encoder_outputs=states, decoder_input_ids=rows, **seen)
                parts.append(out.logits.detach())
                first += size
        results.append(torch.cat(parts, dim=1))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


def test_switched_models_are_copied_and_pickled(build):
    model, ids = switched(build("t5")).eval(), tokens()
    pickled = pickle.dumps(copy.deepcopy(model))
    t5.__dict__.pop("RelativeT5Attention")  # as in another process
    again = pickle.loads(pickled)
    with torch.no_grad():
        logits = [x(input_ids=ids, decoder_input_ids=ids).logits for x in (model, again)]
    assert torch.equal(*logits)
    assert type(again.encoder.block[0].layer[0].SelfAttention).__name__ == "RelativeT5Attention"


def test_other_implementations_keep_the_dense_bias(build):
    model, ids = build("t5").eval(), tokens()
    with torch.no_grad():
        expected = model(input_ids=ids, decoder_input_ids=ids).logits
        ours = switched(model)
        ours.set_attn_implementation("eager")
        torch.testing.assert_close(ours(input_ids=ids, decoder_input_ids=ids).logits, expected)
