// What is decided of a call before anything is launched, and what its kernels are then given: the problem, how it is
// cut, and the parts of the call's one workspace.
#pragma once

#include "params.h"

namespace flash_dmattn::cuda {

// Kernels of one generation: a device is served by those of its own where they are built, else by older ones.
enum class Arch : int32_t {
    kSm80,  // mma.sync, cp.async: compute capability 8.0 and up
    kSm90,  // wgmma, the copy engine: 9.0
};

// Whether the query heads that share a key/value head go by the same lists of keys, mask and key bias, so that they may
// share a tile of keys.
inline bool heads_share_keys(const AttentionParams& p) {
    const auto shared = [&](const auto& view) { return !view.present() || view.heads <= p.kv_heads; };
    return shared(p.packed_mask) && shared(p.intervals) && shared(p.lists) && shared(p.bias);
}

// A part of the workspace.
struct WorkspacePart {
    int64_t offset = 0;
    int64_t bytes = 0;

    template <typename X>
    X* in(void* workspace) const {  // null where nothing is needed
        return bytes == 0 ? nullptr : reinterpret_cast<X*>(static_cast<char*>(workspace) + offset);
    }
};

// Parts one after the other, aligned as PyTorch's allocator aligns the whole.
struct WorkspaceLayout {
    static constexpr int64_t kAlign = 256;
    int64_t bytes = 0;

    WorkspacePart take(int64_t size) {
        const WorkspacePart part{bytes, size};
        bytes += (size + kAlign - 1) / kAlign * kAlign;
        return part;
    }
};

// Rows of a block of the forward: many, at most 64, or at most 16 or 32, as when decoding.
enum class FwdTileKind : int32_t { kPrefill, kSmall, kDecode };

struct FwdPlan {
    static constexpr int kMaxSplits = 64;

    Arch arch = Arch::kSm80;
    int head_dim = 0;   // of the kernels that serve the call; 0 where there is nothing to do
    bool pair = false;  // by the kernels for a dense bias that batch elements share (sm90/pair_bias/run.h)
    FwdTileKind tile = FwdTileKind::kPrefill;
    int64_t pack = 1;             // query heads that share a tile
    int64_t num_splits = 1;       // parts that the keys of a tile are cut into
    int64_t num_split_tiles = 0;  // tiles of rows whose keys are split, of all heads and batch elements; no fewer
    WorkspacePart split_counters, split_out, split_lse;  // tickets are 0 when the kernels begin
    int64_t workspace_bytes = 0;
};

struct FwdArgs : FwdParams {
    int64_t num_splits;
    // Where splits > 1:
    int32_t* split_counters;  // [tiles of rows]: blocks that have finished
    float* split_out;         // [splits, B, H, Sq, D]
    float* split_lse;         // [splits, B, H, Sq]
};

// Who writes the gradient of a dense bias.
enum class DenseDbias : int32_t {
    kNone,           // nobody: there is none
    kDirect,         // each entry belongs to one batch element and one head: the main kernel, where dx is made
    kClusterReduce,  // batch elements share it: the main kernel, whose blocks exchange dx
    kAtomic,         // whoever shares it: the main kernel adds dx to float32 sums, few enough for the cache to hold
    kRecompute,      // whoever shares it: a kernel that computes dx again
};

// How the backward is cut.
struct BwdCuts {
    int64_t dquery_tiles = 0;  // tiles of rows of one head; of variable length, of all sequences together
    DenseDbias dense_dbias = DenseDbias::kNone;
    int64_t dbias_tiles = 0;
    int64_t dbias_splits = 1;
    int64_t dbias_run = 1;  // tiles of keys, one after the other, that one block makes of a shared dbias
    // Where the keys are gathered by lists:
    int64_t tile_heads = 1;        // query heads of a block, each with an equal share of its rows
    int64_t list_splits = 0;       // of a list, each a block's, where the heads of a group share its keys; else 0
    int64_t dquery_slots = 0;      // there: tiles of rows, of all heads of a group, whose dQ dquery_accum can hold
    int64_t dkv_rows = 0;          // B * Sk; of variable length total_k
    int64_t dkv_cols = 0;          // D, rounded up
    int64_t dbias_accum_size = 0;  // elements of a dense bias that heads or batch elements share
};

struct BwdPlan : BwdCuts {
    Arch arch = Arch::kSm80;
    int head_dim = 0;          // of the kernels that serve the call; 0 where there is nothing to do
    bool pair = false;         // by the kernels for a dense bias that batch elements share (sm90/pair_bias/run.h)
    bool small_tiles = false;  // those for little shared memory
    WorkspacePart dquery_accum, dquery_semaphore, dbias_parts, dkv_accum, dbias_accum, progress_counters, delta;
    int64_t delta_rows = 0;    // of one head; of variable length, of all sequences together
    int64_t zeroed_bytes = 0;  // of the workspace, from its start: they are 0 when the kernels begin
    int64_t workspace_bytes = 0;
};

struct BwdArgs : BwdParams, BwdCuts {
    // float32 [{B} H, tiles of rows, rows of a tile * D rounded up], or with list_splits [dquery_slots, H / Hkv, ..], in the
    // order in which registers hold a tile.
    float* dquery_accum;
    int32_t*
        dquery_semaphore;  // where deterministic: whose turn it is, of each tile of rows, and one ticket; or of each slot
    float* dbias_parts;    // [dbias_splits, dbias_tiles, a tile], where kAtomic or dbias_splits > 1
    // Where the keys are gathered by lists:
    float* dkv_accum;            // dkey, then dvalue, unscaled: [dkv_rows, Hkv, dkv_cols] each
    float* dbias_accum;          // in the bias's shape
    int32_t* progress_counters;  // [B H tiles of rows] and one ticket, where deterministic
};

}  // namespace flash_dmattn::cuda
