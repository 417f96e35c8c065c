"""Train a small attention layer whose only position information is a learned relative bias, and draw the bias.

    python examples/relative_bias.py --plot sequence.png               # T5's buckets; seconds on two CPU cores
    python examples/relative_bias.py --kind image --plot image.png     # a table of offsets in two dimensions, as Swin's
    python examples/relative_bias.py --device cuda --size 4096 --plot sequence.png

Tokens are random. The target of each position is an earlier token: in a sequence the one `--lag` positions before, in
an image the one a row up and two columns to the left. The heads can only find it by the distance, so the bias grows
there. The kernels read `relative_bias` and sum its gradient: no S x S tensor is materialized.

Requires the extra [bench]: pip install --no-build-isolation '.[bench]'.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from rich.console import Console
from torch import Tensor, nn
from train_lm import argument_parser, check_device_and_plot, check_positive, optimizer_step, option, track

from flash_dmattn import flash_dmattn_func, relative

SEQUENCE, IMAGE = KINDS = ("sequence", "image")
VOCABULARY = 16
BUCKETS, MAX_DISTANCE = 32, 64  # T5's embedding of distances
ABOVE, LEFT = 1, 2  # rows and columns from the target to its position in an image
NO_TARGET = -100


@dataclass(frozen=True)
class Config:
    """Every field is also a command line argument."""

    kind: str = option(SEQUENCE, "what the tokens are", choices=KINDS)
    steps: int = option(150, "optimizer steps")
    batch_size: int = option(16, "sequences or images per step")
    size: int = option(128, "tokens of a sequence; of an image the square root of it is its height and width")
    lag: int = option(5, "distance from a position of a sequence back to its target")
    width: int = option(64, "model width")
    heads: int = option(4, "attention heads")
    lr: float = option(3e-2, "peak learning rate")
    device: str = option("cpu", "device to train on; cuda in bfloat16, cpu in float32", choices=["cpu", "cuda"])
    seed: int = option(0, "seed of weights and tokens")
    plot: str | None = option(None, "PNG file for the loss and the learned bias (default: none)")

    def __post_init__(self):
        check_positive(self, "steps", "batch_size", "size", "width", "heads", "lr")
        if self.kind != IMAGE and not 0 < self.lag < self.size:
            raise ValueError(f"lag must be from 1 to below size ({self.size}), got {self.lag}")
        if self.width % self.heads:
            raise ValueError(f"width ({self.width}) must be a multiple of heads ({self.heads})")
        if self.kind == IMAGE and self.side <= max(ABOVE, LEFT):
            raise ValueError(f"size must be at least {(max(ABOVE, LEFT) + 1) ** 2} for images, got {self.size}")
        check_device_and_plot(self)

    @property
    def side(self) -> int:
        """Height and width of an image."""
        return int(self.size**0.5)

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device == "cuda" else torch.float32


class RelativeAttention(nn.Module):
    """Tokens (B, S) to logits (B, S, VOCABULARY): one layer of attention, without position embeddings."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(VOCABULARY, config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.head = nn.Linear(config.width, VOCABULARY)
        offsets = 2 * config.side - 1
        shape = (1, config.heads, offsets, offsets) if config.kind == IMAGE else (BUCKETS, config.heads)
        self.table = nn.Parameter(torch.zeros(shape))

    def bias(self) -> dict:
        """The arguments of flash_dmattn_func."""
        if self.config.kind == IMAGE:
            return {"relative_bias": self.table, "grid": (self.config.side, self.config.side)}
        return {"relative_bias": relative.t5(self.table, max_distance=MAX_DISTANCE)}

    def forward(self, tokens: Tensor) -> Tensor:
        rows = F.layer_norm(self.embedding(tokens), (self.config.width,))
        qkv = self.qkv(rows).unflatten(-1, (3, self.config.heads, -1)).to(self.config.dtype)
        out = flash_dmattn_func(*qkv.unbind(2), **self.bias())
        return self.head(out.flatten(2).to(rows.dtype))


def build_model(config: Config) -> RelativeAttention:
    torch.manual_seed(config.seed)
    return RelativeAttention(config).to(config.device)


def random_batch(config: Config, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Tokens (B, S), and for each the one to name, or NO_TARGET."""
    if config.kind == SEQUENCE:
        tokens = torch.randint(VOCABULARY, (config.batch_size, config.size), generator=generator)
        targets = F.pad(tokens[:, : -config.lag], (config.lag, 0), value=NO_TARGET)
    else:
        tokens = torch.randint(VOCABULARY, (config.batch_size, config.side, config.side), generator=generator)
        targets = F.pad(tokens[:, :-ABOVE, :-LEFT], (LEFT, 0, ABOVE, 0), value=NO_TARGET).flatten(1)
    return tokens.flatten(1).to(config.device), targets.to(config.device)


def training_steps(model: RelativeAttention, config: Config) -> Iterator[float]:
    """Yields the loss of each step, in nats per token."""
    step, generator = optimizer_step(model, config), torch.Generator().manual_seed(config.seed)
    for _ in range(config.steps):
        tokens, targets = random_batch(config, generator)
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), ignore_index=NO_TARGET)
        step(loss)
        yield loss.item()


@torch.no_grad()
def learned_bias(model: RelativeAttention) -> Tensor:
    """(H, 2R + 1) by the distance of a key, or (H, 2h - 1, 2w - 1) by its offset: rows down, columns to the right."""
    bias = model.bias()["relative_bias"][0].float().cpu()
    return bias.flip(1, 2) if model.config.kind == IMAGE else bias


def plot(losses: list[float], model: RelativeAttention, path: str) -> None:
    config, bias = model.config, learned_bias(model)
    figure = Figure(figsize=(4 + 3 * (config.heads if config.kind == IMAGE else 2), 3.4), layout="constrained")
    loss_axes, *axes = figure.subplots(1, 1 + len(bias)) if config.kind == IMAGE else figure.subplots(1, 2)
    loss_axes.plot(range(1, len(losses) + 1), losses)
    loss_axes.set(xlabel="step", ylabel="loss (nats per token)")
    if config.kind == SEQUENCE:
        near = relative.distances(MAX_DISTANCE)
        for head, line in enumerate(bias):
            axes[0].plot(near, line, label=f"head {head}")
        axes[0].set(xlabel="distance of the key from the row", ylabel="learned bias")
        axes[0].legend()
    else:
        reach = config.side - 0.5
        for head, (one, table) in enumerate(zip(axes, bias)):
            image = one.imshow(table, extent=(-reach, reach, reach, -reach), vmin=bias.min(), vmax=bias.max())
            one.set(title=f"head {head}", xlabel="columns to the right", ylabel="rows down")
        figure.colorbar(image, ax=axes, label="learned bias")
    figure.savefig(path, format="png", dpi=150)


def main(arguments: list[str] | None = None) -> None:
    parser = argument_parser(Config, __doc__)
    try:
        config = Config(**vars(parser.parse_args(arguments)))
    except (ValueError, OSError) as error:
        parser.error(str(error))

    console, model = Console(), build_model(config)
    losses = list(track(training_steps(model, config), config, console, lambda loss: f"loss {loss:.3f}"))
    console.print(f"{config.kind}: loss {losses[0]:.3f} to {losses[-1]:.3f}")
    if config.plot:
        plot(losses, model, config.plot)
        console.print(f"loss and learned bias: {config.plot}")


if __name__ == "__main__":
    main()
