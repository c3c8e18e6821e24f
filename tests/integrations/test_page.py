"""What docs/integrations.md shows of the examples is what stands in them."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def parts_of(text: str, indents: int = 4) -> list[str]:
    """A file as it is, and as it is when so many levels of indentation are taken away."""
    return [re.sub(rf"^ {{{4 * level}}}", "", text, flags=re.MULTILINE) for level in range(indents + 1)]


def test_every_block_is_of_an_example() -> None:
    page = (ROOT / "docs/integrations.md").read_text()
    blocks = re.findall(r"^ *```python\n(.*?)^ *```$", page, re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 6
    examples = [*(ROOT / "examples/integrations").glob("*.py"), ROOT / "examples/train_lm/train.py"]
    texts = [part for example in examples for part in parts_of(example.read_text())]
    for block in blocks:
        compile(textwrap.dedent(block), "a block", "exec")
        assert any(textwrap.dedent(block) in text for text in texts), block
