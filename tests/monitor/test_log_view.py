"""The log of a run in the terminal, as JSON and as a page."""

import io
import json
import math
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("rich")
pytest.importorskip("jinja2")
from rich.console import Console

from massieu import cli
from massieu.monitor import Flag, Place, Reading, open_sink, read_log
from massieu.report.watch_page import LARGEST_PAGE, render_watch
from massieu.report.watch_terminal import sparkline, terminal_view

ROOT = Path(__file__).resolve().parents[2]
FLAG = Flag("logit growth", "decoder", 1, 2, 120.0, 100.0, "scores saturate", "Dehghani et al. 2023")


def write(path, steps=5, layers=2, stacks=("decoder",), flags=None, spike=None, recorded=None):
    """Write an artificial run: entropies fall from 2 to 1 and scores rise."""
    places = tuple(Place(stack, layer, f"{stack}.{layer}", 3) for stack in stacks for layer in range(layers))
    sink = open_sink(path)
    for step in range(steps):
        share = step / max(1, steps - 1)
        entropy = torch.full((len(places), 3), 2 - share, dtype=torch.float64) + torch.tensor([-0.5, 0.0, 0.25])
        if step == spike:
            entropy[0, 2] = 77.0
        heads = {"entropy": entropy, "score_range": 10 + 20 * entropy.flip(1) * share}
        ratio = torch.full((len(places),), torch.nan if step == 0 else 1e-3 * 10**step if step < 9 else 1e-3)
        layers_ = {"update_ratio": ratio.double()}
        beside = {name: values[step] for name, values in (recorded or {}).items()}
        sink(Reading(100 * step, places, heads, layers_, tuple((flags or {}).get(step, ())), beside))
    sink.close()
    return path


def shown(document, width=120, **options):
    console = Console(file=io.StringIO(), width=width)
    console.print(terminal_view(document, width=width, **options))
    return console.file.getvalue()


def test_every_layer_has_a_line_with_its_course_and_its_last_figures(tmp_path):
    text = shown(read_log(write(tmp_path / "run.jsonl")).to_dict())
    lines = text.splitlines()
    assert lines[0] == "run.jsonl  5 readings, steps 0 to 400, 0 flags raised"
    assert re.search(r"layer +entropy +min median max +score range +min median max +flags", lines[1])
    assert re.match(r"layer00 +█▆▄▂▁ +0.5 1 1.25 +▁\S+ +20 30 35 *$", lines[2])
    assert lines[3].startswith("layer01")
    assert lines[4] == "▁ to █ in all layers: entropy 1 to 2, score range 10 to 30"
    assert "no flag is raised" in lines[5]


def test_a_flag_stands_beside_its_layer_and_says_why(tmp_path):
    other = Flag(**{**vars(FLAG), "head": 0})
    text = shown(read_log(write(tmp_path / "run.csv", flags={2: [FLAG], 3: [other]})).to_dict(), width=200)
    assert [line.rstrip().endswith("logit growth") for line in text.splitlines()[2:4]] == [False, True]
    assert (
        "logit growth in layer01 heads 0, 2, first raised at step 200, last at step 300: scores saturate"
        " [Dehghani et al. 2023]"
    ) in " ".join(text.split())


def test_flags_that_were_raised_together_are_up_since_that_step(tmp_path):
    other = Flag(**{**vars(FLAG), "head": 0})
    text = shown(read_log(write(tmp_path / "run.jsonl", flags={2: [FLAG, other]})).to_dict(), width=200)
    assert "logit growth in layer01 heads 0, 2, since step 200: scores saturate" in text


def test_flags_that_are_up_and_all_that_were_raised_are_counted_apart(tmp_path):
    other, cleared = Flag(**{**vars(FLAG), "head": 0}), Flag(**{**vars(FLAG), "state": "cleared"})
    document = read_log(write(tmp_path / "run.jsonl", flags={1: [FLAG, other], 3: [cleared]})).to_dict()
    assert "steps 0 to 400, 1 flag up now, 2 raised in all" in shown(document)
    page = render_watch(document)
    assert "steps 0 to 400, 1 flag up now, 2 raised in all" in page
    assert page.count('<td class="state raised">') == 2


