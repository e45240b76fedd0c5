"""What a run folder says, for the page: read once, every type checked, since the folder may be a stranger's."""

import base64
import binascii
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from millionway.files import BadFile
from millionway.reporting.metrics import read_metrics, warn_of_missing
from millionway.seals import read_json

log = logging.getLogger("millionway")

Kind = TypeVar("Kind")
REMEDY = "Remove it and try again"
PICTURED = ("neighbors", "samples")
OTHERS = {"untrained": "untrained encoder", "start": "first weights"}
"""encoders that a run's is compared with"""
PICTURES = {b"\x89PNG\r\n\x1a\n": "png", b"\xff\xd8\xff": "jpeg"}


@dataclass(frozen=True)
class Picture:
    """A thumbnail with what is known of the image."""

    address: str
    """of its data, for <img>"""
    key: str
    label: str | None = None
    cosine: float | None = None


@dataclass(frozen=True)
class Score:
    """A number of a protocol."""

    protocol: str
    name: str
    value: float
    half_interval: float | None
    scored_on: str
    chance: float | None
    beside: dict[str, float] = field(default_factory=dict)
    """the same number of other encoders"""


@dataclass(frozen=True)
class Contents:
    name: str
    settings: dict[str, Any]
    environment: dict[str, Any]
    lines: list[dict[str, Any]]
    """of metrics.jsonl"""
    scores: list[Score]
    neighbors: list[list[Picture]]
    samples: list[list[Picture]]
    """each an image and views of it"""

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["kind"] == kind]


def read_contents(run: Path) -> Contents:
    """ValueError, with the file's name, for anything that a run does not write."""
    if not (run / "config.json").is_file():
        raise ValueError(f"{run}: not a run folder (no config.json)")
    results = {path.stem: path for path in sorted((run / "evaluation").glob("*.json")) if path.stem not in PICTURED}
    lines = read_metrics(run / "metrics.jsonl")
    warn_of_missing(run, lines)
    return Contents(
        name=run.resolve().name,
        settings=read_json(run / "config.json", REMEDY),
        environment=_environment(run / "environment.json"),
        lines=lines,
        scores=[score for protocol, path in results.items() for score in _scores(protocol, path)],
        neighbors=_pictures(run / "evaluation" / "neighbors.json"),
        samples=_pictures(run / "evaluation" / "samples.json"),
    )


def _environment(path: Path) -> dict[str, Any]:
    if not path.is_file():
        log.warning("%s is not there", path)
        return {}
    environment = read_json(path, REMEDY)
    if "cpu" not in environment:
        raise _wrong(path, "it does not say what the run was trained on")
    return environment


def _result(path: Path) -> dict[str, Any]:
    """One of evaluation/, which says in itself what it is of."""
    result = read_json(path, REMEDY)
    if result.get("protocol", path.stem) != path.stem:
        raise _wrong(path, f"it is of {result['protocol']!r:.60}, not of {path.stem}")
    return result


def _wrong(path: Path, what: str) -> BadFile:
    return BadFile(path, f"{what}; it was not written by a run, or it is damaged", REMEDY)


def _of(kind: type[Kind], value: Any, path: Path, name: str) -> Kind:
    if not isinstance(value, kind):
        raise _wrong(path, f"{name} is not a {kind.__name__}")
    return value


def _number(value: Any, path: Path, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _wrong(path, f"{name} is not a number")
    return float(value)


def _scores(protocol: str, path: Path) -> list[Score]:
    """Numbers alone; words such as the verdict stand elsewhere on the page."""
    result = _result(path)
    about = _of(dict, result.get("settings", {}), path, "settings")
    scored_on = Path(_of(str, about.get("data", ""), path, "data")).name
    counts = [about.get(name) for name in ("num_queries", "num_bank")]
    if all(isinstance(count, int) for count in counts):
        scored_on += f": {counts[0]:,} queries, {counts[1]:,} labeled images"
    chance = None if about.get("chance") is None else _number(about["chance"], path, "chance")
    numbers = _of(dict, result.get("numbers", {}), path, "numbers")
    halves = _of(dict, result.get("half_of_95_percent_interval", {}), path, "intervals")
    others = {name: _of(dict, result[name], path, name) for name in OTHERS if name in result}
    scores = []
    for name, value in numbers.items():
        half = halves.get(name)
        half = None if half is None else _number(half, path, f"the interval of {name}")
        beside = {who: _number(theirs[name], path, f"{who} {name}") for who, theirs in others.items() if name in theirs}
        scores.append(Score(protocol, name, _number(value, path, name), half, scored_on, chance, beside))
    return scores


def _pictures(path: Path) -> list[list[Picture]]:
    if not path.exists():
        return []
    rows = _of(list, _of(dict, _result(path).get("numbers"), path, "numbers").get("rows"), path, "rows")
    return [[_picture(entry, path) for entry in _of(list, row, path, "a row")] for row in rows]


def _picture(entry: Any, path: Path) -> Picture:
    entry = _of(dict, entry, path, "an entry")
    try:
        data = base64.b64decode(_of(str, entry.get("picture"), path, "picture"), validate=True)
    except (binascii.Error, ValueError):
        raise _wrong(path, "a picture is not base64") from None
    kind = next((kind for first_bytes, kind in PICTURES.items() if data.startswith(first_bytes)), None)
    if kind is None:
        raise _wrong(path, "a picture is neither PNG nor JPEG")
    label, cosine = entry.get("label"), entry.get("cosine")
    return Picture(
        f"data:image/{kind};base64,{base64.b64encode(data).decode()}",
        _of(str, entry.get("key"), path, "key"),
        None if label is None else _of(str, label, path, "label"),
        None if cosine is None else _number(cosine, path, "cosine"),
    )
