"""The documents, and what is read out of them."""

import importlib.util
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Document:
    """A Markdown file of the repository."""

    name: str

    @property
    def path(self):
        return ROOT / self.name

    @property
    def text(self):
        return self.path.read_text(encoding="utf-8")

    @property
    def prose(self):
        """The text without fenced blocks."""
        return re.sub(r"^```.*?^```", "", self.text, flags=re.S | re.M)

    def blocks(self, language):
        """(line of the first line, text) of each fenced block of a language."""
        found = re.finditer(rf"^```{language}\n(.*?)^```", self.text, re.S | re.M)
        return [(self.text[: m.start()].count("\n") + 2, m.group(1)) for m in found]

    def commands(self):
        """The shell commands of its bash blocks, split into words."""
        lines = "\n".join(block for _, block in self.blocks("bash")).replace("\\\n", " ")
        return [shlex.split(line) for line in lines.splitlines() if line.strip()]

    def tables(self):
        """Its tables, as lists of rows by column name."""
        tables = []
        for match in re.finditer(r"(?:^\|.*\|\n)+", self.prose, re.M):
            rows = [
                [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
                for line in match.group().splitlines()
            ]
            tables.append([dict(zip(rows[0], row, strict=True)) for row in rows[2:]])
        return tables


NAMES = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md"]
# The pages of the site: the documents, and the experiments' results and logs.
PAGES = ("docs/**/*.md", "experiments/results/*.md", "experiments/logs/*.md")
NAMES += sorted(str(path.relative_to(ROOT)) for each in PAGES for path in ROOT.glob(each))


def pytest_generate_tests(metafunc):
    if "document" in metafunc.fixturenames:
        metafunc.parametrize("document", [Document(name) for name in NAMES], ids=NAMES)


@pytest.fixture
def root():
    return ROOT


@pytest.fixture(scope="session")
def script_of():
    """script_of(path) -> a script of the documents, as a module."""

    def load(path):
        spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture
def read():
    """read(name) -> the Document of that name."""
    return Document
