"""Do harm to small runs and see what becomes of them. Figures go to results/faults.json and to docs/reliability.md.

python benchmarks/faults/run.py [--short] [kills ranks corruptions ...]
"""

import argparse
import importlib
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import preloaded
import scene

RESULTS = scene.ROOT / "benchmarks" / "results" / "faults.json"
PAGE = scene.ROOT / "docs" / "reliability.md"
FIRST, LAST = "<!-- faults -->", "<!-- /faults -->"
QUESTIONS = ("kills", "ranks", "two_hosts", "writes", "power_loss", "corruptions", "mutated_images", "soak")


def commit() -> str:
    command = ["git", "-C", str(scene.ROOT), "rev-parse", "--short=12", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def write_down(name: str, answer: dict) -> None:
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    known[name] = answer
    RESULTS.write_text(json.dumps(known, indent=1) + "\n")
    rows = ["| what | must | result | commit |", "|---|---|---|---|"]
    for each in QUESTIONS:
        if each in known:
            about = known[each]
            rows.append(f"| {about['what']} | {about['must']} | {about['result']} | {about['commit']} |")
    text = PAGE.read_text()
    before, after = text[: text.index(FIRST) + len(FIRST)], text[text.index(LAST) :]
    PAGE.write_text(f"{before}\n{chr(10).join(rows)}\n{after}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("questions", nargs="*", default=QUESTIONS, choices=[*QUESTIONS, []])
    parser.add_argument("--short", action="store_true", help="a few of each; nothing is written down")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="for each question, at most")
    chosen = parser.parse_args()
    if {"writes", "power_loss"} & set(chosen.questions or QUESTIONS):
        preloaded.begin_again_with_library()
    failed = []
    with tempfile.TemporaryDirectory() as place:
        scene.prepare(Path(place))
        for name in chosen.questions or QUESTIONS:
            question, folder, started = importlib.import_module(name), Path(place) / name, time.monotonic()
            folder.mkdir()
            scene.ends_at = started + 60 * chosen.minutes
            answer = question.measure(folder, chosen.short)
            seconds = round(time.monotonic() - started)
            print(f"{name}: {answer['result']} ({seconds} s)", flush=True)
            for problem in answer.get("wrong", [])[:10]:
                print(f"  {problem}", flush=True)
            failed += [name] if answer["passed"] is False else []
            if not chosen.short:
                what = (question.__doc__ or name).strip().splitlines()[0]
                about = {"what": what, "must": question.MUST, "commit": commit(), "seconds": seconds}
                write_down(name, {**about, **answer})
    preloaded.remove_library()
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
