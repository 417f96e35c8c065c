// FLASH_DMATTN_LOG=1 in the environment reports on stderr where a call falls back, each kind once (docs/logging.md).
// flash_dmattn/fallbacks.py does so for what Python decides.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <set>
#include <string>
#include <string_view>

namespace flash_dmattn {

inline bool logs_fallbacks() {
    static const bool logs = [] {
        const char* set = std::getenv("FLASH_DMATTN_LOG");
        return set != nullptr && std::string_view(set) == "1";
    }();
    return logs;
}

// kind: what falls back; text: the reason, and what to change.
inline void log_fallback(const std::string& kind, const std::string& text) {
    static std::mutex mutex;
    static std::set<std::string> logged;
    const std::lock_guard<std::mutex> lock(mutex);
    if (logged.insert(kind + text).second) std::fprintf(stderr, "flash_dmattn: %s: %s\n", kind.c_str(), text.c_str());
}

}  // namespace flash_dmattn
