// The forward of one CTA, for any source of keys: prologue, mainloop over n_blocks, epilogue.
#pragma once

#include "cuda/arch/grid_dependency.cuh"
#include "cuda/arch/cp_async.cuh"
#include "cuda/arch/math.cuh"
#include "cuda/arch/mma.cuh"
#include "cuda/softmax/combine.cuh"
#include "cuda/softmax/online_softmax.cuh"
#include "cuda/softmax/relative_bias.cuh"
#include "cuda/softmax/scores.cuh"
#include "cuda/arch/smem_tile.cuh"
#include "cuda/mask/device_dispatch.cuh"
#include "kernel_traits.h"
#include "tile_scheduler.cuh"

namespace flash_dmattn::cuda::sm80 {

struct FwdKernelParams {
    FwdTileScheduler scheduler;
    float scale;
    float scale_log2;      // scores times this are exponents of 2
    bool unscaled_scores;  // the softmax runs on unscaled Q K^T
    float softcap;
    bool bias_aligned;  // dense bias: keys are contiguous and every row is 16-byte aligned
};

// Base of the kernels. The derived kernel is the Source of keys: load_k, load_v and load_mask_and_bias start cp.async
// copies; store_mask_and_bias writes to shared memory what load_mask_and_bias fetched into registers;
// apply_mask_and_bias turns Q K^T into scores, and mask_by_bias applies the masking of a dense bias to a row that has
// seen no other key so far.
template <typename T, BiasKind kBias, typename Traits>
class FwdMainloop {
public:
    static constexpr int kRows = Traits::kRows, kKeys = Traits::kKeys, kCtasPerSm = Traits::kCtasPerSm;
    static constexpr int kHeadDim = Traits::kHeadDim;
    static constexpr int kKeyWarps = Traits::kKeyWarps, kThreads = Traits::kRowWarps * kKeyWarps * 32;
    static constexpr int kWarpRows = kRows / Traits::kRowWarps, kWarpKeys = kKeys / kKeyWarps;
    static constexpr int kMFragments = kWarpRows / 16, kNFragments = kWarpKeys / 8, kOutFragments = kHeadDim / 8;
    static constexpr int kWords = kKeys / 32, kWarpWords = kWarpKeys / 32;
    // ldmatrix runs this many steps ahead of mma.sync: with few warps an SM does not hide its latency otherwise.
    static constexpr int kAhead = kCtasPerSm * kThreads <= 256 ? 1 : 0;

    using QueryTile = SmemTile<T, kRows, kHeadDim>;
    using KvTile = SmemTile<T, kKeys, kHeadDim>;

    struct SharedStorage {
        QueryTile query;  // the epilogue stages O here
        KvTile key;
        KvTile value;
        float max[kKeyWarps][kRows];  // epilogue: softmax of the warps that share rows
        float sum[kKeyWarps][kRows];
        FwdWorkTile work_tile;
        int finished_splits;
    };

protected:
    using CopyQ = RowCopy<kThreads, QueryTile>;
    using CopyKv = RowCopy<kThreads, KvTile>;
    static_assert(CopyKv::kRowsAtOnce <= 32, "the keys of a copy step lie in one word of visible keys");

    // shared_storage.work_tile has been written.
    __device__ FwdMainloop(const FwdArgs& p, const FwdKernelParams& params, SharedStorage& shared_storage)
        : p_(p), params_(params), shared_storage_(shared_storage), warp_row_(warp_id() / kKeyWarps * kWarpRows),
          warp_key_(warp_id() % kKeyWarps * kWarpKeys),
          ldmatrix_q_(opaque(shared_storage.query.ldmatrix_lane_a() + warp_row_ * kRowBytes)),
          ldmatrix_k_(opaque(shared_storage.key.ldmatrix_lane_b() + warp_key_ * kRowBytes)),
          ldmatrix_v_(opaque(shared_storage.value.ldmatrix_lane_a() + warp_key_ * kRowBytes)),
          copy_to_k_(opaque(CopyKv::lane_address(shared_storage.key))) {}

