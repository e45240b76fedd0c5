"""Open a collection: of a run, of any encoder with any data, or of features that somebody has."""

from dataclasses import replace

from millionway.collection.collection import Collection
from millionway.collection.sources import open_images, open_run
from millionway.data.readers import Progress
from millionway.evaluation.feature_cache import FeatureCache, default_folder
from millionway.evaluation.subject import open_subject
from millionway.machine import prepare
from millionway.settings.collection import Collected


def open_collection(asked: Collected, progress: Progress | None = None) -> Collection:
    """Nothing long happens here but the look at images that no run has listed."""
    run, features, data = asked.run, asked.features, asked.data
    if asked.vectors == "rows" and (run is None or features is not None):
        raise ValueError("--vectors rows are those of a run: give --run, a run folder")
    if run is None and asked.encoder is None and features is None:
        raise ValueError("give --run, a run folder; or --encoder with --data; or --features, a Parquet file")
    if features is not None and not features.is_file():
        raise ValueError(f"--features {features}: no such file")
    if run is None and features is None and data is None:
        raise ValueError("--data is missing: the images to look at")
    device, num_threads = prepare(asked.device, asked.threads)
    subject = None
    if run is not None or asked.encoder is not None:
        subject = open_subject(run, asked.encoder, asked.weights, asked.image_size, seed=0)
    fingerprint = ""
    if features is not None:
        dataset = open_images(data or str(features), asked.data_root, num_threads, progress)
    elif run is not None and run.is_dir():
        dataset, fingerprint = open_run(run, data, asked.data_root, num_threads, progress)
    elif data is not None:
        dataset = open_images(data, asked.data_root, num_threads, progress)
    else:
        raise ValueError("--data is missing: an encoder file names no images")
    return Collection(
        dataset,
        asked.vectors,
        device,
        num_threads,
        subject,
        run if fingerprint else None,
        features,
        own_order=data is None,
        list_fingerprint=fingerprint,
        cache=FeatureCache(default_folder()) if asked.cache else None,
        progress=progress,
    )


def open_others(collection: Collection, asked: Collected, data: str) -> Collection:
    """Other images by the same encoder."""
    if collection.subject is None or collection.kind != "features" or collection.features is not None:
        raise ValueError("--against needs an encoder for the other images: give --run or --encoder, with its features")
    dataset = open_images(data, asked.data_root, collection.num_threads, collection.progress)
    return replace(collection, dataset=dataset, run=None, list_fingerprint="")
