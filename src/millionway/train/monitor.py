"""What a run measures of itself and writes down: steps, epochs, evaluations, the encoder file, neighbors."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from millionway import randomness
from millionway.console import track
from millionway.data.batches import view_batches
from millionway.data.dataset import Dataset, open_test
from millionway.data.stores import FileStore
from millionway.evaluation.features import Split, encode_views, extract, extract_split, labeled_split
from millionway.evaluation.health import health_of_rows, views_found
from millionway.evaluation.knn import knn
from millionway.evaluation.neighbor_samples import neighbors
from millionway.evaluation.results import write_result
from millionway.evaluation.snapshots import MAX_IMAGES, Snapshot, write_snapshot
from millionway.evaluation.thumbnails import picture_of, picture_of_view
from millionway.model.encoder import EncoderSpec
from millionway.model.encoder_file import encoder_path, save_encoder
from millionway.parallel.collectives import all_gather, all_or_none, on_first_rank
from millionway.parallel.group import Group
from millionway.parallel.sync_bn import average_statistics
from millionway.reporting.metrics import read_metrics
from millionway.reporting.verdict import FLAT, OF_FULL_VIEWS, SMALL_VIEWS, verdict
from millionway.reporting.words import duration
from millionway.settings.pretrain import Pretrain
from millionway.train.clock import MUCH
from millionway.train.first_weights import take_weights
from millionway.train.given import Given, keep
from millionway.train.guard import NUMBER, judge
from millionway.train.metrics_file import Metrics, peak_memory_bytes
from millionway.train.setup import own_cores
from millionway.train.sizes import Sizes
from millionway.train.state import State

log = logging.getLogger("millionway")

HEALTH_INSTANCES = 1024
NUM_SAMPLES = 8
TIMED_STEPS = 10  # after so many it is known about how long a run will take


def labeled_images(config: Pretrain, dataset: Dataset) -> Split | None:
    """Those that k-NN is scored with; None if there are no labels or nobody wants them."""
    if config.images.labels == "none":
        return None
    images = config.images
    test = open_test(
        config.data,
        images.test_data,
        images.data_root,
        num_threads=config.running.threads or 1,
        max_unreadable=images.max_unreadable,
        progress=track,
    )
    split = labeled_split(dataset, test, config.training.seed, config.running.eval_images)
    if split is not None and not config.resume:
        num_names = len(split.label_names)
        log.info("labels found (%d names): k-NN is scored with them, training does not see them", num_names)
    return split


@dataclass
class Monitor:
    config: Pretrain
    run: Path
    dataset: Dataset
    device: torch.device
    state: State
    spec: EncoderSpec
    group: Group
    steps_per_epoch: int
    sizes: Sizes
    split: Split | None
    """labeled images, on the first rank and if there are any"""
    metrics: Metrics | None
    """on the first rank"""
    is_flat: bool = False
    """whether the last verdict was that it no longer improves; known on the first rank"""
    is_worse: bool = False
    """whether the last evaluation was worse than the start, by the guard; known on the first rank"""
    given: Given | None = None
    """the weights it began with, if they count for what leaves the run"""
    has_said: bool = False
    """how long it will take"""

    # --- steps and epochs ---------------------------------------------------------------------------------------------

    def start_timing(self) -> None:
        """Steps from here on count for the next speed."""
        self.last_time, self.last_step = time.monotonic(), self.state.step

    def start(self) -> None:
        """The first step of this process is next."""
        self.start_timing()
        self.began, self.first_step = self.last_time, self.last_step

    @property
    def seconds_left(self) -> float:
        """By the steps of this process so far, evaluations included."""
        now, work = self.state.step, self.sizes.work
        left = work(self.config.training.epochs * self.steps_per_epoch) - work(now)
        return (time.monotonic() - self.began) / (work(now) - work(self.first_step) or 1) * left

    def log_step(self, loss: float, num_ahead: Tensor, lr: float) -> tuple[float, float]:
        """(top-1 of the batch, images per second), also written to the metrics."""
        assert self.config.training.batch_size
        top1 = float((all_gather(self.group, num_ahead) < 1).float().mean())
        seconds = max(time.monotonic() - self.last_time, 1e-9)
        speed = (self.state.step - self.last_step) * self.config.training.batch_size / seconds
        self.start_timing()
        if self.last_step - self.first_step >= TIMED_STEPS and not self.has_said:
            epochs = self.config.training.epochs - self.first_step // self.steps_per_epoch
            log.info("%d epochs take about %s", epochs, duration(self.seconds_left + self.last_time - self.began))
            self.has_said = True
        if self.metrics is not None:
            self.metrics.write(
                "step",
                self.state.step,
                self.state.step / self.steps_per_epoch,
                loss=loss,
                batch_top1=top1,
                lr=lr,
                images_per_second=round(speed, 1),
                num_images=len(self.dataset.instance_ids),
                peak_memory_bytes=peak_memory_bytes(self.device),
            )
        return top1, speed

    def log_epoch(self, loss: float, seconds: float, hardest_seconds: float, shares: dict[str, float]) -> None:
        """seconds: of the steps this process has taken, from the search for hardest classes to the last one."""
        epoch = self.state.step // self.steps_per_epoch
        name = f"epoch {epoch}/{self.config.training.epochs}"
        left = f", about {duration(self.seconds_left)} left" if epoch < self.config.training.epochs else ""
        log.info("%s: loss %.3f, %s%s", name, loss, duration(seconds), left)
        if self.config.running.verbose:
            parts = ", ".join(f"{part} {share:.0%}" for part, share in shares.items())
            log.info("%s: a step is %s; hardest classes %.1f %%", name, parts, 100 * hardest_seconds / seconds)
        if shares.get("data", 0) > MUCH:
            log.info("%s: %s", name, self._advice())
        if self.metrics is not None:
            numbers = {"seconds": seconds, "hardest_seconds": hardest_seconds}
            numbers |= {f"{part}_share": share for part, share in shares.items()}
            self.metrics.write("epoch", self.state.step, epoch, **numbers)

    def _advice(self) -> str:
        """What to change when the encoder waits for images."""
        running = self.config.running
        remedies = ["a smaller --image-size"]
        if isinstance(self.dataset.store, FileStore) and not self.config.images.cache:
            remedies.insert(0, "--cache (decodes every image once and keeps it)")
        if running.threads is not None and running.threads < own_cores():
            remedies.insert(0, f"--threads {own_cores()}")
        return f"the encoder waits for images; what helps: {', '.join(remedies)}, or a larger encoder at no cost"

    # --- evaluations --------------------------------------------------------------------------------------------------

    def evaluate(self, more: dict[str, float] | None = None) -> None:
        """Label-free health always, k-NN where there are labels and it is time; the encoder file is renewed."""
        average_statistics(self.state.network.learning, self.group)
        epoch = self.state.step // self.steps_per_epoch
        numbers = dict(self._health(epoch))
        with self._as_it_leaves():
            numbers |= {**dict(self._views_found()), **(more or {})}
            all_or_none(self.group, lambda: self._write_evaluation(epoch, numbers))
        self.start_timing()

    @contextmanager
    def _as_it_leaves(self) -> Iterator[None]:
        """The encoder is what encoder.safetensors has."""
        if self.given is None:
            yield
            return
        with self.given.mean_with(self.state.network.encoder):
            yield

    def remember_start(self) -> None:
        """For a run that is gone on with."""
        encoder, share = self.state.network.encoder, self.config.training.given_share
        if share:
            self.given = all_or_none(self.group, lambda: Given.read(self.run, encoder, share))

    def _write_evaluation(self, epoch: int, numbers: dict[str, float]) -> None:
        """By the first rank; the others wait."""
        if self.metrics is None:
            return
        running, epochs = self.config.running, self.config.training.epochs
        numbers = {"num_images": len(self.dataset.instance_ids), **numbers}
        lines = [*read_metrics(self.metrics.path), {"kind": "evaluation", "epoch": epoch, **numbers}]
        judgment = judge(lines, min(HEALTH_INSTANCES, len(self.dataset.instance_ids)))
        said = verdict(lines, epochs)
        self.is_worse, self.is_flat = judgment.is_worse, said.word == FLAT
        ends = self.is_worse or (self.is_flat and running.stop_when_flat)
        if ends or running.has_knn(epoch, epochs):
            numbers |= dict(self.knn())
        self.metrics.write("evaluation", self.state.step, epoch, **numbers)
        if judgment.is_kept:
            self._save_encoder()
        self._write_snapshot(epoch)
        shown = [f"k-NN {numbers['knn_200']:.1%}"] if "knn_200" in numbers else []
        shown.append(f"instance top-1 {numbers['instance_top1']:.1%}")
        shown.append(f"effective rank {numbers['effective_rank']:.1f}")
        log.info("epoch %d/%d: %s", epoch, epochs, ", ".join(shown))
        if epoch:
            log.info("epoch %d/%d: %s", epoch, epochs, said)
        if not judgment.is_kept:
            log.info("epoch %d/%d: encoder.safetensors stays as it was (%s)", epoch, epochs, judgment)
        if judgment.is_worse:
            log.info("worse than the weights it began with, so it ends here; try a lower --lr, or more images")

    def first_numbers(self) -> dict[str, float]:
        """Of the encoder before anything has changed it, the statistics of its BN included."""
        if self.config.training.given_share:
            self.given = Given.of(self.state.network.encoder, self.config.training.given_share)
            on_first_rank(self.group, lambda: keep(self.state.network.encoder, self.run))
        numbers = {**dict(self.knn()), **dict(self._views_found())}
        if NUMBER in numbers and self.group.is_first:  # it may come to be what is kept
            self._save_encoder()
        return {f"{'random' if self.config.init_from is None else 'start'}_{k}": v for k, v in numbers.items()}

    def _save_encoder(self) -> None:
        save_encoder(self.state.network.encoder, encoder_path(self.run), step=str(self.state.step))

    @torch.no_grad()
    def _views_found(self) -> Iterator[tuple[str, float]]:
        """For the guard: two views of up to 1,024 instances, always the same ones."""
        if self.config.init_from is None or not self.config.running.guard:
            return
        ids = self._some("health", HEALTH_INSTANCES)
        ids = self.group.own_part(ids[: len(ids) // self.group.size * self.group.size])
        keys = [randomness.key_of(self.config.training.seed, "guard", view) for view in (0, 1)]
        views, _ = encode_views(
            self.state.network.encoder, self.dataset, ids, keys, self.device, self.config.augmentation.of_a_view
        )
        yield NUMBER, views_found(*(all_gather(self.group, each.to(self.device)) for each in views))

    def knn(self) -> Iterator[tuple[str, float]]:
        """Nothing where there are no labels."""
        if self.split is None:
            return
        yield from knn(*extract_split(self.state.network.encoder, self.split, self.spec.image_size, self.device))

    def _health(self, epoch: int) -> Iterator[tuple[str, float]]:
        """On fresh views of up to 1,024 instances, the same at each evaluation, of the side that is trained with.

        The first evaluation has numbers of both sides, for later ones to be compared with.
        """
        size = self.sizes.before(self.state.step)
        yield from self._health_of_views(epoch, size)
        if size < self.sizes.full:
            yield SMALL_VIEWS, 1.0
            if epoch == 0:
                for name, value in self._health_of_views(epoch, self.sizes.full):
                    yield OF_FULL_VIEWS + name, value

    @torch.no_grad()
    def _health_of_views(self, epoch: int, size: int) -> Iterator[tuple[str, float]]:
        network, seed = self.state.network, self.config.training.seed
        ids = self._some("health", HEALTH_INSTANCES)
        ids = self.group.own_part(ids[: len(ids) // self.group.size * self.group.size])
        keys = [randomness.key_of(seed, "health", epoch)]
        views_of = self.config.augmentation.of_a_view
        (features,), read_ids = encode_views(network.encoder, self.dataset, ids, keys, self.device, views_of, size)
        features, read_ids = features.to(self.device), read_ids.to(self.device)
        network.eval()
        embeddings = network.head(features).float()
        network.train()
        yield from health_of_rows(self.state.classifier, features, embeddings, read_ids)

    def _write_snapshot(self, epoch: int) -> None:
        """For the explorer: features of the same few images at each evaluation."""
        some = self._some("snapshot", MAX_IMAGES).sort().values
        features, ids = extract(self.state.network.encoder, self.dataset, some, self.spec.image_size, self.device)
        write_snapshot(self.run, epoch, Snapshot(ids, features))

    def write_neighbors(self) -> None:
        """For the report: some images and what the encoder finds alike."""
        seed, started = self.config.training.seed, time.monotonic()
        if self.config.init_from is not None:  # the guard may have kept an earlier one
            take_weights(self.state.network.encoder, encoder_path(self.run))
        some = self._some("neighbors", self.config.running.eval_images)
        features, ids = extract(self.state.network.encoder, self.dataset, some, self.spec.image_size, self.device)
        labels = None if self.config.images.labels == "none" else self.dataset.labels
        rows = neighbors(self.dataset, ids, features, labels)
        summary, seconds = {"numbers": {"rows": rows}}, time.monotonic() - started
        write_result(self.run / "evaluation", "neighbors", summary, {}, [seed], seconds)

    def write_samples(self) -> None:
        """For the report: some images and two random views of each, as training sees them."""
        seed, started = self.config.training.seed, time.monotonic()
        ids = self._some("samples", NUM_SAMPLES)
        keys = [randomness.key_of(seed, "samples", view) for view in (0, 1)]
        made = view_batches(
            self.dataset.store, [(keys, ids)], self.spec.image_size, self.device, **self.config.augmentation.of_a_view
        )
        views, read_ids = next(iter(made))
        rows = []
        for place, instance_id in enumerate(read_ids[: len(ids)].tolist()):
            image = picture_of(self.dataset, instance_id)
            if image is not None:
                rows.append([image, *(picture_of_view(view, image["key"]) for view in views[place :: len(ids)])])
        summary, seconds = {"numbers": {"rows": rows}}, time.monotonic() - started
        write_result(self.run / "evaluation", "samples", summary, {}, [seed], seconds)

    def _some(self, purpose: str, at_most: int | None) -> Tensor:
        """Ids of some instances, the same whenever they are asked for."""
        ids = self.dataset.instance_ids
        order = torch.randperm(len(ids), generator=randomness.generator(self.config.training.seed, purpose))
        return ids[order[:at_most]]

    @property
    def num_lines(self) -> int:
        """Of metrics.jsonl, on the first rank."""
        return 0 if self.metrics is None else self.metrics.num_lines

    def sync(self) -> None:
        """Everything written is on the disk."""
        if self.metrics is not None:
            self.metrics.sync()

    def close(self) -> None:
        if self.metrics is not None:
            self.metrics.close()
        if self.split is not None:
            self.split.queries.dataset.store.close()
