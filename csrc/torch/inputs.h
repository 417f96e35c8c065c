// The operators' arguments as the kernels' params.
#pragma once

#include "checks.h"
#include "index_params.h"

namespace flash_dmattn {

// Which pairs see each other: by at most one of mask and intervals, by lists of keys, or by both lists and intervals.
// See KeyListsView. On CUDA also by a mask and its lists, where these may not have been made (pack_and_list_mask).
struct MaskTensors {
    // bool ({B|B/n|1}, {H|Hkv|1}, {Sq|1}, {Sk|1}); of variable length (total_k, heads) or (total_q, heads, Sk). On CUDA what
    // pack_mask made of it: int32, 32 keys a word, and of every tile of 64 x 64 pairs nine bytes in mask_tiles.
    OptionalTensor mask, mask_tiles;
    // int32 (2, {B|1}, {H|Hkv|1}, Sk), starts and ends; of variable length (2, total_k, heads)
    OptionalTensor intervals;
    OptionalTensor list_keys;   // int32 (capacity)
    OptionalTensor list_spans;  // int64 (2, {B|B/n|1}, {H|Hkv|1}, row tiles): where in list_keys lists begin and end
    // int32 (capacity, 4), a bit for each of the 128 rows of a list. Or (0, 4) or (0, 2), where every one of the 128 or
    // 64 rows of a list sees its keys.
    OptionalTensor list_rows;
};

struct Options {
    double softmax_scale, softcap;
    bool is_causal;
};

struct Inputs {
    Tensor query, key, value;
    OptionalTensor bias;
    MaskTensors masks;
    OptionalVarlen varlen;
    OptionalTensor seqlens_k;  // int32 (B), of fixed length
    Options options;

    bool is_varlen() const { return varlen.has_value(); }
};

// Checks the inputs and fills what forward and backward have in common. A packed mask has its sizes alone: the rest is
// CUDA's.
void fill(AttentionParams& params, const Inputs& inputs);

// The problem of a mask alone, whose batch elements and heads are the mask's: what lists are made from.
AttentionParams mask_params(const OptionalTensor& mask, const OptionalTensor& intervals, int64_t seqlen_q,
                            int64_t seqlen_k, bool is_causal, const OptionalTensor& cu_seqlens_q,
                            const OptionalTensor& cu_seqlens_k);

// The same of what an indexer has chosen, with intervals or without. The batch elements and heads are those of the lists.
IndexListsParams index_params(const Tensor& indices, const OptionalTensor& intervals, int64_t tile_rows,
                              int64_t seqlen_q, int64_t seqlen_k, bool is_causal, const OptionalTensor& cu_seqlens_q,
                              const OptionalTensor& cu_seqlens_k);

inline bool nothing_to_do(const AttentionParams& params) { return params.batch == 0 || params.heads == 0; }

}  // namespace flash_dmattn
