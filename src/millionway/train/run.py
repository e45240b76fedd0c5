"""A run, top to bottom: images in, run folder out."""

import logging
import re
import shlex
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

from millionway import randomness
from millionway.console import Interrupt, bar, be_quiet, messages, track
from millionway.data.batches import plain_batches, view_batches
from millionway.data.dataset import Dataset
from millionway.data.kinds.choose import open_source
from millionway.data.packed import pack
from millionway.data.readers import ReaderKilled
from millionway.data.sampler import Sampler
from millionway.data.stores import FileStore, TooManyUnreadable
from millionway.machine import choose_device
from millionway.model.classifier import NotFiniteError
from millionway.model.encoder import EncoderSpec, full_name
from millionway.model.prior import PriorProgress, has_running_statistics, write_prior
from millionway.parallel.collectives import all_or_none, any_rank, on_first_rank
from millionway.parallel.group import Group, leave
from millionway.parallel.heartbeat import Heartbeat
from millionway.parallel.launcher import local_rank
from millionway.parallel.sync_bn import average_statistics
from millionway.settings import pretrain as settings
from millionway.settings.pretrain import Pretrain
from millionway.train import checkpoint
from millionway.train.changes import (
    CHANGED,
    MANIFEST,
    Before,
    accept_change,
    changed_images,
    take_state,
    write_new_rows,
)
from millionway.train.clock import Clock
from millionway.train.metrics import Metrics
from millionway.train.monitor import Monitor, labeled_images
from millionway.train.schedule import learning_rate
from millionway.train.setup import (
    build,
    check_early,
    check_test_data,
    compare_settings,
    new_run_folder,
    open_images,
    own_cores,
    remember_places,
    resolve,
    sole_user,
    take_weights,
    write_run_files,
)
from millionway.train.state import State
from millionway.train.step import StepResult, train_step

log = logging.getLogger("millionway")

PRIOR_SAVE_SECONDS = 300
SETUP_SECONDS = 30 * 86_400.0


class RunStopped(RuntimeError):
    """The run ended before its last step. The message says why and how to go on."""


class Interrupted(RunStopped):
    """The user asked for it; all is saved."""


def pretrain(config: Pretrain) -> Path:
    """Pretrain an encoder and return the run folder. With `resume`, go on from its newest checkpoint.

    Started by torchrun, all its processes train together: the first one indexes the images and writes the run folder.
    """
    settings.check(config)
    group = Group.current(config.running.timeout)
    run = Path(config.out)
    if not group.is_first:
        be_quiet()
    with ExitStack() as stack:
        stack.callback(leave)
        compare_settings(group, config)
        patient = group.beside(SETUP_SECONDS)  # to read all images takes one rank hours, if they are many

        def enter() -> None:
            if not config.resume:
                stack.enter_context(new_run_folder(run))
            stack.enter_context(sole_user(run))

        on_first_rank(group, enter)
        stack.enter_context(messages(run / "train.log" if group.is_first else None))
        torch.set_num_threads(config.running.threads or own_cores())
        device = all_or_none(group, lambda: choose_device(config.running.device, local_rank()))
        if config.model.encoder is not None:
            config = settings.with_settings(config, encoder=full_name(config.model.encoder))
        if config.data_changed and not config.resume:
            raise ValueError("--data-changed is for --resume: a new run takes the images as they are")
        before = changed_images(config, patient, run) if config.resume else None
        dataset = _open_images(config, device, patient, run / (CHANGED if before else MANIFEST))
        resolved = resolve(config, dataset, device, group)
        if resolved.images.cache and isinstance(dataset.store, FileStore):
            dataset = all_or_none(patient, lambda: _packed(dataset, resolved))
        state, spec = build(resolved, dataset, device, group, before and before.num_instances)
        if config.resume:
            on_first_rank(group, lambda: remember_places(run, resolved))
        else:
            on_first_rank(group, lambda: write_run_files(run, config, resolved, dataset, device))
        return _Run(resolved, run, dataset, device, state, spec, group, before).go()


def _open_images(config: Pretrain, device: torch.device, group: Group, manifest: Path) -> Dataset:
    """The first rank numbers the images; the others open theirs by its list, which says if they are not the same."""

    def open_by(path: Path | None) -> Dataset:
        try:
            source = open_source(config.data, config.images.data_root, max_images=config.images.max_images)
        except ValueError as error:
            hint = " If the images have moved, add --data and their new place." if config.resume else ""
            raise ValueError(f"{error}{hint}") from None
        if not config.resume:
            check_early(config, len(source), device, group)
            check_test_data(config, source)
        return open_images(config, source, path)

    def first() -> Dataset:
        dataset = open_by(manifest if config.resume else config.images.manifest)
        if not config.resume:
            dataset.manifest.save(manifest)
        return dataset

    def another() -> Dataset:
        if not manifest.exists():
            raise ValueError(f"{manifest} is not there: all machines must see the same folder as --out")
        return open_by(manifest)

    dataset = on_first_rank(group, first)
    return all_or_none(group, lambda: dataset or another())


