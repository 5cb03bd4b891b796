"""Inverse frequencies of rotary position embeddings, f32 [head_dim/2], from a Hugging Face configuration.

The formulas are those of transformers (modeling_rope_utils), in float32 as torch computes them. Powers are taken in
double and rounded once, which is what a correctly rounded float32 power gives, on every CPU.
Names and sources: linear, position interpolation (arXiv 2306.15595); yarn (arXiv 2309.00071); llama3, Llama 3.1.
"""

from __future__ import annotations

import math

import numpy as np

from .fields import Fields
from .tensor import F32

_ONE = np.float32(1)


def plain(theta: float, dim: int) -> F32:
    """1 / theta^(2i/dim)."""
    return _ONE / _powers(theta, dim)


def _powers(theta: float, dim: int) -> F32:
    exponents = np.arange(0, dim, 2, dtype=np.int64).astype(np.float32) / np.float32(dim)
    return np.array([math.pow(theta, float(e)) for e in exponents], np.float32)


def _default(p: Fields, theta: float, dim: int, context: int) -> F32:
    return plain(theta, dim)


def linear(theta: float, dim: int, factor: float) -> F32:
    """All positions divided by `factor`."""
    return plain(theta, dim) / np.float32(factor)


def _linear(p: Fields, theta: float, dim: int, context: int) -> F32:
    return linear(theta, dim, p.number("factor"))


def _llama3(p: Fields, theta: float, dim: int, context: int) -> F32:
    factor = np.float32(p.number("factor"))
    low, high = p.number("low_freq_factor"), p.number("high_freq_factor")
    if high <= low:
        raise p.fail("high_freq_factor", f"must be greater than low_freq_factor ({low})")
    trained = p.integer("original_max_position_embeddings", context)
    freqs = plain(theta, dim)
    wavelength = np.float32(2 * math.pi) / freqs
    scaled = np.where(wavelength > np.float32(trained / low), freqs / factor, freqs)
    smooth = (np.float32(trained) / wavelength - np.float32(low)) / np.float32(high - low)
    smoothed = (_ONE - smooth) * scaled / factor + smooth * scaled
    medium = (wavelength >= np.float32(trained / high)) & (wavelength <= np.float32(trained / low))
    return np.where(medium, smoothed, scaled).astype(np.float32)


def _yarn(p: Fields, theta: float, dim: int, context: int) -> F32:
    trained = p.integer("original_max_position_embeddings", context)
    factor = p.number("factor", context / trained)
    _refuse_attention_factor(p, factor)
    low = _correction_dim(p.number("beta_fast", 32), theta, dim, trained)
    high = _correction_dim(p.number("beta_slow", 1), theta, dim, trained)
    if p.boolean("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # the ramp must not divide by zero
    ramp = (np.arange(dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low)
    extrapolate = _ONE - np.clip(ramp, 0, 1).astype(np.float32)
    powers = _powers(theta, dim)
    interpolated = _ONE / (np.float32(factor) * powers)
    return interpolated * (_ONE - extrapolate) + _ONE / powers * extrapolate


def _correction_dim(rotations: float, theta: float, dim: int, trained: int) -> float:
    """The dimension whose wave makes `rotations` turns over the trained length."""
    return dim * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(theta))


def _refuse_attention_factor(p: Fields, factor: float) -> None:
    """yarn also scales attention scores, by default; the engine has no such factor."""

    def scale(m: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * m * math.log(factor) + 1.0

    inferred = scale(1)
    if p.has("mscale") and p.has("mscale_all_dim"):
        inferred = scale(p.number("mscale")) / scale(p.number("mscale_all_dim"))
    value = p.number("attention_factor", inferred)
    if value != 1.0:
        raise p.fail("attention_factor", f"is {value:.6g}; yarn is supported with an attention_factor of 1 only")


_TYPES = {"default": _default, "linear": _linear, "llama3": _llama3, "yarn": _yarn}


def inverse_frequencies(config: Fields, head_dim: int, context: int, default_theta: float) -> F32:
    """From config.json, whether rope_theta is at its top level (with rope_scaling) or in rope_parameters.

    Raises ConversionError for an unsupported type, a partial rotation or values that give no finite frequencies.
    """
    p = config.section("rope_parameters" if config.has("rope_parameters") else "rope_scaling")
    if config.has("original_max_position_embeddings"):  # its older place, which transformers prefers
        key = "original_max_position_embeddings"
        p = Fields(p.path, {**p.values, key: config.values[key]}, p.prefix)
    theta = p.number("rope_theta", config.number("rope_theta", default_theta))
    kind = p.text("rope_type", p.text("type", "default"))
    if kind not in _TYPES:
        raise p.fail("rope_type", f"{kind!r} is not supported; supported are {', '.join(_TYPES)}")
    for holder in (p, config):
        if holder.number("partial_rotary_factor", 1) != 1:
            raise holder.fail("partial_rotary_factor", "rotating a part of the head only is not supported")
    if theta <= 1:
        raise (p if p.has("rope_theta") else config).fail("rope_theta", f"is {theta}, must be greater than 1")
    with np.errstate(all="ignore"):
        freqs = _TYPES[kind](p, theta, head_dim, context)
    if not np.isfinite(freqs).all() or (freqs < 0).any():
        raise p.fail("rope_type", f"{kind} with these values gives frequencies that are no positive numbers")
    return freqs.astype(np.float32)
