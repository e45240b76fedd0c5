import json
import re
from html.parser import HTMLParser

from millionway.reporting.page import write_report


def make_run(tmp_path, lines: list[dict]):
    run = tmp_path / "<run> & co"
    run.mkdir()
    settings = {"data": "<photos>", "model": {"encoder": "e"}, "images": {"image_size": 16}, "training": {"epochs": 2}}
    (run / "config.json").write_text(json.dumps(settings))
    (run / "environment.json").write_text("{}")
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"torn')
    return run


def test_page_of_a_run_that_has_only_begun(tmp_path) -> None:
    text = write_report(make_run(tmp_path, [])).read_text()
    assert "&lt;photos&gt;" in text and "<photos>" not in text and "&lt;run&gt;" in text


def test_page_is_one_file_and_well_formed(tmp_path) -> None:
    steps = [
        {
            "kind": "step",
            "step": s,
            "epoch": s / 2,
            "loss": 5.0 - s,
            "lr": 0.1,
            "batch_top1": 0.1,
            "images_per_second": 9.0,
        }
        for s in (1, 2)
    ]
    health = {"instance_top1": 0.1, "instance_top5": 0.3, "effective_rank": 9.0, "positive_cosine": 0.5}
    health["hardest_negative_cosine"] = 0.4
    evaluations = [{"kind": "evaluation", "step": s, "epoch": s, **health} for s in (0, 2)]
    run = make_run(tmp_path, [*steps, *evaluations])
    (run / "evaluation").mkdir()
    entry = {"instance_id": 0, "key": "a'b.png", "label": None, "cosine": 1.0, "png": "AAAA"}
    neighbors = {"numbers": {"rows": [[entry, entry]]}, "settings": {}}
    (run / "evaluation" / "neighbors.json").write_text(json.dumps(neighbors))
    text = write_report(run).read_text()
    assert not re.findall(r"(?:src|href)=['\"]?(?!data:)[^'\" >]+", text)  # nothing is fetched from elsewhere
    assert "a&#x27;b.png" in text and text.count("data:image/svg+xml") == 5

    class Balance(HTMLParser):
        depth = 0

        def handle_starttag(self, tag, attrs):
            self.depth += tag in ("div", "figure", "table", "main", "details")

        def handle_endtag(self, tag):
            self.depth -= tag in ("div", "figure", "table", "main", "details")

    parser = Balance()
    parser.feed(text)
    assert parser.depth == 0
