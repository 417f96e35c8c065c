// From S = Q K^T and dP = dO V^T of one tile to P and dS: what the backward's kernels have in common.
#pragma once

#include <cfloat>

#include "../common/intervals.cuh"
#include "../common/pairs.cuh"
#include "../common/sequence.cuh"
#include "../common/tile_scan.cuh"
#include "bwd_scratch.cuh"
#include "bwd_tile.cuh"
#include "warp_gemm.cuh"

namespace flash_dmattn::cuda::sm80 {

// The rows from `first_row` on to a tile, zeros where it is larger than `rows` x `cols`; cp.async, the caller commits. A
// tile that is whole, as most are, costs little more than its cp.async instructions.
template <typename Tile, int kThreads, typename T>
__device__ __forceinline__ void copy_tile_async(uint32_t tile, const T* from, int64_t row_stride, int first_row, int rows,
                                                int cols) {
    constexpr int kRowsAtOnce = kThreads / Tile::kPanelChunks;
    static_assert(kRowsAtOnce % 8 == 0 && Tile::kRows % kRowsAtOnce == 0, "the swizzle repeats every eight rows");
    const int first = threadIdx.x / Tile::kPanelChunks, chunk = threadIdx.x % Tile::kPanelChunks;
    uint32_t to = tile + Tile::offset(first, chunk) * 2;
    from += static_cast<uint32_t>(first_row + first) * row_stride + chunk * Tile::kChunk;
    constexpr int kPanelBytes = Tile::kRows * Tile::kPanelCols * 2, kStepBytes = kRowsAtOnce * Tile::kPanelCols * 2;
    if (rows >= Tile::kRows && cols >= Tile::kCols) {
#pragma unroll
        for (int step = 0; step < Tile::kRows / kRowsAtOnce; ++step, from += kRowsAtOnce * row_stride)
#pragma unroll
            for (int panel = 0; panel < Tile::kPanels; ++panel)
                cp_async_16(to + panel * kPanelBytes + step * kStepBytes, from + panel * Tile::kPanelCols);
    } else {
#pragma unroll 1
        for (int row = first; row < Tile::kRows; row += kRowsAtOnce, from += kRowsAtOnce * row_stride, to += kStepBytes)
#pragma unroll
            for (int panel = 0; panel < Tile::kPanels; ++panel) {
                const int left = cols - chunk * Tile::kChunk - panel * Tile::kPanelCols;
                const int bytes = row < rows ? min(max(left, 0), Tile::kChunk) * 2 : 0;
                cp_async_16(to + panel * kPanelBytes, bytes > 0 ? from + panel * Tile::kPanelCols : nullptr, bytes);
            }
    }
}

// What a tile of query rows brings to shared memory; two of them take turns. kKeyBias: one number a key comes along.
template <typename Tile, bool kKeyBias>
struct RowStage {
    typename Tile::RowsTile query;
    typename Tile::RowsTile dout;
    alignas(16) float lse[Tile::kRows];
    alignas(16) float delta[Tile::kRows];
    union {  // whichever form the mask has
        alignas(16) uint32_t mask[Tile::kRows][Tile::kWords];
        alignas(16) int2 intervals[Tile::kKeys];
    };
    alignas(16) float key_bias[kKeyBias ? Tile::kKeys : 4];  // times log2(e)
};

// Where the rows of one query head begin, of all that a tile of them brings along. It is found once a head and kept in
// shared memory: found anew for every tile, it would cost as much as a tenth of the tile's work, and registers are short.
template <typename T>
struct HeadRows {
    const T* query;
    const T* dout;
    const float* lse;
    const float* delta;
    union {  // whichever form the mask has
        const uint32_t* mask;
        int64_t intervals;  // an offset
    };

