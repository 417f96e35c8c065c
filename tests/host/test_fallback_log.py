"""FLASH_DMATTN_LOG=1: each fallback is reported once, with its reason; without it nothing is."""

import importlib.util
import logging
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch
from programs import ROOT

from flash_dmattn import KeyIntervalMask, fallbacks, flash_dmattn_func, flash_dmattn_func_auto
from flash_dmattn.integrations.triangle import triangle_attention
from flash_dmattn.masks import Problem, choice
from flash_dmattn.masks.dense import BoolMask


@pytest.fixture
def log(monkeypatch, caplog):
    monkeypatch.setattr(fallbacks, "LOGS", True)
    monkeypatch.setattr(fallbacks, "_logged", set())
    caplog.set_level(logging.WARNING, "flash_dmattn")
    return caplog


def rows(*shape):
    return torch.randn(*shape)


def padded_head_dim():
    for of_value in (20, 12):
        flash_dmattn_func(rows(1, 4, 2, 12), rows(1, 4, 2, 12), rows(1, 4, 2, of_value))


def strided_rows():
    flash_dmattn_func(rows(1, 4, 2, 16), rows(1, 4, 16, 2).transpose(2, 3), rows(1, 4, 2, 16))


def dense_intervals():
    flash_dmattn_func_auto("reference")(*(rows(1, 4, 2, 16),) * 3, attn_mask=KeyIntervalMask.causal(4, 4))


def strided_bias():
    triangle_attention(*(rows(1, 3, 2, 4, 8),) * 3, rows(1, 4, 4, 2).permute(0, 3, 1, 2).unsqueeze(1))


CASES = [
    (padded_head_dim, "padding of the head dimension: it differs or is not a multiple of 8: use one multiple"),
    (strided_rows, "copy of key: its head dimension is not contiguous"),
    (dense_intervals, "dense form of a KeyIntervalMask: the backend 'reference' reads it as bool"),
    (strided_bias, "copy of a bias: its keys are not contiguous"),
]


@pytest.mark.parametrize(("call", "said"), CASES, ids=[call.__name__ for call, _ in CASES])
def test_a_fallback_is_reported_once(log, call, said):
    call()
    call()
    (message,) = [record.getMessage() for record in log.records]
    assert message.startswith(f"flash_dmattn: {said}")


def test_each_reason_of_a_kind_is_reported_once(log):
    for text in ("x", "y", "x"):
        fallbacks.report("a", text)
    assert [record.getMessage() for record in log.records] == ["flash_dmattn: a: x", "flash_dmattn: a: y"]


def test_an_ordinary_call_reports_nothing(log):
    bias = rows(1, 1, 1, 64).requires_grad_()
    out = flash_dmattn_func(rows(1, 64, 2, 16), rows(1, 64, 1, 16), rows(1, 64, 1, 16), attn_bias=bias, is_causal=True,
                            window_size=8)  # fmt: skip
    out.sum().backward()
    assert not log.records


@pytest.mark.parametrize("call", [call for call, _ in CASES], ids=lambda call: call.__name__)
def test_nothing_is_reported_without_the_variable(log, monkeypatch, call):
    monkeypatch.setattr(fallbacks, "LOGS", False)
    call()
    assert not log.records


def test_a_traced_call_is_one_graph(log):
    torch.compile(flash_dmattn_func, backend="eager", fullgraph=True)(*(rows(1, 4, 2, 12),) * 3)


def test_why_tiles(monkeypatch):
    """Meta tensors stand for CUDA's: their values cannot be read either."""
    problem = Problem(512, 4096)
    intervals = torch.zeros(1, 1, 4096, dtype=torch.int32, device="meta")
    known = KeyIntervalMask(intervals, intervals, keys_per_row=8, unstructured=True)
    unknown = KeyIntervalMask(intervals, intervals, unstructured=True)
    window = KeyIntervalMask(intervals, intervals)
    assert choice.why_tiles(known, False, problem) is None
    assert choice.why_tiles(window, False, problem) is None
    assert "pass keys_per_row" in choice.why_tiles(unknown, False, problem)
    assert choice.why_tiles(KeyIntervalMask.causal(4, 4), False, problem) is None
    bools = BoolMask(torch.ones(1, 1, 512, 4096, dtype=torch.bool, device="meta"))
    assert choice.why_tiles(bools, True, problem) is None
    monkeypatch.setattr(choice, "can_dispatch_on_device", lambda *args: True)
    assert choice.why_tiles(bools, True, problem).startswith("with deterministic=True the device does not count")
    assert choice.why_tiles(bools, False, problem).startswith("with a dense bias the device does not count")


