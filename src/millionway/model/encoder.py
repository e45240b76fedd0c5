"""Views -> features. Backbones of torchvision and timm by name, and a narrow ResNet for work on a CPU."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock

from millionway import randomness
from millionway.settings.checks import suggest


@dataclass(frozen=True)
class EncoderSpec:
    """All that is needed to build the encoder again; stored with its weights."""

    name: str
    """narrow-resnet, torchvision/NAME or timm/NAME"""
    stem: Literal["standard", "small"]
    image_size: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    @property
    def options(self) -> dict[str, Any]:
        """What timm is told besides the name: encoders made for one size, as ViTs are, are built for this one."""
        library, _, name = self.name.partition("/")
        if library != "timm":
            return {}
        import timm

        known = timm.get_pretrained_cfg(name)
        has_other_size = known is not None and known.fixed_input_size and known.input_size[-1] != self.image_size
        return {"img_size": self.image_size} if has_other_size else {}


class Encoder(nn.Module):
    """A backbone without its last layer, behind its own mean/std normalization."""

    mean: Tensor
    std: Tensor

    def __init__(self, spec: EncoderSpec, backbone: nn.Module, feature_dim: int) -> None:
        super().__init__()
        self.spec = spec
        self.backbone = backbone
        self.feature_dim = feature_dim
        # Not in the state dict, which is that of the backbone alone; the spec carries them.
        self.register_buffer("mean", torch.tensor(spec.mean)[:, None, None], persistent=False)
        self.register_buffer("std", torch.tensor(spec.std)[:, None, None], persistent=False)

    def forward(self, images: Float[Tensor, "batch 3 height width"]) -> Float[Tensor, "batch features"]:
        """images: colors from 0 to 1."""
        normalized = (images - self.mean) / self.std
        return self.backbone(normalized.contiguous(memory_format=torch.channels_last))


class NarrowResNet(nn.Module):
    """Four basic blocks of width 32, 64, 128, 256: about a thousandth of ResNet-50's work at 32 px.

    Names of parameters are torchvision's. The standard stem adds a pooling layer for images above 64 px.
    """

    def __init__(self, width: int = 32, stem: Literal["standard", "small"] = "small") -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, stride=2, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1) if stem == "standard" else nn.Identity()
        self.layer1 = _stage(width, width, 1)
        self.layer2 = _stage(width, 2 * width, 2)
        self.layer3 = _stage(2 * width, 4 * width, 2)
        self.layer4 = _stage(4 * width, 8 * width, 2)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return x.mean(dim=(2, 3))


def _stage(width_in: int, width_out: int, stride: int) -> nn.Sequential:
    shortcut = None
    if stride != 1 or width_in != width_out:
        convolution = nn.Conv2d(width_in, width_out, 1, stride=stride, bias=False)
        shortcut = nn.Sequential(convolution, nn.BatchNorm2d(width_out))
    return nn.Sequential(BasicBlock(width_in, width_out, stride, shortcut))


def full_name(name: str) -> str:
    """The name with its library in front; unknown names are refused with the nearest known one."""
    import torchvision

    known_torchvision = torchvision.models.list_models(module=torchvision.models)
    if name == "narrow-resnet":
        return name
    library, _, short = name.rpartition("/")
    if library in ("", "torchvision") and short in known_torchvision:
        return f"torchvision/{short}"
    import timm

    if library in ("", "timm") and timm.is_model(short):
        return f"timm/{short}"
    known = ["narrow-resnet", *known_torchvision, *timm.list_models()]
    raise ValueError(f"--encoder {name}: no such encoder. {suggest(short, known, 3)}")


def build_encoder(spec: EncoderSpec, seed: int = 0) -> Encoder:
    """The encoder with random weights, a function of the spec and the seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(randomness.key_of(seed, "encoder"))
        backbone = _backbone(spec)
    backbone = backbone.to(memory_format=torch.channels_last)
    return Encoder(spec, backbone, feature_dim(spec.name, backbone, spec.image_size))


def _backbone(spec: EncoderSpec) -> nn.Module:
    if spec.name == "narrow-resnet":
        return NarrowResNet(stem=spec.stem)
    library, _, name = full_name(spec.name).partition("/")
    if library == "torchvision":
        import torchvision

        # These two would return several outputs in training.
        options = {"aux_logits": False, "init_weights": True} if name in ("googlenet", "inception_v3") else {}
        backbone = _without_last_linear(torchvision.models.get_model(name, weights=None, **options), name)
    else:
        import timm

        backbone = timm.create_model(name, pretrained=False, num_classes=0, **spec.options)
    if spec.stem == "small":
        _use_small_stem(backbone, spec.name)
    return backbone


def _without_last_linear(model: nn.Module, name: str) -> nn.Module:
    """Identity in the place of the classification layer, so that the model returns features."""
    linears = [path for path, module in model.named_modules() if isinstance(module, nn.Linear)]
    if not linears:
        raise ValueError(f"--encoder {name}: it does not end in a linear layer, so it has no feature to learn")
    parent, _, leaf = linears[-1].rpartition(".")
    setattr(model.get_submodule(parent), leaf, nn.Identity())
    return model


def _use_small_stem(backbone: nn.Module, name: str) -> None:
    """3 x 3, stride 1, no pooling, as is usual for CIFAR."""
    conv = getattr(backbone, "conv1", None)
    if not isinstance(conv, nn.Conv2d) or not hasattr(backbone, "maxpool"):
        raise ValueError(f"--stem small: {name} has no ResNet stem to replace; use --stem standard")
    small = nn.Conv2d(conv.in_channels, conv.out_channels, 3, stride=1, padding=1, bias=False)
    nn.init.kaiming_normal_(small.weight, mode="fan_out", nonlinearity="relu")
    backbone.conv1 = small
    backbone.maxpool = nn.Identity()


def feature_dim(name: str, backbone: nn.Module, size: int) -> int:
    """Found by trying, which also shows that the encoder takes images of this size."""
    backbone.eval()
    try:
        with torch.no_grad():
            feature = backbone(torch.zeros(1, 3, size, size))
    except Exception as error:  # libraries raise anything from AssertionError to RuntimeError here
        raise ValueError(f"--encoder {name} does not take images of {size} px: {error}") from None
    finally:
        backbone.train()
    if not isinstance(feature, Tensor) or feature.ndim != 2:
        raise ValueError(f"--encoder {name} does not return one vector per image")
    return feature.shape[1]
