"""A step of `mkdocs build`: roles of reStructuredText in docstrings are shown as plain code."""

import re


def on_page_content(html: str, **_: object) -> str:
    """``:class:`Mixer` `` of a docstring, made HTML by the Markdown reader, without the role."""
    return re.sub(r":(?:class|func|meth|mod|attr):(?=<code>)", "", html)
