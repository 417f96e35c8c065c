// D_i = <do_i, o_i> - dlse_i.
#include "delta.h"

#include "cuda/arch/grid_dependency.cuh"
#include "cuda/common/basics.cuh"
#include "cuda/common/launch.h"
#include "cuda/common/sequence.cuh"
#include "cuda/mask/device_dispatch.cuh"

namespace flash_dmattn::cuda {
namespace {

constexpr int kThreads = 256;

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

// kLanes lanes, a power of 2, reduce a row of up to 8 * kLanes elements: 16 bytes a lane.
template <typename T, int kLanes>
__global__ void __launch_bounds__(kThreads) delta_kernel(const __grid_constant__ BwdArgs p) {
    grid_dependency_sync();
    if (is_inactive(p)) return;
    constexpr int kRows = kThreads / kLanes;
    const int num_m_blocks = ceil_div(static_cast<int>(rows_of_head(p)), kRows), heads = static_cast<int>(p.heads);
    const int head = blockIdx.x / num_m_blocks % heads;
    const Sequence s = sequence_of_rows(p, blockIdx.x / num_m_blocks / heads);
    const int row = blockIdx.x % num_m_blocks * kRows + threadIdx.x / kLanes, col = threadIdx.x % kLanes * 8;
    const bool in_sequence = row < s.rows;

    float sum = 0;
    if (in_sequence && col < p.head_dim) {
        const auto load = [&](const RowsView& view) {
            const T* from = query_rows<const T>(view, s, head) + row * view.row_stride + col;
            return *reinterpret_cast<const uint4*>(from);
        };
        const uint4 out = load(p.out), dout = load(p.dout);
        const uint32_t o[4] = {out.x, out.y, out.z, out.w}, d[4] = {dout.x, dout.y, dout.z, dout.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 a = unpack<T>(o[i]), b = unpack<T>(d[i]);
            sum += a.x * b.x + a.y * b.y;
        }
    }
#pragma unroll
    for (int step = kLanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    if (!in_sequence || col != 0) return;
    const auto* const dlse_data = static_cast<const float*>(p.dlse.data);
    const float dlse = dlse_data != nullptr ? dlse_data[stat_offset(p.dlse, s, head) + row] : 0.f;
    static_cast<float*>(p.delta.data)[stat_offset(p.delta, s, head) + row] = sum - dlse;
}

template <typename T, int kLanes>
void launch_delta(const BwdArgs& p, cudaStream_t stream) {
    const int64_t batch = p.cu_seqlens_q == nullptr ? p.batch : 1;
    const int64_t blocks = ceil_div<int64_t>(rows_of_head(p), kThreads / kLanes) * p.heads * batch;
    if (blocks == 0) return;
    launch(delta_kernel<T, kLanes>, {grid_of(blocks), kThreads}, stream, p);
}

template <typename T>
void launch_delta(const BwdArgs& p, cudaStream_t stream) {
    if (p.head_dim <= 32) return launch_delta<T, 4>(p, stream);
    if (p.head_dim <= 64) return launch_delta<T, 8>(p, stream);
    if (p.head_dim <= 128) return launch_delta<T, 16>(p, stream);
    launch_delta<T, 32>(p, stream);
}

}  // namespace

void compute_delta(const BwdArgs& args, cudaStream_t stream) {
    args.dtype == DataType::kFloat16 ? launch_delta<half_t>(args, stream) : launch_delta<bfloat16_t>(args, stream);
}

}  // namespace flash_dmattn::cuda