    // Prologue, mainloop, epilogue. `n_block` iterates over the n_blocks to visit; index() is the current one.
    template <typename Source, typename NBlock>
    __device__ __forceinline__ void attend(Source& source, NBlock& n_block) {
        clear(out_);
        const bool is_idle = query_row(warp_row_) >= sequence().rows;  // this warp has no rows and only copies
        bool more = prologue(source, n_block);
        while (more) {
            float scores[kMFragments][kNFragments][4] = {};
            cp_async_wait<0>();
            __syncthreads();  // Q, K, mask and bias are loaded; the previous V is free
            source.load_v(n_block);
            cp_async_commit();
            if (!is_idle) {
                gemm_qk(scores);
                source.apply_mask_and_bias(scores, n_block);
            }
            cp_async_wait<0>();
            __syncthreads();  // V is loaded; K, mask and bias are free
            const int current = n_block.index();
            more = n_block.next();
            if (more) {
                source.load_k(n_block);
                source.load_mask_and_bias(n_block);
            }
            cp_async_commit();
            if (!is_idle) {
                // A maximum below this belongs to a row that has only seen keys that its dense bias masks.
                constexpr float kExtreme = kBias == BiasKind::kDense ? kLowest<T> / 2 : -kInfinity;
                softmax_.update(
                    scores, params_.scale_log2, kExtreme, [&] { source.mask_by_bias(scores, current); },
                    [&](int i, float factor) { softmax_.scale(out_, i, factor); });
                gemm_pv(scores);
            }
            if (more) source.store_mask_and_bias(n_block);
        }
        epilogue();
    }

    __device__ const Sequence& sequence() const { return shared_storage_.work_tile.sequence; }
    // Row of the sequence, and head, of a row of the tile.
    __device__ int query_row(int row) const {
        return Traits::kPackGqa ? (shared_storage_.work_tile.first_row + row) / params_.scheduler.qheads_per_tile
                                : shared_storage_.work_tile.first_row + row;
    }
    __device__ int query_head(int row) const {
        return shared_storage_.work_tile.first_head +
               (Traits::kPackGqa ? (shared_storage_.work_tile.first_row + row) % params_.scheduler.qheads_per_tile : 0);
    }

    // Scales and caps scores, before a bias is added. Returns the factor that scale_and_add_bias still has to apply.
    __device__ __forceinline__ float scale_scores(float (&scores)[kMFragments][kNFragments][4]) const {
        float scale = params_.scale;
        if (kBias == BiasKind::kNone ? !params_.unscaled_scores : params_.softcap > 0) {
            scale_and_cap(scores, scale, params_.softcap);
            scale = 1;
        }
        return scale;
    }

    // key_at(n, e): the key, in the sequence, of column e of this lane's fragment n.
    template <typename KeyAt>
    __device__ __forceinline__ void add_relative_bias(float (&scores)[kMFragments][kNFragments][4],
                                                      const KeyAt& key_at) const {
        if (p_.relative_bias.data == nullptr) return;
        const int head = shared_storage_.work_tile.first_head;
        const RelativeBiasOf<true> bias(p_.relative_bias, sequence(),
                                        relative_bias_entries<true>(p_, sequence().batch, head));
        const auto row_at = [&](int i) { return query_row(warp_row_ + i * 8 + fragment_row()); };
        cuda::add_relative_bias(scores, bias, row_at, key_at);
    }

    const FwdArgs& p_;
    const FwdKernelParams& params_;
    SharedStorage& shared_storage_;
    const int warp_row_, warp_key_;                                    // this warp's first row and key of a tile
    const uint32_t ldmatrix_q_, ldmatrix_k_, ldmatrix_v_, copy_to_k_;  // this lane's addresses in shared memory

private:
    static constexpr int kRowBytes = QueryTile::kSlabCols * sizeof(T);  // of a swizzle slab

    // Loads Q and the first n_block's K, mask and bias. Returns false where no n_block is visible.
    template <typename Source, typename NBlock>
    __device__ __forceinline__ bool prologue(Source& source, NBlock& n_block) {
        load_q();
        const bool more = n_block.next();
        if (more) {
            source.load_k(n_block);
            source.load_mask_and_bias(n_block);
        }
        cp_async_commit();
        if (more) source.store_mask_and_bias(n_block);
        return more;
    }

    // Stores O and lse; with split-KV, stores this split's, and the last CTA combines all.
    __device__ __forceinline__ void epilogue() {
        cp_async_wait<0>();
        __syncthreads();  // Q is loaded even where no n_block was visited; its shared memory is free
        if constexpr (kKeyWarps > 1) merge_key_warps();
        if (Traits::kMaySplit && p_.num_splits > 1) {
            if (warp_key_ == 0) store_partial();
            if (is_last_cta(p_.split_counters + shared_storage_.work_tile.split_group, static_cast<int>(p_.num_splits),
                            shared_storage_.finished_splits))
                combine_splits();
        } else if (warp_key_ == 0) {
            store_out();
        }
    }

