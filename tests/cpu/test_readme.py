"""Runs the snippets of README.md and of the pages of docs, one after the other per page.

Snippets below `<!-- no-run -->` need several hosts, a GPU or code of the reader: stand-ins replace these. The snippets
of `docs/codebases.md` are compared with the code bases in `test_codebases.py`. The output of snippets
equals the output that the pages show.
"""

import contextlib
import io
import logging
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import jaxrnn

ROOT = Path(__file__).resolve().parents[2]
SNIPPET = re.compile(r"(<!-- no-run -->\n)?^ *```python\n(.*?)```", re.DOTALL | re.MULTILINE)
NEEDS_TORCH = re.compile(r"^(import|from) torch|device=\"", re.MULTILINE)
MARKDOWN = ["README.md", *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))]
PAGES = [
    pytest.param(page, marks=[pytest.mark.torch] * bool(NEEDS_TORCH.search(text)))
    for page in MARKDOWN
    if page != "docs/codebases.md" and "```python" in (text := (ROOT / page).read_text())
]


@pytest.mark.parametrize("page", PAGES)
def test_snippets_of_a_page_run(page):
    names = {}
    snippets = SNIPPET.findall((ROOT / page).read_text())
    runs = [not no_run for no_run, _ in snippets]
    assert any(runs) and (all(runs) or not page.startswith("docs/pytorch"))
    for no_run, snippet in snippets:
        code = compile(snippet, page, "exec")
        if not no_run:
            exec(code, names)


def test_quickstart_of_the_readme_needs_neither_torch_nor_triton():
    snippets = [snippet for _, snippet in SNIPPET.findall((ROOT / "README.md").read_text())]
    assert "import jaxrnn" in snippets[0]
    for snippet in snippets:
        if not NEEDS_TORCH.search(snippet):
            exec(compile(snippet, "README.md", "exec"), {})


@pytest.mark.parametrize("page", MARKDOWN)
def test_the_site_knows_every_fence(page):
    """The site renders a fence with one word behind it; text behind the word makes it a paragraph."""
    fences = [line.strip() for line in (ROOT / page).read_text().splitlines() if line.strip().startswith("```")]
    assert len(fences) % 2 == 0
    assert [fence for fence in fences if not re.fullmatch(r"```\w*", fence)] == []


# Snippets run with stand-ins


def runs_in(page, index, names):
    """Runs the snippet of a page below `<!-- no-run -->` that has this index among them, with these names."""
    snippets = [snippet for no_run, snippet in SNIPPET.findall((ROOT / page).read_text()) if no_run]
    exec(compile(snippets[index], page, "exec"), names)
    return names


def gru():
    """Returns parameters, a carry and inputs of a GRU with four units."""
    params = jaxrnn.GRUParams(jnp.ones((3, 12)), jnp.ones((4, 12)), jnp.ones(12), jnp.ones(4))
    return params, jnp.zeros((8, 4)), jnp.linspace(-1, 1, 5 * 8 * 3).reshape(5, 8, 3)


def run_the_default_of_a_program(monkeypatch):
    reasons = []

    def train():
        reasons.append(jaxrnn.explain(jaxrnn.gru, *gru(), device="a100").reason)

    runs_in("docs/choice.md", 0, {"jaxrnn": jaxrnn, "train": train})
    assert reasons == ['jaxrnn.default_implementation("triton") holds']


def run_the_log(monkeypatch):
    logger, records = logging.getLogger("jaxrnn"), []
    before = logger.level
    monkeypatch.setattr(logging, "basicConfig", lambda: records.append("a handler"))
    try:
        runs_in("docs/choice.md", 1, {})
        assert logger.level == logging.DEBUG != before and records == ["a handler"]
    finally:
        logger.setLevel(before)


def run_the_export(monkeypatch):
    """The policy runs in XLA, and the check of the launch's name is disabled without effect."""
    params, carry, observations = gru()
    names = {"policy": jaxrnn.gru, "params": params, "carry": carry, "observations": observations}
    data = runs_in("docs/native_launch.md", 0, dict(names))["data"]
    registered = []
    monkeypatch.setattr(jaxrnn, "register_native_launch", lambda: registered.append(True))  # needs a C compiler
    _, ys = runs_in("docs/native_launch.md", 1, names | {"data": data})["actions"]
    assert registered == [True] and jnp.array_equal(ys, jax.jit(jaxrnn.gru)(params, carry, observations)[1])


