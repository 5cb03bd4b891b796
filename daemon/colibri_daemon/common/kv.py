"""How many KV slabs a sequence needs, and which it gives back: pure arithmetic shared by admission, pool and worker."""

from __future__ import annotations

MOST_CHUNK = 512  # tokens of a prefill chunk, unless step_tokens says otherwise
OWNER_BYTES = 16  # of a salt: whose it is; what follows tells apart what this owner does not want to share
SPARE = 4  # slabs only partly in use: at the end of the prefix, at both ends of the window, and one kept for a resume


def slabs_needed(length: int, pinned: int, window: int, chunk: int, slab_tokens: int) -> int:
    """Most slabs that a sequence of up to ``length`` tokens holds at once when it is computed in chunks of up to
    ``chunk`` tokens. window 0 = full attention."""
    whole = -(-length // slab_tokens)
    if not window:
        return whole
    return min(whole, -(-(pinned + window + chunk) // slab_tokens) + SPARE)


def out_of_view(position: int, pinned: int, window: int, slab_tokens: int) -> range:
    """Indices of the slabs that a sequence with ``position`` tokens computed no longer needs: those that no query sees
    from the boundary one slab before the last full one on, so that a resume finds all it needs from there."""
    boundary = (position // slab_tokens - 1) * slab_tokens
    if not window or boundary < 0:
        return range(0)
    return range(-(-pinned // slab_tokens), max(0, boundary + 1 - window) // slab_tokens)
