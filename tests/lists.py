"""Key lists against the dense masks that they stand for."""

import itertools

import torch


def check_lists(lists, dense):
    """Asserts that each list holds, sorted, the keys that any row of its tile sees, and which rows see them.

    `dense`: bool (sequences, heads, Sq, Sk).
    """
    spans, all_keys = lists.kv_indptr.cpu().flatten(1), lists.kv_indices.cpu()
    all_rows, dense = None if lists.kv_row_bits is None else lists.kv_row_bits.cpu(), dense.cpu()
    assert (lists.batches, lists.heads) == tuple(dense.shape[:2])
    assert lists.num_m_blocks == (1 if lists.row_broadcast else -(-dense.shape[2] // 128))
    tiles = itertools.product(dense.flatten(0, 1), range(lists.num_m_blocks))
    for (begin, end), (visible, number) in zip(spans.T.tolist(), tiles, strict=True):
        tile = visible if lists.row_broadcast else visible[128 * number : 128 * (number + 1)]
        keys = tile.any(dim=0).nonzero().flatten()
        size = keys.numel()
        assert begin % 64 == 0 and end - begin == -(-size // 64) * 64
        assert torch.equal(all_keys[begin : begin + size], keys.int()) and (all_keys[begin + size : end] == -1).all()
        if all_rows is None:
            continue
        words = all_rows[begin : begin + size]
        rows = torch.stack([words[:, i // 32] >> (i % 32) & 1 for i in range(128)]).bool()
        assert torch.equal(rows[: tile.shape[0]], tile[:, keys]) and not rows[tile.shape[0] :].any()
        if lists.kv_row_bits.device.type == "cpu":
            assert (all_rows[begin + size : end] == 0).all()
