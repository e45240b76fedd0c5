"""A run, top to bottom: images in, run folder out."""

import logging
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch

from millionway.console import Interrupt, be_quiet, messages, track
from millionway.data.dataset import Dataset
from millionway.data.images import set_limits
from millionway.data.kinds.choose import open_source
from millionway.data.packed import pack
from millionway.data.stores import FileStore
from millionway.machine import choose_device, keep_freed_memory
from millionway.model.encoder import EncoderSpec, full_name
from millionway.parallel.collectives import all_or_none, on_first_rank
from millionway.parallel.group import Group, is_lost_contact, leave
from millionway.parallel.launcher import global_rank, is_first_process, local_rank
from millionway.reporting.page import redraw, write_report
from millionway.run_folder import LOG, MANIFEST, new_run_folder, sole_user
from millionway.settings.pretrain import Pretrain, check, with_settings
from millionway.settings.stored import check_resume, has_begun, run_settings, write_settings
from millionway.train import checkpoint
from millionway.train.changes import CHANGED, Before, changed_images, nothing_left_behind, take_over
from millionway.train.extend import EXTENDED, extend, extended_for_changes, in_words
from millionway.train.first_weights import as_the_weights_are
from millionway.train.loop import Loop, Plan
from millionway.train.metrics_file import Metrics
from millionway.train.monitor import Monitor, labeled_images
from millionway.train.setup import (
    build,
    check_early,
    check_test_data,
    compare_settings,
    open_images,
    own_cores,
    remember_places,
    resolve,
    with_absolute_paths,
    write_run_files,
)
from millionway.train.state import State
from millionway.train.stops import RunStopped, lost_contact, resume_command
from millionway.train.trackers import Follower, check_tracker

log = logging.getLogger("millionway")

SETUP_SECONDS = 30 * 86_400.0


def pretrain(config: Pretrain) -> Path:
    """Pretrain an encoder, draw its report and return the run folder. With `resume`, go on from its last checkpoint.

    Started by torchrun, all its processes train together: the first one indexes the images and writes the run folder.
    """
    if not config.data:
        raise ValueError("--data is missing: a folder of images, a list of files, or a named set such as digits")
    if config.out == Path():
        raise ValueError("--out is missing: the run folder to make")
    check(config)
    check_tracker(config)
    if config.data_changed and not config.resume:
        raise ValueError("--data-changed is for --resume: a new run takes the images as they are")
    if config.model.encoder is not None:
        config = with_settings(config, encoder=full_name(config.model.encoder))
    if config.resume and not has_begun(config.out):  # it was killed while it started
        config = with_settings(config, resume=False)
    if config.init_from is not None and not config.resume:
        config = as_the_weights_are(config)
    if config.resume:
        config = _as_it_began(run_settings(config.out), config)
    try:
        _pretrain(config)
    except RunStopped:
        if is_first_process():
            redraw(config.out)
        raise
    except RuntimeError as error:
        if not is_lost_contact(error):
            raise
        raise lost_contact(error, config.out, global_rank(), None, "") from error
    if is_first_process():
        write_report(config.out)
    return config.out


def _as_it_began(stored: Pretrain, wanted: Pretrain) -> Pretrain:
    """A run goes on with its own settings; all that may differ is free, or is more epochs with their learning rate."""
    if wanted.training.epochs == stored.training.epochs:
        check_resume(stored, wanted)
        return wanted
    longer = extend(stored, wanted.training.epochs, wanted.training.lr)
    wanted = with_settings(wanted, **{name: getattr(longer.training, name) for name in EXTENDED})
    check_resume(longer, wanted)
    return wanted


def _pretrain(config: Pretrain) -> None:
    group, run = Group.current(config.running.timeout, config.running.device in ("auto", "cuda")), config.out
    if not group.is_first:
        be_quiet()
    with ExitStack() as stack:
        stack.push(lambda kind, *_: leave(failed=kind is not None))
        compare_settings(group, config)
        patient = group.beside(SETUP_SECONDS)  # to read all images takes one rank hours, if they are many

        def enter() -> None:
            wanted = with_absolute_paths(config)
            stack.enter_context(sole_user(run) if config.resume else new_run_folder(run, wanted))

        on_first_rank(group, enter)
        stack.enter_context(messages(run / LOG if group.is_first else None, config.running.verbose))
        set_limits(config.images.max_pixels, config.images.max_image_bytes)
        torch.set_num_threads(config.running.threads or own_cores())
        keep_freed_memory()
        device = all_or_none(group, lambda: choose_device(config.running.device, local_rank()))
        before = changed_images(config, patient, run) if config.resume else None
        if before is not None:
            stack.enter_context(nothing_left_behind(group, run))
        dataset = _open_images(config, device, patient, run / (CHANGED if before else MANIFEST))
        resolved = resolve(config, dataset, device, group)
        if resolved.images.cache and isinstance(dataset.store, FileStore):
            dataset = all_or_none(patient, lambda: _packed(dataset, resolved))
        state, spec = all_or_none(
            group, lambda: build(resolved, dataset, device, group, before and before.num_instances)
        )
        if config.resume:
            on_first_rank(group, lambda: remember_places(run, resolved))
        else:
            on_first_rank(group, lambda: write_run_files(run, config, resolved, dataset, device))
        _train(resolved, run, dataset, device, state, spec, group, before)


