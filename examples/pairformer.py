"""Train a small pair block with triangle attention on synthetic chains, compared to plain PyTorch.

    python examples/pairformer.py --plot pairformer.png             # less than a minute on two CPU cores
    python examples/pairformer.py --device cuda --length 256 --channels 128 --plot pairformer.png
    python examples/pairformer.py --only flash_dmattn --steps 400   # without the comparison

Each chain of points folds at random. The distances of a few pairs are given, and the model predicts all others. Two
sides of a triangle bound the third, so the pairs of row i attend to each other with a bias of the pair of their ends
(AlphaFold's triangle attention, algorithms 13 and 14 of Jumper et al., 2021). All rows share this bias.
`triangle_attention` never expands it; plain PyTorch materializes the scores of every row.

Requires the extra [bench]: pip install --no-build-isolation '.[bench]'.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from rich.console import Console
from torch import Tensor, nn
from train_lm import argument_parser, check_device_and_plot, check_positive, optimizer_step, option, track

from flash_dmattn.integrations.triangle import triangle_attention

OURS, EAGER = IMPLEMENTATIONS = ("flash_dmattn", "eager")
BINS = 16  # distance bins; the first is below NEAREST, the last above FARTHEST
NEAREST, FARTHEST = 1.5, 12.0  # neighbours in the chain have distance 1
MAX_OFFSET = 8  # relative positions in the chain are clamped to this range


@dataclass(frozen=True)
class Config:
    """Every field is also a command line argument."""

    steps: int = option(100, "optimizer steps")
    batch_size: int = option(4, "chains per step")
    length: int = option(32, "points of the longest chain; the shortest has half as many")
    observed: float = option(0.1, "fraction of the pairs whose distance is given")
    channels: int = option(32, "channels of the pair representation")
    heads: int = option(4, "attention heads")
    blocks: int = option(2, "pair blocks")
    lr: float = option(3e-3, "peak learning rate")
    device: str = option("cpu", "device to train on; cuda in bfloat16, cpu in float32", choices=["cpu", "cuda"])
    only: str | None = option(None, "train with this implementation only (default: both)", choices=IMPLEMENTATIONS)
    seed: int = option(0, "seed of weights and chains")
    plot: str | None = option(None, "PNG file for losses and distances (default: none)")

    def __post_init__(self):
        check_positive(self, "steps", "batch_size", "channels", "heads", "blocks", "lr")
        if self.length < 4:
            raise ValueError(f"length must be at least 4, got {self.length}")
        if not 0 <= self.observed < 1:
            raise ValueError(f"observed must be from 0 to less than 1, got {self.observed}")
        if self.channels % self.heads:
            raise ValueError(f"channels ({self.channels}) must be a multiple of heads ({self.heads})")
        check_device_and_plot(self)

    @property
    def implementations(self) -> tuple[str, ...]:
        return (self.only,) if self.only else IMPLEMENTATIONS

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda")


# Chains


@dataclass(frozen=True)
class Chains:
    distances: Tensor  # (B, S, S)
    exists: Tensor  # bool (B, S), False = padding
    observed: Tensor  # bool (B, S, S), symmetric

    def to(self, device: str) -> Chains:
        return Chains(self.distances.to(device), self.exists.to(device), self.observed.to(device))

    def bins(self) -> Tensor:
        edges = torch.linspace(NEAREST, FARTHEST, BINS - 1, device=self.distances.device)
        return torch.bucketize(self.distances, edges)


def random_chains(config: Config, generator: torch.Generator) -> Chains:
    """Chains of points with unit steps whose directions change slowly."""
    batch, length = config.batch_size, config.length
    noise = torch.randn(batch, length, 3, generator=generator)
    directions = [noise[:, 0]]
    for change in noise[:, 1:].unbind(1):
        directions.append(0.6 * directions[-1] + 0.8 * change)
    points = F.normalize(torch.stack(directions, dim=1), dim=-1).cumsum(dim=1)
    lengths = torch.randint(length // 2, length + 1, (batch, 1), generator=generator)
    exists = torch.arange(length) < lengths
    observed = (torch.rand(batch, length, length, generator=generator) < config.observed).triu(1)
    return Chains(torch.cdist(points, points), exists, observed | observed.mT)


# The model


def eager_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
    """`triangle_attention` in plain PyTorch."""
    scores = q.shape[-1] ** -0.5 * q @ k.mT + bias
    return scores.masked_fill(~mask, -1e9).softmax(dim=-1).to(v.dtype) @ v


ATTENTIONS = {OURS: triangle_attention, EAGER: eager_attention}


class TriangleAttention(nn.Module):
    """Pair (i, j) attends to pairs (i, k) with the bias of (j, k); at the ending node to (k, j) with that of (k, i)."""

    def __init__(self, config: Config, at_end: bool, attention: Callable[..., Tensor]):
        super().__init__()
        self.at_end, self.heads, self.attention = at_end, config.heads, attention
        width = config.channels
        self.norm = nn.LayerNorm(width)
        self.qkv_proj = nn.Linear(width, 3 * width, bias=False)
        self.bias_proj = nn.Linear(width, config.heads, bias=False)
        self.gate_proj = nn.Linear(width, width)
        self.o_proj = nn.Linear(width, width)

    def forward(self, pairs: Tensor, mask: Tensor) -> Tensor:
        pairs, mask = (pairs.transpose(1, 2), mask.mT) if self.at_end else (pairs, mask)
        pairs = self.norm(pairs)
        q, k, v = self.qkv_proj(pairs).unflatten(-1, (3, self.heads, -1)).permute(3, 0, 1, 4, 2, 5)  # (B, N, H, S, D)
        bias = self.bias_proj(pairs).permute(0, 3, 1, 2).unsqueeze(1)  # (B, 1, H, S, S)
        out = self.attention(q, k, v, bias, mask[:, :, None, None, :]).transpose(2, 3).flatten(3)
        out = self.o_proj(out * self.gate_proj(pairs).sigmoid())
        return out.transpose(1, 2) if self.at_end else out


class PairBlock(nn.Module):
    def __init__(self, config: Config, attention: Callable[..., Tensor]):
        super().__init__()
        self.starting = TriangleAttention(config, False, attention)
        self.ending = TriangleAttention(config, True, attention)
        width = config.channels
        self.transition = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width)
        )

    def forward(self, pairs: Tensor, mask: Tensor) -> Tensor:
        pairs = pairs + self.starting(pairs, mask)
        pairs = pairs + self.ending(pairs, mask)
        return pairs + self.transition(pairs)


class Pairformer(nn.Module):
    def __init__(self, config: Config, attention: Callable[..., Tensor]):
        super().__init__()
        self.offsets = nn.Embedding(2 * MAX_OFFSET + 1, config.channels)
        self.distances = nn.Embedding(BINS + 1, config.channels)  # the last entry: unknown
        self.blocks = nn.ModuleList(PairBlock(config, attention) for _ in range(config.blocks))
        self.norm = nn.LayerNorm(config.channels)
        self.head = nn.Linear(config.channels, BINS)

    def forward(self, chains: Chains) -> Tensor:
        """Logits (B, S, S, BINS) of the distance bins."""
        position = torch.arange(chains.exists.shape[1], device=chains.exists.device)
        offset = (position[:, None] - position).clamp(-MAX_OFFSET, MAX_OFFSET) + MAX_OFFSET
        bins = chains.bins().masked_fill(~chains.observed, BINS)
        pairs = self.offsets(offset) + self.distances(bins)
        mask = chains.exists[:, :, None] & chains.exists[:, None, :]
        for block in self.blocks:
            pairs = block(pairs, mask)
        pairs = self.norm(pairs)
        return self.head(pairs + pairs.transpose(1, 2))


def build_model(config: Config, implementation: str) -> Pairformer:
    torch.manual_seed(config.seed)
    return Pairformer(config, ATTENTIONS[implementation]).to(config.device)


# Training


def loss_of(model: Pairformer, chains: Chains, config: Config) -> Tensor:
    """Cross entropy of the unknown distances, in nats per pair."""
    with config.autocast():
        logits = model(chains)
    target = chains.exists[:, :, None] & chains.exists[:, None, :] & ~chains.observed
    target = target & ~torch.eye(target.shape[1], dtype=torch.bool, device=target.device)
    return F.cross_entropy(logits[target].float(), chains.bins()[target])


@dataclass(frozen=True)
class Step:
    loss: float
    milliseconds: float


def training_steps(model: Pairformer, config: Config) -> Iterator[Step]:
    """Every implementation trains on the same chains."""
    update = optimizer_step(model, config)
    generator = torch.Generator().manual_seed(config.seed)
    for _ in range(config.steps):
        chains = random_chains(config, generator).to(config.device)
        started = time.perf_counter()
        loss = loss_of(model, chains, config)
        update(loss)
        loss = loss.item()  # synchronizes before the clock is read
        yield Step(loss, 1e3 * (time.perf_counter() - started))


# Output


def plot(losses: dict[str, list[float]], model: Pairformer, config: Config, path: str) -> None:
    """Plots the losses, and the given, true and predicted distances of a held-out chain."""
    chains = random_chains(config, torch.Generator().manual_seed(config.seed + 1)).to(config.device)
    with torch.no_grad(), config.autocast():
        probs = model(chains).float().softmax(dim=-1)
    centers = torch.linspace(NEAREST, FARTHEST, BINS, device=probs.device)
    exists, known, distances = chains.exists[0], chains.observed[0], chains.distances[0]
    maps = {
        "given": distances.masked_fill(~known, torch.nan),
        "true": distances,
        "predicted": torch.where(known, distances, (probs[0] * centers).sum(dim=-1)).fill_diagonal_(0),
    }
    figure = Figure(figsize=(13, 3.4), layout="constrained")
    loss_axes, *map_axes = figure.subplots(1, 4)
    for style, (implementation, curve) in zip(("-", ":"), losses.items()):  # the curves coincide
        loss_axes.plot(range(1, len(curve) + 1), curve, style, label=implementation)
    loss_axes.set(xlabel="step", ylabel="loss (nats per pair)")
    loss_axes.legend()
    for axes, (title, distances) in zip(map_axes, maps.items()):
        image = axes.imshow(distances[exists][:, exists].cpu(), vmin=0, vmax=FARTHEST)
        axes.set(title=title, xticks=[], yticks=[])
    figure.colorbar(image, ax=map_axes, label="distance (chain steps)")
    figure.savefig(path, format="png", dpi=150)


def main(arguments: list[str] | None = None) -> None:
    parser = argument_parser(Config, __doc__)
    try:
        config = Config(**vars(parser.parse_args(arguments)))
    except (ValueError, OSError) as error:
        parser.error(str(error))

    console = Console()
    losses: dict[str, list[float]] = {}
    model = None
    for implementation in reversed(config.implementations):
        model = build_model(config, implementation)
        run = training_steps(model, config)
        steps = list(track(run, config, console, lambda x, name=implementation: f"{name}  loss {x.loss:.3f}"))
        losses[implementation] = [step.loss for step in steps]
        median = sorted(step.milliseconds for step in steps)[len(steps) // 2]
        curve = losses[implementation]
        console.print(f"{implementation}: loss {curve[0]:.3f} to {curve[-1]:.3f}, {median:.0f} ms per step")

    if len(losses) == 2:
        difference = max(abs(ours - eager) for ours, eager in zip(losses[OURS], losses[EAGER]))
        console.print(f"the losses of a step differ by at most {difference:.1e}")
    if config.plot:
        plot(losses, model, config, config.plot)
        console.print(f"losses and distances: {config.plot}")


if __name__ == "__main__":
    main()
