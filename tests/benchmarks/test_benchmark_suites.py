"""benchmarks/suites: every suite runs at a small size, its peers compute the same, and --check misses nothing."""

import contextlib
import sys
import time
from dataclasses import replace
from functools import partial

import pytest
import torch
from programs import ROOT, run_script

pytest.importorskip("rich")
pytest.importorskip("matplotlib")
sys.path.insert(0, str(ROOT / "benchmarks"))

import frame  # noqa: E402
import peers  # noqa: E402
import rows  # noqa: E402
import run  # noqa: E402
from frame import Setting, failures  # noqa: E402
from problem import indexed, make_inputs, top_k  # noqa: E402
from rows import Row  # noqa: E402
from suites import calls, dense, memory, relative, serving, small, sparse, triangle  # noqa: E402

REFERENCE = peers.flash_dmattn_func_auto("reference")
OURS, TILES, LISTS = "flash_dmattn", "flash_dmattn, tiles", "flash_dmattn, lists"
FORWARD, BACKWARD, BOTH = "forward", "backward", "forward + backward"


@pytest.fixture(autouse=True)
def threads():
    number = torch.get_num_threads()
    yield
    torch.set_num_threads(number)


@pytest.fixture
def models():
    pytest.importorskip("transformers")
    from suites import models

    return models


def measured(tmp_path, suite, *arguments, status=0):
    """The rows of a suite on the CPU."""
    path = tmp_path / "result.json"
    assert run.main([suite, "--device=cpu", *arguments, f"--json={path}"]) == status
    found = rows.read(path)
    for row in found:
        assert row.suite == suite and row.commit and row.environment["torch"] == torch.__version__
    return found


def missed(suite, workload, figures, figure="seconds"):
    """What --check says on CUDA; `figures` by direction and implementation, None for what was not measured."""
    found = [
        Row(suite, workload, "bfloat16", direction, name, {} if value is None else {figure: value})
        for direction, by_name in figures.items()
        for name, value in by_name.items()
    ]
    lines = failures(SUITES[suite].demands["cuda"], found)
    return [line.removeprefix(f"{workload}, bfloat16, ") for line in lines]


# Top-w masks and indices


def test_long_context(tmp_path):
    sizes = ("--seqlen=300", "--window=16", "--dtype=float32", "--implementation=flash_dmattn")
    found = measured(tmp_path, "sparse", *sizes, "--samples=1", "--sparse=lists")
    assert [row.direction for row in found] == ["topk", "key lists", FORWARD, BACKWARD]
    assert all(row.seconds > 0 and row.workload == "top-k mask, B1 H8/2 S300 D64 w16" for row in found)


def test_sparse_performance(tmp_path):
    found = measured(tmp_path, "sparse", "--shrink=32", "--samples=1", "--threads=1")
    taken = {(row.direction, row.implementation): row.seconds for row in found}
    names = (OURS, TILES, sparse.OURS_TOP_K)
    both = {(direction, name) for direction in (FORWARD, BACKWARD) for name in names}
    assert taken.keys() == {("topk", OURS), ("key lists", OURS)} | both
    assert all(seconds > 0 for seconds in taken.values())


