"""Speed of decoding images and videos: `python -m benchmarks.media`.

Prints three tables. The first: processor time to decode a file of each kind and size to an array, and how many times as
long Pillow takes for `numpy.asarray`; both take turns in one thread. The second: images per second that a
StreamingLoader yields in batches of 32 with 0, 1, 2 and 4 fetch_threads, and how many times those of no thread; and
the same images decoded a batch at a time by a pool of two threads. The third, where torchcodec is installed: processor
time to decode 16 of a video's 64 frames of 1280 x 720 pixels, scaled and cropped to 224 x 224 by VideoClip, and how
many times as long it takes to decode whole frames and scale them then, and how many times as fast two threads are.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from penstock.data import MDSWriter, StreamingDataset, StreamingLoader, VideoClip
from penstock.data.formats.media.images import decode_image_array

__all__ = ["main", "photo"]

KINDS = [("JPEG", "RGB"), ("JPEG", "L"), *(("PNG", mode) for mode in ("RGB", "RGBA", "L", "P", "I;16"))]
SIZES = (64, 256, 1024)
BATCH = 32
THREADS = (0, 1, 2, 4)


def photo(form: str, mode: str, size: int) -> bytes:
    """Return the bytes of a square image file: smooth shapes with a little noise, about as hard to compress as a photo.
    `form`: format, such as "JPEG". `mode`: Pillow's mode. `size`: width and height in pixels."""
    draw = np.random.default_rng(size)
    coarse = draw.integers(0, 256, (size // 16 + 1, size // 16 + 1, 3), np.uint8)
    smooth = np.asarray(Image.fromarray(coarse).resize((size, size), Image.Resampling.BICUBIC), np.int16)
    image = Image.fromarray(np.clip(smooth + draw.normal(0, 2, smooth.shape), 0, 255).astype(np.uint8))
    if mode == "I;16":
        image = Image.fromarray(np.asarray(image.convert("L"), np.uint16) * 257)
    file = BytesIO()
    (image if mode == "I;16" else image.convert(mode)).save(file, form)
    return file.getvalue()


def pillow(form: str, file: bytes) -> Any:
    return np.asarray(Image.open(BytesIO(file), formats=(form,)))


def _processor_us(work: Callable[[], object], repeats: int) -> float:
    begun = time.thread_time()
    for _ in range(repeats):
        work()
    return (time.thread_time() - begun) / repeats * 1e6


def decoding(rounds: int) -> Iterator[tuple[str, ...]]:
    for form, mode in KINDS:
        for size in SIZES:
            file, decode = photo(form, mode, size), decode_image_array
            assert np.array_equal(decode(file, 0, len(file)), pillow(form, file))
            repeats = max(2, (1 << 20) // size**2)
            pairs = [
                (
                    _processor_us(lambda: decode(file, 0, len(file)), repeats),  # noqa: B023  # called at once
                    _processor_us(lambda: pillow(form, file), repeats),  # noqa: B023
                )
                for _ in range(rounds)
            ]
            ratio = statistics.median(theirs / ours for ours, theirs in pairs)
            yield f"{form} {mode}", f"{size}", f"{min(ours for ours, _ in pairs):.0f}", f"{ratio:.2f}"


def _dataset(folder: Path, form: str, size: int, count: int) -> StreamingDataset:
    file = photo(form, "RGB", size)
    with MDSWriter(folder, {"image": "bytes"}) as shards:
        for _ in range(count):
            shards.write({"image": file})
    index = folder / "index.json"
    index.write_text(index.read_text().replace('"bytes"]', f'"{form.lower()}"]'))
    return StreamingDataset(local=folder, images="array")


def _rate(batches: Iterator[Any], count: int) -> float:
    begun = time.perf_counter()
    for _ in batches:
        pass
    return count / (time.perf_counter() - begun)


def _pooled(files: list[bytes], decode: Callable[[bytes, int, int], Any], pool: ThreadPoolExecutor) -> Iterator[Any]:
    for at in range(0, len(files), BATCH):
        yield list(pool.map(lambda file: decode(file, 0, len(file)), files[at : at + BATCH]))


def threads(rounds: int) -> Iterator[tuple[str, ...]]:
    for form in ("JPEG", "PNG"):
        for size in SIZES[:2]:
            count = BATCH * (64 if size == 64 else 8)
            with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
                dataset, file = _dataset(Path(folder), form, size, count), photo(form, "RGB", size)
                rates: list[list[float]] = []
                for _ in range(rounds):
                    loaders = [StreamingLoader(dataset, batch_size=BATCH, fetch_threads=number) for number in THREADS]
                    rates.append([_rate(iter(loader), count) for loader in loaders])
                    rates[-1].append(_rate(_pooled([file] * count, decode_image_array, pool), count))
                dataset.close()
            ratios = [statistics.median(rate[at] / rate[0] for rate in rates) for at in range(len(THREADS) + 1)]
            first = statistics.median(rate[0] for rate in rates)
            yield f"{form} RGB", f"{size}", f"{first:.0f}", *(f"{ratio:.2f}" for ratio in ratios[1:])


def _gain(work: Callable[[], object]) -> float:
    """Return how many times as fast two threads that both run `work` are as one thread."""
    begun = time.perf_counter()
    for _ in range(8):
        work()
    alone = time.perf_counter() - begun
    with ThreadPoolExecutor(2) as pool:
        begun = time.perf_counter()
        list(pool.map(lambda _: work(), range(8)))
        return alone / (time.perf_counter() - begun)


def clips(rounds: int) -> Iterator[tuple[str, ...]]:
    from torchcodec.encoders import VideoEncoder
    from torchcodec.transforms import CenterCrop, Resize

    coarse = torch.randint(0, 256, (1, 3, 45, 120), generator=torch.Generator().manual_seed(1)).float()
    wide = torch.nn.functional.interpolate(coarse, size=(720, 1920), mode="bilinear")[0].to(torch.uint8)
    frames = torch.stack([wide[:, :, 8 * at : 8 * at + 1280] for at in range(64)])
    encoder = VideoEncoder(frames, frame_rate=25)
    file = encoder.to_tensor(format="mp4", codec="libx264", preset="veryfast").numpy().tobytes()
    chosen = list(range(0, 64, 4))
    scaled = VideoClip(chosen, [Resize((256, 456)), CenterCrop((224, 224))])

    def theirs() -> torch.Tensor:
        whole = VideoClip(chosen).open(file).read(chosen).float()
        small = torch.nn.functional.interpolate(whole, size=(256, 456), mode="bilinear", antialias=True)
        return small[:, :, 16:240, 116:340].round().clamp(0, 255).to(torch.uint8)

    def ours() -> torch.Tensor:
        return scaled.open(file).read(chosen)

    assert ours().shape == theirs().shape
    pairs = [(_processor_us(ours, 1), _processor_us(theirs, 1)) for _ in range(rounds)]
    ratio = statistics.median(theirs / ours for ours, theirs in pairs)
    gain = statistics.median(_gain(ours) for _ in range(rounds))
    yield "H.264, 16 of 64 frames", f"{min(ours for ours, _ in pairs) / 1e3:.0f}", f"{ratio:.2f}", f"{gain:.2f}"


def _print(heads: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> None:
    print("| " + " | ".join(heads) + " |\n|" + "---|" * len(heads))
    for row in rows:
        print("| " + " | ".join(row) + " |", flush=True)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Decoding of images and videos.")
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args(arguments).rounds
    torch.set_num_threads(1)  # one thread, as in workers
    _print(("image", "pixels", "us", "Pillow's time to ours"), decoding(rounds))
    heads = ("1 thread", "2 threads", "4 threads", "pool of 2")
    _print(("batches of 32", "pixels", "images/s, no thread", *heads), threads(rounds))
    if importlib.util.find_spec("torchcodec"):
        _print(("video", "ms", "time of whole frames to ours", "2 threads"), clips(rounds))


if __name__ == "__main__":
    main()
