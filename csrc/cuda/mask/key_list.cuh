// Key lists: the keys that rows of an m_block may see, and which rows see each of them.
#pragma once

#include "cuda/arch/cp_async.cuh"
#include "bits.cuh"
#include "intervals.cuh"

namespace flash_dmattn::cuda {

// Whether a list entry is a key of a sequence with `keys` keys: not padding, nor beyond the sequence.
__device__ __forceinline__ bool is_key(int entry, int keys) {
    return static_cast<unsigned>(entry) < static_cast<unsigned>(keys);
}

// Rows that see a key: [begin, end), and with bits only those whose bit is set.
struct VisibleRows {
    int begin;
    int end;  // at most the end of the list's m_block
    bool has_bits;
    int first_bit;  // row of bit 0
    uint4 bits;

    // Bit i % 32 of word i / 32: row first + i sees the key. With bits, `first` is the first row of the list's
    // m_block.
    __device__ __forceinline__ void of_tile(int first, uint32_t (&words)[4]) const {
        const uint32_t memory[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
        for (int w = 0; w < 4; ++w)
            words[w] = bits_between(begin - first, end - first, w) & (has_bits ? memory[w] : ~0u);
    }
    // Bit i: row first + i sees the key. `first` is a row of the list's m_block.
    __device__ __forceinline__ uint32_t from(int first) const {
        const uint32_t rows = bits_between(begin - first, end - first, 0);
        if (!has_bits) return rows;
        const int at = first - first_bit, word = at / 32;
        const uint32_t low = word == 0 ? bits.x : word == 1 ? bits.y : word == 2 ? bits.z : bits.w;
        const uint32_t high = word == 0 ? bits.y : word == 1 ? bits.z : word == 2 ? bits.w : 0;
        return rows & __funnelshift_r(low, high, at);
    }
};

// The key list of an m_block.
struct KeyList {
    static constexpr int kWords = KeyListsView::kRows / 32;
    static_assert(kWords == 4, "copied as 16 bytes");

    const int32_t* keys;     // [size]: positions in the sequence, -1 in the padding
    int size;                // a multiple of KeyListsView::kAlign
    int first_row, end_row;  // of the m_block, which may reach beyond the sequence
    const uint32_t* rows;    // [size, kWords]: row bits of the listed keys, or null
    const int32_t* start;    // intervals of the sequence's keys, or null
    const int32_t* end;
    int64_t col_stride;

    // The list for row `row` of query head `head`, an int or a QueryHead.
    template <typename Head>
    __device__ KeyList(const AttentionParams& p, const Sequence& s, const Head& head, int row) {
        const KeyListsView& lists = p.lists;
        const int64_t m_block = lists.num_m_blocks > 1 ? row / lists.m_block_rows : 0;
        const int64_t batch = shared_batch(lists, s);
        const int64_t list =
            (batch * lists.heads + shared_head(head, p.heads, lists.heads)) * lists.num_m_blocks + m_block;
        // Clamped, so that malformed lists of a caller cause no read beyond their memory.
        const int64_t first = min(max(lists.begins[list], int64_t{0}), lists.capacity);
        constexpr int kAlign = KeyListsView::kAlign;
        keys = lists.keys + first;
        size = static_cast<int>(max(min(lists.ends[list], lists.capacity) - first, int64_t{0})) / kAlign * kAlign;
        first_row = static_cast<int>(m_block * lists.m_block_rows);
        end_row = lists.num_m_blocks > 1 ? first_row + static_cast<int>(lists.m_block_rows) : s.rows;
        start = end = nullptr;
        rows = nullptr;
        col_stride = p.intervals.col_stride;
        if (p.intervals.start != nullptr) {
            const int64_t offset = interval_offset(p.intervals, s, head, p.heads);
            start = p.intervals.start + offset;
            end = p.intervals.end + offset;
        } else if (lists.rows != nullptr) {
            rows = lists.rows + first * kWords;
        }
    }

    // The n_blocks of kKeys keys for the rows before rows_end. A list that all rows share, which is sorted, is cut at their
    // causal end.
    template <int kKeys>
    __device__ int count_n_blocks(const AttentionParams& p, const Sequence& s, int rows_end) const {
        int num_n_blocks = ceil_div(size, kKeys);
        if (!p.is_causal || p.lists.num_m_blocks > 1 || start != nullptr) return num_n_blocks;
        const int causal_end = s.causal_end(rows_end - 1);
        if (causal_end >= s.keys) return num_n_blocks;
        int low = 0;
        while (low < num_n_blocks) {
            const int middle = (low + num_n_blocks) / 2;
            if (is_key(keys[middle * kKeys], causal_end)) {
                low = middle + 1;
            } else {
                num_n_blocks = middle;
            }
        }
        return num_n_blocks;
    }

    __device__ __forceinline__ int key(int at) const { return at < size ? keys[at] : -1; }
    // Fetches what says which rows see keys[at] == key: its interval, or its row bits.
    __device__ __forceinline__ uint4 fetch(int at, int key) const {
        if (start != nullptr)
            return {static_cast<uint32_t>(start[key * col_stride]), static_cast<uint32_t>(end[key * col_stride]), 0, 0};
        if (rows != nullptr) return *reinterpret_cast<const uint4*>(rows + static_cast<int64_t>(at) * kWords);
        return {};
    }

    // The same by cp.async to shared memory: keys[at] ..
    __device__ __forceinline__ void fetch_key(int& to, int at) const {
        if (at < size) {
            cp_async<4>(smem_address(&to), keys + at);
        } else {
            to = -1;
        }
    }

    // .. and its interval or row bits.
    __device__ __forceinline__ void fetch(uint4& to, int at, int key) const {
        const uint32_t address = smem_address(&to);
        if (start != nullptr) {
            cp_async<4>(address, start + key * col_stride);
            cp_async<4>(address + 4, end + key * col_stride);
        } else if (rows != nullptr) {
            cp_async<16>(address, rows + static_cast<int64_t>(at) * kWords);
        }
    }

    // What was fetched, together with causality and length.
    __device__ __forceinline__ VisibleRows visible_rows(const uint4& fetched, int key, const Sequence& s,
                                                        bool is_causal) const {
        VisibleRows visible_rows{is_causal ? s.causal_begin(key) : 0, min(s.rows, end_row), rows != nullptr, first_row,
                                 fetched};
        if (start != nullptr) {
            visible_rows.begin = max(visible_rows.begin, static_cast<int>(fetched.x));
            visible_rows.end = min(visible_rows.end, static_cast<int>(fetched.y));
        }
        return visible_rows;
    }
};

}  // namespace flash_dmattn::cuda
