"""What a person asks of a collection, answered by tables that show their images in a notebook."""

import base64
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import pyarrow as pa
import torch
from PIL import Image
from torch import Tensor

from millionway.collection import duplicates as twice
from millionway.collection.neighbors import most_similar
from millionway.collection.pairs import verify
from millionway.collection.sources import paths_of
from millionway.data.batches import plain_batches
from millionway.data.images import UnreadableImage, decode
from millionway.data.kinds.folders import read_file
from millionway.data.stores import MemoryStore
from millionway.settings.collection import Keep

if TYPE_CHECKING:
    from millionway.collection.collection import Collection

SHOWN, SHOWN_ON_A_PAGE = 60, 500
NUM_CANDIDATES = 20  # of the other collection, for each image


@dataclass(frozen=True)
class Answer:
    """A table with an id for each line, and the thumbnails of those images."""

    table: pa.Table
    thumbnail_of: Callable[[int], bytes | None]
    title: str = ""
    other_thumbnail_of: Callable[[int], bytes | None] | None = None
    """of the images that the lines name as against_id"""

    def __len__(self) -> int:
        return self.table.num_rows

    def to_pandas(self) -> Any:
        return self.table.to_pandas()

    def to_pylist(self) -> list[dict[str, Any]]:
        return self.table.to_pylist()

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return self.table.__arrow_c_stream__(requested_schema)

    def _repr_html_(self) -> str:
        return self._html(SHOWN)

    def page(self) -> str:
        """A page of its own, with the first lines as pictures."""
        return PAGE.format(title=escape(self.title), body=self._html(SHOWN_ON_A_PAGE))

    def _html(self, num: int) -> str:
        blocks: dict[Any, list[str]] = {}
        for line in self.table.slice(0, num).to_pylist():
            blocks.setdefault(line.get("group", line.get("query")), []).append(_figure(line, self._pictures(line)))
        figures = "".join(f"<div>{''.join(block)}</div>" for block in blocks.values())
        more = f"<p>and {len(self) - num:,} more</p>" if len(self) > num else ""
        return f"<p><b>{escape(self.title)}</b></p>{figures}{more}"

    def _pictures(self, line: dict[str, Any]) -> list[bytes | None]:
        own = [self.thumbnail_of(line["id"])]
        return own if self.other_thumbnail_of is None else [*own, self.other_thumbnail_of(line["against_id"])]


PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{title}</title>
<style>:root {{ color-scheme: light dark; font: 14px/1.4 system-ui, sans-serif }} body {{ margin: 1.5em }}
div {{ padding: 4px 0; border-bottom: 1px solid #8884 }} img {{ border-radius: 3px }}</style>
</head><body>{body}</body></html>
"""


def _figure(line: dict[str, Any], pictures: list[bytes | None]) -> str:
    words = " · ".join(
        f"{value:.3f}" if isinstance(value, float) else str(value)
        for name, value in line.items()
        if name not in ("id", "path", "query", "group", "against", "against_id") and value not in (None, "")
    )
    images = " ".join(
        f"<img alt='' src='{data_address(each)}' style='width:96px;height:96px;object-fit:contain'>" if each else "gone"
        for each in pictures
    )
    name = escape(" = ".join(str(line[key]) for key in ("path", "against") if key in line), quote=True)
    return (
        f"<figure title='{name}' style='display:inline-block;margin:4px 8px;width:{110 * len(pictures)}px;"
        f"vertical-align:top;text-align:center;font-size:11px'>{images}"
        f"<figcaption>{escape(words)}</figcaption></figure>"
    )


def data_address(picture: bytes) -> str:
    kind = "png" if picture.startswith(b"\x89PNG") else "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(picture).decode()}"


def overview(collection: "Collection") -> str:
    """The clusters, each by the images that stand for it."""
    rows = []
    for number, places in enumerate(collection.central[:20]):
        size = int((collection.clusters == number).sum())
        pictures = [collection.looks.thumbnail(place) for place in places]
        images = "".join(f"<img alt='' height=64 src='{data_address(each)}'> " for each in pictures if each)
        rows.append(f"<p>cluster {number}, {size:,} images<br>{images}</p>")
    return f"<p><b>{len(collection.ids):,} images, {escape(collection.vectors.what)}</b></p>{''.join(rows)}"


# --- search -----------------------------------------------------------------------------------------------------------


def search(collection: "Collection", queries: Sequence[str | int | Path], k: int) -> Answer:
    if not queries:
        raise ValueError("--query is missing: an image file, or an image of the collection by its id or path")
    if k < 1:
        raise ValueError(f"--top must be positive, not {k}")
    known = [_place_of(collection, query) for query in queries]
    new = [decode_query(str(query)) for query, place in zip(queries, known) if place is None]
    encoded = iter(encode(collection, new) if new else [])
    unit = collection.vectors.unit
    vectors = torch.stack([next(encoded) if place is None else unit[place] for place in known])
    near = most_similar(vectors, unit, min(k + 1, len(unit)))
    lines: list[dict[str, Any]] = []
    for query, own, places, cosines in zip(queries, known, near.places.tolist(), near.cosines.tolist()):
        others = [(place, cosine) for place, cosine in zip(places, cosines) if place != own][:k]
        lines += [_line(collection, place) | {"query": str(query), "cosine": cosine} for place, cosine in others]
    return Answer(_table(lines, SEARCH), collection.thumbnail_of, f"like {', '.join(map(str, queries))}")


def _place_of(collection: "Collection", query: str | int | Path) -> int | None:
    """None for an image that is not in the collection."""
    if isinstance(query, int):
        if query not in collection.place_of:
            raise ValueError(f"--query {query}: the collection has no image with this id")
        return collection.place_of[query]
    keys = collection.dataset.manifest.keys
    place = int(keys.places_of(type(keys)([str(query)]))[0])
    if place >= 0 and place in collection.place_of:
        return collection.place_of[place]
    return collection.place_of_path.get(str(Path(query).absolute()))


def decode_query(path: str) -> Image.Image:
    if not Path(path).is_file():
        raise ValueError(f"--query {path}: no such file, and no image of the collection")
    try:
        return decode(read_file(path))
    except UnreadableImage as error:
        raise ValueError(f"--query {path}: not a readable image ({error})") from None


@torch.no_grad()
def encode(collection: "Collection", images: Sequence[Image.Image]) -> Tensor:
    """[images, dim] vectors of length one for new images."""
    if collection.subject is None or collection.kind == "rows" or collection.features is not None:
        raise ValueError(
            "a new image has no vector here: rows and features from a file belong to their own images. Search with "
            "--run and --vectors features, or for an image of the collection"
        )
    encoder, size = collection.subject.encoder.to(collection.device).eval(), collection.subject.encoder.spec.image_size
    found = []
    for image in images:
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None]
        for view, _ in plain_batches(
            MemoryStore(pixels), torch.zeros(1, dtype=torch.int64), size, 1, collection.device
        ):
            found.append(encoder(view).float().cpu())
    return torch.nn.functional.normalize(torch.cat(found), dim=1)


# --- duplicates -------------------------------------------------------------------------------------------------------


def duplicates(collection: "Collection", threshold: float | None, keep: Keep) -> Answer:
    """Also copies that the list has merged: they have no vector, but the same bytes."""
    if keep not in get_args(Keep):
        raise ValueError(f"--keep is {' or '.join(get_args(Keep))}, not {keep}")
    pairs, threshold = collection.pairs(threshold)
    manifest = collection.dataset.manifest
    merged = np.flatnonzero(manifest.copies)
    ids = np.concatenate([collection.ids, merged])
    hashes = manifest.column("content_hash")[ids].astype(str)
    groups = twice.groups(pairs.places, hashes)
    kept = twice.kept_of(groups, manifest, ids, keep)
    paths = paths_of(collection.dataset.source, ids)
    nearest = twice.best_pair(pairs, hashes, len(ids))
    lines = []
    for place in sorted(
        np.flatnonzero(groups >= 0).tolist(), key=lambda place: (groups[place], not kept[place], place)
    ):
        instance_id = int(ids[place])
        line = {"group": int(groups[place]), "keep": bool(kept[place]), "id": instance_id, "path": paths[place]}
        best = nearest[place]
        likeness, cosine = (1.0, 1.0) if best is None else best
        line |= {"kind": "copy" if best is None else "near", "likeness": likeness, "cosine": cosine}
        lines.append(
            line | {name: int(manifest.column(name)[instance_id]) for name in ("width", "height", "num_bytes")}
        )
    num = int(groups.max(initial=-1)) + 1
    title = f"{num:,} group{'s' * (num != 1)} with {len(lines):,} images; candidates from cosine {threshold:.3f} on"
    return Answer(_table(lines, DUPLICATES), collection.thumbnail_of, title)


def leaks(collection: "Collection", other: "Collection", threshold: float | None) -> Answer:
    """Images of the other collection that are in this one too; vectors must be of the same encoder."""
    twice.check_threshold(threshold)
    if threshold is None:
        threshold = twice.default_threshold(collection.near)
    near = most_similar(other.vectors.unit, collection.vectors.unit, NUM_CANDIDATES)
    image, column = (near.cosines >= threshold).nonzero(as_tuple=True)
    pairs = torch.stack([near.places[image, column].long(), image], dim=1)
    pairs, cosines = torch.cat([_same_content(collection, other), pairs]), near.cosines[image, column]
    num_same = len(pairs) - len(cosines)
    cosines = torch.cat([torch.ones(num_same), cosines])
    likeness = verify(collection.looks, other.looks, pairs, collection.progress)
    likeness[:num_same] = 1.0
    good = (likeness >= collection.least_likeness).nonzero()[:, 0]
    order = good[torch.argsort(likeness[good], descending=True, stable=True)]
    lines, seen = [], set()
    for place in order.tolist():
        own, theirs = pairs[place].tolist()
        if (own, theirs) not in seen:
            seen.add((own, theirs))
            copy = place < num_same
            about = {"against": other.paths[theirs], "against_id": int(other.ids[theirs])}
            about |= {"kind": "copy" if copy else "near", "cosine": float(cosines[place])}
            lines.append(_line(collection, own) | about | {"likeness": float(likeness[place])})
    num = len({line["against"] for line in lines})
    title = f"{num:,} of {len(other.ids):,} images are here too"
    return Answer(_table(lines, LEAKS), collection.thumbnail_of, title, other.thumbnail_of)


def _same_content(collection: "Collection", other: "Collection") -> Tensor:
    first = {text: place for place, text in reversed(list(enumerate(collection.hashes.tolist()))) if text}
    found = [(first[text], place) for place, text in enumerate(other.hashes.tolist()) if text in first]
    return torch.tensor(found, dtype=torch.int64).view(-1, 2)


# --- outliers ---------------------------------------------------------------------------------------------------------


def outliers(collection: "Collection", num: int) -> Answer:
    if num < 1:
        raise ValueError(f"--top must be positive, not {num}")
    strange = collection.strange
    order = np.argsort(-strange.score, kind="stable")[:num].tolist()
    lines = [
        _line(collection, place)
        | {"score": float(strange.score[place]), "reason": strange.reason[place] or strange.mostly[place]}
        for place in order
    ]
    return Answer(_table(lines, OUTLIERS), collection.thumbnail_of, f"the {len(lines):,} that belong least")


# --- tables -----------------------------------------------------------------------------------------------------------

IMAGE = [("id", pa.int64()), ("path", pa.string()), ("label", pa.string())]
LIKENESS = [("kind", pa.string()), ("likeness", pa.float32()), ("cosine", pa.float32())]
SEARCH = pa.schema([("query", pa.string()), *IMAGE, ("cosine", pa.float32())])
OUTLIERS = pa.schema([*IMAGE, ("score", pa.float32()), ("reason", pa.string())])
LEAKS = pa.schema([*IMAGE, ("against", pa.string()), ("against_id", pa.int64()), *LIKENESS])
SIZES = [("width", pa.int32()), ("height", pa.int32()), ("num_bytes", pa.int64())]
DUPLICATES = pa.schema([("group", pa.int32()), ("keep", pa.bool_()), *IMAGE[:2], *LIKENESS, *SIZES])


def _line(collection: "Collection", place: int) -> dict[str, Any]:
    return {
        "id": int(collection.ids[place]),
        "path": collection.paths[place],
        "label": collection.labels[place],
    }


def _table(lines: list[dict[str, Any]], schema: pa.Schema) -> pa.Table:
    return pa.Table.from_pylist(lines, schema=schema)
