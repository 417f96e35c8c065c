"""A compiled module that was built for another PyTorch than the one that runs."""

import os
import subprocess
import sys
from pathlib import Path
from shutil import copytree

import pytest
import torch

import flash_dmattn
from flash_dmattn import loading, ops

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


def test_a_module_without_a_stamp_says_it_itself(monkeypatch, tmp_path):
    monkeypatch.setattr(loading, "STAMP", tmp_path / "no such file")
    assert loading.load_compiled()[1] is None
    monkeypatch.setattr(torch, "__version__", "99.0.0")
    with pytest.warns(UserWarning, match="and this is PyTorch 99.0.0"):
        module, reason = loading.load_compiled()
    assert module is None and "was built for PyTorch" in reason


def test_the_stamp_is_that_of_the_build():
    assert loading.STAMP.read_text() == ops.compiled_module().build_info()["torch"]
