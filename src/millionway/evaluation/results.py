"""evaluation/<protocol>.json: numbers with all that led to them."""

import json
from pathlib import Path
from typing import Any

from millionway.files import write_whole


def write_result(
    run: Path, protocol: str, numbers: dict[str, Any], settings: dict[str, Any], seed: int, seconds: float
) -> Path:
    path = run / "evaluation" / f"{protocol}.json"
    path.parent.mkdir(exist_ok=True)
    content = {
        "protocol": protocol,
        "numbers": numbers,
        "settings": settings,
        "seed": seed,
        "seconds": round(seconds, 3),
    }
    write_whole(path, json.dumps(content, indent=2) + "\n")
    return path
