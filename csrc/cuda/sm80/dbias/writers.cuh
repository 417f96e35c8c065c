// What the backward's main kernel does about the bias's gradient, by the kind of bias. A writer follows the main loop:
//
//   begin()                                    before the first tile
//   begin_tile()                               once the block is done with the tile before
//   take(n, dx, is_visible)                    dx of two neighbouring pairs, of this lane's columns of block n
//   take_capped(visit, n, row, key, rows, ..)  the same where there is a softcap; (row, key) is the first pair of the
//                                              block in the tile, which has `rows` rows
//   take_pass(visit, ds, first_n)              ds of all pairs of a pass, in registers
//   end_tile(visit)                            once dS of the tile lies in shared memory, rounded
//   end_head(head, more, cursor)               after the last tile of a head; the cursor is at the next, if there is one
//   end()                                      after the last tile
//
// Sums is what a writer keeps in registers; an array, it is a local of whoever runs the loop (see BwdBlock).
#pragma once

#include "cuda/arch/memory.cuh"
#include "cuda/arch/atomic_add.cuh"
#include "cuda/sm80/bwd/block.cuh"

namespace flash_dmattn::cuda::sm80 {

template <typename Traits>
class NoDbiasWriter {
public:
    using Block = BwdBlock<Traits, BiasKind::kNone>;
    struct Sums {};

    __device__ NoDbiasWriter(const Block&, Sums&) {}
    static __device__ bool owns_cluster(const BwdArgs&) { return false; }

    __device__ void begin() {}
    __device__ void begin_tile() {}
    __device__ void take(int, const float (&)[2], const bool (&)[2]) {}
    __device__ void take_capped(const RowTileVisit&, int, int, int, int, int, const float (&)[2], const bool (&)[2]) {}
    template <int kPassN>
    __device__ void take_pass(const RowTileVisit&, const float (&)[Traits::kScoreM][kPassN][4], int) {}
    __device__ void end_tile(const RowTileVisit&) {}
    template <typename Cursor>
    __device__ void end_head(int, bool, const Cursor&) {}
    __device__ void end() {}
};

// The gradient of a key's bias is its column's sum of dx, over all rows of the heads that share it.
template <typename Traits>
class KeyDbiasWriter {
public:
    using Block = BwdBlock<Traits, BiasKind::kKey>;
    struct Sums {
        float of_columns[Traits::kScoreN][2] = {};  // this lane's
    };

    __device__ KeyDbiasWriter(const Block& block, Sums& sums) : block_(block), sums_(sums.of_columns) {}
    static __device__ bool owns_cluster(const BwdArgs&) { return false; }

    __device__ void begin() {}
    __device__ void begin_tile() {}
    __device__ __forceinline__ void take(int n, const float (&dx)[2], const bool (&is_visible)[2]) {
#pragma unroll
        for (int e = 0; e < 2; ++e) sums_[n][e] += is_visible[e] ? dx[e] : 0.f;
    }
    __device__ __forceinline__ void take_capped(const RowTileVisit&, int n, int, int, int, int, const float (&dx)[2],
                                                const bool (&is_visible)[2]) {
        take(n, dx, is_visible);
    }
    template <int kPassN>
    __device__ void take_pass(const RowTileVisit&, const float (&)[Traits::kScoreM][kPassN][4], int) {}
    __device__ void end_tile(const RowTileVisit&) {}
    template <typename Cursor>
    __device__ __forceinline__ void end_head(int head, bool more, const Cursor& cursor) {
        const BwdArgs& p = block_.p;
        if (p.dbias.data == nullptr) return;
        const auto sums_of = [&](int head) { return shared_head(head, p.heads, p.dbias.heads); };
        if (!more || sums_of(cursor.head()) != sums_of(head)) store(head);
    }
    __device__ void end() {}

private:
    // The sums, added up over the lanes and warps that share a column.
    __device__ __forceinline__ void store(int head) {
        const BwdArgs& p = block_.p;
        auto& smem = block_.smem;
        if (threadIdx.x < Traits::kKeys) smem.column_sums[threadIdx.x] = 0;
        __syncthreads();
        for (int row_warp = 0; row_warp < Traits::kSizes.score_row_warps; ++row_warp) {
            if (warp_id() / Traits::kScoreKeyWarps == row_warp) {
#pragma unroll
                for (int n = 0; n < Traits::kScoreN; ++n)
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        float sum = sums_[n][e];
#pragma unroll
                        for (int step = 4; step < 32; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
                        if (lane_id() < 4) smem.column_sums[block_.score_key + n * 8 + lane_id() * 2 + e] += sum;
                        sums_[n][e] = 0;
                    }
            }
            __syncthreads();
        }
        const int key = block_.first_key + threadIdx.x;
        if (threadIdx.x < Traits::kKeys && key < block_.sequence().keys) {
            float* to = static_cast<float*>(p.dbias.data) + score_offset(p.dbias, block_.sequence(), head, p.heads);
            to[key * p.dbias.col_stride] = smem.column_sums[threadIdx.x];
        }
        __syncthreads();
    }

