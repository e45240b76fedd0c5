"""evaluation/<protocol>.json: numbers with all that led to them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from millionway.files import make_folder, write_whole
from millionway.reporting.intervals import INTERVAL, shown
from millionway.seals import write_json


def write_result(
    folder: Path, protocol: str, summary: dict[str, Any], settings: dict[str, Any], seeds: list[int], seconds: float
) -> Path:
    """summary: `numbers`, and what else is known of them."""
    path = folder / f"{protocol}.json"
    folder.parent.mkdir(parents=True, exist_ok=True)
    make_folder(folder)
    content = {
        "protocol": protocol,
        **summary,
        "settings": settings,
        "seeds": seeds,
        "seconds": round(seconds, 3),
    }
    write_json(path, content)
    return path


def write_table(folder: Path, results: dict[str, dict[str, Any]]) -> None:
    """all.md: every number of every protocol."""
    lines = ["| protocol | | value |", "|---|---|---|"]
    lines += [f"| {protocol} | {name} | {value} |" for protocol, name, value in rows(results)]
    write_whole(folder / "all.md", "\n".join(lines) + "\n")


def rows(results: dict[str, dict[str, Any]]) -> Iterator[tuple[str, str, str]]:
    """(protocol, name, value for people), with the interval where there are several seeds."""
    for protocol, numbers in results.items():
        halves = numbers.get(INTERVAL, {})
        for name, value in numbers.items():
            if name != INTERVAL:
                yield protocol, name, shown(name, value, halves.get(name))
