"""The sampler of tutorial 05. The controller imports it, so it is a module of its own without torch."""

from typing import Any

from transfer_queue.sampler import BaseSampler


class LongestFirst(BaseSampler):
    """Rows with the largest tag ``length`` first; with ``peek`` in the sampling config they stay for the next fetch."""

    def __init__(self, least: int = 0) -> None:
        super().__init__()
        self.least = least

    def sample(
        self, ready_indexes: list[int], batch_size: int, *args: Any, **kwargs: Any
    ) -> tuple[list[int], list[int]]:
        tags = kwargs["partition"].get_custom_meta(ready_indexes)
        fitting = [index for index in ready_indexes if tags[index].get("length", 0) >= self.least]
        if len(fitting) < batch_size:
            return [], []  # not enough yet: the fetch waits
        chosen = sorted(fitting, key=lambda index: -tags[index].get("length", 0))[:batch_size]
        return chosen, [] if kwargs.get("peek") else chosen
