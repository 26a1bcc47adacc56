"""How Sphinx builds the site: from the pages of the repository, where they stand, and from what is
written here first, a page for each public module and one for each command::

    sphinx-build -W -c .docs . .docs/site
"""

from __future__ import annotations

import pydoc
import subprocess
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.pycode import ModuleAnalyzer

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import public  # noqa: E402

import ctl  # noqa: E402
from ctl.__main__ import COMMANDS  # noqa: E402
from ctl.base.console import load_tensorflow  # noqa: E402
from ctl.inspect.__main__ import COMMANDS as OF_INSPECT  # noqa: E402

project = "ctl"
version = release = ctl.__version__
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]

# Pages. The sources are the whole repository: a link between two pages works on both.
include_patterns = [
    *("README.md", "CONTRIBUTING.md", ".github/*.md", "ctl/**", "tests/**", "benchmarks/**"),
    *(".docs/index.md", ".docs/api/*", ".docs/commands/*"),
]
exclude_patterns = [".venv", "**/.ipynb_checkpoints"]
root_doc = ".docs/index"
html_extra_path = ["root"]
html_theme = "furo"
html_title = "ctl"
html_copy_source = html_show_copyright = html_use_index = html_domain_indices = False
html_static_path = ["static"]
html_css_files = ["site.css"]
highlight_language = "none"
smartquotes_action = "D"  # dashes, no quotes
myst_heading_anchors = 4  # as on GitHub, a link may lead to any heading
nb_execution_mode = "off"  # a notebook is shown as it is stored

# Docstrings.
default_role = "py:obj"
nitpicky = True
nitpick_ignore_regex = [  # TensorFlow's private modules, and a type that Sphinx does not parse
    ("py:class", r"tensorflow\.python\..*|collections\.abc\.Callable\[\["),
]
autodoc_default_options = {"show-inheritance": True, "member-order": "bysource"}
autodoc_typehints_format = "short"
autodoc_type_aliases = {n: n for n in ("tf", "keras", "np")}  # tf.Tensor, as it is written
napoleon_attr_annotations = False  # the signature has them
autodoc_preserve_defaults = True
maximum_signature_line_length = 80


def write_pages(folder: Path, pages: dict[str, str]) -> None:
    """Writes what has changed, so that Sphinx reads only that again, and deletes other pages."""
    folder.mkdir(exist_ok=True)
    for path in folder.glob("*.rst"):
        if path.stem not in pages:
            path.unlink()
    for name, text in pages.items():
        path = folder / f"{name}.rst"
        if not path.exists() or path.read_text("utf-8") != text:
            path.write_text(text, "utf-8")


def pages_of_commands() -> dict[str, str]:
    """Each is written by a process of its own: a command defines its flags for the process."""
    commands = {f"ctl {name}": module for name, (module, _) in COMMANDS.items()}
    commands |= {f"ctl inspect {name}": module for name, (module, _) in OF_INSPECT.items()}
    del commands["ctl inspect"]  # has no flags but those of its sub-commands
    pages = {}
    for title, module in commands.items():
        writer = [sys.executable, HERE / "command_page.py", title, module]
        written = subprocess.run(writer, check=True, stdout=subprocess.PIPE, text=True)
        pages[title.replace(" ", "-")] = written.stdout
    return pages


def pages_of_modules() -> dict[str, str]:
    """What several modules have is documented in the first of them, and named in the others."""
    home: dict[int, str] = {}
    pages = {}
    for path, module in public.modules().items():
        sys.modules[path] = module  # autodoc imports ``ctl.actions``, which is an attribute of ctl
        names = public.names(module)
        for value in names.values():
            home.setdefault(id(value), path)
        own = [name for name, value in names.items() if home[id(value)] == path]
        constants = ModuleAnalyzer.for_module(module.__name__).find_attr_docs()
        own += [name for owner, name in constants if not owner]
        others = [f"`{home[id(value)]}.{n}`" for n, value in names.items() if n not in own]
        text = f"{path}\n{'=' * len(path)}\n\n.. highlight:: python\n\n.. automodule:: {path}\n"
        if own:
            text += f"   :members: {', '.join(own)}\n"
        if others:
            text += f"\nAlso here: {', '.join(others)}.\n"
        pages[path] = text
    return pages


def resolve(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, contents: nodes.TextElement
) -> nodes.Node | None:
    """Finds `Loop.train` from any module. A name that has no page becomes code; one that is
    nowhere stays an error."""
    if node["refdomain"] != "py":
        return None
    domain, target = env.domains.python_domain, node["reftarget"]
    owner = attribute(sys.modules[node.get("py:module") or "ctl"], node.get("py:class"))
    ours = [module for name, module in sys.modules.items() if name.partition(".")[0] == "ctl"]
    values = [attribute(root, target) for root in (owner, *ours)] + [pydoc.locate(target)]
    value = next((value for value in values if value is not None), None)
    # A method of the class or its bases, an end of a name, the name where it is defined.
    of_bases = [f"{base.__name__}.{target}" for base in getattr(owner, "__mro__", ())]
    names = [*of_bases, target, f"{getattr(value, '__module__', '')}.{target.rpartition('.')[2]}"]
    for name in names:
        found = domain.find_obj(env, "", "", name, node["reftype"], 1)
        places = {(place.docname, place.node_id) for _, place in found}
        if len(places) == 1:
            docname, anchor = places.pop()
            uri = f"{app.builder.get_relative_uri(node['refdoc'], docname)}#{anchor}"
            return nodes.reference("", "", contents, refuri=uri, internal=True)
    return contents if value is not None else None


def attribute(value: Any, path: str | None) -> Any:
    """What ``value`` has at the dotted ``path``, or None."""
    for name in path.split(".") if path else ():
        value = getattr(value, name, None)
    return value


def without_object(app: Sphinx, tree: nodes.document) -> None:
    """Leaves out what every class has."""
    for line in [p for p in tree.findall(nodes.paragraph) if p.astext() == "Bases: object"]:
        line.parent.remove(line)


def is_field(app: Sphinx, kind: str, name: str, value: Any, *others: Any) -> bool | None:
    """Leaves out the fields of a named tuple, which its docstring describes."""
    return True if str(getattr(value, "__doc__", "")).startswith("Alias for field") else None


def setup(app: Sphinx) -> None:
    app.connect("missing-reference", resolve)
    app.connect("autodoc-skip-member", is_field)
    app.connect("doctree-read", without_object)


load_tensorflow()  # in silence
write_pages(HERE / "commands", pages_of_commands())
write_pages(HERE / "api", pages_of_modules())
