"""Which files of a source are not those of a saved run, from a few digits a file beside its fingerprint.

    9f0c64aa01e2b7d3                    one file: the fingerprint alone, as ever
    9f0c64aa01e2b7d3 3 81f00c5577aa     three files, and a tag of each: 4 hex digits of its own digest
    9f0c64aa01e2b7d3 900 0b1d…          more files than tags: a tag is of a run of neighbours, as equal as can be

The fingerprint alone decides; tags only let an error say more, so one that is missing or made up does no harm.
"""

import hashlib
import itertools
import re
from collections import Counter
from collections.abc import Sequence

__all__ = ["FINGERPRINT", "file_tags", "list_some", "other_files"]

FINGERPRINT = 16
"""Hex digits of a fingerprint in a state; what follows are tags."""

DIGITS, MOST, LEAST, SHOWN = 4, 64, 4, 8
_TAGGED = re.compile(rf"[0-9a-f]{{{FINGERPRINT}}} ([1-9][0-9]{{0,8}}) ((?:[0-9a-f]{{{DIGITS}}})+)")


def file_tags(digests: "Sequence[str]", sources: int) -> str:
    """What follows the fingerprint of a source in the state of a run of so many: "" for a source of one file.

    digests: hex, of the source's files in order.
    """
    if len(digests) < 2:
        return ""
    runs = _runs(len(digests), min(len(digests), max(LEAST, MOST // max(1, sources))))
    return f" {len(digests)} {''.join(_tag(digests[a:b]) for a, b in runs)}"


def _runs(files: int, tags: int) -> "list[tuple[int, int]]":
    return list(itertools.pairwise(i * files // tags for i in range(tags + 1)))


def _tag(digests: "Sequence[str]") -> str:
    """Of one file the beginning of its digest, else a digest of theirs."""
    whole = digests[0] if len(digests) == 1 else hashlib.blake2b("".join(digests).encode(), digest_size=8).hexdigest()
    return whole[:DIGITS]


def list_some(names: "Sequence[str]") -> str:
    """The first eight, and how many more there are."""
    more = [f"and {len(names) - SHOWN} more"] if len(names) > SHOWN else []
    return ", ".join([*names[:SHOWN], *more])


def other_files(saved: str, digests: "Sequence[str]", paths: "Sequence[str]") -> str:
    """Which files are not the saved ones, for an error; all of them where tags do not say.

    saved: fingerprint and tags. digests, paths: of the files that are here, in order.
    """
    found = _TAGGED.fullmatch(saved)
    files, tags = (int(found[1]), re.findall(f".{{{DIGITS}}}", found[2])) if found else (0, [])
    if not 2 <= len(tags) <= files or not paths:
        return list_some(paths)
    if len(tags) < files:
        return _other_runs(files, tags, digests, paths)
    here = [_tag([digest]) for digest in digests]
    if here == tags:  # another digest with the same four digits
        return f"one of {list_some(paths)}"
    if Counter(here) == Counter(tags):
        where = dict(zip(here, paths, strict=True))
        return f"the same {files} files in another order; saved: {list_some([where[tag] for tag in tags])}"
    if len(paths) == files:
        others = [path for path, a, b in zip(paths, here, tags, strict=True) if a != b]
        return f"{len(others)} of its {files} files, not as saved: {list_some(others)}"
    unknown = [path for path, tag in zip(paths, here, strict=True) if tag not in tags]
    gone = [str(i) for i, tag in enumerate(tags, 1) if tag not in here]
    said = [f"{len(paths)} files, saved with {files}"]
    if unknown:
        said.append(f"not among the saved: {list_some(unknown)}")
    if gone:
        said.append(f"not here: of the saved ones number {list_some(gone)}")
    return "; ".join(said)


def _other_runs(files: int, tags: "list[str]", digests: "Sequence[str]", paths: "Sequence[str]") -> str:
    """The same where a tag is of a run of files."""
    runs = [
        (a, b)
        for (a, b), tag in zip(_runs(files, len(tags)), tags, strict=True)
        if b <= len(digests) and _tag(digests[a:b]) != tag
    ]
    named = [f"number {a + 1} … {b} ({paths[a]} … {paths[b - 1]})" for a, b in runs]
    if len(paths) != files:
        first = f"; the first that differs is of number {named[0].removeprefix('number ')}" if named else ""
        return f"{len(paths)} files, saved with {files}{first}"
    return f"of its {files} files some of {list_some(named)}" if named else f"one of {list_some(paths)}"
