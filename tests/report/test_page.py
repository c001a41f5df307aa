"""The page: complete, self-contained, safe, and clear about what is missing or wrong."""

import json
import re
from html.parser import HTMLParser

import pytest
from answers import answer, answers, write

from verkv.cli import main
from verkv.report import page as pages
from verkv.report import plots, sections
from verkv.report.html import Html, element, table
from verkv.report.read import ReportError, read_results
from verkv.report.write import replace_file, write_report

pytest.importorskip("matplotlib", reason="the report's pictures need matplotlib")
VOID = {"meta", "img", "br", "hr", "link", "input"}


class Outline(HTMLParser):
    """Elements with their attributes; complains of what is not closed."""

    def __init__(self):
        super().__init__()
        self.open, self.elements, self.text = [], [], []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data):
        self.text.append(data)


def outline(text: str) -> Outline:
    """A parsed page."""
    parsed = Outline()
    parsed.feed(text)
    assert not parsed.open
    return parsed


@pytest.fixture(scope="module")
def full_page():
    """Of results with everything in them."""
    return pages.page(answers(2, tasks=("niah_single_1", "vt"), epsilons=(0.05, 0.1)), "results.jsonl")


# --- a complete page --------------------------------------------------------------------------------------------------


def test_every_section_is_there_with_its_pictures(full_page):
    parsed = outline(full_page)
    ids = [attributes["id"] for tag, attributes in parsed.elements if tag == "section"]
    assert ids == [*(key for key, _, _ in pages.SECTIONS), "made"]
    images = [attributes for tag, attributes in parsed.elements if tag == "img"]
    assert len(images) == 3 + 2 + 3  # quality and divergence, two heat maps, adherence, traffic and bounds
    assert all(len(image["alt"]) > 60 for image in images)
    assert "missing" not in [attributes.get("class") for _, attributes in parsed.elements]


def test_links_lead_to_sections(full_page):
    parsed = outline(full_page)
    ids = {attributes.get("id") for _, attributes in parsed.elements}
    links = [attributes["href"] for tag, attributes in parsed.elements if tag == "a"]
    assert links and all(link[0] == "#" and link[1:] in ids for link in links)


