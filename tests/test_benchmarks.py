"""benchmarks/: every script runs at a small size, and none of them passes what is wrong."""

import contextlib
import json
import time
from dataclasses import replace

import pytest
import torch
from programs import ROOT, run_script

pytest.importorskip("rich")
pytest.importorskip("matplotlib")

BENCHMARKS = ROOT / "benchmarks"
SCRIPTS = [f"{way}_{kind}" for way in ("forward", "backward") for kind in ("equivalence", "performance")]
SCRIPTS += ["memory", "long_context", "sparse_performance", "call_performance", "parallel_performance"]
SCRIPTS += ["small_performance", "triangle_performance"]


@pytest.fixture
def equivalence(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import equivalence

    return equivalence


@pytest.fixture
def performance(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    threads = torch.get_num_threads()
    import performance

    yield performance
    torch.set_num_threads(threads)


@pytest.fixture
def sparse_performance(performance):
    import sparse_performance

    return sparse_performance


@pytest.fixture
def call_performance(performance):
    import call_performance

    return call_performance


def run(script, *arguments):
    return run_script(f"benchmarks/{script}.py", *arguments)


def assert_says_where(content: dict) -> None:
    assert content["environment"]["device"] and content["environment"]["torch"] == torch.__version__
    assert {"commit", "flash_dmattn", "threads", "python", "triton"} <= content["environment"].keys()


def test_the_commit_of_a_copy_without_git(equivalence, monkeypatch):
    import report

    monkeypatch.setenv("FLASH_DMATTN_COMMIT", "1234abc")
    assert "commit 1234abc" in report.describe(report.environment("cpu"))


@pytest.mark.parametrize("script", [*SCRIPTS, "models_performance"])
def test_help(script):
    if script == "models_performance":
        pytest.importorskip("transformers")
    done = run(script, "--help")
    assert done.returncode == 0, done.stderr
    assert "--device" in done.stdout and "--json" in done.stdout


# Equivalence


@pytest.mark.parametrize(
    ("script", "outputs"),
    [("forward_equivalence", {"out", "lse"}), ("backward_equivalence", {"out", "lse", "dq", "dk", "dv", "dbias"})],
)
def test_equivalence(tmp_path, script, outputs):
    path = tmp_path / "result.json"
    done = run(
        script, "--device=cpu", "--backend=cpu", "--size=small", "--config=softcap, ", "--jobs=2", f"--json={path}"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 PASS, 0 MISS, 0 not supported" in done.stdout
    content = json.loads(path.read_text())
    assert_says_where(content)
    assert (content["dtype"], content["size"]) == ("float32", "small")
    assert [outcome["config"] for outcome in content["outcomes"]] == [
        "softcap, causal, key bias",
        "softcap, mask, dense bias",
    ]
    for outcome in content["outcomes"]:
        assert (outcome["backend"], outcome["verdict"]) == ("cpu", "PASS")
        assert set(outcome["outputs"]) == outputs
        assert all(0 <= output["ratio"] <= 1 for output in outcome["outputs"].values())


@pytest.mark.parametrize("size", ["small", "full"])
def test_the_names_of_configurations_are_unique(equivalence, size):
    names = [problem.name for problem in equivalence.configurations(size)]
    assert len(set(names)) == len(names)


def test_the_reference_itself_passes_everything(equivalence, capsys):
    arguments = ["--device=cpu", "--backend=reference", "--size=small", "--dtype=bfloat16"]
    assert equivalence.main(equivalence.backward_outputs, "", arguments) == 0
    assert " 0 MISS, 0 not supported" in capsys.readouterr().out


def plant(monkeypatch, equivalence, wrong):
    """Puts `wrong(out, lse)` in the place of every backend but the reference."""
    right = equivalence.flash_dmattn_func_auto

    def function_of(backend):
        attention = right("reference")
        return attention if backend == "reference" else lambda *args, **options: wrong(*attention(*args, **options))

    monkeypatch.setattr(equivalence, "flash_dmattn_func_auto", function_of)


def refuse(out, lse):
    raise ValueError("no [such] thing is supported")


@pytest.mark.parametrize(
    ("wrong", "status", "says"),
    [
        (lambda out, lse: (out, lse), 0, "PASS"),
        (lambda out, lse: (out + 1e-4, lse), 1, "MISS out"),
        (lambda out, lse: (out, lse.masked_fill(lse == lse.max(), torch.nan)), 1, "MISS lse"),
        (lambda out, lse: (out, lse.masked_fill(lse == -torch.inf, -1e30)), 1, "MISS lse"),
        (lambda out, lse: (out, lse.masked_fill(lse == lse.max(), -torch.inf)), 1, "MISS lse"),
        (lambda out, lse: (out[:, :1], lse), 1, "MISS out"),
        (lambda out, lse: {}["no such key"], 1, "KeyError: 'no such key'"),
        (refuse, 1, "(1) no [such] thing is supported"),
    ],
)
def test_a_wrong_forward_is_a_miss(equivalence, monkeypatch, capsys, wrong, status, says):
    plant(monkeypatch, equivalence, wrong)
    arguments = ["--device=cpu", "--backend=cpu", "--size=small", "--config=rows see nothing"]
    assert equivalence.main(equivalence.forward_outputs, "", arguments) == status
    printed = capsys.readouterr().out
    assert says in printed
    assert ("nothing was compared" in printed) == (wrong is refuse)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda out, lse: (out, lse.detach()), "MISS d"),
        (lambda out, lse: (out + 1e-3 * (out - out.detach()), lse), "MISS d"),
        (lambda out, lse: (out + torch.nan * (out - out.detach()), lse), "MISS"),
    ],
)
def test_a_wrong_gradient_is_a_miss(equivalence, monkeypatch, capsys, wrong, says):
    plant(monkeypatch, equivalence, wrong)
    arguments = ["--device=cpu", "--backend=cpu", "--size=small", "--config=square, causal, key bias"]
    assert equivalence.main(equivalence.backward_outputs, "", arguments) == 1
    assert says in capsys.readouterr().out


