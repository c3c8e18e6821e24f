"""Make the files in this folder with TensorFlow 2.21.0: `PYTHONPATH=FOLDER_OF_TENSORFLOW python make.py`.

Two files of examples: integers of all sizes, floats, bytes, a feature without values and one without a kind. One file
of other bytes. expected.json has the examples as TensorFlow's own protobuf reads them; bytes are hexadecimal.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tensorflow as tf  # type: ignore[import-untyped]

HERE = Path(__file__).parent


def example(i: int) -> tf.train.Example:
    features = {
        "tokens": tf.train.Feature(int64_list=tf.train.Int64List(value=range(i * 40, i * 40 + i % 9 * 5))),
        "signed": tf.train.Feature(
            int64_list=tf.train.Int64List(value=[-1, i, -(2**63), 2**63 - 1, 2**35 + i] * (i % 4))
        ),
        "label": tf.train.Feature(int64_list=tf.train.Int64List(value=[i % 10])),
        "weights": tf.train.Feature(float_list=tf.train.FloatList(value=[i / 3, -1.5])),
        "text": tf.train.Feature(bytes_list=tf.train.BytesList(value=[f"row {i} ü".encode(), b""])),
        "none": tf.train.Feature(float_list=tf.train.FloatList(value=[])),
        "kindless": tf.train.Feature(),
    }
    return tf.train.Example(features=tf.train.Features(feature=features))


def plain(data: bytes) -> dict[str, Any]:
    found = tf.train.Example.FromString(data)
    values: dict[str, Any] = {}
    for name, feature in sorted(found.features.feature.items()):
        kind = feature.WhichOneof("kind")
        stored = list(getattr(feature, kind).value) if kind else []
        values[name] = [kind, [each.hex() if isinstance(each, bytes) else each for each in stored]]
    return values


def main() -> None:
    expected: dict[str, list[Any]] = {}
    for name, numbers in (("a.tfrecord", range(25)), ("b.tfrecord-00000-of-00001", range(25, 50))):
        with tf.io.TFRecordWriter(str(HERE / name)) as writer:
            for i in numbers:
                writer.write(example(i).SerializeToString(deterministic=True))
        expected[name] = [plain(each.numpy()) for each in tf.data.TFRecordDataset(str(HERE / name))]
    (HERE / "bytes").mkdir(exist_ok=True)
    with tf.io.TFRecordWriter(str(HERE / "bytes" / "c.tfrec")) as writer:
        for i in range(9):
            writer.write(bytes([255 - i]) * i * 30)
    (HERE / "expected.json").write_text(json.dumps(expected))


if __name__ == "__main__":
    main()
