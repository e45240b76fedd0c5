"""Groups of images that lie together on the map: HDBSCAN on the neighbors of every place, so that it takes no longer
than those. An image between the groups belongs to none."""

from typing import Any

import numpy as np
from jaxtyping import Float, Int, Shaped
from scipy.sparse import coo_array, csr_matrix
from scipy.sparse.csgraph import connected_components
from scipy.spatial import KDTree
from sklearn.cluster import HDBSCAN
from sklearn.metrics import adjusted_mutual_info_score

NUM_NEAR = 15
SMALLEST = 10
SHARE = 0.005  # of the images that makes a cluster


def clusters(places: Float[np.ndarray, "images 2"]) -> Int[np.ndarray, " images"]:
    """[images] numbers from 0, the largest cluster first; -1 for images in none."""
    num = len(places)
    smallest = max(SMALLEST, round(SHARE * num))
    if num <= smallest:
        return np.zeros(num, np.int32) if num else np.zeros(0, np.int32)
    near = min(NUM_NEAR, num - 1)
    tree = KDTree(places)
    distances, others = tree.query(places, near + 1)
    rows = np.repeat(np.arange(num), near + 1)
    distances = np.maximum(distances.ravel(), 1e-9)  # a stored zero would count as no edge
    graph = coo_array((distances, (rows, others.ravel())), (num, num)).tocsr()
    graph = _connected(csr_matrix(graph.maximum(graph.T)), places)
    how: dict[str, Any] = {"metric": "precomputed", "copy": True}
    return _by_size(HDBSCAN(smallest, near, **how).fit_predict(graph))


def _connected(graph: csr_matrix, places: np.ndarray) -> csr_matrix:
    """With an edge between the first images of the parts that none connects, as HDBSCAN asks for."""
    num, part = connected_components(graph, directed=False)
    if num == 1:
        return graph
    firsts = np.unique(part, return_index=True)[1]
    length = float(np.ptp(places, axis=0).sum()) + 1.0
    extra = coo_array((np.full(num - 1, length), (firsts[:-1], firsts[1:])), graph.shape)
    return csr_matrix(graph + extra + extra.T)


def _by_size(found: np.ndarray) -> np.ndarray:
    names, counts = np.unique(found[found >= 0], return_counts=True)
    number_of = np.full(len(names) + 1, -1, np.int32)  # the last one is for -1
    number_of[names[np.lexsort((names, -counts))]] = np.arange(len(names))
    return number_of[found]


def central(clusters: Int[np.ndarray, " images"], unit: Shaped[np.ndarray, "images dim"], num: int) -> list[list[int]]:
    """Of each cluster, the places of the images that are most like its mean."""
    found = []
    for number in range(int(clusters.max(initial=-1)) + 1):
        members = np.flatnonzero(clusters == number)
        cosines = unit[members] @ unit[members].mean(axis=0)
        found.append(members[np.argsort(-cosines, kind="stable")[:num]].tolist())
    return found


def agreement(clusters: Int[np.ndarray, " images"], labels: Int[np.ndarray, " images"]) -> float:
    """Adjusted mutual information of clusters and labels, over the images that have both; 0 by chance, 1 if alike."""
    both = (clusters >= 0) & (labels >= 0)
    return float(adjusted_mutual_info_score(labels[both], clusters[both])) if both.any() else 0.0