def test_a_flag_that_was_cleared_is_not_shown(tmp_path):
    cleared = Flag(**{**vars(FLAG), "state": "cleared"})
    text = shown(read_log(write(tmp_path / "run.jsonl", flags={1: [FLAG], 3: [cleared]})).to_dict())
    assert "logit growth" not in text


def test_the_view_says_what_could_not_be_read_and_what_was_restarted(tmp_path):
    path = write(tmp_path / "run.jsonl")
    with path.open("a") as file:
        file.write("what\n")
    write(path, steps=2)
    assert "2 readings, steps 0 to 100, 0 flags raised, restarted 1 time, 1 line could not be read" in shown(
        read_log(path).to_dict()
    )


def test_a_low_terminal_shows_what_fits_and_says_so(tmp_path):
    document = read_log(write(tmp_path / "run.jsonl", layers=40)).to_dict()
    text = shown(document, rows=20)
    assert len(text.splitlines()) <= 20
    assert f"and {40 - len(re.findall('^layer[0-9]', text, re.MULTILINE))} more layers" in text
    assert len(shown(document).splitlines()) > 40


LOSSES = {"loss": [4.0, 3.0, 2.5, 2.0, 1.0], "rate": [0.0, 0.1, 0.1, 0.1, math.nan]}


@pytest.mark.parametrize("ending", ["jsonl", "csv"])
def test_recorded_values_stand_above_the_layers_each_on_a_scale_of_its_own(tmp_path, ending):
    lines = shown(read_log(write(tmp_path / f"run.{ending}", recorded=LOSSES)).to_dict()).splitlines()
    assert re.match(rf"loss +{sparkline(LOSSES['loss'], 5)} +1 *$", lines[1])
    assert re.match(r"rate +▁███ +0.1 at step 300, – now *$", lines[2])
    assert lines[3].startswith("layer ")


def test_a_low_terminal_has_room_for_recorded_values(tmp_path):
    many = {f"value{number}": [1.0] * 5 for number in range(9)}
    text = shown(read_log(write(tmp_path / "run.jsonl", layers=40, recorded=many)).to_dict(), rows=20)
    assert len(text.splitlines()) <= 20
    assert "value0" in text


def test_lines_of_one_quantity_share_a_scale(tmp_path):
    sink, places = open_sink(tmp_path / "run.jsonl"), [Place("decoder", layer, f"h.{layer}", 1) for layer in range(2)]
    for step in range(3):
        sink(Reading(step, tuple(places), {"entropy": torch.tensor([[1.0 + step], [101.0 + step]])}))
    sink.close()
    text = shown(read_log(tmp_path / "run.jsonl").to_dict())
    assert [re.search("[▁-█]+", line)[0] for line in text.splitlines()[2:4]] == ["▁▁▁", "███"]
    assert "▁ to █ in all layers: entropy 1 to 103" in text


def test_what_is_no_number_any_more_is_not_shown_as_it_was(tmp_path):
    path = write(tmp_path / "run.jsonl")
    sink, place = open_sink(path), Place("decoder", 0, "decoder.0", 3)
    sink(Reading(500, (place,), {"entropy": torch.full((1, 3), torch.nan, dtype=torch.float64)}))
    sink.close()
    assert re.search(r"layer00 +█\S+ +– – –", shown(read_log(path).to_dict()))


def test_a_narrow_terminal_shows_less_of_everything_and_cuts_nothing_off(tmp_path):
    document = read_log(write(tmp_path / "run.jsonl", steps=300, flags={2: [FLAG]})).to_dict()
    wide, usual, narrow = (shown(document, width=width).splitlines()[1:4] for width in (80, 75, 58))
    assert re.search(r"0.5 1 1.25 .* 20 30 35 +logit growth$", wide[2].rstrip())
    assert re.search(r"[▁-█]{8,} +0.5 1 1.25 +[▁-█]{8,} +20 30 35 +●$", usual[2].rstrip())
    assert re.search(r"[▁-█]{8,} +1 +[▁-█]{8,} +30 +●$", narrow[2].rstrip())
    assert all(line.startswith(("layer", "layer00", "layer01")) for line in (*wide, *usual, *narrow))
    assert "…" not in "".join((*wide, *usual, narrow[2]))


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_no_line_is_wider_than_the_terminal(tmp_path, width):
    text = shown(read_log(write(tmp_path / "run.jsonl", steps=300)).to_dict(), width=width)
    assert max(len(line.rstrip()) for line in text.splitlines()) <= width


