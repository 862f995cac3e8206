"""The pages in a real browser, without a network."""

import io
import math
import os
import shutil

import pandas
import pytest
from report.learned import EVIL, learned
from report.sample import inspection
from report.verdicts import verdicts

from massieu.inspection.findings import findings
from massieu.inspection.predictions import predictions
from massieu.report import compare, render
from massieu.report.learning_page import render_learning
from massieu.report.reference import reference
from massieu.report.verdicts import render_verdicts

PHONE = {"width": 390, "height": 844}


def _sample(layers=6, heads=12, **options):
    run = inspection(layers, heads, **options)
    found = findings(pandas.DataFrame(run["heads"]), pandas.DataFrame(run["layers"]), run["facts"])
    run["findings"] = [vars(each) for each in found]
    return run


def _without(column):
    run = _sample(2, 3)
    for row in run["layers"]:
        row[column] = None
    return run


def _evil():
    run = _sample(2, 3, name="<script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>")
    run["heads"][0]["name"] = run["notes"][0] = "<img src=x onerror='window.hacked = 3'>"
    return run


def _clipped():
    run = _sample(4, 2)
    for row, symmetry in zip(run["layers"], (-9.0, 0.6, 0.7, 9.0), strict=True):
        row |= {"field_symmetry": symmetry, "field_symmetry_control": 0.5}
    return run


def _nearly_alike():
    run = _sample(2, 3)
    for number, row in enumerate(run["heads"]):
        row |= {"entropy": 3.5 + 0.01 * number, "normalized_entropy": (3.5 + 0.01 * number) / math.log(180)}
    return run


def _tiny():
    run = _sample(2, 12)
    for number, row in enumerate(run["heads"]):
        row["gradient_cosine"] = (2e-5, -2e-5, -0.0004, 0.25)[number % 4]
    return run


def _predicted():
    run = _sample(3, 4)
    found = predictions(pandas.DataFrame(run["heads"]), pandas.DataFrame(run["layers"]), run["facts"])
    return run | {"predictions": [vars(each) for each in found]}


def _massive():
    run = _sample(2, 3)
    run["layers"][1] |= {"massive_tokens": 4, "massive_norm": 60.0, "massive_first_share": 1.0}
    return run


PAGES = {
    "6x12": lambda: render(_sample()),
    "12x12": lambda: render(_sample(12, 12)),
    "1x1": lambda: render(_sample(1, 1)),
    "encoder-decoder": lambda: render(_sample(3, 4, kind="both")),
    "40 heads": lambda: render(_sample(2, 40)),
    "without ascent": lambda: render(_without("ascent_cosine")),
    "evil": lambda: render(_evil()),
    "clipped": lambda: render(_clipped()),
    "nearly alike": lambda: render(_nearly_alike()),
    "tiny": lambda: render(_tiny()),
    "predicted": lambda: render(_predicted()),
    "massive": lambda: render(_massive()),
    "heads only": lambda: render(_sample(2, 3) | {"layers": [], "experiments": []}),
    "checkpoints": lambda: compare(
        [_sample(3, 4, kind="decoder", name=f"step {i}", sharp=i, seed=3) for i in (1, 2, 3)]
    ),
    "different models": lambda: compare([_sample(2, 3), _sample(3, 4, kind="both")]),
    "claims": lambda: render_verdicts(verdicts(), {"seed": 0, "model": None}),
    "learned": lambda: render_learning(learned("linear", pool=4, name=EVIL)),
}


@pytest.fixture(scope="module")
def browser():
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        sync_playwright = None
    chromium = shutil.which("chromium")
    if sync_playwright is None or chromium is None:
        missing = "playwright (pip install playwright)" if sync_playwright is None else "chromium (make browser)"
        message = f"the pages are not tried in a browser: {missing} is not installed"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def visit(browser, tmp_path):
    """Open a page as a file with the network off; fail at requests and errors in its console."""
    contexts, wrong = [], []

    def open_page(name, **options):
        file = tmp_path / "page.html"
        file.write_text(PAGES[name](), encoding="utf-8")
        context = browser.new_context(**({"viewport": {"width": 1280, "height": 900}} | options))
        contexts.append(context)
        context.set_offline(True)

        def refuse(route):
            if route.request.url.split("#")[0] != file.as_uri():
                wrong.append(f"asked for {route.request.url}")
                return route.abort()
            return route.continue_()

        context.route("**/*", refuse)
        page = context.new_page()
        page.on("console", lambda message: wrong.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: wrong.append(f"error: {error}"))
        page.goto(file.as_uri())
        page.wait_for_selector("html[data-ready=true]", state="attached", timeout=10_000)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert wrong == []