@pytest.mark.parametrize("tile_rows", [1, 7])
def test_indices_name_what_the_last_row_of_each_tile_sees(tile_rows):
    problem = indexed("", 40, 8, 4, 2, 16, tile_rows=tile_rows)
    inputs = make_inputs(problem, torch.float32, "cpu", seed=0)
    last = [min(i // tile_rows * tile_rows + tile_rows, 40) - 1 for i in range(40)]
    expected = replace(inputs, mask=inputs.bool_mask()[:, :, last].tril()).attend(REFERENCE)[0]
    ours = peers.ours_indexed("cpu", inputs).forward()
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)
    random = indexed("", 40, 8, 4, 2, 16, tile_rows=tile_rows, at_random=True).indices(inputs.mask)
    assert all(row.unique().numel() == 8 for row in random.flatten(0, 2))


def test_cudnn_attends_to_all_keys(monkeypatch):
    monkeypatch.setattr(peers, "sdpa_kernel", lambda backend: contextlib.nullcontext())
    for lengths in ({}, {"seqlen_q": 1}):
        inputs = make_inputs(top_k("", 40, 8, 4, 2, 16, **lengths), torch.float32, "cpu", seed=0)
        everything = REFERENCE(inputs.query, inputs.key, inputs.value, is_causal=True)
        torch.testing.assert_close(peers.cudnn(inputs).forward(), everything, rtol=1e-4, atol=1e-5)
    first = REFERENCE(inputs.query, inputs.key[:, :8], inputs.value[:, :8])
    torch.testing.assert_close(peers.cudnn_of_window(inputs).forward(), first, rtol=1e-4, atol=1e-5)


# Relative biases


def test_relative_performance(tmp_path):
    found = measured(tmp_path, "relative", "--shrink=64", "--samples=1", "--threads=1")
    taken = {(row.direction, row.implementation) for row in found}
    names = (OURS, relative.NO_BIAS, relative.DENSE_BIAS, "SDPA")
    assert taken == {(direction, name) for direction in (FORWARD, BOTH, BACKWARD) for name in names}
    assert len(found) == 4 * 3 * len(names) and all(row.seconds > 0 for row in found)


def test_relative_biases_are_required_to_cost_little():
    figures = {FORWARD: {OURS: 1.1, relative.NO_BIAS: 1.0}, BACKWARD: {OURS: 1.3, relative.NO_BIAS: 1.0}}
    both = {BOTH: {OURS: 0.2, "FlexAttention": 1.0}}
    lines = missed("relative", "every distance, B2 H16 S4096 D64", figures | both)
    assert lines == [
        "backward: 1.3 x seconds of flash_dmattn, no bias, at most 1.2 x seconds of flash_dmattn, no bias is allowed"
    ]
    memory = {relative.MEMORY: {OURS: 65 * 2**20}}
    assert len(missed("relative", "every distance, B1 H16 S32768 D64", memory, "extra_bytes")) == 1


@pytest.mark.parametrize("kind", [relative.TABLE, relative.T5, relative.ALIBI, relative.IMAGE])
def test_implementations_of_relative_biases_compute_the_same(kind):
    problem = relative.workload("", 2, 4, 36, 16, kind=kind, is_causal=kind == relative.ALIBI)
    inputs = make_inputs(problem, torch.float32, "cpu", seed=0)
    parameters = problem.parameters("cpu")
    out = relative.ours(inputs, parameters).forward()
    for name in (relative.DENSE_BIAS, "SDPA", "FlexAttention"):
        other = relative.IMPLEMENTATIONS[name](inputs, parameters).forward()
        torch.testing.assert_close(out, other, rtol=1e-4, atol=1e-5)


# Small calls


def test_small_performance(tmp_path):
    found = measured(tmp_path, "small", "--workload=B1 H1 S16", "--dtype=float32", "--samples=3")
    workloads = [f"host time, B1 H1 S16 D16, {threads}" for threads in ("1 thread", "2 threads")]
    names = {(workload, direction) for direction in (FORWARD, BOTH) for workload in workloads}
    assert {(row.workload, row.direction) for row in found} == names and len(found) == 2 * len(names)
    assert all(min(row.figures.values()) > 0 for row in found)
    assert all(("over_sdpa" in row.figures) == (row.implementation == OURS) for row in found)


@pytest.mark.parametrize(("seconds", "status"), [(0.0, 0), (0.01, 1)])
def test_a_slow_small_call_is_missed(monkeypatch, capsys, seconds, status):
    right = small.flash_dmattn_func

    def slow(*args, **options):
        if seconds:  # even sleep(0) lets other processes run
            time.sleep(seconds)
        return right(*args, **options)

    monkeypatch.setattr(small, "flash_dmattn_func", slow)
    first = small.WORKLOADS[0]
    demands = [frame.Demand(first.name, FORWARD, 1 / 0.01, figure="over_sdpa")]
    suite = replace(small.SUITES["small"], workloads={"cpu": [first]}, demands={"cpu": demands})
    arguments = ["--device=cpu", "--dtype=float32", "--threads=1", "--samples=1", "--check"]
    assert frame.main(suite, arguments) == status
    assert ("over_sdpa: " in capsys.readouterr().out) == bool(status)


# Triangle attention


def test_triangle_performance(tmp_path, capsys):
    found = measured(tmp_path, "triangle", "--workload=B2 N256", "--shrink=32", "--samples=2", "--threads=1")
    timed = {(row.implementation, row.direction) for row in found if row.seconds is not None}
    names = ("triangle_attention", "plain batch", "SDPA")
    assert timed >= {(name, direction) for name in names for direction in (FORWARD, BACKWARD, BOTH)}
    assert "B2 N8 H4 S8 D32" in capsys.readouterr().out


def test_triangles_do_the_same_work():
    """One batch element, where the plain batch has the same bias."""
    inputs = triangle.make_inputs(triangle.Workload(1, 3, 12, heads=2, head_dim=8), torch.float64, "cpu", 0)
    results = []
    for build in (triangle.ours, triangle.plain_batch, triangle.sdpa):
        operation = build(inputs)
        out = operation.forward()
        results.append([out, *torch.autograd.grad(out, operation.leaves, inputs.dout)])
    for others in results[1:]:
        for x, y in zip(results[0], others):
            torch.testing.assert_close(x, y.view_as(x))


# Whole calls


@pytest.mark.parametrize("suite", ["prefill", "decode", "host", "selection"])
def test_call_performance(tmp_path, suite):
    found = measured(tmp_path, suite, "--shrink=64", "--samples=1", "--threads=1")
    taken = {(row.direction, row.implementation) for row in found}
    by_hand = {f"top-k by hand: {taking}, {way}" for taking in ("gather", "index_select") for way in ("rows", "groups")}
    decoding = {OURS, TILES, LISTS, calls.CACHE, calls.QUARTER, *by_hand}
    decoding |= {f"SDPA, all keys: {way}" for way in ("rows", "groups")}
    steps = ("", ", topk", ", key lists", ", without a graph")
    assert (
        taken
        == {
            "prefill": {(direction, name) for direction in (FORWARD, BOTH) for name in (OURS, TILES, LISTS)},
            "decode": {(FORWARD, name) for name in decoding},
            "host": {("host time", OURS), ("host time", "SDPA")},
            "selection": {("selection", f"{OURS}{step}") for step in steps},
        }[suite]
    )
    assert all(row.seconds > 0 for row in found)
    assert suite != "host" or len(found) == 2 * 6 + 1


def test_calls_do_the_same_work_by_hand():
    inputs = make_inputs(calls.one_row(3, 100, 8, 4, 2, 16), torch.float32, "cpu", seed=0)
    ours = peers.whole_call(REFERENCE, inputs).forward()
    torch.testing.assert_close(inputs.attend(REFERENCE)[0], ours)
    everything = REFERENCE(inputs.query, inputs.key, inputs.value)
    for kernel in peers.ROW_KERNELS["cpu"]:
        torch.testing.assert_close(peers.dense(inputs, kernel)(), everything, rtol=1e-4, atol=1e-5)
        for taking in peers.TAKES:
            torch.testing.assert_close(peers.by_hand(inputs, taking, kernel)(), ours, rtol=1e-4, atol=1e-5)


def test_small_calls_do_the_same_work():
    for case in calls.SMALL_CALLS:
        inputs = make_inputs(case.problem, torch.float32, "cpu", seed=0)
        for name in case.trained:
            inputs.leaves()[name].requires_grad_()
        operations = peers.whole_call(REFERENCE, inputs), peers.sdpa_in_its_layout(inputs)
        assert len(operations[0].leaves) == len(operations[1].leaves) == len(case.trained)
        if case.problem.window is not None:
            continue  # SDPA has no window
        ours, theirs = operations[0].forward().transpose(1, 2), operations[1].forward()
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
        if case.trained:
            dout = inputs.dout.transpose(1, 2)
            gradients = zip(*(torch.autograd.grad(out, x.leaves, dout) for out, x in zip((ours, theirs), operations)))
            for name, (mine, its) in zip(case.trained, gradients):
                its = its if name == "bias" else its.transpose(1, 2)
                torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-5)


