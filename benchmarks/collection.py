"""Are planted near-duplicates and outliers found, and by rows or by features? Beside perceptual hashes and chance.

    python benchmarks/planted.py --cifar10 FOLDER --out PLANTED
    millionway pretrain --preset cifar10-small --data PLANTED --out RUN --labels none
    python benchmarks/collection.py planted --run RUN --data PLANTED
    python benchmarks/collection.py neighbors --images 374951      # memory beyond the vectors
    python benchmarks/collection.py places --images 50000          # beside faiss and openTSNE's defaults

Near-duplicates: pairs in the order of the likeness of their pixels, among candidates from vectors; recall where 99 % of
the pairs so far are planted. CIFAR-10 has near-duplicates of its own, which count as mistakes here.
"""

import argparse
import json
import resource
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from planted import KINDS, OUTLIERS
from sklearn.metrics import average_precision_score

from millionway.collection.collection import Collection
from millionway.collection.duplicates import QUANTILE, near_pairs
from millionway.collection.looks import Looks
from millionway.collection.neighbors import Neighbors, nearest
from millionway.collection.opening import open_collection
from millionway.collection.outliers import outliers
from millionway.collection.pairs import verify
from millionway.console import track
from millionway.machine import describe_environment
from millionway.model.encoder import build_encoder
from millionway.settings.collection import Collected

RESULTS = Path(__file__).parent / "results"


def recall_at(precision: float, scores: np.ndarray, planted: np.ndarray, num_planted: int) -> float:
    order = np.argsort(-scores, kind="stable")
    right = np.cumsum(planted[order])
    good = np.flatnonzero(right / np.arange(1, len(order) + 1) >= precision)
    return float(right[good[-1]] / num_planted) if len(good) else 0.0


def planted_pairs(names: list[str]) -> dict[tuple[int, int], str]:
    """{(place, place): kind}"""
    place_of = {Path(name).with_suffix("").as_posix(): place for place, name in enumerate(names)}
    found = {}
    for name, place in place_of.items():
        stem, _, kind = name.rpartition("-")
        if kind in KINDS:
            found[tuple(sorted((place_of[stem], place)))] = kind
    return found


def hash_distances(collection: Collection, places: np.ndarray) -> np.ndarray:
    """[images, images] bits in which imagehash's 64-bit perceptual hashes differ."""
    import imagehash

    paths = [collection.paths[place] for place in places.tolist()]
    bits = np.array([imagehash.phash(Image.open(path).convert("RGB")).hash.ravel() for path in paths], np.float32)
    return bits.sum(1)[:, None] + bits.sum(1)[None] - 2 * bits @ bits.T


def near_duplicates(collection: Collection, places: np.ndarray) -> dict[str, Any]:
    names = [collection.dataset.manifest.keys[int(i)] for i in collection.ids[places]]
    wanted = planted_pairs(names)
    near = nearest(collection.vectors.unit[torch.from_numpy(places)])
    threshold = float(np.quantile(near.nearest.numpy(), QUANTILE))
    pairs, cosines = near_pairs(near, threshold)
    looks = Looks(collection.looks.table.take(places))
    found = verify(looks, looks, pairs, track).numpy()
    is_planted = np.array([tuple(pair) in wanted for pair in pairs.tolist()])
    numbers = {
        "threshold": threshold,
        "planted_above_threshold": float(is_planted.sum() / len(wanted)),
        "recall_at_99_precision": recall_at(0.99, found, is_planted, len(wanted)),
        "recall_at_99_precision_by_cosine_alone": recall_at(0.99, cosines.numpy(), is_planted, len(wanted)),
        "recall_at_99_precision_by_both": recall_at(0.99, found * cosines.numpy(), is_planted, len(wanted)),
    }
    order = np.argsort(-found)
    mistakes = [order[n] for n in range(len(order)) if not is_planted[order[n]]][:20]
    numbers["first_that_were_not_planted"] = [
        [*(names[p] for p in pairs[m].tolist()), float(found[m])] for m in mistakes
    ]
    return numbers


def by_hash(collection: Collection, places: np.ndarray) -> dict[str, float]:
    names = [collection.dataset.manifest.keys[int(i)] for i in collection.ids[places]]
    wanted, distances = planted_pairs(names), hash_distances(collection, places)
    one, other = np.triu_indices(len(places), 1)
    near = distances[one, other] <= 16
    one, other = one[near], other[near]
    is_planted = np.array([pair in wanted for pair in zip(one.tolist(), other.tolist())])
    return {"recall_at_99_precision": recall_at(0.99, -distances[one, other], is_planted, len(wanted))}


def strange(collection: Collection, unit: torch.Tensor, places: np.ndarray, near: Neighbors) -> dict[str, float]:
    names = [collection.dataset.manifest.keys[int(i)] for i in collection.ids[places]]
    wanted = np.array([name.startswith(OUTLIERS + "/") for name in names])
    pixels = {name: collection.looks.column(name)[places] for name in Looks.NUMBERS}
    alike = np.ones(len(places))  # sizes do not count here
    nothing = {name: np.full(len(places), 0.5) for name in Looks.NUMBERS}
    score = outliers(unit, near, pixels, alike, alike).score
    by_vectors = outliers(unit, near, nothing, alike, alike).score
    return {
        "average_precision": float(average_precision_score(wanted, score)),
        "average_precision_by_vectors_alone": float(average_precision_score(wanted, by_vectors)),
        "chance": float(wanted.mean()),
    }


