"""What travels between two processes, looked at within one: both ends of a channel are here."""

import socket
from typing import Any

import numpy as np
import pytest

from tokenpipe.reading_services.workers.channel import Channel
from tokenpipe.reading_services.workers.packing import packed, unpacked


@pytest.fixture
def ends() -> Any:
    sender, receiver = (Channel(end) for end in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    yield sender, receiver
    sender.close()
    receiver.close()


@pytest.mark.parametrize("copied", [False, True])
def test_an_item_that_is_read_and_then_dropped_gives_its_slot_back_once(ends, copied, monkeypatch):
    """As where a Ctrl-C comes between the two: else the next two items would lie in one slot."""
    sender, receiver = ends
    monkeypatch.setattr("tokenpipe.reading_services.workers.channel.MOST_LENT", 0 if copied else 64)

    def sent(number: int) -> Any:
        sender.send(sender.put(packed(np.full(1000, number))))
        about, descriptors = receiver.receive()
        return receiver.arrived(about, descriptors)

    item = sent(0)
    assert (unpacked(*receiver.read(item)) == 0).all()
    receiver.drop(item)
    receiver.drop(item)
    receiver.send()
    sender.receive()
    one, two = sent(1), sent(2)
    assert (unpacked(*receiver.read(one)) == 1).all()
    assert (unpacked(*receiver.read(two)) == 2).all()