def test_a_cache_that_fills_up(monkeypatch):
    def attention(query, key, value, mask, bias, *, cache_seqlens=None, **options):
        length = key.shape[1] if cache_seqlens is None else int(cache_seqlens[0])
        assert cache_seqlens is None or cache_seqlens.dtype == torch.int32
        return REFERENCE(query, key[:, :length], value[:, :length], mask, bias[..., :length], **options)

    def deaf(*tensors, cache_seqlens=None, **options):
        return REFERENCE(*tensors, **options)

    assert peers.takes_lengths(attention) and not peers.takes_lengths(lambda query, key: None)
    problem = calls.one_row(2, 100, 8, 4, 2, 16)
    inputs = make_inputs(problem, torch.float32, "cpu", seed=0)
    out = peers.from_cache(attention, inputs, 4, "cpu")()
    torch.testing.assert_close(out, peers.whole_call(REFERENCE, peers.filled(inputs, 25)).forward())
    with pytest.raises(AssertionError):
        peers.from_cache(deaf, inputs, 1, "cpu")
    monkeypatch.setattr(calls, "flash_dmattn_func", attention)
    found = calls.decode(problem, Setting("decode", "cpu", "float32", samples=1))
    assert {calls.CACHE, calls.QUARTER} <= {row.implementation for row in found if row.seconds}