def same_class(collection: Collection, unit: torch.Tensor, places: np.ndarray) -> float:
    names = [collection.dataset.manifest.keys[int(i)].split("/")[0] for i in collection.ids[places]]
    labels = np.unique(names, return_inverse=True)[1]
    return float((labels[nearest(unit, 1).places[:, 0].numpy()] == labels).mean())


def planted(asked: argparse.Namespace) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for kind in ("features", "rows", "random encoder"):
        how: dict[str, Any] = {"vectors": kind} if kind != "random encoder" else {}
        if kind == "rows" and not asked.run.is_dir():
            continue
        collection = open_collection(Collected(asked.run, data=str(asked.data), **how), track)
        if kind == "random encoder":
            assert collection.subject is not None
            spec = collection.subject.encoder.spec
            collection.subject = type(collection.subject)("random", build_encoder(spec, 0).eval(), "random")
            collection.cache = None
        names = [collection.dataset.manifest.keys[int(i)] for i in collection.ids]
        copies = np.array([planted_kind(name) for name in names])
        is_outlier = np.array([name.startswith(OUTLIERS + "/") for name in names])
        unit = collection.vectors.unit
        originals, without_outliers = np.flatnonzero(~copies), np.flatnonzero(~is_outlier)
        own = unit[torch.from_numpy(originals)]
        results[kind] = {
            "same_class": same_class(
                collection,
                unit[torch.from_numpy(np.flatnonzero(~copies & ~is_outlier))],
                np.flatnonzero(~copies & ~is_outlier),
            ),
            "outliers": strange(collection, own, originals, nearest(own)),
            "near_duplicates": near_duplicates(collection, without_outliers),
        }
        if kind == "features":
            results["imagehash, 64 bit"] = {"near_duplicates": by_hash(collection, without_outliers)}
        print(kind, json.dumps(results[kind], indent=1)[:1500], flush=True)
    return results


def planted_kind(name: str) -> bool:
    return Path(name).stem.rpartition("-")[2] in KINDS


def memory(asked: argparse.Namespace) -> dict[str, Any]:
    """Vectors of a few thousand kinds; the peak is that of the process."""
    unit = F.normalize(
        torch.randn(asked.images, asked.dim) + 2 * torch.randn(2000, asked.dim)[torch.randint(2000, (asked.images,))]
    )
    nearest(unit[:5000])  # threads and their memory are there
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    nearest(unit, progress=track)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "images": asked.images,
        "dim": asked.dim,
        "seconds": time.perf_counter() - started,
        "mib_beyond_vectors": (after - before) / 1024,
    }


def whole_map(asked: argparse.Namespace) -> dict[str, Any]:
    """Neighbors, places and clusters, beside faiss's exact search and openTSNE with its defaults on what it found."""
    import faiss
    import openTSNE

    from millionway.collection.clusters import clusters
    from millionway.collection.places import places

    threads = torch.get_num_threads()
    unit = F.normalize(
        torch.randn(asked.images, asked.dim) + 2 * torch.randn(200, asked.dim)[torch.randint(200, (asked.images,))]
    )
    seconds, started = {}, time.perf_counter()
    near = nearest(unit, progress=track)
    seconds["neighbors"] = time.perf_counter() - started
    flat = places(unit, near, threads)
    seconds["places"] = time.perf_counter() - started - seconds["neighbors"]
    clusters(flat)
    ours = time.perf_counter() - started
    started = time.perf_counter()
    index = faiss.IndexFlatIP(asked.dim)
    index.add(unit.numpy())
    cosines, found = index.search(unit.numpy(), 91)
    seconds["faiss"] = time.perf_counter() - started
    known = openTSNE.nearest_neighbors.PrecomputedNeighbors(found[:, 1:], (1 - cosines[:, 1:]).astype(np.float64))
    affinities = openTSNE.affinity.PerplexityBasedNN(knn_index=known, n_jobs=threads)
    openTSNE.TSNE(n_jobs=threads, random_state=0).fit(
        affinities=affinities, initialization=openTSNE.initialization.pca(unit.numpy())
    )
    theirs = time.perf_counter() - started
    return {"images": asked.images, "ours": ours, "theirs": theirs, "ratio": ours / theirs, "parts": seconds}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["planted", "neighbors", "places"])
    parser.add_argument("--run", type=Path)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--images", type=int, default=50_000)
    parser.add_argument("--dim", type=int, default=128)
    given = parser.parse_args()
    measured = {"planted": planted, "neighbors": memory, "places": whole_map}[given.what](given)
    written = RESULTS / f"collection_{given.what}.json"
    environment = json.loads(describe_environment(torch.device("cpu")))
    written.write_text(json.dumps({"numbers": measured, "environment": environment}, indent=2) + "\n")
    print(f"written  {written}")