def test_a_run_that_watches_something_else_is_shown_too(tmp_path):
    sink = open_sink(tmp_path / "run.jsonl")
    sink(Reading(0, (Place("decoder", 0, "h", 1),), {}, {"token_cosine": torch.tensor([0.25])}))
    text = shown(read_log(tmp_path / "run.jsonl").to_dict())
    assert re.search(r"layer00 +▁ +0.25", text)


def nothing(path):
    """Readings without places, or without known values."""
    sink = open_sink(path)
    sink(Reading(0, ()))
    sink(Reading(5, (Place("decoder", 0, "h", 2),), {"entropy": torch.full((1, 2), torch.nan)}))
    sink.close()
    return path


def test_a_log_without_figures_says_so(tmp_path):
    text = shown(read_log(nothing(tmp_path / "run.jsonl")).to_dict())
    assert text.splitlines()[0] == "run.jsonl  2 readings, steps 0 to 5, 0 flags raised"
    assert "no value is known so far" in text
    assert "layer" not in text


@pytest.mark.parametrize("option", ["--once", "--json", "--html=page.html"])
def test_a_log_without_figures_is_shown_in_every_form(tmp_path, monkeypatch, option):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["watch", str(nothing(tmp_path / "run.jsonl")), option]) == 0


def test_the_largest_numbers_are_drawn(tmp_path):
    sink = open_sink(tmp_path / "run.jsonl")
    largest = torch.finfo(torch.float64).max
    for step in range(2):
        values = torch.tensor([[-largest, largest]], dtype=torch.float64)
        sink(Reading(step, (Place("decoder", 0, "h", 2),), {"likeness": values}))
    page = render_watch(read_log(tmp_path / "run.jsonl").to_dict())
    assert "nan" not in page.split("<figure")[1].split("</figure>")[0]


def test_a_sparkline_keeps_the_last_value_of_each_share():
    assert sparkline([9, 0, 9, 1, 9, 3], 3) == "▁▃█"
    assert sparkline([None, None], 5) == "  "
    assert sparkline([], 5) == ""
    assert sparkline([2.0, 2.0], 5) == "▁▁"


@pytest.mark.parametrize("level", [2.5486, -2.5486, 1e300])
def test_a_sparkline_of_values_that_hardly_differ_is_flat(level):
    assert sparkline([level, level * (1 + 1e-6), level * (1 - 1e-6)], 3) == "▁▁▁"
    assert len(set(sparkline([level, level * 1.1], 2))) == 2


