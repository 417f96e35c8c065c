"""python -m flash_dmattn.info"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import flash_dmattn
from flash_dmattn import info, ops


class Module:
    """A compiled module as a CUDA build has it."""

    has_cuda = True

    @staticmethod
    def build_info():
        return {
            "torch": "2.11.0+cu130",
            "cpu_capability": "AVX2",
            "why_no_cuda": None,
            "cuda": "13.0",
            "cuda_architectures": "sm_80,sm_90a,compute_90",
            "head_dims": "64,128",
            "dtypes": "bf16",
        }


@pytest.fixture
def cuda_build(monkeypatch):
    monkeypatch.setattr(ops, "_C", Module)
    monkeypatch.setattr(ops, "WHY_NOT_BUILT", None)


@pytest.fixture
def two_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: ["NVIDIA H200", "Tesla V100"][index])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: [(9, 0), (7, 0)][index])


def test_the_command():
    done = subprocess.run(
        [sys.executable, "-m", "flash_dmattn.info"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(
        f"flash_dmattn {flash_dmattn.__version__} in {Path(flash_dmattn.__file__).parent}\n  torch "
    )
    for name in ("CPU kernels", "CUDA kernels", "GPU", *flash_dmattn.backends.NAMES):
        assert f"\n  {name}" in done.stdout


def test_what_is_built_is_what_the_module_says():
    lines = dict(info.built_in())
    assert lines["torch"] == torch.__version__
    assert lines["CPU kernels"].removeprefix("built for ") in ("DEFAULT", "AVX2", "AVX512")
    assert ("not built: " in lines["CUDA kernels"]) == (not ops.cuda_is_built())


def test_a_cuda_build(cuda_build, monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.11.1")
    assert info.built_in() == [
        ("torch", "2.11.1, built against 2.11.0+cu130"),
        ("CPU kernels", "built for AVX2"),
        ("CUDA kernels", "built with CUDA 13.0"),
        ("  architectures", "sm_80, sm_90a, PTX for compute_90"),
        ("  head dimensions", "up to 128, each served by the next of 64, 128"),
        ("  dtypes", "bfloat16"),
    ]


def test_gpus(cuda_build, two_gpus):
    assert info.gpus() == [
        ("GPU 0", "NVIDIA H200, compute capability 9.0, runs the kernels for sm_90a"),
        (
            "GPU 1",
            "Tesla V100, compute capability 7.0, which the CUDA kernels were not built for: see TORCH_CUDA_ARCH_LIST",
        ),
    ]


def test_gpus_without_cuda_kernels(monkeypatch, two_gpus):
    monkeypatch.setattr(ops, "WHY_NOT_BUILT", "it is missing")
    assert info.gpus()[0] == ("GPU 0", "NVIDIA H200, compute capability 9.0")
    assert info.built_in() == [("torch", torch.__version__), ("compiled kernels", "none: it is missing")]


def test_why_a_backend_cannot_be_used(monkeypatch):
    monkeypatch.setattr(ops, "WHY_NOT_BUILT", "it is missing")
    assert dict(info.usable()) | {"triton": "", "flex": ""} == {
        "cuda": "no: it is missing",
        "cpu": "no: it is missing",
        "triton": "",
        "flex": "",
        "reference": "available",
    }


@pytest.mark.parametrize(
    ("architecture", "capability", "expected"),
    [
        ("sm_80", (8, 0), True),
        ("sm_80", (8, 9), True),  # machine code runs on later minor versions
        ("sm_86", (8, 0), False),
        ("sm_80", (9, 0), False),
        ("sm_90a", (9, 0), True),
        ("compute_90a", (10, 0), False),
        ("compute_90", (12, 0), True),  # PTX on everything later
        ("compute_90", (8, 9), False),
        ("sm_120", (12, 1), True),
    ],
)
def test_which_gpu_code_serves(architecture, capability, expected):
    assert info.serves(architecture, capability) == expected


@pytest.mark.parametrize(
    ("architectures", "capability", "expected"),
    [
        ("sm_80,sm_86,sm_90", (8, 9), "sm_86"),
        ("sm_80,sm_86,sm_89,sm_90", (8, 6), "sm_86"),
        ("sm_80,compute_80,compute_89", (8, 9), "sm_80"),  # machine code before PTX, however old
        ("sm_80,compute_80,compute_90", (12, 0), "compute_90"),
        ("sm_100,sm_120", (9, 0), None),
    ],
)
def test_which_of_several_the_driver_takes(architectures, capability, expected):
    assert info.code_for(architectures.split(","), capability) == expected


@pytest.mark.parametrize(
    ("built", "capability", "expected"),
    [
        (True, (9, 0), "cuda"),
        (True, (12, 0), "cuda"),  # by the PTX
        (True, (7, 5), "cpu"),
        (True, None, "cpu"),
        (False, (9, 0), "cpu"),
    ],
)
def test_the_device_that_serves(monkeypatch, built, capability, expected):
    monkeypatch.setattr(ops, "_C", Module)
    monkeypatch.setattr(ops, "WHY_NOT_BUILT", None)
    monkeypatch.setattr(Module, "has_cuda", built)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=None: capability)
    assert info.best_device() == expected


def test_the_device_alone():
    command = [sys.executable, "-m", "flash_dmattn.info", "--device"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == info.best_device() + "\n"


def test_the_demo_runs_on_it(tmp_path):
    """The command line of `make demo`."""
    makefile = Path(flash_dmattn.__file__).parent.parent / "Makefile"
    if not makefile.exists() or shutil.which("make") is None:
        pytest.skip("no source tree, or no make")
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text('#!/bin/sh\ncase "$*" in *info*) echo cuda;; *) echo "runs $*";; esac\n')
    python.chmod(0o755)
    command = ["make", "-C", str(makefile.parent), "demo", f"VENV={tmp_path}", "-o", f"{tmp_path}/built"]
    (tmp_path / "built").touch()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    assert "flash_dmattn demo on: cuda" in lines, done.stdout + done.stderr
    runs = [line for line in lines if line.startswith("runs ")]
    assert len(runs) == 2 and all("--device cuda" in run for run in runs)
