// The synchronization patterns of csrc/cuda/sm90, each alone in a minimal kernel, for test_racecheck.py.
//
// Each kernel is right by construction: every write to shared memory is ordered before and after every read of it, as
// its comment says, or stores the value that the memory holds already. `main` runs the pattern of its argument many
// times and compares the results with those of the host. The patterns use the library's own barriers.
#include <cstdio>
#include <cstring>

#include "cuda/arch/named_barrier.cuh"
#include "cuda/arch/pipeline.cuh"

using namespace flash_dmattn::cuda;

namespace {

constexpr int kStages = 2, kRounds = 64, kFloats = 128;

struct Storage {
    alignas(128) float data[kStages][kFloats];
    alignas(16) float metadata[kStages][32];
    PipelineBarriers<kStages> pipeline;
    alignas(8) uint64_t zeroed[kStages];
};

// Copies kFloats numbers by TMA.
__device__ void bulk_copy(float* to, const float* from, uint32_t barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     smem_address(to)),
                 "l"(from), "n"(sizeof(float) * kFloats), "r"(barrier)
                 : "memory");
}

// bulk_copies, zeroed_rows: a producer's bulk copies fill a stage and complete its full barrier; consumers read it and
// arrive at its empty barrier, on which the producer waits before it fills the stage again. With zeroed_rows another
// warp zeros some of the elements between: it waits for the full barrier and arrives at a barrier on which the
// consumers wait, too. So it has finished before any consumer releases the stage.
//
// same_zeros: no other warp, but each of two consumer warps writes these zeros before it reads, as zero_empty_rows of
// the sparse backward. A warp reads zeros whether the other has written them again or not, and the stage is not filled
// before both have released it.
__device__ void fill(Storage& smem, const float* from) {
    Pipeline<kStages> pipeline(smem.pipeline);
    for (int round = 0; round < kRounds; ++round, pipeline.advance()) {
        pipeline.producer_acquire();
        mbarrier_arrive_and_expect_tx(pipeline.full(), sizeof(smem.data[0]));
        bulk_copy(smem.data[pipeline.stage()], from + round * kFloats, pipeline.full());
    }
}
// Zeros every fourth element.
__device__ void zero(Storage& smem, int stage) {
    smem.data[stage][lane_id() * 4] = 0;
    fence_proxy_async();
    __syncwarp();
}

enum class Zeros { kNone, kOtherWarp, kEveryConsumer };

template <Zeros kZeros>
__global__ void pipeline_kernel(const float* from, float* sums) {
    __shared__ Storage smem;
    if (threadIdx.x == 0) {
        smem.pipeline.init(1, 2);
        for (auto& barrier : smem.zeroed) mbarrier_init(smem_address(&barrier), 1);
    }
    __syncthreads();
    const int warp = threadIdx.x / 32;
    if (warp == 0) {
        if (lane_id() == 0) fill(smem, from);
        return;
    }
    Pipeline<kStages> pipeline(smem.pipeline);
    if (warp == 1) {
        for (int round = 0; kZeros == Zeros::kOtherWarp && round < kRounds; ++round, pipeline.advance()) {
            pipeline.consumer_wait();
            zero(smem, pipeline.stage());
            if (lane_id() == 0) mbarrier_arrive(smem_address(&smem.zeroed[pipeline.stage()]));
        }
        return;
    }
    float sum = 0;
    for (int round = 0; round < kRounds; ++round, pipeline.advance()) {
        pipeline.consumer_wait();
        if (kZeros == Zeros::kOtherWarp) mbarrier_wait(smem_address(&smem.zeroed[pipeline.stage()]), pipeline.phase());
        if (kZeros == Zeros::kEveryConsumer) zero(smem, pipeline.stage());
        for (int i = 0; i < 4; ++i) sum += smem.data[pipeline.stage()][lane_id() * 4 + i];
        pipeline.consumer_release();
    }
    sums[threadIdx.x - 64] = sum;
}

// stored_rows: as bulk_copies, but the lanes of the producer warp store the data themselves, and each arrives at the
// full barrier: the row data of the backward.
__global__ void stored_rows_kernel(const float* from, float* sums) {
    __shared__ Storage smem;
    if (threadIdx.x == 0) smem.pipeline.init(32, 2);
    __syncthreads();
    Pipeline<kStages> pipeline(smem.pipeline);
    float sum = 0;
    for (int round = 0; round < kRounds; ++round, pipeline.advance()) {
        if (threadIdx.x < 32) {
            pipeline.producer_acquire();
            for (int i = 0; i < 4; ++i)
                smem.data[pipeline.stage()][lane_id() * 4 + i] = from[round * kFloats + lane_id() * 4 + i];
            mbarrier_arrive(pipeline.full());
        } else if (threadIdx.x >= 64) {
            pipeline.consumer_wait();
            for (int i = 0; i < 4; ++i) sum += smem.data[pipeline.stage()][lane_id() * 4 + i];
            pipeline.consumer_release();
        }
    }
    if (threadIdx.x >= 64) sums[threadIdx.x - 64] = sum;
}