def run_several_hosts(monkeypatch):
    """One process stands for all hosts."""
    params, carry, xs = gru()
    updates, initialized = [], []

    def update(params, carry, xs, resets):
        updates.append((xs.sharding.spec, jax.tree.map(lambda x: x.sharding.is_fully_replicated, params)))
        return jax.tree.map(lambda x: x + jaxrnn.gru(params, carry, xs)[1].sum(), params)

    monkeypatch.setattr(jax.distributed, "initialize", lambda: initialized.append(True))
    names = {"local": xs, "params": params, "carry": carry, "resets": None, "update": update}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        found = runs_in("docs/devices.md", 0, names)
    ((spec, replicated),) = updates
    assert initialized == [True] and spec == jax.sharding.PartitionSpec(None, "devices")
    assert jax.device_count() == found["mesh"].size and all(jax.tree.leaves(replicated))
    assert "GRUParams" in printed.getvalue() and jnp.array_equal(found["xs"], xs)
    assert jnp.allclose(found["params"].b_hn, params.b_hn + jaxrnn.gru(params, carry, xs)[1].sum(), rtol=1e-5)


# Each of the functions above, and the snippets that it runs.
NO_RUN = {
    run_the_default_of_a_program: [("docs/choice.md", 0)],
    run_the_log: [("docs/choice.md", 1)],
    run_several_hosts: [("docs/devices.md", 0)],
    run_the_export: [("docs/native_launch.md", 0), ("docs/native_launch.md", 1)],
}
NEED_TRITON = [run_the_default_of_a_program]


@pytest.mark.parametrize("run", [pytest.param(x, marks=[pytest.mark.torch] * (x in NEED_TRITON)) for x in NO_RUN])
def test_snippets_run_with_stand_ins(run, monkeypatch):
    run(monkeypatch)


def test_every_snippet_runs_in_some_test():
    found = [
        (page, index)
        for page in MARKDOWN
        for index in range(sum(bool(no_run) for no_run, _ in SNIPPET.findall((ROOT / page).read_text())))
    ]
    assert found == [snippet for snippets in NO_RUN.values() for snippet in snippets]


# The output of snippets


def shown(page):
    """Returns what a page shows of explanations, as regular expressions: `...` stands for anything."""
    fences = re.findall(r"^```(\w*)\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
    blocks = [block for word, block in fences if not word and re.match(r"on NVIDIA|\w+\(xs ", block)]
    return [re.escape(block.rstrip("\n")).replace(re.escape("..."), "(?s:.*)") for block in blocks]


@pytest.fixture
def without_an_interpreter(monkeypatch):
    """Makes kernels those of a process without Triton's interpreter, on a machine without a GPU."""
    from torch_bridge import availability, compiler
    from torch_bridge.rnn_ops import implementation

    monkeypatch.setattr(compiler, "interpreting", lambda: False)
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    uncached = implementation._unsupported.__wrapped__
    monkeypatch.setattr(implementation, "_unsupported", availability.cached_reason(uncached))


@pytest.mark.torch
@pytest.mark.parametrize("page", ["docs/choice.md", "docs/pytorch.md"])
def test_explanations_are_those_that_the_page_shows(page, without_an_interpreter):
    names = {}
    for no_run, snippet in SNIPPET.findall((ROOT / page).read_text()):
        if not no_run and "there" not in names:
            exec(compile(snippet, page, "exec"), names)
    here, there = shown(page)
    assert re.fullmatch(here, str(names["here"])), names["here"]
    assert re.fullmatch(there, str(names["there"])), names["there"]


@pytest.mark.torch
def test_the_explanation_that_the_readme_shows_is_that_of_its_snippet():
    (pattern,), names = shown("README.md"), {}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        for _, snippet in SNIPPET.findall((ROOT / "README.md").read_text()):
            exec(compile(snippet, "README.md", "exec"), names)
    assert re.search(f"^{pattern}", printed.getvalue(), re.MULTILINE)
