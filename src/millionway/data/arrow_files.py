"""Arrow files: written whole, read by mapping them into memory; and where those are kept that can be made again."""

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute

from millionway.files import replacing

pc: Any = pyarrow.compute  # whose functions are made when it is imported, so that a type checker does not see them


def write_arrow(path: Path, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> None:
    with replacing(path) as aside, pa.OSFile(str(aside), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        for batch in batches:
            writer.write_batch(batch)


def read_arrow(path: Path) -> pa.Table:
    """Every offset is looked at: Arrow believes them later, and one that leads out of the file ends the program."""
    return checked(pa.ipc.open_file(pa.memory_map(str(path))).read_all())


def checked(table: pa.Table) -> pa.Table:
    table.validate(full=True)
    return table


def kept_file(path: str | Path, what: str) -> Path:
    """The place for what was made of a file; another one when the file changes."""
    status = os.stat(path)
    identity = f"{what}:{os.path.realpath(path)}:{status.st_size}:{status.st_mtime_ns}"
    folder = Path(os.environ.get("MILLIONWAY_INDEX", "~/.cache/millionway/index")).expanduser()
    return folder / f"{hashlib.blake2b(identity.encode(), digest_size=16).hexdigest()}.arrow"
