"""Draws icons of 26 sets as PNG files: OUT/train/SET/NAME.png and OUT/test/SET/NAME.png.

    npm pack @iconify/json && tar -xzf iconify-json-*.tgz
    pip install resvg-py
    python benchmarks/icons.py package OUT
    python benchmarks/icons.py package OUT --largest # 1,000 and 200 icons of each of the 50 largest sets
    python benchmarks/icons.py package OUT --next    # 200 and 60 of each of the 50 sets after these
    python benchmarks/icons.py package OUT --all     # every icon of every set: OUT/SET.tar

The label is the set an icon was drawn for, that is its style. By default every fourth, by name, of the sets with one
color and at least 500 icons; black on white. Which icons are taken depends on their names alone.
"""

import argparse
import hashlib
import io
import json
import tarfile
from pathlib import Path

EVERY, AT_LEAST = 4, 500
FEW, MANY, OTHERS = (250, 60), (1000, 200), (200, 60)  # for training and for tests, of each set
NUM_LARGEST = 50
BOX = {"width": 16, "height": 16, "left": 0, "top": 0}  # where neither icon nor set says so


def chosen_sets(package: Path) -> list[str]:
    about = json.loads((package / "collections.json").read_text(encoding="utf-8"))
    fitting = [name for name, each in about.items() if not each.get("palette") and each["total"] >= AT_LEAST]
    return sorted(fitting)[::EVERY]


def by_size(package: Path) -> list[str]:
    """All sets, the largest first."""
    about = json.loads((package / "collections.json").read_text(encoding="utf-8"))
    return sorted(about, key=lambda name: (-about[name]["total"], name))


def drawn(body: str, width: float, height: float, left: float, top: float, side: int) -> bytes:
    import resvg_py  # pyright: ignore[reportMissingImports]

    box = max(width, height)
    left, top = left - (box - width) / 2, top - (box - height) / 2
    names = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    svg = f'<svg {names} viewBox="{left} {top} {box} {box}" width="{side}" height="{side}">'
    return bytes(resvg_py.svg_to_bytes(f"{svg}{body}</svg>", background="#ffffff", skip_system_fonts=True))


def draw_icon(icons: dict, name: str, side: int) -> bytes:
    icon = icons["icons"][name]
    width, height, left, top = (icon.get(key, icons.get(key, usual)) for key, usual in BOX.items())
    return drawn(icon["body"], width, height, left, top, side)


def draw_some(icons: dict, out: Path, side: int, num_train: int, num_test: int) -> None:
    names = [name for name, icon in icons["icons"].items() if not icon.get("hidden")]
    names.sort(key=lambda name: hashlib.sha256(name.encode()).digest())
    for place, name in enumerate(names[: num_train + num_test]):
        folder = out / ("train" if place < num_train else "test") / icons["prefix"]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.png").write_bytes(draw_icon(icons, name, side))


def draw_all(icons: dict, out: Path, side: int) -> None:
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{icons['prefix']}.tar"
    if path.exists():
        return
    with tarfile.open(path.with_suffix(".part"), "w") as shard:
        for name in icons["icons"]:
            image = draw_icon(icons, name, side)
            member = tarfile.TarInfo(f"{icons['prefix']}/{name}.png")
            member.size = len(image)
            shard.addfile(member, io.BytesIO(image))
    path.with_suffix(".part").rename(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--side", type=int, default=64)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--all", action="store_true")
    which.add_argument("--largest", action="store_true")
    which.add_argument("--next", action="store_true")
    chosen = parser.parse_args()
    package, about = chosen.package, chosen.package / "json"
    names, how_many = chosen_sets(package), FEW
    if chosen.all:
        names = sorted(path.stem for path in about.glob("*.json"))
    elif chosen.largest:
        names, how_many = by_size(package)[:NUM_LARGEST], MANY
    elif chosen.next:
        names, how_many = by_size(package)[NUM_LARGEST : 2 * NUM_LARGEST], OTHERS
    for name in names:
        icons = json.loads((about / f"{name}.json").read_text(encoding="utf-8"))
        if chosen.all:
            draw_all(icons, chosen.out, chosen.side)
        else:
            draw_some(icons, chosen.out, chosen.side, *how_many)


if __name__ == "__main__":
    main()