def values(page, where="#maps .cell"):
    return page.eval_on_selector_all(where, "cells => cells.map(cell => cell.getAttribute('aria-label'))")


def fills(page):
    return page.eval_on_selector_all("#maps .cell", "cells => cells.map(cell => getComputedStyle(cell).fill)")


@pytest.mark.parametrize("name", PAGES)
def test_a_page_opens_without_network_request_or_complaint(visit, name):
    page = visit(name)
    assert len(values(page)) > 0 or name in ("claims", "learned")
    assert page.evaluate("window.hacked") is None
    assert page.evaluate("document.images.length") == 0


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize("size", [PHONE, {"width": 1280, "height": 900}])
def test_no_page_is_wider_than_its_window(visit, name, size):
    page = visit(name, viewport=size)
    assert page.evaluate("document.documentElement.scrollWidth") <= size["width"]


def test_the_map_shows_every_head_with_its_value_and_error(visit):
    page = visit("6x12")
    row = _sample()["heads"][12 + 3]
    assert len(values(page)) == 72
    assert values(page)[15] == f"Layer 1 · head 3: Entropy {row['entropy']:.2f} ± {row['entropy_se']:.2f} nats"
    assert "log Z" in page.text_content("#caption")


def test_the_switch_changes_the_map_its_legend_and_its_caption(visit):
    page = visit("6x12")
    seen = []
    for name in ("entropy", "sink_mass", "gradient_cosine", "head_class", "qk_norm"):
        page.select_option("#quantity", name)
        seen.append((tuple(fills(page)), page.text_content("#legend"), page.text_content("#caption")))
        assert all(values(page))
    assert all(len({part[i] for part in seen}) == len(seen) for i in range(3))
    page.click("#chips button >> text=Heat capacity")
    assert page.input_value("#quantity") == "score_variance"
    assert page.get_attribute("#chips button[value=score_variance]", "aria-pressed") == "true"
    assert page.get_attribute("#chips button[value=entropy]", "aria-pressed") == "false"


def test_a_larger_value_is_darker_on_a_light_page_and_lighter_on_a_dark_one(visit):
    for scheme, sign in (("light", -1), ("dark", 1)):
        page = visit("6x12", color_scheme=scheme)
        entropies = [row["entropy"] for row in _sample()["heads"]]
        order = sorted(range(72), key=entropies.__getitem__)
        brightness = [sum(map(int, fill[4:-1].split(","))) for fill in fills(page)]
        assert sign * (brightness[order[-1]] - brightness[order[0]]) > 100


def test_a_figure_that_is_missing_is_a_dash_with_its_reason(visit):
    page = visit("6x12")
    page.select_option("#quantity", "head_class")
    missing = [label for label in values(page) if "– " in label]
    assert len(missing) == 3
    assert missing[0].endswith("Class of the head – the rows are too short to tell the classes apart")
    cell = page.locator("[data-table=heads] td[data-value='']").first
    assert cell.text_content() == "–"
    assert "too short" in cell.get_attribute("title")


def test_quantities_without_any_value_are_named(visit):
    page = visit("without ascent")
    assert "Does attention climb log Z?" in page.text_content("[data-table=layers] .note")
    assert page.locator("[data-table=layers] th[data-key=ascent_cosine]").count() == 0
    assert page.locator("[data-table=heads] .note").count() == 0


def test_heads_are_reached_by_keyboard_and_described_beside_the_map(visit):
    page = visit("6x12")
    page.focus("#maps .cell[tabindex='0']")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    assert page.evaluate("document.activeElement.dataset.row") == "13"
    assert page.text_content("#card h3") == "Layer 1 · head 1"
    assert page.is_visible("#tip")
    assert "Layer 1 · head 1" in page.text_content("#tip")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    assert page.evaluate("document.activeElement.dataset.row") == "12"


