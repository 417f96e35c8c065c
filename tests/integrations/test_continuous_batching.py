"""Continuous batching of transformers: generate_batch returns what generate returns for each prompt alone."""

import copy
import logging
from types import SimpleNamespace

import pytest
import torch

transformers = pytest.importorskip("transformers", "5.17")
if not torch.cuda.is_available():
    pytest.importorskip("psutil")  # by which transformers finds the memory of the CPU

from small_models import GROUPED, MODELS, VOCABULARY, WINDOW, build, one_call, switched  # noqa: E402
from transformers import ContinuousBatchingConfig, GenerationConfig  # noqa: E402
from transformers.generation.continuous_batching import PagedAttentionCache  # noqa: E402
from transformers.generation.continuous_batching.model_runner import ModelRunner  # noqa: E402
from transformers.generation.continuous_batching.offloading_manager import OffloadingManager  # noqa: E402

from flash_dmattn.integrations import paged  # noqa: E402
from flash_dmattn.integrations.transformers import attention, use_flash_dmattn  # noqa: E402
from flash_dmattn.integrations.versions import CACHE  # noqa: E402

NEW_TOKENS, PAGE = 7, 16
LENGTHS = (5, 40, 17, 33, 70)  # chunks of 32 rows, which mix with single tokens
GREEDY = GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)


def prompts_of(*lengths, prefix=0):
    """Random tokens; the first `prefix` ones are the same in all prompts."""
    first = torch.randint(3, VOCABULARY, (prefix,)).tolist()
    return [first + torch.randint(3, VOCABULARY, (length - prefix,)).tolist() for length in lengths]


def batched(model, prompts, generation=GREEDY, persistent_manager=False, **options):
    """The new tokens of each prompt."""
    options = {"num_blocks": 40, "max_batch_tokens": 32, "allow_block_sharing": False} | options
    page_size = options.pop("page_size", PAGE)
    config = ContinuousBatchingConfig(**options)
    setattr(config, "page_size" if hasattr(config, "page_size") else "block_size", page_size)  # before 5.18
    call = {"continuous_batching_config": config, "persistent_manager": persistent_manager, "progress_bar": False}
    results = list(model.generate_batch(prompts, generation, **call).values())
    assert [result.error for result in results] == [None] * len(results)
    return [result.generated_tokens for result in results]


def one_by_one(model, prompts):
    """Generates with eager attention; Doge with flash_dmattn, since topk breaks ties of its biases in any order."""
    if model.config.model_type == "doge":
        model = switched(model)
    outs = [model.generate(torch.tensor([prompt]), generation_config=GREEDY)[0].tolist() for prompt in prompts]
    return [out[len(prompt) :] for out, prompt in zip(outs, prompts)]


@pytest.fixture
def tables(monkeypatch):
    """Whether transformers passed page tables, for each batch."""
    passed, right = [], paged.block_table

    def recorded(layer, batch, sequences):
        passed.append(batch["block_table"] is not None)
        return right(layer, batch, sequences)

    monkeypatch.setattr(paged, "block_table", recorded)
    return passed


@pytest.mark.parametrize("implementation", ["flash_dmattn", "paged|flash_dmattn"])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_tokens_are_those_of_eager_attention(name, implementation, tables):
    eager, prompts = build(name), prompts_of(*LENGTHS)
    model = copy.deepcopy(eager)
    model.set_attn_implementation(implementation)
    assert batched(model, prompts) == one_by_one(eager, prompts)
    assert {*tables} == {False, True}


@pytest.mark.parametrize("name", ["qwen2", "gemma2", "mistral", "gpt_oss"])
def test_sliding_windows_softcap_and_sinks(name):
    eager, prompts = build(name), prompts_of(*LENGTHS)
    assert batched(switched(eager), prompts) == one_by_one(eager, prompts)


