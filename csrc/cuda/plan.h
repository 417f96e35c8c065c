// Plans, made on the host before anything is launched, and the arguments of the kernels that they select.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <functional>

#include "cuda/common/workspace.h"
#include "params.h"

namespace flash_dmattn::cuda {

// Whether the query heads of a GQA group share key lists, mask and biases, so that they may share an n_block.
inline bool heads_share_keys(const AttentionParams& p) {
    const auto shared = [&](const auto& view) { return !view.present() || view.heads <= p.kv_heads; };
    return shared(p.packed_mask) && shared(p.intervals) && shared(p.lists) && shared(p.bias) && shared(p.relative_bias);
}

// Whether work tiles are ordered batch element by batch element: few of these share a dense bias, and CTAs that read the
// same tile of it run together, so that it is read from memory once.
inline bool orders_batch_first(const AttentionParams& p) {
    constexpr int64_t kMaxBatch = 8;
    return p.bias.kind == BiasKind::kDense && p.bias.batches == 1 && p.batch <= kMaxBatch;
}

// Whether the softmax may run on unscaled scores, Q K^T: nothing is added to them, and scaling keeps their order.
inline bool can_leave_scores_unscaled(const AttentionParams& p) {
    return !p.bias.present() && !p.relative_bias.present() && p.softcap == 0 && p.softmax_scale > 0;
}

// About the number of keys of a list, which only the device knows; without lists, of a sequence.
inline int64_t estimated_list_length(const AttentionParams& p) {
    return p.lists.estimated_length > 0 ? std::min(p.lists.estimated_length, p.seqlen_k) : p.seqlen_k;
}

// Elements of the gradient of relative_bias.
inline int64_t relative_bias_elements(const AttentionParams& p) {
    const RelativeBiasView& view = p.relative_bias;
    return view.batches * view.heads * view.size();
}

// Tiles of a dense bias's gradient, of all heads and batch elements. With variable length every sequence has as many as
// the longest one.
inline int64_t count_dbias_tiles(const BwdParams& p, int64_t rows, int64_t keys) {
    const int64_t tiles = (p.seqlen_q + rows - 1) / rows * ((p.seqlen_k + keys - 1) / keys);
    return tiles * p.dbias.heads * (p.cu_seqlens_q == nullptr ? p.dbias.batches : p.batch);
}
// The (batch element, head) pairs that share an entry of a dense bias.
inline int64_t count_contributors(const BwdParams& p) {
    return p.dbias.batch_group_size * (p.heads / p.dbias.heads);
}

struct DistanceRange;
struct ExactSum;
struct FwdArgs;
struct BwdArgs;

// Launches the selected kernels. A plan that only one architecture needs, such as sm80's tile, is bound into it.
using FwdLauncher = std::function<void(const FwdArgs&, cudaStream_t)>;
using BwdLauncher = std::function<void(const BwdArgs&, cudaStream_t)>;

struct FwdPlan : WorkspaceLayout {
    static constexpr int kMaxSplits = 64;

