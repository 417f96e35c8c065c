// Decoding in one kernel: new query rows attend to a cache of keys, contiguous or in pages. A cluster serves one
// sequence and KV head: it selects keys by their biases (selector.cuh) or takes all, the CTAs attend to equal splits
// of them (attention.cuh), and the splits are combined through DSMEM.
#pragma once

#include "attention.cuh"
#include "selector.cuh"

namespace flash_dmattn::cuda::sm90 {

// out and lse of the sequence, of the results of all splits: each CTA combines some of the packed rows' columns. Each
// split is read by a lane of its own: their number is a power of 2, at most 32.
template <typename T, int kHeadDim, int kWarps, bool kPlain>
__device__ void combine(const DecodeArgs& p, const KvCache& cache,
                        const DecodeAttention<T, kHeadDim, kWarps, kPlain>& attention, int rank) {
    const DecodeSplits splits = attention.splits();
    const int split = lane_id() & (splits.count - 1), cta = div_by_power(split, splits.per_cta);
    constexpr int kVectors = kHeadDim / 4;
    const int vectors = attention.packed_rows() * kVectors, share = ceil_div_by_power(vectors, p.cluster);
    const int end = min((rank + 1) * share, vectors), at_once = div_by_power(kWarps * 32, splits.count);
#pragma unroll 1
    for (int first = rank * share; first < end; first += at_once) {
        const int i = first + div_by_power(static_cast<int>(threadIdx.x), splits.count);
        const int packed = i / kVectors, col = i % kVectors * 4;
        float max = -kInfinity, sum = 0;
        float4 x{};
        if (i < end) {  // what is loaded is used before the final cluster_arrive_relaxed
            const auto result = attention.result_of(split - cta * splits.per_cta, packed, col);
            max = __uint_as_float(load_dsmem(map_to_cta(smem_address(result.row_max), cta)));
            sum = __uint_as_float(load_dsmem(map_to_cta(smem_address(result.row_sum), cta)));
            x = load_dsmem_float4(map_to_cta(smem_address(result.out), cta));
        }
        if (sum == 0) x = {};  // a split without visible keys has no output
        float largest = max;
#pragma unroll 1
        for (int step = 1; step < splits.count; step *= 2)
            largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
        const float weight = max == largest ? 1.f : fast_exp2((max - largest) * kLog2E);
        sum *= weight;
        x = {x.x * weight, x.y * weight, x.z * weight, x.w * weight};
#pragma unroll 1
        for (int step = 1; step < splits.count; step *= 2) {
            sum += __shfl_xor_sync(~0u, sum, step);
            x.x += __shfl_xor_sync(~0u, x.x, step), x.y += __shfl_xor_sync(~0u, x.y, step);
            x.z += __shfl_xor_sync(~0u, x.z, step), x.w += __shfl_xor_sync(~0u, x.w, step);
        }
        if (split != 0 || i >= end) continue;
        const int head = attention.head_of(packed);
        const int64_t row = int64_t{cache.first_row} + attention.row_of(packed);
        float inverse = sum == 0 ? 0.f : __fdividef(1.f, sum);
        const bool stores_lse = col == 0 && p.lse.data != nullptr;
        if (stores_lse || p.sinks != nullptr) {
            const float lse = sum == 0 ? -kInfinity : largest + logf(sum);
            if (p.sinks != nullptr && sum != 0) inverse /= 1.f + expf(p.sinks[head * p.sinks_stride] - lse);
            if (stores_lse)
                static_cast<float*>(p.lse.data)[cache.batch * p.lse.batch_stride + head * p.lse.head_stride + row] =
                    lse;
        }
        if (col >= p.head_dim) continue;
        T* out = static_cast<T*>(p.out.data) + cache.batch * p.out.batch_stride + row * p.out.row_stride +
                 head * p.out.head_stride + col;
        *reinterpret_cast<uint2*>(out) = {pack<T>(x.x * inverse, x.y * inverse), pack<T>(x.z * inverse, x.w * inverse)};
    }
}

template <typename T, int kHeadDim, int kWarps, bool kPlain>
__global__ void __launch_bounds__(kWarps * 32, max_decode_ctas(kHeadDim, kWarps))
    decode_kernel(const __grid_constant__ DecodeArgs p) {
    extern __shared__ __align__(128) unsigned char raw_smem[];
    auto& smem = *reinterpret_cast<DecodeSharedStorage*>(raw_smem);

    constexpr DataType kHalf = std::is_same_v<T, half_t> ? DataType::kFloat16 : DataType::kBFloat16;
    using Selector = DecodeSelector<kHalf, kWarps, kPlain>;
    const DecodeSmemLayout layout(p, kHeadDim);
    auto* histograms = reinterpret_cast<uint32_t*>(raw_smem + layout.histograms);
    if (p.order_capacity > 0) Selector::init(smem, histograms);

    const int cluster = p.cluster, rank = static_cast<int>(blockIdx.x) & (cluster - 1);
    const int sequence_head = div_by_power(static_cast<int>(blockIdx.x), cluster);
    const int batch = static_cast<int>(p.kv_heads_divmod.quotient(sequence_head));
    const KvCache cache(p, batch, sequence_head - batch * static_cast<int>(p.kv_heads_divmod.value));
    if (cache.rows == 0 || cache.rows > p.max_rows) return;  // all threads of the cluster

    using Attention = DecodeAttention<T, kHeadDim, kWarps, kPlain>;
    Attention attention(p, cache, smem, reinterpret_cast<typename Attention::QueryTile*>(raw_smem + layout.query),
                        raw_smem + layout.tiles);
    const bool selects = p.order_capacity > 0 && cache.keys > p.window_size;
    Selector selector(p, cache, smem, reinterpret_cast<uint16_t*>(raw_smem + layout.orders),
                      reinterpret_cast<uint16_t*>(raw_smem + layout.candidates), histograms, rank);
    if (selects) selector.start();
    attention.load_query();  // one group of cp.async, which DecodeCandidates::find_candidates counts
    const int* list = nullptr;
    int keys = cache.keys;
    if (selects) {
        int* selected = reinterpret_cast<int*>(raw_smem + layout.list);
        keys = selector.run(selected, attention.splits());
        list = selected;
        selector.finish(layout);
    }
    attention.run(list, keys, rank);
    cluster_sync_shared(cluster);
    // After the barrier, so that no CTA waits for it; by the last warps, which combine least.
    if (rank == 0) cache.append<T>(0, cache.rows, kWarps * 32 - 1 - static_cast<int>(threadIdx.x), kWarps * 32);
    combine(p, cache, attention, rank);
    if (cluster == 1) return;
    cluster_arrive_relaxed();
    cluster_wait();  // the others have read this CTA's shared memory
}

}  // namespace flash_dmattn::cuda::sm90
