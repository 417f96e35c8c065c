#include "work.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>

// Absent where PyTorch's BLAS is another than MKL. Returns what was set before.
extern "C" int MKL_Set_Num_Threads_Local(int threads) __attribute__((weak));

namespace flash_dmattn {
namespace {

// Products are made by one thread each while this lives, on the thread that made it. MKL cuts a product's sums by the
// number of threads that it was told of, even where it is called in a parallel region and runs on one.
class SerialProducts {
public:
    SerialProducts() : before_(can_say() ? MKL_Set_Num_Threads_Local(1) : 0) {}
    ~SerialProducts() {
        if (can_say()) MKL_Set_Num_Threads_Local(before_);
    }
    SerialProducts(const SerialProducts&) = delete;
    SerialProducts& operator=(const SerialProducts&) = delete;

    static bool can_say() { return MKL_Set_Num_Threads_Local != nullptr; }

private:
    int before_;
};

}  // namespace

void for_each_unit(int64_t units, const std::function<std::function<void(int64_t)>()>& make_unit) {
    std::atomic<int64_t> next{0};
    if (units == 0) return;
    // Another BLAS makes its products on one thread only in a parallel region: so there is one even for a single unit,
    // though its second thread finds nothing to do.
    const int64_t useful = SerialProducts::can_say() ? units : std::max<int64_t>(units, 2);
    const int64_t threads = std::min<int64_t>(at::get_num_threads(), useful);
    // Of many small units several are taken at once: neighbours lie together in memory.
    const int64_t at_once = std::max<int64_t>(units / (threads * 16), 1);
    at::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
        const SerialProducts serial;
        for (int64_t thread = begin; thread < end && next < units; ++thread) {
            const auto unit = make_unit();
            for (int64_t first = next.fetch_add(at_once); first < units; first = next.fetch_add(at_once)) {
                for (int64_t i = first; i < std::min(first + at_once, units); ++i) unit(i);
            }
        }
    });
}

}  // namespace flash_dmattn
