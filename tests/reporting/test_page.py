import base64
import io
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
from PIL import Image

from millionway.reporting.page import write_report

HEALTH = {"instance_top1": 0.1, "instance_top5": 0.3, "effective_rank": 9.0, "positive_cosine": 0.5}
HEALTH |= {"hardest_negative_cosine": 0.4, "num_images": 64}
STEP = {"kind": "step", "loss": 4.0, "lr": 0.1, "batch_top1": 0.1, "images_per_second": 9.0, "num_images": 64}
LINES = [{**STEP, "step": s, "epoch": s / 2} for s in (1, 2)]
LINES += [{"kind": "evaluation", "step": s, "epoch": s, **HEALTH} for s in (0, 2)]
LINES += [{"kind": "epoch", "step": s, "epoch": s, "seconds": 3000.0} for s in (1, 2)]
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


def png() -> str:
    buffer = io.BytesIO()
    Image.new("RGB", (4, 4), "teal").save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()


def make_run(tmp_path: Path, lines: list[dict], data: str = "<photos>", key: str = "a'b.png", **entry) -> Path:
    run = tmp_path / "<run> & co"
    (run / "evaluation").mkdir(parents=True)
    settings = {"data": data, "model": {"encoder": "e"}, "images": {"image_size": 16}, "training": {"epochs": 2}}
    (run / "config.json").write_text(json.dumps(settings))
    (run / "environment.json").write_text(json.dumps({"cpu": key}))
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"torn')
    entry = {"instance_id": 0, "key": key, "label": key, "cosine": 1.0, "picture": png()} | entry
    for name in ("neighbors", "samples"):
        content = {"numbers": {"rows": [[entry, entry, entry]]}, "settings": {}}
        (run / "evaluation" / f"{name}.json").write_text(json.dumps(content))
    result = {"numbers": {"knn_20": 0.62}, "untrained": {"knn_20": 0.31}, "settings": {"data": data, "chance": 0.1}}
    (run / "evaluation" / "knn.json").write_text(json.dumps(result))
    return run


def test_page_of_a_run_that_has_only_begun(tmp_path) -> None:
    run = make_run(tmp_path, [])
    shutil.rmtree(run / "evaluation")
    text = write_report(run).read_text()
    assert "&lt;photos&gt;" in text and "<photos>" not in text and "&lt;run&gt;" in text and "just begun" not in text
    assert "0 of 2 epochs so far" in text and "too early" in text


def test_page_says_what_was_done_and_what_it_came_to(tmp_path) -> None:
    text = write_report(make_run(tmp_path, LINES)).read_text()
    assert "64 images, 2 epochs, 1 h 40 of training" in text
    assert "For 10% of fresh random views it finds the image among 64" in text
    assert re.search(r"62\.00%</td>\s*<td class=\"number\">31\.00%</td>\s*<td class=\"number\">10\.0%", text)
    assert "What training saw" in text and "Verdict: " in text


def test_page_is_one_file_and_well_formed(tmp_path) -> None:
    text = write_report(make_run(tmp_path, LINES)).read_text()
    assert not re.findall(r"(?:src|href)=['\"]?(?!data:)[^'\" >]+", text)  # nothing is fetched from elsewhere
    assert "a&#39;b.png" in text and text.count("data:image/svg+xml") == 5

    class Balance(HTMLParser):
        depth = 0

        def handle_starttag(self, tag, attrs):
            self.depth += tag in ("div", "figure", "table", "main", "details", "td", "tr")

        def handle_endtag(self, tag):
            self.depth -= tag in ("div", "figure", "table", "main", "details", "td", "tr")

    parser = Balance()
    parser.feed(text)
    assert parser.depth == 0


@pytest.mark.parametrize(
    ("file", "content", "what"),
    [
        ("evaluation/neighbors.json", {"numbers": {"rows": [[{"key": "k", "picture": 'A"><script>'}]]}}, "base64"),
        ("evaluation/neighbors.json", {"numbers": {"rows": [[{"key": "k", "picture": "QUFB"}]]}}, "neither PNG"),
        ("evaluation/neighbors.json", {"numbers": {"rows": [[{"key": 1, "picture": png()}]]}}, "key is not a str"),
        ("evaluation/samples.json", {"numbers": {"rows": 3}}, "rows is not a list"),
        ("evaluation/knn.json", {"numbers": {"knn_20": "<b>"}}, "knn_20 is not a number"),
        ("evaluation/knn.json", {"numbers": {"knn_20": 1}, "settings": {"chance": "<b>"}}, "chance is not a number"),
        ("evaluation/knn.json", ["<b>"], "no object with names"),
        ("config.json", "<b>", "no object with names"),
    ],
)
def test_what_no_run_writes_is_refused_by_name(tmp_path, file: str, content, what: str) -> None:
    run = make_run(tmp_path, LINES)
    (run / file).write_text(json.dumps(content) + "\n")
    with pytest.raises(ValueError, match=what) as error:
        write_report(run)
    assert str(run / file) in str(error.value) and not (run / "report.html").exists()


@pytest.mark.parametrize(
    "line", [{**STEP, "loss": "<blink>"}, {**STEP, "kind": ["step"]}, {"kind": "step"}, [], 3, "<blink>"]
)
def test_a_line_that_no_run_writes_is_left_out_and_told(tmp_path, line, caplog) -> None:
    run = make_run(tmp_path, LINES)
    with_it = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(json.dumps(line) + "\n" + with_it)
    assert "<blink>" not in write_report(run).read_text()
    assert f"{run / 'metrics.jsonl'}: 1 lines are damaged and left out, the first is line 1" in caplog.text


def in_browser(page: Path) -> str:
    """The page as a real browser has it after scripts have run."""
    assert CHROMIUM is not None
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={page.parent}/profile"]
    done = subprocess.run([*command, "--dump-dom", page.as_uri()], capture_output=True, text=True, check=True)
    return done.stdout


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
def test_no_script_of_a_run_folder_runs_in_a_browser(tmp_path) -> None:
    attack = "\"'><script>document.title='ran'</script><img src=x onerror=\"document.title='ran'\">{{7*7}}"
    page = write_report(make_run(tmp_path, LINES, data=attack, key=attack, label=attack))
    seen = in_browser(page)
    assert "<title>&lt;run&gt; &amp; co · millionway</title>" in seen and "<script" not in seen
    assert seen.count("&lt;script&gt;") >= 4 and "{{7*7}}" in seen
    # The policy holds even where the text has come through unescaped; without it this very script would run.
    text = page.read_text().replace("</main>", "</main><script>document.title='ran'</script>")
    open_page, closed_page = tmp_path / "open.html", tmp_path / "closed.html"
    closed_page.write_text(text)
    open_page.write_text(re.sub(r"<meta http-equiv[^>]*>", "", text))
    assert "<title>ran</title>" in in_browser(open_page) and "<title>ran</title>" not in in_browser(closed_page)
