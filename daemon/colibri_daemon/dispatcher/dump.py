"""What the dispatcher knows, as JSON: for ADMIN_DUMP. Counts, ids, states and ages; never tokens."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from typing import Any

from .generation import Generation
from .pool_link import PoolLink
from .server import Server
from .session import Session
from .streams import TOKEN, Phase, Stream
from .workers import Worker

MOST_REQUESTS = 2000  # that are listed, the oldest first


def dump(server: Server) -> dict[str, Any]:
    now, requests = server.clock(), server.requests
    streams = list(requests.live.values())
    listed = [_request(stream, now) for stream in streams[:MOST_REQUESTS]]
    return {
        "dispatcher": {"pid": os.getpid(), "version": server.version, "uptime_s": round(server.uptime, 3),
                       "generation": server.generation, "draining": requests.draining},
        "health": server.health.reply().to_body(),
        "generations": [_generation(generation) for generation in server.generations],
        "pools": [_pool(pool) for pool in dict.fromkeys(generation.pool for generation in server.generations)],
        "workers": [_worker(worker, generation) for generation in server.generations for worker in generation.workers],
        "connections": [_connection(session, now) for session in server.sessions],
        "queue": _queue(streams),
        "requests": listed,
        "omitted": len(streams) - len(listed),
    }  # fmt: skip


def shortened(result: dict[str, Any], most: int) -> bytes:
    """The result as JSON of at most so many bytes; for that its longest list loses its end, as often as needed."""
    text = json.dumps(result, separators=(",", ":"), default=str).encode()
    lists = [name for name, value in result.items() if isinstance(value, list) and len(value) > 1]
    if len(text) <= most or not lists:
        return text
    name = max(lists, key=lambda name: len(result[name]))
    kept = len(result[name]) // 2
    omitted = result.get("omitted", 0) + len(result[name]) - kept
    return shortened(result | {name: result[name][:kept], "omitted": omitted}, most)


def _generation(generation: Generation) -> dict[str, Any]:
    facts = generation.facts
    return {"generation": generation.number, "model": facts.name, "id": facts.id, "fingerprint": facts.fingerprint,
            "requests": len(generation.streams), "waiting": len(generation.queue),
            "waiting_tokens": generation.queue.tokens}  # fmt: skip


def _pool(pool: PoolLink) -> dict[str, Any]:
    return {"connected": pool.connected, "available": pool.available, "usable": pool.usable, "slabs": pool.slabs,
            "leases": {str(slot): slabs for slot, slabs in pool.leases.items()}, "counters": pool.counters}


def _worker(worker: Worker, generation: Generation) -> dict[str, Any]:
    return {"generation": generation.number, "slot": worker.slot, "epoch": worker.epoch, "pid": worker.pid,
            "loaded": worker.loaded, "running": len(worker.running), "room": worker.room, "steps": worker.steps,
            "stall_ms": worker.stall_ms, "kv_free_list": worker.free, "kv_promised": worker.promised,
            "unsent_bytes": worker.channel.buffered}  # fmt: skip


def _connection(session: Session, now: float) -> dict[str, Any]:
    return {"connection": session.number, "pid": session.peer.pid, "uid": session.peer.uid,
            "age_s": round(now - session.opened, 3), "requests": len(session.streams), "credit": session.credit,
            "unsent_bytes": session.channel.buffered, "paused": session.pausing, "leaving": session.leaving}


def _request(stream: Stream, now: float) -> dict[str, Any]:
    uid, tenant = stream.owner
    worker = stream.worker
    return {
        "key": stream.key, "connection": stream.connection, "id": stream.id, "uid": uid, "tenant": tenant,
        "trace": stream.job.trace, "request_id": stream.job.request_id,
        "kind": "score" if stream.is_score else "generate", "phase": stream.phase.name.lower(),
        "generation": stream.generation.number, "worker": None if worker is None else worker.slot,
        "age_s": round(now - stream.arrived, 3), "deadline_s": round(stream.deadline - now, 3),
        "silent_s": round(now - stream.last_at, 3) if stream.last_at else None, "priority": stream.priority,
        "prompt": stream.prompt, "cached": stream.cached, "generated": len(stream.tokens) // TOKEN, "sent": stream.sent,
        "attempt": stream.attempt, "preemptions": stream.preemptions, "paused": stream.paused,
    }  # fmt: skip


def _queue(streams: list[Stream]) -> list[dict[str, Any]]:
    """By owner."""
    waiting: defaultdict[Any, list[Stream]] = defaultdict(list)
    for stream in streams:
        if stream.phase is Phase.QUEUED:
            waiting[stream.owner].append(stream)
    return [{"uid": uid, "tenant": tenant, "requests": len(queued), "tokens": sum(stream.cost for stream in queued)}
            for (uid, tenant), queued in waiting.items()]
