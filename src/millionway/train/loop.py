"""The steps of a run: prior, training, evaluations, checkpoints; and what ends it early."""

import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.progress import Progress, TaskID
from safetensors import SafetensorError
from torch import Tensor, nn

from millionway import randomness
from millionway.console import Interrupt, bar, track
from millionway.data.batches import plain_batches, view_batches
from millionway.data.dataset import Dataset
from millionway.data.readers import ReaderKilled
from millionway.data.sampler import Sampler
from millionway.data.stores import TooManyUnreadable
from millionway.data.views import view_keys
from millionway.model.classifier import NotFiniteError
from millionway.model.encoder import EncoderSpec
from millionway.model.network import buffers_kept
from millionway.model.prior import PriorProgress, has_running_statistics, write_prior
from millionway.parallel.collectives import OtherRankFailed, all_or_none, any_rank, on_first_rank
from millionway.parallel.group import Group, is_lost_contact
from millionway.parallel.heartbeat import Heartbeat
from millionway.parallel.sync_bn import average_statistics
from millionway.settings.pretrain import Pretrain
from millionway.train import checkpoint, stops
from millionway.train.clock import Clock
from millionway.train.extend import Stretch, stretches
from millionway.train.first_weights import take_weights
from millionway.train.monitor import Monitor
from millionway.train.sizes import Sizes
from millionway.train.state import State
from millionway.train.step import StepResult, train_step
from millionway.train.stops import Interrupted, LostContact, RunStopped, resume_command

log = logging.getLogger("millionway")

PRIOR_SAVE_SECONDS = 300


@dataclass(frozen=True)
class Plan:
    """Which images, which side of views and which learning rate at which step."""

    sampler: Sampler
    steps_per_epoch: int
    num_steps: int
    stretches: list[Stretch]
    sizes: Sizes

    @staticmethod
    def of(config: Pretrain, dataset: Dataset) -> "Plan":
        training = config.training
        assert training.batch_size
        sampler = Sampler(dataset.instance_ids, training.batch_size, training.seed)
        per_epoch = sampler.steps_per_epoch
        return Plan(sampler, per_epoch, training.epochs * per_epoch, stretches(config), Sizes.of(config, per_epoch))

    def lr(self, step: int) -> float:
        epoch = step // self.steps_per_epoch
        now = next((each for each in self.stretches if epoch < each.last), self.stretches[-1])
        return now.lr(step, self.steps_per_epoch)