def test_pointing_at_a_head_shows_its_value(visit):
    page = visit("6x12")
    page.hover("#maps .cell[data-row='5']")
    row = _sample()["heads"][5]
    assert page.text_content("#tip") == f"Layer 0 · head 5{row['entropy']:.2f} ± {row['entropy_se']:.2f} nats"


def test_a_finding_leads_to_its_heads(visit):
    page = visit("6x12")
    finding = next(each for each in _sample()["findings"] if each["quantity"] == "sink_mass")
    page.click(".findings li:has-text('Attention sinks') a")
    assert page.input_value("#quantity") == "sink_mass"
    assert page.locator("#maps .named").count() == len(finding["where"]) > 0
    page.select_option("#quantity", "entropy")
    assert page.locator("#maps .named").count() == 0


def test_a_heading_sorts_its_table_up_and_down(visit):
    page = visit("6x12")
    column = "() => [...document.querySelectorAll('[data-table=heads] tbody tr')].map(row => Number(row.cells[2].dataset.value))"
    page.click("[data-table=heads] th[data-key=entropy] button")
    rising = page.evaluate(column)
    assert rising == sorted(rising)
    assert rising[0] == pytest.approx(min(row["entropy"] for row in _sample()["heads"]), rel=1e-5)
    page.click("[data-table=heads] th[data-key=entropy] button")
    falling = page.evaluate(column)
    assert falling == sorted(falling, reverse=True)
    assert page.get_attribute("[data-table=heads] th[data-key=entropy]", "aria-sort") == "descending"
    page.click("text=Show all 72 rows")
    assert len(page.evaluate(column)) == 72


def test_classes_sort_by_rank_and_what_is_missing_comes_last(visit):
    page = visit("6x12")
    page.click("text=Show all 72 rows")
    page.click("[data-table=heads] th[data-key=head_class] button")
    number = page.eval_on_selector("[data-table=heads] th[data-key=head_class]", "cell => cell.cellIndex")
    classes = page.evaluate(
        f"[...document.querySelectorAll('[data-table=heads] tbody tr')].map(row => row.cells[{number}].textContent)"
    )
    assert classes == sorted(classes, key=["I", "II", "III", "IV", "–"].index)
    assert classes[-3:] == ["–"] * 3


def test_the_table_of_changes_sorts(visit):
    page = visit("checkpoints")
    page.click("#changes th:has-text('change') button")
    number = page.eval_on_selector("#changes th:has-text('change')", "cell => cell.cellIndex")
    column = (
        f"[...document.querySelectorAll('#changes tbody tr')].map(row => Number(row.cells[{number}].dataset.value))"
    )
    assert page.evaluate(column) == sorted(page.evaluate(column))


def test_checkpoints_lie_side_by_side_with_their_difference(visit):
    page = visit("checkpoints")
    assert page.locator("#maps svg").count() == 3
    assert page.locator("#differences svg").count() == 1
    assert "Attention gets sharper" in page.text_content("#findings")
    first, last = (_sample(3, 4, kind="decoder", sharp=i, seed=3)["heads"][0]["entropy"] for i in (1, 3))
    shown = values(page, "#differences .cell")[0]
    assert f"Entropy −{first - last:.2f}" in shown


def test_no_difference_is_drawn_between_models_of_different_shape(visit):
    page = visit("different models")
    assert page.locator("#differences svg").count() == 0
    assert "different heads" in page.text_content("#differences")


def test_stacks_are_kept_apart(visit):
    page = visit("encoder-decoder")
    assert page.locator("#maps h3").all_text_contents() == ["Encoder", "Decoder", "Cross-attention"]
    assert page.locator("#layer-profiles .key").all_text_contents()[:2] == ["Encoder", "Decoder"]


@pytest.mark.parametrize("name", ["6x12", "checkpoints"])
def test_profiles_are_drawn(visit, name):
    page = visit(name)
    ink = """() => [...document.querySelectorAll('.profile canvas')].map(canvas => {
        const pixels = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
        let marked = 0;
        for (let i = 3; i < pixels.length; i += 4) marked += pixels[i] > 0;
        return marked;
    })"""
    drawn = page.evaluate(ink)
    assert len(drawn) > 15
    assert min(drawn) > 300


