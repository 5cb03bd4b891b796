"""Messages with the KV pool process: its links to workers and to the dispatcher. Framing and packing are ipc.py's.

A request is known by its key (ipc.ASSIGN) in every worker and attempt. "ordinal" is the index of a slab in its
sequence, which holds tokens [ordinal * T, (ordinal + 1) * T). "request" below is a map {tokens (bin), salt (bin), use
(bool), pinned, window, positions, limit}: tokens are prompt and output so far, limit the most of them that may come
from the cache.
"""

from __future__ import annotations

# ---- worker → pool -------------------------------------------------------------------------------------------------
HELLO = 1  # [HELLO, {slot, epoch, geometry: {slabs, slab_bytes, slab_tokens, kv_format}, leased, held}]: first message;
#            leased: [slab, ...] and held: {key: [request, [[ordinal, slab], ...]]} are what a worker has when the pool
#            is a new one; a worker that has not said ready to the supervisor must have nothing
ALLOC = 2  # [ALLOC, n]: wants n more slabs for its free list
ATTACH = 3  # [ATTACH, key, request]
COMMIT = 4  # [COMMIT, key, ordinal, slab, tokens (bin, T ids), crc]: the slab is full and will not change
RELEASE = 5  # [RELEASE, key]: the request has left this worker
GIVE = 6  # [GIVE, [slab, ...]]: leased slabs back
BAD = 7  # [BAD, slab]: its contents do not match its CRC

# ---- pool → worker -------------------------------------------------------------------------------------------------
GRANT = 17  # [GRANT, [slab, ...]]: in parts if need be; what cannot be met now comes when it can
ATTACHED = 18  # [ATTACHED, key, n, [[ordinal, slab, crc or None], ...]]: the first n tokens need not be computed; with
#                a crc: verify before use. Deferred while another request computes the next slab
COMMITTED = 19  # [COMMITTED, key, [ordinal, ...]]: for each COMMIT; these are out of view, no more the request's
VERIFY = 20  # [VERIFY, [[slab, crc], ...]]: check once, answer BAD for each mismatch; compute again what is in slabs
#                that are not committed yet

# ---- dispatcher → pool ---------------------------------------------------------------------------------------------
DROP = 32  # [DROP, key]: ended. For each request that a worker ever had: it may have died before its RELEASE
LOOKUP = 33  # [LOOKUP, id, request]

# ---- pool → dispatcher ---------------------------------------------------------------------------------------------
STATS = 48  # [STATS, {name: number}]: on change, at most every 20 ms
LOOKED = 49  # [LOOKED, id, n]
SHORT = 50  # [SHORT, slot, n]: a worker's ALLOC cannot be met even by eviction; n are missing. Again when n changes
RELIEVED = 51  # [RELIEVED, slot]

# ---- supervisor ↔ pool, on control ---------------------------------------------------------------------------------
# {"t": "peers", "workers": [[slot, epoch], ...]}   first of all: who may have slabs of a former pool process
# {"t": "peer", "kind": "worker" or "dispatcher", "slot", "epoch", "pid"} + fd
# {"t": "dead", "slot", "epoch", "fault"}           a worker is reaped; only now do its leases return
# ← {"t": "ready"}, {"t": "failed", "reason"}       as in ipc.py
# ← {"t": "kill", "kind", "slot", "epoch", "reason"}  it broke the protocol: SIGKILL, if it is still this process
