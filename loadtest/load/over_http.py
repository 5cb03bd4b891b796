"""Over HTTP, by POST /v1/completions of any server that has OpenAI's interface and takes prompts as token ids."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import aiohttp

from .requests import Request
from .runner import Record, RequestError

VOCAB = 30_000  # smaller than that of any common model
# Not OpenAI's: ignore_eos so that outputs have the length that was asked for, return_token_ids so that a message's
# tokens can be counted. llama-server, vLLM and the gateway know the first, vLLM and the gateway the second.
EXTRA: dict[str, Any] = {"ignore_eos": True, "return_token_ids": True}


class OverHttp:
    """url: the server, with or without /v1. extra: fields of the body; null takes one of EXTRA away.

    Each request has a connection of its own: llama-server closes kept ones as it likes, and a request that meets that
    would fail."""

    def __init__(self, url: str, *, model: str | None = None, key: str | None = None, vocab: int = VOCAB,
                 extra: Mapping[str, Any] | None = None) -> None:
        self._base = url.rstrip("/").removesuffix("/v1") + "/v1"
        self._model, self._key, self._vocab = model, key, vocab
        self._extra = {k: v for k, v in (EXTRA | dict(extra or {})).items() if v is not None}

    async def open(self) -> int:
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        self._http = aiohttp.ClientSession(headers=headers, connector=aiohttp.TCPConnector(limit=0, force_close=True),
                                           timeout=aiohttp.ClientTimeout(total=None), read_bufsize=1 << 20)  # fmt: skip
        try:
            self._model = self._model or await self._first_model()
        except BaseException:
            await self._http.close()
            raise
        return self._vocab

    async def _first_model(self) -> str:
        async with self._http.get(f"{self._base}/models") as answer:
            if answer.status != 200:
                raise RequestError(await _reason(answer))
            return str((await answer.json())["data"][0]["id"])

    async def send(self, request: Request, record: Record) -> None:
        body = {"model": self._model, "prompt": request.prompt, "max_tokens": request.tokens, "temperature": 0,
                "stream": True, "stream_options": {"include_usage": True}} | self._extra  # fmt: skip
        try:
            async with self._http.post(f"{self._base}/completions", json=body) as answer:
                if answer.status != 200:
                    raise RequestError(await _reason(answer))
                await _read(answer, record)
        except (aiohttp.ClientError, OSError, ValueError, KeyError) as e:
            raise RequestError(type(e).__name__) from e

    async def close(self) -> None:
        await self._http.close()


async def _read(answer: aiohttp.ClientResponse, record: Record) -> None:
    """Server-sent events to their end. What usage says is the number of tokens; a message without ids counts as one."""
    async for line in answer.content:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            raise RequestError(_name(event["error"], "error in the stream"))
        for choice in event.get("choices", ()):
            tokens = len(choice.get("token_ids") or ()) or bool(choice.get("text"))
            if tokens and not record.arrived(tokens):
                return
        if usage := event.get("usage"):
            record.tokens = usage["completion_tokens"]
    if not record.left:
        raise RequestError("broken off")


async def _reason(answer: aiohttp.ClientResponse) -> str:
    try:
        error = json.loads(await answer.read())["error"]
    except (ValueError, KeyError, TypeError):
        return f"HTTP {answer.status}"
    return _name(error, f"HTTP {answer.status}")


def _name(error: Any, otherwise: str) -> str:
    """What OpenAI's error object calls itself, if that is a word."""
    found = (error.get("code") or error.get("type")) if isinstance(error, dict) else None
    return f"{otherwise} {found}" if isinstance(found, str) else otherwise