def _train(
    config: Pretrain,
    run: Path,
    dataset: Dataset,
    device: torch.device,
    state: State,
    spec: EncoderSpec,
    group: Group,
    before: Before | None,
) -> None:
    """From the newest checkpoint, or from nothing, to the last step."""
    split = on_first_rank(group, lambda: labeled_images(config, dataset))
    checkpoints, fingerprint = run / "checkpoints", dataset.manifest.fingerprint
    known = fingerprint if before is None else before.fingerprint
    resumed = config.resume and checkpoint.load_newest(checkpoints, state, known)
    if config.resume and not resumed:
        log.info("no complete checkpoint in %s: beginning at step 0", checkpoints)
    if before is not None and (not resumed or state.prior is not None):
        raise ValueError("--data-changed needs a checkpoint after the first step; the run has none yet")
    if config.resume:
        config = _longer(config, run, dataset, state, group, before)
    plan = Plan.of(config, dataset)
    if before is not None:
        state = take_over(config, dataset, state, spec, before, plan.steps_per_epoch, run)
    step = state.step if resumed and state.prior is None else -1
    resume_at = (step, step / plan.steps_per_epoch)
    metrics = Metrics(run, resume_at, Follower.of(run, config)) if group.is_first else None
    per_epoch, sizes = plan.steps_per_epoch, plan.sizes
    monitor = Monitor(config, run, dataset, device, state, spec, group, per_epoch, sizes, split, metrics)
    saver = checkpoint.Saver(checkpoints, fingerprint, config.running.keep, group, config.running.timeout)
    with Interrupt() as interrupt:
        Loop(config, run, dataset, device, state, spec, group, plan, monitor, saver, interrupt).go(bool(resumed))
    log.info("done: %s", run / "encoder.safetensors")


def _longer(
    config: Pretrain, run: Path, dataset: Dataset, state: State, group: Group, before: Before | None
) -> Pretrain:
    """The settings of a run that is extended; config.json has them from now on."""
    stored, batch_size = run_settings(run), config.training.batch_size
    assert batch_size
    per_epoch = Plan.of(config, dataset).steps_per_epoch if before is None else before.steps_per_epoch(batch_size)
    done, had = state.step // per_epoch, stored.training.epochs
    if config.training.epochs > had and done < had:
        raise ValueError(
            f"--epochs {config.training.epochs}: the run is at epoch {done} of {had}. Let it finish: "
            f"{resume_command(run)}. Then it can be extended."
        )
    if before is not None and done >= config.training.epochs:
        config = extended_for_changes(config)
    if config.training.epochs > had:
        longer = {name: getattr(config.training, name) for name in EXTENDED}
        on_first_rank(group, lambda: write_settings(run, with_settings(stored, **longer)))
        log.info("%s", in_words(config))
    elif done >= had:
        log.info("the run is finished; %s --epochs %d extends it", resume_command(run), 2 * had)
    return config


def _open_images(config: Pretrain, device: torch.device, group: Group, manifest: Path) -> Dataset:
    """The first rank numbers the images; the others open theirs by its list, which says if they are not the same.

    Only the first rank asks the disk for the size of every image, as thousands of ranks would be a load to it.
    """

    def open_by(path: Path | None) -> Dataset:
        try:
            source = open_source(config.data, config.images.data_root, max_images=config.images.max_images)
        except ValueError as error:
            hint = " If the images have moved, add --data and their new place." if config.resume else ""
            raise ValueError(f"{error}{hint}") from None
        if not config.resume:
            check_early(config, len(source), device, group)
            check_test_data(config, source)
        return open_images(config, source, path, group.is_first)

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
