"""Curves of runs from their records."""

from pathlib import Path

from zoo.train.record import Row


def draw_curves(runs: dict[str, list[Row]], file: Path) -> None:
    """Loss and top-1 accuracy over images seen, one line a run (named by its key), as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    for name, rows in runs.items():
        train = [row for row in rows if row["kind"] == "train"]
        found = [row for row in rows if row["kind"] == "eval"]
        left.plot([r["images_seen"] for r in train], [r["loss"] for r in train], label=name)
        right.plot([r["images_seen"] for r in found], [r["top1"] for r in found], label=name, marker=".")
    left.set(xlabel="images seen", ylabel="training loss (nats)")
    right.set(xlabel="images seen", ylabel="top-1 accuracy (%)")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    right.legend(frameon=False, fontsize=8)
    figure.savefig(file, dpi=150)
    plt.close(figure)
