// Errors of the CUDA runtime become exceptions; nothing here knows torch.
#pragma once

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#define FLASH_CUDA_CHECK(expression)                                                                          \
    do {                                                                                                      \
        const cudaError_t status_ = (expression);                                                             \
        if (status_ != cudaSuccess)                                                                           \
            throw std::runtime_error(std::string(#expression " failed: ") + cudaGetErrorString(status_));     \
    } while (0)
