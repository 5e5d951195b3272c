"""The page of `latte inspect` in a headless Chromium: what it shows is what the model does.

It needs the Python package playwright and a Chromium: Debian's (`apt-get install chromium`), or the
one of `playwright install chromium`.
"""

import os
import re
import shutil

import pytest
import torch

from latte.lab.inspect.mixing import Inspection, LayerMixing, summary_rows
from latte.lab.inspect.report import build_page, inspect_model

SHOWN, WINDOW = 48, 16
TEXT = "a mean of\n<b>all</b> & the latents' window, read by whoever picks a token"
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


@pytest.fixture(scope="session")
def browser():
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    with api.sync_playwright() as play:
        path = found or play.chromium.executable_path
        if not os.path.exists(path):
            pytest.skip("no Chromium: install Debian's chromium, or set CHROMIUM to one")
        running = play.chromium.launch(executable_path=path)
        yield running
        running.close()


@pytest.fixture
def opened(browser, make_model, byte, tmp_path):
    """opened(preset or Inspection, address="", scheme="light") -> (page, Inspection).

    The page must stay quiet: no error, no warning, no request.
    """
    troubles, contexts = [], []

    def run(what, address="", scheme="light"):
        inspection = what
        if isinstance(what, str):
            inspection = inspect_model(make_model(what), byte, TEXT, shown=SHOWN, read=64)
        file = tmp_path / "index.html"
        file.write_text(build_page(inspection, summary_rows(inspection)), encoding="utf-8")
        context = browser.new_context(color_scheme=scheme, offline=True)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(20_000)
        page.on("console", lambda m: m.type in ("error", "warning") and troubles.append(m.text))
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on("request", lambda r: r.url.startswith("file:") or troubles.append(r.url))
        page.goto(file.as_uri() + address)
        page.wait_for_function("document.body.dataset.shown")
        return page, inspection

    yield run
    for context in contexts:
        context.close()
    assert not troubles


def wait_until_shown(page, **chosen):
    """Wait until the page shows what was picked."""
    for name, value in chosen.items():
        page.wait_for_function(
            "([name, value]) => JSON.parse(document.body.dataset.shown)[name] === value",
            arg=[name, value],
        )


def numbers_of(page, selector):
    return [float(text) for text in page.locator(selector).all_inner_texts()]


def sources(page):
    """{position: p} of the table."""
    rows = page.locator("#sources tr").all()
    cells = [row.locator("td").all_inner_texts() for row in rows]
    return {int(row[0]): float(row[2]) for row in cells}


def shades(page):
    script = "all => all.map(e => Number(e.style.getPropertyValue('--shade')))"
    return page.locator("#text .token").evaluate_all(script)


def total(page, which):
    return float(re.search(r"sums to ([\d.]+)", page.inner_text(which))[1])


def check_sources(page, expected):
    """The table's numbers and the largest shade are those of p(s|.) (P,)."""
    found = sources(page)
    # Of the window's weights those below some 1e-5 of the largest are packed as 0.
    assert min(12, int((expected > 1e-5).sum())) <= len(found) <= 12
    largest = expected.topk(len(found)).values.tolist()
    assert list(found.values()) == pytest.approx(largest, abs=0.006)
    for position, value in found.items():
        assert value == pytest.approx(float(expected[position]), abs=0.006)
    shade = shades(page)
    assert max(shade) == pytest.approx(0.8) and shade.index(max(shade)) == next(iter(found))
    assert total(page, "#sources-sum") == pytest.approx(1, abs=2e-4)


def test_a_token_and_a_latent_are_clicked(opened):
    page, inspection = opened("latte-r-swa++")
    page.select_option("#layer", label="1")
    page.select_option("#head", label="1")
    wait_until_shown(page, layer=1, head=1, token=SHOWN - 1)
    mixing = inspection.layers[1]

    page.locator("#text .token").nth(30).click()
    wait_until_shown(page, token=30, state=-1)
    selected = page.locator("#text [aria-selected=true]")
    assert selected.count() == 1
    assert selected.inner_text() == inspection.tokens[30]
    assert "chosen" in selected.get_attribute("class")
    p = numbers_of(page, "#states .number")
    assert p[0] == 1 and sum(p[1:]) == pytest.approx(1, abs=1e-3)
    assert p[1:] == pytest.approx(mixing.states_THS[30, 1].tolist(), abs=1e-4)
    assert total(page, "#states-sum") == pytest.approx(1, abs=2e-4)
    check_sources(page, mixing.source_weights(1, SHOWN)[30])
    assert page.locator("#text .token.near").count() == WINDOW
    assert page.locator("#text .token.later").count() == SHOWN - 31
    assert "Token 30" in page.inner_text("#status") and "layer 1, head 1" in page.inner_text(
        "#status"
    )

    page.locator("#states .state").nth(4).click()  # all, window, latents 1, 2, 3
    wait_until_shown(page, state=3)
    assert page.locator("#states [aria-selected=true]").inner_text().startswith("latent 3")
    check_sources(page, mixing.latent_weights(1, SHOWN)[2, 30])
    page.locator("#states .state").nth(1).click()
    wait_until_shown(page, state=0)
    check_sources(page, mixing.window_HPP[1, 30])
    assert sources(page).keys() <= set(range(31 - WINDOW, 31))

    page.locator("#text .token").nth(0).click()  # the first token sees itself alone
    wait_until_shown(page, token=0)
    assert sources(page) == {0: 1.0}


