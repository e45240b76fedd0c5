"""evaluation/<protocol>.json: numbers with all that led to them."""

import json
import os
from pathlib import Path
from typing import Any


def write_result(
    run: Path, protocol: str, numbers: dict[str, Any], settings: dict[str, Any], seed: int, seconds: float
) -> Path:
    """Written aside and renamed."""
    path = run / "evaluation" / f"{protocol}.json"
    path.parent.mkdir(exist_ok=True)
    content = {
        "protocol": protocol,
        "numbers": numbers,
        "settings": settings,
        "seed": seed,
        "seconds": round(seconds, 3),
    }
    aside = path.with_name(path.name + ".tmp")
    aside.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    os.replace(aside, path)
    return path


def read_result(run: Path, protocol: str) -> dict[str, Any] | None:
    path = run / "evaluation" / f"{protocol}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
