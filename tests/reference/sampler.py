"""The sampler's definition in numpy: an independent reading of the comment in engine_c/src/sampler/sampler.c.

Every token decision is made with the documented IEEE operations in float32 and float64 and with exact integers, so
the engine must return the same token for every request. Nothing is shared with the engine but the definition and the
constants of exp. Log probabilities come from numpy's own exp and log and agree to rounding, not to the bit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
GREEDY_BELOW = np.float32(1e-5)
WORD = 0xFFFFFFFF


class NonFiniteError(ValueError):
    """A logit, or a logit after bias, penalties or temperature, is NaN or +inf."""


class NoTokenError(ValueError):
    """The mask and the penalties exclude every token."""


@dataclass(frozen=True)
class Sampling:
    """The fields of colibri_sampling_t that decide the token; None, 0 and 1 mean what they mean there."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    position: int = 0
    prompt: Sequence[int] = ()
    generated: Sequence[int] = ()
    bias: Mapping[int, float] = field(default_factory=dict)
    allowed: npt.NDArray[np.bool_] | None = None  # [vocab]


# ---- arithmetic -------------------------------------------------------------------------------------------------


def fma32(a: F32, b: F32, c: F32) -> F32:
    """a * b + c rounded once: exact product in float64, sum rounded to odd there, then to float32."""
    product, addend = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
    total = product + addend
    back = total - product
    error = (product - (total - back)) + (addend - back)
    bits = total.view(np.int64)
    outward = (error > 0) == (total > 0)
    odd = bits + np.where(outward, 1, -1)
    inexact = (error != 0) & (bits & 1 == 0) & np.isfinite(total)
    return np.where(inexact, odd, bits).view(np.float64).astype(np.float32)


LOG2E, LN2_HI, LN2_LO = np.float32(1.44269504), np.float32(0.693145752), np.float32(1.42860677e-6)
POLYNOMIAL = np.array(
    [1.37805939e-3, 8.37312452e-3, 4.16695364e-2, 1.66664720e-1, 4.99999851e-1, 1.0, 1.0], dtype=np.float32
)
EXP_LOWEST = np.float32(-87.336544)


def exp32(x: F32) -> F32:
    """The engine's float exp for x <= 0 (clb_expf)."""
    inside = np.where(x < EXP_LOWEST, np.float32(0), x)
    n = np.rint(inside * LOG2E)
    r = fma32(n, np.full_like(n, -LN2_LO), fma32(n, np.full_like(n, -LN2_HI), inside))
    p = np.full_like(r, POLYNOMIAL[0])
    for coefficient in POLYNOMIAL[1:]:
        p = fma32(p, r, np.full_like(r, coefficient))
    first = n.astype(np.int32) >> 1
    scaled = np.ldexp(np.ldexp(p, first), n.astype(np.int32) - first)
    return np.where(x < EXP_LOWEST, np.float32(0), scaled).astype(np.float32)


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Ten rounds of Philox4x32 (Salmon et al. 2011)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b & WORD, (a >> 32) ^ c3 ^ k1, a & WORD
        k0, k1 = (k0 + 0x9E3779B9) & WORD, (k1 + 0xBB67AE85) & WORD
    return c0, c1, c2, c3


def noise(seed: int, position: int) -> int:
    """u as a numerator over 2**53."""
    x = philox4x32((position & WORD, position >> 32, 0, 0), (seed & WORD, seed >> 32))
    return (x[0] << 32 | x[1]) >> 11


# ---- steps 1 to 5 -----------------------------------------------------------------------------------------------


def checked(value: np.float32, token: int) -> np.float32:
    if np.isnan(value) or value == np.inf:
        raise NonFiniteError(f"token {token}: {value}")
    return value


