"""Detection: Faster R-CNN on the encoder, trained end to end, scored by pycocotools.

fpn: torchvision's, with a feature pyramid. c4: as in MoCo's transfer, regions are cut from the fourth stage and go
through the fifth, and a normalization after it. Training is MoCo's: SGD, two drops, several scales, mirror images.
"""

import contextlib
import copy
import io
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from millionway import randomness
from millionway.console import track
from millionway.data.images import UnreadableImage, decode
from millionway.data.readers import Progress, in_order
from millionway.evaluation.boxes import BoxedImage, BoxedSet
from millionway.evaluation.work import Work
from millionway.files import make_folder, write_whole
from millionway.model.encoder import Encoder

BATCH_SIZE = 16
LR = 0.02  # at batch 16; others scale it linearly
MOMENTUM = 0.9
WEIGHT_DECAY = 1e-4
WARMUP_STEPS = 100
DROPS = (0.75, 11 / 12)  # MoCo's 18k and 22k of 24k
SCALES = tuple(side / 800 for side in range(480, 801, 32))  # of the test size
REGIONS, SMALL = 512, 400  # regions trained on in an image; a quarter of them if its shorter side is below 400
MAX_RATIO = 1333 / 800  # of the longer side to the test size


@dataclass(frozen=True)
class Recipe:
    detector: str
    """fpn or c4"""
    size: int
    """the shorter side of an image at test"""
    iterations: int
    batch_size: int
    lr: float
    weight_decay: float = WEIGHT_DECAY


def score(work: Work) -> Iterator[tuple[str, float]]:
    """Train a detector on one split, and score it on the other."""
    asked, num_threads = work.asked, work.images.num_threads
    train_set, test_set = work.images.boxes
    batch_size = asked.batch_size or BATCH_SIZE
    lr = asked.lr or LR * batch_size / BATCH_SIZE
    decay = WEIGHT_DECAY if asked.weight_decay is None else asked.weight_decay
    recipe = Recipe(asked.detector, asked.detect_size, asked.iterations, batch_size, lr, decay)
    check(train_set, test_set, num_threads, track)
    work.used |= {"splits": [asked.train_split, asked.test_split], "classes": train_set.names, **vars(recipe)}
    work.used |= {"num_train": len(train_set.images), "num_test": len(test_set.images)}
    how: dict[str, Any] = {"device": work.device, "num_threads": num_threads, "progress": track}
    yield from detect(work.subject.encoder, train_set, test_set, recipe, work.out, seed=work.seed, **how)


