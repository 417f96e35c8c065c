"""Generation with a cache returns the tokens of eager attention."""

import copy

import pytest
import torch

transformers = pytest.importorskip("transformers", "5.17")

from small_models import BATCH, NEW, PROMPT, build, padding, switched, tokens  # noqa: E402
from transformers import DynamicCache, StaticCache  # noqa: E402

from flash_dmattn.integrations.versions import CACHE  # noqa: E402


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
                seen = {"attention_mask": real[:, : first + size], CACHE: past}
                positions = torch.arange(first, first + size, device="cuda")[None]
                parts.append(m(ids[:, first : first + size], position_ids=positions, **seen).logits)
                first += size
            logits.append(torch.cat(parts, dim=1))
    off, eager_off = ((x - exact.cuda())[real.bool()].abs().mean() for x in logits)
    assert off <= 1.5 * eager_off + 1e-5


def check_generation_in_bfloat16(name, cache, device, **options):
    """Each token is the one that eager attention in float32 prefers after the same tokens, up to the rounding of
    bfloat16: the difference of two logits is rounded by up to twice as much as eager's logits in bfloat16, and ours."""
    model = build(name, **{"keep_window_size": PROMPT + NEW} if name == "doge" else {}).eval()  # as in training on CUDA
    half = copy.deepcopy(model).bfloat16().to(device)
    ids = switched(half).generate(
        tokens(seqlen=PROMPT).to(device),
        cache_implementation=cache,
        max_new_tokens=NEW,
        do_sample=False,
        eos_token_id=None,
        **options,
    )
    assert ids.shape == (BATCH, PROMPT + NEW)
    with torch.no_grad():
        rounded, exact = half(ids).logits.cpu().float()[:, PROMPT - 1 : -1], model(ids.cpu()).logits[:, PROMPT - 1 : -1]
    chosen = exact.gather(-1, ids.cpu()[:, PROMPT:, None])[..., 0]
    rounding = (rounded - exact).abs().max()
    assert rounding < 0.1 * (exact.amax(-1) - exact.mean(-1)).mean()  # far less than another token would lose
    assert (exact.amax(-1) - chosen).max() <= 3 * rounding


@pytest.mark.gpu
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["llama", "doge"])
def test_generation_on_cuda(name, cache):
    """With a static cache generate compiles, and captures CUDA graphs."""
    check_generation_in_bfloat16(name, cache, "cuda")


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["llama", "mistral", "doge"])
def test_generation_in_bfloat16(name, cache):
    check_generation_in_bfloat16(name, cache, "cpu", disable_compile=True)


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
            seen = {"attention_mask": real[:, : first + size], CACHE: past}
            positions = torch.arange(first, first + size)[None]
            parts.append(model(ids[:, first : first + size], position_ids=positions, **seen).logits)
            first += size
    torch.testing.assert_close(torch.cat(parts, dim=1)[real.bool()], whole[real.bool()], rtol=1e-4, atol=2e-5)


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
