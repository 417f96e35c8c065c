"""What do models of transformers take with attn_implementation="flash_dmattn", beside eager attention and SDPA?

    python benchmarks/models_performance.py --device cuda --json models.json
    python benchmarks/models_performance.py --device cuda --check           # exit status 1 where less than asked for
    python benchmarks/models_performance.py --part train --workload Doge    # only these
    python benchmarks/models_performance.py --device cpu --shrink 32

train: a step of training, forward, loss, backward and AdamW, and the most memory that it takes, weights and all. Random
    weights and tokens, no padding. SDPA gets Doge's causal mask from here: transformers 5.17 leaves it out there.
attention: T5's attention alone, forward and backward with the gradient of the position bias, which T5 has within its
    encoder and its decoder, but not from one to the other.
generate: tokens a second of model.generate, greedy, behind a prompt of Sk tokens, of which the time is not counted.
    Where generate compiles, on CUDA with a static cache, so does this; that is not counted either.

Times are medians. What fails or has no memory says so in its place; the rest goes on.
"""

from __future__ import annotations

import gc
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch
from einops import rearrange
from problem import DTYPES
from report import (
    add_common,
    argument_parser,
    console,
    describe,
    dtype_of,
    environment,
    parse,
    progress,
    require_workloads,
    sentence,
    write_json,
)
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table
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

TRAIN, ATTENTION, GENERATE = PARTS = ("train", "attention", "generate")
OURS, SDPA, EAGER = IMPLEMENTATIONS = ("flash_dmattn", "sdpa", "eager")
DYNAMIC, STATIC = CACHES = ("dynamic", "static")
GIB = 2**30
NEW_TOKENS, WARM_UP_TOKENS = 64, 8


@dataclass(frozen=True)
class Workload:
    """Widths are those of the issue's models; `shrunk` divides them for a trial."""

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


def t5(name: str, seqlen_k: int, seqlen_q: int, **options) -> Workload:
    sizes = {"width": 512, "heads": 8, "kv_heads": 8, "layers": 6, "vocabulary": 32128}
    return Workload(name, "t5", seqlen_k, seqlen_q, batch=4, **sizes, **options)


WORKLOADS = {
    TRAIN: [
        Workload("Doge B2 S8192 w1024", "doge", 8192, batch=2, window=1024, vocabulary=8192),
        t5("T5 S2048, S1024", 2048, 1024),
    ],
    ATTENTION: [
        t5("T5 encoder S2048", 2048, 2048, kind="encoder"),
        t5("T5 decoder S1024", 1024, 1024, kind="decoder"),
        t5("T5 cross S1024 Sk2048", 2048, 1024, kind="cross"),
    ],
    GENERATE: [
        Workload(f"{name} B{batch} Sk{seqlen}", name.lower(), seqlen, batch=batch, window=2048)
        for name in ("Doge", "Llama")
        for seqlen in (8192, 131072)
        for batch in (1, 8)
    ],
}


