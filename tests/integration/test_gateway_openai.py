"""The gateway in front of the real daemon, used by OpenAI's own packages."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from colibri_client import Client
from colibri_client.text import Tokenizer
from fixtures.daemon import Daemon
from fixtures.gateway import GO, Gateway

PROMPT = "Once upon a time"
TALK: Any = [{"role": "system", "content": "Tell stories."}, {"role": "user", "content": "Of a </s> bird."}]


@pytest.fixture
def client(chat_gateway: Gateway) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=chat_gateway.url + "/v1", api_key="none", max_retries=0) as opened:
        yield opened


@pytest.fixture(scope="module")
def name(chat_daemon: Daemon) -> str:
    with Client(chat_daemon.socket) as direct:
        return str(direct.model.name)


def direct(daemon: Daemon, tokens: list[int], **fields: Any) -> list[int]:
    """What the daemon itself gives."""
    with Client(daemon.socket) as client:
        return list(client.complete(tokens, **fields).tokens)


def test_completion(client, name, chat_daemon, chat_model):
    tokenizer = Tokenizer(chat_model)
    answer = client.completions.create(model=name, prompt=PROMPT, max_tokens=20, temperature=0.8, seed=5)
    tokens = direct(chat_daemon, tokenizer.encode(PROMPT), max_tokens=20, temperature=0.8, seed=5)
    assert answer.choices[0].text == tokenizer.decode(tokens)
    assert answer.usage.completion_tokens == len(tokens)
    assert answer.usage.prompt_tokens == len(tokenizer.encode(PROMPT))
    assert answer.choices[0].finish_reason == "length"
    assert answer.system_fingerprint.startswith("fp_")


def test_completion_stream(client, name):
    fields: Any = {"model": name, "prompt": PROMPT, "max_tokens": 30, "temperature": 0}
    whole = client.completions.create(**fields)
    chunks = list(client.completions.create(**fields, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].text for c in chunks if c.choices) == whole.choices[0].text
    assert len(chunks) > 20
    assert (chunks[-1].choices, chunks[-1].usage.completion_tokens) == ([], whole.usage.completion_tokens)
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason


def test_token_ids_and_batches(client, name, chat_model):
    tokenizer = Tokenizer(chat_model)
    texts = [PROMPT, "The bird"]
    fields: Any = {"model": name, "max_tokens": 8, "temperature": 0}
    by_text = client.completions.create(prompt=texts, **fields)
    by_ids = client.completions.create(prompt=[tokenizer.encode(t) for t in texts], **fields)
    one_by_one = [client.completions.create(prompt=t, **fields).choices[0].text for t in texts]
    assert [c.text for c in by_text.choices] == [c.text for c in by_ids.choices] == one_by_one
    assert [c.index for c in by_text.choices] == [0, 1]


def test_choices_have_seeds_of_their_own(client, name):
    fields: Any = {"model": name, "prompt": PROMPT, "max_tokens": 12, "temperature": 1.0}
    three = client.completions.create(n=3, seed=40, **fields)
    alone = [client.completions.create(seed=40 + j, **fields).choices[0].text for j in range(3)]
    assert [c.text for c in three.choices] == alone
    assert len(set(alone)) > 1


def test_chat(client, name, chat_daemon, chat_model):
    tokenizer = Tokenizer(chat_model)
    answer = client.chat.completions.create(model=name, messages=TALK, max_completion_tokens=16, temperature=0)
    prompt = tokenizer.encode_chat(TALK)
    assert answer.choices[0].message.content == tokenizer.decode(direct(chat_daemon, prompt, max_tokens=16))
    assert answer.choices[0].message.role == "assistant"
    assert answer.usage.prompt_tokens == len(prompt)


def test_chat_stream(client, name):
    fields: Any = {"model": name, "messages": TALK, "max_tokens": 16, "temperature": 0}
    whole = client.chat.completions.create(**fields)
    chunks = list(client.chat.completions.create(**fields, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason


def test_the_stream_helper(client, name):
    fields: Any = {"model": name, "messages": TALK, "max_tokens": 16, "temperature": 0}
    text = client.chat.completions.create(**fields).choices[0].message.content
    with client.chat.completions.stream(**fields, stop=text[10:]) as stream:  # at max_tokens the helper raises
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        assert (
            "".join(deltas) == stream.get_final_completion().choices[0].message.content == text[: text.index(text[10:])]
        )


def test_cached_tokens(client, name):
    prompt = "the same beginning, " * 40
    fields: Any = {"model": name, "prompt": prompt, "max_tokens": 8}
    client.completions.create(**fields)
    assert client.completions.create(**fields).usage.prompt_tokens_details.cached_tokens >= 64


def test_completion_logprobs(client, name, chat_daemon, chat_model):
    tokenizer = Tokenizer(chat_model)
    answer = client.completions.create(model=name, prompt=PROMPT, max_tokens=6, temperature=0, logprobs=3)
    with Client(chat_daemon.socket) as colibri:
        tokens = list(colibri.generate(tokenizer.encode(PROMPT), max_tokens=6, logprobs=3))
    scores = answer.choices[0].logprobs
    assert scores.token_logprobs == pytest.approx([t.logprob for t in tokens])
    assert "".join(scores.tokens) == answer.choices[0].text
    assert [len(top) for top in scores.top_logprobs] == [3] * 6
    for token, top in zip(scores.tokens, scores.top_logprobs, strict=True):
        assert max(top, key=top.get) == token
    assert scores.text_offset == [sum(map(len, scores.tokens[:i])) for i in range(6)]


def test_echo_scores_the_prompt(client, name, chat_daemon, chat_model):
    prompt = Tokenizer(chat_model).encode(PROMPT)
    answer = client.completions.create(model=name, prompt=PROMPT, max_tokens=0, echo=True, logprobs=0)
    with Client(chat_daemon.socket) as colibri:
        scores = colibri.score(prompt)
    assert answer.choices[0].text == PROMPT
    assert answer.choices[0].logprobs.token_logprobs[0] is None
    assert answer.choices[0].logprobs.token_logprobs[1:] == pytest.approx(list(scores.logprobs))


def test_chat_logprobs(client, name):
    fields: Any = {
        "model": name,
        "messages": TALK,
        "max_tokens": 8,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 2,
    }
    whole = client.chat.completions.create(**fields).choices[0]
    streamed = [entry for chunk in client.chat.completions.create(**fields, stream=True)
                if chunk.choices[0].logprobs for entry in chunk.choices[0].logprobs.content]  # fmt: skip
    assert streamed == whole.logprobs.content
    assert len(streamed) == 8
    assert b"".join(bytes(e.bytes) for e in streamed).decode(errors="replace") == whole.message.content
    for entry in streamed:
        assert entry.top_logprobs[0].token == entry.token
        assert entry.top_logprobs[0].logprob == entry.logprob


@pytest.mark.parametrize("streamed", [False, True])
def test_stop(client, name, streamed):
    fields: Any = {"model": name, "prompt": PROMPT, "temperature": 0}
    full = client.completions.create(**fields, max_tokens=40)
    text = full.choices[0].text
    stop = text[25:31]
    wanted = text[: text.index(stop)]
    answer = client.completions.create(
        **fields,
        max_tokens=400,
        stop=["never there", stop],
        stream=streamed,
        **({"stream_options": {"include_usage": True}} if streamed else {}),
    )
    if streamed:
        chunks = list(answer)
        got, finish = "".join(c.choices[0].text for c in chunks if c.choices), chunks[-2].choices[0].finish_reason
        usage = chunks[-1].usage
    else:
        got, finish, usage = answer.choices[0].text, answer.choices[0].finish_reason, answer.usage
    assert (got, finish) == (wanted, "stop")
    assert usage.completion_tokens < 40


def test_models(client, name):
    assert [m.id for m in client.models.list()] == [name]
    assert client.models.retrieve(name).owned_by == "colibri"


@pytest.mark.parametrize(
    ("fields", "kind", "param", "code"),
    [
        ({"model": "other"}, openai.NotFoundError, "model", "model_not_found"),
        ({"temperature": -1}, openai.BadRequestError, "temperature", "invalid_argument"),
        ({"messages": []}, openai.BadRequestError, "messages", "invalid_argument"),
        (
            {"messages": [{"role": "user", "content": "word " * 300_000}]},
            openai.BadRequestError,
            "messages",
            "context_length_exceeded",
        ),
        ({"response_format": {"type": "json_object"}}, openai.BadRequestError, "response_format.type", "unsupported"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, openai.BadRequestError, "tools", "unsupported"),
        ({"logit_bias": {"99999": 1}}, openai.BadRequestError, "logit_bias", "token_out_of_range"),
    ],
)
def test_errors(client, name, fields, kind, param, code):
    with pytest.raises(kind) as caught:
        client.chat.completions.create(**{"model": name, "messages": TALK} | fields)
    assert (caught.value.param, caught.value.code) == (param, code)
    assert caught.value.request_id


def test_deadline(client, name):
    """Passed before the first token it is an error, after it what there is."""
    with pytest.raises(openai.APIStatusError) as caught:
        client.completions.create(model=name, prompt="word " * 5000, extra_headers={"X-Deadline-Ms": "1"})
    assert (caught.value.status_code, caught.value.code) == (504, "deadline_exceeded")
    endless: Any = {"max_tokens": 100_000, "extra_body": {"ignore_eos": True}}
    answer = client.completions.create(model=name, prompt=PROMPT, extra_headers={"X-Deadline-Ms": "400"}, **endless)
    assert answer.choices[0].finish_reason == "deadline"
    assert answer.usage.completion_tokens > 0


def idle(daemon: Daemon) -> None:
    """Waits until nothing runs and no KV memory is held by a request."""
    with Client(daemon.socket) as colibri:
        daemon.until(lambda: (s := colibri.stats()).running == s.waiting == 0 and not s.kv_slabs["live"])


def aborted(daemon: Daemon) -> int:
    return len(daemon.log(msg="request ended", finish="abort"))


def test_a_timeout_cancels(client, name, chat_daemon, chat_gateway):
    """Not streaming: the package gives up waiting and closes, and the daemon stops."""
    before = aborted(chat_daemon)
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.3).completions.create(
            model=name, prompt=PROMPT, max_tokens=100_000, extra_body={"ignore_eos": True}
        )
    chat_daemon.until(lambda: aborted(chat_daemon) == before + 1)
    chat_gateway.until(lambda: chat_gateway.log(msg="request", status=499))
    idle(chat_daemon)


def test_leaving_a_stream_cancels(client, name, chat_daemon):
    before = aborted(chat_daemon)
    with client.completions.create(model=name, prompt=PROMPT, max_tokens=100_000, stream=True,
                                   extra_body={"ignore_eos": True}) as stream:  # fmt: skip
        for _, _ in zip(range(5), stream, strict=False):
            pass
    chat_daemon.until(lambda: aborted(chat_daemon) == before + 1)
    idle(chat_daemon)


async def test_many_at_once(name, chat_gateway):
    async with openai.AsyncOpenAI(base_url=chat_gateway.url + "/v1", api_key="none", max_retries=0) as client:

        async def ask(i: int) -> str:
            stream = await client.completions.create(model=name, prompt=PROMPT, max_tokens=20, seed=i % 4, stream=True)
            return "".join([chunk.choices[0].text async for chunk in stream])

        texts = await asyncio.gather(*(ask(i) for i in range(32)))
    assert len(set(texts)) <= 4
    assert all(texts[i] == texts[i % 4] for i in range(32))


@pytest.mark.skipif(shutil.which("go") is None, reason="needs Go")
def test_the_go_package(chat_gateway):
    subprocess.run(
        ["go", "test", "-count=1", "-run", "TestOpenAIPackage", "./gateway/openaitest"],
        cwd=GO,
        check=True,
        env={**os.environ, "COLIBRI_GATEWAY_URL": chat_gateway.url, "GOFLAGS": "-p=1"},
        timeout=300,
    )
