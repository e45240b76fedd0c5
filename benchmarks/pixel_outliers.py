"""Images that are strange by their pixels alone: are they named, by us and by cleanvision, and how long does it take?

    python benchmarks/pixel_outliers.py --cifar10 FOLDER      # FOLDER/train/CLASS/*.png

2,000 images of CIFAR-10, and 20 of each kind of strange ones made from others. Found: its reason is named. Wrong: a
reason of one of these kinds is named for an image that nothing was done to; CIFAR-10 has some that are dark, or white
around a thing, so none is not the aim. Time: all of cleanvision's checks of these kinds; for ours, the pass
that also makes the thumbnails of the map.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageEnhance
from presets import write_between_marks

from millionway.collection.looks import Looks, look
from millionway.collection.neighbors import nearest
from millionway.collection.outliers import outliers
from millionway.data.dataset import open_dataset
from millionway.machine import describe_environment

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "benchmarks" / "results" / "pixel_outliers.json"
NUM_IMAGES, NUM_OF_EACH_KIND = 2000, 20

# kind: (how it is made, what cleanvision calls it, a word of our reason)
KINDS: dict[str, tuple[Callable[[Image.Image], Image.Image], str, str]] = {
    "dark": (lambda image: ImageEnhance.Brightness(image).enhance(0.05), "dark", "darker"),
    "bright": (lambda image: Image.blend(image, Image.new("RGB", image.size, "white"), 0.95), "light", "brighter"),
    "uniform": (
        lambda image: Image.blend(image, Image.new("RGB", image.size, "gray"), 0.97),
        "low_information",
        "uniform",
    ),
    "wide": (lambda image: image.crop((0, 13, 32, 19)), "odd_aspect_ratio", "wider"),
    "large": (lambda image: image.resize((400, 400)), "odd_size", "larger"),
    "small": (lambda image: image.resize((6, 6)), "odd_size", "smaller"),
}


def make(cifar10: Path, out: Path) -> list[str]:
    """Returns the kind of each image, '' for those that nothing was done to, in the order of their names."""
    files = sorted((cifar10 / "train").glob("*/*.png"))
    chosen = np.random.default_rng(0).choice(len(files), NUM_IMAGES + len(KINDS) * NUM_OF_EACH_KIND, replace=False)
    kinds = [*[""] * NUM_IMAGES, *[kind for kind in KINDS for _ in range(NUM_OF_EACH_KIND)]]
    for number, (kind, place) in enumerate(zip(kinds, chosen)):
        image = Image.open(files[place]).convert("RGB")
        (KINDS[kind][0](image) if kind else image).save(out / f"{number:05d}.png")
    return kinds


def by_cleanvision(folder: Path) -> tuple[list[set[str]], float]:
    from cleanvision import Imagelab

    started, issues = time.perf_counter(), {issue for _, issue, _ in KINDS.values()}
    lab = Imagelab(data_path=str(folder))
    lab.find_issues({issue: {} for issue in issues}, n_jobs=2, verbose=False)
    seconds = time.perf_counter() - started
    found = lab.issues.sort_index()
    return [{issue for issue in issues if line[f"is_{issue}_issue"]} for _, line in found.iterrows()], seconds


def by_ours(folder: Path) -> tuple[list[set[str]], float]:
    dataset = open_dataset(str(folder))
    started, ids = time.perf_counter(), np.arange(len(dataset.manifest))
    with tempfile.TemporaryDirectory() as place:
        looks = look(dataset.source, ids, Path(place), 2)
        width, height = (dataset.manifest.column(name) for name in ("width", "height"))
        unit = torch.nn.functional.normalize(torch.randn(len(ids), 64, generator=torch.Generator().manual_seed(0)))
        pixels = {name: looks.column(name) for name in Looks.NUMBERS}
        reasons = outliers(unit, nearest(unit, 20), pixels, width, height).reason
        seconds = time.perf_counter() - started
    words = {word for _, _, word in KINDS.values()}
    return [{word for word in words if word in reason} for reason in reasons], seconds


def measure(cifar10: Path) -> dict:
    with tempfile.TemporaryDirectory() as place:
        kinds = make(cifar10, Path(place))
        result: dict = {"environment": json.loads(describe_environment(torch.device("cpu")))}
        for side, name, at in ((by_ours, "ours", 2), (by_cleanvision, "cleanvision", 1)):
            found, seconds = side(Path(place))
            numbers: dict = {"seconds": seconds}
            for kind in KINDS:
                numbers[kind] = sum(KINDS[kind][at] in found[n] for n in range(len(kinds)) if kinds[n] == kind)
            numbers["wrong"] = sum(bool(found[n]) for n in range(len(kinds)) if not kinds[n])
            result[name] = numbers
    return result


def table(result: dict) -> str:
    lines = ["| | ours | cleanvision |", "|---|---|---|"]
    for kind in KINDS:
        lines.append(f"| {kind}, of {NUM_OF_EACH_KIND} | {result['ours'][kind]} | {result['cleanvision'][kind]} |")
    wrong = [result[side]["wrong"] for side in ("ours", "cleanvision")]
    lines.append(f"| named though nothing was done to them, of {NUM_IMAGES:,} | {wrong[0]} | {wrong[1]} |")
    ratio = result["cleanvision"]["seconds"] / result["ours"]["seconds"]
    lines.append(f"| time | 1 | {ratio:.1f} |")
    return "\n".join([*lines, "", f"Commit {result['environment']['commit']}."])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cifar10", type=Path, required=True)
    result = measure(parser.parse_args().cifar10)
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    write_between_marks(ROOT / "docs" / "explore.md", "pixel outliers", table(result))
    print(table(result))


if __name__ == "__main__":
    main()