def test_one_miss_is_enough(equivalence, monkeypatch, tmp_path):
    plant(monkeypatch, equivalence, lambda out, lse: (out + (torch.nan if lse.shape[-1] == 1 else 0), lse))
    path = tmp_path / "result.json"
    arguments = ["--device=cpu", "--backend=cpu", "--size=small", "--config=one", f"--json={path}"]
    assert equivalence.main(equivalence.forward_outputs, "", arguments) == 1
    verdicts = {outcome["config"]: outcome["verdict"] for outcome in json.loads(path.read_text())["outcomes"]}
    assert verdicts["one key"] == "PASS"
    assert verdicts["one row"] == "MISS"


def test_inputs_lie_in_poisoned_memory(equivalence):
    from problem import surrounded

    for tensor in (torch.randn(2, 3, 1, 8), torch.rand(2, 1, 3, 5) < 0.5):
        inside = surrounded(tensor)
        assert torch.equal(inside, tensor)
        around = torch.as_strided(inside, (inside.storage_offset(),), (1,), 0)
        assert (around if tensor.dtype == torch.bool else around.isnan()).all()


# Performance


@pytest.mark.parametrize(
    ("script", "quantities"),
    [("forward_performance", {"forward"}), ("backward_performance", {"backward", "forward + backward"})],
)
def test_performance(tmp_path, script, quantities):
    table, picture = tmp_path / "result.json", tmp_path / "result.png"
    tiny = ("--device=cpu", "--shrink=32", "--samples=2", "--threads=1")
    done = run(script, *tiny, f"--json={table}", f"--plot={picture}", "--peer=sdpa", "--peer=flex")
    assert done.returncode == 0, done.stdout + done.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")
    content = json.loads(table.read_text())
    assert_says_where(content)
    timings = content["timings"]
    assert {timing["quantity"] for timing in timings} == quantities
    assert {timing["dtype"] for timing in timings} == {"float32", "bfloat16"}
    assert {timing["implementation"] for timing in timings} == {"cpu", "sdpa", "flex"}
    assert len(timings) == 3 * 2 * 3 * len(quantities)
    for timing in timings:
        # FlexAttention has no backward on the CPU: shown as such, and not fatal.
        refused = timing["implementation"] == "flex" and script.startswith("backward")
        assert (timing["seconds"] is None) == refused == bool(timing["refusal"])


def test_the_peers_do_the_same_work(performance, sparse_performance):
    sparse = [w for w in sparse_performance.WORKLOADS["cuda"] if min(w.seqlen_q, w.seqlen_k) <= 8192]
    for problem in performance.WORKLOADS["cpu"] + performance.WORKLOADS["cuda"] + sparse:
        problem = performance.replace(performance.shrunk(problem, 64), batch=min(problem.batch, 2))
        inputs = performance.make_inputs(problem, torch.float32, "cpu", seed=0)
        expected = performance.ours("reference", inputs).forward()
        # A row that sees nothing is NaN in SDPA.
        sees = torch.isfinite(inputs.attend(performance.flash_dmattn_func_auto("reference"))[1]).transpose(1, 2)
        for name, build in performance.PEERS.items():
            if name in ("sdpa-flash", "sdpa-cudnn") and (inputs.mask is not None or inputs.bias is not None):
                with pytest.raises(ValueError, match="(FlashAttention-2|cuDNN) is compared without mask and bias"):
                    build(inputs)
                continue
            if name == "sdpa-cudnn":
                continue  # no such kernel on the CPU
            torch.testing.assert_close(build(inputs).forward()[sees], expected[sees], rtol=1e-4, atol=1e-4)


