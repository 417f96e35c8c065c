// Reports where a call falls back, each kind and reason once (docs/logging.md). With FLASH_DMATTN_LOG=1 Python asks for
// them (csrc/torch/python_log.h) and writes them into its log beside its own (flash_dmattn/fallbacks.py).
#pragma once

#include <atomic>
#include <mutex>
#include <set>
#include <string>

namespace flash_dmattn {

// Receives a report. Null where none is wanted.
inline std::atomic<void (*)(const std::string& kind, const std::string& text)> fallback_receiver{nullptr};

inline bool logs_fallbacks() { return fallback_receiver.load(std::memory_order_relaxed) != nullptr; }

// Call it where logs_fallbacks(). kind: what falls back; text: the reason, and what to change.
inline void log_fallback(const std::string& kind, const std::string& text) {
    static std::mutex mutex;
    static std::set<std::string> logged;
    {
        const std::lock_guard<std::mutex> lock(mutex);
        if (!logged.insert(kind + text).second) return;
    }
    fallback_receiver.load()(kind, text);  // without the lock: the receiver may wait for Python's
}

}  // namespace flash_dmattn
