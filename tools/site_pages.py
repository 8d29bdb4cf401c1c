"""Pages of the site beside those in `site/`: one of the API reference for each family of names. `mkdocs.yml` names it.

It also makes `site/home.md` the first page, in place of the README, and lets pictures follow the site's dark mode.
"""

import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# package: {title of a page: the public names that it describes}
API = {
    "jaxrnn": {
        "GRU": ["gru", "GRUParams"],
        "LSTM": ["lstm", "LSTMParams"],
        "MGU": ["mgu", "MGUParams"],
        "Simple RNN": ["simple_rnn", "SimpleParams"],
        "Normed GRU": ["norm_gru", "NormGRUParams"],
        "Norms": ["rms_norm", "layer_norm"],
        "Choice of implementation": ["explain", "Explanation", "default_implementation", "ImplementationWarning"],
        "Launches": ["launch_method", "LaunchMethod", "register_native_launch"],
    },
    "jaxrnn.linen": {
        "ScannedRNN": ["ScannedRNN", "HiddenFirstScannedRNN"],
        "ResetRNN": ["ResetRNN"],
        "RNN": ["RNN"],
        "GRU": ["GRU"],
        "LSTM": ["LSTM"],
        "MGU": ["MGU"],
        "SimpleRNN": ["SimpleRNN"],
        "NormGRU": ["NormGRU"],
        "GRUCell": ["GRUCell"],
        "LSTMCell": ["LSTMCell", "OptimizedLSTMCell"],
        "MGUCell": ["MGUCell"],
        "SimpleCell": ["SimpleCell"],
        "NormGRUCell": ["NormGRUCell"],
        "Norms": ["RMSNorm", "LayerNorm"],
    },
    "jaxrnn.nnx": {
        "RNN": ["RNN"],
        "GRU": ["GRU"],
        "LSTM": ["LSTM"],
        "SimpleRNN": ["SimpleRNN"],
        "NormGRU": ["NormGRU"],
        "GRUCell": ["GRUCell"],
        "LSTMCell": ["LSTMCell", "OptimizedLSTMCell"],
        "SimpleCell": ["SimpleCell"],
        "NormGRUCell": ["NormGRUCell"],
        "Norms": ["RMSNorm", "LayerNorm"],
    },
    "jaxrnn.convert": {
        "PyTorch": ["from_torch", "to_torch"],
        "Flax linen": ["from_linen", "to_linen"],
        "Flax NNX": ["from_nnx", "to_nnx"],
        "Equinox": ["from_equinox", "to_equinox"],
        "Haiku": ["from_haiku", "to_haiku"],
        "Keras": ["from_keras", "to_keras"],
    },
    "torch_bridge": {
        "Choice of implementation": ["explain", "Explanation", "ImplementationWarning"],
    },
    "torch_bridge.nn": {
        "GRU": ["GRU"],
        "LSTM": ["LSTM"],
        "MGU": ["MGU"],
        "RNN": ["RNN"],
        "NormGRU": ["NormGRU"],
        "Norms": ["RMSNorm", "LayerNorm"],
        "Trajectories": ["run_trajectories"],
    },
    "torch_bridge.functional": {
        "GRU": ["gru"],
        "LSTM": ["lstm"],
        "MGU": ["mgu"],
        "RNN": ["rnn"],
        "Normed GRU": ["norm_gru"],
        "Norms": ["rms_norm", "layer_norm"],
        "Layers": ["run_layer", "Direction", "DirectionResult", "Implementation"],
    },
}


def page_path(package, title):
    """Returns the path of a page among the sources of the site."""
    return f"api/{package}/{title.replace(' ', '-')}.md"


def identifier(package, name):
    """Returns the path by which mkdocstrings finds a name: a module is found before a function that hides it."""
    hidden = ROOT / package.replace(".", "/") / f"{name}.py"
    return f"{package}.{name}.{name}" if hidden.exists() else f"{package}.{name}"


def directive(identifier, **options):
    """Returns the Markdown that mkdocstrings replaces by the description of a name."""
    return f"::: {identifier}\n    options: {json.dumps(options)}\n"


def methods(package, name):
    """Returns the methods and properties of a class that its page describes."""
    if name == "Explanation":
        return ["implementation", "reason", "launches", "unavailable"]
    return ["forward"] if package.startswith("torch_bridge") else ["__call__", "initialize_carry"]


def family(package, title):
    """Returns the page of a family of names."""
    described = (
        directive(
            identifier(package, name), heading=f"{package}.{name}", toc_label=name, members=methods(package, name)
        )
        for name in API[package][title]
    )
    return f"# {title} in {package}\n\n" + "\n".join(described)


def overview(package, summary):
    """Returns the page of a package: its docstring, and `summary` of each public name."""
    docstring = directive(package, members=False, show_root_heading=False, show_root_toc_entry=False)
    paths = {name: identifier(package, name) for names in API[package].values() for name in names}
    rows = "".join(f"| [`{name}`][{path}] | {summary(path)} |\n" for name, path in paths.items())
    return f"# {package}\n\n{docstring}\n| name | description |\n| --- | --- |\n{rows}"


def on_config(config):
    """Adds the reference to the navigation, behind `api/index.md`."""
    (reference,) = (entry["API"] for entry in config.nav if "API" in entry)
    for package, pages in API.items():
        families = [{title: page_path(package, title)} for title in pages]
        reference.append({package: [page_path(package, "index"), *families]})


def on_files(files, config):
    """Adds the pages of the reference, and makes `home.md` the first page of the site, which a README would be."""
    import griffe
    from mkdocs.structure.files import File

    loader = griffe.GriffeLoader(search_paths=[ROOT])
    for package in ("torch_bridge", "jaxrnn"):
        loader.load(package)
    loader.resolve_aliases()

    def summary(path):
        return loader.modules_collection[path].docstring.value.splitlines()[0]

    for package, pages in API.items():
        texts = {"index": overview(package, summary)} | {title: family(package, title) for title in pages}
        for title, text in texts.items():
            files.append(File.generated(config, page_path(package, title), content=text))

    for file in files.documentation_pages():
        if file.src_uri == "home.md":
            file.name, file.dest_uri = "index", "index.html"
        elif file.src_uri.endswith("README.md"):  # a page like any other
            file.name, file.dest_uri = "README", file.src_uri.replace(".md", ".html")


def on_page_content(html, page, config, files):
    """Replaces a picture, which follows the browser's setting, by two images of which the theme shows one."""
    return re.sub(
        r'<picture>\s*<source [^>]*srcset="([^"]+)">\s*(<img [^>]*src=")([^"]+)("[^>]*>)\s*</picture>',
        r"\2\3#only-light\4\2\1#only-dark\4",
        html,
    )
