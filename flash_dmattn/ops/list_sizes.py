"""Sizes of key lists. All functions accept symbolic lengths."""

from __future__ import annotations

import torch

LIST_ALIGN = 64  # kAlign of KeyListsView in csrc/params.h
LIST_ROWS = 128  # kRows
MAX_TILE_ROWS = 2**31 - LIST_ROWS  # the largest multiple in int32: tile_rows of index_key_lists
MAX_TOPK_LIST_ROWS = 16  # the maximum number of query rows of topk_lists


def is_per_key(shape) -> bool:
    """Whether a mask or bias of this shape, of fixed or variable length, has one number per key for all rows."""
    return len(shape) == 2 or (len(shape) == 4 and shape[2] == 1)


def num_m_blocks(rows) -> int:
    """The number of lists of a head."""
    return -(-rows // LIST_ROWS)


def count_causal_scores(rows, keys, is_causal: bool):
    """The number of scores of one head and sequence without a mask."""
    if not is_causal:
        return rows * keys
    seeing = torch.sym_min(rows, keys)  # rows that see a key
    return seeing * keys - seeing * (seeing - 1) // 2


def walked_keys(rows: int, keys: int, is_causal: bool) -> float:
    """The keys that all tiles of LIST_ROWS rows visit, of one head and sequence without a mask."""
    return count_causal_scores(rows, keys, is_causal) / torch.sym_min(torch.sym_max(rows, 1), LIST_ROWS)


def longest_list(keys_per_row, rows, keys) -> int:
    """The keys of the longest list, where no n consecutive rows see more than keys_per_row + n - 1 keys."""
    # torch.sym_min, unlike min, adds no guard on the lengths.
    return torch.sym_min(keys_per_row + torch.sym_min(rows, LIST_ROWS) - 1, keys)


def list_capacity(keys_per_row, rows, keys) -> int:
    """`longest_list` with its padding."""
    return 0 if rows == 0 else -(-longest_list(keys_per_row, rows, keys) // LIST_ALIGN) * LIST_ALIGN


def has_row_bits(tile_rows: int) -> bool:
    """Whether the rows of a list see different keys, where `tile_rows` query rows share a row of indices."""
    return tile_rows % (LIST_ROWS // 2) != 0
