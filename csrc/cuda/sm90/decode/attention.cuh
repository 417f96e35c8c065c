// Attention of the query rows of one sequence and KV head to a CTA's splits of the keys: pack-GQA, mma.m16n8k16.
//
// Packed row r is query row r / G of query head r % G of the KV head's G. A warp computes a tile of 8 packed rows,
// S^T = K Q^T and O^T = V^T P^T: the 16 rows of the instruction are keys or columns of V, of which there are always
// enough. The warps of all tiles form a group, which takes 16 keys at a time, with tiles of K and V of its own: groups
// do not wait for each other. Consecutive groups attend to one split of the keys (DecodeSplits).
#pragma once

#include "cuda/kvcache/cache.cuh"
#include "cuda/arch/named_barrier.cuh"
#include "cuda/softmax/online_softmax.cuh"
#include "cuda/softmax/scores.cuh"
#include "shared_storage.cuh"

namespace flash_dmattn::cuda::sm90 {

struct DecodeNamedBarriers {
    enum : int {
        kGroupSync = 1,  // + group: its warps, where it has more than one
    };
};

// kPlain: DecodeArgs::is_plain.
template <typename T, int kHeadDim, int kWarps, bool kPlain>
class DecodeAttention {
    static constexpr int kThreads = kWarps * 32;

public:
    using Tile = SmemTile<T, 16, kHeadDim>;
    using QueryTile = SmemTile<T, kDecodeTileRows, kHeadDim>;

private:
    static constexpr int kKeys = Tile::kRows, kRows = QueryTile::kRows;

public:
    __device__ DecodeAttention(const DecodeArgs& p, const KvCache& cache, DecodeSharedStorage& smem, QueryTile* query,
                               unsigned char* tiles)
        : p_(p), cache_(cache), smem_(smem), query_(query), tiles_(tiles),
          qheads_(static_cast<int>(p.heads_per_kv.value)), packed_rows_(min(cache.rows * qheads_, kDecodeMaxRows)),
          row_tiles_(decode_tiles(packed_rows_)), row_tile_(warp_id() & (row_tiles_ - 1)),
          group_(div_by_power(warp_id(), row_tiles_)) {}

    // Computed where needed, to save registers.
    __device__ DecodeSplits splits() const { return {p_, cache_.keys, row_tiles_}; }
    __device__ int packed_rows() const { return packed_rows_; }
    __device__ int row_of(int packed) const { return static_cast<int>(p_.heads_per_kv.quotient(packed)); }
    __device__ int head_of(int packed) const { return cache_.kv_head * qheads_ + packed - row_of(packed) * qheads_; }

    // Starts the copy of Q, one group of cp.async. Rows beyond the last are zeros.
    __device__ void load_query() const {
        const int cols = static_cast<int>(p_.head_dim);
        constexpr int kChunks = kHeadDim / Tile::kChunk;
#pragma unroll 1
        for (int i = threadIdx.x; i < row_tiles_ * kRows * kChunks; i += kThreads) {
            const int packed = i / kChunks, chunk = i % kChunks;
            const bool exists = packed < packed_rows_ && chunk * Tile::kChunk < cols;
            const T* from = static_cast<const T*>(p_.query.data);
            if (exists)
                from += cache_.batch * p_.query.batch_stride +
                        (int64_t{cache_.first_row} + row_of(packed)) * p_.query.row_stride +
                        head_of(packed) * p_.query.head_stride + chunk * Tile::kChunk;
            cp_async_16_if(query_[packed / kRows].address(packed % kRows, chunk), from, exists);
        }
        cp_async_commit();
    }