    HeadRows() = default;
    __device__ HeadRows(const BwdArgs& p, const Sequence& s, int head)
        : query(static_cast<const T*>(p.query.data) + query_offset(p.query, s, head)),
          dout(static_cast<const T*>(p.dout.data) + query_offset(p.dout, s, head)),
          lse(static_cast<const float*>(p.lse.data) + stat_offset(p.lse, s, head)),
          delta(static_cast<const float*>(p.delta.data) + stat_offset(p.delta, s, head)),
          mask(nullptr) {
        const PackedMask& m = p.packed_mask;
        if (m.bits != nullptr) {
            mask = m.bits + s.batch * m.bits_batch_stride + shared_head(head, p.heads, m.heads) * m.bits_head_stride +
                   s.first_row * m.bits_row_stride;
        } else if (p.interval_tiles.tiles != nullptr) {
            intervals = interval_offset(p.intervals, s, head, p.heads);
        }
    }
};

// The same of its dense bias.
template <typename T>
struct HeadBias {
    const T* data;
    bool aligned;  // whether 16 bytes can be read at once

    HeadBias() = default;
    __device__ HeadBias(const BwdArgs& p, const Sequence& s, int head)
        : data(static_cast<const T*>(p.bias.data) + pair_offset(p.bias, s, head, p.heads)),
          aligned(p.bias.col_stride == 1 && p.bias.row_stride % 8 == 0 && reinterpret_cast<uintptr_t>(data) % 16 == 0) {
    }
};

// Loads of one tile of the rows and keys of a head; cp.async, the caller commits.
template <typename Tile, bool kKeyBias>
__device__ __forceinline__ void load_row_stage(const RowStage<Tile, kKeyBias>& stage, const SharedMemory& address_of,
                                               const BwdArgs& p, const Sequence& s, const HeadRows<typename Tile::T>& head,
                                               int row_tile, int key_tile) {
    const int first = row_tile * Tile::kRows, left = s.rows - first, head_dim = static_cast<int>(p.head_dim);
    const auto load_rows = [&](const typename Tile::RowsTile& tile, const typename Tile::T* from, int64_t row_stride) {
        copy_tile_async<typename Tile::RowsTile, Tile::kThreads>(address_of(tile), from, row_stride, first, left,
                                                                 head_dim);
    };
    load_rows(stage.query, head.query, p.query.row_stride);
    load_rows(stage.dout, head.dout, p.dout.row_stride);

    if (p.interval_tiles.tiles != nullptr)
        load_intervals<Tile::kKeys>(address_of(stage.intervals), p, s, head.intervals, key_tile * Tile::kKeys);
    const int row = threadIdx.x;
    if (row >= Tile::kRows || row >= left) return;
    cp_async<4>(address_of(stage.lse) + row * 4, head.lse + first + row);
    cp_async<4>(address_of(stage.delta) + row * 4, head.delta + first + row);
    if (p.packed_mask.bits != nullptr)
        cp_async<Tile::kWords * 4>(
            address_of(stage.mask) + row * Tile::kWords * 4,
            head.mask + static_cast<uint32_t>(first + row) * p.packed_mask.bits_row_stride + key_tile * Tile::kWords);
}

// A tile of a dense bias; pairs outside of the sequence become 0.
template <typename Tile>
__device__ __forceinline__ void load_bias(typename Tile::PairsTile& tile, const SharedMemory& address_of,
                                          const BwdArgs& p, const Sequence& s, const HeadBias<typename Tile::T>& head,
                                          int row_tile, int key_tile) {
    using T = typename Tile::T;
    const int first_row = row_tile * Tile::kRows, first_key = key_tile * Tile::kKeys;
    const int keys = s.keys - first_key;
    if (head.aligned) {
        copy_tile_async<typename Tile::PairsTile, Tile::kThreads>(address_of(tile), head.data + first_key,
                                                                  p.bias.row_stride, first_row, s.rows - first_row,
                                                                  keys);
        return;
    }
    const T* bias = head.data + first_row * p.bias.row_stride + first_key * p.bias.col_stride;
#pragma unroll 1
    for (int i = threadIdx.x; i < Tile::kRows * Tile::kKeys; i += Tile::kThreads) {
        const int row = i / Tile::kKeys, key = i % Tile::kKeys;
        const bool in_sequence = first_row + row < s.rows && key < keys;
        tile.at(row, key) = in_sequence ? bias[row * p.bias.row_stride + key * p.bias.col_stride] : T(0.f);
    }
}

// Whether a tile is whole and kTogether neighbouring pairs of a row are one access, as in most tiles they are.
template <typename Tile, int kTogether = 2, typename T>
__device__ __forceinline__ bool is_plain(const T* tile, const PairView& view, int rows, int keys) {
    return rows >= Tile::kRows && keys >= Tile::kKeys && view.col_stride == 1 && view.row_stride % kTogether == 0 &&
           reinterpret_cast<uintptr_t>(tile) % (kTogether * sizeof(T)) == 0;
}

// Key `key` of the tile's bias, times log2(e), -inf where it hides the key; 0 beyond the sequence.
template <typename T>
__device__ __forceinline__ float load_key_bias(const BwdArgs& p, const Sequence& s, int head, int key) {
    if (key >= s.keys) return 0;
    const char* bias = bias_data(p.bias, pair_offset(p.bias, s, head, p.heads));
    return key_bias_of<T>(p.bias, cuda::load_key_bias(p.bias, bias, key * p.bias.col_stride)) * kLog2E;
}

// A row that sees nothing may hold anything, and zero times NaN would reach a sum: where the tile has such rows, the
// block clears them. Ends with the block's threads synchronized and their copies visible to each other.
template <typename Tile, bool kKeyBias>
__device__ __forceinline__ void wait_for_rows(RowStage<Tile, kKeyBias>& stage, int rows) {
    cp_async_wait<0>();
    const int row = threadIdx.x;
    const bool empty = row < Tile::kRows && row < rows && stage.lse[row] == -kInfinity;
    if (!__syncthreads_or(empty)) return;
    constexpr int kChunks = Tile::kHeadDim / 8;
    for (int i = kept(threadIdx.x); i < Tile::kRows * kChunks; i += Tile::kThreads) {
        const int r = i / kChunks, chunk = i % kChunks;
        if (r >= rows || stage.lse[r] != -kInfinity) continue;
        const int at = Tile::RowsTile::offset(r, chunk);
        *reinterpret_cast<uint4*>(stage.query.data + at) = uint4{};
        *reinterpret_cast<uint4*>(stage.dout.data + at) = uint4{};
    }
    __syncthreads();
}

// Which pairs of a tile are visible, 32 keys of a row in a word: mask, causality and lengths.
template <typename Tile, bool kCausal>
struct TileVisibility {
    const uint32_t (*mask)[Tile::kWords];  // null where there is none
    const int2* intervals;                 // null where there are none
    int first_row;
    int limit;  // of the tile's keys, without causality
    int diagonal;  // row r of the tile sees its keys below diagonal + r

