"""Backbones of diffusers: the transformers that mixers go into. Imported only when a diffusers model is at hand.

Attention layers (`attention.py`), the models that tell them their grid and that diffusers saves and loads
(`models.py`), and what `zoo.convert` has to know about them (`adapter.py`).
"""

from zoo.models.diffusers.adapter import DIFFUSERS

__all__ = ["DIFFUSERS"]
