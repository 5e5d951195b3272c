"""Steps of `mkdocs build`: the experiments' pages are part of the site, and roles of docstrings go.

Results, logs and figures lie in `experiments/`, beside the code that makes them. Links are written
for the repository, from file to file. The site has these files under `experiments/` too.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PARTS = ("results/*.md", "logs/*.md", "figures/*.png", "figures/*.csv")


def on_files(files: Files, config: Any) -> Files:
    """Add the experiments' files."""
    for pattern in PARTS:
        for path in sorted((ROOT / "experiments").glob(pattern)):
            name = path.relative_to(ROOT).as_posix()
            files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: object) -> str:
    """Links between `docs/` and `experiments/`, as the site has the files."""
    uri = page.file.src_uri
    home = posixpath.dirname(uri if uri.startswith("experiments/") else f"docs/{uri}")
    here = posixpath.dirname(uri)

    def link(match: re.Match[str]) -> str:
        target, mark, anchor = match[1].partition("#")
        if not target or ":" in target:
            return match[0]
        place = posixpath.normpath(posixpath.join(home, target)).removeprefix("docs/")
        return f"]({posixpath.relpath(place, here or '.')}{mark}{anchor})"

    return re.sub(r"\]\(([^)\s]+)\)", link, markdown)


def on_page_content(html: str, **_: object) -> str:
    """``:class:`Mixer` `` of a docstring, made HTML by the Markdown reader, without the role."""
    return re.sub(r":(?:class|func|meth|mod|attr):(?=<code>)", "", html)
