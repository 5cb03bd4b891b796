"""The gateway as an operator sees it, and what it makes of faults behind it."""

from __future__ import annotations

import json
import os
import signal
import socket
import ssl
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from colibri_client import Client
from fixtures.daemon import Daemon
from fixtures.gateway import Gateway
from fixtures.models import Models

LONG: dict[str, Any] = {
    "prompt": "Once upon a time",
    "max_tokens": 400,
    "temperature": 1,
    "seed": 3,
    "ignore_eos": True,
}


def ask(gateway: Gateway, path: str, body: dict[str, Any] | None = None, **headers: str) -> tuple[int, Any, Any]:
    """Status, headers and text."""
    data = None if body is None else json.dumps(body).encode()
    headers |= {"Content-Type": "application/json"} if body else {}
    request = urllib.request.Request(gateway.url + path, data, headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.headers, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers, error.read().decode()


def complete(gateway: Gateway, **fields: Any) -> str:
    status, _, text = ask(gateway, "/v1/completions", LONG | fields)
    assert status == 200, text
    return str(json.loads(text)["choices"][0]["text"])


class Streaming:
    """A streamed completion, read on a thread of its own. began: its first text has come."""

    def __init__(self, gateway: Gateway, **fields: Any) -> None:
        self.began, self.text, self.error = threading.Event(), "", ""
        body = json.dumps(LONG | fields | {"stream": True}).encode()
        self._request = urllib.request.Request(
            gateway.url + "/v1/completions", body, {"Content-Type": "application/json"}
        )
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        with urllib.request.urlopen(self._request, timeout=60) as answer:
            for line in answer:
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    self.error += str(event.get("error", ""))
                    self.text += "".join(choice["text"] for choice in event.get("choices", ()))
                    self.began.set()

    def end(self) -> str:
        self._thread.join(60)
        assert not self._thread.is_alive()
        assert not self.error
        return self.text


@pytest.mark.parametrize("role", ["worker 0", "dispatcher"])
def test_a_death_behind_it_changes_nothing(gateway_binary: Path, chat_model: Path, role: str) -> None:
    with Daemon(chat_model, workers=2, threads=1) as daemon, Gateway(gateway_binary, daemon.socket) as gateway:
        expected = [complete(gateway, seed=seed) for seed in range(4)]
        streams = [Streaming(gateway, seed=seed) for seed in range(4)]
        for stream in streams:
            assert stream.began.wait(60)
        os.kill(daemon.pid_of(role), signal.SIGKILL)
        assert [stream.end() for stream in streams] == expected


def test_a_restart_of_the_daemon(gateway_binary: Path, chat_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "s"
    with Daemon(chat_model, socket=path, workers=1, threads=1) as daemon, Gateway(gateway_binary, path) as gateway:
        before = complete(gateway)
        assert ask(gateway, "/health/ready")[0] == 200
        assert daemon.stop() == 0
        status, headers, text = ask(gateway, "/health/ready")
        assert (status, json.loads(text)["state"]) == (503, "unreachable")
        status, headers, text = ask(gateway, "/v1/completions", LONG)
        assert (status, json.loads(text)["error"]["code"]) == (503, "daemon_unreachable")
        assert int(headers["Retry-After"]) >= 1
        assert ask(gateway, "/health/live")[0] == 200
        with Daemon(chat_model, socket=path, workers=1, threads=1):
            gateway.until(lambda: ask(gateway, "/health/ready")[0] == 200)
            assert complete(gateway) == before


def test_another_model_after_a_restart(gateway_binary: Path, chat_model: Path, models: Any, tmp_path: Path) -> None:
    path = tmp_path / "s"
    with Daemon(chat_model, socket=path, threads=1), Gateway(gateway_binary, path) as gateway:
        assert (
            ask(gateway, "/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1})[0]
            == 200
        )
        first = json.loads(ask(gateway, "/v1/models")[2])["data"][0]
    with Daemon(models.tiny("q8"), socket=path, threads=1), Gateway(gateway_binary, path) as gateway:
        second = json.loads(ask(gateway, "/v1/models")[2])["data"][0]
        assert second["system_fingerprint"] != first["system_fingerprint"]
        status, _, text = ask(gateway, "/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]})
        assert (status, json.loads(text)["error"]["code"]) == (400, "no_chat_template")


def test_drain(gateway_binary: Path, chat_daemon: Daemon) -> None:
    """Not ready at once; new requests and running ones are answered; then closed; exit code 0."""
    with Gateway(gateway_binary, chat_daemon.socket, drain_delay="1s") as gateway:
        expected = complete(gateway)
        stream = Streaming(gateway)
        assert stream.began.wait(60)
        gateway.process.send_signal(signal.SIGTERM)
        gateway.until(lambda: "draining" in ask(gateway, "/health/ready")[2])
        assert complete(gateway, max_tokens=2)
        assert stream.end() == expected
        assert gateway.process.wait(60) == 0


def test_a_second_signal(gateway_binary: Path, chat_daemon: Daemon) -> None:
    with Gateway(gateway_binary, chat_daemon.socket, drain_delay="1h") as gateway:
        gateway.process.send_signal(signal.SIGTERM)
        gateway.until(lambda: gateway.log(msg="draining"))
        assert gateway.stop() == 0


@contextmanager
def keys(gateway_binary: Path, path: Path, limits: str = "") -> Iterator[str]:
    """A new key in a file."""
    made = subprocess.run(
        [gateway_binary, "hash-key", "alice"], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True
    )
    path.write_text(made.stdout.strip() + limits + "\n")
    yield made.stderr.strip()


def test_keys(gateway_binary: Path, chat_daemon: Daemon, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    with keys(gateway_binary, file, " tenant=lab rps=0.01") as secret, Gateway(
        gateway_binary, chat_daemon.socket, api_keys=file) as gateway:  # fmt: skip
        short = LONG | {"max_tokens": 2}
        assert ask(gateway, "/v1/completions", short)[0] == 401
        assert ask(gateway, "/v1/completions", short, Authorization="Bearer nonsense")[0] == 401
        assert ask(gateway, "/v1/completions", short, Authorization=f"Bearer {secret}")[0] in (200, 403)  # 403: tenants
        status, headers, _ = ask(gateway, "/v1/completions", short, Authorization=f"Bearer {secret}")
        assert (status, headers["Retry-After"]) == (429, "100")
        with keys(gateway_binary, file) as another:
            gateway.until(lambda: ask(gateway, "/v1/models", Authorization=f"Bearer {another}")[0] == 200)
            assert ask(gateway, "/v1/models", Authorization=f"Bearer {secret}")[0] == 401
        assert not [line for line in gateway.log() if secret in json.dumps(line)], "a key is in the log"


def test_tenants(gateway_binary: Path, chat_model: Path, tmp_path: Path) -> None:
    """A key's tenant reaches the daemon if it trusts the gateway's user."""
    file = tmp_path / "keys"
    with (
        keys(gateway_binary, file) as secret,
        Daemon(chat_model, threads=1, trusted_uids=os.getuid()) as daemon,
        Gateway(gateway_binary, daemon.socket, api_keys=file) as gateway,
    ):
        assert ask(gateway, "/v1/completions", LONG | {"max_tokens": 2}, Authorization=f"Bearer {secret}")[0] == 200


def test_ids_and_traces(chat_gateway: Gateway, chat_daemon: Daemon) -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    _, headers, text = ask(chat_gateway, "/v1/completions", LONG | {"max_tokens": 2}, traceparent=trace,
                           **{"X-Request-Id": "my-id.7"})  # fmt: skip
    assert headers["X-Request-Id"] == "my-id.7"
    assert json.loads(text)["id"] == "cmpl-my-id.7"
    (line,) = chat_gateway.until(lambda: chat_gateway.log(msg="request", request_id="my-id.7"))
    assert (line["traceparent"], line["status"], line["generated_tokens"]) == (trace, 200, 2)
    assert chat_daemon.until(lambda: chat_daemon.log(msg="request ended", trace=trace, request_id="my-id.7"))


def test_ids_and_traces_reach_the_workers_log(gateway_binary: Path, chat_model: Path) -> None:
    """From the HTTP header to the line of the process that computed it; a traceparent that is none goes no further."""
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    with (
        Daemon(chat_model, threads=1, log_level="debug") as daemon,
        Gateway(gateway_binary, daemon.socket) as gateway,
    ):
        for path, more in (("completions", {}), ("completions", {"echo": True, "logprobs": 1})):
            ask(gateway, f"/v1/{path}", LONG | {"max_tokens": 2} | more, traceparent=trace,
                **{"X-Request-Id": "a"})  # fmt: skip
        none = trace.replace("b7ad6b7169203331", 16 * "0")
        for bad in (trace.upper(), trace[:-1], trace + "0", "ff" + trace[2:], none):
            ask(gateway, "/v1/completions", LONG | {"max_tokens": 1}, traceparent=bad, **{"X-Request-Id": "b"})
        daemon.until(lambda: len(daemon.log(msg="request left", request_id="b")) == 5)
        lines = daemon.log(msg="request left", request_id="a")
        assert len(lines) == 3  # the echoed prompt's scores are a request of their own
        for line in lines:
            assert (line["role"], line["trace"], line["level"]) == ("worker 0", trace, "debug")
            assert daemon.log(msg="request ended", key=line["key"], request_id="a")
        assert not [line for line in daemon.log(request_id="b") if "trace" in line]


def test_metrics_of_their_own(gateway_binary: Path, chat_daemon: Daemon) -> None:
    with Gateway(gateway_binary, chat_daemon.socket, metrics_listen="127.0.0.1:0") as gateway:
        assert ask(gateway, "/metrics")[0] == 404
        addresses = [line["address"] for line in gateway.log(msg="listening")]
        with urllib.request.urlopen(f"http://{addresses[1]}/metrics", timeout=60) as answer:
            assert b'colibri_gateway_requests_total{code="404"' in answer.read()


def test_unix_socket(gateway_binary: Path, chat_daemon: Daemon, tmp_path: Path) -> None:
    path = tmp_path / "http"
    with Gateway(gateway_binary, chat_daemon.socket, listen=f"unix:{path}", listen_mode="0600"):
        assert path.stat().st_mode & 0o777 == 0o600
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(str(path))
            sock.sendall(b"GET /health/live HTTP/1.0\r\n\r\n")
            assert sock.makefile("rb").readline() == b"HTTP/1.0 200 OK\r\n"
    assert not path.exists()


def test_systemd_socket(gateway_binary: Path, chat_daemon: Daemon) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        script = f'LISTEN_PID=$$ LISTEN_FDS=1 exec "{gateway_binary}" --listen systemd --socket {chat_daemon.socket}'
        process = subprocess.Popen(["bash", "-c", f"exec 3<&{server.fileno()}; {script}"], pass_fds=[server.fileno()],
                                   stderr=subprocess.PIPE)  # fmt: skip
        try:
            with urllib.request.urlopen(f"http://{address}/health/live", timeout=60) as answer:
                assert answer.status == 200
        finally:
            process.terminate()
            _, log = process.communicate(timeout=60)
        assert process.returncode == 0, log


def test_tls(gateway_binary: Path, chat_daemon: Daemon, tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    name = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    made = ["openssl", "req", "-x509", *curve, *name, "-keyout", key, "-out", cert]
    subprocess.run(made, check=True, capture_output=True)
    with Gateway(gateway_binary, chat_daemon.socket, tls_cert=cert, tls_key=key) as gateway:
        trust = ssl.create_default_context(cafile=str(cert))
        with urllib.request.urlopen(gateway.url + "/health/ready", timeout=60, context=trust) as answer:
            assert answer.status == 200


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (["--nonsense"], 2, "nonsense"),
        (["--max-body", "0"], 2, "max-body must be positive"),
        (["--api-keys", "/nonexistent/keys"], 2, "API key file"),
        (["--tls-cert", "x", "--tls-key", "y"], 2, "cannot start"),
        (["--listen", "unix:/nonexistent/s"], 5, "cannot listen"),
        (["--listen", "systemd"], 5, ".socket unit"),
    ],
)
def test_refusals(gateway_binary: Path, flags: list[str], code: int, message: str) -> None:
    done = subprocess.run([gateway_binary, *flags], capture_output=True, text=True, timeout=60)
    assert done.returncode == code
    assert message in done.stderr


def test_credits_bound_a_slow_reader(chat_gateway: Gateway, chat_daemon: Daemon) -> None:
    """A client that stops reading stops its stream, not its neighbour's; when it reads on, it has the whole."""
    fields = {"max_tokens": 3000, "logprobs": 5}
    host, port = chat_gateway.address.rsplit(":", 1)
    body = json.dumps(LONG | fields | {"stream": True}).encode()
    with socket.socket() as sock, Client(chat_daemon.socket) as client:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect((host, int(port)))
        sock.sendall(
            b"POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: "
            + str(len(body)).encode()
            + b"\r\n\r\n"
            + body
        )
        chat_daemon.until(lambda: (s := client.stats()).counters["generation_tokens_total"] > 0 and s.running >= 0)
        assert complete(chat_gateway, max_tokens=20)
        stream = b"".join(iter(lambda: sock.recv(1 << 16), b""))
    events = [json.loads(line[6:]) for line in stream.split(b"\n") if line.startswith(b"data: {")]
    assert "".join(choice["text"] for event in events for choice in event["choices"]) == complete(
        chat_gateway, **fields
    )


def test_another_model_behind_a_running_gateway(models: Models, gateway_binary: Path, tmp_path: Path) -> None:
    """What has begun ends with the model it began with; what comes then gets the new one, and is told so."""
    config, old, new = tmp_path / "colibrid.toml", models.tiny("q4"), models.tiny("q8")
    config.write_text(f'model = "{old}"\nthreads = 1\n')
    with Daemon(None, config=config) as daemon, Gateway(gateway_binary, daemon.socket) as gateway:
        right = complete(gateway)
        before = json.loads(ask(gateway, "/v1/models")[2])["data"][0]["system_fingerprint"]
        stream = Streaming(gateway, max_tokens=3000)
        assert stream.began.wait(60)
        config.write_text(f'model = "{new}"\nthreads = 1\n')
        daemon.signal(signal.SIGHUP)
        daemon.until(lambda: json.loads(ask(gateway, "/v1/models")[2])["data"][0]["system_fingerprint"] != before)
        other = complete(gateway)
        assert stream.end().startswith(right)
        daemon.until(lambda: daemon.log(msg="reload done"))
    with Daemon(new, threads=1) as daemon, Gateway(gateway_binary, daemon.socket) as gateway:
        assert complete(gateway) == other
