import json

import pytest
import safetensors.torch
import timm
import torch
import torchvision

from millionway.model.classifier import InstanceClassifier
from millionway.model.encoder import EncoderSpec, build_encoder
from millionway.model.foreign_weights import match, read_tensors, stem_of, take
from millionway.settings.pretrain import IMAGENET_MEAN, IMAGENET_STD, Pretrain, with_settings
from millionway.train.first_weights import as_the_weights_are, take_weights


def encoder_of(name: str, size: int = 64, stem="standard"):
    return build_encoder(EncoderSpec(name, stem, size, IMAGENET_MEAN, IMAGENET_STD), seed=7)


def resnet18() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return torchvision.models.resnet18().state_dict()


def prefixed(prefix: str, state: dict) -> dict:
    return {prefix + name: tensor for name, tensor in state.items()}


def lightly(state: dict) -> dict:
    """A Sequential of the children without the last: conv1 is 0, bn1 1, layer1 4."""
    numbers = {"conv1": 0, "bn1": 1, "layer1": 4, "layer2": 5, "layer3": 6, "layer4": 7}
    parts = [(*key.partition("."), value) for key, value in state.items()]
    numbered = {f"{numbers[first]}.{rest}": value for first, _, rest, value in parts if first in numbers}
    return {"state_dict": {**prefixed("backbone.", numbered), "projection_head.layers.0.weight": torch.zeros(2, 2)}}


WRAPPED = {
    "torchvision": lambda s: s,
    "data parallel": lambda s: {"epoch": 3, "state_dict": prefixed("module.", s)},
    "compiled": lambda s: {"model": prefixed("_orig_mod.", s)},
    "MoCo v2": lambda s: {
        "state_dict": {
            **prefixed("module.encoder_q.", s),
            **prefixed("module.encoder_k.", {k: torch.zeros_like(v) for k, v in s.items()}),
            "module.queue": torch.zeros(128, 8),
        }
    },
    "MoCo v3": lambda s: {"state_dict": prefixed("module.base_encoder.", s)},
    "DINO": lambda s: {
        "student": prefixed("module.backbone.", {k: torch.zeros_like(v) for k, v in s.items()}),
        "teacher": {**prefixed("backbone.", s), "head.mlp.0.weight": torch.zeros(2, 2)},
    },
    "lightly": lightly,
}


@pytest.mark.parametrize("kind", WRAPPED)
def test_weights_are_found_whatever_they_are_wrapped_in(tmp_path, kind: str) -> None:
    state, path = resnet18(), tmp_path / "weights.pth"
    torch.save(WRAPPED[kind](state), path)
    encoder = encoder_of("torchvision/resnet18")
    words = take_weights(encoder, path)
    assert words.startswith("100 of 100 tensors"), words  # 20 convolutions; 20 BN layers of 4
    for name, tensor in encoder.backbone.state_dict().items():
        if not name.endswith("num_batches_tracked"):
            assert torch.equal(tensor, state[name]), name


@pytest.mark.parametrize("kind", ["run folder", "timm folder", "bin"])
def test_folders(tmp_path, kind: str) -> None:
    model = timm.create_model("resnet18", num_classes=10)
    names = {"run folder": "encoder.safetensors", "timm folder": "model.safetensors", "bin": "pytorch_model.bin"}
    path = tmp_path / names[kind]
    if path.suffix == ".bin":
        torch.save(prefixed("timm_model.", model.state_dict()), path)
    else:
        safetensors.torch.save_file(model.state_dict(), path)
    (tmp_path / "config.json").write_text(json.dumps({"architecture": "resnet18"}))
    encoder = encoder_of("timm/resnet18")
    words = take_weights(encoder, tmp_path)
    assert "100 of 100" in words and "left out: fc" in words.replace("timm_model.", "")
    assert torch.equal(encoder.backbone.state_dict()["conv1.weight"], model.state_dict()["conv1.weight"])


def test_places_of_a_vit_follow_the_image_size(tmp_path) -> None:
    model = timm.create_model("vit_tiny_patch16_224", num_classes=5)
    torch.save(model.state_dict(), tmp_path / "vit.pt")
    encoder = encoder_of("timm/vit_tiny_patch16_224", size=64)
    matched = match(encoder, read_tensors(tmp_path / "vit.pt", "--init-from"))
    assert not matched.missing and not matched.wrong and matched.unknown == ["head.weight", "head.bias"]
    take(encoder, matched)
    assert encoder.backbone.state_dict()["pos_embed"].shape == (1, 17, 192)
    assert encoder(torch.rand(2, 3, 64, 64)).shape == (2, 192)


