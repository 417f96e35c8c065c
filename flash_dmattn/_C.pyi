"""The compiled module (csrc/torch/module.cpp). Loading it registers the operators of torch.ops.flash_dmattn, which the
library calls. `mha_fwd`, `mha_bwd` and their variable-length forms call the same kernels without autograd; `masks` is
flash_dmattn.ops.MaskTensors."""

from torch import Tensor

has_cuda: bool  # whether the CUDA kernels were built

def why_not_usable() -> str | None:
    """None, or why the compiled kernels cannot run on this machine."""

def build_info() -> dict:
    """The build: torch, cpu_capability and why_no_cuda; with CUDA kernels also cuda, cuda_architectures, head_dims and
    dtypes."""

def report_fallbacks_to(receiver: object, /) -> None:
    """Passes the kind and the text of each fallback to a function."""

def check_fixed(
    query: object,
    key: object,
    value: object,
    mask: object,
    intervals: object,
    bias: object,
    cache_seqlens: object,
    /,
) -> None:
    """Refuses inputs of fixed length that do not fit."""

def check_varlen(
    query: object,
    key: object,
    value: object,
    mask: object,
    intervals: object,
    bias: object,
    cu_seqlens_q: object,
    cu_seqlens_k: object,
    max_seqlen_q: int,
    max_seqlen_k: int,
    /,
) -> None:
    """Refuses inputs of variable length that do not fit."""

def check_relative_bias(bias: object, query: object, key: object, batch: int, /) -> None:
    """Refuses a relative bias that does not fit."""

def check_kernels(query: Tensor, /) -> None:
    """Refuses a query that the kernels of its device do not take."""

def check_rows(name: str, rows: object, layout: str, /) -> None:
    """Refuses a tensor of rows that does not fit."""

def check_packed(name: str, packed: object, layout: str, parts: int, /) -> None:
    """Refuses a packed tensor of rows that does not fit."""

def check_kv(query: object, kv: Tensor, layout_q: str, same_dtype: bool, /) -> None:
    """Refuses packed keys and values that do not fit query."""

def check_cu_seqlens(
    name: str,
    cu_seqlens: object,
    reference: Tensor | None,
    whose: str,
    total: int | None,
    counted: str,
    or_less: bool,
    longest_name: str,
    longest: int | None,
    /,
) -> None:
    """Refuses offsets of sequences that do not fit."""

def fast_path(
    query: object,
    key: object,
    value: object,
    attn_mask: object,
    attn_bias: object,
    softmax_scale: object,
    is_causal: object,
    softcap: object,
    deterministic: object,
    return_lse: object,
    window_size: object,
    cache_seqlens: object,
    limits: object,
    /,
) -> object:
    """Attention of fixed length; None where Python must prepare the inputs, or raise an error."""

def varlen_fast_path(
    query: object,
    key: object,
    value: object,
    attn_bias: object,
    cu_seqlens_q: object,
    cu_seqlens_k: object,
    max_seqlen_q: object,
    max_seqlen_k: object,
    softmax_scale: object,
    is_causal: object,
    softcap: object,
    deterministic: object,
    return_lse: object,
    /,
) -> object:
    """Attention of packed sequences; None where Python must prepare the inputs, or raise an error."""

def kvcache_fast_path(
    query: object,
    k_cache: object,
    v_cache: object,
    key: object,
    value: object,
    bias_cache: object,
    bias: object,
    cache_seqlens: object,
    cache_batch_idx: object,
    block_table: object,
    cu_seqlens_q: object,
    max_seqlen_q: object,
    window_size: object,
    softmax_scale: object,
    is_causal: object,
    softcap: object,
    return_lse: object,
    batch_invariant: object,
    /,
) -> object:
    """Attention over a cache; None where Python must prepare the inputs, or raise an error."""

def mha_fwd(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    masks: tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None],
    bias: Tensor | None,
    softmax_scale: float,
    softcap: float,
    is_causal: bool,
    /,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of fixed length."""

def mha_varlen_fwd(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    masks: tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None],
    bias: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    softcap: float,
    is_causal: bool,
    /,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of variable length."""

def mha_bwd(
    dout: Tensor,
    dlse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    masks: tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None],
    bias: Tensor | None,
    softmax_scale: float,
    softcap: float,
    is_causal: bool,
    deterministic: bool,
    needs_dbias: bool,
    /,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dquery, dkey, dvalue, dbias) of fixed length; dbias is empty where it is not needed."""

def mha_varlen_bwd(
    dout: Tensor,
    dlse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    masks: tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None],
    bias: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    softcap: float,
    is_causal: bool,
    deterministic: bool,
    needs_dbias: bool,
    /,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dquery, dkey, dvalue, dbias) of variable length; dbias is empty where it is not needed."""
