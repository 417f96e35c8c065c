// The tile scheduler of the backward over key lists.
#pragma once

#include "cuda/common/sequence.cuh"
#include "cuda/plan.h"

namespace flash_dmattn::cuda::sm80 {

// Work tiles of one chain add to the same entries of dK, dV or dbias. With deterministic=True they do so in the order
// of the chain: each publishes its progress, the first key that it has not added to yet, and the next one may add to
// all keys below. Lists are sorted, so that one work tile follows the previous one closely.
struct GatherBwdTileScheduler {
    int chains;
    int heads, batches, num_m_blocks;  // of one chain; `heads` counts the packed heads of a CTA once

    // Rows of a CTA of `max_rows` rows: those of one list.
    static constexpr __host__ __device__ int block_m(const BwdArgs& p, int max_rows) {
        return p.lists.num_m_blocks > 1 && p.lists.m_block_rows < max_rows ? static_cast<int>(p.lists.m_block_rows)
                                                                           : max_rows;
    }

    constexpr __host__ __device__ GatherBwdTileScheduler(const BwdArgs& p, int max_rows)
        : chains(1), heads(static_cast<int>(p.heads / p.qheads_per_tile)), batches(static_cast<int>(p.batch)),
          num_m_blocks(static_cast<int>(ceil_div<int64_t>(p.seqlen_q, block_m(p, max_rows)))) {
        const bool accumulates_dbias = p.dbias_accum_size > 0;  // more heads than a GQA group may share its entries
        if (!accumulates_dbias || p.dbias.heads > 1) chains = static_cast<int>(p.kv_heads), heads /= chains;
        const int group_size = accumulates_dbias ? static_cast<int>(p.dbias.batch_group_size) : 1;
        chains *= batches / group_size, batches = group_size;
    }
    constexpr __host__ __device__ int chain_length() const { return heads * batches * num_m_blocks; }
};

struct GatherBwdWorkTile {
    Sequence sequence;
    int first_head, first_row;
    int chain, chain_idx;  // position in the chain

    __device__ GatherBwdWorkTile(const BwdArgs& p, int max_rows, unsigned index) : sequence(p, 0) {
        const GatherBwdTileScheduler scheduler(p, max_rows);
        const unsigned length = scheduler.chain_length(), chains = scheduler.chains;
        chain = p.deterministic ? index % chains : index / length;
        // Unordered, the last rows start first: under causality they have the longest lists.
        chain_idx = p.deterministic ? index / chains : length - 1 - index % length;
        const int qheads_per_tile = static_cast<int>(p.qheads_per_tile),
                  head_chains = static_cast<int>(p.heads) / qheads_per_tile / scheduler.heads;
        first_head = (chain % head_chains * scheduler.heads + chain_idx % scheduler.heads) * qheads_per_tile;
        first_row = chain_idx / scheduler.heads / scheduler.batches * GatherBwdTileScheduler::block_m(p, max_rows);
        sequence =
            Sequence(p, chain / head_chains * scheduler.batches + chain_idx / scheduler.heads % scheduler.batches);
    }
};

}  // namespace flash_dmattn::cuda::sm80
