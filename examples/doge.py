"""Train a small Doge model of Hugging Face transformers with flash_dmattn, compared to its eager attention.

    python examples/doge.py --plot doge.png                               # a few minutes on two CPU cores
    python examples/doge.py --device cuda --seq-len 4096 --window 512 --hidden 512 --plot doge.png
    python examples/doge.py --only flash_dmattn --steps 300               # without the comparison

Requires the extra [bench]: pip install --no-build-isolation '.[bench]'.

`use_flash_dmattn(model)` switches the model. Each row of Doge attends to the `window` keys of largest bias; its eager
attention creates a seq_len x seq_len mask for that. The plot shows the loss of both implementations and the peak
memory of a training step by sequence length.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from matplotlib.figure import Figure
from rich.console import Console
from torch import Tensor, nn
from train_lm import (
    CONTINUATION,
    VOCABULARY,
    argument_parser,
    check_sizes,
    load_text,
    optimizer_step,
    option,
    print_samples,
    random_batch,
    track,
)
from transformers import DogeConfig, DogeForCausalLM

from flash_dmattn.integrations.transformers import use_flash_dmattn

OURS, EAGER = IMPLEMENTATIONS = ("flash_dmattn", "eager")
MIB = 2**20


@dataclass(frozen=True)
class Config:
    """Every field is also a command line argument."""

    text: str | None = option(None, "text file to train on (default: the topics of Python's help)")
    steps: int = option(100, "optimizer steps")
    batch_size: int = option(2, "sequences per step")
    seq_len: int = option(512, "bytes in a sequence")
    window: int = option(64, "keys that each query attends to")
    hidden: int = option(128, "width of the model")
    layers: int = option(4, "transformer blocks")
    heads: int = option(4, "query heads")
    kv_heads: int = option(2, "key/value heads")
    lr: float = option(3e-3, "peak learning rate")
    device: str = option("cpu", "device to train on; cuda in bfloat16, cpu in float32", choices=["cpu", "cuda"])
    only: str | None = option(None, "train with this implementation only (default: both)", choices=IMPLEMENTATIONS)
    seed: int = option(0, "seed of weights, batches and samples")
    plot: str | None = option(None, "PNG file for losses and memory (default: none)")
    samples: int = option(2, "texts to generate at the end")

    def __post_init__(self):
        check_sizes(self, width="hidden")

    @property
    def implementations(self) -> tuple[str, ...]:
        return (self.only,) if self.only else IMPLEMENTATIONS


# The model


def build_model(config: Config, implementation: str) -> DogeForCausalLM:
    torch.manual_seed(config.seed)
    doge = DogeConfig(
        vocab_size=VOCABULARY,
        hidden_size=config.hidden,
        intermediate_size=2 * config.hidden,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        keep_window_size=config.window,
        max_position_embeddings=config.seq_len + CONTINUATION,
        tie_word_embeddings=True,
        eos_token_id=None,
        use_cache=False,
    )
    model = DogeForCausalLM._from_config(doge, attn_implementation="eager")
    for layer in model.model.layers:  # not zero: dt_proj's gradient is proportional to A
        nn.init.ones_(layer.self_attn.A)
    model.to(config.device, torch.bfloat16 if config.device == "cuda" else torch.float32)
    return use_flash_dmattn(model) if implementation == OURS else model


# Training


@dataclass(frozen=True)
class Step:
    loss: float
    tokens_per_second: float  # average since the second step


def training_steps(model: DogeForCausalLM, config: Config, data: Tensor) -> Iterator[Step]:
    """Every implementation trains on the same batches."""
    update = optimizer_step(model, config)
    generator = torch.Generator().manual_seed(config.seed)
    seconds = 0.0
    for step in range(config.steps):
        tokens, _ = random_batch(data, config, generator)
        started = time.perf_counter()
        loss = model(tokens, labels=tokens).loss  # the model shifts the labels
        update(loss)
        loss = loss.item()  # synchronizes before the clock is read
        seconds += time.perf_counter() - started if step else 0.0
        yield Step(loss, step * tokens.numel() / seconds if step else 0.0)


@torch.no_grad()
def generate(model: DogeForCausalLM, config: Config, prompts: Tensor) -> Tensor:
    """Prompts (B, S) with CONTINUATION sampled bytes each; caches keys, values and biases."""
    prompts = prompts.to(config.device, torch.long)
    options = {"do_sample": True, "temperature": 0.8, "pad_token_id": 0, "use_cache": True}
    return model.eval().generate(
        prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=CONTINUATION, **options
    )


# Memory


def measure_peaks(config: Config, implementation: str) -> list[float]:
    """Peak memory in MiB of forward and backward without weights and gradients, for each of `sequence_lengths`.

    NaN if the GPU runs out of memory. Must run in a fresh process, because a process keeps freed memory.
    """
    model = build_model(config, implementation)

    def step(seq_len: int) -> None:
        tokens = torch.zeros(config.batch_size, seq_len, dtype=torch.long, device=config.device)
        model(tokens, labels=tokens).loss.backward()

    step(min(config.seq_len, 2 * config.window))  # loads libraries and allocates the gradients
    before = torch.cuda.memory_allocated() if config.device == "cuda" else resident_bytes("VmRSS")
    mib = []
    for seq_len in sequence_lengths(config):  # ascending: each step needs more than the previous one left allocated
        try:
            reset_peak(config.device)
            step(seq_len)
            peak = torch.cuda.max_memory_allocated() if config.device == "cuda" else resident_bytes("VmHWM")
            mib.append((peak - before) / MIB)
        except torch.OutOfMemoryError:
            mib.append(float("nan"))
    return mib


def reset_peak(device: str) -> None:
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")


def resident_bytes(entry: str) -> int:
    """The resident memory of this process: now (VmRSS) or at its peak (VmHWM)."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * int(lines[entry].removesuffix("kB"))


