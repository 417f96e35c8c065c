// OpenMP's parallel regions on POSIX threads. scripts/sanitize.py preloads it under ThreadSanitizer, which does not see
// how the threads of libgomp synchronize, because libgomp is not instrumented.
#include <omp.h>
#include <pthread.h>

#include <thread>
#include <tuple>
#include <vector>

namespace {

thread_local int number = 0, threads = 1;
thread_local pthread_barrier_t* barrier = nullptr;

}  // namespace

extern "C" {

int omp_get_thread_num() { return number; }
int omp_get_num_threads() { return threads; }
int omp_in_parallel() { return threads > 1; }

void GOMP_barrier() {
    if (barrier != nullptr) pthread_barrier_wait(barrier);
}

void GOMP_parallel(void (*region)(void*), void* data, unsigned count, unsigned) {
    if (count == 0) count = omp_get_max_threads();
    if (threads > 1) count = 1;  // a nested region
    pthread_barrier_t own;
    pthread_barrier_init(&own, nullptr, count);
    const auto run = [&](int i) {
        const auto outer = std::tuple(number, threads, barrier);
        std::tie(number, threads, barrier) = std::tuple(i, static_cast<int>(count), &own);
        region(data);
        std::tie(number, threads, barrier) = outer;
    };
    std::vector<std::thread> others;
    for (unsigned i = 1; i < count; ++i) others.emplace_back(run, i);
    run(0);
    for (std::thread& thread : others) thread.join();
    pthread_barrier_destroy(&own);
}

}  // extern "C"
