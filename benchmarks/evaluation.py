"""How fast are the protocols, and are they right? Feature extraction, linear classifier, k-NN, against others.

    python benchmarks/evaluation.py [--cifar10 FOLDER]        # FOLDER/train/CLASS/*.png, FOLDER/test/CLASS/*.png

Speed: Fashion-MNIST; features of 512 numbers are a fixed random layer on its pixels. All sides alternate in one run;
ratios of medians. Accuracy: features of a random encoder on CIFAR-10, against scikit-learn.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path

import faiss
import numpy as np
import torch
import torch.nn.functional as F
from presets import write_between_marks
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier
from timing import alternate

from millionway.data.dataset import open_dataset
from millionway.evaluation.features import BATCH_SIZE, extract
from millionway.evaluation.knn import knn, votes
from millionway.evaluation.linear import Fit, accuracy, fit
from millionway.machine import describe_environment, num_cores
from millionway.model.encoder import EncoderSpec, build_encoder
from millionway.settings.pretrain import IMAGENET_MEAN, IMAGENET_STD

ROOT = Path(__file__).parent.parent
CPU = torch.device("cpu")
TURNS = 5


def random_features(pixels: torch.Tensor) -> torch.Tensor:
    g = torch.Generator().manual_seed(0)
    return (pixels.flatten(1).float() / 255 @ torch.randn(28 * 28, 512, generator=g) / 28).relu()


@torch.no_grad()
def extraction() -> dict[str, list[float]]:
    dataset = open_dataset("fashion-mnist", max_images=4096)
    encoder = build_encoder(EncoderSpec("narrow-resnet", "small", 32, IMAGENET_MEAN, IMAGENET_STD), 0).eval()
    batches = torch.rand(4096, 3, 32, 32).split(BATCH_SIZE)
    sides: dict[str, Callable[[], object]] = {
        "ours": lambda: extract(encoder, dataset, dataset.instance_ids, 32, CPU),
        "bare": lambda: [encoder(batch) for batch in batches],
    }
    return alternate(sides, TURNS)


def agreement(cifar10: Path) -> dict[str, float]:
    """Accuracies of k-NN and of the converged linear classifier, ours and scikit-learn's, on the same features."""
    encoder = build_encoder(EncoderSpec("narrow-resnet", "small", 32, IMAGENET_MEAN, IMAGENET_STD), 0)
    features, labels = {}, {}
    for split, num in (("train", 10_000), ("test", 2_000)):
        dataset = open_dataset(str(cifar10 / split), max_images=num, num_threads=num_cores())
        assert dataset.labels is not None
        found, ids = extract(encoder, dataset, dataset.instance_ids, 32, CPU)
        features[split], labels[split] = found.double(), torch.from_numpy(dataset.labels.ids)[ids]
    units = {split: F.normalize(each).numpy() for split, each in features.items()}
    scores = dict(knn(features["train"], labels["train"], features["test"], labels["test"]))
    for k in (20, 200):
        model = KNeighborsClassifier(k, weights=lambda d: np.exp((1 - d) / 0.1), metric="cosine", algorithm="brute")
        model.fit(units["train"], labels["train"].numpy())
        scores[f"knn_{k} of scikit-learn"] = float(model.score(units["test"], labels["test"].numpy()))
    penalty = 1e-4  # of |w|^2 / 2 beside the mean loss
    how = Fit.for_images(len(units["train"]), epochs=1000, weight_decay=penalty)
    weight, bias = fit(lambda epoch: (features["train"], labels["train"]), 10, how, 0)
    scores["linear, converged"] = accuracy(weight, bias, features["test"], labels["test"])
    theirs = LogisticRegression(C=1 / (len(units["train"]) * penalty), max_iter=5000, tol=1e-8)
    theirs.fit(units["train"], labels["train"].numpy())
    scores["linear of scikit-learn"] = float(theirs.score(units["test"], labels["test"].numpy()))
    return scores


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cifar10", type=Path)
    chosen = parser.parse_args()
    torch.set_num_threads(num_cores())
    faiss.omp_set_num_threads(num_cores())
    train, test = open_dataset("fashion-mnist"), open_dataset("fashion-mnist", test=True)
    assert train.labels and test.labels
    features, queries = (random_features(torch.from_numpy(each.source.pixels)) for each in (train, test))  # pyright: ignore
    labels, answers = (torch.from_numpy(each.labels.ids) for each in (train, test) if each.labels)
    features, labels = features[:50_000], labels[:50_000]
    unit, unit_queries = F.normalize(features), F.normalize(queries)

    encoding = extraction()
    reached: dict[str, float] = {}

    def ours() -> None:
        weight, bias = fit(lambda epoch: (features, labels), 10, Fit.for_images(len(features)), 0)
        reached["ours"] = accuracy(weight, bias, queries, answers)

    def theirs() -> None:
        model = LogisticRegression(C=1000.0, max_iter=1000, tol=1e-4).fit(unit.numpy(), labels.numpy())
        reached["scikit-learn"] = float(model.score(unit_queries.numpy(), answers.numpy()))

    linear = alternate({"ours": ours, "scikit-learn": theirs}, 2)

    def by_faiss() -> None:
        index = faiss.IndexFlatIP(512)
        index.add(unit.numpy())  # pyright: ignore[reportCallIssue]
        index.search(unit_queries.numpy(), 200)  # pyright: ignore[reportCallIssue]

    nearest = alternate({"ours": lambda: votes(features, labels, queries, (20, 200)), "faiss": by_faiss}, TURNS)
    per_image = statistics.median(encoding["ours"]) / 4096
    median = {
        name: {side: statistics.median(values) for side, values in sides.items()}
        for name, sides in (("encoding", encoding), ("linear", linear), ("k-NN", nearest))
    }
    ratios = {
        "bare forward loop / feature extraction": median["encoding"]["bare"] / median["encoding"]["ours"],
        "encoding 50,000 images in each of 100 epochs / linear on kept features": 100
        * 50_000
        * per_image
        / median["linear"]["ours"],
        "scikit-learn's LogisticRegression / linear": median["linear"]["scikit-learn"] / median["linear"]["ours"],
        "faiss exact search / k-NN": median["k-NN"]["faiss"] / median["k-NN"]["ours"],
    }
    result = {
        "ratios": ratios,
        "accuracy": {**reached, **dict(knn(features, labels, queries, answers))},
        "accuracy on CIFAR-10": agreement(chosen.cifar10) if chosen.cifar10 else {},
        "seconds": {"encoding": encoding, "linear": linear, "k-NN": nearest},
        "environment": json.loads(describe_environment(CPU)),
    }
    (ROOT / "benchmarks" / "results" / "evaluation.json").write_text(json.dumps(result, indent=2) + "\n")
    lines = ["| figure | ratio |", "|---|---|", *(f"| {name} | {value:.2f} |" for name, value in ratios.items()), ""]
    scores = ", ".join(f"{name} {value:.1%}" for name, value in reached.items())
    lines.append(f"Accuracy of the linear classifiers: {scores}. Commit {result['environment']['commit']}.")
    if result["accuracy on CIFAR-10"]:
        scores = ", ".join(f"{name} {value:.2%}" for name, value in result["accuracy on CIFAR-10"].items())
        lines += ["", f"Features of a random encoder on CIFAR-10, 10,000 against 2,000 images: {scores}."]
    write_between_marks(ROOT / "docs" / "experiments.md", "evaluation", "\n".join(lines))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