def build_detector(encoder: Encoder, num_labels: int, recipe: Recipe) -> nn.Module:
    """The encoder's weights are copied. Label 0 is the background, as torchvision has it."""
    from torchvision.models.detection import FasterRCNN

    backbone: Any = copy.deepcopy(encoder.backbone)
    if not all(hasattr(backbone, f"layer{n}") for n in (1, 2, 3, 4)) or not hasattr(backbone, "conv1"):
        raise ValueError(f"detect needs a ResNet of four stages, and {encoder.spec.name} has none")
    shared: dict[str, Any] = {
        "min_size": recipe.size,
        "max_size": round(MAX_RATIO * recipe.size),
        "image_mean": list(encoder.spec.mean),
        "image_std": list(encoder.spec.std),
        "box_batch_size_per_image": REGIONS if recipe.size >= SMALL else REGIONS // 4,
    }
    widths = _stage_widths(backbone)
    if recipe.detector == "fpn":
        from torchvision.models.detection.backbone_utils import BackboneWithFPN

        layers = {f"layer{n}": str(n - 1) for n in (1, 2, 3, 4)}
        return FasterRCNN(BackboneWithFPN(backbone, layers, widths, 256), num_labels + 1, **shared)
    from torchvision.models.detection.anchor_utils import AnchorGenerator
    from torchvision.models.detection.faster_rcnn import FastRCNNPredictor
    from torchvision.ops import MultiScaleRoIAlign

    stem = [module for name, module in backbone.named_children() if name in ("conv1", "bn1", "relu", "act1", "maxpool")]
    trunk: Any = nn.Sequential(*stem, backbone.layer1, backbone.layer2, backbone.layer3)
    trunk.out_channels = widths[2]
    head = nn.Sequential(backbone.layer4, nn.BatchNorm2d(widths[3]), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return FasterRCNN(
        trunk,
        rpn_anchor_generator=AnchorGenerator(((32, 64, 128, 256, 512),), ((0.5, 1.0, 2.0),)),
        box_roi_pool=MultiScaleRoIAlign(["0"], 14, 2),
        box_head=head,
        box_predictor=FastRCNNPredictor(widths[3], num_labels + 1),
        **shared,
    )


@torch.no_grad()
def _stage_widths(backbone: nn.Module) -> list[int]:
    """Found by trying."""
    widths: dict[int, int] = {}

    def watch(n: int) -> Any:
        def note(module: nn.Module, inputs: Any, output: Tensor) -> None:
            widths[n] = output.shape[1]

        return backbone.get_submodule(f"layer{n}").register_forward_hook(note)

    hooks = [watch(n) for n in (1, 2, 3, 4)]
    was_training = backbone.training
    backbone.eval()(torch.zeros(1, 3, 64, 64, device=next(backbone.parameters()).device))
    backbone.train(was_training)
    for hook in hooks:
        hook.remove()
    return [widths[n] for n in (1, 2, 3, 4)]


def train(
    model: Any,
    boxed: BoxedSet,
    recipe: Recipe,
    seed: int,
    device: torch.device,
    num_threads: int,
    progress: Progress | None,
) -> None:
    images = [image for image in boxed.images if bool((~image.ignored).any())]
    model.to(device).train()
    peak = recipe.lr
    optimizer = torch.optim.SGD(model.parameters(), peak, MOMENTUM, weight_decay=recipe.weight_decay)
    steps = range(recipe.iterations)
    batches = in_order(lambda step: _batch(images, recipe, seed, step), steps, num_threads, 4)
    tracked = batches if progress is None else progress(batches, recipe.iterations, "training the detector")
    for step, (pictures, targets, size) in enumerate(tracked):
        drops = sum(step >= share * recipe.iterations for share in DROPS)
        warmup = min(1.0, (step + 1) / min(WARMUP_STEPS, recipe.iterations))
        for group in optimizer.param_groups:
            group["lr"] = peak * warmup * 0.1**drops
        model.transform.min_size = (size,)
        pictures = [picture.to(device) for picture in pictures]
        targets = [{name: value.to(device) for name, value in target.items()} for target in targets]
        loss = torch.stack(list(model(pictures, targets).values())).sum()
        if not bool(torch.isfinite(loss)):
            raise ValueError(f"detect: the loss is not finite at step {step + 1}; use a lower --lr")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.transform.min_size = (recipe.size,)


def _batch(
    images: list[BoxedImage], recipe: Recipe, seed: int, step: int
) -> tuple[list[Tensor], list[dict[str, Tensor]], int]:
    """Pictures with their boxes, mirrored by chance, and the shorter side of this step: a function of (seed, step)."""
    g = randomness.generator(seed, "detect", step)
    if recipe.batch_size <= len(images):
        chosen = torch.randperm(len(images), generator=g)[: recipe.batch_size]
    else:
        chosen = torch.randint(len(images), (recipe.batch_size,), generator=g)
    size = round(recipe.size * SCALES[int(torch.randint(len(SCALES), (), generator=g))])
    pictures, targets = [], []
    for index, mirrored in zip(chosen.tolist(), (torch.rand(len(chosen), generator=g) < 0.5).tolist()):
        image = images[index]
        picture, boxes = read_picture(image), image.boxes[~image.ignored].clone()
        if mirrored:
            picture = picture.flip(2)
            boxes[:, [0, 2]] = image.width - boxes[:, [2, 0]]
        pictures.append(picture)
        targets.append({"boxes": boxes, "labels": image.labels[~image.ignored] + 1})
    return pictures, targets, size


def check(train_set: BoxedSet, test_set: BoxedSet, num_threads: int, progress: Progress | None) -> None:
    """What would otherwise come to light after hours of training."""
    _pycocotools()
    for boxed, what in ((train_set, "train on"), (test_set, "score")):
        if all(bool(image.ignored.all()) for image in boxed.images):
            raise ValueError(f"detect: there is no box to {what}: all are difficult ones or crowds")
    images = list({image.path: image for boxed in (train_set, test_set) for image in boxed.images}.values())
    read = in_order(lambda image: read_picture(image).shape, images, num_threads, 4)
    for _ in read if progress is None else progress(read, len(images), "looking at images"):
        pass


def read_picture(image: BoxedImage) -> Tensor:
    """[3, height, width], 0 to 1."""
    try:
        data = image.path.read_bytes()
        picture = decode(data)
        if picture.size == (image.height, image.width) != (image.width, image.height):
            picture = decode(data, upright=False)  # its boxes are for the pixels as they are stored
    except (OSError, UnreadableImage) as error:
        raise ValueError(f"{image.path} cannot be read: {error}") from None
    if picture.size != (image.width, image.height):
        pixels, expected = f"{picture.width} x {picture.height}", f"{image.width} x {image.height}"
        raise ValueError(f"{image.path} has {pixels} pixels, its boxes are for {expected}")
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1).float() / 255


