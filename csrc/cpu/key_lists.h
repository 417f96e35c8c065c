// Builds the key lists of a mask, one for each batch element, head and m_block. See KeyListsView.
//
// params.mask or params.intervals is the mask; params.batch and params.heads are those of the mask. A mask that is
// broadcast over rows has one list for all rows, to which the kernels apply causality.
#pragma once

#include "params.h"

namespace flash_dmattn {

// lengths [lists]: the length of each list, rounded up to KeyListsView::kAlign.
void key_list_lengths_cpu(const AttentionParams& params, int64_t* lengths);

// Fills keys and, if not null, rows of KeyListsView by its begins and ends. A list that does not fit is truncated.
void key_list_fill_cpu(const AttentionParams& params, const int64_t* begins, const int64_t* ends, int32_t* keys,
                       uint32_t* rows);

}  // namespace flash_dmattn
