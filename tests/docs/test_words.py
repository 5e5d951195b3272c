"""The users' pages are short, and written in the words of the field."""

import re

import pytest

PAGES = ["README.md", "CONTRIBUTING.md"]
USERS = (
    "index", "install", "own-text", "own-model", "tour", "conversion", "serving", "gpu",
    "guide", "inspect", "own-mixer", "context-parallel", "glossary", "architecture",
    "paper-to-code", "reference/ops", "reference/layers", "reference/models",
    "reference/conversion", "reference/gguf", "reference/data", "compatibility",
    "reference/command-line", "reference/recipes",
)  # fmt: skip
PAGES += [f"docs/{name}.md" for name in USERS]


def words_of(text):
    """A page's own words: no code, no targets of links, no generated tables, no table of words."""
    text = re.sub(r"<!-- generated: .*?<!-- /generated -->", "", text, flags=re.S)
    text = text.partition("\n## Words\n")[0]
    text = re.sub(r"^(    .*|:::.*)$", "", text, flags=re.M)
    return re.sub(r"`[^`]*`|\]\([^)]*\)", "", text)


@pytest.fixture
def not_used(read):
    """The words of CONTRIBUTING's second column, as one pattern."""
    (table,) = (t for t in read("CONTRIBUTING.md").tables() if "we write" in t[0])
    words = [word for row in table for word in row["not"].split(", ") if word]
    assert len(words) >= 10
    return re.compile(rf"\b(?:{'|'.join(words)})s?\b", re.I)


@pytest.mark.parametrize("name", PAGES)
def test_the_words_are_those_of_the_field(name, read, not_used):
    found = not_used.findall(words_of(read(name).prose))
    assert found == []


def test_readme_begins_with_the_method_and_a_first_call(read):
    """Its first screen has the paper, the equation, the picture, and the first commands."""
    readme = read("README.md")
    lines = readme.text.splitlines()
    assert len(lines) <= 180
    screen = "\n".join(lines[:45])
    places = [
        "2402.17512",
        "```math",
        "weights.png",
        "make setup",
        "latte_attention(",
        "latte convert ",
    ]
    found = [screen.index(place) for place in places]
    assert found == sorted(found)
    assert not re.search(r"±|95%|interval", screen)
