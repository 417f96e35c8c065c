#include "key_lists.h"

#include <algorithm>
#include <vector>

#include "tile.h"
#include "parallel.h"

namespace flash_dmattn {
namespace {

constexpr int64_t kRows = KeyListsView::kRows;
constexpr int64_t kWords = kRows / 32;

// The lists of one batch element and head.
struct HeadLists {
    Sequence sequence;
    int64_t head;
    int64_t first;  // list of the first m_block

    HeadLists(const AttentionParams& p, int64_t index, int64_t num_m_blocks)
        : sequence(p, index / p.heads), head(index % p.heads), first(index * num_m_blocks) {}
};

// Writes one list, key by key, and pads it.
class ListWriter {
public:
    ListWriter(int64_t begin, int64_t end, int32_t* keys, uint32_t* rows)
        : at_(begin), end_(end), keys_(keys), rows_(rows) {}

    void push(int64_t key, const uint32_t* rows = nullptr) {
        if (at_ >= end_) return;
        keys_[at_] = static_cast<int32_t>(key);
        if (rows_ != nullptr) std::copy_n(rows, kWords, rows_ + at_ * kWords);
        ++at_;
    }

    void pad() {
        constexpr uint32_t no_rows[kWords] = {};
        while (at_ < end_) push(-1, no_rows);
    }

private:
    int64_t at_, end_;
    int32_t* keys_;
    uint32_t* rows_;
};

// The lists of an interval mask. Consecutive rows see a key, so consecutive m_blocks list it.
class IntervalLists {
public:
    explicit IntervalLists(const AttentionParams& params) : p_(params), num_m_blocks_(ceil_div(p_.seqlen_q, kRows)) {}

    void lengths(int64_t index, int64_t* lengths) const {
        const HeadLists lists(p_, index, num_m_blocks_);
        std::vector<int64_t> change(num_m_blocks_ + 1);
        for_each_key(lists, [&](int64_t, int64_t m_block, int64_t end_m_block) {
            ++change[m_block];
            --change[end_m_block];
        });
        int64_t length = 0;
        for (int64_t m_block = 0; m_block < num_m_blocks_; ++m_block) {
            length += change[m_block];
            lengths[lists.first + m_block] = KeyListsView::padded(length);
        }
    }

    void fill(int64_t index, const int64_t* begins, const int64_t* ends, int32_t* keys) const {
        const HeadLists lists(p_, index, num_m_blocks_);
        std::vector<ListWriter> writers;
        for (int64_t t = lists.first; t < lists.first + num_m_blocks_; ++t) {
            writers.emplace_back(begins[t], ends[t], keys, nullptr);
        }
        for_each_key(lists, [&](int64_t key, int64_t m_block, int64_t end_m_block) {
            for (; m_block < end_m_block; ++m_block) writers[m_block].push(key);
        });
        for (auto& writer : writers) writer.pad();
    }

private:
    // Calls f(key, m_block, end) for each visible key, with the m_blocks [m_block, end) that see it.
    template <typename F>
    void for_each_key(const HeadLists& lists, F&& f) const {
        const Sequence& s = lists.sequence;
        const IntervalView& view = p_.intervals;
        const int64_t at = offset_of(view, s, lists.head, p_.heads);
        for (int64_t key = 0; key < s.keys; ++key) {
            const int64_t j = at + key * view.col_stride;
            const int64_t begin = std::max<int64_t>(view.start[j], p_.is_causal ? s.causal_begin(key) : 0);
            const int64_t end = std::min<int64_t>(view.end[j], s.rows);
            if (begin < end) f(key, begin / kRows, ceil_div(end, kRows));
        }
    }

    const AttentionParams& p_;
    int64_t num_m_blocks_;
};

// The lists of a bool mask, one m_block at a time. Owns its scratch memory: one object per thread.
class MaskLists {
public:
    explicit MaskLists(const AttentionParams& params)
        : p_(params), num_m_blocks_(p_.mask.per_key ? 1 : ceil_div(p_.seqlen_q, kRows)), rows_(kWords * p_.seqlen_k) {}