def test_the_limit_counts_what_is_visible(performance):
    problem = performance.square("", 2, 4, 64, 32, kv_heads=2, mask="B 1 1 Sk", mask_values=lambda x: x * 0 == 0)
    inputs = performance.make_inputs(problem, torch.bfloat16, "cpu", seed=0)
    moved = 2 * 2 * 64 * 4 * 32 * 2 + 2 * 2 * 64 * 2 * 32 * 2 + 2 * 64 + 4 * 2 * 4 * 64
    assert performance.least_seconds("forward", inputs) == pytest.approx(moved / performance.PEAK_BYTES)
    half = performance.replace(inputs, mask=(torch.arange(64) < 32).expand(2, 1, 1, 64).contiguous())
    moved -= 2 * 64 * 2 * 32 * 2
    assert performance.least_seconds("forward", half) == pytest.approx(moved / performance.PEAK_BYTES)


def test_the_limit_counts_intervals_as_it_counts_pairs(performance, sparse_performance):
    for lengths in ({}, {"seqlen_q": 1}, {"seqlen_q": 150, "bias": "B H 1 Sk"}):
        inputs = performance.make_inputs(
            sparse_performance.top_w("", 100, 8, 4, 2, 32, **lengths), torch.float32, "cpu", seed=0
        )
        dense = performance.replace(inputs, mask=inputs.bool_mask())
        assert torch.equal(performance.rows_that_see(inputs), performance.rows_that_see(dense))
    for is_causal in (False, True):
        problem = performance.square("", 2, 4, 50, 8, seqlen_q=70, is_causal=is_causal)
        inputs = performance.make_inputs(problem, torch.float32, "cpu", seed=0)
        everything = torch.ones(1, 1, 70, 50, dtype=torch.bool)
        dense = performance.replace(inputs, mask=everything)
        assert torch.equal(performance.rows_that_see(inputs), performance.rows_that_see(dense))


def test_check_fails_what_is_too_slow(performance, monkeypatch, capsys):
    arguments = ["--device=cpu", "--shrink=32", "--samples=1", "--threads=1", "--workload=random", "--check"]
    for required, status in ((0.0, 0), (1e6, 1)):
        demand = performance.Demand(performance.CHECKED, "forward", "sdpa", required)
        monkeypatch.setattr(performance, "DEMANDS", {"cpu": [demand]})
        assert performance.main(["forward"], "", arguments) == status
    assert "x sdpa's speed, at least 1000000.00 is asked for" in capsys.readouterr().out
    assert performance.main(["forward"], "", [*arguments[:3], "--workload=causal", "--check"]) == 1
    assert "nothing was run of 'random mask, key bias'" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        performance.main(["forward"], "", [*arguments, "--peer=flex"])


def test_check_asks_of_what_is_measured(performance):
    for device, demands in performance.DEMANDS.items():
        names = {problem.name for problem in performance.WORKLOADS[device]}
        assert {demand.workload for demand in demands} <= names
        assert {demand.peer for demand in demands} <= performance.PEERS.keys()


@pytest.mark.parametrize("workload", ["sliding window 1024", "documents of 700", "packed, 32 x 512", "long causal"])
def test_what_a_long_workload_computes(performance, workload):
    """Made small: ours is what plain attention with the same pairs gives, and the limit counts these pairs."""
    (problem,) = (problem for problem in performance.WORKLOADS["cuda"] if problem.name == workload)
    problem = performance.replace(performance.shrunk(problem, 16), batch=3, head_dim=8)
    inputs = performance.make_inputs(problem, torch.float64, "cpu", seed=0)
    ours, sdpa = performance.ours("cpu", inputs).forward(), performance.sdpa(inputs).forward()
    torch.testing.assert_close(ours, sdpa)
    dense = performance.replace(inputs, mask=inputs.bool_mask())
    counted, seen = performance.rows_that_see(inputs), performance.rows_that_see(dense)
    assert torch.equal(counted.expand_as(seen), seen)


# Long contexts


def test_long_context(tmp_path):
    path = tmp_path / "result.json"
    arguments = ("--device=cpu", "--seqlen=300", "--window=16", "--dtype=float32", "--samples=1", "--sparse=lists")
    done = run("long_context", *arguments, f"--json={path}")
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads(path.read_text())
    assert_says_where(content)
    assert [timing["quantity"] for timing in content["timings"]] == ["topk", "key lists", "forward", "backward"]
    assert all(timing["seconds"] > 0 for timing in content["timings"])
    assert (content["memory"], content["sparse"]) == ([], "lists")


def test_sparse_performance(tmp_path):
    path = tmp_path / "result.json"
    done = run("sparse_performance", "--device=cpu", "--shrink=32", "--samples=1", "--threads=1", f"--json={path}")
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads(path.read_text())
    assert_says_where(content)
    taken = {(timing["quantity"], timing["implementation"]): timing["seconds"] for timing in content["timings"]}
    both = {(quantity, name) for quantity in ("forward", "backward") for name in ("cpu", "tiles", "intervals")}
    assert taken.keys() == {("topk", "cpu"), ("key lists", "cpu")} | both
    assert all(seconds > 0 for seconds in taken.values())


