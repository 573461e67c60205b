"""Backbones of diffusers: the transformers that mixers go into. Imported only when a diffusers model is at hand.

One file per family (`dit.py`, `wan.py`, ...), each ending with its `Family` record, and the list of them
(`families.py`). What they share: attention layers (`attention.py`, `joint.py`), the models that tell them their grid
and that diffusers saves and loads (`models.py`). What `zoo.convert` has to know about them: `adapter.py`.
"""

from zoo.models.diffusers.adapter import DIFFUSERS

__all__ = ["DIFFUSERS"]
