"""The pages of the site (`mkdocs.yml`): the API reference is complete, and every page of the repository is on it.

`make docs` builds the site and checks its links.
"""

import ast
import re
from pathlib import Path

import pytest

from tools import site_pages
from tools.site_pages import API

ROOT = Path(__file__).resolve().parents[2]


def public_names(package):
    """Returns `__all__` of a package, read from its source: some packages need PyTorch to be imported."""
    tree = ast.parse((ROOT / package.replace(".", "/") / "__init__.py").read_text())
    (names,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    return names


@pytest.mark.parametrize("package", API)
def test_every_public_name_is_on_one_page_of_the_api_reference(package):
    documented = [name for names in API[package].values() for name in names]
    packages = [name for name in public_names(package) if f"{package}.{name}" in API]
    assert sorted(documented + packages) == sorted(public_names(package))


def test_the_api_reference_links_every_package():
    links = re.findall(r"\]\((\S+)/index\.md\)", (ROOT / "site" / "api" / "index.md").read_text())
    assert links == list(API)


def test_every_package_that_pages_import_is_in_the_api_reference():
    texts = "".join(path.read_text() for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
    imported = set(re.findall(r"(?:from|import) ((?:jaxrnn|torch_bridge)(?:\.\w+)*)", texts))
    assert imported <= set(API)


def test_links_of_the_site_lead_to_files_of_the_repository():
    links = [path for path in (ROOT / "site").rglob("*") if path.is_symlink()]
    assert len(links) >= 10
    for link in links:
        assert link.resolve(strict=True).relative_to(ROOT) == link.relative_to(ROOT / "site")


@pytest.mark.parametrize("page", ["README.md", "docs/performance.md"])
def test_pictures_follow_the_dark_mode_of_the_site(page):
    text = (ROOT / page).read_text()
    html = site_pages.on_page_content(text, None, None, None)
    shown = re.findall(r'<img [^>]*src="([^"]+)-(light|dark)\.svg#only-(light|dark)"', html)
    assert len(shown) == 2 * text.count("<picture>") > 0
    assert "<picture>" not in html
    assert {image for image, file, mode in shown if file != mode} == set()
