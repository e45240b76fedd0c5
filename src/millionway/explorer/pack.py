"""What the page fetches, made of collection.parquet: binary arrays, sheets of thumbnails, small JSON.

Names are the page's addresses: the server answers them one by one, an export writes all of them.

    about.json            how many images, which columns, which sheets
    places.bin            float32 [images, 2]
    slots.bin             int32 [images]: where each thumbnail is, counted over all sheets
    sheet/N.jpg           16 x 16 thumbnails; images that are near on the map share a sheet
    column/N.bin          float32 [images]: a number, or which of the column's words
    neighbors/N.bin       of 1,024 images: int32 [images, k] places, then float32 [images, k] cosines
    paths.txt             a line for each image
    duplicates.json  outliers.json
"""

import io
import json
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
from PIL import Image

from millionway.data.arrow_files import pc

TILE, TILES = 64, 16  # pixels of a thumbnail, thumbnails along a sheet
PER_SHEET = TILES**2
PER_CHUNK = 1024
MAX_GROUPS, MAX_OUTLIERS, MAX_WORDS = 2000, 500, 200
NOT_SHOWN = ("id", "path", "x", "y", "neighbors", "thumbnail", "outlier_reason", "keep")
TITLES = {"outlier_score": "outlier score", "duplicate_group": "duplicate group", "modified": "date of the file"}