def run(*command, **variables):
    return subprocess.run(command, env={"PATH": "/usr/bin:/bin", **variables}, capture_output=True, text=True)


@pytest.mark.parametrize(("value", "lines"), [("1", 2), ("0", 0), ("", 0)])
def test_the_variable(value, lines):
    """With no handler Python prints warnings to stderr."""
    program = "from flash_dmattn import fallbacks as f\nfor k in 'aab': f.enabled() and f.report(k, 'why')"
    done = run(sys.executable, "-c", program, FLASH_DMATTN_LOG=value, PYTHONPATH=":".join([str(ROOT), *sys.path]))
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if line.startswith("flash_dmattn: ")] == [
        "flash_dmattn: a: why",
        "flash_dmattn: b: why",
    ][:lines]


MODULE = """
#include "torch/python_log.h"

#include <thread>

namespace py = pybind11;
using namespace flash_dmattn;

// From a thread of autograd and, as the fast path does, from Python's own.
void fall_back() {
    std::thread([] {
        for (const char* kind : {"a", "a", "b"})
            if (logs_fallbacks()) log_fallback(kind, "why");
    }).join();
}

PYBIND11_MODULE(fallback_module, m) {
    m.def("report_fallbacks_to", &report_fallbacks_to);
    m.def("fall_back", &fall_back, py::call_guard<py::gil_scoped_release>());
    m.def("fall_back_here", [](const std::string& kind) { log_fallback(kind, "why"); });
}
"""


@pytest.fixture(scope="module")
def fallback_module(tmp_path_factory):
    """The log of the compiled module, in a module that falls back on the CPU, too."""
    if shutil.which("g++") is None or not (ROOT / "csrc").is_dir():
        pytest.skip("needs g++ and the source tree")
    folder = tmp_path_factory.mktemp("module")
    (folder / "module.cpp").write_text(MODULE)
    includes = [ROOT / "csrc", sysconfig.get_path("include"), Path(torch.__file__).parent / "include"]
    command = ["g++", "-std=c++17", "-O0", "-shared", "-fPIC", *(f"-I{path}" for path in includes)]
    subprocess.run([*command, str(folder / "module.cpp"), "-o", str(folder / "fallback_module.so")], check=True)
    spec = importlib.util.spec_from_file_location("fallback_module", folder / "fallback_module.so")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_compiled_module_writes_into_the_same_log(fallback_module, log, capfd):
    fallback_module.fall_back()  # reported to none
    fallback_module.report_fallbacks_to(fallbacks.write)
    fallback_module.fall_back()
    fallback_module.fall_back_here("c")
    fallback_module.fall_back_here("c")
    messages = [f"flash_dmattn: {kind}: why" for kind in "abc"]
    assert [record.getMessage() for record in log.records] == messages
    assert {(record.name, record.levelname) for record in log.records} == {("flash_dmattn", "WARNING")}
    assert capfd.readouterr().err == ""


def test_a_handler_that_fails_does_not_stop_the_call(fallback_module, monkeypatch):
    def fail(kind, text):
        raise OSError("disk full")

    unraisable = []
    monkeypatch.setattr(sys, "unraisablehook", lambda caught: unraisable.append(caught.exc_value))
    fallback_module.report_fallbacks_to(fail)
    fallback_module.fall_back_here("d")
    assert [str(error) for error in unraisable] == ["disk full"]


@pytest.mark.parametrize(("value", "calls"), [("1", 1), ("0", 0)])
def test_the_compiled_module_is_asked_for_reports(value, calls):
    program = (
        "import sys; asked = []\n"
        "def see(frame, event, called):\n"
        "    if event == 'c_call' and called.__name__ == 'report_fallbacks_to': asked.append(called)\n"
        "sys.setprofile(see); import flash_dmattn; sys.setprofile(None); print(len(asked))"
    )
    done = run(sys.executable, "-c", program, FLASH_DMATTN_LOG=value, PYTHONPATH=":".join([str(ROOT), *sys.path]))
    assert done.stdout == f"{calls}\n", done.stderr
