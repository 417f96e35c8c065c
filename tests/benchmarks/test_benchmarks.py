"""benchmarks/: the frame, the comparison with float64, the dense suite, the result file, its tables and its picture."""

import importlib
import json
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from programs import ROOT, run_script

pytest.importorskip("rich")
pytest.importorskip("matplotlib")
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "scripts")]

import draw  # noqa: E402
import frame  # noqa: E402
import limit  # noqa: E402
import peers  # noqa: E402
import problem as problems  # noqa: E402
import report  # noqa: E402
import rows  # noqa: E402
import run  # noqa: E402
import write_tables  # noqa: E402
from frame import Demand, failures  # noqa: E402
from suites import MODULES, dense, equivalence, sparse  # noqa: E402

from flash_dmattn import flash_dmattn_func, flash_dmattn_varlen_func  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "h200.json"


@pytest.fixture(autouse=True)
def threads():
    number = torch.get_num_threads()
    yield
    torch.set_num_threads(number)


def assert_says_where(environment, commit):
    assert commit and environment["device"] and environment["torch"] == torch.__version__
    assert {"flash_dmattn", "threads", "python", "triton"} <= environment.keys()


def test_the_commit_of_a_copy_without_git(monkeypatch):
    monkeypatch.setenv("FLASH_DMATTN_COMMIT", "1234abc")
    assert "commit 1234abc" in report.describe(report.environment("cpu"))


@pytest.mark.parametrize("suite", MODULES)
def test_help(suite, capsys):
    if MODULES[suite][0] == "models":
        pytest.importorskip("transformers")
    with pytest.raises(SystemExit) as exit:
        run.main([suite, "--help"])
    out = capsys.readouterr().out
    assert exit.value.code == 0 and "--device" in out and "--json" in out


def test_the_suites_are_listed(capsys):
    assert run.main([]) == 0
    out = capsys.readouterr().out
    assert all(f"\n    {suite} " in out for suite in MODULES)
    assert run.main(["no such"]) == 2 and "there is no suite 'no such'" in capsys.readouterr().err


# Equivalence


@pytest.mark.parametrize(
    ("way", "outputs"), [("forward", {"out", "lse"}), ("backward", {"out", "lse", "dq", "dk", "dv", "dbias"})]
)
def test_equivalence(tmp_path, way, outputs):
    path = tmp_path / "result.json"
    chosen = ("--device=cpu", "--backend=cpu", "--size=small", "--config=softcap, ", "--jobs=2")
    done = run_script(f"benchmarks/{way}_equivalence.py", *chosen, f"--json={path}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 PASS, 0 MISS, 0 not supported" in done.stdout
    content = json.loads(path.read_text())
    assert_says_where(content["environment"], content["environment"]["commit"])
    assert (content["dtype"], content["size"]) == ("float32", "small")
    configurations = ["softcap, causal, key bias", "softcap, mask, dense bias"]
    assert [outcome["config"] for outcome in content["outcomes"]] == configurations
    for outcome in content["outcomes"]:
        assert (outcome["backend"], outcome["verdict"]) == ("cpu", "PASS") and set(outcome["outputs"]) == outputs
        assert all(0 <= output["ratio"] <= 1 for output in outcome["outputs"].values())


@pytest.mark.parametrize("size", ["small", "full"])
def test_the_names_of_configurations_are_unique(size):
    names = [problem.name for problem in equivalence.configurations(size)]
    assert len(set(names)) == len(names)


def test_the_reference_itself_passes_everything(capsys):
    arguments = ["--device=cpu", "--backend=reference", "--size=small", "--dtype=bfloat16"]
    assert equivalence.main(arguments) == 0
    assert " 0 MISS, 0 not supported" in capsys.readouterr().out


def plant(monkeypatch, wrong):
    """Puts `wrong(out, lse)` in the place of every backend but the reference."""
    right = equivalence.flash_dmattn_func_auto

    def function_of(backend):
        attention = right("reference")
        return attention if backend == "reference" else lambda *args, **options: wrong(*attention(*args, **options))

    monkeypatch.setattr(equivalence, "flash_dmattn_func_auto", function_of)


def compare(way, config, *arguments):
    chosen = ["--device=cpu", "--backend=cpu", "--size=small", f"--direction={way}", f"--config={config}"]
    return equivalence.main([*chosen, *arguments])


def refuse(out, lse):
    raise ValueError("no [such] thing is supported")


@pytest.mark.parametrize(
    ("wrong", "status", "text"),
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
def test_a_wrong_forward_is_a_miss(monkeypatch, capsys, wrong, status, text):
    plant(monkeypatch, wrong)
    assert compare("forward", "rows see nothing") == status
    printed = capsys.readouterr().out
    assert text in printed and ("nothing was compared" in printed) == (wrong is refuse)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (lambda out, lse: (out, lse.detach()), "MISS d"),
        (lambda out, lse: (out + 1e-3 * (out - out.detach()), lse), "MISS d"),
        (lambda out, lse: (out + torch.nan * (out - out.detach()), lse), "MISS"),
    ],
)
def test_a_wrong_gradient_is_a_miss(monkeypatch, capsys, wrong, text):
    plant(monkeypatch, wrong)
    assert compare("backward", "square, causal, key bias") == 1
    assert text in capsys.readouterr().out


