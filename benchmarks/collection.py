"""Are planted near-duplicates and outliers found, and by rows or by features? Beside perceptual hashes and chance.

    python benchmarks/planted.py --cifar10 FOLDER --out PLANTED
    millionway pretrain --preset cifar10-small --data PLANTED --out RUN --labels none
    python benchmarks/collection.py planted --run RUN --data PLANTED
    python benchmarks/collection.py neighbors --images 374951      # memory beyond the vectors
    python benchmarks/collection.py places --images 50000          # beside faiss and openTSNE's defaults
    python benchmarks/collection.py table                          # into docs/explore.md

Near-duplicates: pairs in the order of the likeness of their pixels, among candidates from vectors; recall where 99 % of
the pairs so far are planted. CIFAR-10 has near-duplicates of its own: a pair of them is neither right nor wrong, by a
rule of its own (own_copies.py); the same with all of them as mistakes stands beside it.
Outliers: 1 % Fashion-MNIST, which the encoder was trained on with the rest; and beside it 1 % of what it never saw,
digits, and with --bccd parts of photos of blood cells.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from classifier import memory_status
from own_copies import own_copies
from PIL import Image
from planted import KINDS, NUM_OUTLIERS, OUTLIERS
from presets import write_between_marks
from sklearn.datasets import load_digits
from sklearn.metrics import average_precision_score

from millionway.collection.answers import encode
from millionway.collection.collection import Collection
from millionway.collection.duplicates import default_threshold, least_likeness, near_pairs
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


def copies_in_cifar10(data: Path, names: list[str]) -> np.ndarray:
    """[images] the same number for images whose originals are copies of each other in CIFAR-10."""
    stems = [Path(name).with_suffix("").as_posix() for name in names]
    originals = [stem for stem in stems if not planted_kind(stem)]
    pixels = np.stack([np.asarray(Image.open(data / f"{stem}.png").convert("RGB")) for stem in originals])
    group_of = dict(zip(originals, own_copies(torch.tensor(pixels).permute(0, 3, 1, 2)).tolist()))
    return np.array([group_of[stem.rpartition("-")[0] if planted_kind(stem) else stem] for stem in stems])


def recalls(scores: np.ndarray, pairs: np.ndarray, wanted: dict[tuple[int, int], str], own: np.ndarray) -> dict:
    """own: [images] copies in CIFAR-10 have the same number."""
    is_planted = np.array([tuple(pair) in wanted for pair in pairs.tolist()])
    left_out = (own[pairs[:, 0]] == own[pairs[:, 1]]) & ~is_planted
    return {
        "recall_at_99_precision": recall_at(0.99, scores[~left_out], is_planted[~left_out], len(wanted)),
        "recall_at_99_precision_all_counted": recall_at(0.99, scores, is_planted, len(wanted)),
        "pairs_left_out": int(left_out.sum()),
    }


def near_duplicates(collection: Collection, places: np.ndarray, names: list[str], own: np.ndarray) -> dict[str, Any]:
    wanted = planted_pairs(names)
    near = nearest(collection.vectors.unit[torch.from_numpy(places)])
    threshold = default_threshold(near)
    pairs, cosines = near_pairs(near, threshold)
    looks = Looks(collection.looks.table.take(places))
    found = verify(looks, looks, pairs, track).numpy()
    least = least_likeness(near, looks)
    kinds = [wanted.get(tuple(pair), "") for pair in pairs.tolist()]
    alike = [kind for kind, likeness in zip(kinds, found.tolist()) if likeness >= least]
    numbers = {
        "threshold": threshold,
        "planted_above_threshold": sum(kind != "" for kind in kinds) / len(wanted),
        **recalls(found, pairs.numpy(), wanted, own),
        "by_cosine_alone": recalls(cosines.numpy(), pairs.numpy(), wanted, own)["recall_at_99_precision"],
        "least_likeness": least,
        "found_of_each_kind": {kind: alike.count(kind) / list(wanted.values()).count(kind) for kind in KINDS},
    }
    mistakes = [
        place
        for place in np.argsort(-found).tolist()
        if not kinds[place] and own[pairs[place, 0]] != own[pairs[place, 1]]
    ]
    numbers["first_mistakes"] = [[*(names[p] for p in pairs[m].tolist()), float(found[m])] for m in mistakes[:20]]
    return numbers


def by_hash(collection: Collection, places: np.ndarray, names: list[str], own: np.ndarray) -> dict[str, Any]:
    distances = hash_distances(collection, places)
    pairs = np.stack(np.triu_indices(len(places), 1), axis=1)
    pairs = pairs[distances[pairs[:, 0], pairs[:, 1]] <= 16]
    return recalls(-distances[pairs[:, 0], pairs[:, 1]], pairs, planted_pairs(names), own)


def by_vectors(unit: torch.Tensor, near: Neighbors) -> np.ndarray:
    """The score of each image by its vector alone."""
    nothing = {name: np.full(len(unit), 0.5) for name in Looks.NUMBERS}
    return outliers(unit, near, nothing, np.ones(len(unit)), np.ones(len(unit))).score


def strangers(collection: Collection, unit: torch.Tensor, bccd: Path | None) -> dict[str, float]:
    """Average precision by vectors, for images that the encoder was not trained on. unit: of what belongs."""
    draw = np.random.default_rng(0)
    digits = load_digits(return_X_y=True)[0].reshape(-1, 8, 8)
    chosen = [digits[place] for place in draw.permutation(len(digits))[:NUM_OUTLIERS]]
    images = {"digits": [Image.fromarray((each * 15).astype(np.uint8)).convert("RGB") for each in chosen]}
    if bccd is not None:
        photos = [Image.open(path) for path in sorted((bccd / "JPEGImages").glob("*.jpg"))[:NUM_OUTLIERS]]
        corners = [draw.integers((each.width - 160, each.height - 160)).tolist() for each in photos]
        images["blood cells"] = [photo.crop((x, y, x + 160, y + 160)) for photo, (x, y) in zip(photos, corners)]
    found = {}
    for name, some in images.items():
        small = [image.resize((32, 32), Image.Resampling.BILINEAR) for image in some]
        together = torch.cat([encode(collection, small), unit])
        wanted = np.arange(len(together)) < len(small)
        found[name] = float(average_precision_score(wanted, by_vectors(together, nearest(together))))
    return found


def strange(collection: Collection, unit: torch.Tensor, places: np.ndarray, near: Neighbors) -> dict[str, float]:
    names = [collection.dataset.manifest.keys[int(i)] for i in collection.ids[places]]
    wanted = np.array([name.startswith(OUTLIERS + "/") for name in names])
    pixels = {name: collection.looks.column(name)[places] for name in Looks.NUMBERS}
    alike = np.ones(len(places))  # sizes do not count here
    return {
        "average_precision": float(average_precision_score(wanted, outliers(unit, near, pixels, alike, alike).score)),
        "average_precision_by_vectors_alone": float(average_precision_score(wanted, by_vectors(unit, near))),
        "chance": float(wanted.mean()),
    }


def same_class(collection: Collection, unit: torch.Tensor, places: np.ndarray) -> float:
    names = [collection.dataset.manifest.keys[int(i)].split("/")[0] for i in collection.ids[places]]
    labels = np.unique(names, return_inverse=True)[1]
    return float((labels[nearest(unit, 1).places[:, 0].numpy()] == labels).mean())


def planted(asked: argparse.Namespace) -> dict[str, Any]:
    results: dict[str, Any] = {}
    own = None
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
        copies = np.array([planted_kind(Path(name).stem) for name in names])
        is_outlier = np.array([name.startswith(OUTLIERS + "/") for name in names])
        unit = collection.vectors.unit
        originals, plain = np.flatnonzero(~copies), np.flatnonzero(~copies & ~is_outlier)
        without_outliers = np.flatnonzero(~is_outlier)
        left = [names[place] for place in without_outliers]
        own = copies_in_cifar10(asked.data, left) if own is None else own
        of_originals = unit[torch.from_numpy(originals)]
        results[kind] = {
            "same_class": same_class(collection, unit[torch.from_numpy(plain)], plain),
            "outliers": strange(collection, of_originals, originals, nearest(of_originals)),
            "near_duplicates": near_duplicates(collection, without_outliers, left, own),
        }
        if kind != "rows":
            results[kind]["outliers"]["never_seen"] = strangers(collection, unit[torch.from_numpy(plain)], asked.bccd)
        if kind == "features":
            results["imagehash, 64 bit"] = {"near_duplicates": by_hash(collection, without_outliers, left, own)}
        print(kind, json.dumps(results[kind], indent=1)[:1500], flush=True)
    return results


def planted_kind(stem: str) -> bool:
    return stem.rpartition("-")[2] in KINDS


def memory(asked: argparse.Namespace) -> dict[str, Any]:
    """Vectors of a few thousand kinds; the peak is that of the process, from when the vectors are there (Linux)."""
    kinds, unit = torch.randn(2000, asked.dim), torch.empty(asked.images, asked.dim)
    for part in unit.split(4096):
        part.copy_(F.normalize(torch.randn_like(part) + 2 * kinds[torch.randint(2000, (len(part),))]))
    return {"images": asked.images, "dim": asked.dim, **cost_of_neighbors(unit)}


def cost_of_neighbors(unit: torch.Tensor) -> dict[str, float]:
    nearest(unit[:5000])  # threads and their memory are there
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before, started = memory_status("VmRSS"), time.perf_counter()
    nearest(unit, progress=track)
    seconds = time.perf_counter() - started
    return {"seconds": seconds, "mib_beyond_vectors": (memory_status("VmHWM") - before) / 2**20}


def whole_map(asked: argparse.Namespace) -> dict[str, Any]:
    """Neighbors, places and clusters, beside faiss's exact search and openTSNE with its defaults on what it found."""
    import faiss
    from openTSNE import TSNE, affinity, initialization, nearest_neighbors

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
    known = nearest_neighbors.PrecomputedNeighbors(found[:, 1:], (1 - cosines[:, 1:]).astype(np.float64))
    affinities = affinity.PerplexityBasedNN(knn_index=known, n_jobs=threads)
    TSNE(n_jobs=threads, random_state=0).fit(affinities=affinities, initialization=initialization.pca(unit.numpy()))
    theirs = time.perf_counter() - started
    return {"images": asked.images, "ours": ours, "theirs": theirs, "ratio": ours / theirs, "parts": seconds}


