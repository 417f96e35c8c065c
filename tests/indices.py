"""Shared by the tests of indices: random indices, and the dense masks that they stand for."""

import torch


def rand_indices(*shape, keys, none=0.2, device="cpu"):
    """int32 (.., rows, k): positions of keys, some of them repeated, and -1 with probability `none`."""
    indices = torch.randint(0, max(keys, 1), shape, dtype=torch.int32, device=device)
    return indices.masked_fill_(torch.rand(shape, device=device) < (none if keys else 2), -1)


def dense_of(indices, tile_rows, seqlen_q, seqlen_k, mask=None, is_causal=False):
    """bool ({B|1}, {H|Hkv|1}, Sq, Sk): the dense mask, computed key by key."""
    row_of = torch.arange(seqlen_q, device=indices.device) // tile_rows
    keys = torch.arange(seqlen_k, dtype=torch.int32, device=indices.device)
    named = torch.stack([(indices == key).any(-1) for key in keys], -1) if seqlen_k else indices[..., :0].bool()
    dense = named[:, :, row_of]
    if mask is not None:
        shown = mask.to_dense(seqlen_q)
        heads = max(shown.shape[1], dense.shape[1])
        dense, shown = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (dense, shown))
        dense = dense & shown
    return dense.tril(seqlen_k - seqlen_q) if is_causal else dense
