import pytest
import safetensors.torch
import timm
import torch
import torchvision

from millionway.model.encoder import EncoderSpec, build_encoder, full_name
from millionway.model.encoder_file import load_encoder, save_encoder
from millionway.model.head import build_head
from millionway.model.network import Network
from millionway.settings.resolve import choose_stem

MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.3, 0.4)


def spec(name: str, stem="standard", size: int = 64) -> EncoderSpec:
    return EncoderSpec(name, stem, size, MEAN, STD)


def normalized(images: torch.Tensor) -> torch.Tensor:
    return (images - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]


def test_weights_load_strictly_into_torchvision_and_timm(tmp_path) -> None:
    encoder = build_encoder(spec("torchvision/resnet18"), seed=3).eval()
    save_encoder(encoder, tmp_path / "encoder.safetensors")
    state = safetensors.torch.load_file(tmp_path / "encoder.safetensors")
    theirs = torchvision.models.resnet18()
    theirs.fc = torch.nn.Identity()
    theirs.load_state_dict(state, strict=True)
    timms = timm.create_model("resnet18", num_classes=0)
    timms.load_state_dict(state, strict=True)
    images = torch.rand(2, 3, 64, 64)
    with torch.no_grad():
        features = encoder(images)
        for model in (theirs, timms):
            assert torch.allclose(model.eval()(normalized(images)), features, atol=1e-5)


@pytest.mark.parametrize("name", ["narrow-resnet", "torchvision/mobilenet_v3_small", "timm/convnext_atto"])
def test_saved_encoder_comes_back(tmp_path, name: str) -> None:
    encoder = build_encoder(spec(name), seed=1).eval()
    save_encoder(encoder, tmp_path / "encoder.safetensors", step="7")
    again = load_encoder(tmp_path)
    images = torch.rand(2, 3, 64, 64)
    with torch.no_grad():
        assert torch.equal(again(images), encoder(images))
        assert encoder(images).shape == (2, encoder.feature_dim)
    assert again.spec == encoder.spec


def test_weights_are_a_function_of_the_seed() -> None:
    torch.manual_seed(1)
    first = build_encoder(spec("narrow-resnet"), seed=4).state_dict()
    torch.manual_seed(2)
    state_before = torch.random.get_rng_state()
    second = build_encoder(spec("narrow-resnet"), seed=4).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert torch.equal(torch.random.get_rng_state(), state_before)
    other = build_encoder(spec("narrow-resnet"), seed=5).state_dict()
    assert not torch.equal(first["backbone.conv1.weight"], other["backbone.conv1.weight"])


def test_names() -> None:
    assert full_name("resnet50") == "torchvision/resnet50"
    assert full_name("convnext_atto") == "timm/convnext_atto"
    with pytest.raises(ValueError, match="resnet50"):
        full_name("resnet5O")
    with pytest.raises(ValueError, match="no such encoder"):
        full_name("torchvision/convnext_atto")
    with pytest.raises(ValueError, match="small"):
        build_encoder(spec("torchvision/mobilenet_v3_small", "small", 32))
    with pytest.raises(ValueError, match="32 px"):
        build_encoder(spec("torchvision/vit_b_16", size=32))
    with pytest.raises(ValueError, match="linear layer"):
        build_encoder(spec("torchvision/squeezenet1_1"))


def test_auto_stem() -> None:
    assert choose_stem("torchvision/resnet50", "auto", 64) == "small"
    assert choose_stem("torchvision/resnet50", "auto", 65) == "standard"
    assert choose_stem("timm/convnext_atto", "auto", 32) == "standard"
    assert choose_stem("torchvision/resnet50", "standard", 32) == "standard"


def test_a_file_that_is_not_an_encoder_is_refused(tmp_path) -> None:
    path = tmp_path / "encoder.safetensors"
    with pytest.raises(ValueError, match="no such file"):
        load_encoder(tmp_path)
    path.write_bytes(b"rubbish")
    with pytest.raises(ValueError, match="not a safetensors file"):
        load_encoder(path)
    safetensors.torch.save_file({"a": torch.zeros(1)}, path)
    with pytest.raises(ValueError, match="does not say"):
        load_encoder(path)


@pytest.mark.parametrize(("kind", "dim"), [("mlp", 128), ("linear", 128), ("none", 256)])
def test_heads(kind: str, dim: int) -> None:
    assert build_head(kind, 256, 128)(torch.randn(4, 256)).shape == (4, dim)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_weights_gradients_and_statistics_are_float32_whatever_a_network_computes_in(precision) -> None:
    views, seen = torch.rand(8, 3, 16, 16), []
    network = Network(build_encoder(spec("narrow-resnet", "small", 16), 0), build_head("linear", 256, 16, 0), precision)
    with torch.no_grad():
        exact = network.head(network.encoder(views))
    network.encoder.backbone.get_submodule("layer1").register_forward_hook(lambda *parts: seen.append(parts[2].dtype))
    embeddings = network(views)
    embeddings.square().sum().backward()
    assert embeddings.dtype == torch.float32 and seen == [getattr(torch, precision)]
    assert all(each.grad is not None and each.grad.dtype == torch.float32 for each in network.parameters())
    assert all(buffer.dtype != torch.bfloat16 for buffer in network.buffers())
    error = float((embeddings.detach() - exact).norm() / exact.norm())
    assert 1e-4 < error < 0.05 if precision == "bfloat16" else error == 0


@pytest.mark.parametrize(
    ("name", "stem", "size"),
    [("narrow-resnet", "small", 16), ("narrow-resnet", "standard", 32), ("torchvision/resnet18", "standard", 32)],
)
def test_gradients_in_bfloat16_have_nothing_that_nobody_wrote(name: str, stem: str, size: int) -> None:
    """oneDNN's have, where a strided convolution sees a single pixel; so this is the smallest size that is allowed."""
    encoder, views, found = build_encoder(spec(name, stem, size), 0), torch.rand(32, 3, size, size), []

    def spoil_memory() -> None:
        for dtype in (torch.float32, torch.bfloat16):
            spoiled = [torch.full((1 << power,), torch.nan, dtype=dtype) for power in range(6, 21)]
            del spoiled

    for _ in range(3):
        encoder.zero_grad()
        spoil_memory()
        with torch.autocast("cpu", torch.bfloat16):
            features = encoder(views)
        spoil_memory()
        features.float().square().mean().backward()
        found.append([parameter.grad.clone() for parameter in encoder.parameters() if parameter.grad is not None])
    for gradients in zip(*found):
        assert all(torch.isfinite(each).all() and torch.equal(each, gradients[0]) for each in gradients)
