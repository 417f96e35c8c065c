"""Type checkers know the results of the public functions and their arguments."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import write_stub  # noqa: E402

# Lines that must be refused have a type: ignore; --warn-unused-ignores reports those that are accepted.
PROGRAM = """
from typing import Union

import torch
from torch import Tensor
from typing_extensions import assert_type

import flash_dmattn
from flash_dmattn import KeyIntervalMask, KeyLists, merge_attention
from flash_dmattn import flash_dmattn_func as fixed, flash_dmattn_func_auto as auto
from flash_dmattn import flash_dmattn_kvpacked_func as kvpacked, flash_dmattn_qkvpacked_func as qkvpacked
from flash_dmattn import flash_dmattn_varlen_func as varlen
from flash_dmattn import flash_dmattn_varlen_kvpacked_func as varlen_kvpacked
from flash_dmattn import flash_dmattn_varlen_qkvpacked_func as varlen_qkvpacked
from flash_dmattn import flash_dmattn_with_kvcache as with_kvcache

x = torch.randn(1, 1, 1, 8)
Two = tuple[Tensor, Tensor]
Three = tuple[Tensor, Tensor, Tensor]
Any = Union[Tensor, tuple[Tensor, ...]]


def calls(flag: bool) -> None:
    assert_type(fixed(x, x, x), Tensor)
    assert_type(fixed(x, x, x, None, x, 0.5, True, 0.0, False, False), Tensor)
    assert_type(fixed(x, x, x, None, x, None, None, None, None, None, window_size=3), Tensor)
    assert_type(fixed(x, x, x, KeyIntervalMask.causal(1, 1), return_lse=True), Two)
    assert_type(fixed(x, x, x, softmax_scale=x, return_attn_probs=True, return_lse=flag), Three)
    assert_type(fixed(x, x, x, return_lse=flag), Any)
    assert_type(auto("cpu")(x, x, x, return_lse=True), Two)
    assert_type(auto()(x, x, x), Tensor)
    assert_type(qkvpacked(x, None, x, is_causal=True, return_lse=True), Two)
    assert_type(kvpacked(x, x, return_attn_probs=True), Three)
    assert_type(varlen(x, x, x, None, None, x, x, 1, 1), Tensor)
    assert_type(varlen(x, x, x, cu_seqlens_q=x, cu_seqlens_k=x, max_seqlen_q=1, max_seqlen_k=1, return_lse=True), Two)
    assert_type(varlen_qkvpacked(x, None, None, x, 1, None, True, return_lse=True), Two)
    assert_type(varlen_kvpacked(x, x, None, None, x, x, 1, 1, return_attn_probs=True), Three)
    assert_type(with_kvcache(x, x, x, cache_seqlens=3), Tensor)
    assert_type(with_kvcache(x, x, x, x, x, cache_seqlens=x, window_size=3, return_lse=True), Two)
    assert_type(with_kvcache(x, x, x, cache_seqlens=x, return_lse=flag), Union[Tensor, Two])
    assert_type(merge_attention([x], [x]), Two)
    assert_type(flash_dmattn.CUDA_AVAILABLE, bool)
    assert_type(flash_dmattn.parallel.shard(x), Tensor)
    flash_dmattn.visualize.plot(x)


def refused() -> None:
    fixed(x, x)  # type: ignore[call-overload]
    fixed(x, x, x, window_size="3")  # type: ignore[call-overload]
    fixed(x, x, x, dropout=0.1)  # type: ignore[call-overload]
    qkvpacked(x, x, x, softcap="1")  # type: ignore[call-overload]
    varlen_kvpacked(x, x, cache_seqlens=x)  # type: ignore[call-overload]
    with_kvcache(x, x, x)  # type: ignore[call-overload]
    auto()(x, x, x, sparse="list")  # type: ignore[call-overload]
    auto("gpu")  # type: ignore[arg-type]
    flash_dmattn.flash_dmattn_function  # type: ignore[attr-defined]
"""


def test_the_stub_is_what_the_signatures_say():
    assert write_stub.STUB.read_text() == write_stub.stub(), "run `python scripts/write_stub.py`"


@pytest.mark.long
def test_mypy(tmp_path):
    pytest.importorskip("mypy")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    options = ["--follow-imports=silent", "--warn-unused-ignores", "--cache-dir", tmp_path / "cache"]
    command = [sys.executable, "-m", "mypy", *options, program, write_stub.STUB]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
