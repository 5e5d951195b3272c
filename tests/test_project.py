"""The files about the project agree with it: version and citation."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml

import latte

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_the_version_is_written_once(project):
    assert project["project"]["dynamic"] == ["version"] and "version" not in project["project"]
    source = (ROOT / project["tool"]["hatch"]["version"]["path"]).read_text(encoding="utf-8")
    assert re.findall(r'^__version__ = "(.*)"$', source, re.M) == [latte.__version__]
    assert "\nversion:" not in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


def test_the_changelog_begins_with_this_version_and_a_date():
    headings = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.M)
    assert headings[0].startswith(latte.__version__)
    assert all(re.search(r"\d{4}-\d{2}-\d{2}", heading) for heading in headings)


def test_the_citation_names_the_paper_of_readme():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    paper = citation["preferred-citation"]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert paper["title"] in readme and str(paper["year"]) in readme
    assert all(author["family-names"] in readme for author in paper["authors"])
    assert citation["license"] == "MIT" and citation["cff-version"] == "1.2.0"
