// Pipelines: stages of shared memory with a full and an empty mbarrier each.
#pragma once

#include "mbarrier.cuh"

namespace flash_dmattn::cuda {

// A thread's position in a pipeline: the stage, and the parity of its barrier phase.
template <int kStages>
class PipelineState {
public:
    __device__ __forceinline__ int stage() const { return stage_; }
    __device__ __forceinline__ int phase() const { return phase_; }
    __device__ __forceinline__ void advance() {
        if (++stage_ == kStages) {
            stage_ = 0;
            phase_ ^= 1;
        }
    }
    __device__ __forceinline__ int previous_stage() const { return stage_ == 0 ? kStages - 1 : stage_ - 1; }

private:
    int stage_ = 0, phase_ = 0;
};

// The mbarriers of a pipeline, in shared memory.
template <int kStages>
struct PipelineBarriers {
    alignas(8) uint64_t full[kStages];   // completes when the producers have filled the stage
    alignas(8) uint64_t empty[kStages];  // completes when the consumers have released it

    // One thread calls, before a barrier of the CTA. The counts are arrivals.
    __device__ void init(int producers, int consumers) {
        for (int stage = 0; stage < kStages; ++stage) {
            mbarrier_init(smem_address(&full[stage]), producers);
            mbarrier_init(smem_address(&empty[stage]), consumers);
        }
    }
    __device__ __forceinline__ void consumer_wait(const PipelineState<kStages>& state) const {
        mbarrier_wait(smem_address(&full[state.stage()]), state.phase());
    }
    // Returns at once for the first round: all stages start empty.
    __device__ __forceinline__ void producer_acquire(const PipelineState<kStages>& state) const {
        mbarrier_wait(smem_address(&empty[state.stage()]), state.phase() ^ 1);
    }
    // One arrival per warp; all its lanes call.
    __device__ __forceinline__ void consumer_release(int stage) const {
        __syncwarp();
        if (lane_id() == 0) mbarrier_arrive(smem_address(&empty[stage]));
    }
};

// A thread's state together with the barriers' address.
template <int kStages>
class Pipeline : public PipelineState<kStages> {
public:
    __device__ __forceinline__ explicit Pipeline(PipelineBarriers<kStages>& barriers)
        : barriers_(smem_address(&barriers)) {}

    __device__ __forceinline__ uint32_t full() const { return barriers_ + this->stage() * 8; }
    __device__ __forceinline__ uint32_t empty() const { return barriers_ + (kStages + this->stage()) * 8; }
    __device__ __forceinline__ void consumer_wait() const { mbarrier_wait(full(), this->phase()); }
    // Returns at once for the first round: all stages start empty.
    __device__ __forceinline__ void producer_acquire() const { mbarrier_wait(empty(), this->phase() ^ 1); }
    // Release the current or the previous stage: one arrival per warp; all its lanes call.
    __device__ __forceinline__ void consumer_release() const { consumer_release(this->stage()); }
    __device__ __forceinline__ void consumer_release_previous() const { consumer_release(this->previous_stage()); }

private:
    __device__ __forceinline__ void consumer_release(int stage) const {
        __syncwarp();
        if (lane_id() == 0) mbarrier_arrive(barriers_ + (kStages + stage) * 8);
    }

    uint32_t barriers_;
};

}  // namespace flash_dmattn::cuda
