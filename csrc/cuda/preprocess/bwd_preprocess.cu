#include "bwd_preprocess.h"

#include <algorithm>

#include "cuda/arch/grid_dependency.cuh"
#include "cuda/common/basics.cuh"
#include "cuda/common/launch.h"
#include "cuda/common/sequence.cuh"
#include "cuda/mask/device_dispatch.cuh"

namespace flash_dmattn::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kSteps = 4;             // rows that a thread reads at once
constexpr int kMaxZeroedChunks = 64;  // of 16 bytes, of a thread

// Packed sequences are one sequence of total_q rows.
__host__ __device__ int64_t rows_of_head(const BwdArgs& p) {
    return p.cu_seqlens_q == nullptr ? p.seqlen_q : p.total_q;
}
__device__ Sequence sequence_of_rows(const BwdArgs& p, int batch) {
    Sequence s{};
    s.batch = batch;
    s.rows = static_cast<int>(rows_of_head(p));
    return s;
}

// Zeroes this CTA's share of `chunks` chunks of 16 bytes.
__device__ void zero_share(uint4* memory, int64_t chunks) {
    const int64_t share = ceil_div<int64_t>(chunks, gridDim.x), first = blockIdx.x * share,
                  end = min(first + share, chunks);
    for (int64_t chunk = first + threadIdx.x; chunk < end; chunk += kThreads) memory[chunk] = uint4{};
}

// kLanes lanes, a power of 2, reduce a row of up to 8 * kLanes elements: 16 bytes a lane.
template <typename T, int kLanes>
__global__ void __launch_bounds__(kThreads)
    bwd_preprocess_kernel(const __grid_constant__ BwdArgs p, int num_m_blocks, uint4* zeroed, int64_t zeroed_chunks) {
    grid_dependency_sync();
    if (is_inactive(p)) return;
    constexpr int kRows = kThreads / kLanes;  // of the CTA, in a step
    const int head = blockIdx.x / num_m_blocks % static_cast<int>(p.heads);
    const Sequence s = sequence_of_rows(p, blockIdx.x / num_m_blocks / static_cast<int>(p.heads));
    const int first_row = blockIdx.x % num_m_blocks * kRows * kSteps + threadIdx.x / kLanes,
              col = threadIdx.x % kLanes * 8;

    uint4 out[kSteps] = {}, dout[kSteps] = {};
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
        const int row = first_row + i * kRows;
        if (row >= s.rows || col >= p.head_dim) continue;
        const auto load = [&](const RowsView& view) {
            const T* from = query_rows<const T>(view, s, head) + row * view.row_stride + col;
            return *reinterpret_cast<const uint4*>(from);
        };
        out[i] = load(p.out), dout[i] = load(p.dout);
    }
    zero_share(zeroed, zeroed_chunks);  // while the loads are in flight
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
        const uint32_t o[4] = {out[i].x, out[i].y, out[i].z, out[i].w},
                       d[4] = {dout[i].x, dout[i].y, dout[i].z, dout[i].w};
        float sum = 0;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const float2 a = unpack<T>(o[j]), b = unpack<T>(d[j]);
            sum += a.x * b.x + a.y * b.y;
        }
#pragma unroll
        for (int step = kLanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
        const int row = first_row + i * kRows;
        if (row >= s.rows || col != 0) continue;
        const auto* const dlse_data = static_cast<const float*>(p.dlse.data);
        const float dlse = dlse_data != nullptr ? dlse_data[stat_offset(p.dlse, s, head) + row] : 0.f;
        static_cast<float*>(p.delta.data)[stat_offset(p.delta, s, head) + row] = sum - dlse;
    }
}

template <typename T>
void launch_preprocess(const BwdArgs& p, void* zeroed, int64_t zeroed_bytes, cudaStream_t stream) {
    const int64_t heads = p.heads * (p.cu_seqlens_q == nullptr ? p.batch : 1),
                  chunks = zeroed_bytes / static_cast<int64_t>(sizeof(uint4));
    with_lanes_per_row(p.head_dim, [&](auto lanes) {
        // CTAs beyond the rows only zero chunks: there may be few rows and many keys.
        const int64_t num_m_blocks =
            std::max({ceil_div<int64_t>(rows_of_head(p), kThreads / lanes * kSteps),
                      ceil_div<int64_t>(chunks, heads * kThreads * kMaxZeroedChunks), int64_t{1}});
        launch(bwd_preprocess_kernel<T, lanes>, {grid_of(num_m_blocks * heads), kThreads}, stream, p,
               static_cast<int>(num_m_blocks), static_cast<uint4*>(zeroed), chunks);
    });
}

}  // namespace

void preprocess_bwd(const BwdArgs& args, void* zeroed, int64_t zeroed_bytes, cudaStream_t stream) {
    args.dtype == DataType::kFloat16 ? launch_preprocess<half_t>(args, zeroed, zeroed_bytes, stream)
                                     : launch_preprocess<bfloat16_t>(args, zeroed, zeroed_bytes, stream);
}

}  // namespace flash_dmattn::cuda
