"""Serve many requests at once with dynamic-mask attention over a paged cache: continuous batching in a small loop.

    python examples/serve.py                                   # seconds on two CPU cores
    python examples/serve.py --device cuda --requests 256 --batch 64 --rows 4096 --page-size 64 --pages 4096 \
        --prompt 4000 --new-tokens 200 --window 512 --dim 1024 --layers 8 --heads 16 --kv-heads 4

Requires the extra [bench]: pip install --no-build-isolation '.[bench]'.

Requests arrive over time. A step is one call of the model over up to `--rows` packed rows: one token of each request
that decodes, and the rest for chunks of prompts. `flash_dmattn_with_kvcache` writes the new keys, values and biases
into pages, and each row attends to the `window` keys of largest bias in the pages of its request. A request that ends
returns its pages. On CUDA a step without prompts replays one CUDA graph, for all lengths.

The model is that of train_lm.py with random weights; prompts are bytes of a text. At the end every request is generated
again, alone and without a cache. On the CPU the tokens are the same. On CUDA, in bfloat16, rounding may select other
keys.
"""

import copy
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.live import Live
from rich.table import Table
from torch import Tensor
from train_lm import LanguageModel, argument_parser, check_positive, load_text, option

from flash_dmattn import flash_dmattn_func, flash_dmattn_with_kvcache