def test_one_miss_is_enough(monkeypatch, tmp_path):
    plant(monkeypatch, lambda out, lse: (out + (torch.nan if lse.shape[-1] == 1 else 0), lse))
    path = tmp_path / "result.json"
    assert compare("forward", "one", f"--json={path}") == 1
    verdicts = {outcome["config"]: outcome["verdict"] for outcome in json.loads(path.read_text())["outcomes"]}
    assert (verdicts["one key"], verdicts["one row"]) == ("PASS", "MISS")


def test_inputs_lie_in_poisoned_memory():
    for tensor in (torch.randn(2, 3, 1, 8), torch.rand(2, 1, 3, 5) < 0.5):
        inside = problems.surrounded(tensor)
        assert torch.equal(inside, tensor)
        around = torch.as_strided(inside, (inside.storage_offset(),), (1,), 0)
        assert (around if tensor.dtype == torch.bool else around.isnan()).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config=no such thing"], "no configuration has 'no such thing' in its name"),
        (["--json=no/such/folder/result.json"], "there is no folder no/such/folder"),
        (["--backend=fast"], "invalid choice: 'fast'"),
    ],
)
def test_bad_arguments_end_with_a_message(capsys, arguments, message):
    with pytest.raises(SystemExit) as exit:
        equivalence.main(["--device=cpu", *arguments])
    assert exit.value.code == 2
    assert message in capsys.readouterr().err


# Dense attention


@pytest.mark.parametrize(
    ("way", "directions"), [("forward", {"forward"}), ("backward", {"backward", "forward + backward"})]
)
def test_performance(tmp_path, way, directions):
    path, picture = tmp_path / "result.json", tmp_path / "result.png"
    tiny = ("--device=cpu", "--shrink=32", "--samples=2", "--threads=1", f"--json={path}", f"--plot={picture}")
    names = {"flash_dmattn", "SDPA", "FlexAttention"}
    done = run_script(f"benchmarks/{way}_performance.py", *tiny, *(f"--implementation={name}" for name in names))
    assert done.returncode == 0, done.stdout + done.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")
    found = rows.read(path)
    assert_says_where(found[0].environment, found[0].commit)
    assert {row.direction for row in found} == directions
    assert {row.dtype for row in found} == {"float32", "bfloat16"}
    assert {row.implementation for row in found} == names
    assert len(found) == 3 * 2 * 3 * len(directions)
    for row in found:
        # FlexAttention has no backward on the CPU: shown as such, and not fatal.
        refused = row.implementation == "FlexAttention" and way == "backward"
        assert (row.seconds is None) == refused == bool(row.refusal)


