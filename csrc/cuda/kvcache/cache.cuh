// The cache of one sequence and KV head: where a key's row is, in a page, in a contiguous cache, or among the new keys.
//
// Reads take new keys from the caller's tensors, so that nothing waits until they are written into the cache. Lengths,
// pages and batch elements are clamped: whatever their values, no access is outside the tensors.
#pragma once

#include "args.h"
#include "cuda/softmax/scores.cuh"

namespace flash_dmattn::cuda {

class KvCache {
public:
    int batch, kv_head;
    int first_row;  // in the concatenated rows; 0 with fixed length
    int rows;       // new rows
    int keys;       // with the new ones

    __device__ KvCache(const KvCacheArgs& p, int batch, int kv_head) : batch(batch), kv_head(kv_head), p_(p) {
        first_row = 0, rows = static_cast<int>(p.seqlen_q);
        if (p.cu_seqlens_q != nullptr) {
            const int total = static_cast<int>(p.total_q);
            first_row = min(max(p.cu_seqlens_q[batch], 0), total);
            rows = min(max(min(p.cu_seqlens_q[batch + 1], total) - first_row, 0), static_cast<int>(p.seqlen_q));
        }
        const int room = static_cast<int>(p.seqlen_k);
        cached_ = p.cache_seqlens == nullptr ? room : min(max(p.cache_seqlens[batch], 0), room);
        keys = p.key.data == nullptr ? cached_ : static_cast<int>(min(int64_t{cached_} + rows, int64_t{room}));
        element_ = p.cache_batch_idx != nullptr ? p.cache_batch_idx[batch] : batch;
        table_ = p.block_table == nullptr ? nullptr : p.block_table + batch * p.block_table_stride;
    }

    __device__ int cached_keys() const { return cached_; }
    // Whether a key below `keys` has a row in the cache, and not a page or batch element outside it.
    __device__ bool has_row(int key) const { return slot_of(key).exists; }

    // Where a key below `keys` is: a row of a page, or of the new keys.
    struct Location {
        int page, row;
        bool is_new;
    };
    __device__ Location location_of(int key) const {
        if (key >= cached_) return {batch, first_row + key - cached_, true};
        const Slot slot = slot_of(key);
        return {slot.page, slot.row, false};
    }
    // The row at `location` in `cache`, or in `added`, where new keys are.
    template <typename T, typename View>
    __device__ const T* row_at(const View& cache, const View& added, const Location& location) const {
        const auto [page, at, is_new] = location;
        return is_new ? row<const T>(added, page, at) : row<const T>(cache, page, at);
    }
    // The bias at `location`, in 16-bit words: float32 has two.
    __device__ const uint16_t* bias_at(const Location& location) const {
        const KeyBiasView& view = location.is_new ? p_.bias : p_.bias_cache;
        const int words = p_.bias_cache.dtype == DataType::kFloat32 ? 2 : 1;
        return static_cast<const uint16_t*>(view.data) + words * offset(view, location.page, location.row);
    }
    template <typename T, typename View>
    __device__ const T* row_of(const View& cache, const View& added, int key) const {
        return row_at<T>(cache, added, location_of(key));
    }
    template <typename T, typename View>
    __device__ const T* cached_row_of(const View& cache, int key) const {
        return cached_row<const T>(cache, slot_of(key));
    }

    // Where a new key belongs in `cache`; null for a key that is there already and where there is no page.
    template <typename T, typename View>
    __device__ T* new_cache_row(const View& cache, int key) const {
        if (key < cached_) return nullptr;
        const Slot slot = slot_of(key);
        return slot.exists ? cached_row<T>(cache, slot) : nullptr;
    }

    // CacheRows: the number of a key's row.
    __device__ int row_number(int key, int page_step, int row_step) const {
        const Slot slot = slot_of(key);
        return slot.page * page_step + slot.row * row_step;
    }

    // Writes the new keys of the rows [begin, end), their values and biases into the cache: `thread` of `num_threads` that
    // call.
    template <typename T>
    __device__ void append(int begin, int end, int thread, int num_threads) const {
        const int chunks = static_cast<int>(p_.head_dim) / 8;
        end = min(end, keys - cached_);
#pragma unroll 1
        for (int i = begin * chunks + thread; i < end * chunks; i += num_threads) {
            const int key = cached_ + i / chunks, chunk = i % chunks;
            const uint4 k = reinterpret_cast<const uint4*>(added_row<const T>(p_.key, key))[chunk];
            const uint4 v = reinterpret_cast<const uint4*>(added_row<const T>(p_.value, key))[chunk];
            const Slot to = slot_of(key);
            if (!to.exists) continue;
            reinterpret_cast<uint4*>(cached_row<T>(p_.k_cache, to))[chunk] = k;
            reinterpret_cast<uint4*>(cached_row<T>(p_.v_cache, to))[chunk] = v;
            if (chunk != 0 || p_.bias.data == nullptr) continue;
            if (p_.bias_cache.dtype == DataType::kFloat32) {
                *cached_row<float>(p_.bias_cache, to) = *added_row<const float>(p_.bias, key);
            } else {
                *cached_row<uint16_t>(p_.bias_cache, to) = *added_row<const uint16_t>(p_.bias, key);
            }
        }
    }

private:
    struct Slot {
        int page, row;
        bool exists;  // false: clamped
    };

    __device__ int in_cache(int page) const { return min(max(page, 0), static_cast<int>(p_.cache_batch) - 1); }

    // A contiguous cache has one page, beyond all keys.
    __device__ Slot slot_of(int key) const {
        const int at = static_cast<int>(p_.keys_per_page.quotient(key));
        int page = element_;
        if (table_ != nullptr) page = __ldg(table_ + at);
        const int clamped = in_cache(page);
        return {clamped, key - at * static_cast<int>(p_.keys_per_page.value), page == clamped};
    }
    template <typename View>
    __device__ int64_t offset(const View& view, int page, int row) const {
        return page * view.batch_stride + row * view.row_stride + kv_head * view.head_stride;
    }
    template <typename T, typename View>
    __device__ T* row(const View& view, int page, int row) const {
        return static_cast<T*>(view.data) + offset(view, page, row);
    }
    template <typename T, typename View>
    __device__ T* cached_row(const View& view, Slot slot) const {
        return row<T>(view, slot.page, slot.row);
    }
    template <typename T, typename View>
    __device__ T* added_row(const View& view, int key) const {
        return row<T>(view, batch, first_row + key - cached_);
    }

    const KvCacheArgs& p_;
    int cached_;   // keys in the cache
    int element_;  // of a contiguous cache
    const int32_t* table_;
};

}  // namespace flash_dmattn::cuda