@dataclass(frozen=True)
class Config:
    """Every field is also a command line argument."""

    text: str | None = option(None, "text file that prompts are taken from (default: the topics of Python's help)")
    requests: int = option(16, "requests to serve")
    arrivals: float = option(1.0, "requests that arrive in a step")
    prompt: int = option(128, "longest prompt, in bytes; the shortest is an eighth of it")
    new_tokens: int = option(32, "most bytes to generate; the fewest are a quarter of it")
    batch: int = option(8, "requests in a step")
    rows: int = option(64, "rows in a step")
    page_size: int = option(16, "keys in a page, 16 to 256")
    pages: int = option(48, "pages of the cache")
    window: int = option(32, "keys that each query attends to")
    dim: int = option(64, "width of the model")
    layers: int = option(2, "transformer blocks")
    heads: int = option(4, "query heads")
    kv_heads: int = option(2, "key/value heads")
    device: str = option("cpu", "device; cuda in bfloat16, cpu in float64", choices=["cpu", "cuda"])
    seed: int = option(0, "seed of weights and requests")
    skip_check: bool = option(False, "do not generate every request again, alone", action="store_true")

    def __post_init__(self):
        sizes = ("requests", "arrivals", "prompt", "new_tokens", "batch", "rows", "pages", "window", "dim", "layers")
        check_positive(self, *sizes, "heads", "kv_heads")
        if not 16 <= self.page_size <= 256:
            raise ValueError(f"page_size must be from 16 to 256, got {self.page_size}")
        if self.heads % self.kv_heads or self.dim % (2 * self.heads):
            raise ValueError(f"heads ({self.heads}) must be a multiple of kv_heads, and dim ({self.dim}) of 2 * heads")
        if self.batch > self.rows:
            raise ValueError(f"batch must be at most rows ({self.rows}), got {self.batch}")
        if self.pages < self.pages_of_longest:
            raise ValueError(f"pages must hold a request, {self.pages_of_longest}, got {self.pages}")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("device cuda: PyTorch finds no CUDA device")

    # Further options of LanguageModel and load_text.
    backend, deterministic = None, False

    @property
    def seq_len(self) -> int:
        return self.prompt + self.new_tokens

    @property
    def pages_of_longest(self) -> int:
        return -(-self.seq_len // self.page_size)

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device == "cuda" else torch.float64


# Requests


@dataclass
class Request:
    """Attributes: the number, prompt and new tokens wanted; the tokens so far, the pages, and the keys in them."""

    number: int
    prompt: list[int]
    wanted: int
    tokens: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    cached: int = 0

    @property
    def decodes(self) -> bool:
        return bool(self.tokens)

    @property
    def is_done(self) -> bool:
        return len(self.tokens) == self.wanted

    def next_tokens(self, most: int) -> list[int]:
        """The tokens that are not in the cache: the last one, or a chunk of the prompt."""
        return self.tokens[-1:] if self.decodes else self.prompt[self.cached : self.cached + most]


def make_requests(config: Config) -> list[Request]:
    text = load_text(config)[0]
    generator = torch.Generator().manual_seed(config.seed)

    def between(least: int, most: int) -> int:
        return int(torch.randint(max(1, least), most + 1, (), generator=generator))

    requests = []
    for number in range(config.requests):
        length, wanted = between(config.prompt // 8, config.prompt), between(config.new_tokens // 4, config.new_tokens)
        start = between(0, len(text) - length)
        requests.append(Request(number, text[start : start + length].tolist(), wanted))
    return requests


# The model over the paged cache


class Batch(NamedTuple):
    """The packed rows of a step, as tensors on the device.

    Attributes:
        tokens, positions: int64 (rows).
        last: int64 (B), each request's last row.
        cu_seqlens: int32 (B + 1), the offsets of the requests' rows.
        cache_seqlens: int32 (B), the keys in the cache.
        block_table: int32 (B, pages of the longest request). Unused entries are -1.
    """

    tokens: Tensor
    positions: Tensor
    last: Tensor
    cu_seqlens: Tensor
    cache_seqlens: Tensor
    block_table: Tensor

    @classmethod
    def of(cls, chunks: list[tuple[Request, list[int]]], config: Config) -> "Batch":
        tokens, positions, offsets, table = [], [], [0], []
        for request, chunk in chunks:
            tokens += chunk
            positions += range(request.cached, request.cached + len(chunk))
            offsets.append(len(tokens))
            table.append(request.pages + [-1] * (config.pages_of_longest - len(request.pages)))
        last, cached = [offset - 1 for offset in offsets[1:]], [request.cached for request, _ in chunks]
        return cls(
            *(torch.tensor(x, device=config.device) for x in (tokens, positions, last)),
            *(torch.tensor(x, dtype=torch.int32, device=config.device) for x in (offsets, cached, table)),
        )

    @classmethod
    def static(cls, config: Config) -> "Batch":
        """The tensors of a CUDA graph: one row of each of `batch` requests, which have no pages yet."""
        nothing = Request(0, [], 0)
        return cls.of([(nothing, [0])] * config.batch, config)


class PagedAttention:
    """Stands in for flash_dmattn_func in a layer of the model: new tokens attend to the pages of their requests.

    Attributes:
        keys, values: (pages, page_size, Hkv, D).
        biases: float32 (pages, page_size, Hkv), those of a head contiguous in a page.
        batch, max_rows: of the step; max_rows bounds the rows of a request.
    """

    def __init__(self, config: Config):
        shape = (config.pages, config.page_size, config.kv_heads)
        head_dim = config.dim // config.heads
        self.keys, self.values = (
            torch.full((*shape, head_dim), torch.nan, dtype=config.dtype, device=config.device) for _ in range(2)
        )
        heads_first = (config.pages, config.kv_heads, config.page_size)
        self.biases = torch.full(heads_first, torch.nan, device=config.device).transpose(1, 2)
        self.batch, self.max_rows = None, 0

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, *, attn_bias: Tensor, **options) -> Tensor:
        """The model's call, of one batch element with the rows of all requests: out (1, rows, H, D)."""
        return flash_dmattn_with_kvcache(
            *(query[0], self.keys, self.values, key[0], value[0]),
            bias_cache=self.biases,
            bias=attn_bias[0, :, 0].T.float(),
            cache_seqlens=self.batch.cache_seqlens,
            block_table=self.batch.block_table,
            cu_seqlens_q=self.batch.cu_seqlens,
            max_seqlen_q=self.max_rows,
            **options,
        )[None]


class Server:
    """The model and its pages; a step from a batch to the next token of each request."""

    def __init__(self, model: LanguageModel, config: Config):
        self.model, self.config = copy.deepcopy(model), config
        self.layers = [PagedAttention(config) for _ in self.model.blocks]
        for block, layer in zip(self.model.blocks, self.layers):
            block.attention.attention = layer
        self.graph, self.static, self.next = None, None, None

    @torch.no_grad()
    def forward(self, batch: Batch, max_rows: int) -> Tensor:
        model = self.model
        for layer in self.layers:
            layer.batch, layer.max_rows = batch, max_rows
        x = model.embedding(batch.tokens)[None]
        for block in model.blocks:
            x = block(x, model.cos[batch.positions], model.sin[batch.positions])
        return F.linear(model.norm(x[0, batch.last]), model.embedding.weight).argmax(-1)

    def step(self, batch: Batch, max_rows: int) -> list[int]:
        """The next token of each request."""
        if self.config.device == "cuda" and max_rows == 1:
            return self.replay(batch)[: len(batch.last)].tolist()
        return self.forward(batch, max_rows).tolist()

    def replay(self, batch: Batch) -> Tensor:
        """A step of one row each, as a CUDA graph of `batch` requests. Those that are missing have no pages: their
        tokens are not written, and their results are not used."""
        if self.static is None:
            self.static = Batch.static(self.config)
        for static, tensor in zip(self.static, batch):
            static[: len(tensor)] = tensor
        self.static.block_table[len(batch.last) :] = -1
        if self.graph is None:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self.forward(self.static, 1)
            torch.cuda.current_stream().wait_stream(stream)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.next = self.forward(self.static, 1)
        self.graph.replay()
        return self.next


# The loop


class Step(NamedTuple):
    """What the loop did so far."""

    steps: int
    waiting: int
    active: list[Request]
    done: list[Request]
    prompt_tokens: int
    new_tokens: int
    pages_in_use: int
    pages_allocated: int
    seconds: float


def serve(server: Server, requests: list[Request], config: Config) -> Iterator[Step]:
    """Continuous batching: in each step requests arrive, start where pages are free, compute, and end."""
    coming, waiting, active, done = deque(requests), deque(), [], []
    free = deque(range(config.pages))
    arrived, steps, prompt_tokens, new_tokens, pages_allocated, started = 0.0, 0, 0, 0, 0, time.perf_counter()
    while coming or waiting or active:
        arrived += config.arrivals
        while coming and len(requests) - len(coming) < arrived:
            waiting.append(coming.popleft())
        while waiting and len(active) < config.batch:
            needed = -(-(len(waiting[0].prompt) + waiting[0].wanted) // config.page_size)
            if needed > len(free):
                break
            request = waiting.popleft()
            request.pages = [free.popleft() for _ in range(needed)]
            pages_allocated += needed
            active.append(request)

        chunks = schedule(active, config.rows)
        if chunks:
            batch = Batch.of(chunks, config)
            tokens = server.step(batch, max(len(chunk) for _, chunk in chunks))
            for (request, chunk), token in zip(chunks, tokens):
                prompt_tokens += 0 if request.decodes else len(chunk)
                request.cached += len(chunk)
                if request.cached >= len(request.prompt):
                    request.tokens.append(token)
                    new_tokens += 1
        in_use = config.pages - len(free)
        for request in [request for request in active if request.is_done]:
            active.remove(request)
            done.append(request)
            free.extend(request.pages)
        steps += 1
        seconds = time.perf_counter() - started
        counts = (prompt_tokens, new_tokens, in_use, pages_allocated, seconds)
        yield Step(steps, len(waiting), active, done, *counts)


def schedule(active: list[Request], rows: int) -> list[tuple[Request, list[int]]]:
    """The requests of a step and their rows: first those that decode, then prompts in order of arrival."""
    chunks = []
    for request in sorted(active, key=lambda request: not request.decodes):
        if chunk := request.next_tokens(rows):
            chunks.append((request, chunk))
            rows -= len(chunk)
    return chunks


def table_of(step: Step, config: Config) -> Table:
    table = Table("step", "waiting", "prefill", "decode", "done", "pages", "prompt tok/s", "new tok/s")
    decode = sum(request.decodes for request in step.active)
    table.add_row(
        *map(str, (step.steps, step.waiting, len(step.active) - decode, decode, len(step.done))),
        f"{step.pages_in_use}/{config.pages}",
        *(f"{tokens / step.seconds:.0f}" for tokens in (step.prompt_tokens, step.new_tokens)),
    )
    return table


# The check


@torch.no_grad()
def generate_alone(model: LanguageModel, request: Request, device: str) -> list[int]:
    """The request's tokens without a cache: a whole forward pass for each."""
    tokens = list(request.prompt)
    for _ in range(request.wanted):
        tokens.append(int(model(torch.tensor([tokens], device=device))[0, -1].argmax()))
    return tokens[len(request.prompt) :]


def in_float32(query: Tensor, key: Tensor, value: Tensor, *, attn_bias: Tensor, **options) -> Tensor:
    """flash_dmattn_func with biases as PagedAttention keeps them. On the CPU float32 makes equal tokens' biases equal,
    which float64 matrix products of other sizes round differently. So both select the same keys."""
    return flash_dmattn_func(query, key, value, attn_bias=attn_bias.float(), **options)


def build_model(config: Config) -> LanguageModel:
    torch.manual_seed(config.seed)
    model = LanguageModel(config)
    cos, sin = (table.to(config.device) for table in (model.cos, model.sin))
    model = model.to(config.device, config.dtype).eval()
    model.cos, model.sin = cos, sin  # in float32
    for block in model.blocks:
        block.attention.attention = in_float32
    return model


def main(arguments: list[str] | None = None) -> int:
    parser = argument_parser(Config, __doc__)
    try:
        config = Config(**vars(parser.parse_args(arguments)))
        requests = make_requests(config)
    except (ValueError, OSError) as error:
        parser.error(str(error))

    console, model = Console(), build_model(config)
    server = Server(model, config)
    with Live(console=console, refresh_per_second=8) as live:
        for step in serve(server, requests, config):
            live.update(table_of(step, config))
    console.line()
    console.print(
        f"{len(step.done)} requests: {step.prompt_tokens} prompt tokens and {step.new_tokens} new ones in "
        f"{step.seconds:.1f} s; {step.pages_allocated} pages allocated out of {config.pages}"
    )
    if config.skip_check:
        return 0
    same = sum(generate_alone(model, request, config.device) == request.tokens for request in requests)
    console.print(f"{same} of {len(requests)} requests have the tokens that they have alone")
    return 0 if same == len(requests) or config.device == "cuda" else 1


if __name__ == "__main__":
    raise SystemExit(main())
