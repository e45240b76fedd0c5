"""What to say about a name that is not known."""

import difflib
from collections.abc import Iterable
from typing import Literal

Duplicates = Literal["report", "keep", "merge"]


def suggest(name: str, known: Iterable[str], num: int = 1) -> str:
    """'Did you mean ...?', or the names there are."""
    known = list(dict.fromkeys(known))
    near = difflib.get_close_matches(name.lower(), known, num, cutoff=0.5)
    if near:
        return f"Did you mean {' or '.join(repr(each) for each in near)}?"
    return f"There are: {', '.join(known[:20])}{', ...' if len(known) > 20 else ''}."
