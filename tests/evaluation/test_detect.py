import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import millionway
from millionway.evaluation.boxes import has_boxes, read_boxes
from millionway.evaluation.detect import Recipe, _batch, average_precision, build_detector, ground_truth, read_picture
from millionway.model.encoder import EncoderSpec, build_encoder
from millionway.settings.pretrain import IMAGENET_MEAN, IMAGENET_STD

RECIPE = Recipe("fpn", 96, 2, 2, 0.01)


def annotation(width: int, height: int, objects: list[tuple[str, tuple[int, int, int, int]]]) -> str:
    parts = [f"<size><width>{width}</width><height>{height}</height><depth>3</depth></size>"]
    for name, (xmin, ymin, xmax, ymax) in objects:
        box = f"<xmin>{xmin}</xmin><ymin>{ymin}</ymin><xmax>{xmax}</xmax><ymax>{ymax}</ymax>"
        parts.append(f"<object><name>{name}</name><difficult>0</difficult><bndbox>{box}</bndbox></object>")
    return f"<annotation>{''.join(parts)}</annotation>"


@pytest.fixture(scope="module")
def voc(tmp_path_factory: pytest.TempPathFactory, digit_pixels: np.ndarray) -> Path:
    """Twelve pictures with two real digits each, in VOC layout; classes are "one" and "zero"."""
    root = tmp_path_factory.mktemp("voc")
    for folder in ("JPEGImages", "Annotations", "ImageSets/Main"):
        (root / folder).mkdir(parents=True)
    names = [f"{number:03d}" for number in range(12)]
    for number, name in enumerate(names):
        picture = np.full((96, 128, 3), 20, np.uint8)
        picture[10:42, 8:40] = np.kron(digit_pixels[10 * number], np.ones((4, 4), np.uint8))[..., None]
        picture[50:82, 70:102] = np.kron(digit_pixels[10 * number + 1], np.ones((4, 4), np.uint8))[..., None]
        Image.fromarray(picture).save(root / "JPEGImages" / f"{name}.jpg")
        text = annotation(128, 96, [("zero", (9, 11, 40, 42)), ("one", (71, 51, 102, 82))])
        (root / "Annotations" / f"{name}.xml").write_text(text)
    (root / "ImageSets" / "Main" / "trainval.txt").write_text("\n".join(names[:8]))
    (root / "ImageSets" / "Main" / "test.txt").write_text("\n".join(names[8:]))
    return root


def copy_of(voc: Path, tmp_path: Path) -> Path:
    return shutil.copytree(voc, tmp_path / "voc")


def test_boxes_are_read_from_both_layouts(voc: Path, tmp_path: Path) -> None:
    assert has_boxes(voc) and not has_boxes(tmp_path)
    boxed = read_boxes(voc, "trainval")
    assert boxed.names == ["one", "zero"] and len(boxed.images) == 8
    assert boxed.images[0].boxes.tolist() == [[8, 10, 40, 42], [70, 50, 102, 82]]
    assert boxed.images[0].labels.tolist() == [1, 0]
    shutil.copytree(voc / "JPEGImages", tmp_path / "images")
    (tmp_path / "set.json").write_text(json.dumps(ground_truth(boxed)))
    again = read_boxes(tmp_path / "set.json", "")
    assert again.names == boxed.names
    for one, other in zip(boxed.images, again.images):
        assert torch.equal(one.boxes, other.boxes) and torch.equal(one.labels, other.labels)


def test_a_perfect_detector_scores_one_and_an_empty_one_zero(voc: Path) -> None:
    truth = ground_truth(read_boxes(voc, "test"))
    keys = ("image_id", "category_id", "bbox")
    perfect = [{**{key: each[key] for key in keys}, "score": 0.9} for each in truth["annotations"]]
    assert dict(average_precision(truth, perfect)) == pytest.approx({"AP": 1.0, "AP50": 1.0, "AP75": 1.0})
    assert set(dict(average_precision(truth, [])).values()) == {0.0}
    shifted = [{**each, "bbox": [each["bbox"][0] + 8, *each["bbox"][1:]]} for each in perfect]  # IoU 24 / 40 = 0.6
    numbers = dict(average_precision(truth, shifted))
    assert numbers["AP50"] == pytest.approx(1.0) and numbers["AP75"] == 0.0 and 0.2 < numbers["AP"] < 0.4


