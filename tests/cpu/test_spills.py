"""Tests of `spills`: what the compile tests know of kernels that spill."""

import json

import pytest
import spills

TABLE = {"3.7": {"a": {"80": 8}}, "3.10": {"a": {"80": 16}}}


def test_the_file_is_as_write_spills_leaves_it():
    table = json.loads(spills.PATH.read_text())
    assert spills.PATH.read_text() == spills.text_of(table)
    assert all(spills.updated(entries, []) == entries for entries in table.values())


@pytest.mark.parametrize(("version", "found"), [((3, 6), 8), ((3, 7), 8), ((3, 8), 16), ((3, 10), 16), ((4, 0), 16)])
def test_a_version_without_entries_has_those_of_the_next_one_or_of_the_last(version, found):
    assert spills.of_version(TABLE, version) == {"a": {"80": found}}


def test_measured_bytes_replace_those_of_their_kind_and_capability():
    entries = {"a": {"80": 8, "90": 24}, "b": {"80": 8}}
    measured = [("a", 80, 16), ("a", 80, 0), ("b", 80, 0), ("c", 120, 8), ("c", 90, 40)]
    assert spills.updated(entries, measured) == {"a": {"80": 16, "90": 24}, "c": {"90": 40, "120": 8}}
    assert spills.updated({}, [("a", 80, 0)]) == {}
