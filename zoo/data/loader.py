"""torch's DataLoader, with errors that arrive as they were raised."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader, default_collate


class Loader(DataLoader):
    """Batches of `samples`, one for each list of `keys`, read by `workers` processes (0: by this one).

    A ValueError or OSError that a sample raises is raised here again, unchanged: torch would put the traceback of the
    loader process into its message. collate: makes a batch of a list of samples.
    """

    def __init__(
        self,
        samples: Any,
        keys: Iterable[list],
        workers: int,
        collate: Callable[[list], Any] = default_collate,
        **options: Any,
    ) -> None:
        answers: Any = _Answers(samples, collate)
        super().__init__(answers, batch_sampler=keys, num_workers=workers, collate_fn=_unchanged, **options)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for batch in super().__iter__():
            if isinstance(batch, Exception):
                raise batch
            yield batch


class _Answers:
    """A batch, or the error in its place, for each list of keys."""

    def __init__(self, samples: Any, collate: Callable[[list], Any]) -> None:
        self.samples, self.collate = samples, collate

    def __getitems__(self, keys: list) -> Any:
        try:
            return self.collate([self.samples[key] for key in keys])
        except (ValueError, OSError) as error:
            return error


def _unchanged(batch: Any) -> Any:
    return batch
