"""compute-sanitizer's racecheck on every kernel: no race but the kinds that it reports of right programs, too.

The tool does not follow all orderings by mbarriers and named barriers. racecheck_patterns.cu holds each pattern of the
sm90 kernels that it reports in a minimal program whose results are checked, and ACCEPTED says which kernels have it.
docs/kernels.md ("Barriers that racecheck reports") says why they are right. A report of another kernel, of another pair
of accesses, or of a pattern that the tool does not report, fails.
"""

import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import test_cuda_small
from gpu_inputs import NEEDS_CUDA

ROOT = Path(__file__).parents[2]
SOURCE = Path(__file__).with_name("racecheck_patterns.cu")
PATTERNS = ("bulk_copies", "stored_rows", "zeroed_rows", "same_zeros", "stored_metadata", "partial_sums")
FORMAT = re.compile(r"Race reported between (\w+) access at (.+?)\+0x.*?and (\w+) access at (.+?)\+0x", re.DOTALL)


class Race(NamedTuple):
    kernel: str  # its name without namespaces, template arguments and parameters
    accesses: frozenset[str]  # "Read", "Write"


READ_WRITE = frozenset({"Read", "Write"})
# The patterns of each kind of report.
ACCEPTED = {
    Race("fwd_kernel", READ_WRITE): ("stored_metadata", "stored_rows"),  # stored_rows: gathered keys
    Race("bwd_kernel", READ_WRITE): ("stored_metadata", "stored_rows"),
    Race("dbias_kernel", READ_WRITE): ("stored_rows",),
    Race("pair_bias_fwd_kernel", READ_WRITE): ("zeroed_rows",),
    Race("pair_bias_dq_dbias_kernel", READ_WRITE): ("zeroed_rows",),
    Race("pair_bias_dkdv_kernel", READ_WRITE): ("zeroed_rows",),
    Race("grouped_sparse_bwd_kernel", READ_WRITE): ("stored_metadata",),
}

pytestmark = [*NEEDS_CUDA, pytest.mark.hopper]  # the patterns are those of the sm90 kernels
COMPILED_ONCE = pytest.mark.xdist_group("racecheck patterns")  # the tests of `program` run on one worker


def tool(name: str) -> str:
    """The path of a program of the CUDA toolkit. Skips the test where it is missing."""
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    path = shutil.which(name) or shutil.which(name, path=f"{home}/bin")
    if path is None:
        pytest.skip(f"{name} is neither in PATH nor in {home}/bin")
    return path


def kernel_name(signature: str) -> str:
    """Returns "kernel" for "void a::b::kernel<..>(..)" and "<unnamed>::kernel(..)"."""
    name = signature.replace("<unnamed>::", "").split("(")[0].split("<")[0]
    return name.split("::")[-1].split()[-1]


def races(*command: str) -> dict[Race, str]:
    """The kinds of races that the tool reports of a command, each with its first report. The command must succeed."""
    options = ("--tool", "racecheck", "--print-limit", "100000", "--kernel-name", "kns=flash_dmattn")
    options = options if command[0] == sys.executable else options[:-2]
    done = subprocess.run([tool("compute-sanitizer"), *options, *command], cwd=ROOT, capture_output=True, text=True)
    output = done.stdout + done.stderr
    assert done.returncode == 0 and "RACECHECK SUMMARY" in output, output[-3000:]
    found = {}
    for match in FORMAT.finditer(output):
        first, at, second, _ = match.groups()
        found.setdefault(Race(kernel_name(at), frozenset({first, second})), match.group())
    return found


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> str:
    path = str(tmp_path_factory.mktemp("racecheck") / "patterns")
    command = [tool("nvcc"), "-std=c++17", "-arch=sm_90a", f"-I{ROOT / 'csrc'}", "-o", path, str(SOURCE)]
    subprocess.run(command, check=True, capture_output=True)
    return path


@pytest.fixture(scope="module")
def reported(program):
    """The kinds of accesses that the tool reports of a pattern."""
    return cache(lambda pattern: {race.accesses for race in races(program, pattern)})


@COMPILED_ONCE
@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_are_right(program, pattern):
    """With racecheck the program runs at another speed, too."""
    assert subprocess.run([program, pattern], capture_output=True, text=True).stdout == f"{pattern}: right\n"
    races(program, pattern)


@COMPILED_ONCE
@pytest.mark.parametrize("pattern", sorted({pattern for patterns in ACCEPTED.values() for pattern in patterns}))
def test_accepted_patterns_are_reported(reported, pattern):
    """Otherwise the tool sees these orderings, and a report of a kernel would be a race."""
    for race, accepted in ACCEPTED.items():
        assert pattern not in accepted or race.accesses in reported(pattern), race


@pytest.mark.parametrize("test", [name for name in vars(test_cuda_small) if name.startswith("test_")])
def test_every_report_is_accepted(test):
    command = ("-m", "pytest", "-q", "-p", "no:cacheprovider", f"tests/cuda/test_cuda_small.py::{test}")
    found = races(sys.executable, *command)
    new = {race: text for race, text in found.items() if race not in ACCEPTED}
    assert not new, "\n\n".join(f"{race}\n{text}" for race, text in new.items())