def test_the_peers_do_the_same_work():
    small = [one for one in sparse.WORKLOADS["cuda"] if min(one.seqlen_q, one.seqlen_k) <= 8192]
    for problem in dense.WORKLOADS["cpu"] + dense.WORKLOADS["cuda"] + small:
        problem = replace(problems.shrunk(problem, 64), batch=min(problem.batch, 2))
        packs_documents = problem.packed and problem.intervals is not None
        inputs = problems.make_inputs(problem, torch.float32, "cpu", seed=0)
        expected = peers.ours("reference", inputs).forward()
        # A row that sees nothing is NaN in SDPA.
        sees = torch.isfinite(inputs.attend(peers.flash_dmattn_func_auto("reference"))[1]).transpose(1, 2)
        for name, build in peers.PEERS.items():
            is_plain = inputs.mask is None and inputs.bias is None
            if name == "FlashAttention-4" and packs_documents:
                continue  # it takes their boundaries
            if name in ("FlashAttention-2", "FlashAttention-4", "cuDNN") and not is_plain:
                with pytest.raises(ValueError, match=f"{name} is compared without mask and bias"):
                    build(inputs)
                continue
            if name in ("FlashAttention-4", "cuDNN"):
                continue  # no such kernel on the CPU
            torch.testing.assert_close(build(inputs).forward()[sees], expected[sees], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("returns_lse", [False, True])
def test_flash_attention_4_is_called_with_its_arguments(monkeypatch, returns_lse):
    """flash_attn.cute of flash-attn-4, as this library computes it."""

    def result(out, lse):
        return (out, lse) if returns_lse else out

    def fixed(q, k, v, softmax_scale=None, causal=False):
        return result(*flash_dmattn_func(q, k, v, softmax_scale=softmax_scale, is_causal=causal, return_lse=True))

    def varlen(q, k, v, *, causal=False, **lengths):
        return result(*flash_dmattn_varlen_func(q, k, v, is_causal=causal, return_lse=True, **lengths))

    cute = SimpleNamespace(flash_attn_func=fixed, flash_attn_varlen_func=varlen)
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace(cute=cute))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", cute)
    packed = {"is_causal": True, "packed": True}
    for options in ({}, {"is_causal": True}, packed, {**packed, "max_seqlen": 100}):
        problem = problems.square("", 2, 4, 64, 32, kv_heads=2, **options)
        inputs = problems.make_inputs(problem, torch.float32, "cpu", seed=0)
        expected = peers.ours("reference", inputs).forward()
        torch.testing.assert_close(peers.PEERS[peers.FLASH4](inputs).forward(), expected, rtol=1e-4, atol=1e-4)


def test_the_limit_counts_what_is_visible():
    problem = problems.square("", 2, 4, 64, 32, kv_heads=2, mask="B 1 1 Sk", mask_values=lambda x: x * 0 == 0)
    inputs = problems.make_inputs(problem, torch.bfloat16, "cpu", seed=0)
    moved = 2 * 2 * 64 * 4 * 32 * 2 + 2 * 2 * 64 * 2 * 32 * 2 + 2 * 64 + 4 * 2 * 4 * 64
    assert limit.least_seconds("forward", inputs) == pytest.approx(moved / limit.PEAK_BYTES)
    half = replace(inputs, mask=(torch.arange(64) < 32).expand(2, 1, 1, 64).contiguous())
    moved -= 2 * 64 * 2 * 32 * 2
    assert limit.least_seconds("forward", half) == pytest.approx(moved / limit.PEAK_BYTES)


def test_the_limit_counts_intervals_as_it_counts_scores():
    for lengths in ({}, {"seqlen_q": 1}, {"seqlen_q": 150, "bias": "B H 1 Sk"}):
        problem = problems.top_k("", 100, 8, 4, 2, 32, **lengths)
        inputs = problems.make_inputs(problem, torch.float32, "cpu", seed=0)
        dense_mask = replace(inputs, mask=inputs.bool_mask())
        assert torch.equal(limit.rows_that_see(inputs), limit.rows_that_see(dense_mask))
    for is_causal in (False, True):
        problem = problems.square("", 2, 4, 50, 8, seqlen_q=70, is_causal=is_causal)
        inputs = problems.make_inputs(problem, torch.float32, "cpu", seed=0)
        everything = torch.ones(1, 1, 70, 50, dtype=torch.bool)
        assert torch.equal(limit.rows_that_see(inputs), limit.rows_that_see(replace(inputs, mask=everything)))


