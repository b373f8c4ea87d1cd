"""Loaded before nbformat, this takes two seconds off the start of every pytest and notebook run.

nbformat imports jsonschema, which imports rfc3987_syntax where it is installed (JupyterLab brings
it) for the format "iri", and that module builds a grammar. No notebook's schema has that format.
pyproject.toml loads this as pytest's first plugin, ahead of nbval.
"""

import sys
from typing import Any, cast

cast(dict[str, Any], sys.modules)["rfc3987_syntax"] = None  # importing it is an ImportError now