def test_too_few_tensors_are_refused(tmp_path) -> None:
    state, path = resnet18(), tmp_path / "weights.pth"
    torch.save(state, path)
    with pytest.raises(ValueError, match=r"Only \d+ of \d+ tensors would be taken; give the --encoder"):
        take_weights(encoder_of("torchvision/resnet34"), path)
    with pytest.raises(ValueError, match="is not of timm/convnext_atto"):
        take_weights(encoder_of("timm/convnext_atto"), path)
    small = encoder_of("torchvision/resnet18", 32, "small")
    assert "99 of 100" in (words := take_weights(small, path)) and "new: conv1.weight" in words
    broken = {**state, "layer1.0.conv1.weight": torch.full_like(state["layer1.0.conv1.weight"], float("nan"))}
    torch.save(broken, path)
    with pytest.raises(ValueError, match=r"not finite .*layer1.0.conv1.weight"):
        take_weights(encoder_of("torchvision/resnet18"), path)
    with pytest.raises(ValueError, match=r"--init-from .*: there is no encoder.safetensors"):
        take_weights(small, tmp_path)
    with pytest.raises(ValueError, match="no such file"):
        take_weights(small, tmp_path / "none.pth")


def test_settings_follow_the_weights(tmp_path) -> None:
    path = tmp_path / "weights.pth"
    torch.save(resnet18(), path)
    asked = with_settings(Pretrain(data="digits", out=tmp_path / "run"), init_from=path, image_size=32)
    with pytest.raises(ValueError, match="which network is it"):
        as_the_weights_are(asked)
    found = as_the_weights_are(with_settings(asked, encoder="torchvision/resnet18"))
    assert found.model.stem == "standard"  # 7 x 7, although images are small
    torch.save(timm.create_model("vit_tiny_patch16_224").state_dict(), path)
    found = as_the_weights_are(with_settings(asked, encoder="timm/vit_tiny_patch16_224"))
    assert found.images.mean == found.images.std == (0.5, 0.5, 0.5)  # what timm's weights were trained with
    assert stem_of(resnet18(), "timm/vit_tiny_patch16_224") is None


def test_imagenet_without_a_network_says_what_to_do(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")  # nobody listens there
    asked = with_settings(Pretrain(data="digits", out=tmp_path), init_from="imagenet", encoder="narrow-resnet")
    with pytest.raises(ValueError, match="the narrow ResNet has no public weights"):
        as_the_weights_are(asked)
    with pytest.raises(ValueError, match=r"own weights could not be had .*give --init-from FILE"):
        as_the_weights_are(with_settings(asked, encoder="torchvision/resnet18"))


FAMILIES = {
    "narrow-resnet": 16,
    "torchvision/resnet18": 32,
    "torchvision/mobilenet_v3_small": 32,
    "torchvision/efficientnet_b0": 32,
    "torchvision/convnext_tiny": 32,
    "torchvision/regnet_x_400mf": 32,
    "torchvision/shufflenet_v2_x0_5": 32,
    "timm/convnext_atto": 32,
    "timm/efficientnet_lite0": 32,
    "timm/mobilenetv3_small_050": 32,
    "timm/vit_tiny_patch16_224": 32,
    "timm/vit_tiny_patch16_224.augreg_in21k": 48,
    "timm/regnetx_002": 32,
}


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_takes_a_step(name: str) -> None:
    size = FAMILIES[name]
    encoder = encoder_of(name, size, "small" if name == "narrow-resnet" else "standard")
    classifier = InstanceClassifier(4, encoder.feature_dim)
    optimizer = torch.optim.SGD(encoder.parameters(), lr=0.1)
    before = {key: tensor.clone() for key, tensor in encoder.named_parameters()}
    loss = classifier(encoder(torch.rand(4, 3, size, size)), torch.arange(4))
    loss.backward()
    optimizer.step()
    classifier.update(0.1)
    reached = [key for key, tensor in encoder.named_parameters() if tensor.grad is not None]
    changed = [key for key, tensor in encoder.named_parameters() if not torch.equal(tensor, before[key])]
    # Some blocks begin at zero, so that their inside moves at the second step only.
    assert bool(torch.isfinite(loss)) and len(reached) > 0.9 * len(before) and changed[0] == next(iter(before))
