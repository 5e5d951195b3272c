"""What the documents point at exists: files, headings, images, recipes, functions, tests."""

import ast
import re

import pytest

# Folders beside the package whose files documents name.
ELSEWHERE = ("docs", "examples", "experiments", "integrations", "src", "tests")


def slugs(text):
    """Anchors of the headings, as GitHub and MkDocs make them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.S | re.M), re.M)
    plain = [re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in headings]
    return {re.sub(r"[\s]+", "-", heading) for heading in plain}


def test_links_and_images_resolve(document):
    links = re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", document.prose)
    for link in links:
        if link.startswith(("http://", "https://")):
            continue
        name, _, anchor = link.partition("#")
        target = (document.path.parent / name).resolve() if name else document.path
        assert target.is_file(), f"{document.name}: {link}"
        if anchor:
            assert anchor in slugs(target.read_text(encoding="utf-8")), f"{document.name}: {link}"


SITE = ("docs", "experiments/results", "experiments/logs", "experiments/figures")  # docs/hooks.py


def test_links_of_the_site_stay_inside_it(document, root):
    if not document.name.startswith(SITE):
        assert "](docs/" in document.text or document.name == "CHANGELOG.md"
        return
    for link in re.findall(r"\]\(([^)\s]+)\)", document.prose):
        if not link.startswith(("http", "#")):
            target = (document.path.parent / link.partition("#")[0]).resolve()
            assert any(target.is_relative_to(root / part) for part in SITE), link


def test_recipes_named_exist(document, root):
    named = re.findall(r"\brecipes/[\w+./-]*[\w+/]", document.text)
    missing = [name for name in named if not (root / name).exists()]
    assert not missing


def test_every_recipe_is_listed(read, root):
    text = read("docs/guide.md").text
    for path in (root / "recipes").rglob("*.yaml"):
        assert f"`{path.relative_to(root)}`" in text, path


def test_every_table_of_runs_is_named(root):
    """By a page, or by the script that writes it."""
    rooms = (root / room for room in ("docs", "experiments", "examples"))
    files = [x for room in rooms for x in room.rglob("*") if x.suffix in (".md", ".py")]
    text = "".join(x.read_text(encoding="utf-8") for x in files)
    unnamed = [x.name for x in (root / "experiments/figures").glob("*.csv") if x.stem not in text]
    assert not unnamed


def defined(path, name):
    """Whether a file has a function, a class or (`Class.method`) a method of that name."""
    nodes = ast.parse(path.read_text(encoding="utf-8")).body
    for part in name.split("."):
        found = [
            node
            for node in nodes
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == part
        ]
        if not found:
            return False
        nodes = found[0].body
    return True


def located(root, file):
    """The path of a file that a document names: of the package where no other folder is said."""
    return root / file if file.split("/")[0] in ELSEWHERE else root / "src/latte" / file


def test_functions_and_tests_named_exist(document, root):
    for file, name in re.findall(r"`([\w/.-]+\.py)::([\w.]+)`", document.text):
        assert located(root, file).is_file(), f"{document.name}: {file}"
        assert defined(located(root, file), name), f"{document.name}: {file}::{name}"
    for file in re.findall(rf"`((?:{'|'.join(ELSEWHERE)})/[\w/.-]+\.py)`", document.text):
        assert (root / file).is_file(), f"{document.name}: {file}"


@pytest.mark.parametrize("name", ["docs/architecture.md", "docs/paper-to-code.md"])
def test_files_and_folders_named_exist(name, read, root):
    """On the pages that say where things are, also without a name in them, folders too."""
    text = read(name).text
    named = re.findall(r"`([\w/.-]+\.py)`", text) + re.findall(r"`((?:\w+/)+)`", text)
    assert named and not [file for file in named if not located(root, file).exists()]


def test_every_room_is_in_the_picture(read, root):
    (_, picture), *_ = read("docs/architecture.md").blocks("text")
    rooms = [
        path.name for path in (root / "src/latte").iterdir() if (path / "__init__.py").exists()
    ]
    assert rooms and not [room for room in rooms if not re.search(rf"\b{room}\b", picture)]


def test_nothing_is_left_open(document):
    assert not re.search(r"\b(TODO|TBD|FIXME|XXX)\b", document.text)


def test_the_paper_s_items_have_sections_and_commands(read):
    """Every row of the overview leads to a section that runs, or says what it needs."""
    results = read("experiments/results/README.md")
    rows = next(table for table in results.tables() if "ours" in table[0])
    assert [row["paper"] for row in rows][:2] == ["Table 1", "Table 2"] and len(rows) >= 10
    sections = {slug: part for part in results.text.split("\n## ") for slug in slugs(f"## {part}")}
    for row in rows:
        section = sections[re.search(r"\(#([\w-]+)\)", row["ours"]).group(1)]
        assert "```bash" in section or "](" in section, row
        if "not run" in row["state"].lower():
            assert "ot run" in section, row


def test_the_log_is_a_file_a_month_with_wrapped_lines(read, root):
    """Tables and links may be longer; every month is listed, and every entry has a day of it."""
    index = read("experiments/logs/README.md").text
    months = sorted(path.stem for path in (root / "experiments/logs").glob("2*.md"))
    assert months and all(f"({month}.md)" in index for month in months)
    assert not re.search(r"^## ", index, re.M), "new entries belong into the month's file"
    for month in months:
        prose = read(f"experiments/logs/{month}.md").prose
        days = re.findall(r"^## (.*)$", prose, re.M)
        assert days == sorted(days, reverse=True) and all(day.startswith(month) for day in days)
        lines = [re.sub(r"\]\([^)]*\)|`[^`]*`", "", line) for line in prose.splitlines()]
        assert not [line for line in lines if len(line) > 100 and not line.startswith("|")]
