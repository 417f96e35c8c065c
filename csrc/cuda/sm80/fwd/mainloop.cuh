// A block of the forward, wherever its keys come from: its query rows, the loop over tiles of keys, the two products, the
// softmax and the output.
#pragma once

#include "cuda/arch/cp_async.cuh"
#include "cuda/arch/math.cuh"
#include "cuda/arch/mma.cuh"
#include "cuda/softmax/combine.cuh"
#include "cuda/softmax/online_softmax.cuh"
#include "cuda/softmax/scores.cuh"
#include "cuda/common/sequence.cuh"
#include "cuda/arch/smem_tile.cuh"
#include "cuda/mask/device_dispatch.cuh"
#include "kernel_traits.h"

namespace flash_dmattn::cuda::sm80 {

// How the work is cut among blocks.
struct FwdSchedule {
    int num_m_blocks;  // of a head, or of `pack` heads
    int heads;         // H / pack
    int batch;
    int pack;          // query heads that share a tile: row r of it is row r / pack of head r % pack
    bool batch_first;  // neighbouring blocks differ in their batch, else in their row tile
    float scale;
    float to_log2;  // makes exponents of 2 of what the softmax sees
    // Scores stay unscaled where nothing is added to them and their order is that of the scaled ones.
    bool raw_scores;
    float softcap;
    bool bias_aligned;  // of a dense bias: rows of contiguous keys, 16-byte aligned
};

template <typename T, BiasKind kBias, typename Traits>
class FwdBlock {
public:
    static constexpr int kRows = Traits::kRows, kKeys = Traits::kKeys, kBlocks = Traits::kBlocks;
    static constexpr int kHeadDim = Traits::kHeadDim;
    static constexpr int kKeyWarps = Traits::kKeyWarps, kThreads = Traits::kRowWarps * kKeyWarps * 32;
    static constexpr int kWarpRows = kRows / Traits::kRowWarps, kWarpKeys = kKeys / kKeyWarps;
    static constexpr int kMTiles = kWarpRows / 16, kNTiles = kWarpKeys / 8, kOutTiles = kHeadDim / 8;
    static constexpr int kWords = kKeys / 32, kWarpWords = kWarpKeys / 32;
    // By how many steps operands are read from shared memory ahead of the products: where few warps share a multiprocessor,
    // they do not hide that time for each other.
    static constexpr int kAhead = kBlocks * kThreads <= 256 ? 1 : 0;

    using QueryTile = SmemTile<T, kRows, kHeadDim>;
    using KeyTile = SmemTile<T, kKeys, kHeadDim>;

    // What a block works on. It stays in shared memory, since the main loop needs the registers.
    struct WorkTile {
        Sequence s;
        int first_head;
        int first_row;  // of the tile, counted in rows of `pack` heads
        int tile;       // among those of all heads and batch elements
        int split;
    };

    struct SharedStorage {
        QueryTile query;  // at the end, out
        KeyTile key;
        KeyTile value;
        float max[kKeyWarps][kRows];  // at the end, of the warps that share rows
        float sum[kKeyWarps][kRows];
        WorkTile work_tile;
        int ticket;
    };

protected:
    using QueryCopy = RowCopy<kThreads, QueryTile>;
    using KeyCopy = RowCopy<kThreads, KeyTile>;
    static_assert(KeyCopy::kRowsAtOnce <= 32, "a step's keys lie in one word of a tile's columns");

    // memory.work has been written.
    __device__ FwdBlock(const FwdArgs& p, const FwdSchedule& schedule, SharedStorage& memory)
        : p_(p),
          schedule_(schedule),
          memory_(memory),
          warp_row_(warp_id() / kKeyWarps * kWarpRows),
          warp_key_(warp_id() % kKeyWarps * kWarpKeys),
          query_lane_(opaque(memory.query.lane_down() + warp_row_ * kRowBytes)),
          key_lane_(opaque(memory.key.lane_across() + warp_key_ * kRowBytes)),
          value_lane_(opaque(memory.value.lane_down() + warp_key_ * kRowBytes)),
          key_copy_(opaque(KeyCopy::lane_address(memory.key))) {}

