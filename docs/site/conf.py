"""The site, built by Sphinx from the pages in ``docs/`` and the docstrings of the source: ``make docs``."""

import sys
from pathlib import Path

from sphinx.application import Sphinx

from tensorkeep.version import __version__

sys.path.insert(0, str(Path(__file__).parent))

import reference

project = "Tensorkeep"
version = release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["site"]

# The anchors that the repository's website gives to headings, so that a link works there and here.
myst_heading_anchors = 4

# Signatures without types: numpydoc's sections have them in words.
autodoc_typehints = "none"
autodoc_member_order = "bysource"
python_maximum_signature_line_length = 80
napoleon_google_docstring = False
# Several names may share a description: "a, b : path-like".
napoleon_use_param = False
napoleon_custom_sections = [("Attributes", "params_style")]
# `save` in a docstring is a link where it names something of the reference.
default_role = "py:obj"

html_theme = "furo"
html_title = f"Tensorkeep {__version__}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_js_files = ["site.js"]
html_copy_source = False
html_show_copyright = False


def setup(app: Sphinx) -> None:
    """Write the pages of the reference before Sphinx reads its sources, and complete some of them while it reads."""
    app.connect("builder-inited", reference.write_pages)
    app.connect("source-read", reference.complete_page)
