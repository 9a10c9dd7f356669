"""Nodes that only tests need."""

from tokenpipe.datapipes import MAX_NUMBER, IndexedDataPipe


class Numbers(IndexedDataPipe):
    """A source of so many samples an epoch that holds nothing: for what only numbers decide."""

    functional_name = "numbers"
    sequence_length = 8
    name = "numbers"
    finite = False
    end = MAX_NUMBER
    samples_per_pass = 0

    def __init__(self, name: str, samples: int, end: int = MAX_NUMBER) -> None:
        super().__init__()
        self.name, self.samples_per_pass, self.end, self.finite = name, samples, end, end < MAX_NUMBER