def test_the_keyboard_is_enough(opened):
    page, _ = opened("latte-r-swa++", "#layer=1&head=0&token=20&state=2")
    wait_until_shown(page, layer=1, head=0, token=20, state=2)
    focused = (
        "document.activeElement.getAttribute('aria-label') ?? document.activeElement.innerText"
    )
    order = []
    for _ in range(4):
        page.keyboard.press("Tab")
        order.append(page.evaluate("document.activeElement.closest('[id]').id"))
    assert order == ["layer", "head", "text", "states"]
    page.keyboard.press("ArrowDown")
    wait_until_shown(page, state=3)
    assert page.evaluate(focused).startswith("latent 3,")
    page.keyboard.press("Home")
    wait_until_shown(page, state=-1)
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("ArrowLeft")
    wait_until_shown(page, token=19)
    assert page.locator("#text .token").nth(19).evaluate("e => e === document.activeElement")
    page.keyboard.press("End")
    wait_until_shown(page, token=SHOWN - 1)
    page.keyboard.press("ArrowRight")  # nothing beyond
    page.keyboard.press("ArrowUp")
    page.wait_for_function("JSON.parse(document.body.dataset.shown).token < 47")
    assert "token=" in page.url and "state=-1" in page.url


def test_text_is_shown_as_it_is(opened):
    page, inspection = opened("latte++")
    assert page.locator("#text b").count() == 0
    shown = page.locator("#text").evaluate("e => e.textContent")
    assert shown == "".join(inspection.tokens[:SHOWN]).replace("\n", "⏎\n")
    assert "<b>all</b> & the" in shown
    assert page.locator("#window-key").is_hidden() and page.locator("#no-latents").is_hidden()
    check_sources(page, inspection.layers[0].source_weights(0, SHOWN)[SHOWN - 1])


@pytest.mark.parametrize("preset", ["swa++", "transformer++", "linear++"])
def test_a_model_without_latents_says_so(opened, preset):
    page, inspection = opened(preset, "#token=40")
    assert page.locator("#no-latents").is_visible() and page.locator("#states-sum").is_hidden()
    assert page.locator("#states .state").count() == 1
    check_sources(page, inspection.layers[0].source_weights(0, SHOWN)[40])


def test_latents_that_are_fed_late(opened):
    """As in a converted model: until the first token has left the window they see nothing."""
    T, L, delay = 20, 3, 5
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(T, 1, L + 1, generator=generator).softmax(-1)
    states[:delay] = torch.tensor([1.0, 0.0, 0.0, 0.0])
    keys = torch.randn(T, 1, L, generator=generator)
    seen = torch.ones(T, T, dtype=torch.bool).tril() & ~torch.ones(T, T, dtype=torch.bool).tril(-5)
    logits = torch.randn(1, T, T, generator=generator)
    window = logits.masked_fill(~seen, -torch.inf).softmax(-1)
    mixing = LayerMixing(states, keys, window, width=5, delay=delay)
    late = Inspection("late", [f"{n} " for n in range(T)], T, {7: mixing})
    page, _ = opened(late, "#layer=7&token=3&state=2")
    wait_until_shown(page, token=3, state=2)
    assert "latent 2 sees nothing yet" in page.inner_text("#status")
    assert sources(page) == {} and max(shades(page)) == 0
    page.locator("#text .token").nth(12).click()
    wait_until_shown(page, token=12)
    check_sources(page, mixing.latent_weights(0, T)[1, 12])
    assert set(sources(page)) == set(range(8))
    page.locator("#states .state").nth(0).click()
    wait_until_shown(page, state=-1)
    check_sources(page, mixing.source_weights(0, T)[12])
