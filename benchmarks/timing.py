"""Clocks: the time of a call on the GPU, on the CPU, and on the host."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from report import sentence
from rows import BOTH, FORWARD, Row
from torch import Tensor

HOST_CALLS, HOST_BATCHES, HOST_WARM_UP = 50, 60, 100

Call = Callable[[], object]


@dataclass(frozen=True)
class Operation:
    """An implementation over its inputs.

    Attributes:
        forward: returns out (B, Sq, H, D).
        leaves: the tensors that gradients are computed for.
    """

    forward: Callable[[], Tensor]
    leaves: list[Tensor]


def call_for(direction: str, operation: Operation, dout: Tensor) -> Call:
    """The call whose time is that of the direction."""
    if direction == FORWARD:
        return operation.forward
    if direction == BOTH:
        return lambda: torch.autograd.grad(operation.forward(), operation.leaves, dout)
    out = operation.forward()
    return lambda: torch.autograd.grad(out, operation.leaves, dout, retain_graph=True)


def median_on_cuda(call: Call) -> float:
    """Seconds, with a cold L2 cache."""
    from triton.testing import do_bench

    return do_bench(call, warmup=100, rep=500, return_mode="median") / 1e3


def medians_on_cpu(calls: dict[str, Call], samples: int) -> dict[str, float]:
    """The calls take turns, so that other load on the machine slows all of them alike."""
    seconds = {name: [] for name in calls}
    for _ in range(samples):
        for name, call in calls.items():
            started = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - started)
    return {name: statistics.median(taken) for name, taken in seconds.items()}


def medians(calls: dict[str, Call], samples: int, device: str) -> dict[str, float]:
    """The seconds that each call takes."""
    if device == "cpu":
        return medians_on_cpu(calls, samples)
    return {name: median_on_cuda(call) for name, call in calls.items()}


def time_calls(
    key: tuple[str, str, str, str],
    makers: dict[str, Callable[[], Call]],
    samples: int,
    clock: Callable[[Call], float] | None = None,
    limit: float | None = None,
) -> list[Row]:
    """One row for each maker's call: its seconds, or why there are none.

    Args:
        key: suite, workload, dtype and direction.
        makers: by implementation, a function that returns the call. Each call runs once before it is timed.
        clock: times one call, whose memory is free again before the next is made. None takes `samples` of all of them
            on the CPU, in turns.
        limit: the least seconds that any implementation can take, for "fraction_of_limit".
    """
    calls, seconds, refusals = {}, {}, {}
    for name, make in makers.items():
        try:
            if clock is None:
                calls[name] = called_once(make)
            else:
                seconds[name] = clock(called_once(make))
        except Exception as error:
            refusals[name] = sentence(error)
    seconds |= medians_on_cpu(calls, samples)
    figures = {name: {"seconds": taken} for name, taken in seconds.items()}
    if limit is not None:
        figures = {name: found | {"fraction_of_limit": limit / seconds[name]} for name, found in figures.items()}
    return [Row(*key, name, figures.get(name, {}), refusals.get(name, "")) for name in makers]


def called_once(make: Callable[[], Call]) -> Call:
    call = make()
    call()
    return call


def captured(call: Call, device: str) -> Call:
    """A call that replays this one as a CUDA graph and returns its results; on the CPU the call itself."""
    if device == "cpu":
        return call
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()

    def replay() -> object:
        graph.replay()
        return results

    return replay


def host_seconds(call: Call, device: str) -> float:
    """Seconds until a call returns: the median of batches, so short that launches do not wait in a full queue."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    batches = HOST_BATCHES if device == "cuda" else 3
    for _ in range(HOST_WARM_UP if device == "cuda" else 1):
        call()
    taken = []
    for _ in range(batches):
        wait()
        started = time.perf_counter()
        for _ in range(HOST_CALLS):
            call()
        taken.append((time.perf_counter() - started) / HOST_CALLS)
    wait()
    return statistics.median(taken)
