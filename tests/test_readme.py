"""The snippets in README.md and some pages of docs run as they stand there, those of a page one after the other."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SNIPPETS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
PAGES = ["docs/devices.md", "docs/norms.md", "docs/pytorch.md"]


@pytest.mark.parametrize("snippet", SNIPPETS, ids=range(len(SNIPPETS)))
def test_snippet_runs(snippet):
    exec(compile(snippet, "README.md", "exec"), {})


@pytest.mark.parametrize("page", PAGES)
def test_snippets_of_a_page_run(page):
    """But for those that need several hosts or another package, marked `no-run`."""
    if page == "docs/pytorch.md":
        pytest.importorskip("torch")
    names = {}
    snippets = re.findall(r"```python( no-run)?\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    assert any(not no_run for no_run, _ in snippets)
    for no_run, snippet in snippets:
        code = compile(snippet, page, "exec")
        if not no_run:
            exec(code, names)