def penalised(value: np.float32, times: int, s: Sampling) -> np.float32:
    """One token's value after its penalties; times = occurrences in generated."""
    repetition = np.float32(s.repetition_penalty or 1.0)
    if repetition != 1:
        value = value / repetition if value > 0 else value * repetition
    if times and s.presence_penalty:
        value = value - np.float32(s.presence_penalty)
    if times and s.frequency_penalty:
        value = value - np.float32(s.frequency_penalty) * np.float32(times)
    return value


def penalised_tokens(s: Sampling) -> dict[int, int]:
    """Token -> occurrences in generated, for the tokens a penalty looks at."""
    repeated = (s.repetition_penalty or 1.0) != 1
    counts = Counter(s.generated) if repeated or s.presence_penalty or s.frequency_penalty else Counter[int]()
    return {token: counts[token] for token in {*counts, *(s.prompt if repeated else ())}}


def adjusted(logits: F32, s: Sampling) -> F32:
    """[vocab] after mask, bias and penalties."""
    if not np.isfinite(logits).all():
        raise NonFiniteError("a logit is not finite")
    v = logits.astype(np.float32, copy=True)
    if s.allowed is not None:
        v[~s.allowed] = -np.inf
    for token, bias in s.bias.items():
        v[token] = checked(v[token] + np.float32(bias), token)
    for token, times in penalised_tokens(s).items():
        if v[token] != -np.inf:
            v[token] = checked(penalised(v[token], times, s), token)
    return v


# ---- steps 6 to 12 ----------------------------------------------------------------------------------------------


def ordered(v: F32) -> npt.NDArray[np.int64]:
    """Ids that are not excluded, by (value descending, id ascending)."""
    ids: npt.NDArray[np.int64] = np.lexsort((np.arange(len(v)), -v))
    allowed: npt.NDArray[np.int64] = ids[v[ids] != -np.inf]
    return allowed


def survivors(p: F32, s: Sampling) -> tuple[int, list[int]]:
    """p [n] in order. How many top-k and top-p leave, and the weights of all (0 where min-p removed one)."""
    weights = [int(w) for w in np.rint(p.astype(np.float64) * 2.0**39)]
    n = min(s.top_k or len(p), len(p))
    top_p = np.float32(s.top_p or 1.0)
    if top_p < 1:
        enough = float(top_p) * float(sum(weights[:n]))
        cum = np.cumsum(np.array(weights[:n], dtype=np.uint64)).astype(np.float64)
        n = int(np.argmax(cum >= enough)) + 1
    return n, [w if x >= np.float32(s.min_p) else 0 for w, x in zip(weights, p, strict=True)]


def sample(logits: F32, s: Sampling) -> int:
    """The token; raises NonFiniteError or NoTokenError."""
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        v = adjusted(logits, s)
        greedy = np.float32(s.temperature) < GREEDY_BELOW
        if not greedy:
            v = v / np.float32(s.temperature)
        ids = ordered(v)
        if not len(ids):
            raise NoTokenError("no token is allowed")
        if greedy:
            return int(ids[0])
        checked(v[ids[0]], int(ids[0]))
        n, weights = survivors(exp32(v[ids] - v[ids[0]]), s)
    return int(ids[drawn(weights[:n], noise(s.seed, s.position))])


def drawn(weights: Sequence[int], u: int) -> int:
    """First index whose running sum exceeds u / 2**53 of the total, in exact integers."""
    level, cum = u * sum(weights), 0
    for i, weight in enumerate(weights):
        cum += weight
        if cum << 53 > level:
            return i
    raise AssertionError("unreachable: u < 2**53")


def log_probabilities(logits: F32) -> F64:
    """[vocab] log-softmax of the raw logits."""
    x = logits.astype(np.float64)
    shifted = x - x.max()
    result: F64 = shifted - np.log(np.exp(shifted).sum())
    return result


def best(logits: F32, n: int) -> list[int]:
    """The n tokens with the largest logits, by (logit descending, id ascending)."""
    return [int(i) for i in np.lexsort((np.arange(len(logits)), -logits))[:n]]
