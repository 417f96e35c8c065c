"""The operators on DTensors that are sharded over batch elements or heads."""

import pytest
import torch
import torch.distributed as dist

from flash_dmattn import KeyLists

pytestmark = pytest.mark.xdist_group("ranks")  # the processes are started by one worker


def over_dtensors(problem, dim, divided_bias):
    """The largest difference of (out, dq, dk, dv, dbias) between DTensors and whole tensors; 2 batch elements."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    import flash_dmattn.parallel  # noqa: F401, registers the sharding rules
    from flash_dmattn import flash_dmattn_func

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    problem = dict(problem)
    batch = problem.pop("batch", 2)
    shapes = [(batch, 600, 4, 16), (batch, 600, 2, 16), (batch, 600, 2, 16)] + [problem.pop("bias", None)]
    mask, indices, tile_rows = (problem.pop(name, None) for name in ("mask", "indices", "tile_rows"))
    relative_bias = problem.pop("relative_bias", None)
    tensors = [torch.randn(shape) for shape in shapes if shape is not None]
    dout = torch.randn(shapes[0])

    def run(place):
        leaves = [place(x, dim) for x in tensors[:3]]
        leaves += [place(x, None if not divided_bias else {2: 1, 0: 0}[dim]) for x in tensors[3:]]
        if relative_bias is not None:
            table = torch.randn(relative_bias, generator=torch.Generator().manual_seed(1))
            leaves.append(place(table, {2: 1, 0: 0}[dim] if divided_bias else None))
        leaves = [x.detach().requires_grad_() for x in leaves]
        bias = leaves[3] if len(tensors) == 4 else None
        generator, masks = torch.Generator().manual_seed(0), None
        if mask:
            masks = place(torch.rand(mask, generator=generator) < 0.6, {2: 1, 0: 0}[dim])
        elif indices:
            chosen = torch.randint(-1, 600, indices, generator=generator, dtype=torch.int32)
            masks = KeyLists.from_indices(place(chosen, {2: 1, 0: 0}[dim]), 600, 600, tile_rows=tile_rows)
        relative = {} if relative_bias is None else {"relative_bias": leaves[-1]}
        out = flash_dmattn_func(*leaves[:3], masks, bias, **relative, **problem)
        return out, *torch.autograd.grad(out, leaves, place(dout, dim))

    def distributed(tensor, dim):
        return distribute_tensor(tensor, mesh, [Replicate() if dim is None else Shard(dim)])

    ours, exact = run(distributed), run(lambda tensor, dim: tensor)
    assert ours[0].placements == (Shard(dim),) and ours[1].placements == (Shard(dim),)
    return max((x.full_tensor() - y).abs().max().item() for x, y in zip(ours, exact))


WINDOWED = {"is_causal": True, "window_size": 64}
# PyTorch 2.11 reads the mesh from an operator's first argument only, which is None for key lists.
MAKES_LISTS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)


def skip_lists(problem):
    makes_lists = "indices" in problem or ("window_size" in problem and problem.get("sparse") != "tiles")
    if makes_lists and not MAKES_LISTS:
        pytest.skip("lists of keys of DTensors need PyTorch 2.13")


@pytest.mark.parametrize(
    "problem, dim, divided_bias",
    [
        ({}, 2, False),
        ({}, 0, False),
        ({"bias": (2, 2, 1, 600), "is_causal": True}, 2, True),
        ({"bias": (2, 1, 1, 600)}, 2, False),
        ({"bias": (1, 4, 600, 600)}, 0, False),
        ({"batch": 4, "bias": (2, 4, 600, 600), "mask": (4, 1, 1, 600)}, 0, True),
        ({"batch": 4, "bias": (2, 4, 600, 600), "mask": (2, 4, 1, 600)}, 2, True),
        ({"bias": (2, 4, 600, 600), "mask": (2, 4, 600, 600)}, 2, True),
        ({"bias": (2, 2, 1, 600), **WINDOWED}, 2, True),
        ({"bias": (2, 2, 1, 600), **WINDOWED}, 0, True),
        ({"bias": (2, 2, 1, 600), "sparse": "tiles", **WINDOWED}, 2, True),
        ({"bias": (2, 2, 1, 600), "is_causal": True, "window_size": 600}, 2, True),
        ({"bias": (1, 2, 1, 600), "is_causal": True, "window_size": 700}, 0, False),
        ({"bias": (1, 1, 1, 600), **WINDOWED}, 2, False),
        ({"bias": (1, 2, 1, 600), **WINDOWED}, 0, False),
        ({"relative_bias": (1, 4, 41)}, 2, True),
        ({"relative_bias": (2, 1, 41)}, 2, False),
        ({"relative_bias": (2, 2, 41), "bias": (2, 2, 1, 600)}, 0, True),
        ({"relative_bias": (1, 4, 41), "bias": (1, 4, 600, 600)}, 0, False),
        ({"indices": (2, 2, 600, 20), "tile_rows": 1}, 2, False),
        ({"indices": (2, 2, 10, 20), "tile_rows": 64, "is_causal": True}, 0, False),
    ],
)
def test_dtensors(two, problem, dim, divided_bias):
    skip_lists(problem)
    assert max(two.results(over_dtensors, problem, dim, divided_bias)) < 1e-5


def test_ranks_divide_what_batch_elements_share(two):
    for failure in two.run(over_dtensors, {"batch": 6, "bias": (3, 4, 1, 600)}, 0, False):
        assert "sharded over 2 ranks, which must divide them and the 3 of a mask or bias" in failure.message


def beside_a_plain_mask(kind):
    """A query that is sharded by heads, and a mask as a plain tensor, then the same one replicated."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    import flash_dmattn.parallel  # noqa: F401, registers the sharding rules
    from flash_dmattn import KeyIntervalMask, flash_dmattn_func

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tensors = [distribute_tensor(torch.randn(2, 9, 4, 16), mesh, [Shard(2)]) for _ in range(3)]
    start = torch.arange(9, dtype=torch.int32)[None, None]
    make, parts = {
        "bool": (lambda x: x, [torch.rand(2, 1, 9, 9) < 0.5]),
        "intervals": (KeyIntervalMask, [start, start + 3]),
        "lists": (lambda *x: KeyLists.build(KeyIntervalMask(*x), 9), [start, start + 3]),
    }[kind]
    try:
        flash_dmattn_func(*tensors, make(*parts))
    except TypeError as error:
        message = str(error)
    if kind == "lists":  # they cannot move: their mask would have to be sharded as the query
        return message, True
    replicated = make(*(distribute_tensor(part, mesh, [Replicate()]) for part in parts))
    return message, flash_dmattn_func(*tensors, replicated).placements == (Shard(2),)


