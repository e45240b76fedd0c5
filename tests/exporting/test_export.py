import json
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
import torchvision
from PIL import Image
from sklearn.datasets import load_sample_image

import millionway
from millionway.data.views import plain_boxes, resample
from millionway.exporting.export import how_to_load
from millionway.model.encoder import Encoder, EncoderSpec, build_encoder
from millionway.model.encoder_file import save_encoder

MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.3, 0.4)
PHOTOS = np.stack([load_sample_image(name) for name in ("china.jpg", "flower.jpg")])  # [2, 427, 640, 3]


def saved(folder: Path, name: str, stem="standard", size: int = 64) -> Encoder:
    encoder = build_encoder(EncoderSpec(name, stem, size, MEAN, STD), seed=3)
    encoder(torch.rand(8, 3, size, size))  # BN statistics that are not those of a new network
    save_encoder(encoder.eval(), folder / "encoder.safetensors")
    return encoder


def features(encoder: Encoder) -> tuple[torch.Tensor, torch.Tensor]:
    """(the photos as the encoder takes them, its features of them)"""
    pixels = torch.from_numpy(PHOTOS).permute(0, 3, 1, 2)
    size = torch.tensor([427, 427]), torch.tensor([640, 640])
    images = resample(pixels, plain_boxes(*size, encoder.spec.image_size), None, encoder.spec.image_size)
    with torch.no_grad():
        return images, encoder(images)


def assert_close(found: torch.Tensor, expected: torch.Tensor, share: float = 1e-4) -> None:
    assert float((found - expected).abs().max()) <= share * float(expected.abs().max())


GRAPHS = [
    ("narrow-resnet", "small", 32),
    ("torchvision/resnet18", "standard", 96),
    pytest.param("timm/convnext_atto", "standard", 64, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "stem", "size"), GRAPHS)
@pytest.mark.parametrize("from_bytes", [False, True])
def test_onnx_runs_in_onnxruntime(tmp_path, name: str, stem, size: int, from_bytes: bool) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    encoder = saved(tmp_path, name, stem, size)
    out = millionway.export(tmp_path, tmp_path / "e.onnx", format="onnx", from_bytes=from_bytes)
    images, expected = features(encoder)
    session = onnxruntime.InferenceSession(out, providers=["CPUExecutionProvider"])
    given = PHOTOS if from_bytes else images.numpy()
    for num in (1, 2):  # any number of images
        (found,) = session.run(None, {"images": given[:num]})
        assert_close(torch.from_numpy(found), expected[:num])
    assert list(tmp_path.glob("*.data")) == []  # one file


@pytest.mark.parametrize(("name", "stem", "size"), GRAPHS)
@pytest.mark.parametrize("from_bytes", [False, True])
def test_pt2_needs_no_millionway(tmp_path, name: str, stem, size: int, from_bytes: bool) -> None:
    encoder = saved(tmp_path, name, stem, size)
    out = millionway.export(tmp_path, tmp_path / "e.pt2", format="pt2", from_bytes=from_bytes)
    images, expected = features(encoder)
    torch.save(torch.from_numpy(PHOTOS) if from_bytes else images, tmp_path / "images.pt")
    lines = how_to_load(encoder.spec, out, "pt2", from_bytes).splitlines()
    lines.insert(2, f"images = torch.load({str(tmp_path / 'images.pt')!r})")
    lines += ["import sys", "assert 'millionway' not in sys.modules and 'timm' not in sys.modules"]
    lines += [f"torch.save(features.detach(), {str(tmp_path / 'features.pt')!r})"]
    # -I: nothing from the working folder or PYTHONPATH, so that only installed packages are seen.
    subprocess.run([sys.executable, "-I", "-c", "\n".join(lines)], check=True)
    assert_close(torch.load(tmp_path / "features.pt"), expected)


