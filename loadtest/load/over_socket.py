"""Over the daemon's socket, by colibri_client."""

from __future__ import annotations

from pathlib import Path

from colibri_client import AsyncClient, errors

from .requests import Request
from .runner import Record, RequestError


class OverSocket:
    """One connection, all requests on it. Nothing is tried again: what fails is to be seen."""

    def __init__(self, path: Path) -> None:
        self._client = AsyncClient(path, retries=0, reconnect=0)

    async def open(self) -> int:
        await self._client.connect()
        return self._client.model.vocab_size

    async def send(self, request: Request, record: Record) -> None:
        try:
            async with self._client.generate(request.prompt, max_tokens=request.tokens, temperature=0.0,
                                             ignore_eos=True) as stream:  # fmt: skip
                async for _ in stream:
                    if not record.arrived(1):
                        return
        except errors.ColibriError as e:
            raise RequestError(getattr(e, "name", type(e).__name__)) from e

    async def close(self) -> None:
        await self._client.close()
