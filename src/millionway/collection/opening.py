"""Open a collection: of a run, of any encoder with any data, or of features that somebody has."""

from pathlib import Path

from millionway.collection.collection import Collection, Kind
from millionway.collection.images import open_images, open_run
from millionway.data.readers import Progress
from millionway.evaluation.feature_cache import FeatureCache, default_folder
from millionway.evaluation.subject import open_subject
from millionway.machine import choose_device, num_cores


def open_collection(
    run: Path | None = None,
    *,
    encoder: str | None = None,
    weights: str | None = None,
    image_size: int | None = None,
    features: Path | None = None,
    data: str | None = None,
    data_root: Path | None = None,
    vectors: Kind = "features",
    cache: bool = True,
    device: str = "auto",
    threads: int | None = None,
    progress: Progress | None = None,
) -> Collection:
    """Nothing long happens here but the look at images that no run has listed."""
    import torch

    num_threads = threads or num_cores()
    torch.set_num_threads(num_threads)
    chosen = choose_device(device)
    if vectors not in ("features", "rows"):
        raise ValueError(f"--vectors is features or rows, not {vectors}")
    if vectors == "rows" and (run is None or features is not None):
        raise ValueError("--vectors rows are those of a run: give --run, a run folder")
    if run is None and encoder is None and features is None:
        raise ValueError("give --run, a run folder; or --encoder with --data; or --features, a Parquet file")
    subject = None
    if run is not None or encoder is not None:
        subject = open_subject(run, encoder, weights, image_size, seed=0)
    if features is not None and not features.is_file():
        raise ValueError(f"--features {features}: no such file")
    fingerprint = ""
    if features is not None:
        dataset = open_images(data or str(features), data_root, num_threads, progress)
    elif run is not None and run.is_dir():
        dataset, fingerprint = open_run(run, data, data_root, num_threads, progress)
    elif data is not None:
        dataset = open_images(data, data_root, num_threads, progress)
    else:
        raise ValueError("--data is missing: the images to look at")
    return Collection(
        dataset,
        vectors,
        chosen,
        num_threads,
        subject,
        run if fingerprint else None,
        features,
        own_order=data is None,
        list_fingerprint=fingerprint,
        cache=FeatureCache(default_folder()) if cache else None,
        progress=progress,
    )