@torch.no_grad()
def find(
    model: nn.Module, boxed: BoxedSet, device: torch.device, num_threads: int, progress: Progress | None
) -> list[dict[str, Any]]:
    """Detections in COCO's form."""
    model.to(device).eval()
    found = []
    pictures = in_order(read_picture, boxed.images, num_threads, 4)
    tracked = pictures if progress is None else progress(pictures, len(boxed.images), "detecting")
    for number, picture in enumerate(tracked):
        (result,) = model([picture.to(device)])
        for box, label, score in zip(result["boxes"].tolist(), result["labels"].tolist(), result["scores"].tolist()):
            left, top, right, bottom = (round(value, 2) for value in box)
            found.append(
                {
                    "image_id": number,
                    "category_id": label - 1,
                    "bbox": [left, top, round(right - left, 2), round(bottom - top, 2)],
                    "score": score,
                }
            )
    return found


def ground_truth(boxed: BoxedSet) -> dict[str, Any]:
    """The boxes as a COCO json. What is ignored is a crowd there."""
    images, annotations = [], []
    for number, image in enumerate(boxed.images):
        images.append({"id": number, "file_name": image.path.name, "width": image.width, "height": image.height})
        for box, label, ignored in zip(image.boxes.tolist(), image.labels.tolist(), image.ignored.tolist()):
            left, top, right, bottom = box
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": number,
                    "category_id": label,
                    "bbox": [left, top, right - left, bottom - top],
                    "area": (right - left) * (bottom - top),
                    "iscrowd": int(ignored),
                }
            )
    categories = [{"id": number, "name": name} for number, name in enumerate(boxed.names)]
    return {"info": {}, "images": images, "annotations": annotations, "categories": categories}


def average_precision(truth: dict[str, Any], found: list[dict[str, Any]]) -> Iterator[tuple[str, float]]:
    """AP over IoU 0.5 to 0.95, at 0.5 and at 0.75, by pycocotools."""
    if not found:
        yield from (("AP", 0.0), ("AP50", 0.0), ("AP75", 0.0))
        return
    COCO, COCOeval = _pycocotools()
    with contextlib.redirect_stdout(io.StringIO()):  # it prints
        coco: Any = COCO()
        coco.dataset = truth
        coco.createIndex()
        run = COCOeval(coco, coco.loadRes(copy.deepcopy(found)), "bbox")
        run.evaluate()
        run.accumulate()
        run.summarize()
    for name, value in zip(("AP", "AP50", "AP75"), run.stats):
        yield name, 0.0 if math.isnan(value) else float(value)


def _pycocotools() -> tuple[Any, Any]:
    try:
        from pycocotools.coco import COCO
        from pycocotools.cocoeval import COCOeval
    except ImportError:
        raise ValueError("detect needs pycocotools: pip install 'millionway[detection]'") from None
    return COCO, COCOeval


def detect(
    encoder: Encoder,
    train_set: BoxedSet,
    test_set: BoxedSet,
    recipe: Recipe,
    out: Path | None,
    *,
    seed: int,
    device: torch.device,
    num_threads: int,
    progress: Progress | None,
) -> Iterator[tuple[str, float]]:
    """Train, detect, score. `out`/detect gets boxes.json and detections_SEED.json, so that others can score them."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(randomness.key_of(seed, "detector"))
        model = build_detector(encoder, len(train_set.names), recipe)
        train(model, train_set, recipe, seed, device, num_threads, progress)
    found, truth = find(model, test_set, device, num_threads, progress), ground_truth(test_set)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        folder = make_folder(make_folder(out) / "detect")
        write_whole(folder / f"detections_{seed}.json", json.dumps(found))
        write_whole(folder / "boxes.json", json.dumps(truth))
    yield from average_precision(truth, found)
