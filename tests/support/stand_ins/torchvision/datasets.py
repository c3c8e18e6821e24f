"""As torchvision.datasets."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from PIL import Image


def _rgb(path: str) -> Image.Image:
    with open(path, "rb") as file:
        return Image.open(file).convert("RGB")


class ImageFolder:
    def __init__(
        self, root: str, transform: Callable[[Any], Any] | None = None, loader: Callable[[str], Any] = _rgb
    ) -> None:
        self.transform, self.loader = transform, loader
        self.classes = sorted(folder.name for folder in Path(root).iterdir())
        self.samples = [
            (str(path), label)
            for label, name in enumerate(self.classes)
            for path in sorted(Path(root, name).rglob("*.jpg"))
        ]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        path, label = self.samples[index]
        image = self.loader(path)
        return (image if self.transform is None else self.transform(image)), label
