"""The docs match the code: generated pages, links, examples, tables."""

import re
import shlex
import sys
from pathlib import Path

import pytest

import flash_dmattn
from flash_dmattn import backends, parallel

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import write_api  # noqa: E402

PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md")])


def anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def test_the_api_page_is_what_the_docstrings_say():
    pytest.importorskip("transformers")
    assert write_api.PAGE.read_text() == write_api.page(), "run `python scripts/write_api.py`"


@pytest.mark.parametrize("module", [flash_dmattn, parallel], ids=lambda module: module.__name__)
def test_the_api_page_has_everything_that_is_exported(module):
    listed = {name for _, owner, names in write_api.SECTIONS for name in names if owner == module.__name__}
    assert listed == {name for name in module.__all__ if not name.endswith("_AVAILABLE")}


def test_a_docstring_as_markdown():
    text = "What it does.\n\nArgs:\n    a, b: two\n        lines.\n\nBehind it.\n\nReturns:\n    c (B, S)."
    assert write_api.described(text) == (
        "What it does.\n\n**Args**\n\n- `a`, `b`: two lines.\n\nBehind it.\n\n**Returns**\n\nc (B, S)."
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_resolve(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, fragment = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), f"{page.name}: {target}"
        if fragment:
            anchors = map(anchor, re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE))
            assert fragment in anchors, f"{page.name}: {target}"


def test_the_pictures_of_masks_are_those_of_the_script(tmp_path, monkeypatch):
    """Compares names: other versions of matplotlib write other bytes."""
    pytest.importorskip("matplotlib")
    import draw_masks

    monkeypatch.setattr(draw_masks, "FOLDER", tmp_path)
    draw_masks.main()
    drawn, page = {path.name for path in tmp_path.iterdir()}, (ROOT / "docs" / "masks.md").read_text()
    assert drawn == {path.name for path in (ROOT / "docs" / "pictures").iterdir()}
    assert drawn == set(re.findall(r"\]\(pictures/(.*?)\)", page))


def test_every_install_command_names_the_requirements_of_the_build():
    """Without build isolation the commands install pyproject's requirements: a venv may have an old setuptools."""
    (listed,) = re.findall(r"^requires = \[(.*)\]$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    required = [name for name in re.findall(r'"(.*?)"', listed) if not name.startswith("torch")]
    workflows = ROOT / ".github" / "workflows"  # not in a source distribution
    named = set()
    for path in [*PAGES, ROOT / "Makefile", *workflows.glob("*.yml")]:
        for command in re.findall(r"^[^`\n]*pip install (.*setuptools.*)$", path.read_text(), re.MULTILINE):
            words = [word for word in shlex.split(command) if not word.startswith("-")]
            assert words[: len(required)] == required, path
            named.add(path.name)
    assert named >= {"README.md", "install.md", "Makefile"}
    assert not workflows.is_dir() or named >= {"test.yml", "cuda.yml", "wheels.yml"}


def test_every_page_names_the_supported_versions_of_transformers():
    pytest.importorskip("transformers")
    from flash_dmattn.integrations.versions import MAX_TRANSFORMERS, MIN_TRANSFORMERS

    major, minor = map(int, MAX_TRANSFORMERS.split("."))
    required = f"transformers>={MIN_TRANSFORMERS},<{major}.{minor + 1}"
    assert set(re.findall(r'"(transformers>=.*?)"', (ROOT / "pyproject.toml").read_text())) == {required}
    named = set()
    for page in set(PAGES) - {ROOT / "CHANGELOG.md"}:  # which names the versions of each release
        text = " ".join(page.read_text().split())
        ranges = re.findall(r"transformers \(?(\d+\.\d+) to (\d+\.\d+)", text)
        assert set(ranges) <= {(MIN_TRANSFORMERS, MAX_TRANSFORMERS)}, page
        assert set(re.findall(r"transformers[<>=][\d.,<>=]*", text)) <= {required}, page
        named |= {page.relative_to(ROOT).as_posix()} if ranges else set()
    assert named >= {"README.md", "docs/transformers.md", "docs/guides/transformers.md"}


def test_the_tables_of_backends_name_them_all():
    (heading,) = re.findall(r"^\| \| (cuda .*) \|$", (ROOT / "docs" / "backends.md").read_text(), re.MULTILINE)
    assert tuple(heading.split(" | ")) == backends.NAMES


def test_every_benchmark_stands_on_its_page():
    said = (ROOT / "benchmarks" / "README.md").read_text()
    scripts = [path for path in (ROOT / "benchmarks").glob("*.py") if "__main__" in path.read_text()]
    assert len(scripts) > 5
    for script in scripts:
        assert f"`{script.name}`" in said


PATH = re.compile(r"[\w./-]*[\w-]/[\w.-]+\.(?:cuh|cu|h|cpp|py|md|svg|json|yml)\b")
BASES = ("", "csrc", "csrc/cuda", "csrc/cuda/arch", "flash_dmattn", "docs", "tests")
GENERATED = ("build/kernels/", "results/")


def test_paths_in_docs_and_comments_exist():
    """A renamed file must be renamed in every page, comment and docstring that names it."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    sources = [path for folder in ("csrc", "flash_dmattn") for path in (ROOT / folder).rglob("*.*")]
    missing = []
    for path in [*pages, *(path for path in sources if path.suffix in (".h", ".cuh", ".cu", ".cpp", ".py", ".pyi"))]:
        text = path.read_text()
        if path.suffix not in (".md", ".py", ".pyi"):
            text = "\n".join(re.findall(r"//.*", text))
        for name in PATH.findall(text):
            bases = [path.parent, *(ROOT / base for base in BASES)]
            if "://" not in name and not name.startswith(GENERATED) and not any((b / name).exists() for b in bases):
                missing.append(f"{path.relative_to(ROOT)}: {name}")
    assert missing == []
