"""One rank of a run in which something breaks: with_fault.py FAULT RANK pretrain ..."""

import errno
import itertools
import sys
from pathlib import Path
from unittest import mock

import torch

from millionway import cli
from millionway.parallel.launcher import global_rank
from millionway.train import loop, run


def no_folder(make=Path.mkdir):
    """For rows of a checkpoint."""

    def mkdir(path: Path, *arguments, **options) -> None:
        if path.name == "classifier":
            raise PermissionError(errno.EACCES, "planted", str(path))
        make(path, *arguments, **options)

    return mock.patch.object(Path, "mkdir", mkdir)


def no_third_step(step=loop.train_step):
    count = itertools.count()

    def train_step(*arguments, **options):
        if next(count) == 2:
            raise KeyError("planted")
        return step(*arguments, **options)

    return mock.patch.object(loop, "train_step", train_step)


def no_backward(step=torch.Tensor.backward):
    """The others are in the middle of a collective."""
    count = itertools.count()

    def backward(*arguments, **options) -> None:
        if next(count) == 2:
            raise RuntimeError("planted")
        step(*arguments, **options)

    return mock.patch.object(torch.Tensor, "backward", backward)


def no_classifier():
    return mock.patch.object(run, "build", mock.Mock(side_effect=ValueError("planted")))


def no_log():
    """Before the ranks ask each other whether all is well."""
    return mock.patch.object(run, "set_limits", mock.Mock(side_effect=ValueError("planted")))


def any_cuda():
    """Whoever asks for a GPU fails."""
    return mock.patch.multiple(
        torch._C,
        _cuda_init=mock.Mock(side_effect=AssertionError("CUDA was asked")),
        _cuda_getDeviceCount=mock.Mock(side_effect=AssertionError("CUDA was asked")),
    )


FAULTS = {fault.__name__: fault for fault in (no_folder, no_third_step, no_backward, no_classifier, no_log, any_cuda)}

if __name__ == "__main__":
    fault, victim, *arguments = sys.argv[1:]
    if victim in ("all", str(global_rank())):
        FAULTS[fault]().start()
    sys.exit(cli.main(arguments))
