// Attention of the query rows of one sequence and KV head to a CTA's part of the keys: pack-GQA, mma.m16n8k16.
//
// Packed row r is query row r / G of query head r % G of the KV head's G. A warp computes one tile of 16 packed rows.
// The warps of all tiles of 16 rows form a group, which takes 16 keys at a time, with tiles of K and V of its own:
// groups do not wait for each other.
#pragma once

#include "cuda/kvcache/cache.cuh"
#include "cuda/arch/named_barrier.cuh"
#include "cuda/softmax/online_softmax.cuh"
#include "cuda/softmax/scores.cuh"
#include "shared_storage.cuh"

namespace flash_dmattn::cuda::sm90 {

enum DecodeNamedBarriers { kFirstGroup = 1 };  // of each group, where it has more than one warp

template <typename T, int kHeadDim, int kWarps>
class DecodeAttention {
    static constexpr int kThreads = kWarps * 32;

public:
    using Tile = SmemTile<T, 16, kHeadDim>;

private:
    static constexpr int kKeys = Tile::kRows;

public:
    __device__ DecodeAttention(const DecodeArgs& p, const KvCache& cache, DecodeSharedStorage& smem, Tile* query,
                               unsigned char* tiles)
        : p_(p), cache_(cache), smem_(smem), query_(query), tiles_(tiles),
          qheads_(static_cast<int>(p.heads / p.kv_heads)), packed_rows_(min(cache.rows * qheads_, kDecodeMaxRows)),
          m_tiles_(packed_rows_ <= 16   ? 1
                   : packed_rows_ <= 32 ? 2
                                        : 4),
          num_groups_(kWarps / m_tiles_), m_tile_(warp_id() % m_tiles_), group_(warp_id() / m_tiles_) {}

    __device__ int packed_rows() const { return packed_rows_; }
    __device__ int row_of(int packed) const { return packed / qheads_; }
    __device__ int head_of(int packed) const { return cache_.kv_head * qheads_ + packed % qheads_; }

    // Starts the copy of Q. Rows beyond the last are zeros.
    __device__ void load_query() const {
        const int cols = static_cast<int>(p_.head_dim);
        constexpr int kChunks = kHeadDim / Tile::kChunk;
#pragma unroll 1
        for (int i = threadIdx.x; i < m_tiles_ * 16 * kChunks; i += kThreads) {
            const int packed = i / kChunks, chunk = i % kChunks;
            const bool exists = packed < packed_rows_ && chunk * Tile::kChunk < cols;
            const T* from = static_cast<const T*>(p_.query.data);
            if (exists)
                from += cache_.batch * p_.query.batch_stride +
                        (int64_t{cache_.first_row} + row_of(packed)) * p_.query.row_stride +
                        head_of(packed) * p_.query.head_stride + chunk * Tile::kChunk;
            cp_async_16_if(query_[packed / 16].address(packed % 16, chunk), from, exists);
        }
        cp_async_commit();
    }

    // Attends to `count` keys: list[i], or first + i where `list` is null. The results stay in shared memory: maximum
    // and sum in smem.row_max and row_sum, the unscaled output at output(packed row).
    __device__ void run(const int* list, int first, int count) {
        list_ = list, first_ = first, count_ = count;
        const bool is_plain =
            m_tiles_ == 1 && cache_.rows == 1 && p_.relative_bias.data == nullptr && p_.score_cap <= 0;
        is_plain ? attend<true>() : attend<false>();
    }

    // Four columns of a packed row's output in this CTA.
    __device__ float* output(int packed, int col) const { return partial(packed / 16, packed % 16, col); }

private:
    // The keys of a chunk: lane i % 16 has key i. Null where the rows are not read.
    struct Found {
        const T* key_row = nullptr;
        const T* value_row = nullptr;
        const uint16_t* bias = nullptr;  // float32 or T
        int key = -1;                    // -1: none
    };

