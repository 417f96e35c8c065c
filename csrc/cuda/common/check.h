// Errors of the CUDA runtime as exceptions, and the limit of a grid.
#pragma once

#include <cuda_runtime.h>

#include <climits>
#include <cstdint>
#include <stdexcept>
#include <string>

#define FLASH_CUDA_CHECK(expression) ::flash_dmattn::cuda::check(expression, #expression)

namespace flash_dmattn::cuda {

inline void check(cudaError_t status, const char* expression) {
    if (status == cudaSuccess) return;
    cudaGetLastError();  // clears it, so that no later launch reports it
    throw std::runtime_error(std::string(expression) + " failed: " + cudaGetErrorString(status));
}

// The grid of a launch. Throws std::runtime_error where it exceeds the limit.
inline unsigned grid_of(int64_t blocks) {
    if (blocks > INT_MAX)
        throw std::runtime_error("this call needs " + std::to_string(blocks) +
                                 " blocks of one kernel, a launch takes " + std::to_string(INT_MAX) +
                                 ": call with fewer sequences, rows or heads at a time");
    return static_cast<unsigned>(blocks);
}

}  // namespace flash_dmattn::cuda