@pytest.mark.parametrize("tile_rows", [1, 7])
def test_indices_name_what_the_last_row_of_each_tile_sees(performance, sparse_performance, tile_rows):
    problem = sparse_performance.indexed("", 40, 8, 4, 2, 16, tile_rows=tile_rows)
    inputs = performance.make_inputs(problem, torch.float32, "cpu", seed=0)
    last = [min(i // tile_rows * tile_rows + tile_rows, 40) - 1 for i in range(40)]
    seen = inputs.bool_mask()[:, :, last].tril()
    reference = performance.flash_dmattn_func_auto("reference")
    expected = performance.replace(inputs, mask=seen).attend(reference)[0]
    ours = sparse_performance.by_indices("cpu", inputs).forward()
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)
    random = sparse_performance.indexed("", 40, 8, 4, 2, 16, tile_rows=tile_rows, at_random=True).indices(inputs.mask)
    assert all(row.unique().numel() == 8 for row in random.flatten(0, 2))


def test_cudnn_attends_to_all_keys(performance, sparse_performance, monkeypatch):
    import sparse

    monkeypatch.setattr(sparse, "sdpa_kernel", lambda backend: contextlib.nullcontext())
    for lengths in ({}, {"seqlen_q": 1}):
        problem = sparse_performance.top_w("", 40, 8, 4, 2, 16, **lengths)
        inputs = performance.make_inputs(problem, torch.float32, "cpu", seed=0)
        reference = performance.flash_dmattn_func_auto("reference")
        everything = reference(inputs.query, inputs.key, inputs.value, is_causal=True)
        torch.testing.assert_close(sparse.cudnn(inputs).forward(), everything, rtol=1e-4, atol=1e-5)
    first = reference(inputs.query, inputs.key[:, :8], inputs.value[:, :8])
    torch.testing.assert_close(sparse.cudnn_of_window(inputs).forward(), first, rtol=1e-4, atol=1e-5)


def test_what_check_asks_for(sparse_performance):
    from performance import Timing
    from sparse import Memory

    def failures(forward, lists, memory, others=4.0):
        name = sparse_performance.S131K
        timings = [Timing(name, "bfloat16", "topk", "cuda", 2e-3), Timing(name, "bfloat16", "key lists", "cuda", lists)]
        for quantity in ("forward", "backward"):
            timings.append(Timing(name, "bfloat16", quantity, "cuda", forward))
            timings.append(Timing(name, "bfloat16", quantity, "cudnn", others))
        return sparse_performance.failures(timings, [Memory(name, "bfloat16", "cuda", memory, 10)], "cuda")

    assert failures(forward=0.1, lists=0.005, memory=25) == []
    assert failures(forward=0.5, lists=0.005, memory=25) == [
        "S131072 w2048, forward: 8.00 x cudnn's speed, at least 22 are asked for",
        "S131072 w2048, backward: 8.00 x cudnn's speed, at least 18 are asked for",
    ]
    assert failures(forward=0.1, lists=0.02, memory=31) == [
        "S131072 w2048, key lists: 20% of the forward, at most 10% are asked for",
        "S131072 w2048, memory: 3.10 x that of the tensors, at most 3 are asked for",
    ]
    assert len(failures(forward=None, lists=0.005, memory=25)) == 3


def test_what_check_asks_for_beside_as_many_products(sparse_performance):
    from performance import Timing

    def failures(topk, forward, backward):
        taken = {"topk": topk, "forward": forward, "backward": backward}
        timings = [Timing(sparse_performance.S8K, "bfloat16", *of, "cuda", seconds) for *of, seconds in taken.items()]
        timings += [
            Timing(sparse_performance.S8K, "bfloat16", quantity, peer, 1.0 if peer == "cudnn-w" else 100.0)
            for quantity in ("forward", "backward")
            for peer in ("flex", "cudnn-w")
        ]
        return sparse_performance.failures(timings, [], "cuda")

    assert failures(topk=0.3, forward=1.2, backward=1.5) == []
    assert failures(topk=0.5, forward=1.2, backward=1.7) == [
        "S8192 w1024, topk and forward: 1.70 x cudnn-w's time, at most 1.6 are asked for",
        "S8192 w1024, backward: 1.70 x cudnn-w's time, at most 1.6 are asked for",
    ]


# Small calls


@pytest.fixture
def small_performance(performance):
    import small_performance

    return small_performance


def test_small_performance(tmp_path):
    path = tmp_path / "result.json"
    chosen = ("--workload=B1 H1 S16", "--dtype=float32", "--threads=1", "--threads=2", "--samples=3")
    done = run("small_performance", "--device=cpu", *chosen, f"--json={path}")
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads(path.read_text())
    assert_says_where(content)
    found = {(row["workload"], row["quantity"], row["threads"]) for row in content["comparisons"]}
    name, quantities = "host time, B1 H1 S16 D16", ("forward", "forward + backward")
    assert found == {(name, quantity, threads) for quantity in quantities for threads in (1, 2)}
    assert all(min(row["ours"], row["sdpa"], row["speed"]) > 0 for row in content["comparisons"])


@pytest.mark.parametrize(("seconds", "status"), [(0.0, 0), (0.01, 1)])
def test_a_slow_small_call_is_missed(small_performance, monkeypatch, capsys, seconds, status):
    right = small_performance.flash_dmattn_func

    def slow(*args, **options):
        time.sleep(seconds)
        return right(*args, **options)

    monkeypatch.setattr(small_performance, "flash_dmattn_func", slow)
    monkeypatch.setattr(small_performance, "WORKLOADS", [replace(small_performance.WORKLOADS[0], at_least=0.01)])
    arguments = ["--device=cpu", "--dtype=float32", "--threads=1", "--samples=1", "--check"]
    assert small_performance.main(arguments) == status
    assert ("x the speed of SDPA" in capsys.readouterr().out) == bool(status)


# Triangle attention


@pytest.fixture
def triangle_performance(performance):
    import triangle_performance

    return triangle_performance


def test_triangle_performance(tmp_path):
    path = tmp_path / "result.json"
    chosen = ("--workload=B2 N256", "--shrink=32", "--samples=2", "--threads=1")
    done = run("triangle_performance", "--device=cpu", *chosen, f"--json={path}")
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads(path.read_text())
    assert_says_where(content)
    timed = {(row["implementation"], row["quantity"]) for row in content["timings"] if row["seconds"] is not None}
    ours = ("triangle_attention", "plain batch", "sdpa")
    assert timed >= {(name, quantity) for name in ours for quantity in ("forward", "backward", "forward + backward")}
    assert "B2 N8 H4 S8 D32" in done.stdout


def test_triangles_do_the_same_work(triangle_performance):
    """Of one batch element, where the plain batch has the same bias."""
    inputs = triangle_performance.make_inputs(
        triangle_performance.Workload(1, 3, 12, heads=2, head_dim=8), torch.float64, "cpu", 0
    )
    results = []
    for build in (triangle_performance.ours, triangle_performance.plain_batch, triangle_performance.sdpa):
        work = build(inputs)
        out = work.forward()
        results.append([out, *torch.autograd.grad(out, work.leaves, inputs.dout)])
    for others in results[1:]:
        for x, y in zip(results[0], others):
            torch.testing.assert_close(x, y.view_as(x))


@pytest.mark.parametrize(("ours", "plain", "says"), [(1.0, 1.0, 0), (1.1, 1.0, 1), (1.0, None, 1), (None, 1.0, 1)])
def test_rows_that_cost_something_are_missed(triangle_performance, performance, ours, plain, says):
    key = ("B2 N3", "bfloat16", performance.BOTH)
    timings = [
        performance.Timing(*key, triangle_performance.OURS, ours),
        performance.Timing(*key, triangle_performance.PLAIN, plain),
    ]
    assert len(triangle_performance.missed(timings)) == says


# Whole calls


def test_call_performance(tmp_path):
    path = tmp_path / "result.json"
    done = run("call_performance", "--device=cpu", "--shrink=64", "--samples=1", "--threads=1", f"--json={path}")
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads(path.read_text())
    assert_says_where(content)
    assert list(content["parts"]) == ["prefill", "decode", "host", "selection"] and content["missed"] == []
    taken = {
        part: {(timing["quantity"], timing["implementation"]) for timing in timings}
        for part, timings in content["parts"].items()
    }
    sparse, quantities = ("auto", "tiles", "lists"), ("forward", "forward + backward")
    assert taken["prefill"] == {(quantity, name) for quantity in quantities for name in sparse}
    by_hand = {f"by hand: {taking}, {way}" for taking in ("gather", "index_select") for way in ("rows", "groups")}
    decode = {name for _, name in taken["decode"]} - {"cache", "cache, a quarter"}
    assert decode == {*sparse, *by_hand, "dense: rows", "dense: groups"}
    assert taken["host"] == {("host time", "ours"), ("host time", "sdpa")}
    assert taken["selection"] == {("GPU time", name) for name in ("both", "topk", "key lists", "calls")}
    assert all(timing["seconds"] > 0 for timings in content["parts"].values() for timing in timings)
    assert len(content["parts"]["host"]) == 2 * 6


def test_calls_do_the_same_work_by_hand(performance, call_performance):
    import calls

    problem = call_performance.one_row(3, 100, 8, 4, 2, 16)
    inputs = performance.make_inputs(problem, torch.float32, "cpu", seed=0)
    ours = calls.whole_call(calls_reference(performance), inputs).forward()
    torch.testing.assert_close(inputs.attend(calls_reference(performance))[0], ours)
    everything = calls_reference(performance)(inputs.query, inputs.key, inputs.value)
    for kernel in calls.ROW_KERNELS["cpu"]:
        torch.testing.assert_close(calls.dense(inputs, kernel)(), everything, rtol=1e-4, atol=1e-5)
        for taking in calls.TAKES:
            out = calls.by_hand(inputs, taking, kernel)()
            assert out.shape == ours.shape
            torch.testing.assert_close(out, ours, rtol=1e-4, atol=1e-5)


def test_small_calls_do_the_same_work(performance, call_performance):
    import calls

    for case in call_performance.SMALL_CALLS:
        inputs = performance.make_inputs(case.problem, torch.float32, "cpu", seed=0)
        for name in case.trained:
            inputs.leaves()[name].requires_grad_()
        works = calls.whole_call(calls_reference(performance), inputs), calls.sdpa(inputs)
        assert len(works[0].leaves) == len(works[1].leaves) == len(case.trained)
        if case.problem.window is not None:
            continue  # SDPA has no window
        ours, theirs = works[0].forward().transpose(1, 2), works[1].forward()
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
        if case.trained:
            dout = inputs.dout.transpose(1, 2)
            outs = (ours, theirs)
            gradients = zip(*(torch.autograd.grad(out, work.leaves, dout) for out, work in zip(outs, works)))
            for name, (mine, its) in zip(case.trained, gradients):
                its = its if name == "bias" else its.transpose(1, 2)
                torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-5)