    // Attends to this CTA's splits of `keys` keys: those of `list`, or all where it is null. The results stay in shared
    // memory.
    __device__ void run(const int* list, int keys, int rank) {
        const DecodeSplits splits = this->splits();
        const int own_split = div_by_power(warp_id(), splits.warps), split = rank * splits.per_cta + own_split,
                  share = splits.share(keys);
        const int first = own_split < splits.per_cta && split < splits.count ? min(split * share, keys) : keys;
        list_ = list;
        begin_ = list == nullptr ? first : own_split * share;
        end_ = begin_ + min(share, keys - first);
        Output out{};
        if (kPlain || (row_tiles_ == 1 && cache_.rows == 1 && p_.relative_bias.data == nullptr && p_.score_cap <= 0)) {
            attend<true>(out);
        } else if constexpr (!kPlain) {
            attend<false>(out);
        }
        merge(out);
    }

    // A packed row of the result of one of this CTA's splits: maximum and sum, and four columns of the unscaled output.
    struct Result {
        float *row_max, *row_sum, *out;
    };
    __device__ Result result_of(int split, int packed, int col) const {
        const int warp = split * splits().warps + packed / kRows, row = packed % kRows;
        return {&smem_.row_max[warp][row], &smem_.row_sum[warp][row], partial(warp, row, col)};
    }

private:
    // The keys of a chunk: lane i % 16 has key i. Null where the rows are not read.
    struct Found {
        const T* key_row = nullptr;
        const T* value_row = nullptr;
        const uint16_t* bias = nullptr;  // float32 or T
        int key = -1;                    // -1: none
    };

    // O^T of this warp's rows, and their softmax. Rows are columns of accumulators: fragment_col() + e, over the eight
    // lanes of equal fragment_col().
    struct Output {
        float columns[kHeadDim / 16][4];  // unscaled: [n][2 h + e] is column 16 n + 8 h + fragment_row() of V
        float max[2] = {-kInfinity, -kInfinity};
        float sum[2] = {};  // over this lane's keys

        // Replaces scores by exp(score - base), with the lazy rescaling of OnlineSoftmax.
        __device__ void exponentiate(float (&scores)[4]) {
            constexpr float kRescaleThreshold = OnlineSoftmax<1>::kRescaleThreshold;
            float largest[2];
            bool grows = false;
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                largest[e] = column_max(fmaxf(scores[e], scores[2 + e]));
                if (!((largest[e] - max[e]) * kLog2E > kRescaleThreshold)) largest[e] = max[e];
                grows |= largest[e] != max[e];
            }
            if (__any_sync(~0u, grows)) {
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const float correction = fast_exp2((max[e] - base(largest[e])) * kLog2E);
                    max[e] = largest[e];
                    sum[e] *= correction;
#pragma unroll
                    for (auto& fragment : columns) fragment[e] *= correction, fragment[2 + e] *= correction;
                }
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                scores[i] = fast_exp2((scores[i] - base(max[i % 2])) * kLog2E);
                sum[i % 2] += scores[i];
            }
        }

