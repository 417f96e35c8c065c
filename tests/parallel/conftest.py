import pytest
import torch
from ranks import Ranks


@pytest.fixture(scope="session")
def two():
    """Two processes with gloo."""
    ranks = Ranks(2)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def four():
    """Four processes with gloo."""
    ranks = Ranks(4)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def two_gpus():
    """Two processes with a GPU each, with NCCL."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    ranks = Ranks(2, "cpu:gloo,cuda:nccl")
    yield ranks
    ranks.close()


@pytest.fixture
def ranks(request):
    return request.getfixturevalue(request.param)
