"""evaluation/<protocol>.json: numbers with all that led to them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from millionway.files import make_folder, write_whole
from millionway.reporting.contents import OTHERS
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
    head = ("protocol", "", "value", *columns(results).values())
    lines = [head, ["---"] * len(head), *rows(results)]
    lines = [f"| {' | '.join(line)} |" for line in lines]
    write_whole(folder / "all.md", "\n".join(lines) + "\n")


def columns(results: dict[str, dict[str, Any]]) -> dict[str, str]:
    """{the other encoders that were scored: what they are called}"""
    return {who: name for who, name in OTHERS.items() if any(who in numbers for numbers in results.values())}


def rows(results: dict[str, dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    """(protocol, name, value for people, that of other encoders), with the interval where there are several seeds."""
    others = columns(results)
    for protocol, numbers in results.items():
        halves = numbers.get(INTERVAL, {})
        for name, value in numbers.items():
            if name not in (INTERVAL, *OTHERS):
                theirs = (shown(name, numbers.get(who, {}).get(name, "")) for who in others)
                yield protocol, name, shown(name, value, halves.get(name)), *theirs
