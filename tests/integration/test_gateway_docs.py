"""What deploy/GATEWAY.md shows works."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from fixtures.gateway import Gateway

GUIDE = (Path(__file__).resolve().parents[2] / "deploy" / "GATEWAY.md").read_text(encoding="utf-8")
LOCAL = "http://localhost:8080"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", GUIDE, re.DOTALL)


def commands() -> list[str]:
    return [command for block in blocks("sh") for command in re.split(r"\n(?=curl )", block.strip())]


def test_every_path_is_shown() -> None:
    shown = {re.search(rf"{LOCAL}(\S+)", command)[1] for command in commands()}
    assert shown >= {"/health/ready", "/v1/models", "/v1/completions", "/v1/chat/completions", "/v1/generate",
                     "/v1/score", "/tokenize", "/detokenize", "/openapi.json", "/metrics"}  # fmt: skip


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
@pytest.mark.parametrize("command", commands(), ids=lambda command: command.split(LOCAL)[1].split()[0])
def test_curl(chat_gateway: Gateway, command: str) -> None:
    done = subprocess.run(["bash", "-c", command.replace(LOCAL, chat_gateway.url)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    if '"stream": true' in command:
        assert done.stdout.endswith("data: [DONE]\n\n")
        assert '"usage":{' in done.stdout
    elif "/metrics" in command:
        assert "colibri_gateway_build_info{" in done.stdout
    else:
        assert all(json.loads(line) for line in done.stdout.splitlines() if line[:1] == "{" and line[-1:] == "}")


def test_python(chat_gateway: Gateway) -> None:
    pytest.importorskip("openai")
    (code,) = blocks("python")
    subprocess.run([sys.executable, "-W", "error", "-c", code.replace(LOCAL, chat_gateway.url)], check=True)
