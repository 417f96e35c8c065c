// Passes the reports of fallback_log.h to a function of Python: f(kind, text).
#pragma once

#include <pybind11/pybind11.h>

#include <string>
#include <utility>

#include "fallback_log.h"

namespace flash_dmattn {

// Never destroyed, because the interpreter may end first.
inline pybind11::object& python_receiver() {
    static auto& receiver = *new pybind11::object;
    return receiver;
}

// Called from any thread, with and without the GIL. An exception of the function does not stop the attention.
inline void report_to_python(const std::string& kind, const std::string& text) {
    const pybind11::gil_scoped_acquire gil;
    try {
        python_receiver()(kind, text);
    } catch (pybind11::error_already_set& error) {
        error.discard_as_unraisable("flash_dmattn's log of fallbacks");
    }
}

inline void report_fallbacks_to(pybind11::object receiver) {
    python_receiver() = std::move(receiver);
    fallback_receiver = &report_to_python;
}

}  // namespace flash_dmattn
