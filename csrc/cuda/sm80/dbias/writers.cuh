// How the backward's main kernel writes the gradient of the bias, one writer per kind of bias. The mainloop calls:
//
//   begin()                           before the first m_block
//   begin_m_block()                   once the CTA is done with the previous m_block
//   add_dx(step, dx, first_n)         dx of one pass, in registers
//   add_tile(step)                    once dx of the m_block lies in shared memory, rounded
//   end_m_block(step)                 after the m_block
//   end_head(head, more, m_blocks)    after the last m_block of a head; `more`: m_blocks is at the next head
//   end()                             after the last m_block
//
// needs_dx(p): whether the gradient is needed, and not left to another kernel.
//
// Sums is what a writer keeps in registers. It holds an array, so it is a local of the mainloop (see BwdCta).
#pragma once

#include "cuda/arch/fragment.cuh"
#include "cuda/arch/memory.cuh"
#include "cuda/arch/atomic_add.cuh"
#include "cuda/sm80/bwd/shared_storage.cuh"

namespace flash_dmattn::cuda::sm80 {

template <typename Traits>
struct DbiasWriterBase {
    struct Sums {};
    static __device__ bool uses_cluster(const BwdArgs&) { return false; }
    static __device__ bool needs_dx(const BwdArgs&) { return false; }

    __device__ void begin() {}
    __device__ void begin_m_block() {}
    template <int kPassN>
    __device__ void add_dx(const MBlockStep&, const float (&)[Traits::kScoreM][kPassN][4], int) {}
    __device__ void add_tile(const MBlockStep&) {}
    __device__ void end_m_block(const MBlockStep&) {}
    template <typename Iterator>
    __device__ void end_head(int, bool, const Iterator&) {}
    __device__ void end() {}
};

template <typename Traits>
struct NoDbiasWriter : DbiasWriterBase<Traits> {
    using typename DbiasWriterBase<Traits>::Sums;
    __device__ NoDbiasWriter(const BwdCta<Traits, BiasKind::kNone>&, Sums&) {}
};

// dbias of a key: the sum of dx over all rows of the heads that share it.
template <typename Traits>
class KeyDbiasWriter : public DbiasWriterBase<Traits> {
public:
    using Cta = BwdCta<Traits, BiasKind::kKey>;
    struct Sums {
        float of_keys[Traits::kScoreN][2] = {};  // over this lane's rows
    };

    __device__ KeyDbiasWriter(const Cta& cta, Sums& sums) : cta_(cta), sums_(sums.of_keys) {}

    static __device__ bool needs_dx(const BwdArgs& p) { return p.dbias.data != nullptr; }

    template <int kPassN>
    __device__ __forceinline__ void add_dx(const MBlockStep&, const float (&dx)[Traits::kScoreM][kPassN][4],
                                           int first_n) {
#pragma unroll
        for (int m = 0; m < Traits::kScoreM; ++m)
#pragma unroll
            for (int n = 0; n < kPassN; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) sums_[first_n + n][i % 2] += dx[m][n][i];
    }
    template <typename Iterator>
    __device__ __forceinline__ void end_head(int head, bool more, const Iterator& m_blocks) {
        const BwdArgs& p = cta_.p;
        if (p.dbias.data == nullptr) return;
        const auto sums_of = [&](int head) { return shared_head(head, p.heads, p.dbias.heads); };
        if (!more || sums_of(m_blocks.head()) != sums_of(head)) store(head);
    }

private:
    // Reduces over the lanes and warps that share a key, and stores.
    __device__ __forceinline__ void store(int head) {
        const BwdArgs& p = cta_.p;
        auto& smem = cta_.smem;
        if (threadIdx.x < Traits::kKeys) smem.key_sums[threadIdx.x] = 0;
        __syncthreads();
        for (int row_warp = 0; row_warp < Traits::kSizes.score_row_warps; ++row_warp) {
            if (warp_id() / Traits::kScoreKeyWarps == row_warp) {
#pragma unroll
                for (int n = 0; n < Traits::kScoreN; ++n)
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        const float sum = column_sum(sums_[n][e]);
                        if (lane_id() < 4) smem.key_sums[cta_.score_key + n * 8 + lane_id() * 2 + e] += sum;
                        sums_[n][e] = 0;
                    }
            }
            __syncthreads();
        }
        const int key = cta_.first_key + threadIdx.x;
        if (threadIdx.x < Traits::kKeys && key < cta_.sequence().keys) {
            float* to = static_cast<float*>(p.dbias.data) + score_offset(p.dbias, cta_.sequence(), head, p.heads);
            to[key * p.dbias.col_stride] = smem.key_sums[threadIdx.x];
        }
        __syncthreads();
    }

    const Cta& cta_;
    float (&sums_)[Traits::kScoreN][2];
};