class Loop:
    def __init__(
        self,
        config: Pretrain,
        run: Path,
        dataset: Dataset,
        device: torch.device,
        state: State,
        spec: EncoderSpec,
        group: Group,
        plan: Plan,
        monitor: Monitor,
        saver: checkpoint.Saver,
        interrupt: Interrupt,
    ) -> None:
        self.config, self.run, self.dataset, self.device, self.state = config, run, dataset, device, state
        self.spec, self.group, self.plan, self.monitor, self.saver = spec, group, plan, monitor, saver
        self.interrupt = interrupt
        self.network: nn.Module = state.network
        self.heartbeat = Heartbeat(group, config.running.timeout)
        self.clock = Clock(device)
        self.epoch_began, self.hardest_seconds = time.monotonic(), 0.0
        self.is_flat = False
        """whether it ends now, because it no longer improves"""
        self.is_worse = False
        """whether it ends now, because the encoder is worse than the one it began as"""

    def go(self, resumed: bool) -> None:
        """All that is left to do. What ends it early is raised as RunStopped, in words that say how to go on."""
        try:
            self._all_that_is_left(resumed)
        except BaseException as error:
            if not isinstance(error, LostContact):
                self.heartbeat.tell_why(error)
            raise
        finally:
            for each in (self.saver, self.heartbeat, self.monitor, self.dataset.store):
                each.close()

    def _all_that_is_left(self, resumed: bool) -> None:
        try:
            self._begin(resumed)
            self._train()
            self.saver.wait()
            on_first_rank(self.group, self.monitor.write_neighbors)
        except TooManyUnreadable as error:
            raise RunStopped(f"{error}. Repair that, then: {resume_command(self.run)}") from None
        except ReaderKilled as error:
            raise RunStopped(f"{error} Go on with: {resume_command(self.run)}") from None
        except NotFiniteError as error:
            raise RunStopped(self._diverged(str(error))) from None
        except torch.OutOfMemoryError as error:
            raise RunStopped(stops.no_memory(error, self.group.rank, self.device)) from error
        except (OSError, RuntimeError, SafetensorError) as error:
            if checkpoint.is_full_disk(error):
                raise RunStopped(stops.no_space(self.run)) from None
            if self.group.size > 1 and (is_lost_contact(error) or isinstance(error, OtherRankFailed)):
                elsewhere = self.heartbeat.trouble_elsewhere()
                raise stops.lost_contact(error, self.run, self.group.rank, self.state.step + 1, elsewhere) from error
            if isinstance(error, RuntimeError):
                raise
            raise RunStopped(stops.failed_disk(error, self.run)) from error

    # --- before the first step ----------------------------------------------------------------------------------------

    def _begin(self, resumed: bool) -> None:
        """The prior, and the numbers of the untrained encoder."""
        if not resumed:
            on_first_rank(self.group, self.monitor.write_samples)
            if self.config.resume and self.config.init_from is not None:
                take_weights(self.state.network.encoder, self.config.init_from)
            self.state.prior = PriorProgress(untrained=self.monitor.first_numbers())
        else:
            self.monitor.remember_start()
        if self.state.prior is not None:
            self._write_prior(self.state.prior)
            self.monitor.evaluate(self.state.prior.untrained)
            self.state.prior = None
            self._save()

    def _write_prior(self, progress: PriorProgress) -> None:
        prior, batch_size = self.config.classifier, self.plan.sampler.batch_size
        if not has_running_statistics(self.state.network):
            log.debug("no batch normalization with statistics that move: the prior's three kinds are one")
        left = self.plan.sampler.pass_over_all()[progress.batches :]  # full batches, because of BN
        ids = torch.cat([self.group.own_part(batch) for batch in left])
        own_size = batch_size // self.group.size
        batches = plain_batches(self.dataset.store, ids, self.spec.image_size, own_size, self.device)
        norm = write_prior(
            prior.prior,
            self.state.network,
            self.state.classifier,
            self._saving(track(batches, len(left), "contrastive prior")),
            None if prior.row_norm == "prior" else prior.row_norm,
            progress,
        )
        log.debug("rows written (%s), mean length %.3g", prior.prior, norm)

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
                    raise Interrupted(f"stopped before the first step; go on with: {resume_command(self.run)}")
            yield batch

    # --- steps --------------------------------------------------------------------------------------------------------

    def _train(self) -> None:
        self._try_full_side()
        self._rest_or_wake_encoder()
        self.monitor.start()
        self._start_epoch()
        self.clock.start(self._is_logged(self.state.step + 1))
        columns = ("steps  loss {task.fields[loss]}", "top-1 {task.fields[top1]}", "{task.fields[speed]} images/s")
        with bar(*columns) as progress:
            task = progress.add_task(
                "pretraining", total=self.plan.num_steps, completed=self.state.step, loss="–", top1="–", speed="–"
            )
            try:
                for views, instance_ids in self._batches(self.state.step):
                    self.clock.lap("data")
                    result = self._step(views, instance_ids)
                    self._after_step(result, progress, task)
                    if self.is_flat or self.is_worse:
                        self._save()
                        break
            except TooManyUnreadable:
                if self.group.size == 1:  # the others do not know of it
                    self._save()
                    self.saver.wait()
                raise

    def _try_full_side(self) -> None:
        """Where views are small at first, a batch of the later ones, so that memory that is too small is known now."""
        training, network = self.config.training, self.state.network
        if self.plan.sizes.before(self.state.step + 1) == self.spec.image_size:
            return
        images = training.micro_batch or self.plan.sampler.batch_size // self.group.size
        views = torch.zeros(images * self.num_views, 3, *2 * [self.spec.image_size], device=self.device)
        with buffers_kept(network):
            network(views).sum().backward()
        network.zero_grad(set_to_none=True)

    def _rest_or_wake_encoder(self) -> None:
        """As it is to be at the next step: it rests in the first epochs, if that was asked for."""
        epoch = self.state.step // self.plan.steps_per_epoch
        self.state.network.rest_encoder(epoch < (self.config.training.frozen_epochs or 0))
        self.network = self.group.data_parallel(self.state.network)

    def _start_epoch(self) -> None:
        self.epoch_began, self.hardest_seconds = time.monotonic(), 0.0

    def _after_step(self, result: StepResult, progress: Progress, task: TaskID) -> None:
        """Log, evaluate and save where it is time; stop if somebody asked for it."""
        state, running = self.state, self.config.running
        epoch, rest = divmod(state.step, self.plan.steps_per_epoch)
        is_last = state.step == self.plan.num_steps
        # Ranks stop together, and ask each other only where a line is logged.
        may_stop = self.group.size == 1 or result.num_ahead is not None
        trouble = self.dataset.store.trouble
        stopping = may_stop and any_rank(self.group, self.interrupt.asked or bool(trouble))
        if result.num_ahead is not None:
            loss = float(result.loss)
            top1, speed = self.monitor.log_step(loss, result.num_ahead, self.plan.lr(state.step - 1))
            progress.update(task, loss=f"{loss:.3f}", top1=f"{top1:.1%}", speed=f"{speed:,.0f}")
        progress.update(task, completed=state.step)
        if rest == 0:
            seconds = time.monotonic() - self.epoch_began
            self.monitor.log_epoch(float(result.loss), seconds, self.hardest_seconds, self.clock.shares())
        if rest == 0 and (epoch % (running.eval_every or 1) == 0 or is_last):
            self.monitor.evaluate()
            flat = running.stop_when_flat and self.monitor.is_flat
            self.is_flat = running.stop_when_flat and any_rank(self.group, flat)
            self.is_worse = self.config.init_from is not None and any_rank(self.group, self.monitor.is_worse)
        if state.step % (running.save_every or self.plan.steps_per_epoch) == 0 or is_last or stopping:
            self._save()
        if rest == 0:
            self._start_epoch()
            if state.network.encoder_rests:
                self._rest_or_wake_encoder()
        self.clock.start(self._is_logged(state.step + 1))
        if stopping and not is_last:
            self.saver.wait()
            if any_rank(self.group, bool(trouble)):
                raise TooManyUnreadable(trouble or "another process could not read its images")
            raise Interrupted(f"stopped after step {state.step}; go on with: {resume_command(self.run)}")

    def _batches(self, first_step: int) -> Iterator[tuple[Tensor, Tensor]]:
        sampler, views_of = self.plan.sampler, self.config.augmentation.of_a_view
        for size, steps in self.plan.sizes.parts(range(first_step, self.plan.num_steps)):
            keys_and_ids = ((self._view_keys(step), self.group.own_part(sampler.batch(step))) for step in steps)
            yield from view_batches(self.dataset.store, keys_and_ids, size, self.device, **views_of)

    @property
    def num_views(self) -> int:
        return self.config.augmentation.views

    def _view_keys(self, step: int) -> list[int]:
        return view_keys(self.config.training.seed, step // self.plan.steps_per_epoch, self.num_views)

    def _step(self, views: Tensor, instance_ids: Tensor) -> StepResult:
        state, training, method = self.state, self.config.training, self.config.classifier
        if state.hardest is not None and state.step % self.plan.steps_per_epoch == 0:
            started = time.monotonic()
            state.hardest = state.classifier.hardest(state.hardest.shape[1])
            self.hardest_seconds = time.monotonic() - started
            self.clock.lap("hardest")
        self.heartbeat.step = state.step + 1
        seed = randomness.key_of(training.seed, "step", state.step, self.group.rank)
        torch.manual_seed(seed >> 1)  # for encoders with dropout
        assert method.smoothing is not None and method.row_lr is not None and method.pairs is not None
        lr = self.plan.lr(state.step)
        result = train_step(
            self.network,
            state.classifier,
            state.optimizer,
            views,
            instance_ids,
            state.hardest,
            alpha=method.smoothing,
            lr=lr,
            row_lr=lr * method.row_lr,
            momentum=training.momentum,
            weight_decay=training.weight_decay,
            pairs=method.pairs,
            num_classified=len(instance_ids) // self.num_views * (method.row_views or self.num_views),
            with_num_ahead=self._is_logged(state.step + 1),
            views_at_once=training.micro_batch and training.micro_batch * self.num_views,
            clock=self.clock,
        )
        state.step += 1
        return result

    def _is_logged(self, number: int) -> bool:
        """Whether numbers of this step, the first being 1, are written and its time is measured."""
        return number == 1 or number % self.config.running.log_every == 0 or number % self.plan.steps_per_epoch == 0

    # --- checkpoints and ends -----------------------------------------------------------------------------------------

    def _save(self) -> None:
        average_statistics(self.state.network.learning, self.group)
        if not self.state.all_finite():
            raise NotFiniteError("weights or rows are not finite (NaN or infinity)")
        all_or_none(self.group, self.monitor.sync)
        self.saver.save(self.state, self.monitor.num_lines)

    def _diverged(self, what: str) -> str:
        if self.state.prior is not None:
            return f"{what} before the first step. Look at --init-from, --mean and --std."
        with suppress(Exception):  # this is what matters now
            self.saver.wait()
        step = self.heartbeat.step
        lr = self.plan.lr(max(0, step - 1))
        return stops.diverged(what, self.run / "checkpoints", step, self.plan.steps_per_epoch, lr)
