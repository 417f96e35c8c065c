import os

import pytest
import torch

if not torch.cuda.is_available():
    # Before anything imports Triton, which asks once: its kernels then run in its interpreter.
    os.environ.setdefault("TRITON_INTERPRET", "1")

from gpu_inputs import runs_hopper_kernels  # noqa: E402

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # the workers are the parallelism


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def pytest_generate_tests(metafunc):
    """Where two generations of CUDA kernels run, every case that needs a GPU runs on both, and says so in its id."""
    marks = {mark.name for mark in metafunc.definition.iter_markers()}
    if "gpu" in marks and "hopper" not in marks and runs_hopper_kernels():
        metafunc.parametrize("kernels", ["sm80", "sm90"], indirect=True)


@pytest.fixture(autouse=True)
def kernels(request, monkeypatch):
    if hasattr(request, "param"):
        monkeypatch.setenv("FLASH_DMATTN_ARCH", request.param)


@pytest.fixture
def poisoned_allocations():
    """Tensors that start unwritten are full of NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(3, device="cuda").isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def pytest_collection_modifyitems(items):
    skips = {}
    if not torch.cuda.is_available():
        skips["gpu"] = pytest.mark.skip(reason="no CUDA device")
    elif not runs_hopper_kernels():
        skips["hopper"] = pytest.mark.skip(reason="no device of compute capability 9.0 that kernels were built for")
    for item in items:
        for name, skip in skips.items():
            if name in item.keywords:
                item.add_marker(skip)
