"""Models of transformers with attn_implementation="flash_dmattn", beside eager attention and SDPA.

train: a training step, forward, loss, backward and AdamW, and its peak memory, weights included. Random weights and
    tokens, no padding. SDPA gets Doge's causal mask from here: transformers 5.17 leaves it out there.
attention: T5's attention alone, forward and backward with the gradient of the position bias, which T5 has within its
    encoder and its decoder, but not from one to the other.
generate: tokens per second of model.generate, greedy, after a prompt of Sk tokens, whose time is not counted. With a
    static cache on CUDA generate compiles; that is not counted either.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from einops import rearrange
from frame import Demand, Setting, Suite, free_memory
from peers import OURS, SDPA
from problem import DTYPES
from report import sentence
from rows import BOTH, Row
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    DogeConfig,
    DogeForCausalLM,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    StaticCache,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.models.t5 import modeling_t5

from flash_dmattn.integrations.transformers import register, use_flash_dmattn
from flash_dmattn.integrations.versions import CACHE

EAGER = "eager"
IMPLEMENTATIONS = {OURS: "flash_dmattn", SDPA: "sdpa", EAGER: "eager"}  # by the names of transformers
STATIC = "static"
CACHES = ("dynamic", STATIC)
TRAINING_STEP, TOKEN = "training step", "generated token"
NEW_TOKENS, WARM_UP_TOKENS = 64, 8


@dataclass(frozen=True)
class Workload:
    name: str
    model: str
    seqlen_k: int
    seqlen_q: int = 0  # T5's decoder, or the rows of an attention; 0: seqlen_k
    batch: int = 1
    window: int = 0
    width: int = 1024
    heads: int = 16
    kv_heads: int = 4
    layers: int = 4
    vocabulary: int = 32768
    new_tokens: int = NEW_TOKENS
    kind: str = ""  # of T5's attention

    @property
    def rows(self) -> int:
        return self.seqlen_q or self.seqlen_k

    def shrunk(self, by: int) -> Workload:
        """For a trial: lengths and widths divided, two layers."""
        lengths = {name: max(8, getattr(self, name) // by) for name in ("seqlen_k", "seqlen_q", "window", "vocabulary")}
        lengths = {name: size for name, size in lengths.items() if getattr(self, name)}
        width = max(8, self.width // by // self.heads // 8 * 8) * self.heads
        return replace(self, **lengths, width=width, layers=2, new_tokens=max(2, NEW_TOKENS // by))


def t5(name: str, seqlen_k: int, seqlen_q: int, **options) -> Workload:
    sizes = {"width": 512, "heads": 8, "kv_heads": 8, "layers": 6, "vocabulary": 32128}
    return Workload(name, "t5", seqlen_k, seqlen_q, batch=4, **sizes, **options)


TRAIN = [
    Workload("Doge, 4 layers, B2 S8192 w1024", "doge", 8192, batch=2, window=1024, vocabulary=8192),
    t5("T5, 6 + 6 layers, B4 S2048 to S1024", 2048, 1024),
]
ATTENTION = [
    t5("T5 encoder, B4 H8 S2048 D64", 2048, 2048, kind="encoder"),
    t5("T5 decoder, causal, B4 H8 S1024 D64", 1024, 1024, kind="decoder"),
    t5("T5 cross attention, B4 H8 Sq1024 Sk2048 D64", 2048, 1024, kind="cross"),
]
GENERATE = [
    Workload(f"{name}, 4 layers, B{batch} Sk{seqlen}", name.lower(), seqlen, batch=batch, window=2048)
    for name in ("Doge", "Llama")
    for seqlen in (8192, 131072)
    for batch in (1, 8)
]


# What --check requires

PEERS = (SDPA, EAGER)
TRAIN_DEMANDS = [
    Demand("Doge", TRAINING_STEP, 1 / 5, (SDPA,)),
    Demand("Doge", TRAINING_STEP, 1 / 4, (SDPA,), figure="peak_bytes"),
    Demand("T5", TRAINING_STEP, 1.0, PEERS),
    Demand("T5", TRAINING_STEP, 0.6, PEERS, figure="peak_bytes"),
]
ATTENTION_DEMANDS = [
    Demand("T5 encoder", BOTH, 1 / 2, PEERS),
    Demand("T5 decoder", BOTH, 1 / 2, PEERS),  # T5 has no position bias across them
]


# Measuring


def wait(setting: Setting) -> None:
    if setting.device == "cuda":
        torch.cuda.synchronize()


def seconds_of(call: Callable[[], object], setting: Setting) -> float:
    wait(setting)
    started = time.perf_counter()
    call()
    wait(setting)
    return time.perf_counter() - started


def median_seconds(call: Callable[[], object], setting: Setting) -> float:
    call()  # compiles, allocates
    call()
    return statistics.median(seconds_of(call, setting) for _ in range(setting.samples))


def peak_bytes(call: Callable[[], object], setting: Setting) -> int | None:
    if setting.device != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats()
    call()
    return torch.cuda.max_memory_allocated()


def tokens_of(workload: Workload, setting: Setting) -> Tensor:
    generator = torch.Generator(setting.device).manual_seed(setting.seed)
    shape = (workload.batch, workload.seqlen_k)
    return torch.randint(3, workload.vocabulary, shape, generator=generator, device=setting.device)


def model_of(workload: Workload, setting: Setting) -> PreTrainedModel:
    torch.manual_seed(setting.seed)
    with torch.device(setting.device):
        return MODELS[workload.model](workload).to(DTYPES[setting.dtype])


def sizes_of(workload: Workload) -> dict[str, int]:
    return {
        "vocab_size": workload.vocabulary,
        "hidden_size": workload.width,
        "intermediate_size": 2 * workload.width,
        "num_hidden_layers": workload.layers,
        "num_attention_heads": workload.heads,
        "num_key_value_heads": workload.kv_heads,
        "max_position_embeddings": workload.seqlen_k + 2 * NEW_TOKENS,
        "eos_token_id": None,
    }


def doge_model(workload: Workload) -> PreTrainedModel:
    model = DogeForCausalLM(DogeConfig(**sizes_of(workload), keep_window_size=workload.window))
    for layer in model.model.layers:  # 0 at first, where every bias is the same: a sliding window
        nn.init.ones_(layer.self_attn.A)
    return model


def llama_model(workload: Workload) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**sizes_of(workload)))


def t5_model(workload: Workload) -> PreTrainedModel:
    config = T5Config(
        vocab_size=workload.vocabulary,
        d_model=workload.width,
        d_kv=workload.width // workload.heads,
        d_ff=4 * workload.width,
        num_layers=workload.layers,
        num_heads=workload.heads,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    return T5ForConditionalGeneration(config)


MODELS = {"doge": doge_model, "llama": llama_model, "t5": t5_model}


def use(model: PreTrainedModel, implementation: str) -> PreTrainedModel:
    if implementation == OURS:
        return use_flash_dmattn(model)
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            part.set_attn_implementation(IMPLEMENTATIONS[implementation])
    return model


def causal_mask(seqlen: int, device: str) -> Tensor:
    return torch.ones(1, 1, seqlen, seqlen, dtype=torch.bool, device=device).tril()


def train(workload: Workload, implementation: str, setting: Setting) -> Iterator[Row]:
    model = use(model_of(workload, setting), implementation).train()
    ids = tokens_of(workload, setting)
    batch = {"input_ids": ids, "labels": ids if workload.model != "t5" else ids[:, : workload.rows].contiguous()}
    if workload.model == "doge":
        batch["use_cache"] = False
        if implementation == SDPA:
            batch["attention_mask"] = causal_mask(workload.seqlen_k, setting.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=setting.device == "cuda")

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        return loss.detach()

    loss = step().item()
    peak = peak_bytes(step, setting)
    seconds = median_seconds(step, setting)
    yield setting.row(workload.name, TRAINING_STEP, implementation, seconds=seconds, peak_bytes=peak, loss=loss)


def attention(workload: Workload, implementation: str, setting: Setting) -> Iterator[Row]:
    """One layer's attention as T5 calls it: no scaling, a bias with the heads innermost, shared by the batch."""
    heads, head_dim = workload.heads, workload.width // workload.heads
    dtype = DTYPES[setting.dtype]
    make = partial(torch.randn, device=setting.device, dtype=dtype)
    torch.manual_seed(setting.seed)
    query = make(workload.batch, heads, workload.rows, head_dim, requires_grad=True)
    key, value = (make(workload.batch, heads, workload.seqlen_k, head_dim, requires_grad=True) for _ in range(2))
    dout = make(workload.batch, workload.rows, heads, head_dim)
    is_causal, leaves, mask = workload.kind == "decoder", [query, key, value], None
    if workload.kind == "cross":
        bias = torch.zeros(1, heads, workload.rows, workload.seqlen_k, device=setting.device, dtype=dtype)
    else:
        weights = make(workload.rows, workload.seqlen_k, heads, requires_grad=True)
        leaves.append(weights)
        bias = rearrange(weights, "rows keys heads -> 1 heads rows keys")
    name = IMPLEMENTATIONS[implementation]
    function = AttentionInterface().get_interface(name, modeling_t5.eager_attention_forward)
    layer = nn.Module()
    layer.is_causal = is_causal
    if is_causal and implementation == EAGER:
        hidden = ~causal_mask(workload.rows, setting.device)
        mask = torch.zeros(hidden.shape, dtype=dtype, device=setting.device)
        mask = mask.masked_fill(hidden, torch.finfo(dtype).min)

    def both() -> object:
        out, _ = function(layer, query, key, value, mask, scaling=1.0, position_bias=bias)
        return torch.autograd.grad(out, leaves, dout, retain_graph=True)

    seconds, peak = median_seconds(both, setting), peak_bytes(both, setting)
    yield setting.row(workload.name, BOTH, implementation, seconds=seconds, peak_bytes=peak)


