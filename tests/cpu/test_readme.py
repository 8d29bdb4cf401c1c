"""Runs the snippets of README.md, each by itself, and those of the pages of docs, one after the other per page.

The snippets of `docs/codebases.md` are compared with the code bases in `test_codebases.py`.
"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SNIPPET = re.compile(r"(<!-- no-run -->\n)?^ *```python\n(.*?)```", re.DOTALL | re.MULTILINE)
SNIPPETS = [snippet for _, snippet in SNIPPET.findall((ROOT / "README.md").read_text())]
MARKDOWN = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))
PAGES = [
    pytest.param(page, marks=[pytest.mark.torch] if re.search(r"^(import|from) torch", text, re.MULTILINE) else [])
    for page in MARKDOWN
    if page != "docs/codebases.md" and "```python" in (text := (ROOT / page).read_text())
]


@pytest.mark.parametrize("snippet", SNIPPETS, ids=range(len(SNIPPETS)))
def test_snippet_of_the_readme_runs(snippet):
    exec(compile(snippet, "README.md", "exec"), {})


@pytest.mark.parametrize("page", PAGES)
def test_snippets_of_a_page_run(page):
    """Snippets that need several hosts or another package are below `<!-- no-run -->`, and are only compiled."""
    names = {}
    snippets = SNIPPET.findall((ROOT / page).read_text())
    runs = [not no_run for no_run, _ in snippets]
    assert any(runs) and (all(runs) or page != "docs/pytorch.md")
    for no_run, snippet in snippets:
        code = compile(snippet, page, "exec")
        if not no_run:
            exec(code, names)


@pytest.mark.parametrize("page", ["README.md", *MARKDOWN])
def test_the_site_knows_every_fence(page):
    """The site renders a fence with one word behind it; text behind the word makes it a paragraph."""
    fences = [line.strip() for line in (ROOT / page).read_text().splitlines() if line.strip().startswith("```")]
    assert len(fences) % 2 == 0
    assert [fence for fence in fences if not re.fullmatch(r"```\w*", fence)] == []
