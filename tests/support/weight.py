"""Weight of the tracked Python code, by folder: lines, lines of code, and lines of docstrings (make weight)."""

from __future__ import annotations

import ast
import subprocess
import tokenize
from collections import Counter, defaultdict
from pathlib import Path

EMPTY = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def weigh(path: Path) -> Counter[str]:
    with tokenize.open(path) as file:
        text = file.read()
        file.seek(0)
        tokens = [token for token in tokenize.generate_tokens(file.readline) if token.type not in EMPTY]
    texts = [node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Expr)]
    docstrings = {
        line
        for node in texts
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    used = {line for token in tokens for line in range(token.start[0], token.end[0] + 1)}
    return Counter(lines=len(text.splitlines()), code=len(used - docstrings), docstrings=len(docstrings))


def main() -> None:
    folders: defaultdict[Path, Counter[str]] = defaultdict(Counter)
    for name in subprocess.check_output(["git", "ls-files", "*.py"], text=True).splitlines():
        path = Path(name)
        if "_pb2" not in path.name:
            weight = weigh(path)
            for folder in (path.parent, Path(path.parts[0]) / "*", Path("*")):
                folders[folder] += weight
    print("  lines    code docstrings")
    for folder in sorted(folders):
        weight = folders[folder]
        print(f"{weight['lines']:7,} {weight['code']:7,} {weight['docstrings']:10,}  {folder}")


if __name__ == "__main__":
    main()
