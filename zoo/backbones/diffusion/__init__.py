"""Backbones of diffusers: the transformers that mixers go into. Imported only when a diffusers model is at hand.

Sites (`sites.py`), the models that tell them their grid and that diffusers saves and loads (`hosts.py`), and what
`zoo.convert` has to know about them (`backbone.py`).
"""

from zoo.backbones.diffusion.backbone import DIFFUSERS

__all__ = ["DIFFUSERS"]
