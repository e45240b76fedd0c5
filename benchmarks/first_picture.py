"""The first picture of the README: what an encoder finds alike, and how it came to know its images.

    python benchmarks/first_picture.py --run RUN --data DIR      # writes docs/pictures/first.png

DIR: images that the run has not seen. Each row is an image and those nearest to it by cosine of features, among 10,000
images; the rows are drawn by a seed, not chosen.
"""

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
import numpy as np
import torch

import millionway
from millionway.data.dataset import open_dataset
from millionway.data.images import decode
from millionway.data.manifest import Manifest
from millionway.evaluation.features import extract
from millionway.reporting.metrics import read_metrics

ROOT = Path(__file__).resolve().parent.parent
NUM_IMAGES, NUM_ROWS, NUM_NEIGHBORS, SEED = 10_000, 6, 8, 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "pictures" / "first.png")
    chosen = parser.parse_args()
    dataset, encoder = open_dataset(chosen.data, max_images=NUM_IMAGES), millionway.load_encoder(chosen.run)
    size, cpu = encoder.spec.image_size, torch.device("cpu")
    features, ids = extract(encoder, dataset, dataset.instance_ids, size, cpu)
    unit = torch.nn.functional.normalize(features)
    queries = torch.randperm(len(ids), generator=torch.Generator().manual_seed(SEED))[:NUM_ROWS]
    nearest = (unit[queries] @ unit.T).topk(NUM_NEIGHBORS + 1).indices  # itself first
    lines = [line for line in read_metrics(chosen.run / "metrics.jsonl") if line["kind"] == "evaluation"]

    figure = plt.figure(figsize=(11, 4.3), dpi=110, facecolor="white")
    left, right = figure.subfigures(1, 2, width_ratios=(1.75, 1))
    axes = left.subplots(NUM_ROWS, NUM_NEIGHBORS + 1, gridspec_kw={"wspace": 0.06, "hspace": 0.06})
    for row, places in zip(axes, nearest.tolist()):
        for number, (axis, place) in enumerate(zip(row, places)):
            axis.imshow(np.asarray(decode(dataset.source.read(int(ids[place])))), interpolation="nearest")
            axis.set_xticks([])
            axis.set_yticks([])
            for side in axis.spines.values():
                side.set(color="#c0392b", linewidth=2.5, visible=number == 0)
    left.suptitle("an image, and those the encoder finds nearest to it", fontsize=11, x=0.51)
    axis = right.subplots()
    axis.plot([line["epoch"] for line in lines], [line["instance_top1"] for line in lines], marker="o", color="#c0392b")
    axis.set(xlabel="epoch", ylim=(0, None), xlim=(0, None))
    axis.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))
    axis.yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1.0, decimals=0))
    num_images = int(Manifest.load(chosen.run / "manifest.arrow").readable.sum())
    right.suptitle(f"fresh views that find their image\namong {num_images:,}", fontsize=11)
    axis.spines[["top", "right"]].set_visible(False)
    right.subplots_adjust(left=0.2, bottom=0.14, top=0.84)
    left.subplots_adjust(left=0.02, right=0.99, bottom=0.02, top=0.91)
    figure.savefig(chosen.out, metadata={"Software": None})
    print(f"written  {chosen.out}")


if __name__ == "__main__":
    main()
