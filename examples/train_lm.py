"""Train a small byte-level language model with dynamic-mask attention.

    python examples/train_lm.py --plot loss.png                          # about a minute on two CPU cores
    python examples/train_lm.py --device cuda --seq-len 1024 --window 256 --text shakespeare.txt
    torchrun --nproc-per-node 4 examples/train_lm.py --context-parallel 2    # 2-way data, 2-way context parallelism

Requires the extra [bench]: pip install --no-build-isolation '.[bench]'.

The model is a decoder-only transformer (RMSNorm, rotary embeddings, SwiGLU, tied embeddings). Its attention learns
which keys to keep: every token has one bias per key/value head. Each query attends to the `window` causal keys of
largest bias. The bias is also added to the scores, so it is trained through its gradient. No seq_len x seq_len mask is
created; attention costs seq_len x window.

Under torchrun, `--context-parallel` ranks share each sequence and the other mesh dimension is data parallel. FSDP2
shards the weights and the optimizer state. A step is the same as with one process.
"""

import argparse
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from pydoc_data import topics
from typing import get_args

import torch
import torch.distributed as dist
import torch.nn.functional as F
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from flash_dmattn import flash_dmattn_func_auto
from flash_dmattn.backends import Backend
from flash_dmattn.parallel import context_parallel_attention, shard

VOCABULARY = 256  # bytes, so no tokenizer is needed
PROMPT, CONTINUATION = 48, 160  # bytes of held-out text in a prompt, and of sampled text
DTYPES = ["float32", "bfloat16"]
BACKENDS = get_args(Backend)


def option(default, help: str, **argparse_options):
    """A field of Config with the options of its command line argument."""
    kind = str if default is None else type(default)
    return field(default=default, metadata={"help": help, "type": kind, **argparse_options})


def check_positive(config, *names: str) -> None:
    for name in names:
        if not getattr(config, name) > 0:
            raise ValueError(f"{name} must be positive, got {getattr(config, name)}")


def check_device_and_plot(config) -> None:
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device cuda: PyTorch finds no CUDA device")
    if config.plot and not Path(config.plot).absolute().parent.is_dir():
        raise ValueError(f"plot: there is no folder {Path(config.plot).parent}")


def check_sizes(config, width: str) -> None:
    """Raises ValueError for sizes that do not fit; `width` names the field of the model width."""
    check_positive(config, "steps", "batch_size", "seq_len", "window", width, "layers", "heads", "kv_heads", "lr")
    if config.samples < 0:
        raise ValueError(f"samples must not be negative, got {config.samples}")
    if config.heads % config.kv_heads:
        raise ValueError(f"heads ({config.heads}) must be a multiple of kv_heads ({config.kv_heads})")
    if (size := getattr(config, width)) % (2 * config.heads):
        raise ValueError(f"{width} ({size}) must be a multiple of 2 * heads ({2 * config.heads}): rotary pairs")
    check_device_and_plot(config)


@dataclass(frozen=True)
class Config:
    """Every field is also a command line argument."""

    text: str | None = option(None, "text file to train on (default: the topics of Python's help)")
    steps: int = option(300, "optimizer steps")
    batch_size: int = option(16, "sequences per step, over all ranks")
    seq_len: int = option(128, "bytes in a sequence")
    window: int = option(32, "keys that each query attends to")
    dim: int = option(128, "width of the model")
    layers: int = option(4, "transformer blocks")
    heads: int = option(4, "query heads")
    kv_heads: int = option(2, "key/value heads")
    lr: float = option(3e-3, "peak learning rate")
    device: str = option("cpu", "device to train on", choices=["cpu", "cuda"])
    dtype: str | None = option(None, "autocast dtype (default: float32 on cpu, bfloat16 on cuda)", choices=DTYPES)
    backend: str | None = option(None, "attention backend (default: that of the device)", choices=BACKENDS)
    seed: int = option(0, "seed of weights, batches and samples")
    plot: str | None = option(None, "PNG file for the loss curve (default: none)")
    samples: int = option(3, "texts to generate at the end")
    context_parallel: int = option(1, "ranks per sequence, under torchrun")
    deterministic: bool = option(False, "bitwise reproducible losses for a seed", action="store_true")

    def __post_init__(self):
        check_sizes(self, width="dim")
        if self.backend in ("cpu", "cuda") and self.backend != self.device:
            raise ValueError(f"backend {self.backend} does not run on device {self.device}")
        if self.backend == "flex" and self.device == "cpu":
            raise ValueError("backend flex needs device cuda: PyTorch's FlexAttention has no backward on the CPU")
        if self.device == "cuda" and self.dtype == "float32" and self.backend in (None, "cuda"):
            raise ValueError("the CUDA kernels do not support float32: use dtype bfloat16 or another backend")
        if self.context_parallel < 1:
            raise ValueError(f"context_parallel must be positive, got {self.context_parallel}")
        if self.seq_len % self.context_parallel:
            raise ValueError(f"context_parallel ({self.context_parallel}) must divide seq_len ({self.seq_len})")
        if self.context_parallel > 1 and self.backend not in (None, self.device):
            raise ValueError(f"context_parallel requires backend {self.device}, got {self.backend}")

    def autocast(self) -> torch.autocast:
        dtype = getattr(torch, self.dtype or {"cpu": "float32", "cuda": "bfloat16"}[self.device])
        return torch.autocast(self.device, dtype, enabled=dtype != torch.float32)


