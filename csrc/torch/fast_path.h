// flash_dmattn_func and flash_dmattn_varlen_func from Python to the operator, for calls whose inputs need no preparation
// in Python.
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

}  // namespace flash_dmattn
