"""Whether one side was given twice: the same folder, or links to the same files."""

from __future__ import annotations

from mtpconvert.audit.findings import Finding, finding
from mtpconvert.audit.readers.side import Side


def check_itself(left: Side, right: Side) -> list[Finding]:
    """A finding when every weight file of the right is, on disk, one of the left's. Reads no file."""
    one, two = _on_disk(left), _on_disk(right)
    if not two or not two <= one:
        return []
    how = "one folder, given twice" if left.root.resolve() == right.root.resolve() else "links to the same files"
    text = f"the {len(two)} weight files of the right are those of the left ({how}): nothing but that was shown"
    return [finding("compared-with-itself", text, side="both", count=len(two))]


def _on_disk(side: Side) -> set[tuple[int, int]]:
    """Device and inode of each weight file that is there."""
    stats = [path.stat() for path in side.files if path.exists()]
    return {(stat.st_dev, stat.st_ino) for stat in stats if stat.st_ino}