def calls_reference(performance):
    return performance.flash_dmattn_func_auto("reference")


def test_a_cache_that_fills_up(performance, call_performance):
    import calls

    reference = calls_reference(performance)

    def attention(query, key, value, mask, bias, *, cache_seqlens=None, **options):
        length = key.shape[1] if cache_seqlens is None else int(cache_seqlens[0])
        assert cache_seqlens is None or cache_seqlens.dtype == torch.int32
        return reference(query, key[:, :length], value[:, :length], mask, bias[..., :length], **options)

    def deaf(*tensors, cache_seqlens=None, **options):
        return reference(*tensors, **options)

    assert calls.takes_lengths(attention) and not calls.takes_lengths(lambda query, key: None)
    problem = call_performance.one_row(2, 100, 8, 4, 2, 16)
    inputs = performance.make_inputs(problem, torch.float32, "cpu", seed=0)
    out = calls.from_cache(attention, inputs, 4, "cpu")()
    torch.testing.assert_close(out, calls.whole_call(reference, calls.filled(inputs, 25)).forward())
    with pytest.raises(AssertionError):
        calls.from_cache(deaf, inputs, 1, "cpu")
    setting = call_performance.Setting("cpu", "float32", attention, 1, 0)
    timings = call_performance.decode(problem, setting)
    assert {"cache", "cache, a quarter"} <= {timing.implementation for timing in timings if timing.seconds}


