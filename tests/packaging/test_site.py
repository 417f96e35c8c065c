"""The documentation site: `mkdocs build --strict`, its pages, its search, and that it loads nothing from elsewhere."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mkdocs", reason="the site needs mkdocs: pip install --group docs")
pytest.importorskip("material", reason="the site needs mkdocs-material: pip install --group docs")
ROOT = Path(__file__).parents[2]
KEPT = {
    "mkdocs.yml",
    "scripts",
    "docs",
    "benchmarks",
    "CITATION.cff",
    "LICENSE",
    *(path.name for path in ROOT.glob("*.md")),
}
TABS = ["Start", "How-to guides", "Concepts", "API reference", "Performance", "Contributing"]


def build(tree, folder):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    done = build(ROOT, folder)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return folder


def pages(site):
    return {str(path.relative_to(site)): path.read_text() for path in site.rglob("*.html")}


def test_every_page_of_the_repository_is_there(site):
    expected = {"index.html", "changelog/index.html", "contributing/index.html", "benchmarks/index.html"}
    for path in (ROOT / "docs").rglob("*.md"):
        name = path.relative_to(ROOT / "docs").with_suffix("")
        expected.add(str(name.parent / "index.html" if name.name == "index" else name / "index.html"))
    assert expected <= set(pages(site))


def test_navigation_dark_mode_and_copy_buttons(site):
    front = (site / "index.html").read_text()
    tabs = re.findall(r'<li class="md-tabs__item.*?<a .*?>\s*(.*?)\s*</a>', front, re.DOTALL)
    assert [re.sub(r"\s+", " ", tab) for tab in tabs] == TABS
    assert 'data-md-color-scheme="slate"' in front and "content.code.copy" in front


@pytest.mark.parametrize(
    ("word", "page"),
    [
        ("TMA", "kernels/"),
        ("GQA", "guides/train/"),
        ("triangle", "guides/pair-bias/"),
        ("visualize", "masks/"),
        ("score_mod", "guides/from-flex-attention/"),
        ("relative_bias", "guides/position-bias/"),
        ("bench", "measured/"),
    ],
)
def test_search_finds(site, word, page):
    entries = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    found = {entry["location"].partition("#")[0] for entry in entries if word in entry["text"] + entry["title"]}
    assert page in found


def test_formulas_are_mathml(site):
    assert "<math" in (site / "masks" / "index.html").read_text()
    assert (site / "semantics" / "index.html").read_text().count("<math") > 10
    assert not [name for name, text in pages(site).items() if "language-math" in text or "\\frac{" in text]


def test_pipes_in_tables_have_no_backslash(site):
    assert "{X|Y}" in (site / "semantics" / "index.html").read_text()
    assert not [name for name, text in pages(site).items() if "\\|" in text and name != "changelog/index.html"]


def test_links_have_the_titles_of_pages(site):
    assert not [name for name, text in pages(site).items() if re.search(r">[\w-]+\.md</a>", text)]
    assert '<a href="../logging/">Log of fallbacks</a>' in pages(site)["usage/index.html"]


def test_the_performance_page_has_bars(site):
    page = (site / "measured" / "index.html").read_text()
    assert page.count('<div class="bars">') > 30
    for name in ("FlexAttention", "cuDNN", "SDPA", "FlashAttention-2"):
        assert f'<span class="bar-name">{name}</span>' in page


def test_nothing_is_loaded_from_elsewhere(site):
    """Links may lead elsewhere; scripts, styles, fonts and images may not."""
    for name, text in pages(site).items():
        loaded = re.findall(r'<(?:script|img|iframe)\b[^>]*\bsrc="?([^"\s>]+)', text)
        loaded += re.findall(r'<link\b[^>]*\brel="?(?:stylesheet|icon|preconnect)"?[^>]*\bhref="?([^"\s>]+)', text)
        assert loaded and not [url for url in loaded if re.match(r"(https?:)?//", url)], name


def test_a_broken_link_fails(tmp_path):
    tree = shutil.copytree(
        ROOT, tmp_path / "tree", ignore=lambda folder, names: {*names} - KEPT if folder == str(ROOT) else []
    )
    with (tree / "README.md").open("a") as readme:
        readme.write("\n[missing](docs/missing.md)\n")
    done = build(tree, tmp_path / "site")
    assert done.returncode != 0 and "missing.md" in done.stderr
