"""The README as PyPI shows it, without the repository around it; everything else is in pyproject.toml."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from setuptools import setup

_HERE = Path(__file__).parent
_RELATIVE_LINK = re.compile(r"\[([^\]]+)\]\((?!https?://)([^)]+)\)")


def _description() -> str:
    """README.md with links into the repository, or, as long as pyproject.toml names none, with the bare names."""
    urls = tomllib.loads((_HERE / "pyproject.toml").read_text())["project"].get("urls", {})
    link = rf"[\1]({urls['Source']}/blob/HEAD/\2)" if "Source" in urls else r"\1"
    return _RELATIVE_LINK.sub(link, (_HERE / "README.md").read_text())


setup(long_description=_description(), long_description_content_type="text/markdown")