def test_what_fails_says_so_and_the_rest_goes_on(call_performance, monkeypatch, tmp_path, capsys):
    right, path = call_performance.flash_dmattn_func, tmp_path / "result.json"

    def no_lists(*tensors, sparse="auto", **options):
        if sparse == "lists":
            raise KeyError("no [lists] today")
        return right(*tensors, sparse=sparse, **options)

    def no_memory(*arguments, **options):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried")

    monkeypatch.setattr(call_performance.KeyIntervalMask, "topk", no_memory)
    small = ["--device=cpu", "--shrink=64", "--samples=1", "--threads=1", f"--json={path}"]
    assert call_performance.main([*small, "--part=selection"]) == 1
    assert "no memory" in capsys.readouterr().out
    monkeypatch.undo()
    monkeypatch.setattr(call_performance, "flash_dmattn_func", no_lists)
    assert call_performance.main([*small, "--part=prefill", "--part=decode", "--workload=w256"]) == 1
    out = capsys.readouterr().out
    assert "refused" in out and "no [lists] today" in out
    timings = json.loads(path.read_text())["parts"]["prefill"]
    assert {timing["implementation"]: timing["seconds"] is None for timing in timings} == {
        "auto": False,
        "tiles": False,
        "lists": True,
    }


def test_what_check_asks_of_calls(call_performance):
    from performance import Timing

    def missed(part, workload, quantity, **seconds):
        timings = [
            Timing(workload, "bfloat16", quantity, name.replace("_", " ").replace(" 0 ", ": "), taken)
            for name, taken in seconds.items()
        ]
        return list(call_performance.missed(part, [workload], timings))

    prefill = ("prefill", "S2048 w512", "forward")
    assert missed(*prefill, auto=1.9, tiles=1.8, lists=2.5, cudnn=1.0) == []
    assert missed(*prefill, auto=2.1, tiles=1.9, lists=1.8, cudnn=1.0) == [
        "prefill, S2048 w512, forward: 2.10 x the time of cudnn, at most 2 are asked for",
        "prefill, S2048 w512, forward: auto takes 1.17 x the time of lists",
    ]
    assert len(missed(*prefill, auto=1.0, tiles=1.0, lists=1.0, cudnn=None)) == 1
    assert len(missed(*prefill, auto=None, tiles=1.0, lists=1.0, cudnn=1.0)) == 2
    assert missed("prefill", "S16384 w2048", "forward", auto=1.0, tiles=2.0, lists=1.0, cudnn=0.1) == []
    decode = ("decode", "B1 Sk131072 w2048", "forward")
    ways = {"by_hand_0_gather": 3.0, "by_hand_0_index": 2.0, "by_hand_0_math": None, "dense_0_flash": 1.0}
    assert missed(*decode, auto=1.0, **ways) == []
    assert missed(*decode, auto=1.3, **ways) == [
        "decode, B1 Sk131072 w2048, forward: 0.65 x the time of by hand, at most 0.6 are asked for",
        "decode, B1 Sk131072 w2048, forward: 1.30 x the time of dense, at most 1 are asked for",
    ]
    host = ("host", "forward, key bias and window_size", "host time")
    assert missed(*host, ours=99e-6, sdpa=1e-6) == []
    assert missed(*host, ours=101e-6, sdpa=1e-6) == [
        "host, forward, key bias and window_size, host time: 0.101 ms, at most 0.100 ms are asked for"
    ]
    assert len(missed("selection", "8 heads, S8192 w2048", "GPU time", topk=1e-6)) == 1
    # Every demand is of a workload that there is.
    workloads = call_performance.WORKLOADS["cuda"]
    for demand in call_performance.DEMANDS:
        assert demand.workload in map(call_performance.name_of, workloads[demand.part])


