"""Image folders: one sub-folder a class."""

import os
from collections.abc import Iterator
from typing import Any

from PIL import Image
from timm.utils.misc import natural_key

from zoo.data.classes import UNNAMED
from zoo.data.decoding import IMAGE_FILES, Unreadable, decode

READ = (*IMAGE_FILES, ".gif")  # of an animation the first picture


class Folder:
    """All images below a folder, in timm's order: natural order of the paths, and of the sub-folder names for the class
    numbers.

    The class of an image is the name of the folder in which it lies. Links are followed, but not back into a folder
    that they lie in. class_map: the class number of each sub-folder, others are left out. Raises ValueError when there
    is no folder or no image in it, and without a class_map for a sub-folder without images.
    """

    named = True

    def __init__(self, root: str, class_map: dict | None = None) -> None:
        if not os.path.isdir(root):
            raise ValueError(f"there is no image folder {root}")
        found = [(file, os.path.basename(os.path.relpath(os.path.dirname(file), root))) for file in _images(root)]
        names = sorted({name for _, name in found}, key=natural_key)
        numbers: dict[str, int] = class_map or {name: i for i, name in enumerate(names)}
        self.root = root
        self.samples = sorted(
            ((file, numbers[name]) for file, name in found if name in numbers),
            key=lambda sample: natural_key(sample[0]),
        )
        if not self.samples:
            raise ValueError(
                f"the folder {root} holds no images: expected one sub-folder of image files a class ({', '.join(READ)})"
            )
        if class_map is None and (empty := _without_images(root, found)):
            raise ValueError(f"the folder {root} has no image of the class {empty}: delete its sub-folder or fill it")
        known = {number: name for name, number in numbers.items()}
        self.classes = [known.get(i, UNNAMED.format(i)) for i in range(max(known) + 1)]

    def __len__(self) -> int:
        return len(self.samples)

    def read(self, index: int) -> tuple[Image.Image, int]:
        file, label = self.samples[index]
        try:
            with open(file, "rb") as opened:
                return decode(opened), label
        except OSError as error:  # a dangling link, no permission
            raise Unreadable(str(error)) from error

    def name(self, index: int) -> str:
        return os.path.relpath(self.samples[index][0], self.root)


def _images(folder: str, above: tuple[str, ...] = ()) -> Iterator[str]:
    """The image files below a folder; `above` are the real paths of the folders around it."""
    here = os.path.realpath(folder)
    if here in above:
        return
    with os.scandir(folder) as entries:
        inside: list[Any] = list(entries)
    for entry in inside:
        if _is_folder(entry):
            yield from _images(entry.path, (*above, here))
        elif entry.name.lower().endswith(READ):
            yield entry.path


def _without_images(root: str, found: list[tuple[str, str]]) -> str:
    """The name of a sub-folder, other than a hidden one, that holds none of the images found; "" if there is none."""
    filled = {os.path.relpath(file, root).split(os.sep)[0] for file, _ in found}
    with os.scandir(root) as entries:
        empty = [e.name for e in entries if e.name not in filled and e.name[0] != "." and _is_folder(e)]
    return min(empty, default="")


def _is_folder(entry: Any) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False
