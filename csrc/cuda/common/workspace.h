// The workspace of a call: memory that its kernels use and nothing else reads.
#pragma once

#include <cstdint>

namespace flash_dmattn::cuda {

// One buffer of the workspace.
struct WorkspaceBuffer {
    int64_t offset = 0;  // in bytes
    int64_t bytes = 0;

    // Null where the buffer is empty.
    template <typename X>
    X* in(void* workspace) const {
        return bytes == 0 ? nullptr : reinterpret_cast<X*>(static_cast<char*>(workspace) + offset);
    }
};

// A call has one workspace. Its buffers are adjacent, each aligned as PyTorch's allocator aligns the whole.
struct WorkspaceLayout {
    static constexpr int64_t kAlign = 256;
    int64_t workspace_bytes = 0;

    template <typename X>
    WorkspaceBuffer allocate(int64_t count) {
        const WorkspaceBuffer buffer{workspace_bytes, count * static_cast<int64_t>(sizeof(X))};
        workspace_bytes += (buffer.bytes + kAlign - 1) / kAlign * kAlign;
        return buffer;
    }
};

}  // namespace flash_dmattn::cuda