    // kPlain: one query row in one tile, no softcap and no relative bias. Fetching instructions takes much of the
    // time; the usual case has a loop of its own, without branches.
    template <bool kPlain>
    __device__ __forceinline__ void attend() {
        if (!kPlain) prepare_rows();
        float out[1][kHeadDim / 8][4];
        clear(out);
        OnlineSoftmax<1> softmax;
        cp_async_wait<0>();
        __syncthreads();  // Q has arrived
        // Software pipeline, its prologue in the same loop to keep the code small: step n finds the rows of chunk
        // n + 2, copies those of chunk n + 1 and attends to chunk n. The bias of chunk n + 1 is loaded last, since a
        // copy of it to another register would wait for it.
        const int chunks = ceil_div(count_, kKeys), first_chunk = group_;
        int key = -1;        // of chunk n
        KeyBiasBits bias{};  // of this key
        found_ = {};
#pragma unroll 1
        for (int chunk = first_chunk - 2 * num_groups_; chunk < chunks; chunk += num_groups_) {
            const bool attends = chunk >= first_chunk, copies = chunk >= first_chunk - num_groups_;
            float scores[1][2][4];
            if (attends) {
                cp_async_wait<1>();
                sync_group<kPlain>();
                multiply_key(scores);
                sync_group<kPlain>();
            }
            if (copies) copy<kPlain>(key_tile(), found_.key_row);
            if (attends) {
                finish_scores<kPlain>(scores, key, bias);
                softmax.update(
                    scores, kLog2E, -kInfinity, [] {},
                    [&](int i, float factor) { OnlineSoftmax<1>::scale(out, i, factor); });
                cp_async_wait<1>();
                sync_group<kPlain>();
                multiply_value(out, scores);
                sync_group<kPlain>();
            }
            if (copies) copy<kPlain>(value_tile(), found_.value_row);
            key = found_.key;
            if (key >= 0) bias = load_bias(found_.bias);
            find(chunk + 2 * num_groups_);
        }
        cp_async_wait<0>();
        merge(out, softmax);
    }

    __device__ Tile& key_tile() const { return reinterpret_cast<Tile*>(tiles_)[group_ * m_tiles_ * 2]; }
    __device__ Tile& value_tile() const { return (&key_tile())[1]; }

    // A warp's output, at 16 rows of kHeadDim floats. Rows are rotated by 8 columns each against bank conflicts.
    __device__ float* partial(int warp, int row, int col) const {
        int rotated = col + row % 4 * 8;
        if (rotated >= kHeadDim) rotated -= kHeadDim;
        return reinterpret_cast<float*>(tiles_ + warp * 2 * sizeof(Tile)) + row * kHeadDim + rotated;
    }

    template <bool kPlain>
    __device__ void sync_group() const {
        if (kPlain || m_tiles_ == 1) return __syncwarp();
        static_assert(kFirstGroup + kWarps / 2 <= 16);
        named_barrier_sync(kFirstGroup + group_, m_tiles_ * 32);
    }

    __device__ KeyBiasBits load_bias(const uint16_t* from) const {
        if (p_.bias_cache.data == nullptr) return {};
        return {__ldcg(from), __ldcg(from + (has_float_bias() ? 1 : 0))};
    }
    __device__ bool has_float_bias() const { return p_.bias_cache.dtype == DataType::kFloat32; }

    __device__ void find(int chunk) {
        const int i = chunk * kKeys + lane_id() % kKeys;
        found_ = {};
        if (i >= count_) return;
        const int key = list_ != nullptr ? list_[i] : first_ + i;
        const KvCache::Place place = cache_.place_of(key);
        found_.bias = cache_.bias_at(place);
        // A selected key is visible.
        if (list_ == nullptr && key_bias_of<T>(p_.bias_cache, load_bias(found_.bias)) == -kInfinity) return;
        found_.key = key;
        found_.key_row = cache_.row_at<T>(p_.k_cache, p_.key, place);
        found_.value_row = cache_.row_at<T>(p_.v_cache, p_.value, place);
    }

