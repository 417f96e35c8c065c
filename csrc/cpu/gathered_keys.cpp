#include "gathered_keys.h"

#include <algorithm>

#include "scores.h"

namespace flash_dmattn {

KeyList find_list(const AttentionParams& params, const Sequence& sequence, int64_t head, int64_t row, int64_t rows) {
    const KeyListsView& lists = params.lists;
    const int64_t list_head = head / (params.heads / lists.heads);
    const int64_t m_block = lists.num_m_blocks > 1 ? row / lists.m_block_rows : 0;
    const int64_t list = (lists.batch_of(sequence.batch) * lists.heads + list_head) * lists.num_m_blocks + m_block;
    const int64_t begin = lists.begins[list];
    const int32_t* keys = lists.keys + begin;
    int64_t size = lists.ends[list] - begin;
    while (size > 0 && keys[size - 1] < 0) --size;
    const int64_t end = params.is_causal ? sequence.causal_end(row + rows - 1) : sequence.keys;
    size = std::lower_bound(keys, keys + size, end) - keys;
    return KeyList{lists.keys, lists.rows, 0}.from(begin, size);
}

template <typename acc_t>
void GatheredKvBlocks<acc_t>::load(const Sequence& sequence, int64_t head, int64_t row, int64_t rows) {
    const KeyList list = find_list(p_, sequence, head, row, rows);
    const int64_t kv_head = head / (p_.heads / p_.kv_heads);
    const bool same_list = list.keys == list_.keys && list.size == list_.size;
    if (same_list && sequence.batch == batch_ && kv_head == kv_head_) return;
    list_ = list;
    batch_ = sequence.batch;
    kv_head_ = kv_head;

    const int64_t dim = p_.head_dim;
    if (static_cast<int64_t>(key_.size()) < list.size * dim) {
        for (auto* buffer : {&key_, &value_, &key_transposed_}) buffer->resize(list.size * dim);
        if (backward_) value_transposed_.resize(list.size * dim);
    }
    const auto gathered = [&](const RowsView& view, const KeyList& keys, acc_t* to) {
        const int64_t at =
            sequence.batch * view.batch_stride + sequence.first_key * view.row_stride + kv_head * view.head_stride;
        return gather<acc_t>(view.data, p_.dtype, at, view.row_stride, keys.keys, keys.size, dim, to);
    };
    tiles_.clear();
    for (int64_t j = 0; j < list.size; j += tile_keys_) {
        GatheredKvBlock<acc_t> tile;
        tile.list = list.from(j, std::min(tile_keys_, list.size - j));
        tile.key = gathered(p_.key, tile.list, key_.data() + j * dim);
        tile.value = gathered(p_.value, tile.list, value_.data() + j * dim);
        if (!has_few_rows(sequence)) tile.key_transposed = transpose(tile.key, key_transposed_.data() + j * dim);
        if (backward_) tile.value_transposed = transpose(tile.value, value_transposed_.data() + j * dim);
        tiles_.push_back(tile);
    }
}

template class GatheredKvBlocks<float>;
template class GatheredKvBlocks<double>;

}  // namespace flash_dmattn
