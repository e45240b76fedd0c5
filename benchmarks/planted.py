"""Images of which it is known what is in them twice and what does not belong: made from CIFAR-10 and Fashion-MNIST.

    python benchmarks/planted.py --cifar10 FOLDER --out PLANTED      # FOLDER/train/CLASS/*.png

CLASS/NAME.png: 10,000 images of CIFAR-10. CLASS/NAME-KIND.*: near-duplicates of some of them, 200 of each kind.
fashion/NUMBER.png: 100 images of Fashion-MNIST.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image, ImageEnhance, ImageOps

from millionway.data.kinds.choose import open_source

NUM_IMAGES, NUM_OF_EACH_KIND, NUM_OUTLIERS = 10_000, 200, 100
OUTLIERS = "fashion"


def crop(image: Image.Image, draw: np.random.Generator) -> Image.Image:
    """Nine tenths of each side, at a random place."""
    width, height = round(0.9 * image.width), round(0.9 * image.height)
    left, top = int(draw.integers(image.width - width + 1)), int(draw.integers(image.height - height + 1))
    return image.crop((left, top, left + width, top + height))


def brightness(image: Image.Image, draw: np.random.Generator) -> Image.Image:
    return ImageEnhance.Brightness(image).enhance(float(draw.choice([0.8, 1.2])))


KINDS: dict[str, Callable[[Image.Image, np.random.Generator], Image.Image]] = {
    "jpeg": lambda image, draw: image,  # saved at quality 30
    "half": lambda image, draw: image.resize((image.width // 2, image.height // 2), Image.Resampling.BILINEAR),
    "crop": crop,
    "brightness": brightness,
    "mirror": lambda image, draw: ImageOps.mirror(image),
}


def plant(cifar10: Path, out: Path) -> None:
    draw = np.random.default_rng(0)
    files = sorted((cifar10 / "train").glob("*/*.png"))
    chosen = [files[place] for place in draw.permutation(len(files))[:NUM_IMAGES]]
    for path in chosen:
        (out / path.parent.name).mkdir(parents=True, exist_ok=True)
        (out / path.parent.name / path.name).write_bytes(path.read_bytes())
    for number, path in enumerate(chosen[: NUM_OF_EACH_KIND * len(KINDS)]):
        kind = list(KINDS)[number % len(KINDS)]
        copy = KINDS[kind](Image.open(path).convert("RGB"), draw)
        name = out / path.parent.name / f"{path.stem}-{kind}"
        copy.save(name.with_suffix(".jpg"), quality=30) if kind == "jpeg" else copy.save(name.with_suffix(".png"))
    (out / OUTLIERS).mkdir()
    fashion = open_source("fashion-mnist")
    for place in draw.permutation(len(fashion))[:NUM_OUTLIERS].tolist():
        pixels = fashion.read(place)
        assert isinstance(pixels, np.ndarray)
        # As large as the others: a size alone must not give them away.
        Image.fromarray(pixels).resize((32, 32), Image.Resampling.BILINEAR).save(out / OUTLIERS / f"{place:05d}.png")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cifar10", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    chosen = parser.parse_args()
    chosen.out.mkdir(parents=True)
    plant(chosen.cifar10, chosen.out)
