// Programmatic dependent launch, the device side of common/launch.h.
#pragma once

namespace flash_dmattn::cuda {

// The first statement of a kernel that launch() launches, since its CTAs may start while the previous kernel of the
// stream runs: waits until that has finished and its writes are visible. The next kernel may start its CTAs as soon as
// all CTAs of this one have called.
__device__ __forceinline__ void grid_dependency_sync() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace flash_dmattn::cuda
