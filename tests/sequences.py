"""Packed sequences of different lengths, and the same computed by one call for each sequence."""

import itertools

import torch
from helpers import rand_intervals, rand_mask

from flash_dmattn import KeyIntervalMask

LENGTHS_Q, LENGTHS_K = [3, 0, 129, 1, 300], [5, 4, 65, 0, 600]


def offsets(lengths, device="cpu"):
    """cu_seqlens (B + 1) of these lengths."""
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)


def slices(cu_seqlens):
    """The part of each sequence in the packed dimension."""
    return [slice(*ends) for ends in itertools.pairwise(cu_seqlens.tolist())]


def part_of(scores, rows, keys):
    """The part of one sequence of a packed mask or bias, with the shape of the function of fixed length."""
    if scores is None:
        return None
    if isinstance(scores, KeyIntervalMask):
        return scores.sequence(keys.start, keys.stop)
    if scores.ndim == 2:
        return scores[keys].T[None, :, None, :]
    return scores[rows, :, : keys.stop - keys.start].transpose(0, 1)[None]


def one_by_one(function, query, key, value, mask, bias, cu_q, cu_k, **options):
    """(out, lse) of packed sequences, by one call of fixed length for each."""
    outs, lses = [], []
    for rows, keys in zip(slices(cu_q), slices(cu_k)):
        out, lse = function(
            *(query[None, rows], key[None, keys], value[None, keys]),
            *(part_of(mask, rows, keys), part_of(bias, rows, keys)),
            return_lse=True,
            **options,
        )
        outs.append(out[0])
        lses.append(lse[0])
    return torch.cat(outs), torch.cat(lses, dim=1)


def gradients(function, tensors, mask, bias, dout, dlse, *args, **options):
    """(out, lse, dq, dk, dv, dbias) of a function that returns (out, lse)."""
    leaves = [x.detach().requires_grad_() for x in (*tensors, bias) if x is not None]
    out, lse = function(*leaves[:3], mask, leaves[3] if bias is not None else None, *args, **options)
    return out.detach(), lse.detach(), *torch.autograd.grad([out, lse], leaves, [dout.to(out), dlse.to(lse)])


class Sequences:
    """LENGTHS_Q rows beside LENGTHS_K keys: empty ones, single rows, several blocks."""

    total_q, total_k, longest_q, longest_k = sum(LENGTHS_Q), sum(LENGTHS_K), max(LENGTHS_Q), max(LENGTHS_K)

    def __init__(self, device="cpu"):
        self.device = device
        self.cu_q, self.cu_k = offsets(LENGTHS_Q, device), offsets(LENGTHS_K, device)
        self.lengths = (self.cu_q, self.cu_k, self.longest_q, self.longest_k)

    def mask(self, kind, heads, visible=0.1):
        """A random mask: "none", "bool" (total_q, heads, longest_k), "key" (total_k, heads) or "intervals"."""
        if kind == "none":
            return None
        if kind == "intervals":
            return rand_intervals(self.total_k, heads, rows=self.longest_q, device=self.device)
        shape = (self.total_q, heads, self.longest_k) if kind == "bool" else (self.total_k, heads)
        return rand_mask(*shape, visible=visible, device=self.device)

    def dense(self, mask):
        """bool (total_q, heads, longest_k) of intervals; other masks as given."""
        if not isinstance(mask, KeyIntervalMask):
            return mask
        dense = torch.zeros(self.total_q, mask.heads, self.longest_k, dtype=torch.bool, device=self.device)
        for rows, keys in zip(slices(self.cu_q), slices(self.cu_k)):
            one = mask.sequence(keys.start, keys.stop).to_dense(rows.stop - rows.start)[0]
            dense[rows, :, : keys.stop - keys.start] = one.transpose(0, 1)
        return dense

    def bias_shape(self, kind, heads):
        return {"none": None, "key": (self.total_k, heads), "dense": (self.total_q, heads, self.longest_k)}[kind]

    def fill_behind_keys(self, bias, fill=torch.nan):
        """Writes `fill` into a dense bias where a sequence has no keys."""
        for rows, keys in zip(slices(self.cu_q), slices(self.cu_k)):
            bias[rows, :, keys.stop - keys.start :] = fill
