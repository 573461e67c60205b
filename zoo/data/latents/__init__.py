"""Cached latents and prompt embeddings: a folder of safetensors shards and a manifest that says how they were made."""

from zoo.data.latents.manifest import Manifest, Writer, read_manifest
from zoo.data.latents.reading import Latents

__all__ = ["Latents", "Manifest", "Writer", "read_manifest"]
