"""Images with boxes: the VOC layout (JPEGImages, Annotations, ImageSets/Main) and COCO's json."""

import hashlib
import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from millionway.data.images import EXTENSIONS

log = logging.getLogger("millionway")

TOLERANCE = 1.0  # pixels that a box may stand out of the image: rounding, and whether the first pixel is 0 or 1


@dataclass(frozen=True)
class BoxedImage:
    path: Path
    width: int
    height: int
    boxes: Tensor
    """[boxes, 4] left, top, right, bottom in pixels, from 0"""
    labels: Tensor
    """[boxes] index into the names"""
    ignored: Tensor
    """[boxes] bool: VOC's "difficult" or COCO's crowd; neither trained on nor scored"""


@dataclass(frozen=True)
class BoxedSet:
    images: list[BoxedImage]
    names: list[str]


def has_boxes(data: Path) -> bool:
    """Whether it looks like images with boxes."""
    return data.suffix == ".json" or ((data / "Annotations").is_dir() and (data / "ImageSets" / "Main").is_dir())


def read_boxes(data: Path, split: str, names: list[str] | None = None, drop_bad: bool = False) -> BoxedSet:
    """data: a folder, a .json, or several with commas between them, as for VOC 2007 and 2012 together.

    split: the list below ImageSets/Main; without meaning for a json. names: those of the training set.
    drop_bad: boxes outside their image or without area are left out and counted, instead of refused.
    """
    raw, found = [], set()
    for place in [data] if data.exists() else map(Path, str(data).split(",")):
        if place.suffix != ".json" and not has_boxes(place):
            raise ValueError(
                f"--data {place}: no boxes there. Give a folder in VOC layout (JPEGImages, Annotations, "
                "ImageSets/Main), or a COCO .json beside its images."
            )
        images, classes = _coco(place) if place.suffix == ".json" else _voc(place, split)
        raw, found = raw + images, found | classes
    if names is None:
        names = sorted(found)
    unknown = sorted(found - set(names))
    if unknown:
        raise ValueError(f"--data {data}: classes {', '.join(unknown[:5])} are not in the training set")
    images, bad = [], []
    for path, width, height, objects in raw:
        good = []
        for name, box, ignored in objects:
            inside = _inside(box, width, height)
            problem = _problem(box, inside, width, height)
            if problem:
                bad.append(f"{path.name}: {name} {[round(value, 1) for value in box]} {problem}")
            else:
                good.append((names.index(name), inside, ignored))
        boxes = torch.tensor([box for _, box, _ in good], dtype=torch.float32).reshape(-1, 4)
        labels = torch.tensor([label for label, _, _ in good], dtype=torch.int64)
        images.append(BoxedImage(path, width, height, boxes, labels, torch.tensor([i for _, _, i in good]).bool()))
    if bad and not drop_bad:
        raise ValueError(
            f"--data {data}: {len(bad)} bad boxes ({'; '.join(bad[:3])}). Repair them, or leave them out with "
            "--bad-boxes drop"
        )
    if bad:
        log.warning("%d bad boxes are left out: %s", len(bad), "; ".join(bad[:3]))
    if not images or not any(len(image.boxes) for image in images):
        raise ValueError(f"--data {data}: no box in {len(images)} images")
    return BoxedSet(images, names)


def boxes_fingerprint(*sets: BoxedSet) -> str:
    """Changes when an image's name or size in bytes or a box changes."""
    digest = hashlib.blake2b(digest_size=16)
    for boxed in sets:
        digest.update("\0".join(boxed.names).encode())
        for image in boxed.images:
            boxes = (image.boxes.tolist(), image.labels.tolist(), image.ignored.tolist())
            digest.update(f"{image.path.name}:{image.path.stat().st_size}:{boxes}".encode())
    return digest.hexdigest()


def _problem(box: list[float], inside: list[float], width: int, height: int) -> str:
    left, top, right, bottom = box
    if not (right > left and bottom > top):
        return "has no area"
    stands_out = left < -TOLERANCE or top < -TOLERANCE or right > width + TOLERANCE or bottom > height + TOLERANCE
    if stands_out or not (inside[2] > inside[0] and inside[3] > inside[1]):
        return f"is outside its image of {width} x {height}"
    return ""