    // Starts the copy of the found rows. The warps of a group share the work.
    template <bool kPlain>
    __device__ void copy(Tile& to, const T* found) const {
        constexpr int kRowsPerStep = 32 / Tile::kSlabChunks, kSteps = kKeys / kRowsPerStep;
        const int chunk = lane_id() % Tile::kSlabChunks, lane_row = lane_id() / Tile::kSlabChunks;
        const int left = static_cast<int>(p_.head_dim) - chunk * Tile::kChunk;
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
            const int row = i * kRowsPerStep + lane_row;
            const auto from =
                reinterpret_cast<const T*>(__shfl_sync(~0u, reinterpret_cast<unsigned long long>(found), row));
            if (!kPlain && i % m_tiles_ != m_tile_) continue;
            const uint32_t at = to.address(row, chunk);
#pragma unroll
            for (int slab = 0; slab < Tile::kSlabs; ++slab)
                cp_async_16_if(at + slab * Tile::kRows * Tile::kSlabCols * 2,
                               from + slab * Tile::kSlabCols + chunk * Tile::kChunk,
                               from != nullptr && slab * Tile::kSlabCols < left);
        }
        cp_async_commit();
    }

    __device__ void multiply_key(float (&scores)[1][2][4]) const {
        clear(scores);
        const uint32_t query = query_[m_tile_].ldmatrix_lane_a(), key = key_tile().ldmatrix_lane_b();
#pragma unroll
        for (int col = 0; col < kHeadDim; col += 16) {
            uint32_t a[4], b[4];
            Tile::load_a(a, query, 0, col);
            Tile::load_b(b, key, 0, col);
            mma_m16n8k16<T>(scores[0][0], a, b[0], b[1]);
            mma_m16n8k16<T>(scores[0][1], a, b[2], b[3]);
        }
    }

    __device__ void multiply_value(float (&out)[1][kHeadDim / 8][4], const float (&p)[1][2][4]) const {
        const uint32_t a[4] = {pack<T>(p[0][0][0], p[0][0][1]), pack<T>(p[0][0][2], p[0][0][3]),
                               pack<T>(p[0][1][0], p[0][1][1]), pack<T>(p[0][1][2], p[0][1][3])};
        const uint32_t value = value_tile().ldmatrix_lane_a();
#pragma unroll
        for (int col = 0; col < kHeadDim; col += 16) {
            uint32_t b[4];
            Tile::load_b_transposed(b, value, 0, col);
            mma_m16n8k16<T>(out[0][col / 8], a, b[0], b[1]);
            mma_m16n8k16<T>(out[0][col / 8 + 1], a, b[2], b[3]);
        }
    }

