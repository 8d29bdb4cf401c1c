"""Runs the snippets of README.md, each by itself, and those of some pages of docs, one after the other per page."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SNIPPETS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
PAGES = ["docs/blocks.md", "docs/devices.md", "docs/norms.md", "docs/pytorch.md"]


@pytest.mark.parametrize("snippet", SNIPPETS, ids=range(len(SNIPPETS)))
def test_snippet_of_the_readme_runs(snippet):
    exec(compile(snippet, "README.md", "exec"), {})


@pytest.mark.parametrize("page", PAGES)
def test_snippets_of_a_page_run(page):
    """Snippets that need several hosts or another package are marked `no-run`, and are only compiled."""
    if page in ("docs/blocks.md", "docs/pytorch.md"):
        pytest.importorskip("torch")
    names = {}
    snippets = re.findall(r"```python( no-run)?\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    assert any(not no_run for no_run, _ in snippets)
    for no_run, snippet in snippets:
        code = compile(snippet, page, "exec")
        if not no_run:
            exec(code, names)