@dataclass(frozen=True)
class Pack:
    table: pa.Table
    """as collection.parquet"""
    about_table: dict[str, Any]
    name: str
    can_search: bool
    """whether somebody answers for a new picture"""
    has_run: bool
    epochs: tuple[int, ...] = ()
    large: bool = True
    """whether there are larger images than thumbnails"""

    def __len__(self) -> int:
        return self.table.num_rows

    def names(self) -> list[str]:
        """Every address of this pack."""
        return [
            "about.json",
            "places.bin",
            "slots.bin",
            "paths.txt",
            "duplicates.json",
            "outliers.json",
            *(f"sheet/{n}.jpg" for n in range(-(-len(self) // PER_SHEET))),
            *(f"column/{n}.bin" for n in range(len(self.columns))),
            *(f"neighbors/{n}.bin" for n in range(-(-len(self) // PER_CHUNK))),
        ]

    def get(self, name: str) -> bytes | None:
        """None if there is no such address. Nothing but numbers is taken from it."""
        kind, _, rest = name.partition("/")
        if rest:
            numbered = {
                "sheet": (self.sheet, ".jpg", -(-len(self) // PER_SHEET)),
                "column": (self.column, ".bin", len(self.columns)),
                "neighbors": (self.neighbors, ".bin", -(-len(self) // PER_CHUNK)),
            }
            make, end, num = numbered.get(kind, (None, "", 0))
            match = re.fullmatch(rf"(0|[1-9][0-9]{{0,8}}){re.escape(end)}", rest, re.ASCII)
            return make(int(match[1])) if make and match and int(match[1]) < num else None
        whole = {
            "about.json": lambda: json.dumps(self.about).encode(),
            "places.bin": lambda: self.places.tobytes(),
            "slots.bin": lambda: self.slots.astype("<i4").tobytes(),
            "paths.txt": self.paths,
            "duplicates.json": lambda: json.dumps(self.duplicates()).encode(),
            "outliers.json": lambda: json.dumps(self.outliers()).encode(),
        }
        return whole[kind]() if kind in whole else None

    # --- the map ------------------------------------------------------------------------------------------------------

    @cached_property
    def places(self) -> np.ndarray:
        return np.stack([self.table["x"].to_numpy(), self.table["y"].to_numpy()], axis=1).astype("<f4")

    @cached_property
    def order(self) -> np.ndarray:
        """Places in the order of the sheets: along a curve that fills the map, so that neighbors share a sheet."""
        cells = ((self.places.astype(np.float64) + 1) * 32767).clip(0, 65535).astype(np.uint64)
        return np.argsort(_interleaved(cells[:, 0]) | (_interleaved(cells[:, 1]) << np.uint64(1)), kind="stable")

    @cached_property
    def slots(self) -> np.ndarray:
        slots = np.empty(len(self), np.int32)
        slots[self.order] = np.arange(len(self))
        return slots

    def sheet(self, number: int) -> bytes:
        sheet = Image.new("RGB", (TILE * TILES, TILE * TILES), (128, 128, 128))
        members = self.order[number * PER_SHEET : (number + 1) * PER_SHEET]
        for slot, place in enumerate(members.tolist()):
            data = self.thumbnail(place)
            if data is None:
                continue
            tile = Image.open(io.BytesIO(data)).convert("RGB")
            scale = TILE / max(tile.size)
            size = max(1, round(tile.width * scale)), max(1, round(tile.height * scale))
            tile = tile.resize(size, Image.Resampling.NEAREST if scale >= 2 else Image.Resampling.BILINEAR)
            left, top = slot % TILES * TILE + (TILE - size[0]) // 2, slot // TILES * TILE + (TILE - size[1]) // 2
            sheet.paste(tile, (left, top))
        buffer = io.BytesIO()
        sheet.save(buffer, "JPEG", quality=85)
        return buffer.getvalue()

    @cached_property
    def thumbnails(self) -> pa.ChunkedArray:
        return pc.struct_field(self.table["thumbnail"], "bytes")

    def thumbnail(self, place: int) -> bytes | None:
        return self.thumbnails[place].as_py()

    # --- columns ------------------------------------------------------------------------------------------------------

    @cached_property
    def columns(self) -> list[dict[str, Any]]:
        """name, kind (words, number or date), and what the page needs to show it; values are float32."""
        found = []
        for name in self.table.column_names:
            column = self.table[name]
            if name in NOT_SHOWN or column.null_count == len(column):
                continue
            title, kind = TITLES.get(name, name), column.type
            if pa.types.is_string(kind):
                counts = sorted(column.value_counts().to_pylist(), key=lambda c: -c["counts"])
                words = sorted(str(c["values"]) for c in counts[:MAX_WORDS] if c["values"] is not None)
                found.append({"name": name, "title": title, "kind": "words", "words": words})
            elif name in ("cluster", "duplicate_group"):
                num = int(pc.max(column).as_py()) + 1
                found.append({"name": name, "title": title, "kind": "words", "words": list(map(str, range(num)))})
            else:
                values = self._values(name)
                known = values[np.isfinite(values)]
                kind = "date" if pa.types.is_timestamp(kind) else "number"
                low, high = float(known.min()), float(known.max())
                found.append({"name": name, "title": title, "kind": kind, "low": low, "high": high})
        return found

    def _values(self, name: str) -> np.ndarray:
        """[images] float32, NaN where unknown; dates in days since 1970."""
        column = self.table[name]
        if pa.types.is_timestamp(column.type):
            numbers = pc.divide(column.cast(pa.int64()).cast(pa.float64()), 86_400e6)
            return pc.fill_null(numbers, float("nan")).to_numpy().astype("<f4")
        return pc.fill_null(column.cast(pa.float64()), float("nan")).to_numpy().astype("<f4")

    def column(self, number: int) -> bytes:
        about = self.columns[number]
        if about["kind"] == "words" and about["name"] == "label":
            words = pa.array(about["words"], pa.string())
            found = pc.index_in(self.table["label"], value_set=words).cast(pa.float64())
            return pc.fill_null(found, float("nan")).to_numpy().astype("<f4").tobytes()
        return self._values(about["name"]).tobytes()

    # --- the rest -----------------------------------------------------------------------------------------------------

    @cached_property
    def about(self) -> dict[str, Any]:
        groups = self.table["duplicate_group"]
        place_of = {instance_id: place for place, instance_id in enumerate(self.table["id"].to_pylist())}
        central = [[place_of[i] for i in ids if i in place_of] for ids in self.about_table.get("central", [])]
        return {
            "name": self.name,
            "num": len(self),
            "tile": TILE,
            "tiles": TILES,
            "per_chunk": PER_CHUNK,
            "num_neighbors": self.num_neighbors,
            "columns": self.columns,
            "central": central,
            "agreement": self.about_table.get("agreement"),
            "what": self.about_table.get("what", ""),
            "num_groups": len(pc.unique(groups.drop_null())),
            "can_search": self.can_search,
            "has_run": self.has_run,
            "epochs": list(self.epochs),
            "large": self.large,
        }

    @cached_property
    def num_neighbors(self) -> int:
        first = pc.struct_field(self.table["neighbors"], "ids")
        return len(first[0]) if len(first) else 0

    def neighbors(self, chunk: int) -> bytes:
        part = self.table["neighbors"].slice(chunk * PER_CHUNK, PER_CHUNK)
        ids, distances = (pc.list_flatten(pc.struct_field(part, name)).to_numpy() for name in ("ids", "distances"))
        return ids.astype("<i4").tobytes() + (1 - distances).astype("<f4").tobytes()

    def paths(self) -> bytes:
        """A line for each image; a name with a line break in it is shown with a space."""
        return "\n".join(path.replace("\n", " ") for path in self.table["path"].to_pylist()).encode("utf-8", "replace")

    def duplicates(self) -> list[dict[str, list]]:
        groups = pc.fill_null(self.table["duplicate_group"], -1).to_numpy()
        keep, found = self.table["keep"].to_numpy(), {}
        for place in np.flatnonzero(groups >= 0).tolist():
            found.setdefault(int(groups[place]), []).append(place)
        largest = sorted(found.values(), key=lambda places: (-len(places), places[0]))[:MAX_GROUPS]
        return [{"places": places, "keep": [bool(keep[place]) for place in places]} for places in largest]

    def outliers(self) -> list[dict[str, Any]]:
        scores = self.table["outlier_score"].to_numpy()
        order = np.argsort(-scores, kind="stable")[:MAX_OUTLIERS].tolist()
        reasons = self.table["outlier_reason"]
        return [{"place": p, "score": round(float(scores[p]), 4), "reason": reasons[p].as_py() or ""} for p in order]


def _interleaved(values: np.ndarray) -> np.ndarray:
    """16 bits, each followed by a zero."""
    for shift, mask in ((8, 0x00FF00FF), (4, 0x0F0F0F0F), (2, 0x33333333), (1, 0x55555555)):
        values = (values | (values << np.uint64(shift))) & np.uint64(mask)
    return values
