// Builds the key lists of KeyListsView (params.h) from params.mask or params.intervals in two steps: offsets of the
// lists, then their keys. Lists a key if the mask, the sequence length and, if params.is_causal, causality let a row of
// the m_block see it; if one list serves all rows, the attention kernels apply causality. Reads the mask, batch,
// lengths and cu_seqlens of params.
#pragma once

#include <cuda_runtime.h>

#include <optional>

#include "cuda/common/workspace.h"
#include "params.h"

namespace flash_dmattn {

struct KeyListsPlan : cuda::WorkspaceLayout {
    int64_t batches = 1;  // as in KeyListsView
    int64_t heads = 1;
    int64_t num_m_blocks = 1;
    bool row_broadcast = false;
    bool has_rows = false;  // the second step writes `rows`
    int64_t chunks = 0;     // of chunk_keys keys each
    int64_t chunk_keys = 0;
    cuda::WorkspaceBuffer visited_keys, counts;  // CountedLists

    int64_t lists() const { return batches * heads * num_m_blocks; }
};

KeyListsPlan plan_key_lists(const AttentionParams& params);

// Capacity where lists are built only if they are short: half of the causal keys, to bound the memory of lists that are
// not built.
int64_t room_for_short_lists(const AttentionParams& params, const KeyListsPlan& plan);

// params.packed_mask of a bool mask has been filled.
//   begins, ends [lists]   offsets, rounded up to KeyListsView::kAlign and clamped to `capacity`
//   total                  required capacity, or null
//   percent                bool mask: build lists only if they fit and hold at most this percentage of the keys in
//                          non-empty blocks (PackedMask); otherwise all begins and ends are -1
//   workspace              of the plan; the second step reads it
void key_list_offsets_cuda(const AttentionParams& params, const KeyListsPlan& plan, std::optional<int64_t> percent,
                           void* workspace, int64_t* begins, int64_t* ends, int64_t capacity, int64_t* total,
                           cudaStream_t stream);

// Writes keys [capacity] and rows [capacity, KeyListsView::kRows / 32]; the row bits of padding are 0. Writes nothing
// beyond `capacity`.
void key_list_fill_cuda(const AttentionParams& params, const KeyListsPlan& plan, void* workspace, const int64_t* begins,
                        int64_t capacity, int32_t* keys, uint32_t* rows, cudaStream_t stream);

}  // namespace flash_dmattn
