"""Turns `perf script` output (stdin) into a flame graph (SVG on stdout). No dependencies.

After Brendan Gregg's flame graphs (2011): one box per function and call path, width = share of samples, callers below.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from html import escape

WIDTH = 1200
ROW = 17
SMALLEST = 0.3  # pixels; narrower boxes are left out
FRAME = re.compile(r"^\s+[0-9a-f]+ (.+?)(?:\+0x[0-9a-f]+)? \((.*)\)$")


@dataclass
class Node:
    """A function reached by one call path; count = samples in it and below."""

    count: int = 0
    children: dict[str, Node] = field(default_factory=dict)

    def add(self, path: Iterable[str]) -> None:
        node = self
        node.count += 1
        for name in path:
            node = node.children.setdefault(name, Node())
            node.count += 1


@dataclass(frozen=True)
class Box:
    name: str
    count: int
    depth: int
    left: float
    width: float


def stacks(lines: Iterable[str]) -> Iterator[list[str]]:
    """Call paths, outermost first. perf prints a header line, the frames innermost first, and a blank line."""
    path: list[str] = []
    for line in lines:
        frame = FRAME.match(line)
        if frame:
            path.append(frame.group(1) if frame.group(1) != "[unknown]" else f"[{frame.group(2).rsplit('/', 1)[-1]}]")
        elif path and not line.strip():
            yield path[::-1]
            path = []
    if path:
        yield path[::-1]


def boxes(node: Node, scale: float, depth: int = 0, left: float = 0.0) -> Iterator[Box]:
    for name, child in sorted(node.children.items()):
        width = child.count * scale
        if width >= SMALLEST:
            yield Box(name, child.count, depth, left, width)
            yield from boxes(child, scale, depth + 1, left)
        left += width


def colour(name: str) -> str:
    """A warm colour that depends on the name alone, so that two graphs compare."""
    h = sum(ord(c) * (i + 1) for i, c in enumerate(name))
    return f"rgb({205 + h % 50},{80 + h % 140},{h % 55})"


def draw(box: Box, height: int, total: int) -> str:
    y = height - (box.depth + 1) * ROW
    title = escape(f"{box.name}: {box.count} samples, {100 * box.count / total:.1f} %")
    shown = escape(box.name[: max(0, int(box.width / 7) - 1)])
    return (
        f'<g><title>{title}</title><rect x="{box.left:.1f}" y="{y}" width="{box.width:.1f}" height="{ROW - 1}" '
        f'fill="{colour(box.name)}"/><text x="{box.left + 3:.1f}" y="{y + 12}">{shown}</text></g>'
    )


def render(root: Node) -> str:
    found = list(boxes(root, WIDTH / root.count))
    height = (max(box.depth for box in found) + 1) * ROW
    style = '<style>text{font:12px monospace}rect:hover{stroke:#000}</style>'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}">{style}'
    return "\n".join([head, *(draw(box, height, root.count) for box in found), "</svg>"])


def main() -> int:
    root = Node()
    for path in stacks(sys.stdin):
        root.add(path)
    if not root.count:
        print("flamegraph: no samples on standard input (expects the output of perf script)", file=sys.stderr)
        return 1
    print(render(root))
    return 0


if __name__ == "__main__":
    sys.exit(main())