@pytest.mark.parametrize("kind", ["bool", "intervals", "lists"])
def test_a_plain_mask_beside_dtensors_is_named(two, kind):
    for message, works_replicated in two.results(beside_a_plain_mask, kind):
        assert message.startswith("attn_mask must be a DTensor, like query, got a plain tensor") and works_replicated


def test_lists_of_dtensors_are_not_moved(two):
    skip_lists(WINDOWED)
    for failure in two.run(over_dtensors, {"bias": (1, 2, 1, 600), **WINDOWED}, 2, False):
        assert "lists of keys" in failure.message


def window_over_a_cache(window_size, nan_at):
    """Decoding with DTensors whose batch is sharded, and the error of a NaN bias at a key."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    import flash_dmattn.parallel  # noqa: F401, registers the sharding rules
    from flash_dmattn import flash_dmattn_func

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    tensors = [torch.randn(2, rows, 2, 16) for rows in (1, 9, 9)]
    bias, used = torch.randn(2, 2, 1, 9), torch.tensor([5, 7], dtype=torch.int32)
    bias[..., nan_at] = torch.nan

    def run(place):
        options = {"is_causal": True, "window_size": window_size, "cache_seqlens": place(used)}
        return flash_dmattn_func(*map(place, tensors), None, place(bias), **options)

    ours = run(lambda x: distribute_tensor(x, mesh, [Shard(0)]))
    return (ours.full_tensor() - run(lambda x: x)).abs().max().item()


@pytest.mark.parametrize("window_size", [3, 9, 20])
def test_a_window_over_a_cache_of_dtensors(two, window_size):
    skip_lists(WINDOWED)
    assert max(two.results(window_over_a_cache, window_size, 7)) < 1e-6  # key 7 is beyond the filled ones
    for refused in two.run(window_over_a_cache, window_size, 3):
        assert "attn_bias must not be NaN" in refused.message