def write_run(folder: Path, **settings) -> None:
    """The files of a run folder that a model card is made from."""
    config = {"data": "photos/cats | dogs", "model": {"encoder": "e"}, "training": {"epochs": 2}, **settings}
    (folder / "config.json").write_text(json.dumps(config))
    line = {"kind": "evaluation", "step": 20, "epoch": 2, "instance_top1": 0.62, "num_images": 3000}
    line |= {"instance_top5": 0.8, "effective_rank": 9.0, "positive_cosine": 0.7, "hardest_negative_cosine": 0.5}
    (folder / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    (folder / "evaluation").mkdir()
    result = {"numbers": {"knn_20": 0.5}, "untrained": {"knn_20": 0.25}, "settings": {"data": "cats", "chance": 0.1}}
    (folder / "evaluation" / "knn.json").write_text(json.dumps(result))


@pytest.mark.parametrize(
    ("name", "size"),
    [("torchvision/resnet18", 96), ("timm/convnext_atto", 64), ("timm/vit_tiny_patch16_224", 64)],
)
def test_timm_and_transformers_load_the_folder(tmp_path, name: str, size: int) -> None:
    encoder = saved(tmp_path, name, size=size)
    write_run(tmp_path)
    out = millionway.export(tmp_path, tmp_path / "folder", format="timm")
    images, expected = features(encoder)
    model = timm.create_model(f"local-dir:{out}", pretrained=True).eval()
    mean, std = torch.tensor(MEAN)[:, None, None], torch.tensor(STD)[:, None, None]
    with torch.no_grad():
        assert_close(model((images - mean) / std), expected)
    config = timm.data.resolve_model_data_config(model)
    assert [list(config[name]) for name in ("mean", "std", "input_size")] == [list(MEAN), list(STD), [3, size, size]]

    card = (out / "README.md").read_text()
    assert "62% of fresh random views" in card and "3,000 images" in card and "| 50.00% | 25.00% | 10.0% |" in card
    assert "cats | dogs" in card and "Verdict" in card and "local-dir:" in card

    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModel.from_pretrained(out).eval()
    processor = transformers.AutoImageProcessor.from_pretrained(out)
    pixels = processor([Image.fromarray(photo) for photo in PHOTOS], return_tensors="pt")["pixel_values"]
    assert pixels.shape == (2, 3, size, size)
    with torch.no_grad():
        assert_close(theirs(pixel_values=(images - mean) / std).pooler_output, expected)


@pytest.mark.parametrize(("name", "stem"), [("narrow-resnet", "small"), ("torchvision/resnet18", "small")])
def test_what_timm_cannot_build_is_refused_with_what_can(tmp_path, name: str, stem) -> None:
    saved(tmp_path, name, stem, 32)
    with pytest.raises(ValueError, match=r"timm has no .* Use --format pt2 or onnx"):
        millionway.export(tmp_path, tmp_path / "folder", format="huggingface")
    assert not (tmp_path / "folder").exists()


def test_bad_requests(tmp_path) -> None:
    saved(tmp_path, "narrow-resnet", "small", 32)
    with pytest.raises(ValueError, match=r"--format is one of safetensors, torch, onnx.*not tflite"):
        millionway.export(tmp_path, tmp_path / "x", format="tflite")
    with pytest.raises(ValueError, match="--from-bytes is for --format onnx and pt2"):
        millionway.export(tmp_path, tmp_path / "x", format="torch", from_bytes=True)
    (tmp_path / "x").touch()
    with pytest.raises(ValueError, match="exists already"):
        millionway.export(tmp_path, tmp_path / "x", format="onnx")


def test_detectron2_finds_every_weight_under_its_own_name(tmp_path) -> None:
    encoder = saved(tmp_path, "torchvision/resnet50")
    millionway.export(tmp_path / "encoder.safetensors", tmp_path / "r50.pkl", format="detectron2")
    content = pickle.loads((tmp_path / "r50.pkl").read_bytes())
    arrays, state = content["model"], encoder.backbone.state_dict()
    norm = ("weight", "bias", "running_mean", "running_var")
    convolutions = ["stem.conv1"]
    for stage, blocks in zip((2, 3, 4, 5), (3, 4, 6, 3)):
        convolutions += [f"res{stage}.{block}.conv{n}" for block in range(blocks) for n in (1, 2, 3)]
        convolutions.append(f"res{stage}.0.shortcut")
    expected = {f"{name}.weight" for name in convolutions} | {f"{c}.norm.{n}" for c in convolutions for n in norm}
    assert set(arrays) == expected and content["matching_heuristics"]
    for theirs, ours in {
        "stem.conv1.norm.bias": "bn1.bias",
        "res4.5.conv3.weight": "layer3.5.conv3.weight",
        "res5.0.shortcut.norm.running_var": "layer4.0.downsample.1.running_var",
        "res2.1.conv2.norm.weight": "layer1.1.bn2.weight",
    }.items():
        assert (arrays[theirs] == state[ours].numpy()).all()
    assert "DEPTH = 50" in how_to_load(encoder.spec, tmp_path / "r50.pkl", "detectron2")
    saved(tmp_path, "torchvision/resnet18", "small", 32)
    with pytest.raises(ValueError, match="for ResNets with the standard stem"):
        millionway.export(tmp_path / "encoder.safetensors", tmp_path / "small.pkl", format="detectron2")


@pytest.mark.parametrize("format", ["safetensors", "torch"])
def test_small_stem_loads_after_the_documented_change(tmp_path, format: str) -> None:
    encoder = saved(tmp_path, "torchvision/resnet18", "small", 32)
    out = millionway.export(tmp_path, tmp_path / "weights", format=format)
    names: dict = {}
    exec(how_to_load(encoder.spec, out, format), names)
    model = names["model"].eval()
    assert type(model) is torchvision.models.ResNet
    images, expected = features(encoder)
    mean, std = torch.tensor(MEAN)[:, None, None], torch.tensor(STD)[:, None, None]
    with torch.no_grad():
        assert_close(model((images - mean) / std), expected)
