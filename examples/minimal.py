"""The method in one file: every image is its own class, and a network learns to tell them all apart.

    python examples/minimal.py                     # 1,797 handwritten digits, about a minute
    python examples/minimal.py PHOTOS --size 64    # your own images: a folder with one subfolder per class

Only the million-way classifier is millionway's; encoder, views and optimizer are plain PyTorch, as in your own loop.
Labels are used for the score alone. From "Train a One-Million-Way Instance Classifier" (AAAI 2021).
"""

import argparse
import math

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torchvision import datasets, models
from torchvision.transforms import v2

from millionway.model.classifier import InstanceClassifier


def load_images(folder: str | None, size: int) -> tuple[Tensor, Tensor]:
    """([images, 3, size, size] from 0 to 1, [images] labels)"""
    if folder is None:
        digits = load_digits()
        gray = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
        return F.interpolate(gray, size, mode="bilinear").expand(-1, 3, -1, -1), torch.tensor(digits.target)
    shape = v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Resize(size), v2.CenterCrop(size)])
    images, labels = zip(*datasets.ImageFolder(folder, shape))
    return torch.stack(images), torch.tensor(labels)


def small_resnet() -> tuple[nn.Module, int]:
    """(an encoder for small images, the length of its features)"""
    encoder = models.ResNet(models.resnet.BasicBlock, [1, 1, 1, 1], width_per_group=64)
    encoder.conv1 = nn.Conv2d(3, 64, 3, stride=2, padding=1, bias=False)
    encoder.maxpool = nn.Identity()
    encoder.fc = nn.Identity()
    return encoder, 512


@torch.no_grad()
def knn_accuracy(encoder: nn.Module, images: Tensor, labels: Tensor, k: int = 20) -> float:
    """How often the k nearest other images, by cosine, vote for an image's own label."""
    encoder.eval()
    features = F.normalize(torch.cat([encoder(batch) for batch in images.split(256)]))
    encoder.train()
    cosines = (features @ features.T).fill_diagonal_(-torch.inf)
    weights, nearest = cosines.topk(k)
    votes = F.one_hot(labels[nearest]).float() * (weights / 0.1).exp()[:, :, None]  # [images, k, labels]
    return float((votes.sum(dim=1).argmax(dim=1) == labels).float().mean())


@torch.no_grad()
def write_prior(network: nn.Module, classifier: InstanceClassifier, images: Tensor, batch_size: int) -> None:
    """Contrastive prior: the row of an image starts as what the untrained network says of it."""
    for ids in torch.randperm(len(images)).split(batch_size):
        classifier.set_rows(ids, F.normalize(network(images[ids])))


def train(network: nn.Module, images: Tensor, views: v2.Transform, epochs: int, batch_size: int, lr: float) -> None:
    classifier = InstanceClassifier(len(images), dim=128, temperature=0.1)  # one row per image
    write_prior(network, classifier, images, batch_size)
    optimizer = torch.optim.SGD(network.parameters(), lr, momentum=0.9, weight_decay=1e-4)
    steps, step = epochs * (len(images) // batch_size), 0
    for epoch in range(epochs):
        losses = []
        for ids in torch.randperm(len(images)).split(batch_size):
            if len(ids) < batch_size:
                break
            batch = torch.stack([views(image) for image in images[ids]])
            loss = classifier(network(batch), ids)  # softmax over ALL images; the class of a view is its image
            optimizer.param_groups[0]["lr"] = now = lr * 0.5 * (1 + math.cos(math.pi * step / steps))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            classifier.update(lr=10 * now)  # moves the rows: they are in no optimizer
            losses.append(float(loss.detach()))
            step += 1
        print(f"epoch {epoch + 1:3d}  loss {sum(losses) / len(losses):.3f}  (chance {math.log(len(images)):.3f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?")
    parser.add_argument("--size", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.06)
    chosen = parser.parse_args()
    torch.manual_seed(0)
    images, labels = load_images(chosen.folder, chosen.size)
    encoder, feature_dim = small_resnet()
    network = nn.Sequential(encoder, nn.Linear(feature_dim, 128))
    steps = [v2.RandomResizedCrop(chosen.size, scale=(0.5, 1.0)), v2.ColorJitter(0.4, 0.4, 0.4)]
    views = v2.Compose(steps if chosen.folder is None else [*steps, v2.RandomHorizontalFlip()])
    print(f"{len(images)} images; k-NN accuracy before: {knn_accuracy(encoder, images, labels):.1%}")
    train(network, images, views, chosen.epochs, chosen.batch_size, chosen.lr)
    print(f"k-NN accuracy after: {knn_accuracy(encoder, images, labels):.1%}")


if __name__ == "__main__":
    main()
