"""The lines of metrics.jsonl: numbers with their kind and step, each with a seal of its own."""

import hashlib
import json
import logging
from pathlib import Path
from typing import Any

from millionway.files import BadFile, read_regular
from millionway.seals import SEAL, check_fields, read_json

log = logging.getLogger("millionway")

MAX_BYTES = 1 << 28
MAX_NAME_BYTES = 100
ALWAYS = {"kind": str, "step": int, "epoch": (int, float)}
NUMBERS = {
    "step": ("loss", "batch_top1", "lr", "images_per_second"),
    "epoch": ("seconds",),
    "evaluation": ("instance_top1", "instance_top5", "effective_rank", "positive_cosine", "hardest_negative_cosine"),
}


def line_of(numbers: dict[str, Any]) -> str:
    text = json.dumps(numbers)
    return f'{text[:-1]}, "{SEAL}": "{_seal(text)}"}}\n'


def _seal(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All whole lines of a metrics.jsonl. The last one may be torn by a crash; of others that are bad it is told."""
    if not path.is_file():
        return []
    texts = read_regular(path, MAX_BYTES).decode("utf-8", "replace").split("\n")
    lines, bad = [], []
    for number, text in enumerate(texts[:-1], start=1):
        try:
            lines.append(_opened(path, text))
        except (ValueError, RecursionError):
            bad.append(number)
    if bad:
        log.warning("%s: %d lines are damaged and left out, the first is line %d", path, len(bad), bad[0])
    return lines


def warn_of_missing(run: Path, lines: list[dict[str, Any]]) -> None:
    """Of lines that the newest checkpoint knows of, and that are gone."""
    try:
        name = read_regular(run / "checkpoints" / "last", MAX_NAME_BYTES).decode().strip()
        state = read_json(run / "checkpoints" / Path(name).name / "state.json")
        num = state.get("num_lines", 0)  # older versions did not count them
    except ValueError:
        return  # whoever needs the checkpoint says what is wrong with it
    if isinstance(num, int) and num > len(lines):
        log.warning("%s: of %d lines %d are missing", run / "metrics.jsonl", num, num - len(lines))


def _opened(path: Path, text: str) -> dict[str, Any]:
    line = json.loads(text)
    if not isinstance(line, dict):
        raise BadFile(path, "a line is not an object")
    seal = line.pop(SEAL, None)  # older versions wrote none
    if seal is not None and seal != _seal(json.dumps(line)):
        raise BadFile(path, "the seal of a line is broken")
    check_fields(path, line, **ALWAYS)
    for name in {*NUMBERS.get(line["kind"], ()), *line} - {"kind"}:
        if isinstance(line.get(name), bool) or not isinstance(line.get(name), int | float):
            raise BadFile(path, f"{name} is not a number")
    return line