def test_what_fails_says_so_and_the_rest_goes_on(monkeypatch, tmp_path, capsys):
    right = calls.flash_dmattn_func

    def no_lists(*tensors, sparse="auto", **options):
        if sparse == "lists":
            raise KeyError("no [lists] today")
        return right(*tensors, sparse=sparse, **options)

    def no_memory(*arguments, **options):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried")

    monkeypatch.setattr(calls.KeyIntervalMask, "topk", no_memory)
    tiny = ("--shrink=64", "--samples=1", "--threads=1")
    measured(tmp_path, "selection", *tiny, status=1)
    assert "no memory" in capsys.readouterr().out
    monkeypatch.undo()
    monkeypatch.setattr(calls, "flash_dmattn_func", no_lists)
    found = measured(tmp_path, "prefill", *tiny, "--workload=w256", status=1)
    out = capsys.readouterr().out
    assert "refused" in out and "no [lists] today" in out
    assert {row.implementation: row.seconds is None for row in found} == {OURS: False, TILES: False, LISTS: True}


# Caches


def test_serving(tmp_path):
    found = measured(tmp_path, "serving", "--shrink=32", "--samples=1", "--threads=1")
    names = {}
    for row in found:
        names.setdefault(row.workload.partition(", B")[0], set()).add(row.implementation.partition(": ")[0])
    ours = {OURS, serving.CONTIGUOUS, serving.INVARIANT}
    assert names == {
        "decode": ours | {"top-k by hand"},
        "decode, all keys": ours | {"SDPA, all keys"},
        "chunk": ours | {serving.WHOLE},
        "mixed, 1 chunk": ours,
    }
    assert all(row.seconds > 0 and not row.refusal for row in found)


@pytest.mark.parametrize("case", serving.WORKLOADS["cpu"], ids=lambda case: case.name)
def test_all_ways_over_a_cache_compute_the_same(case):
    case = case.shrunk(32)
    inputs = make_inputs(case.problem, torch.float32, "cpu", seed=0)
    cache = serving.Cache(inputs, case.rows)
    out = cache.of_rows(peers.whole_call(REFERENCE, replace(inputs, mask=None)).forward())
    close = partial(torch.testing.assert_close, expected=out, rtol=1e-4, atol=1e-5)
    close(cache.ours()())
    close(cache.ours(batch_invariant=True)())
    close(replace(cache, page_size=None).ours()())
    close(replace(cache, page_size=16, seed=1).ours()())
    if case.problem.seqlen_q == 1:
        by_hand = serving.by_hand if case.problem.window else serving.dense_by_hand
        for kernel in peers.ROW_KERNELS["cpu"]:
            close(by_hand(cache, kernel)())