        __device__ static float base(float max) { return max == -kInfinity ? 0.f : max; }  // no -inf - -inf
    };

    // kSingleRow: one query row in one tile, no softcap and no relative bias. This case has a loop of its own, without
    // branches.
    template <bool kSingleRow>
    __device__ __forceinline__ void attend(Output& out) {
        if (!kSingleRow) prepare_rows();
        cp_async_wait<0>();
        __syncthreads();  // Q has arrived
        uint32_t query[kHeadDim / 8];
        load_query_fragments(query);
        // Software pipeline, its prologue in the same loop to keep the code small: step n finds the rows of chunk n,
        // copies those of chunk n - 1 and attends to chunk n - 2. It commits two groups of cp.async, K and V, also
        // where it copies nothing, since the waits count groups. The bias of chunk n - 1 is loaded last, since a copy
        // of it to another register would wait for it.
        const int groups = div_by_power(splits().warps, row_tiles_), stride = groups * kKeys;
        int at = begin_ + (group_ & (groups - 1)) * kKeys;  // of the chunk to be found
        int key = -1;                                       // of the chunk to attend to
        KeyBiasBits bias{};                                 // of this key
        found_ = {};
#pragma unroll 1
        for (int step = 0; at - 2 * stride < end_; ++step, at += stride) {
            const bool copies = step >= 1 && at - stride < end_, attends = step >= 2;
            float scores[4];
            if (attends) {
                cp_async_wait<1>();
                sync_group<kSingleRow>();
                multiply_key(scores, query);
                sync_group<kSingleRow>();
            }
            if (copies) copy<kSingleRow>(key_tile(), found_.key_row);
            cp_async_commit();
            if (attends) {
                finish_scores<kSingleRow>(scores, key, bias);
                out.exponentiate(scores);
                cp_async_wait<1>();
                sync_group<kSingleRow>();
                multiply_value(out, scores);
                sync_group<kSingleRow>();
            }
            if (copies) copy<kSingleRow>(value_tile(), found_.value_row);
            cp_async_commit();
            key = found_.key;
            if (key >= 0) bias = load_bias(found_.bias);
            find(at);
        }
        cp_async_wait<0>();
    }

    __device__ Tile& key_tile() const { return reinterpret_cast<Tile*>(tiles_)[group_ * row_tiles_ * 2]; }
    __device__ Tile& value_tile() const { return (&key_tile())[1]; }

    // A warp's output, kRows rows of kHeadDim floats, swizzled against bank conflicts: every two rows differ.
    __device__ float* partial(int warp, int row, int col) const {
        static_assert(kRows == 8 && kHeadDim % 32 == 0);
        return reinterpret_cast<float*>(tiles_ + warp * 2 * sizeof(Tile)) + row * kHeadDim + (col ^ row / 2 * 8);
    }

    template <bool kSingleRow>
    __device__ void sync_group() const {
        if (kSingleRow || row_tiles_ == 1) return __syncwarp();
        static_assert(DecodeNamedBarriers::kGroupSync + kWarps / 2 <= 16);
        named_barrier_sync(DecodeNamedBarriers::kGroupSync + group_, row_tiles_ * 32);
    }

    __device__ KeyBiasBits load_bias(const uint16_t* from) const {
        if (p_.bias_cache.data == nullptr) return {};
        return {__ldcg(from), __ldcg(from + (has_float_bias() ? 1 : 0))};
    }
    __device__ bool has_float_bias() const { return !kPlain && p_.bias_cache.dtype == DataType::kFloat32; }

    // Finds the rows of the chunk at position `at`.
    __device__ void find(int at) {
        const int i = at + lane_id() % kKeys;
        found_ = {};
        if (i >= end_) return;
        const int key = list_ != nullptr ? list_[i] : i;
        const KvCache::Location location = cache_.location_of(key);
        found_.bias = cache_.bias_at(location);
        // A selected key is visible.
        if (list_ == nullptr && key_bias_of<T>(p_.bias_cache, load_bias(found_.bias)) == -kInfinity) return;
        found_.key = key;
        found_.key_row = cache_.row_at<T>(p_.k_cache, p_.key, location);
        found_.value_row = cache_.row_at<T>(p_.v_cache, p_.value, location);
    }

    // Starts the copy of the found rows. The warps of a group share the work.
    template <bool kSingleRow>
    __device__ void copy(Tile& to, const T* found) const {
        // A sequence and KV head reads each row once. With evict_first selected rows do not replace the lines of
        // earlier kernels, which are often dirty and must be written first. Without a selection it is slower.
        list_ != nullptr ? copy_rows<kSingleRow, true>(to, found) : copy_rows<kSingleRow, false>(to, found);
    }

    template <bool kSingleRow, bool kEvictFirst>
    __device__ __forceinline__ void copy_rows(Tile& to, const T* found) const {
        constexpr int kRowsPerStep = 32 / Tile::kSlabChunks, kSteps = kKeys / kRowsPerStep;
        const int chunk = lane_id() % Tile::kSlabChunks, lane_row = lane_id() / Tile::kSlabChunks;
        const int left = static_cast<int>(p_.head_dim) - chunk * Tile::kChunk;
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
            const int row = i * kRowsPerStep + lane_row;
            const auto from =
                reinterpret_cast<const T*>(__shfl_sync(~0u, reinterpret_cast<unsigned long long>(found), row));
            if (!kSingleRow && (i & (row_tiles_ - 1)) != row_tile_) continue;
            const uint32_t at = to.address(row, chunk);
#pragma unroll
            for (int slab = 0; slab < Tile::kSlabs; ++slab)
                cp_async_16_if<kEvictFirst>(at + slab * Tile::kRows * Tile::kSlabCols * 2,
                                            from + slab * Tile::kSlabCols + chunk * Tile::kChunk,
                                            from != nullptr && slab * Tile::kSlabCols < left);
        }
    }

    // Q of this warp's rows, as B operands of K Q^T.
    __device__ void load_query_fragments(uint32_t (&query)[kHeadDim / 8]) const {
#pragma unroll
        for (int chunk = 0; chunk < kHeadDim / 8; chunk += 4) {
            uint32_t b[4];
            ldmatrix_x4(b, query_[row_tile_].address(lane_id() % kRows, chunk + lane_id() / kRows));
#pragma unroll
            for (int i = 0; i < 4; ++i) query[chunk + i] = b[i];
        }
    }

    // S^T of 16 keys: scores[2 h + e] is that of key 8 h + fragment_row() and row fragment_col() + e.
    __device__ void multiply_key(float (&scores)[4], const uint32_t (&query)[kHeadDim / 8]) const {
        float sums[2][4] = {};  // two chains of dependent instructions
        const uint32_t key = key_tile().ldmatrix_lane_a();
#pragma unroll
        for (int col = 0; col < kHeadDim; col += 16) {
            uint32_t a[4];
            Tile::load_a(a, key, 0, col);
            mma_m16n8k16<T>(sums[col / 16 % 2], a, query[col / 8], query[col / 8 + 1]);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) scores[i] = sums[0][i] + sums[1][i];
    }

    __device__ void multiply_value(Output& out, const float (&p)[4]) const {
        const uint32_t b0 = transpose_8x8(pack<T>(p[0], p[1])), b1 = transpose_8x8(pack<T>(p[2], p[3]));
        const uint32_t value = value_tile().ldmatrix_lane_b();
#pragma unroll
        for (int col = 0; col < kHeadDim; col += 16) {
            uint32_t a[4];
            Tile::load_a_transposed(a, value, 0, col);
            mma_m16n8k16<T>(out.columns[col / 16], a, b0, b1);
        }
    }

    // The position of this thread's rows, and their relative biases.
    __device__ void prepare_rows() {
        const RelativeBiasView& view = p_.relative_bias;
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int packed = min(row_tile_ * kRows + fragment_col() + e, packed_rows_ - 1);
            key_of_row_[e] = cache_.keys - cache_.rows + row_of(packed);
            if (view.data != nullptr)
                relative_bias_[e] = static_cast<const float*>(view.data) + view.radius +
                                    (view.batches > 1 ? cache_.batch : 0) * view.batch_stride +
                                    shared_head(head_of(packed), p_.heads, view.heads) * view.head_stride;
        }
    }

    // Scale, softcap, biases and causality. Lane i % 16 has key i and its bias. Roundings are explicit: with
    // batch_invariant a row gets the same bits from each instantiation.
    template <bool kSingleRow>
    __device__ __forceinline__ void finish_scores(float (&scores)[4], int own_key, const KeyBiasBits& bias_bits) const {
        const float own_bias = own_key < 0 ? -kInfinity : key_bias_of<T>(p_.bias_cache, bias_bits);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int lane = 8 * h + fragment_row();
            const int key = kSingleRow ? 0 : __shfl_sync(~0u, own_key, lane);
            const float bias = __shfl_sync(~0u, own_bias, lane);
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                float& score = scores[2 * h + e];
                if (!kSingleRow && p_.score_cap > 0) {
                    score = fmaf(p_.score_cap, fast_tanh(score * p_.score_scale), bias);
                } else {
                    score = fmaf(score, p_.score_scale, bias);
                }
                if (!kSingleRow && (p_.relative_bias.data != nullptr || cache_.rows > 1)) score += bias_of_row(e, key);
                if (bias == -kInfinity) score = -kInfinity;
            }
        }
    }

    // Relative bias and causality; -inf masks.
    __device__ float bias_of_row(int e, int key) const {
        const int distance = key - key_of_row_[e];
        if (p_.is_causal && distance > 0) return -kInfinity;
        if (p_.relative_bias.data == nullptr) return 0.f;
        const int radius = static_cast<int>(p_.relative_bias.radius);
        const float bias = __ldg(relative_bias_[e] + min(max(distance, -radius), radius));
        return bias <= kLowest<float> ? -kInfinity : bias;
    }

    // Merges the groups' results into those of the first group of each split. All threads call.
    __device__ void merge(const Output& out) const {
        sync_group<kPlain>();
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            const int row = fragment_col() + e;
            const float sum = column_sum(out.sum[e]);
            if (fragment_row() == 0) {
                smem_.warp_max[warp_id()][row] = out.max[e];
                smem_.warp_sum[warp_id()][row] = sum;
            }
            if (sum == 0 || row_tile_ * kRows + row >= packed_rows_) continue;
#pragma unroll
            for (int i = 0; i < kHeadDim / 8; ++i)
                *partial(warp_id(), row, 8 * i + fragment_row()) = out.columns[i / 2][i % 2 * 2 + e];
        }
        __syncthreads();
        constexpr int kVectors = kHeadDim / 4;
        const DecodeSplits splits = this->splits();
        const int split_groups = div_by_power(splits.warps, row_tiles_);
