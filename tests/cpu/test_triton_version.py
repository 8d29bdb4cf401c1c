"""The version of Triton for which tilings are chosen, from the metadata of installed packages."""

import importlib.metadata
import sys

import pytest

from torch_bridge.tiling import support


@pytest.fixture
def metadata(monkeypatch):
    """Replaces what is installed: `installed(versions, modules)` sets versions by package and packages by module."""
    monkeypatch.setattr(support, "triton_version", support.triton_version.__wrapped__)

    def installed(versions, modules):
        def version(name):
            if name not in versions:
                raise importlib.metadata.PackageNotFoundError(name)
            return versions[name]

        monkeypatch.setattr(importlib.metadata, "version", version)
        monkeypatch.setattr(importlib.metadata, "packages_distributions", modules)

    return installed


@pytest.mark.torch
def test_the_version_is_that_of_the_imported_module():
    import triton

    assert support.triton_version() == tuple(map(int, triton.__version__.split(".")[:2]))


def test_a_release_is_found_without_a_search_of_all_packages(metadata):
    metadata({"triton": "3.7.1"}, lambda: pytest.fail("searched all packages"))
    assert support.triton_version() == (3, 7)


def test_a_nightly_build_is_found_by_its_module(metadata):
    metadata({"pytorch-triton": "3.8.0+git1234"}, lambda: {"triton": ["pytorch-triton"]})
    assert support.triton_version() == (3, 8)


def test_an_unknown_version_is_later_than_any_other(metadata):
    metadata({}, dict)
    assert support.triton_version() > (sys.maxsize - 1,)