    // Goes over the keys: `tile` moves from one tile of them to the next, and `source` fetches what belongs to it.
    // load_key, load_value and load_pairs start to fetch; store_pairs leaves in shared memory what load_pairs has fetched
    // to registers; apply_mask_and_bias makes of products what the softmax sees, but for pairs that a dense bias hides from rows
    // which see others: they weigh nothing. For the rest there is mask_by_bias.
    template <typename Source, typename Tiles>
    __device__ __forceinline__ void attend(Source& source, Tiles& tile) {
#pragma unroll
        for (int m = 0; m < kMTiles; ++m)
#pragma unroll
            for (int n = 0; n < kOutTiles; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) out_[m][n][i] = 0;
        const bool idle = query_row(warp_row_) >= sequence().rows;  // this warp has no rows and only copies

        load_query();
        bool more = tile.next();
        if (more) {
            source.load_key(tile);
            source.load_pairs(tile);
        }
        cp_async_commit();
        if (more) source.store_pairs(tile);

        while (more) {
            float scores[kMTiles][kNTiles][4] = {};
            cp_async_wait<0>();
            __syncthreads();  // query, key and pairs have come; the last tile's value is free
            source.load_value(tile);
            cp_async_commit();
            if (!idle) {
                gemm_qk(scores);
                source.apply_mask_and_bias(scores, tile);
            }
            cp_async_wait<0>();
            __syncthreads();  // value has come; key and pairs are free
            const int visited = tile.index();
            more = tile.next();
            if (more) {
                source.load_key(tile);
                source.load_pairs(tile);
            }
            cp_async_commit();
            if (!idle) {
                // A row that so far has seen nothing but what its dense bias hides.
                constexpr float kExtreme = kBias == BiasKind::kDense ? kLeastFinite<T> / 2 : -kInfinity;
                softmax_.update(
                    scores, schedule_.to_log2, kExtreme, [&] { source.mask_by_bias(scores, visited); },
                    [&](int i, float factor) { softmax_.scale(out_, i, factor); });
                gemm_pv(scores);
            }
            if (more) source.store_pairs(tile);
        }
        cp_async_wait<0>();
        __syncthreads();  // query has come even where no tile was visited; its memory is free
        if constexpr (kKeyWarps > 1) merge_key_warps();
        if (Traits::kMaySplit && p_.num_splits > 1) {
            if (warp_key_ == 0) store_split();
            if (is_last_cta(p_.split_counters + memory_.work_tile.tile, static_cast<int>(p_.num_splits),
                            memory_.ticket))
                combine_splits();
        } else if (warp_key_ == 0) {
            store_out();
        }
    }

    __device__ const Sequence& sequence() const { return memory_.work_tile.s; }
    // Row of the sequence, and its head, of a row of the tile.
    __device__ int query_row(int row) const {
        return Traits::kPackGqa ? (memory_.work_tile.first_row + row) / schedule_.pack
                                : memory_.work_tile.first_row + row;
    }
    __device__ int query_head(int row) const {
        return memory_.work_tile.first_head +
               (Traits::kPackGqa ? (memory_.work_tile.first_row + row) % schedule_.pack : 0);
    }

    const FwdArgs& p_;
    const FwdSchedule& schedule_;
    SharedStorage& memory_;
    const int warp_row_, warp_key_;                                 // this warp's first row and key of a tile
    const uint32_t query_lane_, key_lane_, value_lane_, key_copy_;  // this lane's parts of shared addresses

private:
    static constexpr int kRowBytes = QueryTile::kSlabCols * sizeof(T);  // of a slab

    __device__ void load_query() {
        const T* query = static_cast<const T*>(p_.query.data) + query_offset(p_.query, sequence(), 0);
        QueryCopy::start(QueryCopy::lane_address(memory_.query), static_cast<int>(p_.head_dim), [&](int i) {
            const int row = QueryCopy::first_row() + i * QueryCopy::kRowsAtOnce;
            const int64_t at = query_row(row) * p_.query.row_stride + query_head(row) * p_.query.head_stride;
            return RowSource<T>{query + at, query_row(row) < sequence().rows};
        });
    }