    const Block& block_;
    float (&sums_)[Traits::kScoreN][2];
};

// A dense bias, whose gradient is dx, pair by pair. BwdCuts::dense_dbias says who writes it.
template <typename Traits, bool kCausal>
class DenseDbiasWriter {
public:
    using Block = BwdBlock<Traits, BiasKind::kDense>;
    struct Sums {};
    using T = typename Traits::T;

    __device__ DenseDbiasWriter(const Block& block, Sums&)
        : block_(block),
          reduction_(block.address_of, reduction_smem(block.address_of),
                     static_cast<int>(block.p.dbias.batch_group_size)) {}

    // Whether the blocks of a cluster are those of the batch elements that share a bias.
    static __device__ __forceinline__ bool owns_cluster(const BwdArgs& p) { return is(p, DenseDbias::kClusterReduce); }

    __device__ __forceinline__ void begin() const {
        if constexpr (kMayClusterReduce)
            if (is(DenseDbias::kClusterReduce)) reduction_.begin();
        if (is(DenseDbias::kDirect) || is(DenseDbias::kClusterReduce)) clear_unvisited();
    }
    __device__ __forceinline__ void begin_tile() const {
        if constexpr (kMayClusterReduce)
            if (is(DenseDbias::kClusterReduce)) reduction_.await_parts();
    }
    __device__ void take(int, const float (&)[2], const bool (&)[2]) const {}
    // ds is not dx where there is a softcap; dx then goes straight to the gradient.
    __device__ __forceinline__ void take_capped(const RowTileVisit& visit, int, int row, int key, int rows, int lane,
                                                const float (&dx)[2], const bool (&is_visible)[2]) const {
        row += fragment_row(lane), key += fragment_col(lane);
        if (!is(DenseDbias::kDirect) || row >= rows) return;
        T* to = rows_of(visit.head, visit.m_block) + row * block_.p.dbias.row_stride + key;
#pragma unroll
        for (int e = 0; e < 2; ++e)
            if (block_.first_key + key + e < block_.sequence().keys) to[e] = T(is_visible[e] ? dx[e] : 0.f);
    }
    template <int kPassN>
    __device__ __forceinline__ void take_pass(const RowTileVisit& visit, const float (&ds)[Traits::kScoreM][kPassN][4],
                                              int first_n) const {
        if (is(DenseDbias::kAtomic)) add(visit, ds, first_n);
        if constexpr (kMayClusterReduce)
            if (is(DenseDbias::kClusterReduce)) reduction_.send(ds, first_n, block_.smem.rank, visit.stage);
    }
    __device__ __forceinline__ void end_tile(const RowTileVisit& visit) const {
        if (is(DenseDbias::kDirect) && block_.p.softcap == 0) store(visit);
        if constexpr (kMayClusterReduce)
            if (is(DenseDbias::kClusterReduce)) store_reduced(visit);
    }
    template <typename Cursor>
    __device__ void end_head(int, bool, const Cursor&) const {}
    __device__ __forceinline__ void end() const {
        if constexpr (kMayClusterReduce)
            if (is(DenseDbias::kClusterReduce)) reduction_.end();
    }

private:
    static constexpr bool kMayClusterReduce = kCanClusterReduce<Traits> && kHasSm90;

    // Asked of a constant whenever it matters: kept, the answer would be spilled.
    static __device__ __forceinline__ bool is(const BwdArgs& p, DenseDbias what) {
        return (what != DenseDbias::kClusterReduce || kMayClusterReduce) &&
               opaque(static_cast<uint32_t>(p.dense_dbias)) == static_cast<uint32_t>(what);
    }
    __device__ __forceinline__ bool is(DenseDbias what) const { return is(block_.p, what); }

    // It follows the rest of the block's shared memory.
    static __device__ const DxExchangeSharedStorage<Traits>& reduction_smem(const SmemAddress& memory) {
        return *reinterpret_cast<const DxExchangeSharedStorage<Traits>*>(memory.start() +
                                                                         sizeof(typename Block::SharedStorage));
    }

    // A tile of the gradient.
    __device__ __forceinline__ T* rows_of(int head, int m_block) const {
        const BwdArgs& p = block_.p;
        const Sequence& s = block_.sequence();
        return static_cast<T*>(p.dbias.data) +
               (p.dbias.batches > 1 ? block_.smem.bias_batch * p.dbias.batch_stride : 0) + head * p.dbias.head_stride +
               static_cast<uint32_t>(s.first_row + m_block * Traits::kRows) * p.dbias.row_stride + block_.first_key;
    }

