#include "parallel.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>

// Null unless PyTorch's BLAS is MKL. Returns the previous setting.
extern "C" int MKL_Set_Num_Threads_Local(int threads) __attribute__((weak));

namespace flash_dmattn {
namespace {

// Makes MKL run matrix products of the current thread on one thread. MKL splits the sums of a product by its number of
// threads, even in a parallel region where it runs on one; a fixed number keeps results independent of it.
class SerialGemm {
public:
    SerialGemm() : before_(has_mkl() ? MKL_Set_Num_Threads_Local(1) : 0) {}
    ~SerialGemm() {
        if (has_mkl()) MKL_Set_Num_Threads_Local(before_);
    }
    SerialGemm(const SerialGemm&) = delete;
    SerialGemm& operator=(const SerialGemm&) = delete;

    static bool has_mkl() { return MKL_Set_Num_Threads_Local != nullptr; }

private:
    int before_;
};

}  // namespace

void parallel_for_tasks(int64_t tasks, const std::function<std::function<void(int64_t)>()>& make_task) {
    std::atomic<int64_t> next{0};
    if (tasks == 0) return;
    // Other BLAS libraries run on one thread only inside a parallel region, which needs two threads even for one task.
    const int64_t useful = SerialGemm::has_mkl() ? tasks : std::max<int64_t>(tasks, 2);
    const int64_t threads = std::min<int64_t>(at::get_num_threads(), useful);
    // A thread fetches several of many small tasks at once: neighbours are adjacent in memory. But few, since with variable
    // length most may be empty, and the others neighbours.
    const int64_t chunk = std::clamp<int64_t>(tasks / (threads * 16), 1, 8);
    at::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
        const SerialGemm serial;
        for (int64_t thread = begin; thread < end && next < tasks; ++thread) {
            const auto task = make_task();
            for (int64_t first = next.fetch_add(chunk); first < tasks; first = next.fetch_add(chunk)) {
                for (int64_t i = first; i < std::min(first + chunk, tasks); ++i) task(i);
            }
        }
    });
}

}  // namespace flash_dmattn
