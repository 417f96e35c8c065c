"""The paths of the conformance suite: a device and its kernels, a kind of mask, and dense blocks or key lists."""

import functools
from dataclasses import dataclass

import helpers
import pytest
import torch
from gpu_inputs import runs_hopper_kernels

from flash_dmattn import (
    TRITON_AVAILABLE,
    KeyIntervalMask,
    flash_dmattn_func,
    flash_dmattn_func_auto,
    flash_dmattn_varlen_func,
    ops,
)

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
HALVES = [torch.bfloat16, torch.float16]
CAUSAL = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])

# The kernels of every architecture run where both are available; elsewhere the library chooses.
GENERATIONS = ("sm80", "sm90") if runs_hopper_kernels() else (None,)


@dataclass(frozen=True)
class Path:
    """How a call is computed.

    `mask` is "none", "bool", "key" (a bool mask that is the same for all rows) or "intervals"; `sparse` is the argument
    of that name; `kernels` names the CUDA kernels ("sm80", "sm90"), None leaves the choice to the library.
    """

    device: str = "cpu"
    mask: str = "none"
    sparse: str = "auto"
    kernels: str | None = None
    backend: str | None = None

    def __str__(self):
        where = self.backend or self.kernels or self.device
        return f"{where}-{self.mask}{' lists' if self.by_lists else ''}"

    @property
    def on_cuda(self):
        return self.device == "cuda" and self.backend is None

    @property
    def on_cpu(self):
        return self.device == "cpu" and self.backend is None

    @property
    def by_lists(self):
        return self.sparse == "lists"

    @property
    def dtype(self):
        return torch.bfloat16 if self.on_cuda else torch.float32

    @property
    def marks(self):
        if self.backend == "triton":
            return [pytest.mark.skipif(not TRITON_AVAILABLE, reason="Triton is not available")]
        if self.on_cpu:
            return []
        return [pytest.mark.gpu, pytest.mark.skipif(not ops.cuda_is_built(), reason="built without CUDA kernels")]

    @property
    def function(self):
        if self.backend is not None:
            return flash_dmattn_func_auto(self.backend)
        return functools.partial(flash_dmattn_func, sparse=self.sparse)

    @property
    def varlen_function(self):
        return functools.partial(flash_dmattn_varlen_func, sparse=self.sparse)

    def inputs(self, *args, dtype=None, **sizes):
        return helpers.inputs(*args, dtype=dtype or self.dtype, device=self.device, **sizes)

    def randn(self, *shape, dtype=None):
        return torch.randn(*shape, device=self.device).to(dtype or self.dtype)

    def rand_mask(self, *shape, visible=0.6):
        return helpers.rand_mask(*shape, visible=visible, device=self.device)

    def rand_intervals(self, *shape, rows):
        longest = max(rows if self.on_cuda else rows // 3, 7)
        return helpers.rand_intervals(*shape, rows=rows, longest=longest, device=self.device)

    def make_mask(self, batch, heads, seqlen_q, seqlen_k):
        """A random mask of this kind. Where lists are used, rows see few keys, some rows none, and some keys no row."""
        if self.mask == "none":
            return None
        if self.mask == "intervals":
            return self.rand_intervals(batch, heads, seqlen_k, rows=seqlen_q)
        if self.mask == "key":
            return self.rand_mask(batch, heads, 1, seqlen_k, visible=0.4)
        mask = self.rand_mask(batch, heads, max(seqlen_q, 1), seqlen_k, visible=0.1 if self.by_lists else 0.6)
        if self.by_lists:
            mask[..., torch.rand(seqlen_k, device=self.device) < 0.4] = False
            if seqlen_q > 1:
                mask[..., seqlen_q // 3, :] = False
        return mask

    def check(self, tensors, mask=None, bias=None, **options):
        return helpers.check(tensors, mask, bias, function=self.function, **options)


def with_common_keys(mask, seqlen_q):
    """The mask with every fifth key visible to all rows."""
    if isinstance(mask, KeyIntervalMask):
        start, end = mask.start.clone(), mask.end.clone()
        start[..., ::5], end[..., ::5] = 0, seqlen_q + 3
        return KeyIntervalMask(start, end)
    mask = mask.clone()
    mask[..., ::5] = True
    return mask


KINDS = {
    "none": ("none", "auto"),
    "bool": ("bool", "tiles"),
    "key": ("key", "tiles"),
    "intervals": ("intervals", "tiles"),
    "bool lists": ("bool", "lists"),
    "key lists": ("key", "lists"),
    "interval lists": ("intervals", "lists"),
}
LISTS = ("interval lists", "bool lists", "key lists")


def cpu(*kinds):
    return [Path("cpu", *KINDS[kind]) for kind in kinds]


def cuda(*kinds):
    return [Path("cuda", *KINDS[kind], kernels) for kernels in GENERATIONS for kind in kinds]


def triton(*kinds):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return [Path(device, *KINDS[kind], backend="triton") for kind in kinds]


def both(*kinds):
    return cpu(*kinds) + cuda(*kinds)


def case(path, *values, marks=()):
    """A pytest.param whose first value is a path; its id names all values."""
    return pytest.param(path, *values, marks=[*path.marks, *marks], id="-".join(map(str, (path, *values))))


def on(*paths):
    """Parametrizes a test by its paths alone."""
    return pytest.mark.parametrize("path", [case(path) for path in paths])