@pytest.mark.parametrize(
    "workload",
    ["causal, sliding", "causal, doc", "causal, packed seq", "causal, packed doc", "causal, max", "causal, B1 H16/4"],
)
def test_what_a_long_workload_computes(workload):
    """Made small: flash_dmattn and SDPA agree, and the limit counts the same scores."""
    problem = next(problem for problem in dense.WORKLOADS["cuda"] if problem.name.startswith(workload))
    batch = 1 if problem.packed and problem.intervals else 3  # documents are packed in one batch element
    problem = replace(problems.shrunk(problem, 16), batch=batch, head_dim=8)
    inputs = problems.make_inputs(problem, torch.float64, "cpu", seed=0)
    torch.testing.assert_close(peers.ours("cpu", inputs).forward(), peers.sdpa(inputs).forward())
    counted = limit.rows_that_see(inputs)
    seen = limit.rows_that_see(replace(inputs, mask=inputs.bool_mask()))
    assert torch.equal(counted.expand_as(seen), seen)


# --check


def test_check_fails_what_is_too_slow(capsys):
    small = [problems.shrunk(one, 32) for one in dense.WORKLOADS["cpu"]]
    arguments = ["--device=cpu", "--dtype=float32", "--direction=forward", "--samples=1", "--threads=1", "--check"]

    def suite(at_most):
        demand = Demand(dense.CHECKED, "forward", at_most, ("SDPA",))
        return replace(dense.SUITES["dense"], workloads={"cpu": small}, demands={"cpu": [demand]})

    for at_most, status in ((1e9, 0), (1e-6, 1)):
        assert frame.main(suite(at_most), [*arguments, "--workload=random"]) == status
    assert "x seconds of SDPA, at most 1e-06 x seconds of SDPA is allowed" in capsys.readouterr().out
    assert frame.main(suite(1e9), [*arguments, "--workload=causal"]) == 1
    assert f"nothing was run of '{dense.CHECKED}'" in capsys.readouterr().out
    for wrong in ("--implementation=FlexAttention", "--shrink=2"):
        with pytest.raises(SystemExit):
            frame.main(suite(1e9), [*arguments, "--workload=random", wrong])


def test_a_demand_on_another_backend_is_checked_for_it():
    row = rows.Row("dense", "one", "float32", "forward", "flash_dmattn, triton", {"seconds": 2.0})
    assert failures([Demand("", "forward", 3.0)], [row], "flash_dmattn, triton") == []
    assert "not measured" in failures([Demand("", "forward", 3.0)], [row])[0]


# The result file and its tables


def test_rows_survive_the_file(tmp_path):
    where = {"device": "GPU", "commit": "abc"}
    figures = {"seconds": 0.1, "sent_bytes": [1, 3], "ratio": float("inf")}
    found = rows.stamped([rows.Row("suite", "work", "float32", "forward", name, figures) for name in "ab"], where)
    rows.write(tmp_path / "a.json", found)
    assert json.loads((tmp_path / "a.json").read_text())["environments"] == [{"device": "GPU"}]
    again = rows.read(tmp_path / "a.json")
    assert [row.key for row in again] == [row.key for row in found] and again[0].commit == "abc"
    assert again[0].get("sent_bytes") == 3 and again[0].figures["ratio"] == "inf"


def test_update_replaces_rows_of_the_same_key(tmp_path, monkeypatch):
    monkeypatch.setenv("FLASH_DMATTN_COMMIT", "1234abc")
    path = tmp_path / "kept.json"
    small = problems.shrunk(dense.WORKLOADS["cpu"][1], 32)
    name, of = small.name, ("float32", "forward", "SDPA", {"seconds": 5.0}, "", "old")
    rows.write(path, [rows.Row("dense", name, *of), rows.Row("dense", "another", *of)])
    suite = replace(dense.SUITES["dense"], workloads={"cpu": [small]})
    arguments = ["--device=cpu", "--dtype=float32", "--direction=forward", "--samples=1", f"--update={path}"]
    assert frame.main(suite, arguments) == 0
    found = {(row.workload, row.implementation): row for row in rows.read(path)}
    assert list(found) == [(name, "SDPA"), (name, "flash_dmattn"), ("another", "SDPA")]
    assert found["another", "SDPA"].commit == "old" and found[name, "SDPA"].commit == "1234abc"
    with pytest.raises(SystemExit):
        frame.main(suite, [*arguments, "--shrink=2"])


