"""Streams of the card: what is queued on one happens after what is queued on another only where it was told to wait.

Who reads memory that another stream than the first writes must have waited for that, who writes it for all reading.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor


class RaceError(AssertionError):
    """Two streams use the same memory without waiting for each other."""


class Stream:
    """torch.cuda.Stream: how much of each stream is done before what is queued on this one next."""

    current: Stream  # that work is queued on
    on_wait: Callable[[str], Any] = staticmethod(lambda what: None)  # where the host waits for all of a stream

    def __init__(self, *_: Any) -> None:
        self.done: Counter[Stream] = Counter()

    def wait_stream(self, other: Stream) -> None:
        self.done |= other.done

    def wait_event(self, event: Any) -> None:
        self.done |= event.done

    def synchronize(self) -> None:
        Stream.on_wait("waits for a stream")


class Memory:
    """Uses of storages that a second stream has written: by storage, the last writing and all reading since."""

    def __init__(self) -> None:
        self.first = Stream.current = Stream()
        self._written: dict[int, tuple[Stream, int]] = {}
        self._read: dict[int, Counter[Stream]] = {}
        self.copies = 0  # writings by other streams than the first

    def write(self, x: Tensor) -> None:
        """Something is about to be queued that writes a tensor."""
        here, key = Stream.current, x.untyped_storage()._cdata
        if here is self.first and key not in self._written:
            return
        self.copies += here is not self.first
        here.done[here] += 1
        for reader, number in self._read.get(key, Counter()).items():
            if here.done[reader] < number:
                raise RaceError("codes are copied to a slot that is still read")
        self._written[key], self._read[key] = (here, here.done[here]), Counter()

    def read(self, x: Any) -> None:
        """Something is about to be queued that reads a tensor."""
        if not isinstance(x, Tensor) or not x.is_meta or (key := x.untyped_storage()._cdata) not in self._written:
            return
        writer, number = self._written[key]
        here = Stream.current
        if here.done[writer] < number:
            raise RaceError("a slot is read before its codes have been copied")
        here.done[here] += 1
        self._read[key][here] = here.done[here]


@contextmanager
def stream(chosen: Stream) -> Iterator[None]:
    before, Stream.current = Stream.current, chosen
    try:
        yield
    finally:
        Stream.current = before


def current_stream(*_: Any) -> Stream:
    return Stream.current
