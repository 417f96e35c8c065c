// Numbers for the blocks of all sequences of a packed batch. A grid over the blocks of the longest sequence would have
// many CTAs without work where most sequences are short.
#pragma once

#include <climits>

#include "basics.cuh"
#include "params.h"

namespace flash_dmattn::cuda {

// Rows and keys of a sequence; of packed sequences on average, rounded up.
constexpr int64_t mean_seqlen_q(const AttentionParams& p) {
    return p.cu_seqlens_q == nullptr ? p.seqlen_q : ceil_div(p.total_q, p.batch);
}
constexpr int64_t mean_seqlen_k(const AttentionParams& p) {
    return p.cu_seqlens_k == nullptr ? p.seqlen_k : ceil_div(p.total_k, p.batch);
}

// The number of a sequence's first block of `size` rows or keys; cu_seqlen: where the sequence begins. No prefix sum is
// needed; between two sequences at most one number is unused.
template <typename Index>
constexpr __host__ __device__ Index first_packed_block(Index cu_seqlen, Index sequence, Index size) {
    return cu_seqlen / size + sequence;
}
constexpr __host__ __device__ int64_t count_packed_blocks(int64_t total, int64_t batch, int64_t size) {
    return first_packed_block(total, batch, size);
}

// Whether these are clearly fewer than the blocks of the longest sequence times the batch.
constexpr __host__ __device__ bool should_pack_blocks(int64_t total, int64_t batch, int64_t longest, int64_t size) {
    return 5 * count_packed_blocks(total, batch, size) < 4 * ceil_div(longest, size) * batch;
}

// Whether m_blocks of `rows` rows, or n_blocks of `keys` keys, are numbered over all sequences.
constexpr __host__ __device__ bool packs_m_blocks(const AttentionParams& p, int64_t rows) {
    return p.cu_seqlens_q != nullptr && should_pack_blocks(p.total_q, p.batch, p.seqlen_q, rows);
}
constexpr __host__ __device__ bool packs_n_blocks(const AttentionParams& p, int64_t keys) {
    return p.cu_seqlens_k != nullptr && should_pack_blocks(p.total_k, p.batch, p.seqlen_k, keys);
}
// Those of one head: of all sequences if they are numbered over all, else of one batch element.
constexpr __host__ __device__ int64_t count_m_blocks(const AttentionParams& p, int64_t rows) {
    return packs_m_blocks(p, rows) ? count_packed_blocks(p.total_q, p.batch, rows) : ceil_div(p.seqlen_q, rows);
}
constexpr __host__ __device__ int64_t count_n_blocks(const AttentionParams& p, int64_t keys) {
    return packs_n_blocks(p, keys) ? count_packed_blocks(p.total_k, p.batch, keys) : ceil_div(p.seqlen_k, keys);
}
// m_blocks of one head over the whole batch.
constexpr __host__ __device__ int64_t total_m_blocks(const AttentionParams& p, int64_t rows) {
    return count_m_blocks(p, rows) * (packs_m_blocks(p, rows) ? 1 : p.batch);
}

struct PackedBlock {
    int batch;  // the sequence
    int index;  // of the block in it; beyond the sequence where the number is unused

    __device__ __forceinline__ PackedBlock(const int32_t* cu_seqlens, int64_t num_sequences, int number, int size) {
        const auto first = [&](int b) { return first_packed_block(cu_seqlens[b], b, size); };
        int end = static_cast<int>(num_sequences);
        batch = 0;
        while (end - batch > 1) {
            const int middle = (batch + end) / 2;
            (first(middle) <= number ? batch : end) = middle;
        }
        index = number - first(batch);
        if (index < 0) index = INT_MAX / size - 1;  // cu_seqlens does not begin with 0, which CUDA does not check
    }
};

// An m_block by its number: its batch element, which is fixed_batch unless numbers count over all sequences
// (is_packed), and its first row, which may lie beyond the sequence.
struct NumberedMBlock {
    int batch, first_row;

    __device__ __forceinline__ NumberedMBlock(const AttentionParams& p, bool is_packed, int number, int fixed_batch,
                                              int rows)
        : batch(fixed_batch), first_row(number * rows) {
        if (!is_packed) return;
        const PackedBlock block(p.cu_seqlens_q, p.batch, number, rows);
        batch = block.batch;
        first_row = block.index * rows;
    }
};

}  // namespace flash_dmattn::cuda
