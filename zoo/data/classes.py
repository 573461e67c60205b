"""The names of classes, of which some data sets tell only the number."""

UNNAMED = "class {}"  # name of a class of which only the number is known
MOST = 1_000_000  # classes: beyond it a column of labels holds something else


def same_classes(ours: list[str], theirs: list[str]) -> bool:
    """Whether two lists of classes can be the same: as many, and alike where both have names."""
    if len(ours) != len(theirs):
        return False
    pairs = enumerate(zip(ours, theirs, strict=True))
    return all(a == b or UNNAMED.format(i) in (a, b) for i, (a, b) in pairs)
