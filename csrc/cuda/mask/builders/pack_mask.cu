// Packs a bool mask to bits and summarizes each block of 64 rows x 64 keys. Reads the mask once.
#include "cuda/arch/grid_dependency.cuh"
#include "cuda/api.h"
#include "cuda/mask/bits.cuh"
#include "cuda/common/launch.h"
#include "cuda/common/sequence.cuh"

namespace flash_dmattn {
namespace cuda {
namespace {

constexpr int kBlock = PackedMask::kBlock;
constexpr int kWarps = 8;
constexpr int kRowsPerWarp = kBlock / kWarps;
constexpr int kKeys = 512;  // per CTA: 16 per lane
constexpr int kWords = kKeys / 32;

// Packs four bools to four bits.
__device__ __forceinline__ uint32_t to_bits(uint32_t bools) {
    return (__vminu4(bools, 0x01010101u) * 0x10204080u) >> 28;
}

// Packs a row's words of this warp: lane i < 16 returns the keys [first_key + 32 i, first_key + 32 (i + 1)), 0 from
// `end` on. Reads aligned rows of contiguous keys 16 bytes per lane.
struct VectorReader {
    static constexpr int kRegisters = 4;
    static __device__ __forceinline__ void read(uint32_t (&raw)[4], const uint8_t* row, int64_t, int first_key,
                                                int end) {
        const int key = first_key + lane_id() * 16;
        raw[0] = raw[1] = raw[2] = raw[3] = 0;
        if (key + 16 <= end) {
            const uint4 loaded = __ldcs(reinterpret_cast<const uint4*>(row + key));
            raw[0] = loaded.x, raw[1] = loaded.y, raw[2] = loaded.z, raw[3] = loaded.w;
        } else {
#pragma unroll
            for (int j = 0; j < 16; ++j)
                if (key + j < end) raw[j / 4] |= static_cast<uint32_t>(row[key + j] != 0) << (j % 4 * 8);
        }
    }
    static __device__ __forceinline__ uint32_t word(const uint32_t (&raw)[4]) {
        const uint32_t half = to_bits(raw[0]) | to_bits(raw[1]) << 4 | to_bits(raw[2]) << 8 | to_bits(raw[3]) << 12;
        const uint32_t low = __shfl_sync(~0u, half, lane_id() * 2), high = __shfl_sync(~0u, half, lane_id() * 2 + 1);
        return low | high << 16;
    }
};
// The same for any strides.
struct ScalarReader {
    static constexpr int kRegisters = 1;
    static __device__ __forceinline__ void read(uint32_t (&raw)[1], const uint8_t* row, int64_t col_stride,
                                                int first_key, int end) {
        for (int w = 0; w < kWords; ++w) {
            const int key = first_key + w * 32 + lane_id();
            const uint32_t word = __ballot_sync(~0u, key < end && row[key * col_stride] != 0);
            if (lane_id() == w) raw[0] = word;
        }
    }
    static __device__ __forceinline__ uint32_t word(const uint32_t (&raw)[1]) { return raw[0]; }
};

// A CTA packs 64 rows x 512 keys of one batch element and mask head.
template <typename Reader>
__global__ void __launch_bounds__(kWarps * 32)
    pack_mask_kernel(const __grid_constant__ AttentionParams p, const __grid_constant__ PackedMask packed) {
    grid_dependency_sync();
    __shared__ uint32_t any_visible[kWarps][kWords], all_visible[kWarps][kWords];
    FlatIndex block(blockIdx.x);
    const int first_key = block.pop(ceil_div<int64_t>(packed.words, kWords)) * kKeys;
    const int m_block = block.pop(packed.num_m_blocks), head = block.pop(packed.heads),
              batch = static_cast<int>(block.rest);
    const Sequence s(p, batch);

    const bool row_broadcast = packed.row_broadcast();
    const int rows = row_broadcast ? 1 : s.rows;
    const int first_row = m_block * kBlock;
    if (first_row >= rows) return;
    const int last_row = min(first_row + kBlock, rows) - 1;
    // Does not read n_blocks that causality masks for all rows.
    const bool is_cut = p.is_causal && !row_broadcast;
    int end = s.keys;
    if (is_cut) end = min(end, ceil_div(s.causal_end(last_row), kBlock) * kBlock);

    const int n_block = threadIdx.x;  // of the CTA
    const auto summarize = [&](uint64_t visible_keys, bool full) {
        const int64_t at = batch * packed.blocks_batch_stride + head * packed.blocks_head_stride +
                           m_block * packed.blocks_row_stride + first_key / kBlock + n_block;
        packed.visible_keys[at] = visible_keys;
        packed.is_full[at] = full;
    };
    const bool has_n_block = n_block < kKeys / kBlock && first_key / kBlock + n_block < packed.num_n_blocks;
    if (first_key >= end) {
        if (has_n_block) summarize(0, false);
        return;
    }

    const MaskView& mask = p.mask;
    const auto* from = static_cast<const uint8_t*>(mask.data) + score_offset(mask, s, head, mask.heads);
    uint32_t* to = packed.bits + batch * packed.bits_batch_stride + head * packed.bits_head_stride +
                   s.first_row * packed.bits_row_stride;
    const int lane = lane_id(), warp_row = first_row + warp_id() * kRowsPerWarp;
    const int key = first_key + lane * 32;  // of this lane's word
    uint32_t any = 0, all = ~0u;
    uint32_t raw[kRowsPerWarp][Reader::kRegisters];
#pragma unroll
    for (int i = 0; i < kRowsPerWarp; ++i)
        if (warp_row + i <= last_row)
            Reader::read(raw[i], from + (warp_row + i) * mask.row_stride, mask.col_stride, first_key, end);
#pragma unroll
    for (int i = 0; i < kRowsPerWarp; ++i) {
        if (warp_row + i > last_row) break;
        const uint32_t word = Reader::word(raw[i]);
        if (lane < kWords && key / 32 < packed.words) to[(warp_row + i) * packed.bits_row_stride + key / 32] = word;
        const int valid = is_cut ? s.causal_end(warp_row + i) - key : 32;
        any |= word & bits_below(valid, 0);
        all &= word;
    }
    if (lane < kWords) {
        const int valid = s.keys - key;  // padding keys do not make a block mixed
        any_visible[warp_id()][lane] = any;
        all_visible[warp_id()][lane] = all | (valid >= 32 ? 0u : valid <= 0 ? ~0u : ~0u << valid);
    }
    __syncthreads();

    if (!has_n_block) return;
    uint32_t visible_keys[2] = {0, 0};
    bool full = true;
    for (int w = 0; w < kWarps; ++w)
        for (int i = 0; i < 2; ++i) {
            visible_keys[i] |= any_visible[w][n_block * 2 + i];
            full &= all_visible[w][n_block * 2 + i] == ~0u;
        }
    summarize(visible_keys[0] | static_cast<uint64_t>(visible_keys[1]) << 32, full);
}

}  // namespace
}  // namespace cuda

PackedMask plan_packed_mask(const AttentionParams& p) {
    using cuda::ceil_div;
    const MaskView& mask = p.mask;
    const bool varlen = p.cu_seqlens_q != nullptr;
    const bool row_broadcast = mask.per_key;
    PackedMask packed;
    packed.batches = varlen ? p.batch : mask.batches;
    packed.batch_group_size = mask.batch_group_size;
    packed.heads = mask.heads;
    packed.num_m_blocks = row_broadcast ? 1 : ceil_div(p.seqlen_q, PackedMask::kBlock);
    packed.num_n_blocks = ceil_div(p.seqlen_k, PackedMask::kBlock);
    packed.words = ceil_div<int64_t>(p.seqlen_k, 128) * 4;

    const bool by_row = varlen && !row_broadcast;  // bits of [total_q, heads, words]
    const int64_t rows = row_broadcast ? 1 : p.seqlen_q;
    packed.bits_row_stride = row_broadcast ? 0 : by_row ? packed.heads * packed.words : packed.words;
    packed.bits_head_stride = by_row ? packed.words : rows * packed.words;
    packed.bits_batch_stride = by_row || packed.batches == 1 ? 0 : packed.heads * rows * packed.words;
    packed.bits_size = (by_row ? p.total_q : packed.batches * rows) * packed.heads * packed.words;

    packed.blocks_row_stride = row_broadcast ? 0 : packed.num_n_blocks;
    packed.blocks_head_stride = packed.num_m_blocks * packed.num_n_blocks;
    packed.blocks_batch_stride = packed.batches == 1 ? 0 : packed.heads * packed.blocks_head_stride;
    packed.blocks_size = packed.batches * packed.heads * packed.blocks_head_stride;
    return packed;
}

void pack_mask_cuda(const AttentionParams& params, const PackedMask& packed, cudaStream_t stream) {
    using namespace cuda;
    if (packed.bits_size == 0) return;
    const int64_t blocks =
        packed.batches * packed.heads * packed.num_m_blocks * ceil_div<int64_t>(packed.words, kWords);
    const MaskView& mask = params.mask;
    const auto aligned = [](int64_t stride) { return stride % 16 == 0; };
    // With a key mask of variable length a sequence may start at any key.
    const bool sequences_aligned = params.cu_seqlens_q == nullptr || !mask.per_key;
    const bool vector = mask.col_stride == 1 && aligned(reinterpret_cast<intptr_t>(mask.data)) && sequences_aligned &&
                        aligned(mask.batch_stride) && aligned(mask.head_stride) && aligned(mask.row_stride);
    const auto kernel = vector ? pack_mask_kernel<VectorReader> : pack_mask_kernel<ScalarReader>;
    launch(kernel, {grid_of(blocks), kWarps * 32}, stream, params, packed);
}

}  // namespace flash_dmattn