def test_a_chunk_is_compared_with_its_part_of_a_prefill(monkeypatch):
    """Rows 0 to 9 of 10 with w 4 see 1 + 2 + 3 + 7 * 4 keys, the last 5 of them 20."""
    case = serving.serving("chunk", 1, 5, 10, 4, 2, 1, 8)
    monkeypatch.setattr(
        Setting, "time", lambda self, name, direction, makers: [self.row(name, direction, *makers, seconds=3.4)]
    )
    (row,) = serving.part_of_prefill(case, Setting("serving", "cpu", "float32"))
    assert row.seconds == pytest.approx(3.4 * 20 / 34)


def test_what_check_requires_of_serving():
    row = partial(missed, "serving", serving.DECODE1)
    figures = {OURS: 20e-6, serving.CONTIGUOUS: 19.5e-6, serving.INVARIANT: 22e-6}
    assert row({FORWARD: figures}) == []
    slow = row({FORWARD: {OURS: 30e-6, serving.CONTIGUOUS: 21e-6, serving.INVARIANT: 45e-6}})
    assert slow == [
        "forward: 0.021 ms, at most 0.02 ms is allowed",
        too_long(FORWARD, 1.43, 1.05, serving.CONTIGUOUS),
        too_long(FORWARD, 1.5, 1.15, OURS),
    ]
    dense_row = partial(missed, "serving", serving.ALL_KEYS)
    seconds = serving.least_bytes(serving.WORKLOADS["cuda"][3].problem) / 4.3e12
    assert dense_row({FORWARD: {OURS: seconds / 0.81, serving.INVARIANT: seconds}}) == []
    assert len(dense_row({FORWARD: {OURS: seconds / 0.79, serving.INVARIANT: seconds}})) == 1
    chunk = {FORWARD: {OURS: 1.2, serving.INVARIANT: 1.0, serving.WHOLE: 1.0}}
    assert missed("serving", serving.CHUNK, chunk) == [too_long(FORWARD, 1.2, 1.15, serving.WHOLE)]


# Models


def test_models_performance(models, tmp_path):
    tiny = ("--shrink=128", "--samples=1", "--threads=1")
    for suite, workloads in (("train", 2), ("attention", 3)):
        found = measured(tmp_path, suite, *tiny)
        assert len(found) == 3 * workloads and found[0].environment["transformers"]
        assert all(row.seconds > 0 and not row.refusal for row in found)
        for first in found[::3] if suite == "train" else ():
            losses = [row.get("loss") for row in found if row.workload == first.workload]
            assert losses == pytest.approx([losses[2]] * 3, rel=1e-3)
    found = measured(tmp_path, "generate", *tiny, "--workload=B1 Sk8192")
    assert len(found) == 2 * 3 * 2 and all(row.get("tokens_per_second") > 0 for row in found)
    assert {"static cache", "dynamic cache"} == {row.workload.rpartition(", ")[2] for row in found}


def test_generate_batch(models, tmp_path):
    pytest.importorskip("psutil")
    found = measured(tmp_path, "generate_batch", "--shrink=128", "--threads=1")
    assert [row.implementation for row in found] == [OURS, "SDPA, all keys"]
    assert all(row.get("tokens_per_second") > 0 and not row.refusal for row in found)


def test_dense_doge_serves_the_tokens_of_all_keys(models):
    """With a window of all keys and zero biases the dynamic mask masks nothing, and adds the same to all scores."""
    from suites import batches

    requests = batches.WORKLOADS[0].shrunk(128)
    requests = replace(requests, model=replace(requests.model, window=1000))
    model = models.model_of(requests.model, Setting("generate_batch", "cpu", "float32")).eval()
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.self_attn.A)
    options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
    tokens = []
    for one in (models.use(model, OURS), batches.with_all_keys(model)):
        generation = batches.GenerationConfig(**options)
        results = one.generate_batch(requests.prompts(0), generation, requests.config())
        tokens.append([result.generated_tokens for result in results.values()])
    assert tokens[0] == tokens[1] and all(map(len, tokens[0]))