def test_dark_mode_follows_the_system_and_the_button(visit):
    background = "getComputedStyle(document.body).backgroundColor"
    page = visit("6x12", color_scheme="dark")
    dark = page.evaluate(background)
    assert max(map(int, dark[4:-1].split(","))) < 50
    page.click("#theme")
    assert min(map(int, page.evaluate(background)[4:-1].split(","))) > 200
    page.click("#theme")
    assert page.evaluate(background) == dark


def test_text_stands_out_from_its_page_in_both_modes(visit):
    def luminance(color):
        linear = [
            (int(c) / 255 / 12.92 if int(c) <= 10 else ((int(c) / 255 + 0.055) / 1.055) ** 2.4)
            for c in color[4:-1].split(",")
        ]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for scheme in ("light", "dark"):
        page = visit("6x12", color_scheme=scheme)
        paper = luminance(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        for where in ("body", ".lead", ".note", "a.show", ".profile .readout", ".badges li", ".plain small"):
            ink = luminance(page.eval_on_selector(where, "element => getComputedStyle(element).color"))
            assert (max(ink, paper) + 0.05) / (min(ink, paper) + 0.05) > 4.5, (scheme, where)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_screenshot_has_many_colors(visit, scheme):
    from PIL import Image

    page = visit("12x12", color_scheme=scheme)
    picture = Image.open(io.BytesIO(page.screenshot(full_page=True))).convert("RGB")
    counts = picture.getcolors(maxcolors=1 << 24)
    assert len(counts) > 200
    assert max(count for count, _ in counts) < 0.97 * picture.width * picture.height


def test_a_dark_page_prints_on_white_paper_with_all_rows(visit):
    page = visit("6x12", color_scheme="dark")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    ink = page.evaluate("getComputedStyle(document.body).color")
    assert max(map(int, ink[4:-1].split(","))) < 60
    assert page.locator("[data-table=heads] tbody tr").count() == 72
    assert not page.is_visible("#quantity")
    assert not page.is_visible("[data-table=heads] th[data-key=score_mean]")
    assert page.pdf().startswith(b"%PDF")


def test_every_claim_has_its_verdict_a_figure_and_its_code(visit):
    page = visit("claims")
    assert page.locator("article.claim").count() == 6
    assert page.locator("article.claim .gauge").count() == 6
    assert page.locator("article.claim .curve polyline").count() == 2
    assert page.locator("#C5 .aside").text_content() == "Undecided: it <raised>"
    assert "1 verdict differs" in page.text_content(".lead")
    assert page.locator("#C1 .gauge circle.inside").count() == 1
    page.click("#C4 summary")
    assert "return '<b>'" in page.text_content("#C4 pre")
    before = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.click("#theme")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before


def test_the_legend_of_a_chart_takes_a_line_away_and_brings_it_back(visit):
    page = visit("learned")
    button, line = page.locator("#errors .key button").nth(2), page.locator("#errors g.series[data-line='2']")
    assert button.text_content() == "least squares"
    for pressed in ("false", "true"):
        button.click()
        assert button.get_attribute("aria-pressed") == pressed
        assert line.is_visible() == (pressed == "true")
    assert page.locator("#errors g.series").count() == page.locator("#errors .key button").count()


def test_the_important_lines_of_a_chart_are_thicker_and_change_color_with_the_page(visit):
    page = visit("learned")

    def style(number, name):
        where = f"#errors g.series[data-line='{number}'] polyline"
        return page.eval_on_selector(where, f"line => getComputedStyle(line).{name}")

    assert float(style(1, "strokeWidth")[:-2]) > 2 * float(style(2, "strokeWidth")[:-2])
    light = style(1, "stroke")
    page.click("#theme")
    assert style(1, "stroke") != light


def test_dots_beyond_the_axis_are_marked_and_counted_and_the_axis_is_explained(visit):
    page = visit("clipped")
    ruler = page.locator(".ruler:has(a[href='#q-field_symmetry'])")
    assert ruler.locator("i.clip.low").count() == ruler.locator("i.clip.high").count() == 1
    assert ruler.locator("i:not(.clip)").count() == 2
    assert ruler.locator(".beyond").all_text_contents() == ["1", "1"]
    assert "−9.00" in ruler.locator("i.clip.low").get_attribute("title")
    assert "beyond the axis" in ruler.locator("i.clip.low").get_attribute("title")
    assert page.locator(".ruler.axis b").all_text_contents() == ["control 0 %", "50 %", "theory 100 %"]
    assert "(value − control) / (theory − control)" in " ".join(page.text_content("#theory > p").split())


@pytest.mark.parametrize(
    "label",
    [
        ".ruler a[href='#q-ascent_cosine']",
        "#card a[href='#q-sink_mass']",
        "#profile-expansion a",
        "[data-table=heads] th[data-key=peak] button",
        "#chips button[value=score_variance]",
        "#profiles a[href='#w-control']",
        ".findings .about a",
    ],
)
def test_labels_explain_themselves_to_pointer_and_keyboard(visit, label):
    page = visit("6x12")
    target = page.locator(label).first
    entry = page.eval_on_selector(label, "label => label.dataset.term || label.getAttribute('href').slice(1)")
    title, meaning = page.text_content(f"#{entry} dt"), page.text_content(f"#{entry} dd.meaning")
    for show, hide in (("hover", lambda: page.mouse.move(2, 2)), ("focus", lambda: page.keyboard.press("Escape"))):
        getattr(target, show)()
        assert page.is_visible("#tip")
        shown = page.text_content("#tip")
        assert title.split(" ")[0] in shown
        assert meaning.split(".")[0] in shown
        assert target.get_attribute("aria-describedby") == "tip"
        hide()
        assert not page.is_visible("#tip")


def test_every_label_leads_to_an_entry_of_the_glossary(visit):
    page = visit("6x12")
    missing = """() => [...document.querySelectorAll('a.term, a.help')].map(link => link.getAttribute('href').slice(1))
        .filter(id => !document.getElementById(id))"""
    assert page.locator("a.term").count() > 60
    assert page.evaluate(missing) == []
    page.click("[data-table=heads] th[data-key=peak] .help")
    assert page.evaluate("location.hash") == "#q-peak"
    assert page.locator("#q-peak").is_visible()


def test_the_classes_are_defined_beside_their_colors_with_the_length_of_the_rows(visit):
    page = visit("6x12")
    page.click("#chips button[value=head_class]")
    words = page.text_content("#legend")
    assert "90 % of the attention, on rows of about 180 tokens" in words  # the length of which the sample is made
    for label, share in (("I", "more than 1/2"), ("II", "1/8 to 1/2"), ("III", "1/32 to 1/8"), ("IV", "at most 1/32")):
        assert f" {label} {share}" in words


def test_the_navigation_stays_on_a_phone(visit):
    page = visit("6x12", viewport=PHONE)
    links = page.locator("nav a")
    assert links.count() >= 5
    page.evaluate("scrollTo(0, document.body.scrollHeight)")
    for number in range(links.count()):
        link = links.nth(number)
        link.scroll_into_view_if_needed()
        box = link.bounding_box()
        assert box["y"] >= 0
        assert box["y"] + box["height"] < 80
        assert box["height"] >= 36
    bottom = page.eval_on_selector("nav", "nav => nav.getBoundingClientRect().bottom")
    page.emulate_media(reduced_motion="reduce")
    page.click("nav a[href='#tables']")
    top = page.eval_on_selector("#tables h2", "heading => heading.getBoundingClientRect().top")
    assert bottom <= top < PHONE["height"] / 2


def test_colors_start_from_what_a_quantity_can_be(visit):
    page = visit("nearly alike")
    brightness = [sum(map(int, fill[4:-1].split(","))) for fill in fills(page)]
    assert max(brightness) - min(brightness) < 40  # a hundredth of the scale, not all of it
    assert page.locator("#legend span").first.text_content() == "0.00"
    page.select_option("#quantity", "sink_mass")
    assert page.locator("#legend span").first.text_content() == "0.00"
    assert "1.00" in page.text_content("#legend")


def test_usual_values_stand_below_the_map_and_in_the_tips(visit):
    page = visit("6x12")
    median = f"MiniLM-L6 {reference()['models'][1]['values']['entropy'][0]:.3g}"
    assert median in page.text_content("#caption .usual")
    page.hover("#card a[href='#q-entropy']")
    assert median in page.text_content("#tip")
    assert "this model" in page.text_content("#caption .usual")


def _box(page, where):
    return page.eval_on_selector(
        where, "one => { const b = one.getBoundingClientRect(); return [b.left, b.right, b.top, b.bottom]; }"
    )


def test_what_is_unusual_is_in_sight_beside_the_value_of_the_model(visit):
    page = visit("6x12")
    assert page.locator("#reference thead th").all_text_contents()[:3] == ["quantity", "this model", "unusual"]
    assert _box(page, "#reference thead th:nth-child(3)")[1] < _box(page, "#usual .scroll")[1]
    widths = "rows => [...new Set([...rows].map(row => row.cells.length))].length"
    assert page.eval_on_selector_all("#reference tr", widths) == 1
    assert "unusual" not in page.text_content("#caption .usual")


@pytest.mark.parametrize("size", [PHONE, {"width": 1280, "height": 900}])
def test_the_verdict_on_a_prediction_is_in_sight_beside_its_name(visit, size):
    page = visit("predicted", viewport=size)
    assert page.locator("#predictions thead th").all_text_contents()[:2] == ["prediction", "verdict"]
    edge = page.eval_on_selector("#theory .scroll", "box => box.getBoundingClientRect().left + box.clientWidth")
    assert _box(page, "#predictions tbody td")[1] <= edge
    shown = page.locator("#predictions tbody td:nth-child(2)").all_text_contents()
    assert shown == [row["verdict"] for row in _predicted()["predictions"]]


@pytest.mark.parametrize("size", [PHONE, {"width": 1280, "height": 900}])
@pytest.mark.parametrize(
    ("name", "table", "count"),
    [
        ("6x12", "[data-table=heads]", 2),
        ("encoder-decoder", "[data-table=heads]", 3),
        ("6x12", "[data-table=layers]", 1),
        ("6x12", "#usual", 1),
    ],
)
def test_the_columns_that_name_a_row_stay_in_sight_with_their_headings(visit, size, name, table, count):
    page = visit(name, viewport=size)
    scrolled = "box => { box.scrollLeft = 100; box.scrollTop = 80; return box.scrollLeft; }"
    assert page.eval_on_selector(f"{table} .scroll", scrolled) == 100
    left, top = (_box(page, f"{table} .scroll")[i] + 1 for i in (0, 2))
    for number in range(1, count + 1):
        heading = _box(page, f"{table} thead th:nth-child({number})")
        field = _box(page, f"{table} tbody tr:nth-child(5) > :nth-child({number})")
        assert heading[0] == pytest.approx(left, abs=0.5)
        assert heading[2] == pytest.approx(top, abs=0.5)
        assert field[:2] == pytest.approx(heading[:2], abs=0.5)
        left = heading[1]
        page.eval_on_selector(f"{table} .scroll", "box => box.scrollIntoView({ block: 'center', behavior: 'instant' })")
        heading = _box(page, f"{table} thead th:nth-child({number})")
        on_top = f"document.elementFromPoint({heading[0] + 3}, {heading[2] + 3}).closest('th').cellIndex"
        assert page.evaluate(on_top) == number - 1
        page.evaluate("scrollTo({ top: 0, behavior: 'instant' })")


def test_without_massive_tokens_one_sentence_stands_for_their_charts(visit):
    page = visit("6x12")
    largest = max(row["massive_norm"] for row in _sample()["layers"])
    assert page.locator("#profile-massive_norm, #profile-effective_rank_all_tokens").count() == 0
    assert page.locator("#profile-effective_rank").count() == 1
    sentence = page.text_content("#layer-profiles h3:has-text('Massive activations') + p")
    assert sentence.startswith("No token is massive")
    assert f"{largest:.1f} times the median" in sentence
    page = visit("massive")
    assert page.locator("#profile-massive_norm, #profile-effective_rank_all_tokens").count() == 2
    assert "No token is massive" not in page.text_content("#layer-profiles")


def test_values_of_the_map_fit_their_cells(visit):
    page = visit("tiny")
    page.select_option("#quantity", "gradient_cosine")
    texts = page.locator("#maps .value").all_text_contents()
    assert texts[:4] == ["2e−5", "−2e−5", "−4e−4", "0.25"]
    widths = page.eval_on_selector_all("#maps .value", "all => all.map(one => one.getBBox().width)")
    cell = page.eval_on_selector("#maps .cell", "one => one.width.baseVal.value")
    assert max(widths) < cell
