"""Image files with bytes changed, cut, repeated and put together anew: does any of them end the program?

They lie among good ones, whose pixels must come out as ever; the peak of memory is watched.
"""

import io
import random
import resource
from pathlib import Path

MUST = "0 crashes, good images unchanged, memory bounded"
NUM = 5000
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "JPEG2000", "PPM", "TGA", "ICO")


def measure(folder: Path, short: bool) -> dict:
    import numpy as np
    from PIL import Image

    from millionway.data.images import UnreadableImage, decode

    chance, rng = random.Random(0), np.random.default_rng(0)
    smooth = Image.fromarray(rng.integers(0, 255, (6, 8, 3), dtype=np.uint8)).resize((96, 72))
    good = {}
    for format in FORMATS:
        buffer = io.BytesIO()
        smooth.save(buffer, format)
        good[format] = buffer.getvalue()
    wanted = {format: decode(data).tobytes() for format, data in good.items()}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    num, counts, wrong = 200 if short else NUM, {"decoded": 0, "refused": 0}, []
    for number in range(num):
        format = FORMATS[number % len(FORMATS)]
        data = _mutated(good[format], good[chance.choice(FORMATS)], chance)
        try:
            image = decode(data)
            counts["decoded"] += image.mode == "RGB"
        except UnreadableImage:
            counts["refused"] += 1
        except BaseException as error:
            wrong.append(f"{format} {number}: {type(error).__name__}: {error}")
        if decode(good[format]).tobytes() != wanted[format]:
            wrong.append(f"{format} {number}: a good image came out differently after it")
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    words = ", ".join(f"{count} {name}" for name, count in counts.items())
    result = f"{num} files: {words}, {len(wrong)} wrong; memory grew by {grown:.0f} MB"
    return {"result": result, "passed": not wrong and grown < 2048, **counts, "grown_mb": round(grown), "wrong": wrong}


def _mutated(data: bytes, other: bytes, chance: random.Random) -> bytes:
    """Most changes go to the first bytes, where sizes and offsets stand."""
    changed = bytearray(data)
    for _ in range(chance.choice([1, 1, 2, 5, 30])):
        place = chance.randrange(min(len(changed), chance.choice([40, 200, len(changed)])))
        kind = chance.choice(["bit", "byte", "large", "cut", "repeat", "splice"])
        if kind == "bit":
            changed[place] ^= 1 << chance.randrange(8)
        elif kind == "byte":
            changed[place] = chance.randrange(256)
        elif kind == "large":
            changed[place : place + 4] = chance.choice([b"\xff\xff\xff\x7f", b"\x00\x00\x00\x00", b"\x7f\xff\xff\xff"])
        elif kind == "cut":
            changed = changed[: max(1, place)]
        elif kind == "repeat":
            changed[place:place] = changed[place : place + chance.randrange(64)]
        else:
            changed[place:] = other[place:]
        if not changed:
            return b"\0"
    return bytes(changed)
