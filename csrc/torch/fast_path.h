// flash_dmattn_func, flash_dmattn_varlen_func and flash_dmattn_with_kvcache from Python to the operator, for calls
// whose inputs need no preparation in Python.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace flash_dmattn {

// Attention of fixed length, with sparse="auto". Returns None where functions in Python must prepare the inputs, or
// raise an error for what is not checked here: the result is the same either way. The arguments are those of
// flash_dmattn_func; `limits` are those of masks/choice.py.
pybind11::object fast_path(pybind11::handle query, pybind11::handle key, pybind11::handle value,
                           pybind11::handle attn_mask, pybind11::handle attn_bias, pybind11::handle softmax_scale,
                           pybind11::handle is_causal, pybind11::handle softcap, pybind11::handle deterministic,
                           pybind11::handle return_lse, pybind11::handle window_size, pybind11::handle cache_seqlens,
                           pybind11::handle limits);

// The same for packed sequences without a mask and window_size.
pybind11::object varlen_fast_path(pybind11::handle query, pybind11::handle key, pybind11::handle value,
                                  pybind11::handle attn_bias, pybind11::handle cu_seqlens_q,
                                  pybind11::handle cu_seqlens_k, pybind11::handle max_seqlen_q,
                                  pybind11::handle max_seqlen_k, pybind11::handle softmax_scale,
                                  pybind11::handle is_causal, pybind11::handle softcap, pybind11::handle deterministic,
                                  pybind11::handle return_lse);

// The same for flash_dmattn_with_kvcache without relative_bias and sinks.
pybind11::object kvcache_fast_path(pybind11::handle query, pybind11::handle k_cache, pybind11::handle v_cache,
                                   pybind11::handle key, pybind11::handle value, pybind11::handle bias_cache,
                                   pybind11::handle bias, pybind11::handle cache_seqlens,
                                   pybind11::handle cache_batch_idx, pybind11::handle block_table,
                                   pybind11::handle cu_seqlens_q, pybind11::handle max_seqlen_q,
                                   pybind11::handle window_size, pybind11::handle softmax_scale,
                                   pybind11::handle is_causal, pybind11::handle softcap, pybind11::handle return_lse,
                                   pybind11::handle batch_invariant);

}  // namespace flash_dmattn