    void length(int64_t list, int64_t* lengths) {
        const int64_t keys = read(list);
        int64_t length = 0;
        for (int64_t key = 0; key < keys; ++key) length += is_visible(key);
        lengths[list] = KeyListsView::padded(length);
    }

    void fill(int64_t list, const int64_t* begins, const int64_t* ends, int32_t* keys, uint32_t* rows) {
        ListWriter writer(begins[list], ends[list], keys, rows);
        const int64_t end = read(list);
        for (int64_t key = 0; key < end; ++key) {
            if (!is_visible(key)) continue;
            uint32_t words[kWords];
            for (int64_t w = 0; w < kWords; ++w) words[w] = rows_[w * p_.seqlen_k + key];
            writer.push(key, words);
        }
        writer.pad();
    }

    int64_t num_m_blocks() const { return num_m_blocks_; }

private:
    bool is_visible(int64_t key) const {
        uint32_t any = 0;
        for (int64_t w = 0; w < kWords; ++w) any |= rows_[w * p_.seqlen_k + key];
        return any != 0;
    }

    // Reads which rows of the list's m_block see each key. Returns the number of keys.
    int64_t read(int64_t list) {
        const MaskView& mask = p_.mask;
        const HeadLists lists(p_, list / num_m_blocks_, num_m_blocks_);
        const Sequence& s = lists.sequence;
        const int64_t row = list % num_m_blocks_ * kRows;
        const int64_t rows = mask.per_key ? 1 : std::min(kRows, s.rows - row);
        const Tile tile{s, lists.head, row, rows, 0, s.keys};
        const uint8_t* visible = static_cast<const uint8_t*>(mask.data) + offset_of(mask, tile, p_.heads);
        std::fill(rows_.begin(), rows_.end(), 0);
        for (int64_t i = 0; i < rows; ++i) {
            const int64_t end = p_.is_causal && !mask.per_key ? s.causal_end(row + i) : s.keys;
            add_row(visible + i * mask.row_stride, mask.col_stride, i % 32, rows_.data() + i / 32 * p_.seqlen_k, end);
        }
        return s.keys;
    }

    static void add_row(const uint8_t* __restrict visible, int64_t stride, int64_t bit, uint32_t* __restrict word,
                        int64_t n) {
        if (stride == 1) {
            for (int64_t j = 0; j < n; ++j) word[j] |= uint32_t(visible[j] != 0) << bit;
        } else {
            for (int64_t j = 0; j < n; ++j) word[j] |= uint32_t(visible[j * stride] != 0) << bit;
        }
    }

    const AttentionParams& p_;
    int64_t num_m_blocks_;
    std::vector<uint32_t> rows_;  // [kWords, Sk]
};

}  // namespace

void key_list_lengths_cpu(const AttentionParams& params, int64_t* lengths) {
    if (params.intervals.present()) {
        const IntervalLists lists(params);
        return parallel_for_tasks(params.batch * params.heads,
                                  [&] { return [&](int64_t i) { lists.lengths(i, lengths); }; });
    }
    const int64_t num_m_blocks = MaskLists(params).num_m_blocks();
    parallel_for_tasks(params.batch * params.heads * num_m_blocks, [&] {
        return [lengths, lists = MaskLists(params)](int64_t i) mutable { lists.length(i, lengths); };
    });
}

void key_list_fill_cpu(const AttentionParams& params, const int64_t* begins, const int64_t* ends, int32_t* keys,
                       uint32_t* rows) {
    if (params.intervals.present()) {
        const IntervalLists lists(params);
        return parallel_for_tasks(params.batch * params.heads,
                                  [&] { return [&](int64_t i) { lists.fill(i, begins, ends, keys); }; });
    }
    const int64_t num_m_blocks = MaskLists(params).num_m_blocks();
    parallel_for_tasks(params.batch * params.heads * num_m_blocks, [&] {
        return [=, lists = MaskLists(params)](int64_t i) mutable { lists.fill(i, begins, ends, keys, rows); };
    });
}

}  // namespace flash_dmattn
