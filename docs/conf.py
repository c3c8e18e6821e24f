"""How Sphinx builds these pages (`make docs`).

The pages are Markdown, so that they can be read in the repository as they are; Sphinx adds navigation, search and the
API reference from docstrings. Nothing here needs a network: types of other projects are not linked, and links from a
page to files of the repository that are no pages become copies of these files in the built docs, for no host of the
repository is known.
"""

from __future__ import annotations

import importlib
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.transforms import SphinxTransform

project = "Penstock"
author = "The Penstock authors"
copyright = author
release = metadata.version("penstock")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4

default_role = "code"
autoclass_content = "both"
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_mock_imports = ["lightning", "transformers"]  # seconds of a core, for a base class

PUBLIC = ("penstock.client", "penstock.client.checkpoint", "penstock.worker", "penstock.data")
"""Modules that re-export the API: their names are documented there, wherever they are defined."""

nitpick_ignore_regex = [
    # Of other projects, or private: named in signatures, and not documented here.
    (r"py:.*", r"(?!penstock\.).*"),
    (r"py:.*", r"penstock\.(?!client\.\w+$|client\.checkpoint\.\w+$|worker\.\w+$|data\.\w+$).*"),
]

html_theme = "furo"
html_title = f"Penstock {release}"
html_show_sphinx = False
html_copy_source = False
html_static_path: list[str] = []

REPOSITORY = Path(__file__).resolve().parents[1]
PAGES_OF = {"README.md": "index", "CHANGELOG.md": "changelog", "CONTRIBUTING.md": "contributing"}
"""Files outside docs/ that are pages all the same -> their pages."""


class RepositoryLinks(SphinxTransform):
    """Links out of docs/: to a page where there is one, to a copy of a file; what is a folder is only named."""

    default_priority = 5  # before what was parsed is resolved or collected

    def apply(self, **kwargs: Any) -> None:
        pages = Path(self.env.srcdir).resolve()
        for node in list(self.document.findall(addnodes.pending_xref)):
            if node.get("reftype") != "myst":
                continue
            target = node["reftarget"].partition("#")[0]
            path = (pages / Path(node["refdoc"]).parent / target).resolve()
            if node.get("refdomain") == "doc":
                path = path if path.exists() else path.with_name(f"{path.name}.md")
            if not path.exists() and (REPOSITORY / target).exists():
                path = REPOSITORY / target  # a link of the README or CONTRIBUTING.md, which pages include
            if not target or path.is_relative_to(pages) or not path.is_relative_to(REPOSITORY):
                continue
            page = PAGES_OF.get(path.relative_to(REPOSITORY).as_posix())
            if page is not None:
                node["refdomain"], node["reftarget"], node["reftargetid"] = "doc", page, None
            elif path.is_file():
                copy = addnodes.download_reference(
                    "", "", *node.children, reftarget=f"/../{path.relative_to(REPOSITORY).as_posix()}"
                )
                copy["refdoc"] = node["refdoc"]
                node.replace_self(copy)
            elif path.is_dir():
                node.replace_self(nodes.literal("", path.relative_to(REPOSITORY).as_posix()))


def with_commands(app: Sphinx, docname: str, source: list[str]) -> None:
    """Add to the page of the command what `--help` says now."""
    if docname == "cli":
        app.env.note_reread()
        sys.path.append(str(REPOSITORY / "tests" / "support"))
        source[0] += importlib.import_module("cli_page").made()


def without_absent_pages(app: Sphinx, docname: str, source: list[str]) -> None:
    """Drop the index's patterns (lines that end in *) that no page matches: pages come with what they describe."""
    if docname == "index":
        lines = source[0].splitlines(keepends=True)
        pages = Path(app.srcdir)
        source[0] = "".join(line for line in lines if not line.endswith("*\n") or any(pages.glob(f"{line.strip()}.md")))


def public_name(app: Sphinx, env: BuildEnvironment, node: addnodes.pending_xref, shown: nodes.TextElement) -> Any:
    """Annotations name a class by the module it is defined in; it is documented in the one where it is public."""
    home, _, name = node.get("reftarget", "").rpartition(".")
    for module in PUBLIC:
        found = getattr(importlib.import_module(module), name, None)
        if found is not None and home in ("", getattr(found, "__module__", None)):
            return env.domains.python_domain.resolve_xref(
                env, node["refdoc"], app.builder, node["reftype"], f"{module}.{name}", node, shown
            )
    return None


def setup(app: Sphinx) -> None:
    app.connect("source-read", without_absent_pages)
    app.connect("source-read", with_commands)
    app.add_transform(RepositoryLinks)
    app.connect("missing-reference", public_name)
