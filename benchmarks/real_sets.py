"""What is found in real sets: copies among all icons, images of CIFAR-10's test set in its training set, blood cells.

    python benchmarks/icons.py package SHARDS --all --side 32
    python benchmarks/real_sets.py icons --run RUN/encoder.safetensors --package package --data SHARDS
    python benchmarks/real_sets.py against --run RUN/encoder.safetensors --data TRAIN --against TEST
    python benchmarks/real_sets.py bccd --encoder timm/NAME --weights FILE --image-size 224 --data JPEGImages
    python benchmarks/real_sets.py table                                            # into docs/explore.md

Icons: the package says which are drawn by the same text, so their copies are known; the neighbors are those of one icon
of each kind, by the features of the run's encoder. CIFAR-10: also drawn, docs/pictures/against_*.png.
"""

import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import tyro
from collection import cost_of_neighbors
from icons import BOX
from PIL import Image
from presets import write_between_marks

from millionway.collection.answers import Answer
from millionway.collection.collection import Collection
from millionway.collection.neighbors import NUM_NEIGHBORS
from millionway.collection.opening import open_collection, open_others
from millionway.console import track
from millionway.machine import describe_environment
from millionway.settings.checks import Chosen
from millionway.settings.collection import Collected

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "benchmarks" / "results" / "collection_real_sets.json"
PICTURES = ROOT / "docs" / "pictures"
NAMES = {"icons": "icons", "against": "CIFAR-10, test images in training images", "bccd": "blood cells"}
NUM_SHOWN, COLUMNS, SIDE, GAP = 50, 10, 48, 6


@dataclass(frozen=True)
class Asked(Collected):
    what: tyro.conf.Positional[Literal["icons", "against", "bccd", "table"]] = "table"
    package: Chosen[Path] = None
    against: Chosen[str] = None


def known_texts(package: Path) -> dict[str, str]:
    """{set/name: all that its drawing depends on}"""
    texts = {}
    for path in sorted((package / "json").glob("*.json")):
        icons = json.loads(path.read_text(encoding="utf-8"))
        for name, icon in icons["icons"].items():
            box = [icon.get(key, icons.get(key, usual)) for key, usual in BOX.items()]
            texts[f"{icons['prefix']}/{name}"] = json.dumps([icon["body"], box])
    return texts


def kinds_of(values: list[str]) -> np.ndarray:
    """[values] equal ones have the same number."""
    numbers: dict[str, int] = {}
    return np.array([numbers.setdefault(value, len(numbers)) for value in values])


def icons(collection: Collection, asked: Asked) -> dict[str, Any]:
    assert asked.package is not None
    texts, manifest = known_texts(asked.package), collection.dataset.manifest
    names = [key.partition("/")[2].removesuffix(".png") for key in manifest.keys.arrow.to_pylist()]
    by_text = kinds_of([texts[name] for name in names])
    by_content = kinds_of(manifest.table["content_hash"].to_pylist())
    first = np.unique(by_content, return_index=True)[1]
    unit = collection.vectors.unit[torch.from_numpy(np.sort(first))]
    return {
        "icons": len(names),
        "drawn by texts of their own": int(by_text.max()) + 1,
        "different pictures": int(by_content.max()) + 1,
        "icons of one text found as copies": _pairs(by_text, by_content) == int(by_text.max()) + 1,
        "dim": unit.shape[1],
        "neighbors": NUM_NEIGHBORS,
        **cost_of_neighbors(unit),
    }


def _pairs(one: np.ndarray, other: np.ndarray) -> int:
    return len(np.unique(np.stack([one, other]), axis=1).T)


def against(collection: Collection, asked: Asked) -> dict[str, Any]:
    assert asked.against is not None
    others = open_others(collection, asked, asked.against)
    found = collection.duplicates(against=others)
    lines = list({line["against_id"]: line for line in reversed(found.to_pylist())}.values())[::-1]  # the best of each
    spread = [lines[len(lines) * place // NUM_SHOWN] for place in range(NUM_SHOWN)] if len(lines) > NUM_SHOWN else lines
    _draw([_pictures(found, line) for line in lines[:NUM_SHOWN]], PICTURES / "against_first.png")
    _draw([_pictures(found, line) for line in spread], PICTURES / "against_spread.png")
    return {
        "training images": len(collection.ids),
        "test images": len(others.ids),
        "test images that are in both": len(lines),
        "of these with the very same bytes": sum(line["kind"] == "copy" for line in lines),
        "with another label": sum(line["label"] != Path(line["against"]).parent.name for line in lines),
    }


def _pictures(found: Answer, line: dict[str, Any]) -> list[Image.Image]:
    assert found.other_thumbnail_of is not None
    both = found.thumbnail_of(line["id"]), found.other_thumbnail_of(line["against_id"])
    return [Image.open(io.BytesIO(each)).convert("RGB").resize((SIDE, SIDE)) for each in both if each is not None]


def _draw(pairs: list[list[Image.Image]], path: Path) -> None:
    """Each pair side by side."""
    width, height = 2 * SIDE + GAP, SIDE + GAP
    sheet = Image.new("RGB", (COLUMNS * width + GAP, -(-len(pairs) // COLUMNS) * height + GAP), "white")
    for place, pair in enumerate(pairs):
        for column, picture in enumerate(pair):
            sheet.paste(picture, (GAP + place % COLUMNS * width + column * SIDE, GAP + place // COLUMNS * height))
    sheet.save(path, optimize=True)


def bccd(collection: Collection, asked: Asked) -> dict[str, Any]:
    twice, strange = collection.duplicates(), collection.outliers(5)
    clusters = collection.clusters
    return {
        "photos": len(collection.ids),
        "copies": twice.title.partition(";")[0],
        "clusters": int(clusters.max(initial=-1)) + 1,
        "photos in none": int(np.count_nonzero(clusters < 0)),
        "outliers": [(Path(line["path"]).name, line["reason"]) for line in strange.table.to_pylist()],
    }


def write_table(results: dict[str, Any]) -> None:
    lines = ["| set | what was found |", "|---|---|"]
    for name, result in results.items():
        words = [f"{key}: {_text(value)}" for key, value in result["numbers"].items()]
        lines.append(f"| {NAMES[name]} | {'; '.join(words)} |")
    write_between_marks(ROOT / "docs" / "explore.md", "real sets", "\n".join(lines))


def _text(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(" ".join(each) for each in value)
    if isinstance(value, bool):
        return "all" if value else "not all"
    return f"{value:,.0f}" if isinstance(value, int | float) else str(value)


def main(asked: Asked) -> None:
    results = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    if asked.what != "table":
        environment = json.loads(describe_environment(torch.device("cpu")))  # as it begins
        measure = {"icons": icons, "against": against, "bccd": bccd}[asked.what]
        results[asked.what] = {"numbers": measure(open_collection(asked, track), asked), "environment": environment}
        RESULT.write_text(json.dumps(results, indent=2) + "\n")
        print(json.dumps(results[asked.what]["numbers"], indent=1))
    write_table(results)


if __name__ == "__main__":
    main(tyro.cli(Asked, config=(tyro.conf.OmitArgPrefixes,)))