def sequence_lengths(config: Config) -> list[int]:
    return sorted({max(1, config.seq_len // part) for part in (4, 2, 1)})


def peaks(config: Config) -> dict[str, list[float]]:
    """`measure_peaks` of each implementation."""
    mib = {}
    for implementation in config.implementations:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            mib[implementation] = pool.submit(measure_peaks, config, implementation).result()
    return mib


# Output


def plot(losses: dict[str, list[float]], mib: dict[str, list[float]], config: Config, path: str) -> None:
    figure = Figure(figsize=(10, 4), layout="constrained")
    loss_axes, memory_axes = figure.subplots(1, 2)
    for style, implementation in zip(("-", ":"), config.implementations):  # the curves coincide
        curve = losses[implementation]
        loss_axes.plot(range(1, len(curve) + 1), curve, style, label=implementation)
    loss_axes.set(xlabel="step", ylabel="training loss (nats per byte)", title=f"Doge, window {config.window}")
    for implementation, figures in mib.items():
        memory_axes.plot(sequence_lengths(config), figures, "o-", label=implementation)
    title = f"training step on {config.device}, batch size {config.batch_size}"
    memory_axes.set(xlabel="sequence length", ylabel="peak memory without weights (MiB)", title=title)
    memory_axes.set_ylim(bottom=0)
    for axes in (loss_axes, memory_axes):
        axes.legend()
    figure.savefig(path, format="png", dpi=150)


def main(arguments: list[str] | None = None) -> None:
    parser = argument_parser(Config, __doc__)
    try:
        config = Config(**vars(parser.parse_args(arguments)))
        training, validation = load_text(config)
    except (ValueError, OSError) as error:
        parser.error(str(error))

    console = Console()
    losses: dict[str, list[float]] = {}
    model = None
    for implementation in reversed(config.implementations):  # flash_dmattn last: its model generates
        model = build_model(config, implementation)
        losses[implementation] = []
        run = training_steps(model, config, training)
        for step in track(run, config, console, lambda x, name=implementation: f"{name}  loss {x.loss:.3f}"):
            losses[implementation].append(step.loss)
        console.print(f"{implementation}: loss {step.loss:.3f}, {step.tokens_per_second:,.0f} tokens/s")

    if config.samples:
        print_samples(partial(generate, model, config), config, validation, console)
        console.rule(style="dim")
    if config.plot:
        with console.status("memory"):
            mib = peaks(config)
        for implementation, figures in mib.items():
            peaks_text = ", ".join(f"{mib:.0f} MiB at {n}" for n, mib in zip(sequence_lengths(config), figures))
            console.print(f"{implementation}: {peaks_text}")
        plot(losses, mib, config, config.plot)
        console.print(f"losses and memory: {config.plot}")


if __name__ == "__main__":
    main()
