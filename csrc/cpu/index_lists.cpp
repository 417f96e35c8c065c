#include "index_lists.h"

#include <algorithm>
#include <vector>

#include "tile.h"
#include "parallel.h"

namespace flash_dmattn {
namespace {

constexpr int64_t kWords = KeyListsView::kRows / 32;

// The first index of a row of indices.
const int32_t* indices_of(const IndexView& view, const Sequence& s, int64_t head, int64_t heads, int64_t row) {
    return view.data + (view.batches > 1 ? s.batch * view.batch_stride : 0) +
           head / (heads / view.heads) * view.head_stride + (view.packed ? s.first_row + row : row) * view.row_stride;
}

// Sets the bits [begin, end) of a key's row words.
void set_bits(uint32_t* words, int64_t begin, int64_t end) {
    for (int64_t bit = begin; bit < end; ++bit) words[bit / 32] |= uint32_t{1} << bit % 32;
}

// Builds lists one by one. Owns its scratch memory: one object per thread.
class IndexLists {
public:
    IndexLists(const IndexListsParams& params, const IndexListsPlan& plan)
        : p_(params), plan_(plan), visible_(ceil_div(p_.seqlen_k, 64)),
          rows_(plan.has_rows ? kWords * p_.seqlen_k : 0) {}

    void build(int64_t task, int32_t* keys, int64_t* begins, int64_t* ends, uint32_t* rows) {
        const int64_t group = task % plan_.num_groups, begin = task * plan_.stride;
        mark(Sequence(p_, task / plan_.num_groups / plan_.heads), task / plan_.num_groups % plan_.heads, group);
        const int64_t end = write(begin, keys, rows);
        const int64_t first_m_block = group * plan_.m_blocks_per_group;
        const int64_t end_m_block = std::min(first_m_block + plan_.m_blocks_per_group, plan_.num_m_blocks);
        for (int64_t m_block = first_m_block; m_block < end_m_block; ++m_block) {
            const int64_t list = task / plan_.num_groups * plan_.num_m_blocks + m_block;
            begins[list] = begin;
            ends[list] = end;
        }
    }

private:
    // Marks the keys that the rows of a group see, and which rows see each.
    void mark(const Sequence& s, int64_t head, int64_t group) {
        const int64_t first = group * plan_.rows_per_group(), end = std::min(first + plan_.rows_per_group(), s.rows);
        const int64_t shared = p_.indices.tile_rows;
        const IntervalView& intervals = p_.intervals;
        const int64_t at = intervals.present() ? offset_of(intervals, s, head, p_.heads) : 0;
        for (int64_t row = first; row < end;) {
            const int64_t tile = row / shared, tile_end = std::min((tile + 1) * shared, end);
            const int32_t* indices = indices_of(p_.indices, s, head, p_.heads, tile);
            for (int64_t i = 0; i < p_.indices.count; ++i) {
                const int64_t key = indices[i * p_.indices.col_stride];
                if (key < 0 || key >= s.keys) continue;
                int64_t seen_from = std::max(row, p_.is_causal ? s.causal_begin(key) : 0), seen_to = tile_end;
                if (intervals.present()) {
                    seen_from = std::max<int64_t>(seen_from, intervals.start[at + key * intervals.col_stride]);
                    seen_to = std::min<int64_t>(seen_to, intervals.end[at + key * intervals.col_stride]);
                }
                if (seen_from < seen_to) mark_key(key, seen_from - first, seen_to - first);
            }
            row = tile_end;
        }
    }

    void mark_key(int64_t key, int64_t begin, int64_t end) {
        const uint64_t bit = uint64_t{1} << key % 64;
        if (plan_.has_rows) {
            uint32_t* words = rows_.data() + key * kWords;
            if ((visible_[key / 64] & bit) == 0) std::fill_n(words, kWords, 0);
            set_bits(words, begin, end);
        }
        visible_[key / 64] |= bit;
    }

    // Writes the marked keys as a list from `at` on, clears the marks, and returns the list's end.
    int64_t write(int64_t at, int32_t* keys, uint32_t* rows) {
        for (size_t word = 0; word < visible_.size(); ++word) {
            for (uint64_t bits = visible_[word]; bits != 0; bits &= bits - 1) {
                const int64_t key = static_cast<int64_t>(word) * 64 + __builtin_ctzll(bits);
                if (plan_.has_rows) std::copy_n(rows_.data() + key * kWords, kWords, rows + at * kWords);
                keys[at++] = static_cast<int32_t>(key);
            }
            visible_[word] = 0;
        }
        for (; at % KeyListsView::kAlign != 0; ++at) {
            keys[at] = -1;
            if (plan_.has_rows) std::fill_n(rows + at * kWords, kWords, 0);
        }
        return at;
    }

    const IndexListsParams& p_;
    const IndexListsPlan& plan_;
    std::vector<uint64_t> visible_;  // one bit for each key
    std::vector<uint32_t> rows_;     // [Sk, kWords], valid for the visible keys
};

}  // namespace

std::optional<WrongIndex> find_wrong_index_cpu(const IndexListsParams& params) {
    const IndexView& view = params.indices;
    const int64_t batches = params.cu_seqlens_k != nullptr ? params.batch : view.batches;
    std::vector<std::optional<WrongIndex>> found(batches * view.heads);
    parallel_for_tasks(batches * view.heads, [&] {
        return [&](int64_t task) {
            const Sequence s(params, task / view.heads);
            const auto keys = static_cast<uint32_t>(s.keys);
            for (int64_t row = 0; row < ceil_div(s.rows, view.tile_rows) && !found[task]; ++row) {
                const int32_t* indices = indices_of(view, s, task % view.heads, view.heads, row);
                for (int64_t i = 0; i < view.count && !found[task]; ++i) {
                    const int32_t index = indices[i * view.col_stride];
                    if (static_cast<uint32_t>(index) >= keys && index != -1) found[task] = WrongIndex{index, s.keys};
                }
            }
        };
    });
    const auto first = std::find_if(found.begin(), found.end(), [](const auto& wrong) { return wrong.has_value(); });
    return first == found.end() ? std::nullopt : *first;
}

void index_lists_cpu(const IndexListsParams& params, const IndexListsPlan& plan, int32_t* keys, int64_t* begins,
                     int64_t* ends, uint32_t* rows) {
    parallel_for_tasks(plan.units(), [&] {
        return [=, lists = IndexLists(params, plan)](int64_t task) mutable {
            lists.build(task, keys, begins, ends, rows);
        };
    });
}

}  // namespace flash_dmattn
