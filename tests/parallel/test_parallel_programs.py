"""The benchmark and the example that run on several ranks."""

import json
import os
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from programs import importable, module_of

pytestmark = pytest.mark.xdist_group("ranks")  # the processes are started by one worker


EXAMPLE, BENCHMARK = "examples/train_lm.py", "benchmarks/run.py"
TINY = {"batch_size": 4, "seq_len": 32, "window": 8, "dim": 32, "layers": 2, "heads": 4, "kv_heads": 2}


def benchmark(arguments):
    return module_of(BENCHMARK).main(["parallel", *arguments])


def test_parallel_performance(two, tmp_path):
    pytest.importorskip("rich")
    path = tmp_path / "result.json"
    assert two.results(benchmark, ["--device=cpu", "--shrink=8", "--samples=1", f"--json={path}"]) == [0, 0]
    rows: dict = {}
    for row in json.loads(path.read_text())["rows"]:
        rows.setdefault((row["workload"].partition(",")[0], row["implementation"]), {})[row["direction"]] = row
    window, dense, both = "top-k mask", "dense causal", "forward + backward"
    for key, by_direction in rows.items():
        if key != (dense, "PyTorch's ring attention"):  # for CUDA
            assert 0 < by_direction["forward"]["seconds"] < by_direction[both]["seconds"], key
            assert by_direction[both]["ranks"] == 2
    ours, gathered = (rows[window, name][both] for name in ("flash_dmattn", "all-gather"))
    assert 0 < max(ours["sent_bytes"]) < 0.2 * max(gathered["sent_bytes"])
    budget = max(ours["sent_bytes"]) / ours["sent_over_budget"]
    assert max(ours["sent_bytes"] + ours["received_bytes"]) <= 1.2 * budget
    # Keys and values to the other rank, twice; and the gradients of those that are its own back.
    of_others = 2 * 64 * 2 * 64 * 4
    assert rows[dense, "flash_dmattn, zigzag"][both]["sent_bytes"] == [3 * of_others] * 2
    assert rows[dense, "flash_dmattn"][both]["sent_bytes"] == [2 * of_others, 3 * of_others]


def test_the_benchmark_says_what_was_missed():
    pytest.importorskip("rich")
    with importable("benchmarks"):
        from frame import failures
        from rows import Row
        from suites import parallel

    def missed(ours, sent):
        both = [
            (parallel.STRONG, parallel.ALONE, {"seconds": 2.0}),
            (parallel.STRONG, parallel.OURS, {"seconds": ours, "sent_over_budget": sent / 100}),
            (parallel.WEAK, parallel.SHARE, {"seconds": 1.0}),
            (parallel.WEAK, parallel.OURS, {"seconds": ours, "sent_over_budget": 1.0}),
        ]
        rows = [Row("parallel", name, "bfloat16", "forward + backward", method, x) for name, method, x in both]
        return failures(parallel.DEMANDS["cuda"], rows)

    assert missed(1.0, 119) == []
    assert len(missed(1.0, 121)) == 1
    assert len(missed(1.07, 119)) == 1  # weak scaling
    assert len(missed(1.2, 119)) == 2


def train_example(options):
    with mock.patch.dict(os.environ, WORLD_SIZE=str(dist.get_world_size())):
        train_lm = module_of(EXAMPLE)
        return train_lm.train(train_lm.Config(**options))


def test_the_example_trains_as_one_process_does(four):
    pytest.importorskip("rich")
    pytest.importorskip("matplotlib")
    train_lm = module_of(EXAMPLE)
    options = {**TINY, "steps": 4}
    alone = train_lm.train(train_lm.Config(**options))
    for context_parallel in (1, 2, 4):
        for losses in four.results(train_example, {**options, "context_parallel": context_parallel}):
            assert losses == pytest.approx(alone, rel=1e-4)


def test_the_example_refuses_ranks_that_do_not_fit(two):
    pytest.importorskip("rich")
    pytest.importorskip("matplotlib")
    train_lm = module_of(EXAMPLE)
    for change, message in (
        ({"context_parallel": 3}, "must divide seq_len"),
        ({"context_parallel": 2}, "number of ranks"),
        ({"context_parallel": 2, "backend": "reference"}, "backend"),
    ):
        with pytest.raises(ValueError, match=message):
            train_lm.train(train_lm.Config(**{**TINY, "steps": 1, **change}))
    for failure in two.run(train_example, {**TINY, "steps": 1, "batch_size": 3}):
        assert failure.kind == "ValueError" and "batch_size" in failure.message


def heads_over_ranks():
    """The largest differences of loss and gradients between the example with tensor parallelism and the whole model."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        parallelize_module,
    )

    train_lm = module_of(EXAMPLE)
    config = train_lm.Config(**TINY)
    batch = train_lm.random_batch(train_lm.load_text(config)[0], config, torch.Generator().manual_seed(0))
    results = []
    for is_parallel in (False, True):
        model = train_lm.build_model(config)
        if is_parallel:
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            whole, by_head = (Replicate(),) * 3, partial(ColwiseParallel, use_local_output=False)
            for block in model.blocks:
                plan = {
                    "attention": PrepareModuleInput(input_layouts=whole, desired_input_layouts=whole),
                    **{f"attention.{name}_proj": by_head() for name in "qkv"},
                    "attention.dt_proj": RowwiseParallel(output_layouts=Shard(-1), use_local_output=False),
                    "attention.o_proj": RowwiseParallel(),
                    "mlp.gate_proj": ColwiseParallel(),
                    "mlp.up_proj": ColwiseParallel(),
                    "mlp.down_proj": RowwiseParallel(),
                }
                parallelize_module(block, mesh, plan)
                attention = block.attention
                attention.A = torch.nn.Parameter(distribute_tensor(attention.A, mesh, [Shard(0)]))
        loss = train_lm.loss_of(model, batch, config)
        loss.backward()
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        results.append(
            (loss.detach(), {n: g.full_tensor() if hasattr(g, "full_tensor") else g for n, g in gradients.items()})
        )
    (loss, gradients), (parallel_loss, parallel_gradients) = results
    differences = {name: (gradients[name] - parallel_gradients[name]).abs().max().item() for name in gradients}
    return abs(loss - parallel_loss).item(), max(differences.values())


def test_tensor_parallel_by_heads(two):
    pytest.importorskip("rich")
    pytest.importorskip("matplotlib")
    for loss, gradient in two.results(heads_over_ranks):
        assert loss < 1e-5 and gradient < 1e-5