#pragma unroll 1
        for (int i = threadIdx.x; i < splits.per_cta * packed_rows_ * kVectors; i += kThreads) {
            const int split = splits.per_cta == 1 ? 0 : i / (packed_rows_ * kVectors);
            const int packed = i / kVectors - split * packed_rows_;
            const int col = i % kVectors * 4, first = split * splits.warps + packed / kRows, row = packed % kRows;
            float largest = -kInfinity, sum = 0;
            float4 total{};
#pragma unroll 4
            for (int group = 0; group < split_groups; ++group)
                largest = fmaxf(largest, smem_.warp_max[first + group * row_tiles_][row]);
#pragma unroll 4
            for (int group = 0; group < split_groups; ++group) {
                const int warp = first + group * row_tiles_;
                const float warp_sum = smem_.warp_sum[warp][row];
                float4 x{};  // of a warp without visible keys, which has no output
                if (warp_sum != 0) x = *reinterpret_cast<const float4*>(partial(warp, row, col));
                const float weight = warp_sum == 0 ? 0.f : fast_exp2((smem_.warp_max[warp][row] - largest) * kLog2E);
                sum = fmaf(weight, warp_sum, sum);
                total = {fmaf(weight, x.x, total.x), fmaf(weight, x.y, total.y), fmaf(weight, x.z, total.z),
                         fmaf(weight, x.w, total.w)};
            }
            const Result result = result_of(split, packed, col);
            *reinterpret_cast<float4*>(result.out) = total;
            if (col == 0) *result.row_max = largest, *result.row_sum = sum;
        }
    }

    const DecodeArgs& p_;
    const KvCache& cache_;
    DecodeSharedStorage& smem_;
    QueryTile* const query_;
    unsigned char* const tiles_;
    const int qheads_;  // query heads of the KV head
    const int packed_rows_;
    const int row_tiles_;            // a power of 2
    const int row_tile_, group_;     // of this warp
    const int* list_;                // of this CTA's keys; null: all keys
    int begin_, end_;                // of this warp's split: positions in list_, or keys
    Found found_;                    // the chunk to be copied next
    int key_of_row_[2];              // the key at which each of this thread's rows stands
    const float* relative_bias_[2];  // of these rows, at distance 0
};

}  // namespace flash_dmattn::cuda::sm90