    template <typename Stage>
    __device__ TileVisibility(const BwdArgs& p, const Sequence& s, const Stage& stage, int row_tile, int key_tile)
        : mask(p.packed_mask.bits != nullptr ? stage.mask : nullptr),
          intervals(p.interval_tiles.tiles != nullptr ? stage.intervals : nullptr),
          first_row(row_tile * Tile::kRows),
          limit(s.keys - key_tile * Tile::kKeys),
          diagonal(row_tile * Tile::kRows + 1 + s.keys - s.rows - key_tile * Tile::kKeys) {}

    // Whether lengths and causality leave every pair visible.
    __device__ bool full() const { return limit >= Tile::kKeys && (!kCausal || diagonal >= Tile::kKeys); }
    __device__ uint32_t word(int row, int w) const {
        const uint32_t visible = bits_below(kCausal ? min(limit, diagonal + row) : limit, w);
        if (mask != nullptr) return visible & mask[row][w];
        return intervals == nullptr ? visible : visible & keys_seen(intervals + w * 32, first_row + row);
    }
};

// S and dP to P and dS of one pass over this warp's part of a tile; it begins at (row, key). `stage` has the rows' lse
// and delta and, of a key bias, key_bias; visibility.word(row, w) is asked for this lane's keys alone.
// dense_bias(to, m, n) gives the bias of a block of 16 x 16 pairs as load_a does. take(m, h, n, dx, is_visible) is given
// dx of two neighbouring pairs, of row m, h and the keys of n, before it becomes ds; where one is not visible its dx may
// be anything.
template <typename Tile, BiasKind kBias, bool kMasked, bool kSoftcap, int kPassN, typename Stage, typename Visibility,
          typename DenseBias, typename Take>
__device__ __forceinline__ void differentiate(float (&s)[Tile::kScoreM][kPassN][4],
                                              float (&dp)[Tile::kScoreM][kPassN][4],
                                              const Stage& stage, const DenseBias& dense_bias,
                                              const Visibility& visibility, int row, int key, int rows, float scale,
                                              float softcap, const Take& take) {
    using T = typename Tile::T;
    const int lane = lane_id();
    const float scale_log2 = (kSoftcap ? softcap : scale) * kLog2E;
#pragma unroll
    for (int m = 0; m < Tile::kScoreM; ++m) {
        float lse[2], delta[2];
        constexpr int kPassKeys = kPassN * 8, kWords = ceil_div(kPassKeys, 32);
        uint32_t visible[2][kWords];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int r = row + m * 16 + h * 8 + lane / 4;
            const float row_lse = stage.lse[r];
            // exp2(x - inf) = 0: an empty row, and one beyond the sequence, has no p. Nor has a pair that its bias hides,
            // since lse is larger by far: of float16 by 32 at the least, the distance to the next visible bias. Nor has a row
            // whose lse times log2(e) is no number of float32; it must not become -inf here.
            lse[h] = r < rows && row_lse != -kInfinity ? fmaxf(row_lse * kLog2E, -FLT_MAX) : kInfinity;
            delta[h] = lse[h] != kInfinity ? stage.delta[r] : 0;
            if (kMasked) {
#pragma unroll
                for (int w = 0; w < kWords; ++w)
                    visible[h][w] = visibility.word(r, key / 32 + w) >> (kPassKeys % 32 ? key % 32 : 0) >>
                                    (lane % 4 * 2);
            }
        }
#pragma unroll
        for (int n = 0; n < kPassN; n += 2) {
            uint32_t bias[4];
            if (kBias == BiasKind::kDense) dense_bias(bias, m, n);
#pragma unroll
            for (int i = 0; i < 4; ++i) {  // in the order of the 8x8 blocks
                const int h = i % 2, k = n + i / 2;
                float2 b = {0, 0};
                if (kBias == BiasKind::kDense) {
                    b = unpack<T>(bias[i]);
                    b = {b.x * kLog2E, b.y * kLog2E};
                } else if (kBias == BiasKind::kKey) {
                    b = *reinterpret_cast<const float2*>(stage.key_bias + key + k * 8 + lane % 4 * 2);
                }
                const float shift[2] = {b.x - lse[h], b.y - lse[h]};
                float dx[2];
                bool is_visible[2];
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    float& x = s[m][k][2 * h + e];
                    float& d = dp[m][k][2 * h + e];
                    float capped = 0;
                    if (kSoftcap) x = capped = fast_tanh(x * (scale / softcap));
                    is_visible[e] = !kMasked || visible[h][k / 4] & (1u << (k % 4 * 8 + e));
                    const float prob = fast_exp2(fmaf(x, scale_log2, shift[e]));
                    dx[e] = prob * (d - delta[h]);
                    x = is_visible[e] ? prob : 0;
                    d = !is_visible[e] ? 0 : kSoftcap ? dx[e] * (1 - capped * capped) : dx[e];
                }
                take(m, h, k, dx, is_visible);
            }
        }
    }
}

}  // namespace flash_dmattn::cuda::sm80
