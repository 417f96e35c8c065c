// Sums of float32 numbers that do not depend on the order of the additions.
#pragma once

#include "cuda/arch/memory.cuh"

namespace flash_dmattn::cuda {

// A fixed-point number that holds every finite float32 exactly, in digits of 32 bits with 31 more for carries. Zeroed
// memory is 0. From Kulisch and Miranker, The Arithmetic of the Digital Computer, 1986.
struct ExactSum {
    static constexpr int kDigits = 9;
    static constexpr int kLowestExponent = -149;  // of the lowest digit's lowest bit

    unsigned long long digits[kDigits];  // two's complement
    float not_finite;                    // the sum of infinities and NaN

    __device__ __forceinline__ void add(float x) {
        const uint32_t bits = __float_as_uint(x), exponent = bits >> 23 & 0xff;
        if (exponent == 0xff) {
            reduce_add(&not_finite, x);
            return;
        }
        const uint32_t mantissa = (bits & 0x7fffff) | (exponent > 0 ? 0x800000 : 0);
        if (mantissa == 0) return;
        const uint32_t at = exponent > 0 ? exponent - 1 : 0;
        const uint64_t shifted = static_cast<uint64_t>(mantissa) << at % 32;
        const auto add_digit = [&](uint32_t i, uint64_t digit) {
            reduce_add(digits + i, bits >> 31 ? 0ull - digit : 0ull + digit);
        };
        add_digit(at / 32, shifted & 0xffffffff);
        if (shifted >> 32) add_digit(at / 32 + 1, shifted >> 32);
    }

    __device__ __forceinline__ float value() const {
        double sum = 0;
        // In a negative number the lower digits are positive and would cancel the highest.
        if (!sum_if_positive(1, sum)) {
            sum_if_positive(-1, sum);
            sum = -sum;
        }
        return static_cast<float>(sum) + not_finite;
    }

private:
    // Whether sign times the number is not negative; then `sum` is set to it.
    __device__ __forceinline__ bool sum_if_positive(int sign, double& sum) const {
        double unit = ldexp(1., kLowestExponent);
        int64_t carry = 0, digit = 0;
        sum = 0;
        for (int i = 0; i < kDigits; ++i, unit *= 4294967296.) {
            digit = sign * static_cast<int64_t>(digits[i]) + carry;
            carry = digit >> 32;
            sum += static_cast<double>(i + 1 < kDigits ? digit & 0xffffffff : digit) * unit;
        }
        return digit >= 0;
    }
};

}  // namespace flash_dmattn::cuda