    // Tiles that the cursor leaves out have a gradient, too: 0. Batch elements that share it take turns.
    __device__ __forceinline__ void clear_unvisited() const {
        const BwdArgs& p = block_.p;
        const Sequence& s = block_.sequence();
        if (!kCausal && !has_mask(p)) return;
        const int sharers = is(DenseDbias::kClusterReduce) ? static_cast<int>(p.dbias.batch_group_size) : 1;
        auto visited = block_.template cursor<kCausal>();
        bool more = visited.next();
        for (int head = block_.first_head; head < block_.first_head + block_.group; ++head) {
            for (int tile = 0; tile < ceil_div(s.rows, Traits::kRows); ++tile) {
                if (more && visited.head() == head && visited.m_block() == tile) {
                    more = visited.next();
                    continue;
                }
                if (sharers > 1 && tile % sharers != block_.smem.rank) continue;
                T* to = rows_of(head, tile);
                for (int i = opaque(threadIdx.x); i < Traits::kRows * Traits::kKeys; i += Traits::kThreads) {
                    const int row = i / Traits::kKeys, key = i % Traits::kKeys;
                    if (tile * Traits::kRows + row < s.rows && block_.first_key + key < s.keys)
                        to[row * p.dbias.row_stride + key] = T(0.f);
                }
            }
        }
    }

    // To the sums of the tile, in the order in which registers hold it.
    template <int kPassN>
    __device__ __forceinline__ void add(const RowTileVisit& visit, const float (&dx)[Traits::kScoreM][kPassN][4],
                                        int first_n) const {
        const BwdArgs& p = block_.p;
        const int heads = static_cast<int>(p.dbias.heads);
        const int num_m_blocks = ceil_div(static_cast<int>(p.seqlen_q), Traits::kRows);
        const int batch = p.dbias.batches > 1 || p.cu_seqlens_q != nullptr ? block_.smem.bias_batch : 0;
        const int tile_row = (batch * heads + shared_head(visit.head, p.heads, heads)) * num_m_blocks + visit.m_block;
        const int num_n_blocks = ceil_div(static_cast<int>(p.seqlen_k), Traits::kKeys);
        const int64_t tile = static_cast<int64_t>(tile_row) * num_n_blocks + block_.n_block;
        float* to = p.dbias_parts + tile * Traits::kRows * Traits::kKeys + threadIdx.x * 4;
#pragma unroll
        for (int m = 0; m < Traits::kScoreM; ++m)
#pragma unroll
            for (int n = 0; n < kPassN; ++n)
                reduce_add(to + (m * Traits::kScoreN + first_n + n) * Traits::kThreads * 4, dx[m][n]);
    }

    __device__ __forceinline__ void store(const RowTileVisit& visit) const {
        copy_tile_out<Traits::kThreads>(block_.smem.dscores, rows_of(visit.head, visit.m_block),
                                        block_.p.dbias.row_stride, block_.rows_from(visit.m_block), block_.keys());
    }

    __device__ __forceinline__ void store_reduced(const RowTileVisit& visit) const {
        const ScoreView& view = block_.p.dbias;
        T* tile = rows_of(visit.head, visit.m_block);
        const int first_block = reduction_.first_block(block_.smem.rank), lane = opaque(lane_id());
        const int row = block_.score_row + first_block / Traits::kScoreN * 16 + fragment_row(lane);
        const int key = block_.score_key + first_block % Traits::kScoreN * 8;
        const int rows = block_.rows_from(visit.m_block), keys = block_.keys();
        const bool plain = is_plain<Traits, 4>(tile, view, rows, keys);
        T* at = tile + row * view.row_stride + key;
        reduction_.sum(visit.stage, [&](int i, const float (&a)[4], const float (&b)[4]) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const float x[2][2] = {{a[2 * h], a[2 * h + 1]}, {b[2 * h], b[2 * h + 1]}};
                T* to = at + h * 8 * view.row_stride + i * 8;
                if (plain) {
                    // Two lanes trade, so that each has four neighbours: the even one of block i, the odd one of i + 1.
                    const uint32_t in_a = pack<T>(x[0][0], x[0][1]), in_b = pack<T>(x[1][0], x[1][1]);
                    const bool odd = lane % 2;
                    const uint32_t other = __shfl_xor_sync(~0u, odd ? in_a : in_b, 1);
                    *reinterpret_cast<uint2*>(to + lane % 2 * 8 + lane % 4 / 2 * 4) =
                        odd ? make_uint2(other, in_b) : make_uint2(in_a, other);
                } else if (row + h * 8 < rows) {
#pragma unroll
                    for (int e = 0; e < 4; ++e) {
                        const int pair = i * 8 + e / 2 * 8 + fragment_col(lane) + e % 2;
                        if (key + pair < keys) at[h * 8 * view.row_stride + pair] = T(x[e / 2][e % 2]);
                    }
                }
            }
        });
    }

    const Block& block_;
    const DsmemReduction<Traits> reduction_;
};

template <typename Traits, BiasKind kBias, bool kCausal>
struct DbiasWriterOf {
    using Type = NoDbiasWriter<Traits>;
};
template <typename Traits, bool kCausal>
struct DbiasWriterOf<Traits, BiasKind::kKey, kCausal> {
    using Type = KeyDbiasWriter<Traits>;
};
template <typename Traits, bool kCausal>
struct DbiasWriterOf<Traits, BiasKind::kDense, kCausal> {
    using Type = DenseDbiasWriter<Traits, kCausal>;
};

}  // namespace flash_dmattn::cuda::sm80