    __device__ __forceinline__ void gemm_qk(float (&scores)[kMTiles][kNTiles][4]) {
        constexpr int kAcross = kNTiles / 2, kSteps = kHeadDim / 16 * kAcross;
        uint32_t q[2][kMTiles][4], k[2][4];
        const auto load = [&](int step) {
            const int d = step / kAcross;
            if (step % kAcross == 0) {
#pragma unroll
                for (int m = 0; m < kMTiles; ++m) QueryTile::load_a(q[d % 2][m], query_lane_, m * 16, d * 16);
            }
            KeyTile::load_b(k[step % 2], key_lane_, step % kAcross * 16, d * 16);
        };
        if (kAhead > 0) load(0);
#pragma unroll
        for (int d = 0; d < kHeadDim / 16; ++d)
#pragma unroll
            for (int n = 0; n < kNTiles; n += 2) {
                const int step = d * kAcross + n / 2;
                if (step + kAhead < kSteps) load(step + kAhead);
                const uint32_t (&b)[4] = k[step % 2];
#pragma unroll
                for (int m = 0; m < kMTiles; ++m) {
                    mma_m16n8k16<T>(scores[m][n], q[d % 2][m], b[0], b[1]);
                    mma_m16n8k16<T>(scores[m][n + 1], q[d % 2][m], b[2], b[3]);
                }
            }
    }

    __device__ __forceinline__ void gemm_pv(const float (&probs)[kMTiles][kNTiles][4]) {
        constexpr int kAcross = kOutTiles / 2, kSteps = kNTiles / 2 * kAcross;
        uint32_t p[kMTiles][4], v[2][4];
        const auto load = [&](int step) {
            KeyTile::load_b_transposed(v[step % 2], value_lane_, step / kAcross * 16, step % kAcross * 16);
        };
        if (kAhead > 0) load(0);
#pragma unroll
        for (int k = 0; k < kNTiles; k += 2) {
#pragma unroll
            for (int m = 0; m < kMTiles; ++m)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float* pair = probs[m][k + i / 2] + i % 2 * 2;
                    p[m][i] = pack<T>(pair[0], pair[1]);
                }
#pragma unroll
            for (int d = 0; d < kOutTiles; d += 2) {
                const int step = k / 2 * kAcross + d / 2;
                if (step + kAhead < kSteps) load(step + kAhead);
                const uint32_t (&b)[4] = v[step % 2];
#pragma unroll
                for (int m = 0; m < kMTiles; ++m) {
                    mma_m16n8k16<T>(out_[m][d], p[m], b[0], b[1]);
                    mma_m16n8k16<T>(out_[m][d + 1], p[m], b[2], b[3]);
                }
            }
        }
    }

    // To one result of all warps that share rows, in the first of them.
    __device__ void merge_key_warps() {
        const int part = warp_key_ / kWarpKeys;
        float* merged = reinterpret_cast<float*>(&memory_.key);  // [kRows][kHeadDim]
        static_assert(kKeyWarps == 1 || sizeof(float) * kRows * kHeadDim <= 2 * sizeof(KeyTile));
        const auto for_each = [&](auto&& visit) {  // of this lane's rows
#pragma unroll
            for (int i = 0; i < kMTiles * 2; ++i) visit(i, warp_row_ + i * 8 + fragment_row());
        };
        for_each([&](int i, int row) {
            memory_.max[part][row] = softmax_.max[i];
            memory_.sum[part][row] = row_sum(softmax_.sum[i]);
        });
        __syncthreads();
        for_each([&](int i, int row) {
            float largest = memory_.max[0][row], total = 0;
            for (int w = 1; w < kKeyWarps; ++w) largest = fmaxf(largest, memory_.max[w][row]);
            const float shift = largest == -kInfinity ? 0.f : largest;
            const auto weight = [&](float max) { return fast_exp2((max - shift) * schedule_.to_log2); };
            for (int w = 0; w < kKeyWarps; ++w) total += memory_.sum[w][row] * weight(memory_.max[w][row]);
            const float own = weight(softmax_.max[i]);
            softmax_.scale(out_, i, own);
            softmax_.max[i] = largest;
            softmax_.sum[i] = is_row_leader() ? total : 0.f;
        });
        for (int w = kKeyWarps - 1; w >= 0; --w) {
            if (part == w) {
                for_each([&](int i, int row) {
#pragma unroll
                    for (int n = 0; n < kOutTiles; ++n) {
                        float* x = out_[i / 2][n] + i % 2 * 2;
                        float2* at = reinterpret_cast<float2*>(merged + row * kHeadDim + n * 8 + fragment_col());
                        if (w < kKeyWarps - 1) x[0] += at->x, x[1] += at->y;
                        if (w > 0) *at = {x[0], x[1]};
                    }
                });
            }
            __syncthreads();
        }
    }

