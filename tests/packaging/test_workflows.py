"""The workflows under .github, and the files and commands that they name."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".github" / "workflows"
yaml = pytest.importorskip("yaml")
pytest.importorskip("wheel")
if not FOLDER.is_dir():
    pytest.skip("not a source checkout", allow_module_level=True)
WORKFLOWS = {path.stem: yaml.safe_load(path.read_text()) for path in FOLDER.glob("*.yml")}
JOBS = [(name, job) for name, workflow in WORKFLOWS.items() for job in workflow["jobs"]]


def numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")[:2]))


def test_there_are_four():
    assert set(WORKFLOWS) == {"test", "cuda", "wheels", "docs"}
    for workflow in WORKFLOWS.values():
        assert workflow["permissions"] == {"contents": "read"}
        assert True in workflow  # YAML's reading of `on`


@pytest.mark.parametrize(("workflow", "name"), JOBS)
def test_a_job(workflow, name):
    jobs = WORKFLOWS[workflow]["jobs"]
    job = jobs[name]
    matrix = job.get("strategy", {}).get("matrix", {})
    known = {*matrix, *(key for entry in matrix.get("include", ()) for key in entry)} - {"include", "exclude"}
    assert set(re.findall(r"\$\{\{ matrix\.(\w+) \}\}", str(job))) == known
    needs = job.get("needs", [])
    assert set([needs] if isinstance(needs, str) else needs) <= set(jobs)
    for step in job["steps"]:
        assert ("uses" in step) != ("run" in step)
        if "uses" in step:
            assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", step["uses"])
        # An expression in a shell's text could hold anything; a matrix holds what stands here.
        assert set(re.findall(r"\$\{\{ (\w+)\.", step.get("run", ""))) <= {"matrix"}


def test_a_comment_names_the_version_of_every_pinned_action():
    versions = {}
    for path in FOLDER.glob("*.yml"):
        for action, version in re.findall(r"uses: (\S+)(.*)", path.read_text()):
            assert re.fullmatch(r" # v\d+\.\d+\.\d+", version), action
            assert versions.setdefault(action.partition("@")[0], (action, version)) == (action, version)


# PyTorch moves this tag, and no digest of it could be verified (wheels.yml).
IMAGES_WITHOUT_DIGEST = {"pytorch/manylinux2_28-builder:cuda12.6"}


@pytest.mark.parametrize(("workflow", "name"), JOBS)
def test_images_have_digests(workflow, name):
    job = WORKFLOWS[workflow]["jobs"][name]
    image = job.get("container", "")
    matrix = job.get("strategy", {}).get("matrix", {})
    entries = matrix.get("include", [{}])
    if "include" in matrix:
        assert {entry["cuda"] for entry in entries} == set(matrix["cuda"])
    images = {re.sub(r"\$\{\{ matrix\.(\w+) \}\}", lambda key, of=entry: of[key[1]], image) for entry in entries} - {""}
    assert len(images) == (len(entries) if image else 0)
    for named in images - IMAGES_WITHOUT_DIGEST:
        assert re.fullmatch(r"[\w./-]+:[\w.-]+@sha256:[0-9a-f]{64}", named)


@pytest.mark.parametrize(("workflow", "name"), JOBS)
def test_a_download_is_checked_before_it_runs(workflow, name):
    for step in WORKFLOWS[workflow]["jobs"][name]["steps"]:
        commands = step.get("run", "").splitlines()
        downloads = [line for line in commands if re.search(r"\b(curl|wget)\b", line)]
        assert not [line for line in downloads if re.search(r"[|<(]\s*(\w+sh|sh|curl|wget|python\d*)\b", line)]
        if downloads:
            (download,) = downloads
            check = commands[commands.index(download) + 1]
            assert "sha256sum --check --strict" in check
            assert re.fullmatch(r"[0-9a-f]{64}", step["env"]["SHA256"]) and "$SHA256" in check


def test_wheels_have_checksums_and_an_attestation():
    job = WORKFLOWS["wheels"]["jobs"]["release"]
    assert job["permissions"] == {"contents": "write", "id-token": "write", "attestations": "write"}
    steps = [step.get("name", step.get("uses", "").partition("@")[0]) for step in job["steps"]]
    assert steps == [
        "actions/download-artifact",
        "Checksums",
        "actions/attest-build-provenance",
        "Attach to the release",
    ]
    _, checksums, attestation, attach = job["steps"]
    assert checksums["run"] == "sha256sum -- *.whl > SHA256SUMS" and checksums["working-directory"] == "dist"
    assert attestation["with"] == {"subject-checksums": "dist/SHA256SUMS"}
    assert 'gh release upload "$TAG" dist/*.whl dist/SHA256SUMS' in attach["run"]


def test_the_site_is_published_from_what_make_docs_builds():
    build, publish = WORKFLOWS["docs"]["jobs"]["build"], WORKFLOWS["docs"]["jobs"]["publish"]
    *_, made, upload = build["steps"]
    assert made["run"] == "make docs" and upload["with"] == {"path": "site"}
    assert publish["needs"] == "build" and publish["permissions"] == {"pages": "write", "id-token": "write"}
    assert [step["uses"].partition("@")[0] for step in (upload, *publish["steps"])] == [
        "actions/upload-pages-artifact",
        "actions/deploy-pages",
    ]


def test_the_tests_install_what_the_site_needs():
    """tests/packaging/test_site.py would be skipped otherwise."""
    assert re.search(r"^test: .*\$\(VENV\)/docs$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    (install,) = [step["run"] for step in WORKFLOWS["test"]["jobs"]["cpu"]["steps"] if step.get("name") == "Install"]
    assert '-e ".[test]" --group docs' in install


def test_every_version_that_pyproject_names_is_tested():
    matrix = WORKFLOWS["test"]["jobs"]["cpu"]["strategy"]["matrix"]
    pyproject = (ROOT / "pyproject.toml").read_text()
    oldest_torch = re.search(r'^dependencies = \["torch>=(\d+\.\d+)"', pyproject, re.MULTILINE)[1]
    oldest_python = re.search(r'^requires-python = ">=(\d+\.\d+)"$', pyproject, re.MULTILINE)[1]
    versions = sorted(map(numbers, matrix["torch"]))
    assert versions[0] == numbers(oldest_torch)
    assert versions == [(2, minor) for minor in range(versions[0][1], versions[-1][1] + 1)]
    assert oldest_python in matrix["python"]
    used = re.search(r"torch==(\d+\.\d+)", (ROOT / "Makefile").read_text())[1]
    assert numbers(used) in versions
    assert set(WORKFLOWS["wheels"]["jobs"]["wheel"]["strategy"]["matrix"]["torch"]) <= set(matrix["torch"])


def test_the_files_that_are_named_exist():
    text = " ".join(step.get("run", "") for w, name in JOBS for step in WORKFLOWS[w]["jobs"][name]["steps"])
    named = set(re.findall(r"(?<!\S)(?:scripts|tests|benchmarks)/\S+\.py", text))
    assert {"scripts/name_wheel.py", "tests/cuda/test_kernel_build.py"} <= named
    for path in named:
        assert (ROOT / path).exists()


@pytest.mark.parametrize(("workflow", "name"), JOBS)
def test_the_shell_can_read_it(workflow, name):
    for step in WORKFLOWS[workflow]["jobs"][name]["steps"]:
        if "run" in step:
            script = re.sub(r"\$\{\{.*?\}\}", "x", step["run"])
            done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr


# Names of wheels


@pytest.fixture
def plain_wheel(tmp_path):
    info = tmp_path / "content" / "some_thing-0.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: some-thing\nVersion: 0.1.0\n\nVersion: in the text\n")
    (info / "WHEEL").write_text("Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: cp312-cp312-linux_x86_64\n")
    (info / "RECORD").touch()
    (info.parent / "some_thing.py").write_text("VALUE = 1\n")
    subprocess.run([sys.executable, "-m", "wheel", "pack", info.parent, "-d", tmp_path], check=True)
    (made,) = tmp_path.glob("*.whl")
    assert made.name == "some_thing-0.1.0-cp312-cp312-linux_x86_64.whl"
    return made


def name_wheel(path):
    return subprocess.run([sys.executable, ROOT / "scripts" / "name_wheel.py", path], capture_output=True, text=True)


def test_a_wheel_says_what_it_was_built_for(plain_wheel, tmp_path):
    done = name_wheel(plain_wheel)
    assert done.returncode == 0, done.stderr
    cuda = "cpu" if torch.version.cuda is None else f"cu{torch.version.cuda.split('.')[0]}"
    full = f"0.1.0+{cuda}torch{'.'.join(torch.__version__.split('.')[:2])}cxx11abiTRUE"
    (renamed,) = tmp_path.glob("*.whl")
    assert renamed.name == f"some_thing-{full}-cp312-cp312-linux_x86_64.whl"
    assert done.stdout.splitlines()[-1] == str(renamed)

    folder = tmp_path / "again"
    subprocess.run([sys.executable, "-m", "wheel", "unpack", renamed, "-d", folder], check=True)  # checks the hashes
    metadata = (folder / f"some_thing-{full}" / f"some_thing-{full}.dist-info" / "METADATA").read_text()
    assert metadata.count(f"\nVersion: {full}\n") == 1 and "\nVersion: in the text\n" in metadata
    assert (folder / f"some_thing-{full}" / "some_thing.py").exists()

    again = name_wheel(renamed)
    assert again.returncode != 0 and "has a local version already" in again.stderr


def test_the_name_in_the_workflow_is_of_that_form():
    (example,) = re.findall(r"^# (flash_dmattn-\S+\.whl)$", (FOLDER / "wheels.yml").read_text(), re.MULTILINE)
    assert re.fullmatch(r"flash_dmattn-[\d.]+\+cu\d+torch2\.\d+cxx11abiTRUE-cp\d+-cp\d+-linux_x86_64\.whl", example)
