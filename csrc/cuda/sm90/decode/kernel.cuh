// Decoding in one kernel: new query rows attend to a cache of keys, contiguous or in pages. A cluster serves one
// sequence and KV head: it selects keys by their biases (selector.cuh) or takes all, the CTAs attend to equal splits
// of them (attention.cuh), and the splits are combined through DSMEM.
#pragma once

#include "attention.cuh"
#include "selector.cuh"

namespace flash_dmattn::cuda::sm90 {

// out and lse of the sequence, of the results of all splits: each CTA combines some of the packed rows' columns.
template <typename T, int kHeadDim, int kWarps>
__device__ void combine(const DecodeArgs& p, const KvCache& cache,
                        const DecodeAttention<T, kHeadDim, kWarps>& attention, int rank) {
    const DecodeSplits splits = attention.splits();
    const int log2_per_cta = __ffs(splits.per_cta) - 1;
    constexpr int kVectors = kHeadDim / 4;
    const int vectors = attention.packed_rows() * kVectors, share = ceil_div(vectors, p.cluster);
#pragma unroll 1
    for (int i = rank * share + threadIdx.x; i < min((rank + 1) * share, vectors); i += kWarps * 32) {
        const int packed = i / kVectors, col = i % kVectors * 4;
        constexpr int kInFlight = 8;
        float largest = -kInfinity, sum = 0;
        float4 total{};
#pragma unroll 1
        for (int first = 0; first < splits.count; first += kInFlight) {
            float maxima[kInFlight], sums[kInFlight];
            float4 x[kInFlight];
            float before = largest;
#pragma unroll
            for (int r = 0; r < kInFlight; ++r) {
                const int split = min(first + r, splits.count - 1), cta = split >> log2_per_cta;
                const auto result = attention.result_of(split - (cta << log2_per_cta), packed, col);
                maxima[r] = __uint_as_float(load_dsmem(map_to_cta(smem_address(result.row_max), cta)));
                sums[r] = __uint_as_float(load_dsmem(map_to_cta(smem_address(result.row_sum), cta)));
                x[r] = load_dsmem_float4(map_to_cta(smem_address(result.out), cta));
            }
#pragma unroll
            for (int r = 0; r < kInFlight; ++r) largest = fmaxf(largest, maxima[r]);
            const float correction = before == -kInfinity ? 0.f : fast_exp2((before - largest) * kLog2E);
            sum *= correction;
            total = {total.x * correction, total.y * correction, total.z * correction, total.w * correction};
#pragma unroll
            for (int r = 0; r < kInFlight; ++r) {
                if (first + r >= splits.count || sums[r] == 0) continue;  // a split without visible keys has no output
                const float weight = fast_exp2((maxima[r] - largest) * kLog2E);
                sum = fmaf(weight, sums[r], sum);
                total = {fmaf(weight, x[r].x, total.x), fmaf(weight, x[r].y, total.y), fmaf(weight, x[r].z, total.z),
                         fmaf(weight, x[r].w, total.w)};
            }
        }
        const int head = attention.head_of(packed);
        const int64_t row = int64_t{cache.first_row} + attention.row_of(packed);
        const float lse = sum == 0 ? -kInfinity : largest + logf(sum);
        float inverse = sum == 0 ? 0.f : 1.f / sum;
        if (p.sinks != nullptr && sum != 0) inverse /= 1.f + expf(p.sinks[head * p.sinks_stride] - lse);
        if (col == 0 && p.lse.data != nullptr)
            static_cast<float*>(p.lse.data)[cache.batch * p.lse.batch_stride + head * p.lse.head_stride + row] = lse;
        if (col >= p.head_dim) continue;
        T* out = static_cast<T*>(p.out.data) + cache.batch * p.out.batch_stride + row * p.out.row_stride +
                 head * p.out.head_stride + col;
        *reinterpret_cast<uint2*>(out) = {pack<T>(total.x * inverse, total.y * inverse),
                                          pack<T>(total.z * inverse, total.w * inverse)};
    }
}

template <typename T, int kHeadDim, int kWarps>
__global__ void __launch_bounds__(kWarps * 32, kWarps == kDecodeMinWarps && kHeadDim <= kDecodeManyWarpsHeadDim ? 2 : 1)
    decode_kernel(const __grid_constant__ DecodeArgs p) {
    extern __shared__ __align__(128) unsigned char raw_smem[];
    auto& smem = *reinterpret_cast<DecodeSharedStorage*>(raw_smem);

    const int sequence_head = static_cast<int>(blockIdx.x) / p.cluster, rank = static_cast<int>(blockIdx.x) % p.cluster;
    const int kv_heads = static_cast<int>(p.kv_heads);
    const KvCache cache(p, sequence_head / kv_heads, sequence_head % kv_heads);
    const int cluster = p.cluster;
    if (cache.rows == 0 || cache.rows > p.max_rows) return;  // all threads of the cluster

    using Attention = DecodeAttention<T, kHeadDim, kWarps>;
    const DecodeSmemLayout layout(p, kHeadDim);
    Attention attention(p, cache, smem, reinterpret_cast<typename Attention::QueryTile*>(raw_smem + layout.query),
                        raw_smem + layout.tiles);
    attention.load_query();
    const int* list = nullptr;
    int keys = cache.keys;
    if (p.order_capacity > 0 && cache.keys > p.window_size) {
        int* selected = reinterpret_cast<int*>(raw_smem + layout.list);
        constexpr DataType kHalf = std::is_same_v<T, half_t> ? DataType::kFloat16 : DataType::kBFloat16;
        DecodeSelector<kHalf, kWarps> selector(p, cache, smem, reinterpret_cast<uint16_t*>(raw_smem + layout.orders),
                                               reinterpret_cast<uint32_t*>(raw_smem + layout.histograms), rank);
        keys = selector.run(selected, attention.splits());
        list = selected;
        p.overlays ? selector.cluster_barrier() : __syncthreads();  // the list is complete; the orders have been read
    }
    attention.run(list, keys, rank);
    if (rank == 0) cache.append<T>(threadIdx.x, blockDim.x);
    cluster > 1 ? cluster_sync() : __syncthreads();
    combine(p, cache, attention, rank);
    if (cluster > 1) cluster_sync();  // the others have read this CTA's shared memory
}

}  // namespace flash_dmattn::cuda::sm90