# Distributed training


def init_mesh(config: Config) -> DeviceMesh | None:
    """The ranks of torchrun as a mesh ("data", "context"); None for a single process."""
    size = int(os.environ.get("WORLD_SIZE", 1))
    if size % config.context_parallel:
        raise ValueError(f"context_parallel ({config.context_parallel}) must divide the number of ranks ({size})")
    data = size // config.context_parallel
    if config.batch_size % data:
        raise ValueError(f"batch_size ({config.batch_size}) must be a multiple of the {data} ranks that share it")
    if size == 1:
        return None
    if config.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    return init_device_mesh(config.device, (data, config.context_parallel), mesh_dim_names=("data", "context"))


def local_shard(batch: Tensor, mesh: DeviceMesh | None) -> Tensor:
    """This rank's shard of a batch (B, S), over sequences and within each sequence."""
    return batch if mesh is None else shard(shard(batch, 0, group=mesh["data"]), 1, group=mesh["context"])


def mean_over_ranks(loss: Tensor, mesh: DeviceMesh | None) -> float:
    """Synchronizes the device."""
    loss = loss.detach()
    if mesh is not None:
        dist.all_reduce(loss)
        loss = loss / dist.get_world_size()
    return loss.item()


# The model


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of x (B, S, H, D): rotates the pairs (x[d], x[d + D/2])."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1).type_as(x)


