"""Reads the sections of docstrings and the arguments that they describe, and runs their examples."""

import doctest
import inspect
import re


def missing_sections(described, sections):
    """Returns those of `sections` that a docstring does not have."""
    text = inspect.getdoc(described)
    return [name for name in sections if f"\n{name}:\n" not in text]


def names_in(described, section):
    """Returns the names that a section of a docstring describes, sorted."""
    entries = inspect.getdoc(described).split(f"\n{section}:\n")[1].split("\n\n")[0]
    return sorted(re.findall(r"^  \*{0,2}(\w+): ", entries, re.MULTILINE))


def type_of_result(described):
    """Returns what the site shows as the type of the result: what a colon in the first line of `Returns` follows."""
    first_line = inspect.getdoc(described).split("\nReturns:\n")[1].split("\n")[0]
    return first_line.rpartition(": ")[0]


def parameters_of(function):
    """Returns the names of a function's parameters, sorted."""
    return sorted(name for name in inspect.signature(function).parameters if name != "self")


def run_examples(described):
    """Runs the examples of a docstring and compares what they print.

    They must be in the section "Examples". The site shows no other section as code.
    """
    assert missing_sections(described, ["Examples"]) == []
    (test,) = doctest.DocTestFinder(recurse=False).find(described, described.__name__, globs={})
    assert any(example.want for example in test.examples), "the examples print nothing that is checked"
    output = []
    failed, _ = doctest.DocTestRunner().run(test, out=output.append)
    assert not failed, "".join(output)
