"""Converted diffusers transformers; imported only when a diffusers model is used.

One file per family (`dit.py`, `wan.py`, ...), each ending with its `Family` record, and the list of families
(`families.py`). Shared: attention layers (`attention.py`, `joint.py`), model classes that set the token grid and that
diffusers saves and loads (`models.py`), and the interface of `zoo.convert` (`adapter.py`).
"""

from zoo.models.diffusers.adapter import DIFFUSERS

__all__ = ["DIFFUSERS"]