def test_mirrored_boxes_stay_on_their_object(voc: Path) -> None:
    boxed = read_boxes(voc, "trainval")
    seen = set()
    for step in range(4):
        pictures, targets, size = _batch(boxed.images, Recipe("fpn", 100, 1, 4, 0.1), 0, step)
        assert 60 <= size <= 100
        for picture, target in zip(pictures, targets):
            for left, top, right, bottom in target["boxes"].int().tolist():
                outside = picture.clone()
                outside[:, top:bottom, left:right] = 20 / 255
                assert float(picture[:, top:bottom, left:right].std()) > 0.1
            seen.add(int(target["boxes"][0, 0]))
    assert seen == {8, 88}


@pytest.mark.parametrize("detector", ["fpn", "c4"])
@pytest.mark.parametrize("name", ["narrow-resnet", "torchvision/resnet18"])
def test_the_encoders_weights_are_in_the_detector(detector: str, name: str) -> None:
    encoder = build_encoder(EncoderSpec(name, "standard", 96, IMAGENET_MEAN, IMAGENET_STD), 0)
    model = build_detector(encoder, 3, Recipe(detector, 96, 1, 1, 0.1))
    inside = [value for value in model.state_dict().values() if value.ndim == 4]
    for key, value in encoder.backbone.state_dict().items():
        if value.ndim == 4:
            assert any(each.shape == value.shape and torch.equal(each, value) for each in inside), key
    losses = model(
        [torch.rand(3, 96, 128)], [{"boxes": torch.tensor([[8.0, 10, 40, 42]]), "labels": torch.tensor([1])}]
    )
    assert all(bool(torch.isfinite(loss)) for loss in losses.values())


def test_detect_end_to_end_is_what_pycocotools_says(voc: Path, tmp_path: Path) -> None:
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    options = {"detector": "fpn", "detect_size": 96, "iterations": 3, "batch_size": 2, "lr": 0.01}
    numbers = millionway.evaluate(
        "detect", encoder="narrow-resnet", image_size=96, data=voc, out=tmp_path / "out", **options
    )
    stored = json.loads((tmp_path / "out" / "detect.json").read_text())
    assert stored["numbers"] == numbers and stored["settings"]["classes"] == ["one", "zero"]
    truth = COCO(str(tmp_path / "out" / "detect" / "boxes.json"))
    assert json.loads((tmp_path / "out" / "detect" / "detections_0.json").read_text())
    by_hand = COCOeval(truth, truth.loadRes(str(tmp_path / "out" / "detect" / "detections_0.json")), "bbox")
    by_hand.evaluate()
    by_hand.accumulate()
    by_hand.summarize()
    assert [numbers["AP"], numbers["AP50"], numbers["AP75"]] == pytest.approx(list(by_hand.stats[:3]))


BOMB = """<?xml version="1.0"?><!DOCTYPE a [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;&a;">]>
<annotation><size><width>128</width><height>96</height></size><object><name>&b;</name></object></annotation>"""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<annotation><size>", "not an annotation in VOC's form"),
        ("<annotation></annotation>", "<size/width> is missing"),
        ('<?xml version="1.0" encoding="foo-8"?><annotation></annotation>', "not an annotation in VOC's form"),
        ("<annotation><size><width>inf</width></size></annotation>", "not an annotation in VOC's form"),
        (BOMB, "refused, it declares entities"),
        (annotation(128, 96, [("one", (50, 50, 50, 60))]), "has no area"),
        (annotation(128, 96, [("one", (50, 50, 400, 60))]), "is outside its image of 128 x 96"),
        (annotation(128, 96, [("two", (5, 5, 40, 60))]), "classes two are not in the training set"),
    ],
)
def test_bad_annotations_are_named(voc: Path, tmp_path: Path, text: str, message: str) -> None:
    root = copy_of(voc, tmp_path)
    (root / "Annotations" / "009.xml").write_text(text)
    with pytest.raises(ValueError, match=message):
        millionway.evaluate("detect", encoder="narrow-resnet", image_size=96, data=root, cache=False)


