"""Cached latents and prompt embeddings: folders of safetensors shards with a manifest."""

from zoo.data.latents.manifest import Manifest, Writer, read_manifest
from zoo.data.latents.reading import Latents

__all__ = ["Latents", "Manifest", "Writer", "read_manifest"]
