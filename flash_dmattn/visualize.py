"""Masks as pictures: `plot(mask)` draws which keys each query row sees, which masked scores the kernels compute,
and which they skip. Needs matplotlib."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from .arguments import require_bool, require_count, require_length, shape_of
from .masks import KeyIntervalMask, KeyLists, as_mask
from .masks.dense import BoolMask
from .masks.indices import KeyIndices, dense_indices
from .ops.list_sizes import LIST_ROWS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TILE_KEYS = 128  # the keys of a tile; that of a kernel may have fewer
VISIBLE, COMPUTED, SKIPPED = "#0b4f6c", "#f6c28b", "#f4f5f6"


class Densities(NamedTuple):
    """A mask in cells of `cell` x `cell` scores, cut off at Sq and Sk."""

    visible: Tensor  # float32 (ceil(Sq / cell), ceil(Sk / cell)): the part of a cell's scores that is visible
    computed: Tensor  # the same for scores that the kernels compute, visible or masked
    cell: int


class Picture(NamedTuple):
    """One batch element and head of a mask."""

    mask: BoolMask | KeyIntervalMask | KeyIndices
    batch: int
    head: int
    seqlen_q: int
    seqlen_k: int
    is_causal: bool
    device: torch.device

    def counts(self, edges: Tensor) -> Tensor:
        """int (len(edges) - 1, Sk): how many rows edges[i] to edges[i + 1] - 1 see each key."""
        mask, offset = self.mask, self.seqlen_k - self.seqlen_q
        if isinstance(mask, KeyIntervalMask):
            start, end = mask.intervals[
                :, entry("batch", self.batch, mask.shape[0]), entry("head", self.head, mask.heads)
            ]
            if self.is_causal:
                start = start.maximum(torch.arange(-offset, self.seqlen_q, device=self.device))
            return (torch.minimum(end, edges[1:, None]) - torch.maximum(start, edges[:-1, None])).clamp(min=0)
        rows = torch.arange(int(edges[0]), int(edges[-1]), device=self.device)
        seen = self.rows(rows).expand(len(rows), -1)
        if self.is_causal:
            seen = seen & (torch.arange(self.seqlen_k, device=self.device) <= rows[:, None] + offset)
        return torch.stack([part.sum(dim=0, dtype=torch.int32) for part in seen.split(edges.diff().tolist())])

    def rows(self, rows: Tensor) -> Tensor:
        """bool ({rows|1}, Sk): what rows of a bool mask or of an indexer's keys see, without causality."""
        mask = self.mask
        if isinstance(mask, BoolMask):
            scores = mask.tensor[entry("batch", self.batch, mask.shape[0]), entry("head", self.head, mask.shape[1])]
            return scores if len(scores) == 1 else scores[rows]
        indices = mask.indices[
            entry("batch", self.batch, len(mask.indices)), entry("head", self.head, mask.indices.shape[1])
        ]
        seen = dense_indices(indices[rows // mask.tile_rows], self.seqlen_k)
        if mask.interval_mask is None:
            return seen
        edges = torch.arange(int(rows[0]), int(rows[-1]) + 2, device=self.device)
        return seen & (self._replace(mask=mask.interval_mask, is_causal=False).counts(edges) > 0)


def entry(name: str, index: int, size: int) -> int:
    """The index of an entry; a dimension of size 1 serves every index."""
    if size > 1 and index >= size:
        raise ValueError(f"{name} must be below the mask's {size}, got {index}")
    return 0 if size == 1 else index


def listed_keys(lists: KeyLists, batch: int, head: int, tile: int) -> Tensor:
    """The sorted keys of one list, without padding."""
    spans = lists.kv_indptr[:, entry("batch", batch, lists.batches), entry("head", head, lists.heads)]
    begin, end = spans[:, 0 if lists.row_broadcast else tile].tolist()
    keys = lists.kv_indices[begin:end]
    return keys[keys >= 0].long().sort().values


def sums_of(counts: Tensor, width: int) -> Tensor:
    """The sums of each `width` keys of counts (.., Sk): (.., ceil(Sk / width))."""
    return torch.nn.functional.pad(counts, (0, -counts.shape[-1] % width)).unflatten(-1, (-1, width)).sum(dim=-1)


def densities(picture: Picture, lists: KeyLists | None, cells: int) -> Densities:
    """Goes through the rows tile by tile: no Sq x Sk tensor is made."""
    rows, keys, device = picture.seqlen_q, picture.seqlen_k, picture.device
    cell = 1
    while max(rows, keys) > cell * cells:
        cell *= 2
    visible, computed = torch.zeros(2, -(-rows // cell), -(-keys // cell), dtype=torch.int64, device=device)
    row_bits = None if lists is None else lists.kv_row_bits
    tile_rows = LIST_ROWS if row_bits is None else 32 * row_bits.shape[1]  # a bit per row
    for tile, first in enumerate(range(0, rows, tile_rows)):
        last = min(first + tile_rows, rows)
        edges = torch.tensor([*range(first, last, min(cell, tile_rows)), last], device=device)
        counts = picture.counts(edges)
        if lists is None:
            done = sums_of(counts.sum(dim=0), TILE_KEYS).gt(0).repeat_interleave(TILE_KEYS)[:keys]
        else:
            done = torch.zeros(keys, dtype=torch.bool, device=device)
            done[listed_keys(lists, picture.batch, picture.head, tile)] = True
        at = edges[:-1] // cell
        visible.index_add_(0, at, sums_of(counts, cell))
        computed.index_add_(0, at, edges.diff()[:, None] * sums_of(done, cell))
    area = torch.outer(*(sums_of(torch.ones(size, dtype=torch.int64, device=device), cell) for size in (rows, keys)))
    area = area.double()  # PyTorch divides integers in its default dtype, which numpy may not have
    return Densities(visible / area, computed / area, cell)


def picture_of(mask: object, seqlen_q: int | None, batch: int, head: int, is_causal: bool) -> Picture:
    if mask is None:
        raise TypeError("mask must be a bool torch.Tensor, a KeyIntervalMask or KeyLists, got None")
    mask = as_mask(mask, "mask")
    source = mask.without_lists()
    if isinstance(source, BoolMask) and source.tensor.dtype != torch.bool:
        raise TypeError(f"mask must be bool, got {str(source.tensor.dtype).removeprefix('torch.')}")
    is_varlen = isinstance(mask, KeyLists) and mask.cu_seqlens_q is not None
    dims = 3 if isinstance(source, KeyIntervalMask) else 4
    shape = source.indices.shape if isinstance(source, KeyIndices) else source.shape
    if isinstance(source, BoolMask) and len(shape) == 2:
        raise ValueError(f"mask must have 4 dimensions, got shape {shape_of(source)}: pass mask[None, None]")
    if is_varlen or len(shape) != dims:
        raise ValueError(
            f"mask must be of fixed length, got {'lists of variable length' if is_varlen else shape_of(source)}: "
            "plot one sequence, as mask.sequence(first, last) of a KeyIntervalMask"
        )
    seqlen_k = source.seqlen_k if isinstance(source, KeyIndices) else shape[-1]
    known = mask.seqlen_q if isinstance(mask, KeyLists) else getattr(source, "rows", None)
    if known is None and isinstance(source, BoolMask) and shape[2] != 1:
        known = shape[2]
    if seqlen_q is None:
        seqlen_q = seqlen_k if known is None else known
    seqlen_q = require_length("seqlen_q", seqlen_q)
    if known not in (None, seqlen_q):
        raise ValueError(f"seqlen_q must be the mask's {known}, got {seqlen_q}")
    batch, head = require_count("batch", batch), require_count("head", head)
    if 0 in (seqlen_q, seqlen_k):
        raise ValueError(f"mask must have rows and keys, got {seqlen_q} rows and {seqlen_k} keys")
    is_causal = bool(is_causal) or (isinstance(mask, KeyLists) and mask.is_causal)
    return Picture(source, batch, head, seqlen_q, seqlen_k, is_causal, mask.device)


def plot(
    mask: Tensor | KeyIntervalMask | KeyLists,
    seqlen_q: int | None = None,
    *,
    batch: int = 0,
    head: int = 0,
    is_causal: bool = False,
    cells: int = 512,
    ax: Axes | None = None,
) -> Axes:
    """Draws one batch element and head of a mask: query rows downwards, keys to the right.

    Dark is visible. Light is computed and masked: the rest of the tiles of 128 x 128 scores that some row sees, or with
    KeyLists the listed keys that only other rows of the tile see. The kernels skip everything else; their tiles may be
    smaller. A mask of more than `cells` rows or keys is drawn in cells of several scores, each by its visible part. No
    Sq x Sk tensor is made.

    Args:
        mask: what `attn_mask` accepts, of fixed length. For a KeyIntervalMask of variable length, plot one `sequence`.
        seqlen_q: Sq, where the mask does not determine it; by default Sk.
        batch, head: which entry of the mask.
        is_causal: also masks what a call with is_causal=True masks.
        cells: the maximum number of cells of the picture in each direction.
        ax: matplotlib's Axes to draw in; by default those of a new figure.

    Returns:
        The Axes: `ax.figure.savefig("mask.png")` writes the picture.

    Raises:
        ImportError: matplotlib is not installed.
        TypeError, ValueError: an invalid argument.
    """
    try:
        from matplotlib.colors import LinearSegmentedColormap
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ImportError("flash_dmattn.visualize needs matplotlib: pip install matplotlib") from error
    require_bool("is_causal", is_causal)
    picture = picture_of(mask, seqlen_q, batch, head, is_causal)
    cells = require_length("cells", cells)
    if cells < 1:
        raise ValueError(f"cells must be at least 1, got {cells}")
    parts = densities(picture, mask if isinstance(mask, KeyLists) else None, cells)
    visible, computed = parts.visible.cpu(), parts.computed.cpu()
    if ax is None:
        ax = Figure(figsize=(5.5, 5.5), layout="constrained").add_subplot()
    extent = (0, picture.seqlen_k, picture.seqlen_q, 0)
    shown = {"extent": extent, "interpolation": "nearest", "aspect": "auto", "vmin": 0}
    light = LinearSegmentedColormap.from_list("computed", [SKIPPED, COMPUTED])
    ax.imshow(computed.numpy(), cmap=light, vmax=1, **shown)
    dark = LinearSegmentedColormap.from_list("visible", [COMPUTED, VISIBLE])
    largest = max(float(visible.max()), 1e-9)
    image = ax.imshow(visible.where(visible > 0, torch.nan).numpy(), cmap=dark, vmax=largest, **shown)
    if parts.cell > 1:
        label = f"visible part of {parts.cell} x {parts.cell} scores"
        ax.figure.colorbar(image, ax=ax, location="bottom", shrink=0.7, label=label)
    ax.set_xlabel("key")
    ax.set_ylabel("query row")
    names = {"visible": VISIBLE, "computed, masked": COMPUTED, "skipped": SKIPPED}
    handles = [Patch(facecolor=colour, edgecolor="#9aa0a6", label=name) for name, colour in names.items()]
    placed = {"loc": "lower left", "bbox_to_anchor": (0, 1), "borderaxespad": 0.2, "frameon": False}
    ax.legend(handles=handles, ncols=3, fontsize=7, handlelength=1, handletextpad=0.4, columnspacing=1, **placed)
    return ax
