"""Sphinx's settings for the course's book; `shared/book/build.py` copies it beside the pages."""

from pathlib import Path
from typing import Any

import shared.book
from shared.book.chinese_search import Pairs

project = "Torch-Handle"
author = "the Torch-Handle course"
project_copyright = "MIT licence"
html_title = "Torch-Handle"
html_theme = "sphinx_book_theme"
html_static_path = ["_static"]
html_css_files = ["book.css"]
html_search_scorer = str(Path(shared.book.__file__).with_name("scorer.js"))
html_show_sourcelink = False
html_copy_source = False
html_theme_options = {
    "show_toc_level": 2,
    "home_page_in_toc": True,
    "use_download_button": False,
    "use_fullscreen_button": False,
    "navigation_with_keys": False,  # arrow keys are the pictures'
    "navbar_persistent": [],  # the side bar has the search field
    "article_header_end": ["article-header-buttons"],
}
extensions = ["myst_nb", "sphinx-mathjax-offline", "sphinx.ext.mathjax"]
# Markdown as Jupyter reads it: dollars are mathematics, headings can be linked.
myst_enable_extensions = ["dollarmath", "amsmath", "attrs_inline", "deflist"]
myst_heading_anchors = 4
nb_execution_mode = "off"  # the stored outputs are what the course stands for
nb_ipywidgets_js = {}  # there are none, and nothing is fetched when a page opens
nb_merge_streams = True
language = "en"  # and zh_CN for the lessons that have a file in locale/: see chinese.py
locale_dirs = ["locale"]
gettext_compact = False
# A lesson's questions are headings of its own choice, and some begin below the second level.
suppress_warnings = ["myst.header", "mystnb.unknown_mime_type"]


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.add_search_language(Pairs)  # where `language` is Chinese
