// The key bias of an n_block in shared memory: S = Q K^T is accumulated onto it, so that it costs the softmax nothing.
#pragma once

#include "cuda/arch/fragment.cuh"

namespace flash_dmattn::cuda::sm90 {

template <int kKeys>
class KeyBiasTile {
public:
    // Larger biases are added to the scaled scores instead: the tensor cores round S at every step, and bias / scale
    // may overflow.
    static constexpr float kMaxInitialBias = 1 << 14;

    // A tile is written in parts of 32 keys. With 64 keys the last two have none.
    static constexpr int kParts = 4;

    // Writes part `part`, the bias of one key a lane. inverse_scale: 0 where the scores are not accumulated onto the
    // bias. A warp calls.
    __device__ __forceinline__ void store(int part, int key, bool has_key, float bias, float inverse_scale) {
        const bool is_masked = bias == -kInfinity;
        const bool is_initial = inverse_scale > 0 && fabsf(bias) <= kMaxInitialBias;
        const bool is_added = has_key && !is_initial && !is_masked;
        if (has_key) {
            initial_[key] = is_initial ? bias * inverse_scale : 0;
            added_[key] = is_added ? bias : 0;
        }
        const bool part_adds = __any_sync(~0u, is_added);
        if (lane_id() == 0) part_adds_[part] = part_adds;
    }

    // Sets the accumulator of S to bias / scale.
    template <int kFragments>
    __device__ __forceinline__ void load(float (&scores)[1][kFragments][4]) const {
#pragma unroll
        for (int n = 0; n < kFragments; ++n) {
            const float2 bias = *reinterpret_cast<const float2*>(initial_ + n * 8 + fragment_col());
            scores[0][n][0] = scores[0][n][2] = bias.x;
            scores[0][n][1] = scores[0][n][3] = bias.y;
        }
    }
    // Whether added() holds a bias.
    __device__ __forceinline__ bool has_added() const { return *reinterpret_cast<const uint32_t*>(part_adds_) != 0; }
    __device__ __forceinline__ const float* added() const { return added_; }

private:
    alignas(8) float initial_[kKeys], added_[kKeys];
    alignas(4) bool part_adds_[kParts];
};

}  // namespace flash_dmattn::cuda::sm90
