// Order-preserving unsigned integers of biases.
#pragma once

// The check for NaN stays in every build.
#undef NDEBUG
#include <cassert>

#include "params.h"
#include "cuda/common/basics.cuh"

namespace flash_dmattn::cuda {

// Bit patterns of -0, infinity and finfo.min of a dtype.
template <DataType kType>
struct FloatBits;
template <>
struct FloatBits<DataType::kFloat16> {
    using Bits = uint16_t;
    static constexpr Bits kMinusZero = 0x8000, kInfinity = 0x7c00, kLowest = 0xfbff;
};
template <>
struct FloatBits<DataType::kBFloat16> {
    using Bits = uint16_t;
    static constexpr Bits kMinusZero = 0x8000, kInfinity = 0x7f80, kLowest = 0xff7f;
};
template <>
struct FloatBits<DataType::kFloat32> {
    using Bits = uint32_t;
    static constexpr Bits kMinusZero = 0x80000000, kInfinity = 0x7f800000, kLowest = 0xff7fffff;
};
template <>
struct FloatBits<DataType::kFloat64> {
    using Bits = uint64_t;
    static constexpr Bits kMinusZero = 1ull << 63, kInfinity = 0x7ffull << 52, kLowest = ~(1ull << 52);
};

// Monotonic in the bias, equal for both zeros.
template <DataType kType>
constexpr __host__ __device__ auto order_of(typename FloatBits<kType>::Bits bits) {
    using F = FloatBits<kType>;
    using Bits = typename F::Bits;
    return static_cast<Bits>(bits > F::kMinusZero ? ~bits : bits | F::kMinusZero);
}

// The bias of an order; 0 for both zeros.
template <DataType kType>
constexpr __host__ __device__ auto bias_of_order(uint32_t order) {
    using F = FloatBits<kType>;
    using Bits = typename F::Bits;
    return static_cast<Bits>(order & F::kMinusZero ? order & ~uint32_t{F::kMinusZero} : ~order);
}

// A key is masked if its order is at most this.
template <DataType kType>
constexpr auto kMaskedOrder = order_of<kType>(FloatBits<kType>::kLowest);

// The order, or 0 for a bias that masks its key: -inf and finfo.min.
template <DataType kType>
__device__ __forceinline__ auto rank_of_bias(typename FloatBits<kType>::Bits bits) {
    const auto order = order_of<kType>(bits);
    return order > kMaskedOrder<kType> ? order : typename FloatBits<kType>::Bits{0};
}

template <DataType kType>
__device__ __forceinline__ bool is_nan(typename FloatBits<kType>::Bits bits) {
    using F = FloatBits<kType>;
    return static_cast<typename F::Bits>(bits & static_cast<typename F::Bits>(~F::kMinusZero)) > F::kInfinity;
}

// The rank of a 32-bit (float32) or 16-bit bias.
template <typename Bits>
__device__ __forceinline__ uint32_t rank_of(Bits bits, bool is_bfloat16, bool& found_nan) {
    if constexpr (sizeof(Bits) == 4) {
        found_nan |= is_nan<DataType::kFloat32>(bits);
        return rank_of_bias<DataType::kFloat32>(bits);
    } else if (is_bfloat16) {
        found_nan |= is_nan<DataType::kBFloat16>(bits);
        return rank_of_bias<DataType::kBFloat16>(bits);
    } else {
        found_nan |= is_nan<DataType::kFloat16>(bits);
        return rank_of_bias<DataType::kFloat16>(bits);
    }
}

__device__ __forceinline__ void refuse_nan(bool found) { assert(!found && "the bias to select by must not be NaN"); }

}  // namespace flash_dmattn::cuda