def test_json_is_one_object(tmp_path, capsys):
    assert cli.main(["watch", str(write(tmp_path / "run.jsonl", flags={2: [FLAG]})), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "massieu.watch/1"
    assert document["steps"] == [0, 100, 200, 300, 400]
    assert document["series"]["entropy/layer00/median"] == [2.0, 1.75, 1.5, 1.25, 1.0]
    assert document["series"]["update_ratio/layer00"][0] is None
    assert document["flags"][0]["reason"] == "scores saturate"
    assert document["quantities"]["entropy"]["unit"] == "nats"


def test_once_prints_the_view_and_ends(tmp_path, capsys):
    assert cli.main(["watch", str(write(tmp_path / "run.csv")), "--once"]) == 0
    assert "layer01" in capsys.readouterr().out


def test_the_page_is_written_whole_and_named(tmp_path, capsys):
    page = tmp_path / "page.html"
    page.write_text("old")
    assert cli.main(["watch", str(write(tmp_path / "run.csv", flags={2: [FLAG]})), "--html", str(page)]) == 0
    assert capsys.readouterr().out == f"page: {page}\n"
    text = page.read_text()
    assert text.count("<svg viewBox") == 6  # three quantities of two layers
    assert "logit growth raised at step 200" in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.html", "run.csv"]


def test_the_page_shows_the_loss_beside_the_flags(tmp_path):
    log = write(tmp_path / "run.csv", flags={2: [FLAG]}, recorded=LOSSES)
    page = render_watch(read_log(log).to_dict())
    flags, quantities = page.split('<section id="flags">')[1].split('<section id="quantities">')
    assert flags.count("<svg viewBox") == 2
    assert quantities.count("<svg viewBox") == 6
    chart = flags.split('data-curve="/loss"')[1].split("</svg>")[0]
    assert "logit growth raised at step 200" in chart  # a flag of any layer
    assert re.search('<th class="n">loss</th><th class="n">rate</th></tr>', flags)
    assert re.search('<td class="n">2.5</td><td class="n">0.1</td></tr>', flags)  # those of step 200
    data = json.loads(page.split('id="data">')[1].split("</script>")[0])
    assert data["curves"]["/loss"] == {"value": LOSSES["loss"]}


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("none.jsonl", None, "none.jsonl cannot be read: No such file or directory; give the path that watch"),
        ("empty.jsonl", "", "empty.jsonl holds no reading so far"),
        ("broken.jsonl", "what\n", "broken.jsonl holds no reading in its 1 line;"),
        ("other.csv", "a,b\n", "other.csv must begin with the columns of massieu.watch"),
        ("run.txt", "", "a log ends in .jsonl or .csv"),
    ],
)
@pytest.mark.parametrize("option", ["--once", "--json", "--html=page.html"])
def test_what_is_no_log_is_one_sentence_and_exit_code_two(tmp_path, monkeypatch, capsys, name, text, sentence, option):
    monkeypatch.chdir(tmp_path)
    if text is not None:
        Path(name).write_text(text)
    assert cli.main(["watch", name, option]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"massieu: {sentence}")
    assert err.count("\n") == 1
    assert not Path("page.html").exists()


def test_a_page_that_cannot_be_written_is_one_sentence(tmp_path, capsys):
    log = write(tmp_path / "run.jsonl")
    assert cli.main(["watch", str(log), "--html", str(tmp_path / "none" / "page.html")]) == 2
    assert "page.html cannot be written: No such file or directory; choose another path" in capsys.readouterr().err


@pytest.mark.parametrize("steps", [0, 2])
def test_a_terminal_follows_the_log_until_ctrl_c(tmp_path, steps):
    path = write(tmp_path / "run.jsonl", steps=steps)
    ours, theirs = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "100", "LINES": "30"}
    command = [sys.executable, "-m", "massieu", "watch", str(path)]
    process = subprocess.Popen(
        command,
        env=environment,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # background jobs begin with it ignored
    )
    os.close(theirs)
    seen = b""

    def until(words):
        nonlocal seen
        begin = time.monotonic()
        while words not in seen:
            assert time.monotonic() - begin < 60, seen
            if select.select([ours], [], [], 0.2)[0]:
                seen += os.read(ours, 65536)

    try:
        until(b"steps 0 to 100" if steps else b"waits for the first reading")
        sink = open_sink(path)
        sink(Reading(700, (Place("decoder", 0, "decoder.0", 3),), {"entropy": torch.ones(1, 3)}))
        until(b"steps 0 to 700" if steps else b"step 700")
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def test_peaks_survive_the_thinning_of_a_long_run(tmp_path):
    document = read_log(write(tmp_path / "run.jsonl", steps=1500, layers=1, spike=701)).to_dict()
    page = render_watch(document)
    data = json.loads(page.split('id="data">')[1].split("</script>")[0])
    assert len(data["steps"]) == 240
    assert data["steps"][-1] == 149900
    assert max(data["curves"]["entropy/layer00"]["max"]) == 77.0


def test_the_page_of_a_deep_model_stays_small():
    series = {
        f"q{n}/layer{layer:02d}/{key}": [1.0] * 500
        for n in range(12)
        for layer in range(96)
        for key in ("min", "median", "max")
    }
    document = {"log": "x", "steps": list(range(500)), "series": series, "flags": [], "raised": [], "quantities": {}}
    page = render_watch({**document, "restarts": 0, "broken": 0})
    assert len(page) < 100 * LARGEST_PAGE


