"""Where rows and momentum live if not on the device that computes: in host memory, or in a file.

A pass reads the next blocks while it works on the present one, and writes behind it. The numbers are the same wherever
they live. A file is no checkpoint: it holds rows of different steps while a step is under way.
"""

import fcntl
import mmap
import os
import time
import weakref
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import torch
from jaxtyping import Int
from torch import Tensor

from millionway import tensor_file
from millionway.files import BadFile, check_room, reserve
from millionway.machine import num_local_ranks
from millionway.model.rows import Block

CHUNK_BYTES = 1 << 22  # of rows that are read or written at a time
CHUNKS_AHEAD = 2
MAX_GAP_ROWS = 16  # rows that are read though not asked for, rather than asking twice
PAGE = 4096
ABOUT = {"millionway": "rows under way; no checkpoint"}


class Store:
    """Rows and momentum of this rank, [classes, dim] each."""

    weight: Tensor
    velocity: Tensor

    def __init__(self) -> None:
        self.threads = ThreadPoolExecutor(8, thread_name_prefix="rows")
        weakref.finalize(self, self.threads.shutdown, wait=False)
        self.seconds_waited = 0.0
        """that a pass has waited for blocks, over all its threads"""

    def read(self, first: int, out: Tensor, velocity: bool = False) -> None:
        """Fill `out` with the rows, or their momentum, from `first` on."""
        raise NotImplementedError

    def write(self, first: int, rows: Tensor, velocity: bool = False) -> None:
        raise NotImplementedError

    def gather(self, places: Int[Tensor, " n"]) -> Tensor:
        """These rows, on the device of the places."""
        return self.weight[places.to(self.weight.device)].to(places.device)

    def stream(self, run: list[Block], first_id: int, writing: bool) -> Iterator[Block]:
        """The blocks, one after the other, in memory of the device; if `writing`, with momentum, and written back."""
        device = run[0].inverse_norm.device
        row_bytes = self.weight.shape[1] * self.weight.element_size()
        num = max(1, CHUNK_BYTES // (row_bytes * len(run[0])))
        chunks = deque(run[at : at + num] for at in range(0, len(run), num))
        coming: deque[tuple[list[Block], _Buffer, Future[None]]] = deque()
        free: list[_Buffer] = []
        writes: deque[tuple[_Buffer, Future[None]]] = deque()
        try:
            while chunks or coming:
                while chunks and len(coming) < CHUNKS_AHEAD:
                    if not free and len(writes) > CHUNKS_AHEAD:
                        buffer, written = writes.popleft()
                        self._wait(written)
                        free.append(buffer)
                    chunk = chunks.popleft()
                    buffer = free.pop() if free else _Buffer(num * len(run[0]), self.weight, device, writing)
                    coming.append((chunk, buffer, self.threads.submit(self._read, chunk, buffer, first_id)))
                chunk, buffer, read = coming.popleft()
                self._wait(read)
                yield from buffer.blocks(chunk)
                buffer.is_used()
                if writing:
                    writes.append((buffer, self.threads.submit(self._write, chunk, buffer, first_id)))
                else:
                    free.append(buffer)
            for _, written in writes:
                self._wait(written)
        finally:  # nobody reads or writes any more when a pass has failed
            wait([read for _, _, read in coming] + [written for _, written in writes])

    def _wait(self, work: Future[None]) -> None:
        started = time.perf_counter()
        work.result()
        self.seconds_waited += time.perf_counter() - started

    def _read(self, chunk: list[Block], buffer: "_Buffer", first_id: int) -> None:
        first, num = chunk[0].first_id - first_id, sum(map(len, chunk))
        with buffer.turn():
            self.read(first, buffer.weight[:num])
            if buffer.velocity is not None:
                self.read(first, buffer.velocity[:num], velocity=True)

    def _write(self, chunk: list[Block], buffer: "_Buffer", first_id: int) -> None:
        first, num = chunk[0].first_id - first_id, sum(map(len, chunk))
        assert buffer.velocity is not None
        with buffer.turn():
            self.write(first, buffer.weight[:num])
            self.write(first, buffer.velocity[:num], velocity=True)


class _Buffer:
    """Memory of the device for a chunk of rows. On CUDA it is filled and emptied on a stream of its own."""

    def __init__(self, num_rows: int, like: Tensor, device: torch.device, with_velocity: bool) -> None:
        self.weight = torch.empty(num_rows, like.shape[1], dtype=like.dtype, device=device)
        self.velocity = torch.empty_like(self.weight) if with_velocity else None
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.used = torch.cuda.Event() if device.type == "cuda" else None

    def blocks(self, chunk: list[Block]) -> Iterator[Block]:
        at = 0
        for block in chunk:
            here = slice(at, at + len(block))
            at += len(block)
            yield replace(
                block,
                weight=self.weight[here],
                velocity=block.velocity if self.velocity is None else self.velocity[here],
            )

    def is_used(self) -> None:
        """What was computed with it is on its way."""
        if self.used is not None:
            self.used.record()

    def turn(self) -> "_Turn":
        return _Turn(self)


class _Turn:
    """Copies to and from a buffer: after what was computed with it, and done at the end."""

    def __init__(self, buffer: _Buffer) -> None:
        self.buffer = buffer

    def __enter__(self) -> None:
        if self.buffer.stream is not None and self.buffer.used is not None:
            self.context = torch.cuda.stream(self.buffer.stream)
            self.context.__enter__()
            self.buffer.stream.wait_event(self.buffer.used)

    def __exit__(self, *reason: object) -> None:
        if self.buffer.stream is not None:
            self.buffer.stream.synchronize()
            self.context.__exit__(*reason)


class HostStore(Store):
    """In host memory, pinned where that makes copies to a GPU faster."""

    def __init__(self, num_rows: int, dim: int, dtype: torch.dtype, pinned: bool) -> None:
        super().__init__()
        self.weight, self.velocity = (torch.zeros(num_rows, dim, dtype=dtype, pin_memory=pinned) for _ in range(2))

    def read(self, first: int, out: Tensor, velocity: bool = False) -> None:
        source = self.velocity if velocity else self.weight
        out.copy_(source[first : first + len(out)], non_blocking=True)

    def write(self, first: int, rows: Tensor, velocity: bool = False) -> None:
        target = self.velocity if velocity else self.weight
        target[first : first + len(rows)].copy_(rows, non_blocking=True)


class FileStore(Store):
    """In a safetensors file with the rows of all ranks; each uses its own part of it.

    Passes read and write it; single rows are reached through memory mapping.
    """

    def __init__(
        self, path: Path, num_instances: int, dim: int, dtype: torch.dtype, local_range: tuple[int, int]
    ) -> None:
        super().__init__()
        self.path, (start, stop) = path, local_range
        self.row_bytes = dim * dtype.itemsize
        shape = (dtype, (num_instances, dim))
        header = tensor_file.header({"rows": shape, "momentum": shape}, ABOUT, PAGE)
        all_bytes = num_instances * self.row_bytes
        self.first_byte = {False: len(header) + start * self.row_bytes}
        self.first_byte[True] = self.first_byte[False] + all_bytes
        self.num_bytes = {"read": 0, "written": 0}
        own_bytes = (stop - start) * self.row_bytes
        self.file = _opened(path, header, len(header) + 2 * all_bytes, 2 * own_bytes * num_local_ranks())
        weakref.finalize(self, os.close, self.file)
        for first in self.first_byte.values() if own_bytes else ():
            _lock(path, self.file, first, own_bytes)
            reserve(self.file, path, first, own_bytes)
        self.weight, self.velocity = (self._mapped(velocity, stop - start, dim, dtype) for velocity in (False, True))

    def _mapped(self, velocity: bool, num_rows: int, dim: int, dtype: torch.dtype) -> Tensor:
        if num_rows == 0:
            return torch.empty(0, dim, dtype=dtype)
        at = self.first_byte[velocity]
        first_page = at // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        try:
            memory = mmap.mmap(self.file, at - first_page + num_rows * self.row_bytes, offset=first_page)
        except (OSError, ValueError) as error:
            remedy = "Rows need a file on a local disk"
            raise BadFile(self.path, f"it cannot be mapped into memory ({error})", remedy) from None
        if hasattr(mmap, "MADV_RANDOM"):
            memory.madvise(mmap.MADV_RANDOM)
        tensor = torch.frombuffer(memory, dtype=dtype, count=num_rows * dim, offset=at - first_page)
        return tensor.view(num_rows, dim)

    def read(self, first: int, out: Tensor, velocity: bool = False) -> None:
        host = out if out.device.type == "cpu" else torch.empty(out.shape, dtype=out.dtype, pin_memory=True)
        rest, at = _bytes_of(host), self.first_byte[velocity] + first * self.row_bytes
        self.num_bytes["read"] += len(rest)
        while len(rest):
            num = self._tried(os.preadv, [rest], at)
            if num == 0:
                raise BadFile(
                    self.path, "it has been cut short while it was in use", "Go on from a checkpoint: --resume"
                )
            rest, at = rest[num:], at + num
        if host is not out:
            out.copy_(host, non_blocking=True)
            torch.cuda.current_stream(out.device).synchronize()

    def write(self, first: int, rows: Tensor, velocity: bool = False) -> None:
        rest, at = _bytes_of(rows.cpu()), self.first_byte[velocity] + first * self.row_bytes
        self.num_bytes["written"] += len(rest)
        while len(rest):
            num = self._tried(os.pwritev, [rest], at)
            rest, at = rest[num:], at + num

    def _tried(self, call, data: list, at: int) -> int:
        try:
            return call(self.file, data, at)
        except OSError as error:  # says which file it was
            raise OSError(error.errno, f"rows: {error.strerror}", str(self.path)) from None

    def gather(self, places: Int[Tensor, " n"]) -> Tensor:
        """Read in the order of the file; rows that are near each other at one go."""
        wanted, inverse = places.cpu().unique(return_inverse=True)
        if len(wanted) == 0:
            return super().gather(places)
        rows = torch.empty(len(wanted), self.weight.shape[1], dtype=self.weight.dtype)
        breaks = (wanted.diff() > MAX_GAP_ROWS).nonzero()[:, 0] + 1
        edges = [0, *breaks.tolist(), len(wanted)]
        largest = max(1, CHUNK_BYTES // self.row_bytes)
        for at, end in pairwise(edges):
            for some in torch.arange(at, end).split(largest // (MAX_GAP_ROWS + 1) + 1):
                first, last = int(wanted[some[0]]), int(wanted[some[-1]])
                span = torch.empty(last - first + 1, rows.shape[1], dtype=rows.dtype)
                self.read(first, span)
                rows[some] = span[wanted[some] - first]
        return rows[inverse].to(places.device)


def _opened(path: Path, header: bytes, num_bytes: int, needed_bytes: int) -> int:
    """The file, new or one for the same rows; another one is refused. Ranks take turns."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise BadFile(path, f"rows cannot be kept there ({error.strerror})") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        size = os.fstat(file).st_size
        if size == 0:
            try:
                check_room(file, path, needed_bytes)
            except BadFile:
                path.unlink()
                raise
            os.pwrite(file, header, 0)
            os.ftruncate(file, num_bytes)
        elif size != num_bytes or os.pread(file, len(header), 0) != header:
            about = f"{num_bytes:,} bytes with the header {header[8:].split(b' ' * 8)[0].decode()}"
            raise BadFile(path, f"it is not a file for these rows: expected {about}", "Give another name, or remove it")
        fcntl.flock(file, fcntl.LOCK_UN)
    except BaseException:
        os.close(file)
        raise
    return file


def _lock(path: Path, file: int, first: int, num_bytes: int) -> None:
    """Our part of the file, for as long as this process lives."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, num_bytes, first)
    except OSError:
        raise BadFile(path, "another process has its rows there", "Give another name, or wait until it ends") from None


def _bytes_of(rows: Tensor) -> memoryview:
    return rows.view(-1).view(torch.uint8).numpy().data
