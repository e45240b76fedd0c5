"""evaluation/<protocol>.json: numbers with all that led to them."""

import json
from pathlib import Path
from typing import Any

from millionway.files import write_whole


def write_result(
    folder: Path, protocol: str, summary: dict[str, Any], settings: dict[str, Any], seeds: list[int], seconds: float
) -> Path:
    """summary: `numbers`, and what else is known of them."""
    path = folder / f"{protocol}.json"
    folder.mkdir(parents=True, exist_ok=True)
    content = {
        "protocol": protocol,
        **summary,
        "settings": settings,
        "seeds": seeds,
        "seconds": round(seconds, 3),
    }
    write_whole(path, json.dumps(content, indent=2) + "\n")
    return path