// dbias of a dense bias: dx, score by score. BwdTiling::dense_dbias selects how it is written.
template <typename Traits>
class DenseDbiasWriter : public DbiasWriterBase<Traits> {
public:
    using Cta = BwdCta<Traits, BiasKind::kDense>;
    using typename DbiasWriterBase<Traits>::Sums;
    using T = typename Traits::T;

    __device__ DenseDbiasWriter(const Cta& cta, Sums&)
        : cta_(cta),
          reduction_(cta.address_of, reduction_smem(cta.address_of), static_cast<int>(cta.p.dbias.batch_group_size)) {}

    static __device__ __forceinline__ bool needs_dx(const BwdArgs& p) {
        return is(p, DenseDbias::kDirect) || is(p, DenseDbias::kClusterReduce) || is(p, DenseDbias::kAtomic);
    }
    // Whether the CTAs of the batch elements that share a bias form a cluster.
    static __device__ __forceinline__ bool uses_cluster(const BwdArgs& p) { return is(p, DenseDbias::kClusterReduce); }

    __device__ __forceinline__ void begin() const {
        if constexpr (kMayClusterReduce)
            if (is(DenseDbias::kClusterReduce)) reduction_.begin();
        if (is(DenseDbias::kDirect) || is(DenseDbias::kClusterReduce)) clear_skipped();
    }
    __device__ __forceinline__ void begin_m_block() const {
        if constexpr (kMayClusterReduce)
            if (is(DenseDbias::kClusterReduce)) reduction_.arrive_ready();
    }
    template <int kPassN>
    __device__ __forceinline__ void add_dx(const MBlockStep& step, const float (&dx)[Traits::kScoreM][kPassN][4],
                                           int first_n) const {
        if (is(DenseDbias::kAtomic)) add(step, dx, first_n);
        if constexpr (kMayClusterReduce)
            if (is(DenseDbias::kClusterReduce)) reduction_.send(dx, first_n, cta_.smem.rank, step.stage);
    }
    __device__ __forceinline__ void add_tile(const MBlockStep& step) const {
        if (is(DenseDbias::kDirect)) store(step);
    }
    __device__ __forceinline__ void end_m_block(const MBlockStep& step) const {
        if constexpr (kMayClusterReduce)
            if (is(DenseDbias::kClusterReduce)) store_reduced(step);
    }
    __device__ __forceinline__ void end() const {
        if constexpr (kMayClusterReduce)
            if (is(DenseDbias::kClusterReduce)) reduction_.end();
    }

private:
    static constexpr bool kMayClusterReduce = kCanClusterReduce<Traits> && kHasSm90;

    // Compares the kernel parameter on every call: a kept result would be spilled.
    static __device__ __forceinline__ bool is(const BwdArgs& p, DenseDbias what) {
        return (what != DenseDbias::kClusterReduce || kMayClusterReduce) &&
               opaque(static_cast<uint32_t>(p.dense_dbias)) == static_cast<uint32_t>(what);
    }
    __device__ __forceinline__ bool is(DenseDbias what) const { return is(cta_.p, what); }

    // Follows the CTA's other shared memory.
    static __device__ const DsmemReductionSharedStorage<Traits>& reduction_smem(const SmemAddress& memory) {
        return *reinterpret_cast<const DsmemReductionSharedStorage<Traits>*>(memory.start() +
                                                                             sizeof(typename Cta::SharedStorage));
    }

    // Row 0 of the CTA's dbias tile in an m_block.
    __device__ __forceinline__ T* dbias_tile(int head, int m_block) const {
        const BwdArgs& p = cta_.p;
        const Sequence& s = cta_.sequence();
        return static_cast<T*>(p.dbias.data) + (p.dbias.batches > 1 ? cta_.smem.bias_batch * p.dbias.batch_stride : 0) +
               head * p.dbias.head_stride +
               static_cast<uint32_t>(s.first_row + m_block * Traits::kRows) * p.dbias.row_stride + cta_.first_key;
    }

    // Stores zeros to the tiles that the mainloop skips. The CTAs of a cluster share them out.
    __device__ __forceinline__ void clear_skipped() const {
        const BwdArgs& p = cta_.p;
        const Sequence& s = cta_.sequence();
        if (!p.is_causal && !has_mask(p)) return;
        const int group_size = is(DenseDbias::kClusterReduce) ? static_cast<int>(p.dbias.batch_group_size) : 1;
        auto active = cta_.m_block_iterator();
        bool more = active.next();
        for (int head = cta_.first_head; head < cta_.first_head + cta_.qheads_per_kv; ++head) {
            for (int m_block = 0; m_block < ceil_div(s.rows, Traits::kRows); ++m_block) {
                if (more && active.head() == head && active.m_block() == m_block) {
                    more = active.next();
                    continue;
                }
                if (group_size > 1 && m_block % group_size != cta_.smem.rank) continue;
                T* to = dbias_tile(head, m_block);
                for (int i = opaque(threadIdx.x); i < Traits::kRows * Traits::kKeys; i += Traits::kThreads) {
                    const int row = i / Traits::kKeys, key = i % Traits::kKeys;
                    if (m_block * Traits::kRows + row < s.rows && cta_.first_key + key < s.keys)
                        to[row * p.dbias.row_stride + key] = T(0.f);
                }
            }
        }
    }

