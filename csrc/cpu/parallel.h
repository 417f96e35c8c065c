#pragma once

#include <cstdint>
#include <functional>

namespace flash_dmattn {

// Runs task(index) for every index below `tasks`; threads fetch the next index when they are free. `make_task` is
// called once per thread, so that a task may own scratch memory.
void parallel_for_tasks(int64_t tasks, const std::function<std::function<void(int64_t)>()>& make_task);

}  // namespace flash_dmattn