    __device__ void load_q() {
        const T* query = query_rows<const T>(p_.query, sequence(), 0);
        CopyQ::start(CopyQ::lane_address(shared_storage_.query), static_cast<int>(p_.head_dim), [&](int i) {
            const int row = CopyQ::first_row() + i * CopyQ::kRowsAtOnce;
            const int64_t at = query_row(row) * p_.query.row_stride + query_head(row) * p_.query.head_stride;
            return RowSource<T>{query + at, query_row(row) < sequence().rows};
        });
    }

    __device__ __forceinline__ void gemm_qk(float (&scores)[kMFragments][kNFragments][4]) {
        constexpr int kColSteps = kNFragments / 2, kSteps = kHeadDim / 16 * kColSteps;
        uint32_t q[2][kMFragments][4], k[2][4];
        const auto load = [&](int step) {
            const int d = step / kColSteps;
            if (step % kColSteps == 0) {
#pragma unroll
                for (int m = 0; m < kMFragments; ++m) QueryTile::load_a(q[d % 2][m], ldmatrix_q_, m * 16, d * 16);
            }
            KvTile::load_b(k[step % 2], ldmatrix_k_, step % kColSteps * 16, d * 16);
        };
        if (kAhead > 0) load(0);
#pragma unroll
        for (int d = 0; d < kHeadDim / 16; ++d)
#pragma unroll
            for (int n = 0; n < kNFragments; n += 2) {
                const int step = d * kColSteps + n / 2;
                if (step + kAhead < kSteps) load(step + kAhead);
                const uint32_t (&b)[4] = k[step % 2];
#pragma unroll
                for (int m = 0; m < kMFragments; ++m) {
                    mma_m16n8k16<T>(scores[m][n], q[d % 2][m], b[0], b[1]);
                    mma_m16n8k16<T>(scores[m][n + 1], q[d % 2][m], b[2], b[3]);
                }
            }
    }

    __device__ __forceinline__ void gemm_pv(const float (&probs)[kMFragments][kNFragments][4]) {
        constexpr int kColSteps = kOutFragments / 2, kSteps = kNFragments / 2 * kColSteps;
        uint32_t p[kMFragments][4], v[2][4];
        const auto load = [&](int step) {
            KvTile::load_b_transposed(v[step % 2], ldmatrix_v_, step / kColSteps * 16, step % kColSteps * 16);
        };
        if (kAhead > 0) load(0);
#pragma unroll
        for (int k = 0; k < kNFragments; k += 2) {
#pragma unroll
            for (int m = 0; m < kMFragments; ++m)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float* x = probs[m][k + i / 2] + i % 2 * 2;
                    p[m][i] = pack<T>(x[0], x[1]);
                }
#pragma unroll
            for (int d = 0; d < kOutFragments; d += 2) {
                const int step = k / 2 * kColSteps + d / 2;
                if (step + kAhead < kSteps) load(step + kAhead);
                const uint32_t (&b)[4] = v[step % 2];
#pragma unroll
                for (int m = 0; m < kMFragments; ++m) {
                    mma_m16n8k16<T>(out_[m][d], p[m], b[0], b[1]);
                    mma_m16n8k16<T>(out_[m][d + 1], p[m], b[2], b[3]);
                }
            }
        }
    }

