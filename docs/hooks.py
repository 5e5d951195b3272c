"""Steps of `mkdocs build`: the results' pages join the site, and roles of docstrings become code.

Results, logs and figures lie in `experiments/`, outside of the documents' folder. In the site they
are in a folder `experiments/` inside of it. So links to and from them are one folder shorter there.
"""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
SHOWN = ("experiments/results/*.md", "experiments/logs/*.md", "experiments/figures/*")
PICTURES = (".png", ".svg", ".csv")


def on_files(files: Any, config: Any, **_: object) -> Any:
    """Add the results' pages and their figures."""
    for path in sorted(path for pattern in SHOWN for path in ROOT.glob(pattern)):
        if path.suffix in (".md", *PICTURES):
            name = path.relative_to(ROOT).as_posix()
            files.append(File(name, str(ROOT), config.site_dir, config.use_directory_urls))
    return files


def on_page_markdown(markdown: str, page: Any, **_: object) -> str:
    """Links between the documents and the results, as the site has them."""
    if page.file.src_uri.startswith("experiments/"):
        return markdown.replace("](../../docs/", "](../../")
    return re.sub(r"\]\(\.\./((?:\.\./)*experiments/)", r"](\1", markdown)


def on_page_content(html: str, **_: object) -> str:
    """``:class:`Mixer` `` of a docstring, made HTML by the Markdown reader, without the role."""
    return re.sub(r":(?:class|func|meth|mod|attr):(?=<code>)", "", html)