def test_bad_boxes_can_be_left_out(voc: Path, tmp_path: Path) -> None:
    root = copy_of(voc, tmp_path)
    bad = annotation(128, 96, [("one", (50, 50, 50, 60)), ("zero", (9, 11, 40, 42))])
    (root / "Annotations" / "000.xml").write_text(bad)
    assert len(read_boxes(root, "trainval", drop_bad=True).images[0].boxes) == 1
    with pytest.raises(ValueError, match="--bad-boxes drop"):
        read_boxes(root, "trainval")


def test_a_box_on_the_rim_without_area_inside_is_refused(voc: Path, tmp_path: Path) -> None:
    shutil.copytree(voc / "JPEGImages", tmp_path / "images")
    truth = ground_truth(read_boxes(voc, "test"))
    truth["annotations"][0]["bbox"] = [128.2, 10, 0.7, 10]
    (tmp_path / "set.json").write_text(json.dumps(truth))
    with pytest.raises(ValueError, match="is outside its image"):
        read_boxes(tmp_path / "set.json", "")


def test_several_places_are_one_set(voc: Path, tmp_path: Path) -> None:
    other = copy_of(voc, tmp_path)
    assert len(read_boxes(Path(f"{voc},{other}"), "trainval").images) == 16
    truth = ground_truth(read_boxes(voc, "test"))
    shutil.copytree(voc / "JPEGImages", tmp_path / "coco" / "test2017")  # as COCO itself has it
    (tmp_path / "coco" / "annotations").mkdir()
    place = tmp_path / "coco" / "annotations" / "instances_test2017.json"
    place.write_text(json.dumps(truth))
    assert read_boxes(place, "").images[0].path.parent.name == "test2017"


def test_what_cannot_be_scored_is_said_before_training(voc: Path, tmp_path: Path) -> None:
    root = copy_of(voc, tmp_path)
    for path in (root / "Annotations").iterdir():
        path.write_text(path.read_text().replace("</name>", "</name><difficult>1</difficult>"))
    with pytest.raises(ValueError, match="no box to train on"):
        millionway.evaluate("detect", encoder="narrow-resnet", image_size=96, data=root)
    with pytest.raises(ValueError, match="no box to score"):
        millionway.evaluate("detect", encoder="narrow-resnet", image_size=96, data=voc, test_data=root)


def test_boxes_may_be_for_the_pixels_as_they_are_stored(voc: Path, tmp_path: Path) -> None:
    root = copy_of(voc, tmp_path)
    path = root / "JPEGImages" / "000.jpg"
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    with Image.open(path) as image:
        image.load()
    image.save(path, exif=exif)
    boxed = read_boxes(root, "trainval").images[0]
    assert read_picture(boxed).shape == (3, 96, 128)
    assert read_picture(replace(boxed, width=96, height=128)).shape == (3, 128, 96)


def test_other_bad_input(voc: Path, tmp_path: Path, digit_folder: Path) -> None:
    with pytest.raises(ValueError, match="no split train; there are test, trainval"):
        read_boxes(voc, "train")
    with pytest.raises(ValueError, match="no boxes there"):
        read_boxes(digit_folder, "trainval")
    with pytest.raises(ValueError, match="--test-data"):
        (tmp_path / "set.json").write_text(json.dumps(ground_truth(read_boxes(voc, "test"))))
        millionway.evaluate("detect", encoder="narrow-resnet", image_size=96, data=tmp_path / "set.json")
    with pytest.raises(ValueError, match=r"image 008\.jpg is neither beside it nor in images"):
        read_boxes(tmp_path / "set.json", "")
    (tmp_path / "set.json").write_text('{"images": []}')
    with pytest.raises(ValueError, match="not in COCO's form"):
        read_boxes(tmp_path / "set.json", "")
    with pytest.raises(ValueError, match="needs a ResNet of four stages"):
        millionway.evaluate("detect", encoder="timm/convnext_atto", image_size=96, data=voc)
    root = copy_of(voc, tmp_path)
    Image.new("RGB", (60, 60)).save(root / "JPEGImages" / "000.jpg")
    with pytest.raises(ValueError, match="has 60 x 60 pixels, its boxes are for 128 x 96"):
        options = {"detect_size": 96, "iterations": 10**6}  # noticed before the first of them
        millionway.evaluate("detect", encoder="narrow-resnet", image_size=96, data=root, **options)