    // The position of this thread's rows, and their relative biases.
    __device__ void prepare_rows() {
        const RelativeBiasView& view = p_.relative_bias;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int packed = min(m_tile_ * 16 + h * 8 + fragment_row(), packed_rows_ - 1);
            key_of_row_[h] = cache_.keys - cache_.rows + row_of(packed);
            if (view.data != nullptr)
                relative_bias_[h] = static_cast<const float*>(view.data) + view.radius +
                                    (view.batches > 1 ? cache_.batch : 0) * view.batch_stride +
                                    shared_head(head_of(packed), p_.heads, view.heads) * view.head_stride;
        }
    }

    // Scale, softcap, biases and causality. Lane i % 16 has key i and its bias.
    template <bool kPlain>
    __device__ __forceinline__ void finish_scores(float (&scores)[1][2][4], int own_key,
                                                  const KeyBiasBits& bias_bits) const {
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                scores[0][n][i] *= p_.score_scale;
                if (!kPlain && p_.score_cap > 0) scores[0][n][i] = p_.score_cap * fast_tanh(scores[0][n][i]);
            }
        const float own_bias = own_key < 0 ? -kInfinity : key_bias_of<T>(p_.bias_cache, bias_bits);
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int lane = n * 8 + fragment_col() + e;
                const int key = kPlain ? 0 : __shfl_sync(~0u, own_key, lane);
                const float bias = __shfl_sync(~0u, own_bias, lane);
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    float& score = scores[0][n][2 * h + e];
                    score += bias;
                    if (!kPlain && (p_.relative_bias.data != nullptr || cache_.rows > 1)) score += bias_of_row(h, key);
                    if (bias == -kInfinity) score = -kInfinity;
                }
            }
    }

    // Relative bias and causality; -inf hides.
    __device__ float bias_of_row(int h, int key) const {
        const int distance = key - key_of_row_[h];
        if (p_.is_causal && distance > 0) return -kInfinity;
        if (p_.relative_bias.data == nullptr) return 0.f;
        const int radius = static_cast<int>(p_.relative_bias.radius);
        const float bias = __ldg(relative_bias_[h] + min(max(distance, -radius), radius));
        return bias <= kLowest<float> ? -kInfinity : bias;
    }

    // Merges the groups' results into those of the first group. All threads call.
    __device__ void merge(const float (&out)[1][kHeadDim / 8][4], OnlineSoftmax<1>& softmax) const {
        sync_group<false>();
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int row = h * 8 + fragment_row();
            const float sum = row_sum(softmax.sum[h]);
            if (is_row_leader()) {
                smem_.warp_max[warp_id()][row] = softmax.max[h];
                smem_.warp_sum[warp_id()][row] = sum;
            }
            if (sum == 0 || m_tile_ * 16 + row >= packed_rows_) continue;
#pragma unroll
            for (int n = 0; n < kHeadDim / 8; ++n)
                *reinterpret_cast<float2*>(partial(warp_id(), row, n * 8 + fragment_col())) = {out[0][n][2 * h],
                                                                                               out[0][n][2 * h + 1]};
        }
        __syncthreads();
        constexpr int kVectors = kHeadDim / 4;
#pragma unroll 1
        for (int i = threadIdx.x; i < packed_rows_ * kVectors; i += kThreads) {
            const int packed = i / kVectors, col = i % kVectors * 4, tile = packed / 16, row = packed % 16;
            float largest = -kInfinity;
            for (int group = 0; group < num_groups_; ++group)
                largest = fmaxf(largest, smem_.warp_max[group * m_tiles_ + tile][row]);
            float sum = 0;
            float4 total{};
#pragma unroll
            for (int group = 0; group < kWarps; ++group) {
                const int warp = group * m_tiles_ + tile;
                if (group >= num_groups_ || smem_.warp_sum[warp][row] == 0) continue;
                const float weight = fast_exp2((smem_.warp_max[warp][row] - largest) * kLog2E);
                const float4 x = *reinterpret_cast<const float4*>(partial(warp, row, col));
                sum = fmaf(weight, smem_.warp_sum[warp][row], sum);
                total = {fmaf(weight, x.x, total.x), fmaf(weight, x.y, total.y), fmaf(weight, x.z, total.z),
                         fmaf(weight, x.w, total.w)};
            }
            *reinterpret_cast<float4*>(partial(tile, row, col)) = total;
            if (col == 0) smem_.row_max[packed] = largest, smem_.row_sum[packed] = sum;
        }
    }

    const DecodeArgs& p_;
    const KvCache& cache_;
    DecodeSharedStorage& smem_;
    Tile* const query_;
    unsigned char* const tiles_;
    const int qheads_;  // query heads of the KV head
    const int packed_rows_;
    const int m_tiles_;  // of 16 packed rows
    const int num_groups_;
    const int m_tile_, group_;  // of this warp
    const int* list_;
    int first_, count_;
    Found found_;                    // the chunk to be copied next
    int key_of_row_[2];              // the key at which each of this thread's rows stands
    const float* relative_bias_[2];  // of these rows, at distance 0
};

}  // namespace flash_dmattn::cuda::sm90
