"""Context parallel attention over NCCL on two GPUs."""

import pytest
import torch
import torch.distributed as dist
from sharded_cases import Case, check, device_of_rank

from flash_dmattn.parallel import context_parallel_attention

pytestmark = pytest.mark.xdist_group("ranks")  # the processes are started by one worker


ON_GPUS = [
    {"bias": (2, 2, 1, "S"), "masked": 0.1, "options": {"is_causal": True, "window_size": 300}},
    {"bias": (2, 2, 1, "S"), "options": {"is_causal": True, "window_size": 300, "fixed_shapes": False}},
    {"bias": (1, 4, 1, "S"), "tied": 3, "options": {"is_causal": True, "window_size": 100}},
    {"bias": (2, 2, 1, "S"), "options": {"is_causal": True, "window_size": 100, "deterministic": True}},
    {
        "batch": 1,
        "bias": (1, 2, 1, "S"),
        "options": {"is_causal": True, "window_size": 100},
        "cu_seqlens": (0, 90, 800),
    },
    {"batch": 1, "cu_seqlens": (0, 90, 500, 800), "options": {"is_causal": True}},
    {"intervals": "window", "bias": (1, 1, 1, "S")},
    {"intervals": "any", "options": {"is_causal": True}},
    {"options": {"is_causal": True}},
    {"layout": "zigzag", "options": {"is_causal": True}},
    {"layout": "zigzag", "mask": (2, 2, 1, "S"), "bias": (2, 4, 1, "S"), "options": {"is_causal": True}},
    {"layout": "zigzag", "bias": (1, 4, "S", "S"), "options": {"is_causal": True}},
    {"mask": (2, 4, "S", "S"), "bias": (1, 2, "S", "S")},
]


@pytest.mark.gpu
@pytest.mark.parametrize("even", [True, False])
@pytest.mark.parametrize("problem", ON_GPUS)
def test_on_gpus(two_gpus, problem, even):
    if not even and problem.get("layout") == "zigzag":
        pytest.skip("zigzag shards are even")
    sizes = {"batch": 2, "heads": 4, "kv_heads": 2, "head_dim": 64, "dtype": torch.bfloat16}
    if "bias" in problem and problem["bias"][2] == 1:
        sizes["bias_dtype"] = torch.float32
    check(two_gpus, Case((400, 400) if even else (500, 300), **{**sizes, **problem}))


def window_of(tensors, **options):
    query, key, value, bias = tensors
    return context_parallel_attention(query, key, value, attn_bias=bias, is_causal=True, window_size=64, **options)


def new_tensors():
    shapes = ((1, 512, 4, 64), (1, 512, 2, 64), (1, 512, 2, 64))
    rows = [torch.randn(shape, device=device_of_rank(), dtype=torch.bfloat16) for shape in shapes]
    return [*rows, torch.randn(1, 2, 1, 512, device=device_of_rank())]


@torch.no_grad()
def captured():
    """Whether the replay of a CUDA graph equals the call, for tensors written after the capture."""
    static = new_tensors()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            window_of(static)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL has a thread of its own
        out = window_of(static)
    same = []
    for _ in range(2):
        for tensor, new in zip(static, new_tensors()):
            tensor.copy_(new)
        graph.replay()
        same.append(torch.allclose(out, window_of(static), rtol=0, atol=1e-2))
    return same


@pytest.mark.gpu
def test_cuda_graphs(two_gpus):
    assert two_gpus.results(captured) == [[True, True]] * 2


def in_a_group_of_nccl_alone():
    tensors = new_tensors()
    group = dist.new_group(backend="nccl")
    return torch.equal(window_of(tensors, group=group), window_of(tensors))


@pytest.mark.gpu
def test_a_group_of_nccl_alone(two_gpus):
    assert two_gpus.results(in_a_group_of_nccl_alone) == [True, True]