    // Merges the softmax and O of the warps that share rows into the first of them.
    __device__ void merge_key_warps() {
        const int key_warp = warp_key_ / kWarpKeys;
        float* merged = reinterpret_cast<float*>(&shared_storage_.key);  // [kRows][kHeadDim]
        static_assert(kKeyWarps == 1 || sizeof(float) * kRows * kHeadDim <= 2 * sizeof(KvTile));
        const auto for_each = [&](auto&& visit) {  // of this lane's rows
#pragma unroll
            for (int i = 0; i < kMFragments * 2; ++i) visit(i, warp_row_ + i * 8 + fragment_row());
        };
        for_each([&](int i, int row) {
            shared_storage_.max[key_warp][row] = softmax_.max[i];
            shared_storage_.sum[key_warp][row] = row_sum(softmax_.sum[i]);
        });
        __syncthreads();
        for_each([&](int i, int row) {
            float largest = shared_storage_.max[0][row], total = 0;
            for (int w = 1; w < kKeyWarps; ++w) largest = fmaxf(largest, shared_storage_.max[w][row]);
            const float shift = largest == -kInfinity ? 0.f : largest;
            const auto weight = [&](float max) { return fast_exp2((max - shift) * params_.scale_log2); };
            for (int w = 0; w < kKeyWarps; ++w)
                total += shared_storage_.sum[w][row] * weight(shared_storage_.max[w][row]);
            const float own = weight(softmax_.max[i]);
            softmax_.scale(out_, i, own);
            softmax_.max[i] = largest;
            softmax_.sum[i] = is_row_leader() ? total : 0.f;
        });
        for (int w = kKeyWarps - 1; w >= 0; --w) {
            if (key_warp == w) {
                for_each([&](int i, int row) {
#pragma unroll
                    for (int n = 0; n < kOutFragments; ++n) {
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
        for (int m = 0; m < kMFragments; ++m)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float lse;
                const float inverse = softmax_.finish(2 * m + h, params_.unscaled_scores ? params_.scale : 1.f, lse);
                store(warp_row_ + m * 16 + h * 8 + fragment_row(), m, h, inverse, lse);
            }
    }

    // Stages O in shared memory, so that global stores cover whole rows.
    __device__ void store_out() {
        for_each_row([&](int row, int m, int h, float inverse, float lse) {
#pragma unroll
            for (int n = 0; n < kOutFragments; ++n) {
                const float* x = out_[m][n] + 2 * h;
                T* to = &shared_storage_.query.at(row, n * 8 + fragment_col());
                *reinterpret_cast<uint32_t*>(to) = pack<T>(x[0] * inverse, x[1] * inverse);
            }
            const int i = query_row(row);
            if (is_row_leader() && i < sequence().rows)
                static_cast<float*>(p_.lse.data)[stat_offset(p_.lse, sequence(), query_head(row)) + i] = lse;
        });
        __syncwarp();  // each warp stages and stores its own rows
        T* out = query_rows<T>(p_.out, sequence(), 0);
        constexpr int kChunks = kHeadDim / 8;
        for (int at = lane_id(); at < kWarpRows * kChunks; at += 32) {
            const int row = warp_row_ + at / kChunks, chunk = at % kChunks, i = query_row(row);
            if (i >= sequence().rows || chunk * 8 >= p_.head_dim) continue;
            T* to = out + i * p_.out.row_stride + query_head(row) * p_.out.head_stride + chunk * 8;
            *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(&shared_storage_.query.at(row, chunk * 8));
        }
    }

    __device__ void store_partial() {
        for_each_row([&](int row, int m, int h, float inverse, float lse) {
            const int i = query_row(row);
            if (i >= sequence().rows) return;
            const int64_t at = split_index(p_, sequence(), shared_storage_.work_tile.split_idx, query_head(row), i);
            if (is_row_leader()) p_.split_lse[at] = lse;
            if (lse == -kInfinity) return;
            float* out = p_.split_out + at * p_.head_dim;
#pragma unroll
            for (int n = 0; n < kOutFragments; ++n) {
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

    OnlineSoftmax<kMFragments> softmax_;
    float out_[kMFragments][kOutFragments][4];
};

template <typename Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, Kernel::kCtasPerSm)
    fwd_kernel(const __grid_constant__ FwdArgs p, const __grid_constant__ FwdKernelParams params) {
    grid_dependency_sync();
    if (is_inactive(p)) return;
    extern __shared__ __align__(128) unsigned char raw_smem[];
    auto& smem = *reinterpret_cast<typename Kernel::SharedStorage*>(raw_smem);
    const FwdTileScheduler& scheduler = params.scheduler;
    if (threadIdx.x == 0) {
        FlatIndex index(blockIdx.x);
        smem.work_tile.split_idx = index.pop(p.num_splits);
        smem.work_tile.split_group = static_cast<int>(index.rest);
        const int early_batch = scheduler.batch_first ? index.pop(scheduler.batch) : 0;
        // Starts with the last m_block: under causality it has the most keys.
        smem.work_tile.first_row = (scheduler.num_m_blocks - 1 - index.pop(scheduler.num_m_blocks)) * Kernel::kRows;
        smem.work_tile.first_head = index.pop(scheduler.heads) * scheduler.qheads_per_tile;
        smem.work_tile.sequence = Sequence(p, scheduler.batch_first ? early_batch : static_cast<int>(index.rest));
    }
    __syncthreads();
    if (!scheduler.is_valid(smem.work_tile)) return;
    Kernel(p, params, smem).run();
}

}  // namespace flash_dmattn::cuda::sm80