def test_what_fails_in_a_model_says_so(models, monkeypatch, tmp_path, capsys):
    def use(model, implementation):
        raise RuntimeError(f"no [{implementation}] today")

    monkeypatch.setattr(models, "use", use)
    tiny = ("--shrink=128", "--samples=1", "--threads=1", "--workload=Doge")
    measured(tmp_path, "train", *tiny, status=1)
    assert "no [flash_dmattn] today" in capsys.readouterr().out
    measured(tmp_path, "train", *tiny, "--implementation=SDPA")


# Memory


def test_memory(tmp_path):
    path = tmp_path / "result.json"
    sizes = ("--device=cpu", "--seqlen=1024", "--heads=2", "--backend=cpu", "--check", f"--json={path}")
    done = run_script("benchmarks/run.py", "memory", *sizes)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {row.workload: row for row in rows.read(path)}
    names = ["causal, key bias, B1 H2 S1024 D64", "bool mask [B,H,S,S], causal, key bias, B1 H2 S1024 D64"]
    assert list(found) == names
    elements = 1024 * 2 * 64
    for row in found.values():
        # out, dq, dk and dv at least; all scores would be 8 MiB more for every copy of them.
        assert row.implementation == OURS and 2 <= row.get("peak_bytes") / 2**20 < 32
        # out, dq, dk, dv, lse and dbias
        results = row.get("peak_bytes") - row.get("extra_bytes")
        assert results == pytest.approx(4 * 4 * elements + 2 * 4 * 1024 * 2)
        assert row.get("extra_bytes_per_element") == row.get("extra_bytes") / elements
    too_much = [replace(row, figures={"peak_bytes": 601 * 2**20}) for row in found.values()]
    assert len(failures(memory.DEMANDS, too_much)) == 2


# What --check requires

SUITES = {
    name: suite
    for module in (calls, dense, relative, serving, sparse, triangle)
    for name, suite in module.SUITES.items()
}
ALL_KEYS, S_TIMES_W = "cuDNN, all keys", "cuDNN, dense S x w"


def long(forward, lists, cudnn=4.0):
    both = {OURS: forward, ALL_KEYS: cudnn}
    return {"topk": {OURS: 2e-3}, "key lists": {OURS: lists}, FORWARD: both, BACKWARD: both}


def beside_products(topk, forward, backward):
    taken, peer = {FORWARD: forward, BACKWARD: backward}, {S_TIMES_W: 1.0, "FlexAttention": 100.0}
    return {"topk": {OURS: topk}} | {direction: {OURS: seconds} | peer for direction, seconds in taken.items()}


def prefill(auto, tiles, lists, cudnn):
    return {FORWARD: {OURS: auto, TILES: tiles, LISTS: lists, ALL_KEYS: cudnn}}


def decode(auto):
    by_hand = {"gather": 3.0, "index": 2.0, "math": None}
    ways = {f"top-k by hand: {name}": seconds for name, seconds in by_hand.items()}
    return {FORWARD: {OURS: auto, "SDPA, all keys: flash": 1.0} | ways}


def step(ours, **peers):
    return {"training step": {OURS: ours} | peers}


def too_long(what, taken, at_most, peer):
    of = f"x seconds of {peer}"
    return f"{what}: {taken} {of}, at most {at_most} {of} is allowed"


def test_what_check_requires_of_sparse_attention():
    def check(workload, figures):
        return [line for line in missed("sparse", workload, figures) if "peak_over_tensors" not in line]

    assert check(sparse.S131K, long(0.1, 0.005)) == []
    slow = [too_long(FORWARD, 0.125, 0.0455, ALL_KEYS), too_long(BACKWARD, 0.125, 0.0556, ALL_KEYS)]
    assert check(sparse.S131K, long(0.5, 0.005)) == slow
    assert check(sparse.S131K, long(0.1, 0.02)) == [too_long("key lists", 0.2, 0.1, f"{OURS} (forward)")]
    assert len(check(sparse.S131K, long(None, 0.005))) == 3
    for times, lines in ((2.5, []), (3.1, ["forward + backward, peak_over_tensors: 3.1, at most 3 is allowed"])):
        assert missed("sparse", sparse.S131K, {BOTH: {OURS: times}}, "peak_over_tensors") == lines


