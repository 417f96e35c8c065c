"""Every block of Python in README.md and docs/ runs, and prints what it says."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import flash_dmattn

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SAID = re.compile(r"^ *print\(.*\)  # (.*)$", re.MULTILINE)
# docs/api.md holds signatures.
PAGES = [
    str(path.relative_to(ROOT))
    for path in sorted([ROOT / "README.md", *ROOT.glob("docs/**/*.md")])
    if path.name != "api.md" and BLOCK.search(path.read_text())
]
# Packages that not everyone has installed, by words of the blocks that need them.
OPTIONAL = {
    "transformers": ("transformers",),
    "matplotlib": ("matplotlib", "visualize", "use_local_output"),  # the last is of a model in examples/train_lm.py
    "psutil": ("generate_batch",),  # transformers' continuous batching on the CPU
}

# What stands before and after the blocks that show a part of a program, by a text in the block.
FRAGMENTS = {
    "model = use_flash_dmattn(model)  # Llama": (
        """
        from transformers import LlamaConfig, LlamaForCausalLM
        sizes = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=99)
        model = LlamaForCausalLM(LlamaConfig(**sizes))
        """,
        "assert model.config._attn_implementation == 'flash_dmattn'",
    ),
    "use_local_output=False)": (
        """
        # torchrun --nproc-per-node 1
        import sys
        import torch
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        sys.path.insert(0, "EXAMPLES")
        import train_lm
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tensor",))
        model = train_lm.LanguageModel(train_lm.Config(layers=1))
        """,
        """
        model(torch.randint(256, (1, 64))).sum().backward()
        assert model.blocks[0].attention.A.grad is not None
        dist.destroy_process_group()
        """,
    ),
}


def lines_of(text: str) -> str:
    return re.sub(r"^ {8}", "", text.replace("EXAMPLES", str(ROOT / "examples")), flags=re.MULTILINE).strip() + "\n"


def whole(block: str) -> str:
    for part, (before, after) in FRAGMENTS.items():
        if part in block:
            return lines_of(before) + block + lines_of(after)
    return block


def check_output(block: str, output: str) -> None:
    """The lines that the block says are printed come in their order; other lines may stand between them."""
    lines = iter(output.splitlines())
    for said in SAID.findall(block):
        assert any(line == said for line in lines), f"not printed: {said}\n{output}"


def torchrun(program: str, ranks: str, folder: Path, **variables: str) -> str:
    path = folder / "program.py"
    path.write_text(program)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks, str(path)]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), *sys.path])),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(command, env=environment | variables, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def blocks_of(page: str) -> list[str]:
    """Skips the test where a package of the page is missing."""
    blocks = BLOCK.findall((ROOT / page).read_text())
    for package, words in OPTIONAL.items():
        if any(word in block for block in blocks for word in words):
            pytest.importorskip(package)
    return blocks


@pytest.fixture
def a_reader(tmp_path, monkeypatch):
    """An empty folder; the defaults of PyTorch that a page sets are reset."""
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    torch.set_default_device(None)
    torch.set_default_dtype(torch.float32)


@pytest.mark.long
@pytest.mark.parametrize("page", PAGES)
def test_the_examples_run_and_print_what_they_say(page, capsys, a_reader, monkeypatch):
    """The blocks of a page run one after the other, as a reader pastes them, without a GPU."""
    monkeypatch.setitem(vars(flash_dmattn), "CUDA_AVAILABLE", False)
    names = {}
    for block in blocks_of(page):
        program = whole(block)
        if ranks := re.match(r"# torchrun --nproc-per-node (\d+)", program):
            output = torchrun(program, ranks[1], a_reader, CUDA_VISIBLE_DEVICES="")
        else:
            exec(compile(program, page, "exec"), names)
            output = capsys.readouterr().out
        check_output(block, output)


def why_not_on_a_gpu(program: str) -> str | None:
    if not (ranks := re.match(r"# torchrun --nproc-per-node (\d+)", program)):
        return None
    if "CUDA_AVAILABLE" not in program:
        return "a program of gloo; tests/parallel/test_two_gpus.py runs such calls on GPUs"
    return None if torch.cuda.device_count() >= int(ranks[1]) else f"needs {ranks[1]} GPUs"


@pytest.mark.gpu
@pytest.mark.parametrize("page", PAGES)
def test_the_examples_run_on_a_gpu(page, capsys, a_reader):
    """A page selects the device itself. For one that does not, the README says: "cuda" and torch.bfloat16."""
    blocks = blocks_of(page)
    if not any("CUDA_AVAILABLE" in block for block in blocks):
        torch.set_default_device("cuda")
        torch.set_default_dtype(torch.bfloat16)
    names, skipped = {}, []
    for number, block in enumerate(blocks, 1):
        program = whole(block)
        if reason := why_not_on_a_gpu(program):
            skipped.append(f"block {number} of {len(blocks)}: {reason}")
        elif ranks := re.match(r"# torchrun --nproc-per-node (\d+)", program):
            check_output(block, torchrun(program, ranks[1], a_reader))
        else:
            exec(compile(program, page, "exec"), names)
            check_output(block.replace("device='cpu'", "device='cuda:0'"), capsys.readouterr().out)
    if "device" in names:
        assert names["device"] == "cuda"
    if "out" in names:
        assert names["out"].is_cuda
    if skipped:
        pytest.skip("; ".join(skipped))


def test_a_wrong_output_is_noticed():
    check_output("print(1)  # 1\nprint(2)  # 2\n", "1\nmore\n2\n")
    for output in ("1\n", "2\n1\n"):
        with pytest.raises(AssertionError, match="not printed"):
            check_output("print(1)  # 1\nprint(2)  # 2\n", output)


def test_every_guide_has_examples():
    guides = {str(path.relative_to(ROOT)) for path in ROOT.glob("docs/guides/*.md") if path.stem != "index"}
    assert len(guides) >= 12 and guides <= set(PAGES)


def test_every_guide_selects_the_device():
    for path in ROOT.glob("docs/guides/*.md"):
        blocks = BLOCK.findall(path.read_text())
        assert not blocks or re.search(r"if (CUDA_AVAILABLE|use_cuda)\b", "".join(blocks)), path.name