def test_nothing_comes_from_a_network_and_nothing_is_run(full_page):
    parsed = outline(full_page)
    assert not re.search(r"https?:|//[a-z]|@import|url\(", re.sub(r'src="data:[^"]*"', "", full_page))
    assert not {tag for tag, _ in parsed.elements} & {"script", "iframe", "object", "link", "base"}
    assert not [name for _, attributes in parsed.elements for name in attributes if name.startswith("on")]
    sources = [attributes["src"] for tag, attributes in parsed.elements if tag == "img"]
    assert all(source.startswith("data:image/svg+xml;base64,") for source in sources)
    policy = next(a["content"] for tag, a in parsed.elements if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'")


def test_tables_scroll_in_a_box_of_their_own(full_page):
    parsed = outline(full_page)
    boxes = [i for i, (tag, a) in enumerate(parsed.elements) if tag == "div" and a.get("class") == "scroll"]
    tables_ = [i for i, (tag, _) in enumerate(parsed.elements) if tag == "table"]
    assert tables_ == [i + 1 for i in boxes]
    assert ".scroll { overflow-x: auto" in full_page


def test_the_same_results_give_the_same_page():
    lines = [answer(method, example=i) for i in range(2) for method in ("dense", "kvzip")]
    assert pages.page(lines, "r") == pages.page(json.loads(json.dumps(lines)), "r")


def test_the_page_says_how_it_was_made(full_page):
    shown = " ".join(outline(full_page).text)
    for fact in (
        "torch 2.13.0",
        "cpu, float32",
        "2,000 bootstrap resamples",
        "ε 0.05, δ 0.1",
        "verkv report results.jsonl",
    ):
        assert fact in shown
    command = "verkv eval --model SmolLM2-135M-Instruct --tasks niah_single_1 vt --n-tokens 3000 --n-examples 2"
    assert command in shown and "--compression 8 16 32 --epsilon 0.05 0.1" in shown


def test_lengths_have_headings_of_their_own():
    lines = [answer("dense", n_tokens=n) for n in (6000, 3000)]
    shown = pages.page(lines, "r")
    assert shown.index("Prompts of up to 3,000 tokens") < shown.index("Prompts of up to 6,000 tokens")


def test_the_command_that_is_shown_is_one_that_verkv_eval_takes(full_page):
    eval_cli = pytest.importorskip("verkv.evaluation.cli")
    import argparse
    import shlex

    parser = argparse.ArgumentParser()
    eval_cli.add_parser(parser.add_subparsers())
    line = next(text for text in outline(full_page).text if text.startswith("verkv eval")).splitlines()[0]
    options = parser.parse_args(shlex.split(line)[1:])
    assert options.n_examples == 2 and options.epsilon == [0.05, 0.1]


# --- nothing from the results becomes markup --------------------------------------------------------------------------

EVIL = "<script>alert(1)</script>\"'&<img src=x onerror=alert(2)>"


def test_results_are_shown_and_not_obeyed():
    lines = []
    for example in range(2):
        for method in ("dense", "kvzip", "verkv"):
            line = answer(method, task=EVIL, example=example, score=float(method == "dense"))
            line |= {"model": EVIL, "label": f"{line['label']} {EVIL} $x_1$ $", "prediction": EVIL, "answers": [EVIL]}
            line |= {"notes": [EVIL], "versions": {EVIL: EVIL}, "device": EVIL, "options": {EVIL: EVIL}}
            lines.append(line)
    text = pages.page(lines, EVIL)
    parsed = outline(text)
    tags = {tag for tag, _ in parsed.elements}
    assert "script" not in tags
    assert not [name for _, attributes in parsed.elements for name in attributes if name.startswith("on")]
    assert all(a["src"].startswith("data:") for tag, a in parsed.elements if tag == "img")
    assert parsed.text.count(EVIL) >= 4  # shown as it is


def test_elements_escape_text_and_attributes():
    assert element("p", "1 < 2", Html("<b>x</b>"), title='"&') == '<p title="&quot;&amp;">1 &lt; 2<b>x</b></p>'
    assert "<i>" not in table("<i>", ["<i>"], [["<i>"]])


def test_labels_are_no_formulas_and_not_too_long():
    assert plots.plain("a $b$\nc") == r"a \$b\$ c"
    assert len(plots.plain("x" * 500)) == 60


# --- what is missing --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("section", "lines", "command"),
    [
        (sections.glance, [answer("kvzip")], "--methods dense"),
        (sections.quality, [answer("dense")], "--methods kvzip verkv"),
        (sections.order, [answer("dense"), answer("kvzip")], "--methods dense kvzip poissoncomp verkv"),
        (sections.divergence, [answer("dense"), answer("kvzip", divergence=None)], "--methods dense verkv"),
        (sections.fetching, [answer("dense"), answer("kvzip")], "--methods verkv"),
        (sections.heads, [answer("dense")], "--methods verkv"),
        (sections.guarantee, [answer("kvzip")], "--epsilon 0.01"),
        (sections.guarantee, [answer("verkv", audit=None)], "--audit"),
        (sections.answers, [answer("kvzip")], "--methods dense"),
    ],
)
def test_a_section_without_data_says_what_to_run(section, lines, command):
    made = section(lines)
    assert 'class="missing"' in made
    assert any("verkv eval" in part and command in part for part in re.findall("<code>(.*?)</code>", made))


BARE = {"divergence": None, "memory": {}, "by_head": None, "audit": None, "stats": {}, "versions": {}}


@pytest.mark.parametrize(
    "lines",
    [[answer("dense")], [answer("kvzip")], [answer("verkv", **BARE)], [answer("dense"), answer("verkv", **BARE)]],
    ids=["dense", "kvzip", "bare", "dense and bare"],
)
def test_a_page_of_few_answers_is_still_a_page(lines):
    outline(pages.page(lines, "r"))


# --- bad input --------------------------------------------------------------------------------------------------------