class DynamicMaskAttention(nn.Module):
    def __init__(self, config: Config, attention: Callable[..., Tensor]):
        super().__init__()
        self.attention = attention
        self.window = config.window
        self.head_dim = head_dim = config.dim // config.heads
        self.q_proj = nn.Linear(config.dim, config.heads * head_dim, bias=False)
        self.k_proj = nn.Linear(config.dim, config.kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(config.dim, config.kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(config.heads * head_dim, config.dim, bias=False)
        self.dt_proj = nn.Linear(config.kv_heads * head_dim, config.kv_heads, bias=False)
        # Not zero: dt_proj's gradient is proportional to A, and a constant bias ranks no key.
        self.A = nn.Parameter(torch.ones(config.kv_heads))

    def key_bias(self, value: Tensor) -> Tensor:
        """The key bias (B, Hkv, 1, S) of values (B, S, Hkv, D): exp(A softplus(W_dt v)), the importance of each key."""
        # In the precision of the weights: in bfloat16 many biases would tie.
        with torch.autocast(value.device.type, enabled=False):
            dt = F.softplus(self.dt_proj(value.flatten(2).type_as(self.dt_proj.weight)))
            return torch.exp(self.A * dt).transpose(1, 2).unsqueeze(2)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        query, key, value = (
            proj(x).unflatten(-1, (-1, self.head_dim)) for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = apply_rotary(query, cos, sin), apply_rotary(key, cos, sin)
        bias = self.key_bias(value)
        out = self.attention(query, key, value, attn_bias=bias, is_causal=True, window_size=self.window)
        return self.o_proj(out.flatten(2))


class SwiGLU(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        hidden = 8 * math.ceil(dim / 3)  # as many parameters as two matrices of width 4 dim
        self.gate_proj = nn.Linear(dim, hidden, bias=False)
        self.up_proj = nn.Linear(dim, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, config: Config, attention: Callable[..., Tensor]):
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim)
        self.attention = DynamicMaskAttention(config, attention)
        self.mlp_norm = nn.RMSNorm(config.dim)
        self.mlp = SwiGLU(config.dim)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class LanguageModel(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.start = 0  # position of the first local token
        attention = flash_dmattn_func_auto(backend=config.backend or config.device)
        self.local_attention = attention = partial(attention, deterministic=config.deterministic)
        self.embedding = nn.Embedding(VOCABULARY, config.dim)
        self.blocks = nn.ModuleList(Block(config, attention) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim)
        nn.init.normal_(self.embedding.weight, std=config.dim**-0.5)  # tied to the output head

        head_dim = config.dim // config.heads
        frequencies = 10000.0 ** -torch.arange(0, 1, 2 / head_dim)
        angles = torch.outer(torch.arange(config.seq_len), frequencies).unsqueeze(1)  # (S, 1, D/2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def set_context_parallel(self, mesh: DeviceMesh | None) -> None:
        """Shards sequences over the ranks of a one-dimensional mesh; None: whole sequences on each rank."""
        attention = self.local_attention
        if mesh is not None:
            attention = partial(context_parallel_attention, group=mesh, **attention.keywords)
        for block in self.blocks:
            block.attention.attention = attention
        self.start = 0 if mesh is None else mesh.get_local_rank() * (len(self.cos) // mesh.size())

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (B, S, VOCABULARY) of the next byte after each of tokens (B, S)."""
        positions = slice(self.start, self.start + tokens.shape[1])
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cos[positions], self.sin[positions])
        return F.linear(self.norm(x), self.embedding.weight)


# Training


def load_text(config: Config) -> tuple[Tensor, Tensor]:
    """The bytes of the text as (training, validation). The last tenth is held out."""
    text = Path(config.text).read_bytes() if config.text else "\n\n".join(topics.topics.values()).encode()
    held_out = len(text) // 10
    if held_out <= config.seq_len:
        raise ValueError(
            f"the text is too short: a tenth of its {len(text)} bytes is held out, "
            f"which must be longer than a sequence (seq_len = {config.seq_len})"
        )
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return data[:-held_out], data[-held_out:]


def random_batch(data: Tensor, config: Config, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random sequences (B, S) of the text, and their next bytes (B, S)."""
    starts = torch.randint(len(data) - config.seq_len, (config.batch_size, 1), generator=generator)
    sequences = data[starts + torch.arange(config.seq_len + 1)].to(config.device, torch.long)
    return sequences[:, :-1], sequences[:, 1:]


def loss_of(model: LanguageModel, batch: tuple[Tensor, Tensor], config: Config) -> Tensor:
    """Cross entropy in nats per byte."""
    tokens, targets = batch
    with config.autocast():
        logits = model(tokens)
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def learning_rate_factor(step: int, steps: int) -> float:
    """Linear warm-up over the first tenth of the steps, then cosine decay to 0.1."""
    warmup = max(1, steps // 10)
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return 0.55 + 0.45 * math.cos(math.pi * progress)


@dataclass(frozen=True)
class Step:
    loss: float
    validation_loss: float | None  # measured about ten times per run
    tokens_per_second: float  # average since the first step, without validation


def optimizer_step(model: nn.Module, config) -> Callable[[Tensor], None]:
    """A function of a loss: its backward, gradient clipping to norm 1 and an AdamW step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, partial(learning_rate_factor, steps=config.steps))

    def step(loss: Tensor) -> None:
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        schedule.step()

    return step


def track(steps: Iterable, config, console: Console, describe: Callable[[object], str]) -> Iterator:
    """Iterates over the steps with a progress bar of `config.steps` and a description of the last step."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=config.steps)
        for step in steps:
            progress.update(task, advance=1, description=describe(step))
            yield step


def training_steps(
    model: LanguageModel, config: Config, mesh: DeviceMesh | None, training: Tensor, validation: Tensor
) -> Iterator[Step]:
    def local_loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        return loss_of(model, tuple(local_shard(part, mesh) for part in batch), config)

    update = optimizer_step(model, config)
    generator = torch.Generator().manual_seed(config.seed)
    validation_batches = [random_batch(validation, config, generator) for _ in range(2)]
    validate_every = max(1, config.steps // 10)
    seconds = 0.0
    for step in range(1, config.steps + 1):
        started = time.perf_counter()
        loss = local_loss(random_batch(training, config, generator))  # the same batch on every rank
        update(loss)
        loss = mean_over_ranks(loss, mesh)  # synchronizes before the clock is read
        seconds += time.perf_counter() - started

        validation_loss = None
        if step == 1 or step % validate_every == 0 or step == config.steps:
            with torch.no_grad():
                losses = [local_loss(batch) for batch in validation_batches]
            validation_loss = mean_over_ranks(torch.stack(losses).mean(), mesh)
        yield Step(loss, validation_loss, step * config.batch_size * config.seq_len / seconds)


def build_model(config: Config, mesh: DeviceMesh | None = None) -> LanguageModel:
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic cuBLAS
        torch.use_deterministic_algorithms(True)
    torch.manual_seed(config.seed)
    model = LanguageModel(config).to(config.device)
    if mesh is not None:
        # Each rank's loss is the mean over its tokens. Attention returns the gradients of all ranks' losses to keys and
        # values, so FSDP's average over all ranks is the gradient of the mean over all tokens.
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        if config.context_parallel > 1:
            model.set_context_parallel(mesh["context"])
    return model


def train(config: Config) -> list[float]:
    """The training loss of every step."""
    mesh = init_mesh(config)
    return [step.loss for step in training_steps(build_model(config, mesh), config, mesh, *load_text(config))]


# Output


@torch.no_grad()
def sample(model: LanguageModel, config: Config, prompts: Tensor, temperature: float = 0.8) -> Tensor:
    """Prompts (B, S) with CONTINUATION sampled bytes each."""
    tokens = prompts.to(config.device, torch.long)
    for _ in range(CONTINUATION):
        with config.autocast():
            logits = model(tokens[:, -config.seq_len :])[:, -1]
        next_token = torch.multinomial(torch.softmax(logits.float() / temperature, dim=-1), 1)
        tokens = torch.cat([tokens, next_token], dim=1)
    return tokens


def print_samples(generate: Callable[[Tensor], Tensor], config, validation: Tensor, console: Console) -> None:
    """Prints `config.samples` prompts of held-out text and their continuations by `generate`, of prompts (B, S)."""
    prompt = min(PROMPT, config.seq_len)
    starts = torch.randint(len(validation) - prompt, (config.samples, 1))
    prompts = validation[starts + torch.arange(prompt)]
    for tokens in generate(prompts).tolist():
        text, continuation = (bytes(part).decode(errors="replace") for part in (tokens[:prompt], tokens[prompt:]))
        console.rule("sample", style="dim")
        console.print(Text(text, style="dim") + Text(continuation))


def plot_losses(steps: list[Step], path: str) -> None:
    numbers = range(1, len(steps) + 1)
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(numbers, [step.loss for step in steps], linewidth=1, alpha=0.6, label="training")
    axes.plot(numbers, [step.validation_loss for step in steps], "o", label="validation")
    axes.set(xlabel="step", ylabel="loss (nats per byte)")
    axes.legend()
    figure.savefig(path, format="png", dpi=150)


def argument_parser(config: type = Config, description: str = __doc__) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for argument in fields(config):
        options = {"default": argument.default, **argument.metadata}
        if argument.type is bool:
            del options["type"]
        elif argument.default is not None:
            options["help"] += " (default: %(default)s)"
        parser.add_argument("--" + argument.name.replace("_", "-"), **options)
    return parser


def main(arguments: list[str] | None = None) -> None:
    parser = argument_parser()
    try:
        config = Config(**vars(parser.parse_args(arguments)))
        training, validation = load_text(config)
        mesh = init_mesh(config)
        model = build_model(config, mesh)
    except (ValueError, RuntimeError, OSError) as error:
        parser.error(str(error))

    is_first = mesh is None or mesh.get_rank() == 0
    console = Console(quiet=not is_first)
    parameters = sum(p.numel() for p in model.parameters())
    console.print(f"{parameters:,} parameters; {len(training):,} training bytes, {len(validation):,} held out")

    steps = []
    run = training_steps(model, config, mesh, training, validation)
    for step in track(run, config, console, lambda x: f"loss {x.loss:.3f}  {x.tokens_per_second:,.0f} tokens/s"):
        steps.append(step)
        if step.validation_loss is not None:
            console.print(f"step {len(steps):5}  loss {step.loss:.3f}  validation {step.validation_loss:.3f}")

    if config.samples:
        model.set_context_parallel(None)  # generated sequences have any length
        print_samples(partial(sample, model, config), config, validation, console)
    console.rule(style="dim")
    console.print(f"{steps[-1].tokens_per_second:,.0f} tokens/s")
    if config.plot and is_first:
        plot_losses(steps, config.plot)
        console.print(f"loss curve: {config.plot}")
    if mesh is not None:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
