"""A place on the map for every image: t-SNE by openTSNE on the exact neighbors; without it, principal components."""

import logging
from importlib.util import find_spec

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from millionway.collection.neighbors import Neighbors

log = logging.getLogger("millionway")

NUM_NEAR = 15  # equal weights for so many neighbors do what a perplexity does, for less


def method() -> str:
    return "t-SNE" if find_spec("openTSNE") else "principal components"


def places(
    unit: Float[Tensor, "images dim"],
    near: Neighbors,
    num_threads: int,
    start: Float[np.ndarray, "images 2"] | None = None,
) -> Float[np.ndarray, "images 2"]:
    """From -1 to 1. start: where the images were, so that they move no further than they must."""
    num = len(unit)
    if num < 4 or _all_alike(near):
        return _scaled(_grid(num))
    flat = principal(unit)
    if method() != "t-SNE":
        log.info("the map shows two principal components; for one by neighbors: pip install 'millionway[map]'")
        return _scaled(flat)
    return _scaled(_tsne(near, flat if start is None else start, num_threads, 250 if start is None else 0))


def _tsne(near: Neighbors, start: np.ndarray, num_threads: int, early: int) -> np.ndarray:
    from openTSNE import TSNE
    from openTSNE.affinity import Uniform
    from openTSNE.nearest_neighbors import PrecomputedNeighbors

    k = min(NUM_NEAR, near.places.shape[1])
    index = PrecomputedNeighbors(
        near.places[:, :k].cpu().numpy().astype(np.int64), 1 - near.cosines[:, :k].cpu().numpy().astype(np.float64)
    )
    affinities = Uniform(knn_index=index, k_neighbors=k, n_jobs=num_threads)
    spread = start / max(1e-12, float(start.std(axis=0).max())) * 1e-4
    embedding = TSNE(
        early_exaggeration_iter=early, n_iter=500 if early else 250, n_jobs=num_threads, random_state=0
    ).fit(affinities=affinities, initialization=spread if early else start * 50)
    return np.asarray(embedding)


def principal(unit: Float[Tensor, "images dim"]) -> Float[np.ndarray, "images 2"]:
    """The two directions in which the vectors differ most."""
    centered = unit.double().cpu() - unit.double().cpu().mean(dim=0)
    covariance = centered.T @ centered
    directions = torch.linalg.eigh(covariance).eigenvectors[:, -2:].flip(1)
    if directions.shape[1] < 2:
        directions = torch.cat([directions, torch.zeros_like(directions)], dim=1)
    # An eigenvector has no sign of its own: its largest number is positive.
    largest = directions.gather(0, directions.abs().argmax(dim=0, keepdim=True))
    return (centered @ (directions * torch.where(largest < 0, -1.0, 1.0))).numpy()


def _all_alike(near: Neighbors) -> bool:
    return near.cosines.numel() == 0 or bool(near.cosines.min() > 1 - 1e-6)


def _grid(num: int) -> np.ndarray:
    """Images that cannot be told apart stand in rows."""
    side = max(1, int(np.ceil(np.sqrt(num))))
    return np.stack([np.arange(num) % side, -(np.arange(num) // side)], axis=1).astype(np.float64)


def _scaled(flat: np.ndarray) -> np.ndarray:
    middle = (flat.max(axis=0) + flat.min(axis=0)) / 2 if len(flat) else np.zeros(2)
    largest = np.abs(flat - middle).max(initial=0)
    return ((flat - middle) / (largest or 1.0)).astype(np.float32)
