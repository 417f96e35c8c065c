"""The generated project for Hugging Face's kernel-builder, without running the builder."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
tomllib = pytest.importorskip("tomllib")  # Python 3.11
sys.path.insert(0, str(ROOT / "scripts"))
import write_hub_kernel  # noqa: E402


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub") / "project"
    script = ROOT / "scripts" / "write_hub_kernel.py"
    subprocess.run([sys.executable, script, folder], check=True, cwd=folder.parent)
    return folder


@pytest.fixture(scope="module")
def build(project):
    return tomllib.loads((project / "build.toml").read_text())


def test_the_sections(build):
    assert set(build) == {"general", "torch", "kernel"}
    about = {"name": "flash_dmattn", "version": 0, "license": "bsd-3-clause", "backends": ["cuda"]}
    assert build["general"] == about | {"python-depends": ["einops"]}
    assert set(build["torch"]) == {"src", "include"}
    for kernel in build["kernel"].values():
        assert set(kernel) == {"backend", "depends", "src", "include", "cuda-capabilities", "cuda-flags"}
        assert kernel["backend"] == "cuda" and kernel["depends"] == ["torch"]


def test_every_source_is_listed_and_compiled_once(project, build):
    sections = [build["torch"], *build["kernel"].values()]
    compiled = [name for section in sections for name in section["src"] if name.endswith((".cpp", ".cu"))]
    assert len(compiled) == len(set(compiled))
    there = {
        path.relative_to(project).as_posix()
        for path in project.rglob("*")
        if path.suffix in (".cpp", ".cu", ".h", ".cuh") and path.is_file()
    }
    assert there == {name for section in sections for name in section["src"]}
    in_tree = {p.relative_to(ROOT).as_posix() for p in (ROOT / "csrc").rglob("*") if p.suffix in (".cpp", ".cu")}
    assert in_tree - set(compiled) == {"csrc/torch/module.cpp", "csrc/torch/no_cuda.cpp"}
    for section in sections:
        assert all((project / folder).is_dir() for folder in section["include"])


def test_kernels_for_one_architecture_are_built_for_it_alone(build):
    kernels = build["kernel"]
    assert kernels["sm90"]["cuda-capabilities"] == ["9.0a"]
    own = [name for name in kernels["sm90"]["src"] if name.endswith(".cu")]
    assert own and all(name.endswith("_sm90.cu") for name in own)
    assert not [name for name in kernels["sm80"]["src"] if name.endswith("_sm90.cu")]
    assert "csrc/cuda/sm90/fwd/plan.cu" in kernels["sm80"]["src"]


def test_no_operator_is_registered_under_the_librarys_own_name(project):
    for path in (project / "csrc").rglob("*.*"):
        assert not re.search(r'TORCH_LIBRARY\w*\(flash_dmattn|"flash_dmattn::', path.read_text()), path
    library = (project / "csrc/torch/library.cpp").read_text()
    assert library.count("TORCH_LIBRARY_EXPAND(TORCH_EXTENSION_NAME,") == 1
    assert library.count("TORCH_LIBRARY_IMPL(TORCH_EXTENSION_NAME,") == 2
    for path in (project / "torch-ext").rglob("*.py"):
        assert not re.search(r"flash_dmattn::|torch\.ops\.flash_dmattn", path.read_text()), path


def test_nothing_needs_pybind11(project):
    for path in (project / "csrc").rglob("*.*"):
        assert "pybind11" not in path.read_text(), path


def test_python_imports_itself_by_relative_names_and_what_the_builder_brings(project, build):
    allowed = {*sys.stdlib_module_names, "torch", *build["general"]["python-depends"], "triton", "numpy"}
    for path in (project / "torch-ext" / "flash_dmattn").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module]
            assert {name.split(".")[0] for name in names} <= allowed, path


def test_a_folder_that_is_not_empty_is_left_alone(project):
    with pytest.raises(SystemExit, match="not empty"):
        write_hub_kernel.write(project)


# The library's own compiled module, loaded for its operators alone, stands for the extension.
PROGRAM = """
import importlib.util, sys, torch
module, package, name = sys.argv[1:]
torch.ops.load_library(module)
namespace = torch.ops.flash_dmattn

# As the builder makes it.
with open(package + "/_ops.py", "w") as file:
    file.write("import torch\\nops = torch.ops.flash_dmattn\\n"
               "def add_op_namespace_prefix(name): return f'flash_dmattn::{name}'\\n")
spec = importlib.util.spec_from_file_location(name, package + "/__init__.py", submodule_search_locations=[package])
kernel = sys.modules[name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kernel)
assert "flash_dmattn" not in sys.modules

q, k, v = (torch.randn(1, 40, h, 16, dtype=torch.float64, requires_grad=True) for h in (4, 2, 2))
bias = torch.randn(1, 2, 1, 40, dtype=torch.float64, requires_grad=True)
results = []
for function in (kernel.flash_dmattn_func, kernel.flash_dmattn_func_auto("reference")):
    out, lse = function(q, k, v, attn_bias=bias, is_causal=True, window_size=8, return_lse=True)
    results.append((out, lse, *torch.autograd.grad(out.square().sum() + lse.sum(), (q, k, v, bias))))
for ours, expected in zip(*results):
    torch.testing.assert_close(ours, expected)
cu = torch.tensor([0, 10, 40], dtype=torch.int32)
out = kernel.flash_dmattn_varlen_func(q[0], k[0], v[0], None, None, cu, cu, 30, 30, is_causal=True)
torch.testing.assert_close(out[:10], kernel.flash_dmattn_func(q[:, :10], k[:, :10], v[:, :10], is_causal=True)[0])
for arguments, error in (((q, k, None), TypeError), ((q, k[..., :8], v), ValueError), ((q, k.float(), v), TypeError)):
    try:
        kernel.flash_dmattn_func(*arguments)
    except error as raised:
        print(raised)
    else:
        raise AssertionError(f"no {error.__name__}")
print(kernel.get_available_backends())
"""


def test_the_package_runs_under_another_name(project):
    (module,) = (ROOT / "flash_dmattn").glob("_C*.so")
    package = project / "torch-ext" / "flash_dmattn"
    command = [sys.executable, "-c", PROGRAM, module, package, "flash_dmattn_of_a_build"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=project)
    assert done.returncode == 0, done.stderr
    assert "value must be a torch.Tensor, got NoneType" in done.stdout
    assert "'cpu'" in done.stdout.splitlines()[-1]
