import gc
import os
import time

# Each pytest-xdist worker, with the processes that its tests start, uses its share of the processors: more threads
# would wait for each other. torch and NumPy read the variables once, when they are imported.
WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
if WORKERS > 1:
    THREADS = max(1, len(os.sched_getaffinity(0)) // WORKERS)
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"):
        os.environ.setdefault(variable, str(THREADS))

import pytest  # noqa: E402
import torch  # noqa: E402
from filelock import FileLock  # noqa: E402  PyTorch needs it, too

if not torch.cuda.is_available():
    # Triton reads the variable once, when it is imported: without a GPU its kernels run in its interpreter.
    os.environ.setdefault("TRITON_INTERPRET", "1")

from gpu_inputs import GIB, runs_hopper_kernels  # noqa: E402

CACHE_GIB, PATIENCE = 1, 60  # GPU memory that a worker may cache between tests; seconds to wait for other processes


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def pytest_generate_tests(metafunc):
    """Runs each GPU case on the sm80 and on the sm90 kernels where both are available; its id names the kernels."""
    marks = {mark.name for mark in metafunc.definition.iter_markers()}
    if "gpu" in marks and "hopper" not in marks and runs_hopper_kernels():
        metafunc.parametrize("kernels", ["sm80", "sm90"], indirect=True)


@pytest.fixture(autouse=True)
def kernels(request, monkeypatch):
    """Selects the CUDA kernels that the case names, by itself or by its path (conformance/paths.py)."""
    callspec = getattr(request.node, "callspec", None)
    path = callspec.params.get("path") if callspec else None
    if (architecture := getattr(request, "param", None) or getattr(path, "kernels", None)) is not None:
        monkeypatch.setenv("FLASH_DMATTN_ARCH", architecture)


@pytest.fixture
def use(monkeypatch):
    """A function that selects the CUDA kernels by name; at first sm90."""

    def use(architecture):
        monkeypatch.setenv("FLASH_DMATTN_ARCH", architecture)

    use("sm90")
    return use


@pytest.fixture(autouse=True)
def gpu_memory(request, tmp_path_factory):
    """Runs tests marked `gpu_memory` one at a time, and waits until other processes have freed the memory."""
    if (mark := request.node.get_closest_marker("gpu_memory")) is None or not torch.cuda.is_available():
        yield
    else:
        (gib,) = mark.args
        with FileLock(tmp_path_factory.getbasetemp().parent / "gpu memory.lock"):
            until = time.monotonic() + PATIENCE
            while (free := free_gib()) < gib:
                if time.monotonic() > until:
                    pytest.skip(f"takes {gib} GiB of GPU memory, and {free:.1f} were free in {PATIENCE} s")
                time.sleep(1)
            yield
            free_gib()
    if torch.cuda.is_available() and torch.cuda.memory_reserved() > CACHE_GIB * GIB:
        free_gib()


def free_gib():
    """Frees this process's cache and returns the free GPU memory in GiB."""
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0] / GIB


@pytest.fixture
def poisoned_allocations():
    """Fills the memory of new tensors with NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(3, device="cuda" if torch.cuda.is_available() else "cpu").isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: "long" not in item.keywords)
    skips = {}
    if not torch.cuda.is_available():
        skips["gpu"] = pytest.mark.skip(reason="no CUDA device")
    elif not runs_hopper_kernels():
        skips["hopper"] = pytest.mark.skip(reason="no device of compute capability 9.0 that kernels were built for")
    for item in items:
        for name, skip in skips.items():
            if name in item.keywords:
                item.add_marker(skip)
