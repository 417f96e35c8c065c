// The tile scheduler of the backward: which work tile, (n_block, KV head, batch), a CTA processes.
//
// A CTA has one work tile. The (KV head, batch) pairs are numbered in the order of dquery_accum: fixed length, batch by
// batch; variable length, head by head, with all sequences of a head as one pair if packs_n_blocks. Long sequences have
// several launches, each for a range of pairs.
#pragma once

#include "cuda/common/packed_blocks.cuh"
#include "cuda/plan.h"

namespace flash_dmattn::cuda::sm90 {

// One for each n_block of each pair.
constexpr int64_t count_bwd_work_tiles(const BwdParams& p, int keys) {
    return ceil_div<int64_t>(p.seqlen_k, keys) * p.kv_heads * p.batch;
}

// What launches divide, contiguous in dquery_accum: pairs, or with variable length KV heads, each of all sequences.
constexpr int64_t count_launch_units(const BwdParams& p) {
    return p.kv_heads * (p.cu_seqlens_q == nullptr ? p.batch : 1);
}

// The number of batch elements, of consecutive work tiles, that reduce the gradient of a dense bias serially, else 1.
constexpr __host__ __device__ int64_t serial_group_size(const BwdArgs& p) {
    return p.dense_dbias == DenseDbias::kSerialReduce ? p.dbias.batch_group_size : 1;
}

// The pairs of a launch. Those of batch elements that reduce the gradient of a dense bias serially count as one.
struct BwdLaunchRange {
    int first, count;
    int num_n_blocks;     // of a pair
    bool packs_n_blocks;  // n_blocks of packed sequences are numbered as in common/packed_blocks.cuh
};

// An n_block of one pair.
struct BwdWorkTile {
    int n_block, kv_head, first_head, qheads_per_kv;  // the query heads [first_head, first_head + qheads_per_kv)
    int batch;
    int batch_rank;  // among the batch elements that reduce the gradient of a dense bias serially, else 0

    // index: of the launch. keys: of an n_block.
    __device__ __forceinline__ BwdWorkTile(const BwdArgs& p, const BwdLaunchRange& range, int index, int keys) {
        // The CTAs of a serial reduction are neighbours.
        const int batch_group_size = static_cast<int>(serial_group_size(p));
        const int num_n_blocks = range.num_n_blocks, kv_heads = static_cast<int>(p.kv_heads);
        batch_rank = index % batch_group_size;
        index /= batch_group_size;
        int pair = index / num_n_blocks;
        n_block = index % num_n_blocks;
        if (p.is_causal || p.deterministic) {
            // kPairsAtOnce of these at a time, lower n_blocks before higher ones. Under causality more rows see the
            // lower ones: the longest work tiles of a sequence start first. In deterministic order a CTA waits for lower
            // n_blocks: few of one head should be active at once.
            constexpr int kPairsAtOnce = 16;  // their Q and dO stay in L2
            const int first = pair / kPairsAtOnce * kPairsAtOnce, at_once = min(range.count - first, kPairsAtOnce);
            n_block = (index - first * num_n_blocks) / at_once;
            pair = first + (index - first * num_n_blocks) % at_once;
        }
        if (range.packs_n_blocks) {
            const PackedBlock block(p.cu_seqlens_k, p.batch, n_block, keys);
            n_block = block.index;
            batch = block.batch;
            kv_head = range.first + pair;
        } else {
            const bool is_varlen = p.cu_seqlens_q != nullptr;
            const int of_call = range.first + pair, batches = static_cast<int>(p.batch);
            // Both in locals first: otherwise the compiler emits one of the divisions twice.
            const int head = is_varlen ? of_call / batches : of_call % kv_heads;
            const int batch_group = is_varlen ? of_call % batches : of_call / kv_heads;
            batch = batch_group * batch_group_size + batch_rank;
            kv_head = head;
        }
        qheads_per_kv = static_cast<int>(p.heads) / kv_heads;
        first_head = kv_head * qheads_per_kv;
    }
};

}  // namespace flash_dmattn::cuda::sm90
