"""A compiled module that was built for another PyTorch, or of other sources, than those that are there."""

import os
import subprocess
import sys
from pathlib import Path
from shutil import copy, copytree

import pytest
import torch

import flash_dmattn
from flash_dmattn import loading, ops, source_hash

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(ops.WHY_NOT_BUILT is not None, reason=str(ops.WHY_NOT_BUILT))

MINOR = ".".join(torch.__version__.split(".")[:2])
PROGRAM = """
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import flash_dmattn, torch
print([str(warning.message) for warning in caught if "flash_dmattn" in str(warning.message)])
x = torch.randn(1, 5, 2, 8)
flash_dmattn.flash_dmattn_func_auto("reference")(x, x, x)
try:
    flash_dmattn.flash_dmattn_func(x, x, x)
    print("it runs")
except RuntimeError as error:
    print(error)
"""


def imported(folder, built_for, loads=True):
    """(warnings at import, what a call says) of a copy of the package with that stamp."""
    package = folder / "flash_dmattn"
    copytree(Path(flash_dmattn.__file__).parent, package)
    (package / "_C.torch").write_text(built_for)
    if not loads:
        Path(next(package.glob("_C.*.so"))).unlink()
        (package / "_C.so").write_bytes(b"\x7fELF, but not for this PyTorch")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "PYTHONPATH": str(folder)},
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    warnings, call = done.stdout.splitlines()
    return eval(warnings), call


def test_another_minor_version_is_refused_at_import(tmp_path):
    warnings, call = imported(tmp_path, "2.1.0+cu118")
    assert warnings == [call]
    assert call == (
        "flash_dmattn's compiled module was built for PyTorch 2.1.0+cu118, and this is PyTorch "
        f"{torch.__version__}: run `pip install --no-build-isolation .` in its source tree again"
    )


def test_another_patch_runs(tmp_path):
    assert imported(tmp_path, f"{MINOR}.99+other") == ([], "it runs")


def test_one_that_does_not_load_names_both_versions(tmp_path):
    warnings, call = imported(tmp_path, f"{MINOR}.99+other", loads=False)
    assert warnings == [call]
    assert f"was built for PyTorch {MINOR}.99+other, and this is PyTorch {torch.__version__}: run `pip" in call


def test_one_that_does_not_load_for_another_reason(tmp_path):
    warnings, call = imported(tmp_path, torch.__version__, loads=False)
    assert not warnings
    assert call.startswith("flash_dmattn's compiled module does not load (")
    assert call.endswith("); run `pip install --no-build-isolation .` in its source tree")


def test_one_that_is_missing(monkeypatch):
    monkeypatch.setattr(loading.importlib.util, "find_spec", lambda name: None)
    assert loading.load_compiled() == (
        None,
        f"flash_dmattn's compiled module is missing in {loading.ROOT}; run `pip install --no-build-isolation .` in its "
        "source tree, then leave that tree",
    )


def test_a_module_without_a_stamp_says_it_itself(monkeypatch, tmp_path):
    monkeypatch.setattr(loading, "STAMP", tmp_path / "no such file")
    assert loading.load_compiled()[1] is None
    monkeypatch.setattr(torch, "__version__", "99.0.0")
    with pytest.warns(UserWarning, match="and this is PyTorch 99.0.0"):
        module, reason = loading.load_compiled()
    assert module is None and "was built for PyTorch" in reason


def test_the_stamp_is_that_of_the_build():
    assert loading.STAMP.read_text().splitlines()[0] == ops.compiled_module().build_info()["torch"]


@pytest.fixture
def tree(tmp_path):
    """A copy of the sources, without the package."""
    if source_hash.source_hash(ROOT, True) is None:
        pytest.skip("no source tree")
    copytree(ROOT / "csrc", tmp_path / "csrc")
    (tmp_path / "scripts").mkdir()
    for name in source_hash.CUDA_SETUP:
        copy(ROOT / name, tmp_path / name)
    return tmp_path


def stamp_of(tree):
    return f"{torch.__version__}\n{source_hash.source_hash(tree, ops.cuda_is_built())}\n"


def test_a_module_of_these_sources(tree):
    assert imported(tree, stamp_of(tree)) == ([], "it runs")


@pytest.mark.parametrize("name", ["csrc/params.h", "csrc/cpu/mha_cpu.h", "csrc/torch/library.cpp", "setup.py"])
def test_a_module_of_other_sources_runs_with_a_warning(tree, name):
    stamp = stamp_of(tree)
    with open(tree / name, "a") as file:
        file.write("\n")
    warnings, call = imported(tree, stamp)
    assert call == "it runs"
    assert warnings == [
        f"flash_dmattn's compiled module was not built from the current sources in {tree}: "
        "run `pip install --no-build-isolation -e .` there again"
    ]


def test_a_source_that_is_new_or_gone_is_noticed(tree):
    before = source_hash.source_hash(tree, False)
    (tree / "csrc" / "cpu" / "new.h").touch()
    assert source_hash.source_hash(tree, False) != before
    (tree / "csrc" / "cpu" / "new.h").rename(tree / "csrc" / "cpu" / "new.h~")  # an editor's copy is no source
    assert source_hash.source_hash(tree, False) == before
    (tree / "csrc" / "torch" / "library.cpp").unlink()
    assert source_hash.source_hash(tree, False) != before


@pytest.mark.parametrize("name", ["csrc/cuda/api.h", "csrc/cuda/arch/wgmma.cuh", "scripts/generate_kernels.py"])
def test_cuda_sources_concern_a_module_with_cuda_kernels_alone(tree, name):
    before = [source_hash.source_hash(tree, with_cuda) for with_cuda in (False, True)]
    with open(tree / name, "a") as file:
        file.write("\n")
    after = [source_hash.source_hash(tree, with_cuda) for with_cuda in (False, True)]
    assert after[0] == before[0] and after[1] != before[1]


@pytest.mark.parametrize("missing", ["csrc", "setup.py", None])
def test_without_sources_or_their_hash_nothing_is_compared(tree, missing):
    """An installation has no sources, and a stamp of an older build has PyTorch's version alone."""
    stamp = f"{torch.__version__}\n{'0' * 64}\n" if missing else torch.__version__
    if missing:
        (tree / missing).rename(tree / "elsewhere")
    assert imported(tree, stamp) == ([], "it runs")