def generate(workload: Workload, implementation: str, setting: Setting) -> Iterator[Row]:
    """A row for each kind of cache."""
    model = model_of(workload, setting).eval()
    for kind in CACHES:
        name = f"{workload.name}, {kind} cache"
        try:
            rate = tokens_per_second(model, workload, implementation, kind, setting)
            seconds = workload.batch / rate
            yield setting.row(name, TOKEN, implementation, seconds=seconds, tokens_per_second=rate)
        except Exception as error:
            yield setting.row(name, TOKEN, implementation, refusal=sentence(error))
        free_memory(setting.device)


@torch.no_grad()
def tokens_per_second(
    model: PreTrainedModel, workload: Workload, implementation: str, kind: str, setting: Setting
) -> float:
    """The prompt always goes through flash_dmattn; only what is generated after it is timed."""
    prompt = tokens_of(workload, setting)
    if kind == STATIC:
        room = workload.seqlen_k + WARM_UP_TOKENS + workload.new_tokens + 8
        cache = StaticCache(config=model.config, max_cache_len=room)
    else:
        cache = DynamicCache(config=model.config)
    logits = use(model, OURS)(prompt, **{CACHE: cache}, logits_to_keep=1).logits
    use(model, implementation)

    def go_on(ids: Tensor, tokens: int) -> Tensor:
        options = {CACHE: cache, "do_sample": False, "pad_token_id": 0}
        return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, **options)

    ids = go_on(torch.cat([prompt, logits[:, -1:].argmax(-1)], dim=1), WARM_UP_TOKENS)
    return workload.batch * workload.new_tokens / seconds_of(partial(go_on, ids, workload.new_tokens), setting)


def measure(
    measure_one: Callable, direction: str, workload: Workload, setting: Setting, implementations=tuple(IMPLEMENTATIONS)
) -> list[Row]:
    """The rows of every implementation, or its reason why there are none."""
    rows = []
    for implementation in setting.selected or implementations:
        torch.compiler.reset()
        try:
            rows += measure_one(workload, implementation, setting)
        except Exception as error:
            rows.append(setting.row(workload.name, direction, implementation, refusal=sentence(error)))
        free_memory(setting.device)
    return rows


def start(options) -> bool:
    register()
    return True


def suite(name: str, workloads: list, measure_one: Callable, direction: str, demands: list[Demand]) -> Suite:
    return Suite(
        name,
        __doc__,
        dict.fromkeys(("cpu", "cuda"), workloads),
        partial(measure, measure_one, direction),
        tuple(IMPLEMENTATIONS),
        {"cuda": demands},
        samples=10,
        start=start,
    )


SUITES = {
    "train": suite("train", TRAIN, train, TRAINING_STEP, TRAIN_DEMANDS),
    "attention": suite("attention", ATTENTION, attention, BOTH, ATTENTION_DEMANDS),
    "generate": suite("generate", GENERATE, generate, TOKEN, []),
}