def _inside(box: list[float], width: int, height: int) -> list[float]:
    left, top, right, bottom = box
    return [max(0.0, left), max(0.0, top), min(float(width), right), min(float(height), bottom)]


Raw = list[tuple[Path, int, int, list[tuple[str, list[float], bool]]]]
"""(path, width, height, [(class, box, ignored)])"""


def _voc(root: Path, split: str) -> tuple[Raw, set[str]]:
    listing = root / "ImageSets" / "Main" / f"{split}.txt"
    if not listing.is_file():
        there = ", ".join(sorted(path.stem for path in listing.parent.glob("*.txt"))[:8])
        raise ValueError(f"--data {root}: no split {split}; there are {there}")
    raw, names = [], set()
    folder = root / "JPEGImages"
    pictures = {path.stem: path for path in folder.glob("*") if path.suffix.lower() in EXTENSIONS}
    for stem in dict.fromkeys(line.split()[0] for line in listing.read_text().splitlines() if line.strip()):
        path = pictures.get(stem)
        if path is None:
            raise ValueError(f"--data {root}: image {stem} of {listing.name} is missing in JPEGImages")
        width, height, objects = _voc_objects(root / "Annotations" / f"{stem}.xml")
        raw.append((path, width, height, objects))
        names |= {name for name, _, _ in objects}
    return raw, names


def _voc_objects(path: Path) -> tuple[int, int, list[tuple[str, list[float], bool]]]:
    """(width, height, [(class, box, difficult)]). VOC counts pixels from 1, and the last one is inside."""
    try:
        from defusedxml import DefusedXmlException, ElementTree
    except ImportError:
        raise ValueError("reading VOC needs defusedxml: pip install 'millionway[detection]'") from None
    try:
        root = ElementTree.parse(path).getroot()
        assert root is not None
        size = [int(float(_text(root, f"size/{name}"))) for name in ("width", "height")]
        objects = []
        for each in root.findall("object"):
            left, top, right, bottom = (
                float(_text(each, f"bndbox/{name}")) for name in ("xmin", "ymin", "xmax", "ymax")
            )
            # A box of one and the same pixel is somebody's slip, not a thing to find.
            box = [left - 1, top - 1, right, bottom] if right > left and bottom > top else [left, top, right, bottom]
            objects.append((_text(each, "name").strip(), box, (each.findtext("difficult") or "0").strip() == "1"))
        return size[0], size[1], objects
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    except DefusedXmlException as error:
        raise ValueError(f"{path}: refused, it declares entities or the like ({type(error).__name__})") from None
    except (ElementTree.ParseError, ValueError, LookupError, OverflowError) as error:  # LookupError: its encoding
        raise ValueError(f"{path}: not an annotation in VOC's form ({error})") from None


def _text(element: Any, place: str) -> str:
    text = element.findtext(place)
    if text is None:
        raise ValueError(f"<{place}> is missing")
    return text


def _coco(path: Path) -> tuple[Raw, set[str]]:
    try:
        content = json.loads(path.read_text())
        names = {each["id"]: each["name"] for each in content["categories"]}
        by_image: dict[Any, list] = {each["id"]: [] for each in content["images"]}
        for each in content["annotations"]:
            left, top, width, height = map(float, each["bbox"])
            box = [left, top, left + width, top + height]
            by_image[each["image_id"]].append((names[each["category_id"]], box, bool(each.get("iscrowd", 0))))
        listed = [(e["file_name"], int(e["width"]), int(e["height"]), by_image[e["id"]]) for e in content["images"]]
    except OSError as error:
        raise ValueError(f"--data {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"--data {path}: not in COCO's form ({type(error).__name__}: {error})") from None
    for name in (*names.values(), *(file for file, *_ in listed)):
        if not isinstance(name, str) or "\0" in name:
            raise ValueError(f"--data {path}: not in COCO's form ({name!r:.60} is no name)")
    above, name = path.parent.parent, path.stem.removeprefix("instances_")  # COCO's own: annotations/instances_NAME
    folders = [path.parent, path.parent / "images", path.parent / path.stem, above / "images", above / name, above]
    raw = []
    for file, width, height, objects in listed:
        found = next((folder / file for folder in folders if (folder / file).is_file()), None)
        if found is None:
            raise ValueError(f"--data {path}: image {file} is neither beside it nor in images/ or {name}/")
        raw.append((found, width, height, objects))
    return raw, set(names.values())