def test_update_makes_a_file(tmp_path, monkeypatch):
    monkeypatch.setenv("FLASH_DMATTN_COMMIT", "1234abc")
    path = tmp_path / "new.json"
    small = problems.shrunk(dense.WORKLOADS["cpu"][1], 32)
    suite = replace(dense.SUITES["dense"], workloads={"cpu": [small]})
    arguments = ["--device=cpu", "--dtype=float32", "--direction=forward", "--samples=1", f"--update={path}"]
    assert frame.main(suite, arguments) == 0
    assert {row.workload for row in rows.read(path)} == {small.name}


@pytest.mark.parametrize("content", ["", "{}", '{"environments": [], "rows": [{}]}', "[1]"])
def test_update_keeps_a_file_that_holds_no_rows(tmp_path, capsys, content):
    path = tmp_path / "notes.txt"
    path.write_text(content)
    with pytest.raises(SystemExit):
        frame.main(dense.SUITES["dense"], ["--device=cpu", f"--update={path}"])
    assert f"{path} holds no rows of --json or --update" in capsys.readouterr().err
    assert path.read_text() == content


def test_figures_survive_the_end_of_the_process(tmp_path, monkeypatch):
    monkeypatch.setenv("FLASH_DMATTN_COMMIT", "1234abc")
    path = tmp_path / "kept.json"
    measure, names = dense.SUITES["dense"].measure, []

    def killed_in_the_second(workload, setting):
        names.append(workload.name)
        if len(names) == 2:
            raise KeyboardInterrupt
        return measure(workload, setting)

    workloads = [problems.shrunk(workload, 32) for workload in dense.WORKLOADS["cpu"][:2]]
    suite = replace(dense.SUITES["dense"], workloads={"cpu": workloads}, measure=killed_in_the_second)
    with pytest.raises(KeyboardInterrupt):
        frame.main(suite, ["--device=cpu", "--dtype=float32", "--samples=1", f"--update={path}"])
    assert {row.workload for row in rows.read(path)} == {names[0]}