    // Adds to the tile's float32 sums in global memory, in register order.
    template <int kPassN>
    __device__ __forceinline__ void add(const MBlockStep& step, const float (&dx)[Traits::kScoreM][kPassN][4],
                                        int first_n) const {
        const BwdArgs& p = cta_.p;
        const int heads = static_cast<int>(p.dbias.heads);
        const int num_m_blocks = ceil_div(static_cast<int>(p.seqlen_q), Traits::kRows);
        const int batch = p.dbias.batches > 1 || p.cu_seqlens_q != nullptr ? cta_.smem.bias_batch : 0;
        const int m_block_idx = (batch * heads + shared_head(step.head, p.heads, heads)) * num_m_blocks + step.m_block;
        const int num_n_blocks = ceil_div(static_cast<int>(p.seqlen_k), Traits::kKeys);
        const int64_t tile = static_cast<int64_t>(m_block_idx) * num_n_blocks + cta_.n_block;
        float* to = p.dbias_partials + tile * Traits::kRows * Traits::kKeys + threadIdx.x * 4;
#pragma unroll
        for (int m = 0; m < Traits::kScoreM; ++m)
#pragma unroll
            for (int n = 0; n < kPassN; ++n)
                reduce_add(to + (m * Traits::kScoreN + first_n + n) * Traits::kThreads * 4, dx[m][n]);
    }

    __device__ __forceinline__ void store(const MBlockStep& step) const {
        copy_tile_out<Traits::kThreads>(cta_.smem.dscores, dbias_tile(step.head, step.m_block), cta_.p.dbias.row_stride,
                                        cta_.rows_left(step.m_block), cta_.keys_left());
    }

    __device__ __forceinline__ void store_reduced(const MBlockStep& step) const {
        const ScoreView& view = cta_.p.dbias;
        T* tile = dbias_tile(step.head, step.m_block);
        const int first_fragment = reduction_.first_fragment(cta_.smem.rank), lane = opaque(lane_id());
        const int row = cta_.score_row + first_fragment / Traits::kScoreN * 16 + fragment_row(lane);
        const int key = cta_.score_key + first_fragment % Traits::kScoreN * 8;
        const int rows = cta_.rows_left(step.m_block), keys = cta_.keys_left();
        const bool is_plain = is_full_and_aligned<Traits, 4>(tile, view, rows, keys);
        T* at = tile + row * view.row_stride + key;
        reduction_.reduce(step.stage, [&](int i, const float (&a)[4], const float (&b)[4]) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const float x[2][2] = {{a[2 * h], a[2 * h + 1]}, {b[2 * h], b[2 * h + 1]}};
                T* to = at + h * 8 * view.row_stride + i * 8;
                if (is_plain) {
                    // Two lanes exchange pairs: even ones store four neighbours of fragment i, odd ones of i + 1.
                    const uint32_t in_a = pack<T>(x[0][0], x[0][1]), in_b = pack<T>(x[1][0], x[1][1]);
                    const bool odd = lane % 2;
                    const uint32_t other = __shfl_xor_sync(~0u, odd ? in_a : in_b, 1);
                    *reinterpret_cast<uint2*>(to + lane % 2 * 8 + lane % 4 / 2 * 4) =
                        odd ? make_uint2(other, in_b) : make_uint2(in_a, other);
                } else if (row + h * 8 < rows) {
#pragma unroll
                    for (int e = 0; e < 4; ++e) {
                        const int col = i * 8 + e / 2 * 8 + fragment_col(lane) + e % 2;
                        if (key + col < keys) at[h * 8 * view.row_stride + col] = T(x[e / 2][e % 2]);
                    }
                }
            }
        });
    }

    const Cta& cta_;
    const DsmemReduction<Traits> reduction_;
};

template <typename Traits, BiasKind kBias>
struct DbiasWriterOf {
    using Type = NoDbiasWriter<Traits>;
};
template <typename Traits>
struct DbiasWriterOf<Traits, BiasKind::kKey> {
    using Type = KeyDbiasWriter<Traits>;
};
template <typename Traits>
struct DbiasWriterOf<Traits, BiasKind::kDense> {
    using Type = DenseDbiasWriter<Traits>;
};

}  // namespace flash_dmattn::cuda::sm80