def test_what_check_requires_beside_as_many_products():
    check = partial(missed, "sparse", sparse.S8K)
    assert check(beside_products(0.3, 1.2, 1.5)) == []
    slow = [too_long("topk and forward", 1.7, 1.6, S_TIMES_W), too_long(BACKWARD, 1.7, 1.6, S_TIMES_W)]
    assert check(beside_products(0.5, 1.2, 1.7)) == slow


@pytest.mark.parametrize(("ours", "plain", "count"), [(1.0, 1.0, 0), (1.1, 1.0, 1), (1.0, None, 1), (None, 1.0, 1)])
def test_rows_that_cost_something_are_missed(ours, plain, count):
    assert len(missed("triangle", "B2 N3", {BOTH: {triangle.OURS: ours, triangle.PLAIN: plain}})) == count


def test_what_check_requires_of_calls():
    of_2k = partial(missed, "prefill", "B1 H32/8 S2048 D128 w512")
    assert of_2k(prefill(1.9, 1.8, 2.5, 1.0)) == []
    slow = [too_long(FORWARD, 2.1, 2, ALL_KEYS), too_long(FORWARD, 1.17, 1.1, LISTS)]
    assert of_2k(prefill(2.1, 1.9, 1.8, 1.0)) == slow
    assert len(of_2k(prefill(1.0, 1.0, 1.0, None))) == 1
    assert len(of_2k(prefill(None, 1.0, 1.0, 1.0))) == 2
    assert missed("prefill", "B1 H32/8 S16384 D128 w2048", prefill(1.0, 2.0, 1.0, 0.1)) == []
    row = partial(missed, "decode", "B1 H32/8 Sk131072 D128 w2048")
    assert row(decode(1.0)) == []
    hand, dense_way = "top-k by hand: index", "SDPA, all keys: flash"
    assert row(decode(1.3)) == [too_long(FORWARD, 0.65, 0.6, hand), too_long(FORWARD, 1.3, 1, dense_way)]
    host = partial(missed, "host", "forward, key bias and window_size")
    assert host({"host time": {OURS: 99e-6, "SDPA": 1e-6}}) == []
    assert host({"host time": {OURS: 101e-6}}) == ["host time: 0.101 ms, at most 0.1 ms is allowed"]
    assert len(missed("selection", "B1 H8 S8192 D8 w2048", {"selection": {calls.TOPK: 1e-6}})) == 1


def test_what_check_requires_of_models(models, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "SUITES", SUITES | models.SUITES)

    def check(suite, workload, figures, figure="seconds"):
        return [line for line in missed(suite, workload.name, figures, figure) if f"{figure} of" in line]

    doge, t5 = (partial(check, "train", workload) for workload in models.TRAIN)
    assert doge(step(1.9, SDPA=10.0, eager=1.0)) == []
    assert doge(step(2.1, SDPA=10.0)) == [too_long("training step", 0.21, 0.2, "SDPA")]
    assert len(doge(step(2.6, SDPA=10.0), "peak_bytes")) == 1
    assert t5(step(5.9, SDPA=20.0, eager=10.0), "peak_bytes") == []
    assert len(t5(step(6.1, SDPA=20.0, eager=10.0), "peak_bytes")) == 1
    assert t5(step(1.0, SDPA=None, eager=1.0)) == []  # a peer that had no memory
    assert len(t5(step(None, SDPA=1.0, eager=1.0))) == 1
    assert len(check("attention", models.ATTENTION[0], {BOTH: {OURS: 0.6, "SDPA": 1.0, "eager": 2.0}})) == 1


def test_check_requires_what_is_measured(models):
    for suite in (SUITES | models.SUITES).values():
        for device, demands in suite.demands.items():
            names = [workload.name for workload in suite.workloads[device]]
            for demand in demands:
                assert any(name.startswith(demand.workload) for name in names)
                assert not suite.implementations or {*demand.peers} <= {*suite.implementations}