# Models


@pytest.fixture
def models_performance(performance):
    pytest.importorskip("transformers")
    import models_performance

    return models_performance


def test_models_performance(models_performance, tmp_path, capsys):
    path = tmp_path / "result.json"
    small = ["--device=cpu", "--shrink=128", "--samples=1", "--threads=1", f"--json={path}"]
    assert models_performance.main([*small, "--part=train", "--part=attention"]) == 0
    content = json.loads(path.read_text())
    assert_says_where(content)
    assert content["environment"]["transformers"] and content["missed"] == []
    for part, workloads in (("train", 2), ("attention", 3)):
        figures = content["parts"][part]
        assert len(figures) == 3 * workloads
        assert all(figure["seconds"] > 0 and not figure["refusal"] for figure in figures)
    losses: dict = {}
    for figure in content["parts"]["train"]:
        losses.setdefault(figure["workload"], []).append(figure["loss"])
    for ours, sdpa, eager in losses.values():
        assert ours == pytest.approx(eager, rel=1e-3) and sdpa == pytest.approx(eager, rel=1e-3)

    assert models_performance.main([*small, "--part=generate", "--workload=B1 Sk8192"]) == 0
    figures = json.loads(path.read_text())["parts"]["generate"]
    assert len(figures) == 2 * 3 * 2 and all(figure["tokens_per_second"] > 0 for figure in figures)
    assert "flash_dmattn, static" in capsys.readouterr().out


def test_what_fails_in_a_model_says_so(models_performance, monkeypatch, capsys):
    def use(model, implementation):
        raise RuntimeError(f"no [{implementation}] today")

    monkeypatch.setattr(models_performance, "use", use)
    small = ["--device=cpu", "--shrink=128", "--samples=1", "--threads=1", "--workload=Doge", "--part=train"]
    assert models_performance.main(small) == 1
    assert "no [flash_dmattn] today" in capsys.readouterr().out
    assert models_performance.main([*small, "--implementation=sdpa"]) == 0


def test_what_check_asks_of_models(models_performance):
    def missed(part, workload, quantity, **figures):
        made = [models_performance.Figure(workload, name, **{quantity: value}) for name, value in figures.items()]
        return [line for line in models_performance.missed(part, made) if f"the {quantity} of" in line]

    doge, t5 = ("train", "Doge B2 S8192 w1024"), ("train", "T5 S2048, S1024")
    assert missed(*doge, "seconds", flash_dmattn=1.9, sdpa=10.0, eager=1.0) == []
    assert missed(*doge, "seconds", flash_dmattn=2.1, sdpa=10.0) == [
        "train, Doge B2 S8192 w1024: 0.21 x the seconds of sdpa, at most 0.20 are asked for"
    ]
    assert len(missed(*doge, "gib", flash_dmattn=2.6, sdpa=10.0)) == 1
    assert missed(*t5, "gib", flash_dmattn=5.9, sdpa=20.0, eager=10.0) == []
    assert len(missed(*t5, "gib", flash_dmattn=6.1, sdpa=20.0, eager=10.0)) == 1
    assert missed(*t5, "seconds", flash_dmattn=1.0, sdpa=None, eager=1.0) == []  # a peer that had no memory
    assert len(missed(*t5, "seconds", flash_dmattn=None, sdpa=1.0, eager=1.0)) == 1
    assert len(missed("attention", "T5 encoder S2048", "seconds", flash_dmattn=0.6, sdpa=1.0, eager=2.0)) == 1
    for demand in models_performance.DEMANDS:
        assert any(work.name.startswith(demand.workload) for work in models_performance.WORKLOADS[demand.part])


# The picture


@pytest.fixture
def draw(performance):
    import draw

    return draw


