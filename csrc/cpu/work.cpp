#include "work.h"

#include <ATen/Parallel.h>

#include <atomic>

namespace flash_dmattn {

void for_each_unit(int64_t units, const std::function<std::function<void(int64_t)>()>& make_unit) {
    std::atomic<int64_t> next{0};
    const int64_t threads = std::min<int64_t>(at::get_num_threads(), units);
    at::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
        for (int64_t thread = begin; thread < end; ++thread) {
            const auto unit = make_unit();
            for (int64_t i = next++; i < units; i = next++) unit(i);
        }
    });
}

}  // namespace flash_dmattn
