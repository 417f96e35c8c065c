"""Shared by the tests of the sm90 kernels: masks, biases, and the names of the kernels that a call launches."""

import itertools
import re

import pytest
import torch
from gpu_inputs import mask_of, randn
from helpers import NAMES, run

from flash_dmattn import flash_dmattn_func

BIASES = pytest.mark.parametrize("pairs", ["none", "key", "dense"])


def bias_of(pairs, batch, heads, rows, keys, dtype=torch.bfloat16):
    return None if pairs == "none" else randn(batch, heads, 1 if pairs == "key" else rows, keys, dtype=dtype)


def biases_of(pairs, heads, rows, keys):
    """attn_bias and relative_bias, for one batch element."""
    if pairs == "relative":
        return None, torch.randn(1, heads, 2 * 40 + 1, device="cuda")
    return bias_of(pairs, 1, heads, rows, keys), None


def sms():
    return torch.cuda.get_device_properties(0).multi_processor_count


def names_of(call, of_kernels=True):
    """The names of the kernels that a call launches, joined. of_kernels=False: of its memsets, too."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        call()
        torch.cuda.synchronize()
    names = [event.name for event in profile.events()]
    kernels = [name for name in names if "flash_dmattn" in name and "kernel" in name]
    if not kernels:
        pytest.skip("the profiler sees no kernels")
    return " ".join(kernels if of_kernels else kernels + [name for name in names if "emset" in name])


def result_and_names(call, **options):
    """What a call returns, and `names_of`."""
    results = []
    names = names_of(lambda: results.append(call()), **options)
    return results[0], names


def is_tall(names):
    """Whether the forward uses a tall tile."""
    return re.search("FwdKernelTraits<[^>]*, true>", names) is not None


def kernels_of(tensors, mask=None, bias=None, **options):
    """The names of the kernels of the forward and of the backward."""
    leaves = [x.requires_grad_() for x in (*tensors, bias) if x is not None]
    out, forward = result_and_names(lambda: flash_dmattn_func(*tensors, mask, bias, **options))
    return forward, names_of(lambda: torch.autograd.grad(out, leaves, torch.randn_like(out)))


def generations(*args, **options):
    """The architectures of the kernels of the forward and of the backward: sets of "sm80" and "sm90"."""
    return tuple(set(re.findall("sm[89]0", names)) for names in kernels_of(*args, **options))


def hiding_bias(heads, rows, keys, dtype=torch.bfloat16):
    """A dense bias that masks some rows and scores, with -inf and with the least finite number."""
    bias = randn(1, heads, rows, keys, dtype=dtype)
    bias[:, :, rows // 7] = torch.finfo(dtype).min
    bias[:, :, rows // 5, ::3] = bias[:, :, rows // 3, 1::2] = -torch.inf
    bias[:, :, rows // 3, ::2] = torch.finfo(dtype).min
    return bias


def key_mask(batch, heads, keys):
    """A key mask: the first batch element sees nothing, the second only the first third of the keys."""
    mask = mask_of(batch, heads, 1, keys, visible=0.5)
    mask[0] = mask[1, ..., keys // 3 :] = False
    return mask


def check_masked_parts(tensors, mask, bias, masked_rows, masked_keys, masked_biases=None, **options):
    """Checks that results are the same with 0 and with NaN in masked rows (B, Sq), keys (B, Sk), and biases."""
    batch, rows, heads, _ = tensors[0].shape
    dout = torch.randn_like(tensors[0]) / 8
    dlse = torch.randn(batch, heads, rows, device=dout.device) / 8
    of_rows, of_keys = masked_rows[:, :, None, None], masked_keys[:, :, None, None]

    def results(fill):
        filled = [x.masked_fill(of, fill) for x, of in zip(tensors, (of_rows, of_keys, of_keys))]
        biases = bias if masked_biases is None else bias.masked_fill(masked_biases, fill)
        douts = dout.masked_fill(of_rows, fill), dlse.masked_fill(masked_rows[:, None], fill)
        return run(flash_dmattn_func, filled, mask, biases, *douts, **options)

    clean, dirty = results(0), results(torch.nan)
    for name, x, y in zip(NAMES, dirty, clean):
        assert not x.isnan().any(), name
        torch.testing.assert_close(x, y, rtol=1e-2, atol=1e-3, msg=name)
    return dirty


def serves_pairs(*args, **options):
    """Whether the forward and the backward use the pair bias kernels."""
    return tuple("pair_" in names for names in kernels_of(*args, **options))


def offsets(lengths):
    return torch.tensor([0, *itertools.accumulate(lengths)], device="cuda", dtype=torch.int32)


def distance(ours, others):
    """The largest difference, relative to the largest number; inf where only one of them is infinite."""
    apart = torch.where(ours == others, 0, (ours - others).abs())
    largest = others.masked_fill(others.isinf(), 0).abs().amax()
    return apart.nan_to_num(torch.inf, torch.inf).amax() / (largest + 2e-3)