def bad_files(folder):
    """Name: content of a file, and what the message says."""
    good = json.dumps(answer("dense"))
    without = {key: value for key, value in answer("dense").items() if key != "score"}
    other = json.dumps(answer("dense", model="Other"))
    return {
        "empty": ("", "is empty"),
        "blank": ("\n \n", "is empty"),
        "cut off": (f"{good}\n{good[:50]}", "line 2 is not JSON"),
        "a list": ("[1]\n", "line 1 is not a JSON object"),
        "no score": (json.dumps(without), "has no 'score'"),
        "a text for a score": (json.dumps(answer("dense", score="1")), "'score' has the wrong type"),
        "score of 2": (json.dumps(answer("dense", score=2)), "must be in [0, 1]"),
        "score of NaN": (json.dumps(answer("dense", score=float("nan"))), "must be in [0, 1]"),
        "negative compression": (json.dumps(answer("kvzip", compression=-1)), "the compression must be"),
        "two models": (
            f"{good}\n{other}\n",
            "answers of 2 models ('SmolLM2-135M-Instruct', 'Other'); choose one with --model",
        ),
        "odd statistics": (json.dumps(answer("verkv", stats={"decode_decisions": 1})), "verkv eval would not write"),
    }


@pytest.mark.parametrize("name", list(bad_files(None)))
def test_bad_input_is_one_line_status_2_and_no_page(name, tmp_path, capsys):
    content, message = bad_files(tmp_path)[name]
    results, out = tmp_path / "results.jsonl", tmp_path / "page.html"
    results.write_text(content)
    out.write_text("the page before")
    assert main(["report", str(results), "--out", str(out)]) == 2
    printed = capsys.readouterr()
    assert message in printed.err and printed.err.count("\n") == 1 and not printed.out
    assert out.read_text() == "the page before"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.html", "results.jsonl"]


def test_a_missing_file_and_a_folder(tmp_path, capsys):
    for path in (tmp_path / "none.jsonl", tmp_path):
        assert main(["report", str(path)]) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_bytes_that_are_no_text(tmp_path, capsys):
    (tmp_path / "r.jsonl").write_bytes(b"\xff\xfe\x00")
    assert main(["report", str(tmp_path / "r.jsonl")]) == 2
    assert "not UTF-8" in capsys.readouterr().err


def test_a_page_that_cannot_be_written(tmp_path, capsys):
    results = write(tmp_path / "r.jsonl", [answer("dense")])
    assert main(["report", str(results), "--out", str(tmp_path / "none" / "page.html")]) == 2
    assert "cannot be written" in capsys.readouterr().err
    assert main(["report", str(results), "--out", str(results)]) == 2
    assert read_results(results)


def test_a_failure_while_writing_leaves_the_page_before(tmp_path):
    (tmp_path / "page.html").mkdir()  # cannot be replaced by a file
    with pytest.raises(ReportError, match="cannot be written"):
        replace_file(tmp_path / "page.html", "new")
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


# --- what is read -----------------------------------------------------------------------------------------------------


def test_the_command_writes_beside_the_results(tmp_path, capsys):
    results = write(tmp_path / "some.results.jsonl", [answer("dense"), answer("kvzip")])
    assert main(["report", str(results)]) == 0
    out = tmp_path / "some.results.html"
    assert capsys.readouterr().out == f"Written: {out}\n"
    outline(out.read_text())


def test_one_of_several_models_can_be_chosen(tmp_path):
    lines = [answer("dense"), answer("dense", model="Other")]
    results = write(tmp_path / "r.jsonl", lines)
    assert [line["model"] for line in read_results(results, "Other")] == ["Other"]
    assert "VerKV: Other" in write_report(results, model="Other").read_text()
    with pytest.raises(ReportError, match="no answers of 'Third'"):
        read_results(results, "Third")


def test_an_answer_that_is_there_twice_counts_once(tmp_path):
    line = answer("dense")
    assert read_results(write(tmp_path / "r.jsonl", [line, line])) == [line]


def test_without_matplotlib_the_remedy_is_named(tmp_path, capsys, monkeypatch):
    def fail(*_):
        raise ImportError("No module named 'matplotlib'")

    monkeypatch.setattr("verkv.report.write.write_report", fail)
    assert main(["report", str(write(tmp_path / "r.jsonl", [answer("dense")]))]) == 1
    assert "pip install 'verkv[demo]'" in capsys.readouterr().err