    FwdLauncher launch;                                    // empty where the output has no elements
    int64_t num_splits = 1;                                // split-KV: CTAs that share the keys of an m_block
    WorkspaceBuffer split_counters, split_out, split_lse;  // FwdArgs; the counters are zeroed before the launch
    WorkspaceBuffer tile_count_semaphore;                  // FwdParams; zeroed before the launch
    WorkspaceBuffer visible_distances;                     // FwdArgs
};

// A kernel parameter: compiled kernels depend on the order of the members, here and in params.h.
struct FwdArgs : FwdParams {
    int64_t num_splits;
    // Null unless num_splits > 1:
    int32_t* split_counters;  // [m_blocks of all heads and batch elements]: finished splits
    float* split_out;         // [num_splits, B, H, Sq, D]
    float* split_lse;         // [num_splits, B, H, Sq]
    // [{B|1}, {H|Hkv|1}] as relative_bias; null: no distance is known to be masked.
    DistanceRange* visible_distances;
};

// Which kernel writes the gradient of a dense bias. dx is the gradient of the scores after softcap and bias.
enum class DenseDbias : int32_t {
    kNone,           // no gradient is needed
    kDirect,         // the main kernel stores dx: each entry belongs to one batch element and one head
    kClusterReduce,  // sm80's main kernel: the CTAs of the batch elements that share an entry reduce dx through DSMEM
    kSerialReduce,   // sm90's main kernel: these CTAs add dx to dbias one after another, in the bias's dtype
    kAtomic,         // the main kernel adds dx to float32 sums, small enough to stay in the L2 cache
    kRecompute,      // a separate kernel recomputes dx
};

// How the backward is divided among CTAs. A kernel parameter, as part of BwdArgs.
struct BwdTiling {
    int64_t dquery_m_blocks = 0;  // m_blocks of one head in dquery_accum; with variable length, of all sequences
    // sm90, dense: launches of the main kernel, for some of the KV heads each, that use dquery_accum one after another.
    int64_t num_launches = 1;
    DenseDbias dense_dbias = DenseDbias::kNone;
    // dbias is reduced in m_block x n_block tiles, where dense_dbias is kAtomic or kRecompute, and with pair bias:
    int64_t dbias_tiles = 0;   // of all heads and batch elements of dbias; pair bias: m_blocks of them
    int64_t dbias_splits = 1;  // CTAs among which the batch elements and heads of a tile are split
    int64_t dbias_run = 1;     // sm80, kRecompute: consecutive n_blocks of a CTA
    // Where keys are gathered by lists:
    int64_t qheads_per_tile = 1;   // sm80: query heads of a CTA, each with an equal share of its rows
    int64_t list_splits = 0;       // sm90: CTAs that share a list for all heads of a GQA group; 0: a CTA has one head
    int64_t dquery_slots = 0;      // with list_splits: m_blocks, of all heads of a group, that dquery_accum holds
    int64_t dkv_rows = 0;          // B * Sk; with variable length total_k
    int64_t dkv_cols = 0;          // D, rounded up to the kernel's head dimension
    int64_t dbias_accum_size = 0;  // elements of a dense bias that heads or batch elements share, else 0
};

// A slot of dquery_accum, over lists with list_splits.
struct DquerySlotState {
    int32_t finished_splits;  // since the workspace was zeroed
    int32_t epoch;            // how often the slot has been emptied
};

struct BwdPlan : BwdTiling, WorkspaceLayout {
    BwdLauncher launch;               // empty where the batch or the heads are 0
    bool has_preprocess = true;       // false: the main kernel computes D_i, and zeroed_bytes is 0
    bool adds_drelative_bias = true;  // false: the main kernel writes the gradient of a dense float32 bias
    int64_t delta_rows = 0;           // rows of one head; with variable length, of all sequences
    int64_t zeroed_bytes = 0;         // bytes at the start of the workspace that the preprocess zeroes
    // BwdArgs:
    WorkspaceBuffer dquery_accum, dquery_semaphores, dquery_slot_states, tile_count_semaphore, progress_counters;
    WorkspaceBuffer dbias_partials, dbias_accum, dkv_accum;
    WorkspaceBuffer drelative_bias_exact;  // BwdArgs; zeroed before the launch
    WorkspaceBuffer visible_distances;     // BwdArgs
    WorkspaceBuffer delta;                 // BwdParams
};

// A kernel parameter: compiled kernels depend on the order of the members, here and in params.h.
struct BwdArgs : BwdParams, BwdTiling {
    // dQ, float32, in the order of the accumulator registers: [{B} H, dquery_m_blocks, rows of an m_block * D rounded
    // up], where num_launches > 1 for the heads of one launch; or with list_splits [dquery_slots, H / Hkv, the same].
    float* dquery_accum;
    // Deterministic, not over lists: for each tile of dquery_accum, on sm90 and MMA warpgroup, which n_block may add next
    // (sm90: 1 + the last one that has added, or 0).
    int32_t* dquery_semaphores;
    DquerySlotState* dquery_slot_states;  // with list_splits: [dquery_slots]
    int32_t* tile_count_semaphore;        // [1]: the tile scheduler's counter; null: static
    // Lists, deterministic: [B, H, m_blocks]; kSerialReduce: [work tiles].
    int32_t* progress_counters;
    float* dbias_partials;           // [dbias_splits, dbias_tiles, elements of a tile], where kAtomic or split
    float* dkv_accum;                // lists: dkey, then dvalue, unscaled, [dkv_rows, Hkv, dkv_cols] each
    float* dbias_accum;              // lists: in the bias's shape, [dbias_accum_size]
    int64_t relative_bias_entries;   // of one batch element and head
    ExactSum* drelative_bias_exact;  // deterministic: in the shape of drelative_bias; else null
    // [{B|1}, {H|Hkv|1}] as relative_bias; null: no distance is known to be masked.
    DistanceRange* visible_distances;
};

}  // namespace flash_dmattn::cuda
