"""python -m flash_dmattn.bench: the implementations compute the same, and the table says what was measured."""

import re
from dataclasses import replace

import pytest
import torch

from flash_dmattn import bench

CASES = [replace(bench.shrunk(case), batch=2) for case in bench.CASES["cpu"]]


@pytest.fixture
def seeded():
    torch.manual_seed(0)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_implementations_compute_the_same(case, seeded):
    inputs = bench.Implementations(case, "cpu", torch.float64)
    ours, sdpa = inputs.ours()(), inputs.sdpa()()
    torch.testing.assert_close(ours, sdpa, atol=1e-9, rtol=0)
    if case.backward:
        for ours, sdpa in zip(inputs.call_of(bench.OURS)(), inputs.call_of(bench.SDPA)()):
            torch.testing.assert_close(ours, sdpa, atol=1e-9, rtol=0)
        assert len(inputs.call_of(bench.SDPA_ALL)()) == 3  # without the gradient of a bias


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_flex_attention_computes_the_same(case, seeded):
    """Uncompiled, on the CPU; on CUDA the same functions are compiled."""
    inputs = bench.Implementations(replace(case, backward=False), "cpu", torch.float32)
    ours = inputs.ours()()
    inputs.device = "cuda"  # where `flex` does not refuse
    with torch.no_grad():
        torch.testing.assert_close(inputs.flex()(), ours, atol=1e-4, rtol=0)


def test_the_table(capsys):
    assert bench.main(["--device", "cpu", "--quick"]) == 0
    out, err = capsys.readouterr()
    heading, rule, *lines = out.splitlines()
    assert heading == "| median time in ms | flash_dmattn | SDPA | SDPA, all keys | FlexAttention |"
    assert rule.count("|") == heading.count("|")
    rows, rest = lines[: len(CASES)], lines[len(CASES) :]
    for row, case in zip(rows, bench.CASES["cpu"]):
        assert re.fullmatch(rf"\| {case.name}: .* \| [\d.]+ \| [\d.]+ \([\d.]+ x\) \| [\d.]+ \([\d.]+ x\) \| - \|", row)
    assert torch.__version__ in rest[1] and rest[2:] == ["FlexAttention: needs CUDA"]
    assert "[############............] 8/16 decoding, top-k: flash_dmattn" in err and err.endswith("\r")


def test_a_peer_that_fails_leaves_its_reason(monkeypatch, seeded):
    def fail(inputs):
        raise torch.OutOfMemoryError("big")

    monkeypatch.setattr(bench.Implementations, "sdpa", fail)
    inputs = bench.Implementations(CASES[0], "cpu", torch.float32)
    assert bench.measured(inputs, bench.SDPA, 0.0) == (None, "out of memory")
    assert bench.measured(inputs, bench.FLEX, 0.0) == (None, "needs CUDA")
    monkeypatch.setattr(bench.Implementations, "ours", lambda inputs: 1 / 0)
    with pytest.raises(ZeroDivisionError):  # a defect of this library is no note
        bench.measured(inputs, bench.OURS, 0.0)


def test_times_are_medians_of_calls(monkeypatch):
    """A clock that goes on by a second at each look: every call takes one."""
    ticks = iter(range(1000))
    monkeypatch.setattr(bench.time, "perf_counter", lambda: next(ticks))
    calls = []
    assert bench.seconds_of(lambda: calls.append(0), "cpu", 30) == 1
    assert bench.WARM_UP < len(calls) < 20


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "cuda"], "the CUDA kernels do not run here"),
        (["--device", "tpu"], "invalid choice"),
    ],
)
def test_refused_arguments(arguments, message, capsys, monkeypatch):
    monkeypatch.setattr(bench, "best_device", lambda: "cpu")
    with pytest.raises(SystemExit):
        bench.main(arguments)
    assert message in capsys.readouterr().err


def test_float32_on_cuda_is_refused(capsys, monkeypatch):
    monkeypatch.setattr(bench, "best_device", lambda: "cuda")
    with pytest.raises(SystemExit):
        bench.main(["--dtype", "float32"])
    assert "the CUDA kernels take float16 and bfloat16" in capsys.readouterr().err


@pytest.mark.gpu
def test_on_a_gpu(capsys):
    assert bench.main(["--device", "cuda", "--quick"]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")][2:]
    assert len(rows) == len(bench.CASES["cuda"])
    for row in rows:
        assert "-" not in row.strip("| ").split(" | ")[1:4]  # FlexAttention may be left out for want of time
