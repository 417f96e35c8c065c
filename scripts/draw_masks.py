"""Draws the pictures of masks on docs/masks.md, into docs/pictures/.

    python scripts/draw_masks.py

Needs the extra [bench] for matplotlib. The same version of matplotlib writes the same files.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib
import torch
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

from flash_dmattn import KeyIntervalMask, KeyLists
from flash_dmattn.visualize import VISIBLE, plot

FOLDER = Path(__file__).parent.parent / "docs" / "pictures"
S, WINDOW = 1024, 96
OTHER = "#c9ced3"


def save(figure: Figure, name: str) -> None:
    FOLDER.mkdir(exist_ok=True)
    with matplotlib.rc_context({"svg.hashsalt": "flash_dmattn", "svg.fonttype": "path"}):
        figure.savefig(FOLDER / f"{name}.svg", metadata={"Date": None})


def selected_keys() -> torch.Tensor:
    """An indexer's choice: each 64 rows see their own 128 keys, most of them near."""
    own = 64 * torch.arange(S // 64)[:, None] + 64
    near = own - 1 - torch.randint(0, 160, (S // 64, 64))
    far = (torch.rand(S // 64, 64) * own).long()
    return torch.cat([near, far], dim=1).clamp_(min=0).int()[None, None]


def masks() -> dict[str, tuple[KeyIntervalMask | KeyLists | torch.Tensor, bool]]:
    """Picture to the mask, and whether the call is causal."""
    ends = torch.tensor([0, 300, 420, 900, S], dtype=torch.int32)
    documents = KeyIntervalMask.documents(ends, S)
    real = torch.ones(1, S, dtype=torch.bool)
    real[:, :200] = False  # padding on the left
    topk = KeyIntervalMask.topk(torch.randn(1, 1, 1, S), WINDOW)
    return {
        "causal": (KeyIntervalMask.causal(S, S), False),
        "sliding_window": (KeyIntervalMask.sliding_window(S, S, 200), False),
        "documents": (documents, True),
        "padding": (KeyIntervalMask.padding(real), True),
        "prefix": (KeyIntervalMask.prefix_lm(256, S, S), False),
        "intersection": (documents & KeyIntervalMask.sliding_window(S, S, 150), False),
        "bool": ((torch.rand(1, 1, 8, 8) < 0.4).repeat_interleave(S // 8, 2).repeat_interleave(S // 8, 3), False),
        "topk_tiles": (topk, True),
        "topk_lists": (KeyLists.build(topk, S, is_causal=True), True),
        "indices": (KeyLists.from_indices(selected_keys(), S, S, is_causal=True, tile_rows=64), True),
    }


def draw_kinds() -> None:
    for name, (mask, is_causal) in masks().items():
        figure = Figure(figsize=(3.6, 3.6), layout="constrained", facecolor="white")
        plot(mask, is_causal=is_causal, cells=S, ax=figure.add_subplot())
        save(figure, name)


def draw_topk() -> None:
    """How the biases of 20 keys become one interval of rows for each key, with w = 4."""
    keys, window = 20, 4
    bias = torch.randn(keys, generator=torch.Generator().manual_seed(6)) + 0.07 * torch.arange(keys)
    mask = KeyIntervalMask.topk(bias[None, None], window)
    end = mask.end[0, 0].clamp(max=keys).tolist()
    figure = Figure(figsize=(5.6, 7.0), layout="constrained", facecolor="white")
    above, below = figure.subplots(2, 1, height_ratios=[1, 3], sharex=True)
    survives = [last == keys for last in end]
    above.bar(range(keys), (bias - bias.min() + 0.2).tolist(), color=[VISIBLE if one else OTHER for one in survives])
    above.set_title("1. The model computes one bias per key", loc="left", fontsize=10)
    above.set_yticks([])
    above.set_ylabel("bias")
    seen = mask.to_dense()[0, 0]
    causal = torch.ones_like(seen).tril()
    below.imshow((seen.int() + causal.int()).numpy(), cmap=ListedColormap(["white", "#eceef0", VISIBLE]), aspect="auto")
    below.vlines([key - 0.5 for key in range(keys + 1)], -0.5, keys - 0.5, color="white", lw=1.5)
    evicted = next(key for key in range(2, keys) if key + 3 < end[key] < keys - 3)
    row = end[evicted]
    below.annotate(
        f"key {evicted} is visible to rows {evicted} to {row - 1}:\nat row {row} there are {window} better keys",
        xy=(evicted, row - 0.5),
        xytext=(keys * 0.48, 2.0),
        arrowprops={"arrowstyle": "->", "color": "#333333"},
        fontsize=9,
    )
    below.set_title(f"2. Row i sees the w = {window} keys of largest bias up to key i", loc="left", fontsize=10)
    below.set(xlim=(-0.6, keys - 0.4), ylim=(keys - 0.4, -0.6), xlabel="key", ylabel="query row")
    below.set_xticks(range(0, keys, 2))
    below.set_yticks(range(0, keys, 2))
    figure.supxlabel("Each column is one interval of rows: start and end, 8 bytes per key", fontsize=9)
    save(figure, "topk_intervals")


def main() -> None:
    torch.manual_seed(0)
    draw_kinds()
    draw_topk()


if __name__ == "__main__":
    main()
