"""Conversion of Hugging Face folders and GGUF files into model containers.

    convert(Path("Mixtral-8x7B"), Path("mixtral-q4"), "q4")

A source (hf.py, gguf_source.py, upcycle.py over either) hands out tensors a slab of rows at a time; pipeline.py packs
and writes them. Memory stays near one matrix, whatever the model's size.
"""

from .pipeline import Report, convert, open_source

__all__ = ["Report", "convert", "open_source"]
