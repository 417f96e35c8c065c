// The build, for flash_dmattn/info.py: from setup.py's definitions and the list of scripts/generate_kernels.py.
#pragma once

#include <pybind11/pybind11.h>

#ifdef FLASH_DMATTN_WITH_CUDA
#include <cuda_runtime_api.h>

#include "kernels.h"
#endif

namespace flash_dmattn {

#define FLASH_DMATTN_QUOTED_(text) #text
#define FLASH_DMATTN_QUOTED(text) FLASH_DMATTN_QUOTED_(text)

// Lists have the format of the environment variables that set them: "64,128", "fp16,bf16". Architectures have nvcc's
// names: "sm_80,sm_90a,compute_90". A build without CUDA kernels has the sentence why_no_cuda instead.
inline pybind11::dict build_info() {
    pybind11::dict info;
    info["torch"] = FLASH_DMATTN_TORCH_VERSION;
    info["cpu_capability"] = FLASH_DMATTN_QUOTED(CPU_CAPABILITY);
#ifdef FLASH_DMATTN_WITH_CUDA
    info["why_no_cuda"] = pybind11::none();
    info["cuda"] = std::to_string(CUDART_VERSION / 1000) + "." + std::to_string(CUDART_VERSION % 1000 / 10);
    info["cuda_architectures"] = FLASH_DMATTN_CUDA_ARCHITECTURES;
    info["head_dims"] = FLASH_DMATTN_HEAD_DIMS;
    info["dtypes"] = FLASH_DMATTN_DTYPES;
#else
    info["why_no_cuda"] = FLASH_DMATTN_WHY_NO_CUDA;
#endif
    return info;
}

#undef FLASH_DMATTN_QUOTED
#undef FLASH_DMATTN_QUOTED_

}  // namespace flash_dmattn
