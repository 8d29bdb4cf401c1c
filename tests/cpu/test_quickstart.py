"""Runs `docs/quickstart.ipynb` from top to bottom: what its cells print is what the notebook shows, up to decimals."""

import contextlib
import io
import json
import re
from pathlib import Path

NOTEBOOK = Path(__file__).resolve().parents[2] / "docs" / "quickstart.ipynb"


def masked(text):
    """Returns text with a mark in place of every decimal number, which another JAX may round differently."""
    return re.sub(r"\d+\.\d+", "#", text)


def test_the_notebook_runs_and_prints_what_it_shows():
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == [*range(1, len(cells) + 1)]
    names, shown = {}, 0
    for cell in cells:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("".join(cell["source"]), NOTEBOOK.name, "exec"), names)
        outputs = "".join("".join(output["text"]) for output in cell["outputs"])
        assert masked(printed.getvalue()) == masked(outputs)
        shown += bool(outputs)
    assert shown >= 5