def shrunk(workload: Workload, by: int) -> Workload:
    if by == 1:
        return workload
    lengths = {name: max(8, getattr(workload, name) // by) for name in ("seqlen_k", "seqlen_q", "window", "vocabulary")}
    lengths = {name: size for name, size in lengths.items() if getattr(workload, name)}
    width = max(8, workload.width // by // workload.heads // 8 * 8) * workload.heads
    return replace(workload, **lengths, width=width, layers=2, new_tokens=max(2, NEW_TOKENS // by))


# What --check asks for


@dataclass(frozen=True)
class Demand:
    part: str
    workload: str  # how its name begins
    quantity: str  # "seconds" or "gib"
    at_most: float  # times the better of the peers
    peers: tuple[str, ...] = (SDPA, EAGER)


DEMANDS = [
    Demand(TRAIN, "Doge", "seconds", 1 / 5, (SDPA,)),
    Demand(TRAIN, "Doge", "gib", 1 / 4, (SDPA,)),
    Demand(TRAIN, "T5", "seconds", 1.0),
    Demand(TRAIN, "T5", "gib", 0.6),
    Demand(ATTENTION, "T5 encoder", "seconds", 1 / 2),
    Demand(ATTENTION, "T5 decoder", "seconds", 1 / 2),  # across them T5 has no position bias
]


@dataclass(frozen=True)
class Figure:
    workload: str
    implementation: str
    seconds: float | None = None
    gib: float | None = None  # at the peak, on CUDA
    loss: float | None = None
    tokens_per_second: float | None = None
    refusal: str = ""  # why there is none


def by_workload(figures: list[Figure]) -> dict[str, dict[str, Figure]]:
    groups: dict[str, dict[str, Figure]] = {}
    for figure in figures:
        groups.setdefault(figure.workload, {})[figure.implementation] = figure
    return groups


def missed(part: str, figures: list[Figure]) -> Iterator[str]:
    """A sentence for each figure that was not reached, or not measured."""
    for workload, group in by_workload(figures).items():
        for demand in DEMANDS:
            if demand.part != part or not workload.startswith(demand.workload):
                continue
            best = min((number(group.get(peer), demand.quantity) for peer in demand.peers), default=math.nan)
            taken = number(group.get(OURS), demand.quantity, math.nan) / best
            if not taken <= demand.at_most:
                peers = " or ".join(demand.peers)
                what = f"{taken:.2f} x the {demand.quantity} of {peers}, at most {demand.at_most:.2f} are asked for"
                yield f"{part}, {workload}: {what}"


def number(figure: Figure | None, quantity: str, otherwise: float = math.inf) -> float:
    """Of a peer that could not do it, or had no memory, infinity."""
    value = None if figure is None else getattr(figure, quantity)
    return otherwise if value is None else value


# Measuring


@dataclass(frozen=True)
class Setting:
    device: str
    dtype: torch.dtype
    samples: int
    seed: int

    @property
    def on_cuda(self) -> bool:
        return self.device == "cuda"

    def wait(self) -> None:
        if self.on_cuda:
            torch.cuda.synchronize()

    def seconds(self, call: Callable[[], object]) -> float:
        self.wait()
        started = time.perf_counter()
        call()
        self.wait()
        return time.perf_counter() - started

    def median_seconds(self, call: Callable[[], object]) -> float:
        call()  # compiles, allocates
        call()
        return statistics.median(self.seconds(call) for _ in range(self.samples))

    def peak_gib(self, call: Callable[[], object]) -> float | None:
        if not self.on_cuda:
            return None
        torch.cuda.reset_peak_memory_stats()
        call()
        return torch.cuda.max_memory_allocated() / GIB

    def tokens(self, batch: int, seqlen: int, vocabulary: int) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(self.seed)
        return torch.randint(3, vocabulary, (batch, seqlen), generator=generator, device=self.device)

    def model(self, workload: Workload) -> PreTrainedModel:
        torch.manual_seed(self.seed)
        with torch.device(self.device):
            return MODELS[workload.model](workload).to(self.dtype)


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
            part.set_attn_implementation(implementation)
    return model


def causal_mask(seqlen: int, device: str) -> Tensor:
    return torch.ones(1, 1, seqlen, seqlen, dtype=torch.bool, device=device).tril()


def train(workload: Workload, implementation: str, setting: Setting) -> Iterator[Figure]:
    model = use(setting.model(workload), implementation).train()
    ids = setting.tokens(workload.batch, workload.seqlen_k, workload.vocabulary)
    batch = {"input_ids": ids, "labels": ids if workload.model != "t5" else ids[:, : workload.rows].contiguous()}
    if workload.model == "doge":
        batch["use_cache"] = False
        if implementation == SDPA:
            batch["attention_mask"] = causal_mask(workload.seqlen_k, setting.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=setting.on_cuda)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        return loss.detach()

    loss = step().item()
    gib = setting.peak_gib(step)
    yield Figure(workload.name, implementation, setting.median_seconds(step), gib, loss)


def attention(workload: Workload, implementation: str, setting: Setting) -> Iterator[Figure]:
    """One layer's attention as T5 calls it: no scaling, a bias with the heads innermost, shared by the batch."""
    heads, head_dim = workload.heads, workload.width // workload.heads
    make = partial(torch.randn, device=setting.device, dtype=setting.dtype)
    torch.manual_seed(setting.seed)
    query = make(workload.batch, heads, workload.rows, head_dim, requires_grad=True)
    key, value = (make(workload.batch, heads, workload.seqlen_k, head_dim, requires_grad=True) for _ in range(2))
    dout = make(workload.batch, workload.rows, heads, head_dim)
    is_causal, leaves, mask = workload.kind == "decoder", [query, key, value], None
    if workload.kind == "cross":
        bias = torch.zeros(1, heads, workload.rows, workload.seqlen_k, device=setting.device, dtype=setting.dtype)
    else:
        weights = make(workload.rows, workload.seqlen_k, heads, requires_grad=True)
        leaves.append(weights)
        bias = rearrange(weights, "rows keys heads -> 1 heads rows keys")
    function = AttentionInterface().get_interface(implementation, modeling_t5.eager_attention_forward)
    layer = nn.Module()
    layer.is_causal = is_causal
    if is_causal and implementation == EAGER:
        hidden = ~causal_mask(workload.rows, setting.device)
        mask = torch.zeros(hidden.shape, dtype=setting.dtype, device=setting.device)
        mask = mask.masked_fill(hidden, torch.finfo(setting.dtype).min)

    def both() -> object:
        out, _ = function(layer, query, key, value, mask, scaling=1.0, position_bias=bias)
        return torch.autograd.grad(out, leaves, dout, retain_graph=True)

    yield Figure(workload.name, implementation, setting.median_seconds(both), setting.peak_gib(both))


def generate(workload: Workload, implementation: str, setting: Setting) -> Iterator[Figure]:
    """A figure for each kind of cache."""
    model = setting.model(workload).eval()
    for kind in CACHES:
        name = f"{implementation}, {kind}"
        try:
            per_second = tokens_per_second(model, workload, implementation, kind, setting)
            yield Figure(workload.name, name, workload.batch / per_second, tokens_per_second=per_second)
        except Exception as error:
            yield Figure(workload.name, name, refusal=sentence(error))
        collect(setting)


@torch.no_grad()
def tokens_per_second(
    model: PreTrainedModel, workload: Workload, implementation: str, kind: str, setting: Setting
) -> float:
    """The prompt goes through flash_dmattn, whoever generates behind it: only that is timed."""
    prompt = setting.tokens(workload.batch, workload.seqlen_k, workload.vocabulary)
    if kind == STATIC:
        room = workload.seqlen_k + WARM_UP_TOKENS + workload.new_tokens + 8
        cache = StaticCache(config=model.config, max_cache_len=room)
    else:
        cache = DynamicCache(config=model.config)
    logits = use(model, OURS)(prompt, past_key_values=cache, logits_to_keep=1).logits
    use(model, implementation)

    def go_on(ids: Tensor, tokens: int) -> Tensor:
        options = {"past_key_values": cache, "do_sample": False, "pad_token_id": 0}
        return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, **options)

    ids = go_on(torch.cat([prompt, logits[:, -1:].argmax(-1)], dim=1), WARM_UP_TOKENS)
    return workload.batch * workload.new_tokens / setting.seconds(partial(go_on, ids, workload.new_tokens))


MEASURES = {TRAIN: train, ATTENTION: attention, GENERATE: generate}


def collect(setting: Setting) -> None:
    gc.collect()
    if setting.on_cuda:
        torch.cuda.empty_cache()


def measured(part: str, workload: Workload, implementation: str, setting: Setting) -> list[Figure]:
    """Its figures, or one that says why there are none."""
    torch.compiler.reset()
    try:
        figures = list(MEASURES[part](workload, implementation, setting))
    except Exception as error:
        figures = [Figure(workload.name, implementation, refusal=sentence(error))]
    collect(setting)
    return figures


# What is shown


def table(part: str, figures: list[Figure]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column(part, no_wrap=True)
    table.add_column("", no_wrap=True)
    columns = ("ms a token", "tokens/s") if part == GENERATE else ("ms", "GiB", "loss")
    for column in columns:
        table.add_column(column, justify="right")
    for figure in figures:
        seconds = "" if figure.seconds is None else f"{1e3 * figure.seconds:.2f}"
        rest = (figure.tokens_per_second,) if part == GENERATE else (figure.gib, figure.loss)
        cells = [seconds, *("" if x is None else f"{x:.2f}" for x in rest)]
        if figure.refusal:
            cells = [f"[yellow]{escape(figure.refusal[:60])}[/]"]
        table.add_row(escape(figure.workload), escape(figure.implementation), *cells)
    return table


def main(arguments: list[str] | None = None) -> int:
    """The exit status: 1 where ours failed, or where --check asks for more."""
    parser = argument_parser(__doc__, backends=None)
    parser.add_argument("--part", action="append", choices=PARTS, help="may be repeated (default: all)")
    parser.add_argument(
        "--implementation", action="append", choices=IMPLEMENTATIONS, help="may be repeated (default: all)"
    )
    add_common(
        parser,
        dtype={},
        workload={},
        shrink={"help": "divide lengths and widths"},
        threads={},
        samples={"default": 10, "help": "(default: %(default)s)"},
        check={"help": "exit status 1 where a model is slower than was asked for"},
    )
    options = parse(parser, arguments)
    if options.check and (options.device == "cpu" or options.shrink > 1):
        parser.error("--check asks for what is measured on CUDA, without --shrink")
    work = {
        part: [shrunk(workload, options.shrink) for workload in WORKLOADS[part] if options.workload in workload.name]
        for part in options.part or PARTS
    }
    require_workloads(parser, options, [workload for workloads in work.values() for workload in workloads])
    torch.set_num_threads(options.threads)
    register()

    dtype = dtype_of(options)
    setting = Setting(options.device, DTYPES[dtype], options.samples, options.seed)
    on, where = console(), environment(options.device)
    on.print(f"{describe(where)}, transformers {where['transformers']}, {dtype}", highlight=False)
    implementations = options.implementation or IMPLEMENTATIONS
    results: dict[str, list[Figure]] = {part: [] for part in work}
    failures: list[str] = []

    def write() -> None:
        if options.json:
            parts = {part: list(map(asdict, figures)) for part, figures in results.items()}
            sizes = {part: list(map(asdict, workloads)) for part, workloads in work.items()}
            about = {"dtype": dtype, "shrink": options.shrink, "seed": options.seed, "workloads": sizes}
            write_json(options.json, where, **about, parts=parts, missed=failures)

    with progress(on) as bar:
        task = bar.add_task("", total=len(implementations) * sum(map(len, work.values())))
        for part, workloads in work.items():
            for workload in workloads:
                for implementation in implementations:
                    bar.update(task, description=f"{part}, {workload.name}, {implementation}")
                    results[part] += measured(part, workload, implementation, setting)
                    write()  # what there is, should the rest not come to its end
                    bar.advance(task)

    for part, figures in results.items():
        if figures:
            on.print(table(part, figures))
        if options.check:
            failures += missed(part, figures)
    write()
    for failure in failures:
        on.print(f"[bold red]{escape(failure)}[/]")
    ours = [figure for figures in results.values() for figure in figures if figure.implementation.startswith(OURS)]
    return 1 if failures or any(figure.refusal for figure in ours) else 0


if __name__ == "__main__":
    sys.exit(main())