OTHERS = {
    "diffllama": ("DiffLlamaForCausalLM", "DiffLlamaConfig", GROUPED),
    "jetmoe": (
        "JetMoeForCausalLM",
        "JetMoeConfig",
        {key: GROUPED[key] for key in GROUPED.keys() - {"num_attention_heads"}}
        | {"kv_channels": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "stablelm": ("StableLmForCausalLM", "StableLmConfig", GROUPED),
    "gemma3n": (  # the last two layers share the keys of the first two
        "Gemma3nForCausalLM",
        "Gemma3nTextConfig",
        GROUPED
        | {"head_dim": 8, "sliding_window": WINDOW, "num_hidden_layers": 4, "num_kv_shared_layers": 2}
        | {"layer_types": ["sliding_attention", "full_attention"] * 2, "activation_sparsity_pattern": [0.0] * 4}
        | {"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8}
        | {"laurel_rank": 4, "altup_num_inputs": 2},
    ),
}


@pytest.fixture
def others(monkeypatch):
    for name, sizes in OTHERS.items():
        monkeypatch.setitem(MODELS, name, sizes)


def test_layers_that_share_keys(others):
    eager, prompts = build("gemma3n"), prompts_of(*LENGTHS)
    assert batched(switched(eager), prompts) == one_by_one(eager, prompts)


@pytest.mark.parametrize("name", ["diffllama", "jetmoe"])
def test_layers_that_change_keys_or_values_get_gathered_ones(others, name, tables):
    """DiffLlama's layers attend twice, to one half of the values each; those of JetMoe repeat keys and values."""
    eager, prompts = build(name), prompts_of(*LENGTHS)
    if CACHE == "cache":
        assert batched(switched(eager), prompts) == one_by_one(eager, prompts)
        assert tables == []
    else:
        with pytest.raises(AssertionError, match=f"does not support {name} before transformers 5.24"):
            batched(switched(eager), prompts)


@pytest.mark.skipif(CACHE != "cache", reason="before transformers 5.24 layers pass new keys without an update")
def test_other_layers_that_change_keys_or_values_are_refused(monkeypatch):
    def halved(self, *args, **kwargs):
        key, value = update(self, *args, **kwargs)
        return key, 0.5 * value

    model, update = switched(build("llama")), PagedAttentionCache.update
    monkeypatch.setattr(PagedAttentionCache, "update", halved)
    with pytest.raises(AssertionError, match="LlamaAttention, which changes the keys or values"):
        batched(model, prompts_of(9))


def test_layers_that_do_not_pass_the_cache_are_refused(others):
    with pytest.raises(AssertionError, match="StableLmForCausalLM, which does not pass its cache"):
        batched(switched(build("stablelm")), prompts_of(9, 20))


def test_a_manager_of_another_attention_implementation():
    eager, prompts = build("llama"), prompts_of(9, 20)
    expected, model = one_by_one(eager, prompts), copy.deepcopy(eager)
    assert batched(model, prompts, persistent_manager=True) == expected
    use_flash_dmattn(model)
    with pytest.raises(AssertionError, match=r"call model.destroy_cached_continuous_batching_manager\(\)"):
        batched(model, prompts, persistent_manager=True)
    model.destroy_cached_continuous_batching_manager()
    assert batched(model, prompts) == expected


@pytest.mark.parametrize("options", [{}, {"max_blocks_per_request": 0}, {"page_size": 64}], ids=str)
def test_doge(options, tables):
    """Its biases are cached, too: rows see 6 keys of all pages."""
    eager, prompts = build("doge"), prompts_of(*LENGTHS)
    assert batched(switched(eager), prompts, **options) == one_by_one(eager, prompts)
    assert any(tables) == (options.get("max_blocks_per_request") != 0)


@pytest.mark.parametrize("name", ["llama", "doge"])
def test_prompts_that_share_pages(name, monkeypatch):
    matched, search = [], PagedAttentionCache.search_prefix_match

    def recorded(self, *args):
        matched.append(search(self, *args))
        return matched[-1]

    monkeypatch.setattr(PagedAttentionCache, "search_prefix_match", recorded)
    eager, prompts = build(name), prompts_of(40, 50, 36, 60, prefix=35)
    assert batched(switched(eager), prompts, allow_block_sharing=True) == one_by_one(eager, prompts)
    assert max(matched) == 2 * PAGE


@pytest.fixture
def nan_pages(monkeypatch):
    """Pages of keys and values hold NaN until something is written."""
    make = PagedAttentionCache.__init__

    def make_with_nan(self, *args, **kwargs):
        make(self, *args, **kwargs)
        has_one = hasattr(self, "cache_tensor")  # since 5.18
        for tensor in [self.cache_tensor] if has_one else [*self.key_cache, *self.value_cache]:
            tensor.view(torch.uint8).fill_(255)

    monkeypatch.setattr(PagedAttentionCache, "__init__", make_with_nan)


@pytest.mark.parametrize("name", ["llama", "doge"])
def test_pages_that_are_not_in_use_may_hold_nan(name, nan_pages, monkeypatch):
    def bias_pages_with_nan(cache, *args):
        is_new, pages = cache not in paged._bias_pages, bias_pages(cache, *args)
        for biases in paged._bias_pages[cache].values() if is_new else ():
            biases.fill_(torch.nan)
        return pages

    bias_pages = paged.bias_pages
    monkeypatch.setattr(paged, "bias_pages", bias_pages_with_nan)
    eager, prompts = build(name), prompts_of(*LENGTHS)
    assert batched(switched(eager), prompts) == one_by_one(eager, prompts)


@pytest.mark.parametrize("name", ["llama", "doge"])
def test_the_warm_up_attends_to_pages_that_nothing_has_written(name, nan_pages, monkeypatch, caplog):
    """Without CUDA graphs transformers neither warms up nor pads: here it does both."""
    monkeypatch.setattr(ModelRunner, "pad_inputs", property(lambda self: True, lambda self, _: None), raising=False)
    monkeypatch.setattr(logging.getLogger("ContinuousBatchingLogger"), "propagate", True)
    eager, prompts = build(name), prompts_of(*LENGTHS)
    assert batched(switched(eager), prompts) == one_by_one(eager, prompts)
    assert "Failed to warm up" not in caplog.text


@pytest.mark.parametrize("name", ["llama", "doge"])
def test_a_request_of_nan_leaves_the_others_alone(name):
    eager, prompts = build(name), prompts_of(*LENGTHS)
    expected = one_by_one(eager, prompts)
    broken = next(token for token in range(3, VOCABULARY) if all(token not in x for x in prompts + expected))
    prompts[1][3] = broken
    eager.get_input_embeddings().weight.data[broken] = torch.nan
    tokens = batched(switched(eager), prompts)
    del tokens[1], expected[1]
    assert tokens == expected


def test_pages_are_reused_when_requests_wait_for_them():
    """12 pages hold two of these requests. Some requests start again from their prompts."""
    eager, prompts = build("doge"), prompts_of(60, 70, 66, 75, 58)
    assert batched(switched(eager), prompts, num_blocks=12) == one_by_one(eager, prompts)


@pytest.mark.parametrize("name", ["llama", "doge"])
def test_several_sequences_of_one_prompt(name):
    pytest.importorskip("transformers", "5.18")  # before, generate_batch returns one of them
    eager, prompts = build(name), prompts_of(40, 21)
    generation = copy.deepcopy(GREEDY)
    generation.num_return_sequences = 3
    expected = [tokens for tokens in one_by_one(eager, prompts) for _ in range(3)]
    assert batched(switched(eager), prompts, generation) == expected


def test_biases_are_not_moved_to_the_cpu():
    """transformers would move keys and values only: such requests start again from their prompts."""
    cache = paged.PagedAttentionCache.__new__(PagedAttentionCache)
    manager = SimpleNamespace(cache=cache, _cpu_pool=None)
    paged._bias_pages[cache] = {}
    assert OffloadingManager._offload_to_cpu(manager, None, None) == set()
    if hasattr(cache, "prepare_fork_request"):  # since 5.18
        assert cache.prepare_fork_request(None, ["a", "b"], None) == []
    else:
        assert cache.compute_max_num_forks(None) == 0


def test_a_model_switches_back():
    eager, prompts = build("doge"), prompts_of(20)
    model = switched(eager)
    ours = batched(model, prompts)
    assert one_by_one(model, prompts) == ours == batched(model, prompts)
    model.set_attn_implementation("eager")
    ids = torch.tensor(prompts)
    torch.testing.assert_close(model(ids).logits, eager(ids).logits)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"cache": object()}, "cache must be transformers' PagedAttentionCache, got object"),
        ({"attention_mask": torch.ones(1, 1, 9, 9)}, r"attention_mask must be None .*, got shape \(1, 1, 9, 9\)"),
        ({"sinks": torch.zeros(1, 2, 9, 1)}, r"sinks must be \(H\) in .*, got shape \(1, 2, 9, 1\)"),
        ({"position_bias": torch.zeros(1, 2, 9, 9)}, r"position_bias must be None .* \(1, 2, 9, 9\)"),
        ({"indices": torch.zeros(1, 9, 2)}, r"indices must be None .* \(1, 9, 2\)"),
    ],
    ids=lambda x: ", ".join(x) if isinstance(x, dict) else "",
)
def test_what_is_refused(options, says):
    layer, *tensors = one_call(batch=1, seqlen_q=9, seqlen_k=9)
    layer.layer_idx = 0
    with pytest.raises(ValueError, match=says):
        attention(layer, *tensors, **{"attention_mask": None, "cache": object(), **options})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, r"got shape .*: call use_flash_dmattn\(model\)"),
        ({"sliding_window": 8}, "no dynamic mask in sliding-window layers, .* got sliding_window=8"),
    ],
    ids=str,
)
def test_what_is_refused_of_doge(changes, says):
    model = build("doge", **changes)
    if changes:
        use_flash_dmattn(model)
    else:
        model.set_attn_implementation("flash_dmattn")
    with pytest.raises(AssertionError, match=says):
        batched(model, prompts_of(9))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama", "doge", "gemma2"])
def test_cuda_graphs(name, nan_pages):
    """Graphs pad batches, and replay calls whose lengths have changed since. Before the first prompt transformers
    attends to pages that nothing has written."""
    model = switched(build(name)).to("cuda", torch.bfloat16)
    prompts = prompts_of(*LENGTHS, 5, 6, 7)
    eager = batched(model, prompts, use_cuda_graph=False)
    replayed = batched(model, prompts, use_cuda_graph=True)
    assert [tokens[0] for tokens in replayed] == [tokens[0] for tokens in eager]
    assert sum(a == b for a, b in zip(replayed, eager)) >= len(prompts) // 2  # bfloat16 has ties
