"""Make layouts.json with Hugging Face datasets 5.2.0: `PYTHONPATH=FOLDER_OF_DATASETS python make.py`.

300 folders of files with random names, each with the files of each split as `datasets` finds them, and with a
README.md in every fifth, whose head lists splits. datasets lists some files twice, whose names have two words of one
split; here each is listed once.
"""

from __future__ import annotations

import json
import random
import tempfile
from pathlib import Path

from datasets import load_dataset_builder

HERE = Path(__file__).parent
WORDS = [
    *("train", "training", "validation", "valid", "dev", "val", "test", "testing", "eval", "evaluation"),
    *("latest", "contest", "retrain", "devel", "Test", "data", "part", "random", "extra"),
]
SEPARATORS = ["-", ".", "_", " ", "", "0", "1", "+", "a"]
PATTERNS = ["**/*.jsonl", "data/*", "data/train-*", "*.jsonl", "**/*train*", "**/[a-m]*.jsonl", "data/**"]


def word(rng: random.Random) -> str:
    return "".join(rng.choice(WORDS) + rng.choice(SEPARATORS) for _ in range(rng.randint(1, 2))).strip(" .")


def name(rng: random.Random) -> str:
    folders = [rng.choice(["data", word(rng)]) for _ in range(rng.choice([0, 0, 1, 1, 2]))]
    sharded = f"{rng.choice(WORDS)}-0000{rng.randint(0, 3)}-of-00004"
    return "/".join([*folders, rng.choice([sharded, word(rng), word(rng), f"{rng.randint(0, 9)}"]) + ".jsonl"])


def card(rng: random.Random) -> str:
    paths = [rng.choice(PATTERNS) for _ in range(rng.randint(1, 2))]
    if rng.random() < 0.3:
        return f"configs:\n- config_name: default\n  data_files: {json.dumps(paths)}\n"
    splits = ["train", "other"][: len(paths)]
    listed = "".join(
        f"  - split: {split}\n    path: {json.dumps(path)}\n" for split, path in zip(splits, paths, strict=True)
    )
    return f"license: mit\nconfigs:\n- config_name: default\n  data_files:\n{listed}"


def main() -> None:
    rng = random.Random(47)
    layouts: list[dict[str, object]] = []
    while len(layouts) < 300:
        names = sorted({name(rng) for _ in range(rng.randint(1, 6))})
        kind = rng.random()
        if kind < 0.3:
            names = [each for each in names if not each.startswith("data/")] or ["a.jsonl"]
        elif kind > 0.7:
            names = sorted({each.rpartition("/")[2] for each in names})
        head = card(rng) if len(layouts) % 5 == 4 else ""
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            try:
                for each in names:
                    (root / each).parent.mkdir(parents=True, exist_ok=True)
                    (root / each).write_text('{"a": 1}\n')
                if head:
                    (root / "README.md").write_text(f"---\n{head}---\n# A dataset\n")
                found = load_dataset_builder(folder).config.data_files
            except (OSError, ValueError):  # a file and a folder of one name; a pattern without files
                continue
            splits = {
                str(split): sorted({Path(file).relative_to(root).as_posix() for file in files})
                for split, files in found.items()
            }
        layouts.append({"names": names, "card": head, "splits": splits})
    lines = ",\n".join(json.dumps(layout) for layout in layouts)
    (HERE / "layouts.json").write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