def test_update_takes_no_figures_of_changed_files(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FLASH_DMATTN_COMMIT", f"1234abc{report.CHANGES}")
    with pytest.raises(SystemExit):
        frame.main(dense.SUITES["dense"], ["--device=cpu", f"--update={tmp_path / 'kept.json'}"])
    assert "--update takes figures of a commit, got 1234abc + changes" in capsys.readouterr().err


def test_the_tables_are_what_the_results_say(monkeypatch, capsys):
    assert write_tables.main(["--check"]) == 0, capsys.readouterr().out
    text = "".join(page.read_text() for page in write_tables.PAGES)
    assert write_tables.BLOCK.findall(text) and set(write_tables.BLOCK.findall(text)) == write_tables.TABLES.keys()
    changed = [replace(row, figures={"seconds": 1.5} if row.seconds else row.figures) for row in rows.read(RESULTS)]
    monkeypatch.setattr(write_tables, "read", lambda path: changed)
    assert write_tables.main(["--check"]) == 1
    assert "README.md, measured.md: run `python scripts/write_tables.py`" in capsys.readouterr().out


def test_a_peer_has_a_column_once_it_is_measured():
    table = write_tables.TABLES["dense"]
    found = [row for row in rows.read(RESULTS) if row.implementation != "FlashAttention-4"]
    assert "FlashAttention-4" not in table.markdown(found)
    more = [replace(row, implementation="FlashAttention-4") for row in found if row.implementation == "cuDNN"]
    lines = [line for line in table.markdown(found + more).splitlines() if line.startswith("|")]
    headings, _, *cells = [[text.strip() for text in line.strip("|").split("|")] for line in lines]
    column, cudnn = headings.index("FlashAttention-4"), headings.index("cuDNN")
    assert [line[column] for line in cells] == [line[cudnn] for line in cells] and cells[0][column]


def test_the_results_are_of_known_workloads():
    pytest.importorskip("transformers")
    for row in rows.read(RESULTS):
        suite = importlib.import_module(f"suites.{MODULES[row.suite][0]}").SUITES[row.suite]
        assert any(row.workload.startswith(workload.name) for workload in suite.workloads["cuda"]), row.key
        assert row.commit and row.environment["device"] == "NVIDIA H200"


# The picture


def test_the_picture_of_what_was_measured(tmp_path, capsys):
    small = ["--device=cpu", "--shrink=64", "--samples=1", "--threads=1"]
    paths = [tmp_path / f"{name}.json" for name in ("dense", "sparse", "decode")]
    both = ["--dtype=float32", "--workload=random", "--direction=backward"]
    assert run.main(["dense", *small, *both, f"--json={paths[0]}"]) == 0
    assert run.main(["sparse", *small, "--workload=top-k", f"--json={paths[1]}"]) == 0
    assert run.main(["decode", *small, "--workload=B1", f"--json={paths[2]}"]) == 0
    for path in (tmp_path / "figures.svg", tmp_path / "figures.png", tmp_path / "again.svg"):
        assert run.main(["draw", *map(str, paths), f"--to={path}"]) == 0
    assert "3 panels" in capsys.readouterr().out
    assert (tmp_path / "figures.png").read_bytes().startswith(b"\x89PNG")
    svg = (tmp_path / "figures.svg").read_text()
    assert svg == (tmp_path / "again.svg").read_text()
    for text in ("ms, forward and backward; random", "Decoding step, ", "SDPA, all keys"):
        assert f">{text}" in svg
    taken = [row for row in rows.read(paths[1]) if row.implementation == "flash_dmattn"]
    ours = sum(row.seconds for row in taken if row.direction in ("forward", "backward"))
    assert f">{1e3 * ours:.3g} ms</text>" in svg and report.describe(report.environment("cpu")) in svg


def test_the_picture_of_a_model(tmp_path):
    key = ("train", "Doge, B2 S8", "bfloat16", "training step")
    found = [
        rows.Row(*key, "flash_dmattn", {"seconds": 0.0351, "peak_bytes": 5.25 * 2**30}),
        rows.Row(*key, "SDPA", {"seconds": 0.2082, "peak_bytes": 25.3 * 2**30}),
        rows.Row(*key, "eager", refusal="CUDA out of memory. Tried"),
        rows.Row("train", "T5", "bfloat16", "training step", "flash_dmattn", {"seconds": 0.1}),
    ]
    path, picture = tmp_path / "models.json", tmp_path / "figures.svg"
    rows.write(path, rows.stamped(found, report.environment("cpu")))
    assert draw.main([str(path), f"--to={picture}", "--workload=Doge"]) == 0
    svg = picture.read_text()
    for text in ("35.1 ms", "208 ms", "5.25 GiB", "25.3 GiB"):
        assert svg.count(f">{text}</text>") == 1
    assert svg.count(">no memory</text>") == 2 and "T5" not in svg


@pytest.mark.parametrize(
    ("suite", "workload", "title"),
    [
        ("train", "Doge, 4 layers, B2 S8192 w1024", "Training step, Doge, 8,192 tokens"),
        ("train", "T5", "Training step, T5"),
        ("sparse", "top-k mask, B1 H32/8 S32768 D128 w2048", "Sparse attention, 2,048 keys per row, 32,768 tokens"),
        ("dense", "dense bias [B,H,S,S], B2 H16 S4096 D128", "Attention, dense bias, 4,096 tokens"),
        ("decode", "B8 H32/8 Sk131072 D128 w2048", "Decoding step, 131,072 keys"),
    ],
)
def test_titles_of_the_picture(suite, workload, title):
    assert draw.headline(suite, workload) == title


@pytest.mark.parametrize(
    ("name", "content", "arguments", "message"),
    [
        ("a.json", '{"environments": [], "rows": []}', [], "nothing in these files is drawn"),
        ("a.json", "no json", [], "a.json: JSONDecodeError"),
        ("b.json", "{}", [], "a.json: FileNotFoundError"),
        ("a.json", "{}", ["--to=a.gif"], "must end with .svg or .png, got a.gif"),
    ],
)
def test_what_cannot_be_drawn(tmp_path, capsys, name, content, arguments, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(SystemExit) as exit:
        draw.main([str(tmp_path / "a.json"), f"--to={tmp_path / 'a.svg'}", *arguments])
    assert exit.value.code == 2 and message in capsys.readouterr().err
