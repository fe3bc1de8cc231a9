"""Settings of Sphinx for the site that `make docs` builds from this folder."""

from __future__ import annotations

import sys
from pathlib import Path

from apex_mp import __version__

sys.path.insert(0, str(Path(__file__).parent / "_site"))

project = "apex_mp"
author = "apex_mp authors"
copyright = "apex_mp authors, BSD-3-Clause"  # noqa: A001
release = version = __version__

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "myst_parser",
    "sphinx_copybutton",
    "docstrings",  # of _site/
    "repository",
]
exclude_patterns = ["_site"]
html_theme = "furo"
pygments_style = "friendly"
pygments_dark_style = "github-dark"
html_title = f"apex_mp {__version__}"
html_static_path = ["_site/static"]
html_favicon = "_site/static/favicon.svg"
html_css_files = ["apex_mp.css"]
html_js_files = ["page.js"]
html_search_scorer = str(Path(__file__).parent / "_site" / "scorer.js")
html_copy_source = False
html_show_sphinx = False

myst_heading_anchors = 4
myst_enable_extensions = ["attrs_block", "colon_fence"]
copybutton_prompt_text = "$ "
copybutton_exclude = ".linenos, .gd, .sign"  # Of a diff, as page.js marks it, what comes after.

default_role = "py:obj"  # `name` in a docstring
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_mock_imports = ["accelerate", "lightning", "pytorch_lightning"]
napoleon_numpy_docstring = False
napoleon_use_ivar = True
python_use_unqualified_type_names = True
maximum_signature_line_length = 88
autodoc_default_options = {
    "members": True,
    "undoc-members": True,  # so that _site/docstrings.py sees them
    "show-inheritance": True,
    # Up to torch's, Lightning's and Python's own classes.
    "inherited-members": "Optimizer, Module, GradScaler, DistributedDataParallel, LayerNorm, "
    "_NormBase, ScaledPrecision, MixedPrecision, Exception, object",
    # Those of exceptions, modules, process groups and torch's optimizers, and what GradScaler uses.
    "exclude-members": "args, forward, join_hook, register_comm_hook, check_gradients, state, "
    "param_groups, unscale_grads",
}