// stored_metadata: as bulk_copies, but each lane of the producer warp also stores a number, and arrives at the full
// barrier, which counts the bytes of the bulk copy, too: the header of an m_block in the backward, the visible keys of a
// K stage in the forward.
__global__ void stored_metadata_kernel(const float* from, float* sums) {
    __shared__ Storage smem;
    if (threadIdx.x == 0) smem.pipeline.init(32, 2);
    __syncthreads();
    Pipeline<kStages> pipeline(smem.pipeline);
    float sum = 0;
    for (int round = 0; round < kRounds; ++round, pipeline.advance()) {
        const int stage = pipeline.stage();
        if (threadIdx.x < 32) {
            pipeline.producer_acquire();
            smem.metadata[stage][lane_id()] = from[round * kFloats + lane_id()];
            if (lane_id() == 0) {
                mbarrier_expect_tx(pipeline.full(), sizeof(smem.data[0]));
                bulk_copy(smem.data[stage], from + round * kFloats, pipeline.full());
            }
            mbarrier_arrive(pipeline.full());
        } else if (threadIdx.x >= 64) {
            pipeline.consumer_wait();
            const float4 metadata = reinterpret_cast<const float4*>(smem.metadata[stage])[lane_id() % 8];
            sum += metadata.x + metadata.y + metadata.z + metadata.w;
            for (int i = 0; i < 4; ++i) sum += smem.data[stage][lane_id() * 4 + i];
            pipeline.consumer_release();
        }
    }
    if (threadIdx.x >= 64) sums[threadIdx.x - 64] = sum;
}

// partial_sums: two warps alternate in adding up both partial results of a round, one round later, as the warpgroups of
// the pair bias backward do with dQ. A warp writes its part for the other one and arrives at the other's named barrier;
// the other waits there before it reads. The writer overwrites its part two rounds later, after it has waited for the
// other's arrival of the round between, which follows the read.
__global__ void partial_sums_kernel(const float* from, float* sums) {
    __shared__ float parts[2][2][32];  // [owner][warp][lane]
    const int warp = threadIdx.x / 32;
    const auto add = [&](int round) {
        const int owner = round % 2;
        if (warp != owner) return;
        named_barrier_sync(1 + owner, 64);
        atomicAdd(sums + lane_id(), parts[owner][0][lane_id()] + parts[owner][1][lane_id()]);
    };
    for (int round = 0; round < kRounds; ++round) {
        if (round > 0) add(round - 1);
        const int owner = round % 2, lane = (lane_id() + owner) % 32;
        parts[owner][warp][lane] = from[round * kFloats + warp * 32 + lane];
        __syncwarp();
        if (warp != owner) named_barrier_arrive(1 + owner, 64);
    }
    add(kRounds - 1);
}

// What the patterns sum.
bool is_right(const char* pattern, const float* from, const float* sums) {
    const bool has_zeros = std::strcmp(pattern, "zeroed_rows") == 0 || std::strcmp(pattern, "same_zeros") == 0;
    const bool has_metadata = std::strcmp(pattern, "stored_metadata") == 0;
    const bool is_partial = std::strcmp(pattern, "partial_sums") == 0;
    for (int lane = 0; lane < 32; ++lane) {
        float wanted = 0;
        for (int round = 0; round < kRounds; ++round) {
            const float* row = from + round * kFloats;
            if (is_partial) wanted += row[lane] + row[32 + lane];
            for (int i = has_zeros; i < 4 && !is_partial; ++i) wanted += row[lane * 4 + i];
            for (int i = 0; i < 4 && has_metadata; ++i) wanted += row[lane % 8 * 4 + i];
        }
        if (sums[lane] != wanted || (!is_partial && sums[32 + lane] != wanted)) return false;
    }
    return true;
}

}  // namespace

int main(int argc, char** argv) {
    const char* pattern = argc > 1 ? argv[1] : "";
    float *from, *sums;
    cudaMallocManaged(&from, kRounds * kFloats * sizeof(float));
    cudaMallocManaged(&sums, 64 * sizeof(float));
    for (int i = 0; i < kRounds * kFloats; ++i) from[i] = static_cast<float>(i * 7 % 13);  // sums are exact
    for (int run = 0; run < 20; ++run) {
        for (int i = 0; i < 64; ++i) sums[i] = 0;
        if (std::strcmp(pattern, "bulk_copies") == 0) {
            pipeline_kernel<Zeros::kNone><<<1, 128>>>(from, sums);
        } else if (std::strcmp(pattern, "zeroed_rows") == 0) {
            pipeline_kernel<Zeros::kOtherWarp><<<1, 128>>>(from, sums);
        } else if (std::strcmp(pattern, "same_zeros") == 0) {
            pipeline_kernel<Zeros::kEveryConsumer><<<1, 128>>>(from, sums);
        } else if (std::strcmp(pattern, "stored_rows") == 0) {
            stored_rows_kernel<<<1, 128>>>(from, sums);
        } else if (std::strcmp(pattern, "stored_metadata") == 0) {
            stored_metadata_kernel<<<1, 128>>>(from, sums);
        } else if (std::strcmp(pattern, "partial_sums") == 0) {
            partial_sums_kernel<<<1, 64>>>(from, sums);
        } else {
            std::printf("no pattern %s\n", pattern);
            return 2;
        }
        const cudaError_t error = cudaDeviceSynchronize();
        if (error != cudaSuccess || !is_right(pattern, from, sums)) {
            std::printf("%s: %s\n", pattern, error == cudaSuccess ? "wrong sums" : cudaGetErrorString(error));
            return 1;
        }
    }
    std::printf("%s: right\n", pattern);
    return 0;
}