def test_the_picture_of_what_was_measured(draw, performance, sparse_performance, call_performance, tmp_path, capsys):
    small = ["--device=cpu", "--shrink=64", "--samples=1", "--threads=1"]
    dense, sparse, calls = (tmp_path / f"{name}.json" for name in ("dense", "sparse", "calls"))
    both = ["--dtype=float32", "--workload=random"]
    assert performance.main([performance.BOTH], "", [*small, *both, f"--json={dense}"]) == 0
    assert sparse_performance.main([*small, "--workload=w512", f"--json={sparse}"]) == 0
    assert call_performance.main([*small, "--part=decode", "--workload=B1", f"--json={calls}"]) == 0
    for path in (tmp_path / "figures.svg", tmp_path / "figures.png", tmp_path / "again.svg"):
        assert draw.main([*map(str, (dense, sparse, calls)), f"--to={path}"]) == 0
    assert "3 panels" in capsys.readouterr().out
    assert (tmp_path / "figures.png").read_bytes().startswith(b"\x89PNG")
    svg = (tmp_path / "figures.svg").read_text()
    assert svg == (tmp_path / "again.svg").read_text()
    for text in ("random mask, key bias", "forward and backward, float32", "a step of decoding", "SDPA, all keys"):
        assert f">{text}</text>" in svg
    taken = json.loads(sparse.read_text())["timings"]
    ours = sum(x["seconds"] for x in taken if x["implementation"] == "cpu" and x["quantity"] in ("forward", "backward"))
    assert f">{1e3 * ours:.3g} ms</text>" in svg and performance.describe(performance.environment("cpu")) in svg


def test_the_picture_of_a_model(draw, models_performance, tmp_path):
    import report

    figures = [
        models_performance.Figure("Doge S8", "flash_dmattn", seconds=0.0351, gib=5.25),
        models_performance.Figure("Doge S8", "sdpa", seconds=0.2082, gib=25.3),
        models_performance.Figure("Doge S8", "eager", refusal="CUDA out of memory. Tried"),
        models_performance.Figure("T5", "flash_dmattn", seconds=0.1),
    ]
    path, picture = tmp_path / "models.json", tmp_path / "figures.svg"
    report.write_json(path, report.environment("cpu"), parts={"train": [vars(figure) for figure in figures]})
    assert draw.main([str(path), f"--to={picture}", "--workload=Doge"]) == 0
    svg = picture.read_text()
    for text in ("35.1 ms", "208 ms", "5.25 GiB", "25.3 GiB"):
        assert svg.count(f">{text}</text>") == 1
    assert svg.count(">no memory</text>") == 2 and "T5" not in svg


@pytest.mark.parametrize(
    ("name", "content", "arguments", "message"),
    [
        ("a.json", '{"environment": {}, "peaks": []}', [], "nothing in these files is drawn"),
        ("a.json", "no json", [], "a.json: JSONDecodeError"),
        ("b.json", "{}", [], "a.json: FileNotFoundError"),
        ("a.json", "{}", ["--to=a.gif"], "must end with .svg or .png, got a.gif"),
    ],
)
def test_what_cannot_be_drawn(draw, tmp_path, capsys, name, content, arguments, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(SystemExit) as exit:
        draw.main([str(tmp_path / "a.json"), f"--to={tmp_path / 'a.svg'}", *arguments])
    assert exit.value.code == 2 and message in capsys.readouterr().err


# Memory


def test_memory(tmp_path):
    path = tmp_path / "result.json"
    done = run(
        "memory", "--device=cpu", "--seqlen=1024", "--heads=2", "--backend=cpu", "--mask", "--check", f"--json={path}"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads(path.read_text())
    assert_says_where(content)
    peaks = {peak["workload"]: peak for peak in content["peaks"]}
    assert list(peaks) == ["causal, key bias", "mask [B,H,S,S], causal, key bias"]
    for peak in peaks.values():
        # out, dq, dk and dv at least; the scores of all pairs would be 8 MiB more for every copy of them.
        assert peak["backend"] == "cpu" and 2 <= peak["mib"] < 32
        # out, dq, dk, dv, lse and dbias
        assert (peak["mib"] - peak["extra_mib"]) * 2**20 == pytest.approx(4 * 4 * 1024 * 2 * 64 + 2 * 4 * 1024 * 2)
        assert peak["elements"] == 1024 * 2 * 64
    assert [peak["mask_bits"] for peak in peaks.values()] == [0, 2 * 1024 * 1024]


# Arguments


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config=no such thing"], "no configuration has 'no such thing' in its name"),
        (["--json=no/such/folder/result.json"], "there is no folder no/such/folder"),
        (["--backend=fast"], "invalid choice: 'fast'"),
    ],
)
def test_bad_arguments_end_with_a_message(equivalence, capsys, arguments, message):
    with pytest.raises(SystemExit) as exit:
        equivalence.main(equivalence.forward_outputs, "", ["--device=cpu", *arguments])
    assert exit.value.code == 2
    assert message in capsys.readouterr().err
