"""The order of the saves of a process group."""

import threading

from tensorkeep.ranks.group import SaveTicket


def test_a_save_waits_for_all_earlier_ones_also_if_one_between_was_dropped() -> None:
    queue: list[threading.Event] = []
    turns = [SaveTicket(queue) for _ in range(3)]
    for turn in turns:
        turn.enqueue()
    last = turns.pop()
    waiting = threading.Thread(target=last.wait)
    waiting.start()
    del turn, turns[1]  # never written
    waiting.join(0.05)
    assert waiting.is_alive()
    turns[0].release()
    waiting.join(10)
    assert not waiting.is_alive()
