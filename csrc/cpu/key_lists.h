// The lists of a mask's keys, one for each batch element, head and tile of query rows; see KeyListsView.
//
// The batch elements and heads of the params are those of the mask, which is params.mask or params.intervals. Where
// every row of the mask is alike there is one list for all rows, and causality is left to the kernels.
#pragma once

#include "params.h"

namespace flash_dmattn {

// The length of every list, rounded up to KeyListsView::kAlign.
void key_list_lengths_cpu(const AttentionParams& params, int64_t* lengths);

// keys and, where it is not null, rows of KeyListsView, whose begins and ends are given; a list that would not fit is cut.
void key_list_fill_cpu(const AttentionParams& params, const int64_t* begins, const int64_t* ends, int32_t* keys,
                       uint32_t* rows);

}  // namespace flash_dmattn
