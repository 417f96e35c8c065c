"""Every block of Python in README.md and docs/ runs, and prints what it says."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SAID = re.compile(r"^ *print\(.*\)  # (.*)$", re.MULTILINE)
# docs/api.md holds signatures.
PAGES = [
    str(path.relative_to(ROOT))
    for path in sorted([ROOT / "README.md", *ROOT.glob("docs/**/*.md")])
    if path.name != "api.md" and BLOCK.search(path.read_text())
]
OPTIONAL = ("transformers", "matplotlib")

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
        from functools import partial
        import torch
        import torch.distributed as dist
        from torch import nn
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor
        from torch.distributed.tensor.parallel import (
            ColwiseParallel, PrepareModuleInput, RowwiseParallel, parallelize_module
        )
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


def torchrun(program: str, ranks: str, folder: Path) -> str:
    path = folder / "program.py"
    path.write_text(program)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks, str(path)]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), *sys.path])),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.long
@pytest.mark.parametrize("page", PAGES)
def test_the_examples_run_and_print_what_they_say(page, capsys, tmp_path, monkeypatch):
    """The blocks of a page run one after the other, as a reader pastes them."""
    blocks = BLOCK.findall((ROOT / page).read_text())
    for package in OPTIONAL:
        if any(package in block or (package == "matplotlib" and "visualize" in block) for block in blocks):
            pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    names = {}
    for block in blocks:
        program = whole(block)
        if ranks := re.match(r"# torchrun --nproc-per-node (\d+)", program):
            output = torchrun(program, ranks[1], tmp_path)
        else:
            exec(compile(program, page, "exec"), names)
            output = capsys.readouterr().out
        check_output(block, output)


@pytest.mark.gpu
def test_the_first_example_runs_on_a_gpu(capsys):
    """As the README says: with device="cuda" and dtype=torch.bfloat16."""
    block = BLOCK.findall((ROOT / "README.md").read_text())[0]
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            exec(block, names := {})
    finally:
        torch.set_default_dtype(dtype)
    assert names["bias"].grad.is_cuda and names["out"].dtype == torch.bfloat16
    check_output(block, capsys.readouterr().out)


def test_a_wrong_output_is_noticed():
    check_output("print(1)  # 1\nprint(2)  # 2\n", "1\nmore\n2\n")
    for output in ("1\n", "2\n1\n"):
        with pytest.raises(AssertionError, match="not printed"):
            check_output("print(1)  # 1\nprint(2)  # 2\n", output)


def test_every_guide_has_examples():
    guides = {str(path.relative_to(ROOT)) for path in ROOT.glob("docs/guides/*.md") if path.stem != "index"}
    assert len(guides) >= 12 and guides <= set(PAGES)