def test_what_a_log_says_is_escaped(tmp_path):
    evil = "<script>window.hacked=1</script>"
    flag = Flag(**{**vars(FLAG), "name": evil, "reason": evil, "reference": evil})
    document = read_log(write(tmp_path / "run.jsonl", flags={1: [flag]})).to_dict()
    document["log"] = evil
    document["series"][f"{evil}/layer00/min"] = [1.0] * 5
    assert evil not in render_watch(document)


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("the page is not tried in a browser: chromium (make browser) is not installed")
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_opens_offline_fits_its_window_and_reads_out_figures(browser, tmp_path, width):
    page_file = tmp_path / "page.html"
    log = write(
        tmp_path / "run.jsonl", stacks=("encoder", "cross"), flags={2: [Flag(**{**vars(FLAG), "stack": "cross"})]}
    )
    page_file.write_text(render_watch(read_log(log).to_dict()))
    context, wrong = browser.new_context(viewport={"width": width, "height": 800}), []
    context.set_offline(True)
    page = context.new_page()
    page.on("console", lambda message: wrong.append(message.text))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", lambda request: wrong.append(request.url) if request.url != page_file.as_uri() else None)
    page.goto(page_file.as_uri())
    page.wait_for_selector("html[data-ready=true]", state="attached", timeout=10_000)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    chart = page.locator('svg[data-curve="entropy/cross.layer01"]')
    assert chart.locator(".raised").count() == 1
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    page.mouse.move(box["x"] + box["width"] * 292 / 300, box["y"] + 40)
    assert page.text_content("#tip") == "step 400min 0.5, median 1, max 1.25"
    before = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.click("#theme")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before
    context.close()
    assert wrong == []


def test_labels_are_not_cut_off_and_the_cursor_stands_at_its_step(browser, tmp_path):
    sink, place = open_sink(tmp_path / "run.jsonl"), Place("decoder", 0, "h", 2)
    for step in (0, 50, 100):
        heads = torch.tensor([[1.0, 2.0]], dtype=torch.float64) * (step - 49)
        kinds = {"log_normalizer": 1388.7 * heads, "score_max": -1.237e-12 * heads, "entropy": 1e150 * heads}
        sink(Reading(step, (place,), kinds))
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    (tmp_path / "page.html").write_text(render_watch(read_log(tmp_path / "run.jsonl").to_dict()))
    page.goto((tmp_path / "page.html").as_uri())
    page.wait_for_selector("html[data-ready=true]", state="attached", timeout=10_000)
    labels = page.evaluate(
        "[...document.querySelectorAll('.curve-chart text')].map(x => [x.textContent, x.getBBox().x])"
    )
    assert "1.42e5" in [text for text, _ in labels]
    assert [text for text, x in labels if x < 0] == []
    chart = page.locator('svg[data-curve="entropy/layer00"]')
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    middle = float(chart.locator("polyline").get_attribute("points").split()[1].split(",")[0])
    page.mouse.move(box["x"] + box["width"] * middle / 300, box["y"] + 40)
    assert page.text_content("#tip").startswith("step 50")
    assert abs(float(chart.locator(".cursor").get_attribute("x1")) - middle) < 0.1
    page.close()


def test_an_axis_of_the_page_says_where_it_is_logarithmic(tmp_path):
    document = read_log(write(tmp_path / "run.jsonl")).to_dict()
    assert document["quantities"]["update_ratio"]["scale"] == "logarithmic"
    ratios, entropies = (
        re.findall(rf'<svg [^>]*data-curve="{name}/layer0.".*?</svg>', render_watch(document), re.DOTALL)
        for name in ("update_ratio", "entropy")
    )
    assert len(ratios) == len(entropies) == 2
    assert all(">log scale</text>" in chart and "logarithmic axis" in chart for chart in ratios)
    assert not any("log scale" in chart or "logarithmic" in chart for chart in entropies)
