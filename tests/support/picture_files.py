"""Picture files as bytes: good ones, and those of an attacker, drawn by seed."""

from __future__ import annotations

import random
import struct
import zlib
from collections.abc import Iterator
from io import BytesIO

import numpy as np
from PIL import Image

SIGNATURE = b"\x89PNG\r\n\x1a\n"


def picture(
    rng: random.Random, width: int, height: int, *, kind: str = "PNG", mode: str = "RGB", orientation: int = 0
) -> bytes:
    """Return a file of drawn pixels, smooth enough for JPEG. ``orientation`` as in EXIF; 0: no EXIF."""
    pixels = np.random.default_rng(rng.randrange(1 << 30)).integers(0, 256, (height, width, 3), np.uint8)
    out, exif = BytesIO(), Image.Exif()
    if orientation:
        exif[0x0112] = orientation
    Image.fromarray(pixels).convert(mode).save(out, kind, **({"exif": exif} if orientation else {}))
    return out.getvalue()


def chunk(kind: bytes, data: bytes, *, size: int | None = None) -> bytes:
    length = len(data) if size is None else size
    return struct.pack(">I", length) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, *chunks: bytes, data: bytes | None = None) -> bytes:
    """Return a grey PNG of this declared size, with chunks before its pixels."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    rows = bytes((width + 1) * height) if data is None else data
    return b"".join((SIGNATURE, head, *chunks, chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b"")))


def refused(rng: random.Random) -> dict[str, bytes]:
    """Return files of which each is to be refused."""
    good, photo = picture(rng, 40, 30), picture(rng, 40, 30, kind="JPEG")
    bomb = zlib.compress(bytes(100 * 1024 * 1024))
    frames = chunk(b"acTL", struct.pack(">II", 2, 0))
    files = {
        "bomb": png(65_535, 65_535, data=b""),
        "largest": png(0x7FFF_FFFF, 0x7FFF_FFFF, data=b""),
        "one too many": png(4097, 4096, data=b""),
        "thin": png(1, 60_000),
        "no pixels": png(0, 30, data=b""),
        "animated": png(4, 4, frames),
        "profile bomb": png(4, 4, chunk(b"iCCP", b"p\0\0" + bomb)),
        "text bomb": png(4, 4, chunk(b"zTXt", b"t\0\0" + bomb)),
        "international text bomb": png(4, 4, chunk(b"iTXt", b"t\0\1\0\0\0" + bomb)),
        "chunk longer than the file": png(4, 4, chunk(b"tEXt", b"a\0b", size=0x7FFF_FFF0)),
        "head twice its length": SIGNATURE + chunk(b"IHDR", bytes(13), size=26),
        "empty": b"",
        "signature": SIGNATURE,
        "jpeg head": photo[:20],
        "16 bits of grey": picture(rng, 20, 20, mode="I;16"),
        "random": rng.randbytes(5000),
        "svg": b"<svg xmlns='http://www.w3.org/2000/svg' width='9' height='9'/>",
        "postscript": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
    }
    for kind in ("GIF", "BMP", "TIFF", "WEBP", "PPM", "ICO"):
        files[kind] = picture(rng, 20, 20, kind=kind)
    for number in range(8):
        files[f"cut png {number}"] = good[: rng.randrange(9, len(good) - 40)]
        files[f"cut jpeg {number}"] = photo[: rng.randrange(2, len(photo) * 3 // 4)]
    size = photo.index(b"\xff\xc0") + 5
    huge = photo[:size] + struct.pack(">HH", 65_535, 65_535) + photo[size + 4 :]
    return files | {"jpeg that states a larger size": huge}


def damaged(rng: random.Random, count: int) -> Iterator[bytes]:
    """Yield files with some bytes, or lengths of markers and chunks, that are not their own."""
    for _ in range(count):
        kind = rng.choice(("PNG", "JPEG"))
        data = bytearray(picture(rng, rng.randint(1, 60), rng.randint(1, 60), kind=kind))
        for _ in range(rng.randint(1, 6)):
            at = rng.randrange(2, len(data))
            if kind == "JPEG" and rng.random() < 0.5:
                markers = [i for i in range(len(data) - 4) if data[i] == 0xFF and data[i + 1] > 0xBF]
                at = rng.choice(markers) + 2
            data[at : at + 2] = rng.randbytes(2)
        yield bytes(data)
