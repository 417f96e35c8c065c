"""Hooks of `mkdocs build` (mkdocs.yml): pages outside docs/, links to files of the repository, formulas as MathML, bars
on the performance page.

Markdown stays readable on a code host: its links are those of the repository, many with the file's name as their text,
and a formula is a ```math block.
"""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path

import latex2mathml.converter
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
import performance_bars  # noqa: E402
import write_tables  # noqa: E402

# Path in the repository to path in the site.
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "benchmarks/README.md": "benchmarks.md",
}
FILES = {
    "CITATION.cff": "files/CITATION.cff",
    "LICENSE": "files/LICENSE.txt",
    "benchmarks/results/h200.json": "files/h200.json",
}
SOURCES = {site: repository for repository, site in PAGES.items()}
FILE_NAME = re.compile(r"\[[\w-]+\.md\](?=\(([^)\s#]+))")  # of a link, as its text
CODE_IN_ROW = re.compile(r"(?<=[| (])`[^`\n]*\\\|[^`\n]*`")
LINK = re.compile(r"\]\((?!https?://|mailto:)([^)\s#]+)(#[^)\s]*)?\)")


def source_of(page: str) -> str:
    """The path in the repository of a page of the site."""
    return SOURCES.get(page, f"docs/{page}")


def in_site(path: str) -> str:
    """The path in the site of a path in the repository; of a file that the site does not have, the path itself."""
    known = PAGES | FILES
    return known[path] if path in known else path.removeprefix("docs/")


def with_site_links(markdown: str, page: str) -> str:
    """The text of a page with the links of the site in place of those of the repository."""
    folder, here = posixpath.dirname(source_of(page)), posixpath.dirname(page)

    def replaced(match: re.Match) -> str:
        target = in_site(posixpath.normpath(posixpath.join(folder, match[1])))
        return f"]({posixpath.relpath(target, here or '.')}{match[2] or ''})"

    return LINK.sub(replaced, markdown)


def with_titles(markdown: str, page: str) -> str:
    """A link whose text is the name of a page's file has the title of the page."""
    folder = ROOT / posixpath.dirname(source_of(page))

    def replaced(match: re.Match) -> str:
        return f"[{(folder / match[1]).read_text().partition(chr(10))[0].removeprefix('# ')}]"

    return FILE_NAME.sub(replaced, markdown)


def with_pipes(markdown: str) -> str:
    """A code host needs `a \\| b` in a table; MkDocs shows the backslash."""
    return CODE_IN_ROW.sub(lambda code: code[0].replace("\\|", "|"), markdown)


def math_block(source: str, language: str, css_class: str, options: dict, md: object, **more) -> str:
    mathml = latex2mathml.converter.convert(source, display="block")
    return f'<div class="math">{mathml}</div>'


def with_bars(markdown: str) -> str:
    """The performance page with bars behind the tables that have peers."""
    rows = write_tables.read(write_tables.RESULTS)
    known = {(one.suite, one.workload): one for one in performance_bars.comparisons(rows)}

    def replaced(match: re.Match) -> str:
        table = write_tables.TABLES[match[1]]
        lines = table.lines(rows) if isinstance(table, write_tables.Table) else {}
        bars = [performance_bars.bars(known[key], label) for key, label in lines.items() if key in known]
        return "\n\n".join([match[0], *bars])

    return write_tables.BLOCK.sub(replaced, markdown)


# Events of MkDocs


def on_config(config):
    fences = config.mdx_configs.setdefault("pymdownx.superfences", {}).setdefault("custom_fences", [])
    fences.append({"name": "math", "class": "math", "format": math_block})
    config.watch += [str(ROOT / path) for path in (*PAGES, *FILES)]
    return config


def on_files(files: Files, config) -> Files:
    for repository, site in (PAGES | FILES).items():
        files.append(File.generated(config, site, abs_src_path=str(ROOT / repository)))
    return files


def on_page_markdown(markdown: str, page, config, files) -> str:
    if page.file.src_uri == "measured.md":
        markdown = with_bars(markdown)
    return with_site_links(with_titles(with_pipes(markdown), page.file.src_uri), page.file.src_uri)