def write_table() -> None:
    """What was measured last, between the marks of docs/explore.md."""
    numbers = json.loads((RESULTS / "collection_planted.json").read_text())["numbers"]
    lines = [
        "| by | copies: recall | with CIFAR-10's own as mistakes | outliers: average precision | by vectors alone |"
    ]
    lines += ["|---|---|---|---|---|"]
    for name, found in numbers.items():
        copies, strange = found["near_duplicates"], found.get("outliers", {})
        cells = [copies["recall_at_99_precision"], copies["recall_at_99_precision_all_counted"]]
        cells += [strange.get("average_precision"), strange.get("average_precision_by_vectors_alone")]
        lines.append(f"| {name} | {' | '.join('-' if cell is None else f'{cell:.3f}' for cell in cells)} |")
    page = Path(__file__).parent.parent / "docs" / "explore.md"
    write_between_marks(page, "collection", "\n".join(lines))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["planted", "neighbors", "places", "table"])
    parser.add_argument("--run", type=Path)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--bccd", type=Path)
    parser.add_argument("--images", type=int, default=50_000)
    parser.add_argument("--dim", type=int, default=128)
    given = parser.parse_args()
    if given.what == "table":
        raise SystemExit(write_table())
    measured = {"planted": planted, "neighbors": memory, "places": whole_map}[given.what](given)
    written = RESULTS / f"collection_{given.what}.json"
    environment = json.loads(describe_environment(torch.device("cpu")))
    written.write_text(json.dumps({"numbers": measured, "environment": environment}, indent=2) + "\n")
    print(f"written  {written}")
