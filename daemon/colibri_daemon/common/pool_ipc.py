"""Messages with the KV pool process: its links to workers and to the dispatcher. Framing and packing are ipc.py's.

A request is known by its key (ipc.ASSIGN) in every worker and attempt. "ordinal" is the index of a slab in its
sequence, which holds tokens [ordinal * T, (ordinal + 1) * T). "request" below is a map {tokens (bin), salt (bin), use
(bool), pinned, window, positions, limit, verify (bool)}: tokens are prompt and output so far, limit the most of them
that may come from the cache; verify: give the CRC of every slab.

A worker can write only what it is filling (worker/guard.py). Should other slabs be damaged all the same: after a
worker's death by a fault what the others hold is verified (VERIFY), what was committed shortly before is computed
again, since damage may have gone into it, and what they commit until they have answered (VERIFIED) nobody finds. What
is not undone are tokens that were sent before anybody knew.
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
VERIFIED = 8  # [VERIFIED]: for each VERIFY, behind the BAD, RELEASE and ATTACH that came of it

# ---- pool → worker -------------------------------------------------------------------------------------------------
GRANT = 17  # [GRANT, [slab, ...]]: in parts if need be; what cannot be met now comes when it can
ATTACHED = 18  # [ATTACHED, key, n, [[ordinal, slab, crc or None], ...]]: the first n tokens need not be computed; with
#                a crc: verify before use. Deferred while another request computes the next slab
COMMITTED = 19  # [COMMITTED, key, [ordinal, ...]]: for each COMMIT; these are out of view, no more the request's
VERIFY = 20  # [VERIFY, [[slab, crc or None], ...]]: check once, answer BAD for each mismatch. Requests with such a
#              slab, with one without a crc, or with a COMMIT that is not answered are released and attached again; of
#              the others what is in slabs that are not committed yet is computed again

# ---- dispatcher → pool ---------------------------------------------------------------------------------------------
DROP = 32  # [DROP, key]: ended. For each request that a worker ever had: it may have died before its RELEASE
LOOKUP = 33  # [LOOKUP, id, request]
EVICT = 34  # [EVICT, id, owner]: drop what is cached under salts that begin with owner, or all if it is nil; what live
#             requests hold stays until they end, but is found no more
KILLED = 35  # [KILLED, [slot, epoch]]: a worker's main thread was ended by SIGKILL. What it had said counts, and others
#              may take its requests over; its leases return when the supervisor says that it is dead

# ---- pool → dispatcher ---------------------------------------------------------------------------------------------
STATS = 48  # [STATS, {name: number}]: on change, at most every 20 ms
LOOKED = 49  # [LOOKED, id, n]
SHORT = 50  # [SHORT, [slot, epoch], n]: a worker's ALLOC cannot be met even by eviction; n are missing. Again when n
#             changes
RELIEVED = 51  # [RELIEVED, [slot, epoch]]
EVICTED = 52  # [EVICTED, id, n]: n slabs became free

# ---- supervisor ↔ pool, on control ---------------------------------------------------------------------------------
# {"t": "peers", "workers": [[slot, epoch], ...]}   first of all: who may have slabs of a former pool process. "fault":
#                                                   monotonic seconds of a worker's death by a fault of which the
#                                                   former one may not have heard, if there was one; "usable": so
#                                                   many slabs may have pages for now
# {"t": "peer", "kind": "worker" or "dispatcher", "slot", "epoch", "pid"} + fd
# {"t": "dead", "slot", "epoch", "fault"}           a worker is reaped; only now do its leases return
# {"t": "usable", "slabs"}                          so many may from now on; only grows
# {"t": "retire"}                                   nothing new comes: evict what is cached, give back the pages of
#                                                   what is free
# {"t": "log_level", "level"}
# ← {"t": "held", "slabs"}                          after retire, now and when it changes: so many still have pages
# ← {"t": "ready"}, {"t": "failed", "reason"}       as in ipc.py
# ← {"t": "kill", "kind", "slot", "epoch", "reason"}  it broke the protocol: SIGKILL, if it is still this process