    // Calls store(row of the tile, m, h, 1 / sum, lse) for this lane's rows.
    template <typename Store>
    __device__ __forceinline__ void for_each_row(const Store& store) {
#pragma unroll
        for (int m = 0; m < kMTiles; ++m)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float lse;
                const float inverse = softmax_.finish(2 * m + h, schedule_.raw_scores ? schedule_.scale : 1.f, lse);
                store(warp_row_ + m * 16 + h * 8 + fragment_row(), m, h, inverse, lse);
            }
    }

    // Through shared memory, so that whole rows are written.
    __device__ void store_out() {
        for_each_row([&](int row, int m, int h, float inverse, float lse) {
#pragma unroll
            for (int n = 0; n < kOutTiles; ++n) {
                const float* x = out_[m][n] + 2 * h;
                T* to = &memory_.query.at(row, n * 8 + fragment_col());
                *reinterpret_cast<uint32_t*>(to) = pack<T>(x[0] * inverse, x[1] * inverse);
            }
            const int i = query_row(row);
            if (is_row_leader() && i < sequence().rows)
                static_cast<float*>(p_.lse.data)[stat_offset(p_.lse, sequence(), query_head(row)) + i] = lse;
        });
        // A warp reads and writes its own rows alone.
        __syncwarp();
        T* out = static_cast<T*>(p_.out.data) + query_offset(p_.out, sequence(), 0);
        constexpr int kChunks = kHeadDim / 8;
        for (int at = lane_id(); at < kWarpRows * kChunks; at += 32) {
            const int row = warp_row_ + at / kChunks, chunk = at % kChunks, i = query_row(row);
            if (i >= sequence().rows || chunk * 8 >= p_.head_dim) continue;
            T* to = out + i * p_.out.row_stride + query_head(row) * p_.out.head_stride + chunk * 8;
            *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(&memory_.query.at(row, chunk * 8));
        }
    }

    __device__ void store_split() {
        for_each_row([&](int row, int m, int h, float inverse, float lse) {
            const int i = query_row(row);
            if (i >= sequence().rows) return;
            const int64_t at = split_index(p_, sequence(), memory_.work_tile.split, query_head(row), i);
            if (is_row_leader()) p_.split_lse[at] = lse;
            if (lse == -kInfinity) return;
            float* out = p_.split_out + at * p_.head_dim;
#pragma unroll
            for (int n = 0; n < kOutTiles; ++n) {
                const int col = n * 8 + fragment_col();
                const float* x = out_[m][n] + 2 * h;
                if (col < p_.head_dim) *reinterpret_cast<float2*>(out + col) = {x[0] * inverse, x[1] * inverse};
            }
        });
    }

    __device__ void combine_splits() {
        for (int row = warp_id(); row < kRows && query_row(row) < sequence().rows; row += kThreads / 32)
            combine_row<T, kHeadDim>(p_, sequence(), query_head(row), query_row(row));
    }

    OnlineSoftmax<kMTiles> softmax_;
    float out_[kMTiles][kOutTiles][4];
};

template <typename Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, Kernel::kBlocks)
    fwd_kernel(const __grid_constant__ FwdArgs p, const __grid_constant__ FwdSchedule schedule) {
    if (is_inactive(p)) return;
    extern __shared__ __align__(128) unsigned char raw_smem[];
    auto& smem = *reinterpret_cast<typename Kernel::SharedStorage*>(raw_smem);
    if (threadIdx.x == 0) {
        FlatIndex block(blockIdx.x);
        smem.work_tile.split = block.take(p.num_splits);
        smem.work_tile.tile = static_cast<int>(block.rest);
        const int early_batch = schedule.batch_first ? block.take(schedule.batch) : 0;
        // The last rows come first: under causality they are the longest.
        smem.work_tile.first_row = (schedule.num_m_blocks - 1 - block.take(schedule.num_m_blocks)) * Kernel::kRows;
        smem.work_tile.first_head = block.take(schedule.heads) * schedule.pack;
        smem.work_tile.s = Sequence(p, schedule.batch_first ? early_batch : static_cast<int>(block.rest));
    }
    __syncthreads();
    if (smem.work_tile.first_row >= smem.work_tile.s.rows * schedule.pack) return;
    Kernel(p, schedule, smem).run();
}

}  // namespace flash_dmattn::cuda::sm80