def _packed(dataset: Dataset, config: Pretrain) -> Dataset:
    """The images from a file of decoded ones, which is made now if it is not there."""
    assert config.images.image_size is not None
    dataset.store.close()
    store = pack(dataset.source, dataset.manifest, config.images.image_size, torch.get_num_threads(), track)
    return replace(dataset, store=store)


def _first_line(error: Exception) -> str:
    return (str(error) or repr(error)).splitlines()[0]


@dataclass
class _Run:
    config: Pretrain
    run: Path
    dataset: Dataset
    device: torch.device
    state: State
    spec: EncoderSpec
    group: Group
    before: Before | None = None
    """the images as they were when the run stopped, if they have changed since"""

    def go(self) -> Path:
        training = self.config.training
        assert training.batch_size and training.lr is not None and training.warmup_epochs is not None
        self.sampler = Sampler(self.dataset.instance_ids, training.batch_size, training.seed)
        self.steps_per_epoch = self.sampler.steps_per_epoch
        self.num_steps = training.epochs * self.steps_per_epoch
        self.num_warmup_steps = training.warmup_epochs * self.steps_per_epoch
        self.fingerprint = self.dataset.manifest.fingerprint
        self.checkpoints = self.run / "checkpoints"
        self.lr = training.lr
        split = on_first_rank(self.group, lambda: labeled_images(self.config, self.dataset))

        known = self.fingerprint if self.before is None else self.before.fingerprint
        resumed = self.config.resume and checkpoint.load_newest(self.checkpoints, self.state, known)
        if self.config.resume and not resumed:
            log.info("no complete checkpoint in %s: beginning at step 0", self.checkpoints)
        if self.before is not None:
            self._take_over(self.before, bool(resumed))
        begun = resumed and self.state.prior is None
        step = self.state.step if begun else -1
        metrics = Metrics(self.run, (step, step / self.steps_per_epoch)) if self.group.is_first else None
        self.monitor = Monitor(
            config=self.config,
            run=self.run,
            dataset=self.dataset,
            device=self.device,
            state=self.state,
            spec=self.spec,
            group=self.group,
            steps_per_epoch=self.steps_per_epoch,
            split=split,
            metrics=metrics,
        )
        running = self.config.running
        self.saver = checkpoint.Saver(self.checkpoints, self.fingerprint, running.keep, self.group, running.timeout)
        self.heartbeat = Heartbeat(self.group, running.timeout)
        with Interrupt() as self.interrupt:
            try:
                if not resumed:
                    on_first_rank(self.group, self.monitor.write_samples)
                    if self.config.resume and self.config.init_from is not None:
                        take_weights(self.state.network.encoder, self.config.init_from)
                    untrained = {f"random_{name}": value for name, value in self.monitor.knn()}
                    self.state.prior = PriorProgress(untrained=untrained)
                if self.state.prior is not None:
                    self._write_prior(self.state.prior)
                    self.monitor.evaluate(self.state.prior.untrained)
                    self.state.prior = None
                    self._save()
                self._train()
                self.saver.wait()
                on_first_rank(self.group, self.monitor.write_neighbors)
            except TooManyUnreadable as error:
                raise RunStopped(f"{error}. Repair that, then: {self._resume_command()}") from None
            except ReaderKilled as error:
                raise RunStopped(f"{error} Go on with: {self._resume_command()}") from None
            except NotFiniteError as error:
                raise RunStopped(self._diverged(str(error))) from None
            except torch.OutOfMemoryError as error:
                raise RunStopped(self._no_memory(error)) from error
            except (OSError, RuntimeError, SafetensorError) as error:
                if checkpoint.is_full_disk(error):
                    raise RunStopped(self._no_space()) from None
                is_own = isinstance(error, RunStopped) or getattr(error, "filename", None)
                if self.group.size > 1 and not is_own:
                    raise RunStopped(self._lost_contact(error)) from error
                raise
            finally:
                self.saver.close()
                self.heartbeat.close()
                self.monitor.close()
                self.dataset.store.close()
        log.info("done: %s", self.run / "encoder.safetensors")
        return self.run

    def _write_prior(self, progress: PriorProgress) -> None:
        prior, batch_size = self.config.classifier, self.sampler.batch_size
        if not has_running_statistics(self.state.network):
            log.info("no batch normalization here: the prior has no running statistics, so its three kinds are one")
        left = self.sampler.pass_over_all()[progress.batches :]  # full batches, because of BN
        ids = torch.cat([self.group.own_part(batch) for batch in left])
        own_size = batch_size // self.group.size
        batches = plain_batches(self.dataset.store, ids, self.spec.image_size, own_size, self.device)
        norm = write_prior(
            prior.prior,
            self.state.network,
            self.state.classifier,
            self._saving(track(batches, len(left), "contrastive prior")),
            prior.row_norm,
            progress,
        )
        log.info("rows written (%s), mean length %.3g", prior.prior, norm)

    def _take_over(self, before: Before, resumed: bool) -> None:
        """Rows and momentum of images that stayed, the prior for those that came; from the start of the epoch."""
        if not resumed or self.state.prior is not None:
            raise ValueError("--data-changed needs a checkpoint after the first step; the run has none yet")
        old, batch_size = self.state, self.sampler.batch_size
        epoch = old.step // before.steps_per_epoch(batch_size)
        if epoch >= self.config.training.epochs:
            raise ValueError("--data-changed: the run is finished. Start a new one; --init-from takes its encoder.")
        self.state, _ = build(self.config, self.dataset, self.device, self.group)
        take_state(self.state, old)
        self.state.step = self.state.classifier.step = epoch * self.steps_per_epoch
        write_new_rows(self.state, self.dataset, before.new_ids, self.spec.image_size, batch_size)
        if self.state.hardest is not None:
            self.state.hardest = self.state.classifier.hardest(self.state.hardest.shape[1])
        # The checkpoint and the list belong together: an interruption between them is repaired by the next start.
        checkpoint.save(self.checkpoints, self.state, self.fingerprint, self.config.running.keep)
        on_first_rank(self.group, lambda: accept_change(self.run))
        log.info("the images changed (%s); going on with epoch %d", before.words, epoch + 1)

    def _saving(self, batches: Iterable[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches of the prior's pass. From time to time, and when interrupted, what is done so far is saved."""
        last = time.monotonic()
        for batch in batches:
            due = self.interrupt.asked or time.monotonic() - last > PRIOR_SAVE_SECONDS
            if any_rank(self.group, due):
                self._save()
                last = time.monotonic()
                if any_rank(self.group, self.interrupt.asked):
                    self.saver.wait()
                    raise Interrupted(f"stopped before the first step; go on with: {self._resume_command()}")
            yield batch

    def _train(self) -> None:
        state, running = self.state, self.config.running
        save_every = running.save_every or self.steps_per_epoch
        self.network = self.group.data_parallel(state.network)
        self.monitor.start_timing()
        self.epoch_began, self.hardest_seconds = time.monotonic(), 0.0
        self.clock = Clock(self.device)
        self.clock.start(self._is_logged(state.step + 1))
        columns = ("steps  loss {task.fields[loss]}", "top-1 {task.fields[top1]}", "{task.fields[speed]} images/s")
        with bar(*columns) as progress:
            task = progress.add_task(
                "pretraining", total=self.num_steps, completed=state.step, loss="–", top1="–", speed="–"
            )
            try:
                for views, instance_ids in self._batches(state.step):
                    self.clock.lap("data")
                    result = self._step(views, instance_ids)
                    is_last = state.step == self.num_steps
                    # Ranks stop together, and ask each other only where a line is logged.
                    may_stop = self.group.size == 1 or result.num_ahead is not None
                    trouble = self.dataset.store.trouble
                    stopping = may_stop and any_rank(self.group, self.interrupt.asked or bool(trouble))
                    if result.num_ahead is not None:
                        loss = float(result.loss)
                        top1, speed = self.monitor.log_step(loss, result.num_ahead, self.lr)
                        progress.update(task, loss=f"{loss:.3f}", top1=f"{top1:.1%}", speed=f"{speed:,.0f}")
                    progress.update(task, completed=state.step)
                    epoch, rest = divmod(state.step, self.steps_per_epoch)
                    if rest == 0:
                        seconds = time.monotonic() - self.epoch_began
                        self.monitor.log_epoch(float(result.loss), seconds, self.hardest_seconds, self.clock.shares())
                    if rest == 0 and (epoch % (running.eval_every or 1) == 0 or is_last):
                        self.monitor.evaluate()
                    if state.step % save_every == 0 or is_last or stopping:
                        self._save()
                    if rest == 0:
                        self.epoch_began, self.hardest_seconds = time.monotonic(), 0.0
                    self.clock.start(self._is_logged(state.step + 1))
                    if stopping and not is_last:
                        self.saver.wait()
                        if any_rank(self.group, bool(trouble)):
                            raise TooManyUnreadable(trouble or "another process could not read its images")
                        raise Interrupted(f"stopped after step {state.step}; go on with: {self._resume_command()}")
            except TooManyUnreadable:
                if self.group.size == 1:  # the others do not know of it
                    self._save()
                    self.saver.wait()
                raise

    def _batches(self, first_step: int) -> Iterator[tuple[Tensor, Tensor]]:
        steps = range(first_step, self.num_steps)
        keys_and_ids = ((self._view_keys(step), self.group.own_part(self.sampler.batch(step))) for step in steps)
        return view_batches(
            self.dataset.store, keys_and_ids, self.spec.image_size, self.device, **self.config.views.augmentation
        )

    def _view_keys(self, step: int) -> list[int]:
        seed, epoch = self.config.training.seed, step // self.steps_per_epoch
        return [randomness.key_of(seed, "view", epoch, view) for view in range(self.config.views.num_views)]

    def _step(self, views: Tensor, instance_ids: Tensor) -> StepResult:
        state, training, method = self.state, self.config.training, self.config.classifier
        if state.hardest is not None and state.step % self.steps_per_epoch == 0:
            earlier, started = state.hardest if state.step else None, time.monotonic()
            state.hardest = state.classifier.hardest(state.hardest.shape[1], earlier)
            self.hardest_seconds = time.monotonic() - started
            self.clock.lap("hardest")
        self.heartbeat.step = state.step + 1
        seed = randomness.key_of(training.seed, "step", state.step, self.group.rank)
        torch.manual_seed(seed >> 1)  # for encoders with dropout
        assert training.lr is not None
        self.lr = learning_rate(state.step, self.num_steps, self.num_warmup_steps, training.lr)
        result = train_step(
            self.network,
            state.classifier,
            state.optimizer,
            views,
            instance_ids,
            state.hardest,
            alpha=method.smoothing,
            lr=self.lr,
            row_lr=self.lr * method.row_lr,
            momentum=training.momentum,
            weight_decay=training.weight_decay,
            with_num_ahead=self._is_logged(state.step + 1),
            views_at_once=training.micro_batch and training.micro_batch * self.config.views.num_views,
            clock=self.clock,
        )
        if not bool(torch.isfinite(result.loss)):
            raise NotFiniteError("the loss is not finite (NaN)")
        state.step += 1
        return result

    def _is_logged(self, number: int) -> bool:
        """Whether numbers of this step, the first being 1, are written and its time is measured."""
        return number == 1 or number % self.config.running.log_every == 0 or number % self.steps_per_epoch == 0

    def _diverged(self, what: str) -> str:
        if self.state.prior is not None:
            return f"{what} before the first step. Look at --init-from, --mean and --std."
        with suppress(Exception):  # this is what matters now
            self.saver.wait()
        good = next((each for each in checkpoint.complete(self.checkpoints) if not checkpoint.damage(each)), None)
        kept = f"The last good checkpoint is {good}" if good else "There is no checkpoint yet"
        step = self.heartbeat.step
        return (
            f"{what} at step {step}, epoch {(step - 1) // self.steps_per_epoch + 1}. {kept}. "
            f"The learning rate was {self.lr:.3g}: start again with a lower --lr."
        )

    def _no_memory(self, error: torch.OutOfMemoryError) -> str:
        return (
            f"rank {self.group.rank}: the memory of {self.device} is full ({_first_line(error)}). Start again with "
            "--micro-batch (images encoded at a time), a smaller --batch-size or --image-size; `millionway plan` "
            "says what fits"
        )

    def _no_space(self) -> str:
        left = checkpoint.complete(self.checkpoints)
        newest = f"The newest complete checkpoint is {left[0]}" if left else "There is no checkpoint yet"
        return f"no space left in {self.run}. {newest}. Make space, then: {self._resume_command()}"

    def _lost_contact(self, error: Exception) -> str:
        """Another rank stopped, hangs or cannot be reached."""
        reason = re.sub(r"^\[[^]]*\] *", "", _first_line(error))  # without the line of the library's source
        silent = self.heartbeat.silent_ranks()
        return (
            f"rank {self.group.rank} stopped at step {self.state.step + 1} because of another one: "
            f"{silent or 'see their messages'} ({reason}). Go on with: {self._resume_command()}"
        )

    def _save(self) -> None:
        average_statistics(self.state.network, self.group)
        if not checkpoint.all_finite(self.state):
            raise NotFiniteError("weights or rows are not finite (NaN or infinity)")
        all_or_none(self.group, self.monitor.sync)
        self.saver.save(self.state)

    def _resume_command(self) -> str:
        return f"millionway pretrain --resume --out {shlex.quote(str(self.run))}"
