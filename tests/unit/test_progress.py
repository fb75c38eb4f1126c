"""What a long phase shows, and what a short one does not."""
from __future__ import annotations

import io
import os
import pty
import select
import termios

import pytest

from megatron_longstraw.metering import Amount, Meter
from megatron_longstraw.run_log.progress import ProgressDisplay, seconds_left


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def display(stream=None, interval_s=30.0):
    clock, said = Clock(), []
    shown = ProgressDisplay(said.append, interval_s, stream or io.StringIO(), clock)
    shown.quiet("step 3/9")
    return shown, clock, said


CHUNK_TOKENS, NUM_CHUNKS = 2048, 1024


def prompt_chunks(order):
    """(tokens, pairs) of the chunks of a prompt of two million tokens."""
    return [(CHUNK_TOKENS, CHUNK_TOKENS * (CHUNK_TOKENS * i + CHUNK_TOKENS // 2)) for i in order]


def run(chunks, token_s, pair_s, begin_s=0.0):
    """(history, total): `begin_s` on top for the first chunk."""
    history, tokens, pairs, second = [(Amount(0), 0.0)], 0, 0, begin_s
    for number, (chunk_tokens, chunk_pairs) in enumerate(chunks, start=1):
        tokens, pairs = tokens + chunk_tokens, pairs + chunk_pairs
        second += chunk_tokens * token_s + chunk_pairs * pair_s
        history.append((Amount(number, tokens, pairs), second))
    return history, history[-1][0]


@pytest.mark.parametrize("order", [range(NUM_CHUNKS), reversed(range(NUM_CHUNKS))], ids=["capture", "prefix_backward"])
def test_time_left_counts_that_late_chunks_cost_more(order):
    """Taking all chunks as equal would be off by half an hour at the quarter of this hour."""
    history, total = run(prompt_chunks(order), token_s=1e-4, pair_s=1.6e-9, begin_s=20.0)
    whole_s = history[-1][1]
    assert whole_s > 3600
    for part in (10, NUM_CHUNKS // 4, NUM_CHUNKS // 2):
        left = seconds_left(history[: part + 1], total)
        assert left == pytest.approx(whole_s - history[part][1], rel=1e-6)


def test_time_left_of_equal_parts():
    assert seconds_left([(Amount(0), 0.0)], Amount(8)) is None
    assert seconds_left([(Amount(0), 0.0), (Amount(2), 5.0)], Amount(8)) == pytest.approx(15.0)
    history = [(Amount(i, 100 * i, 7000 * i), 2.0 * i) for i in range(4)]
    assert seconds_left(history, Amount(10, 1000, 70000)) == pytest.approx(14.0)


def test_parts_that_get_faster_never_make_time_negative():
    history = [(Amount(i, i, i * i), second) for i, second in enumerate([0.0, 9.0, 12.0, 13.0])]
    assert seconds_left(history, Amount(20, 20, 400)) > 0


def test_a_short_phase_says_nothing():
    shown, clock, said = display()
    for part in range(10):
        shown.progress("capture", Amount(part, 100 * part), Amount(10, 1000))
        clock.now += 2.9
    shown.end("capture")
    assert said == []


def test_a_log_gets_a_line_after_each_interval_of_silence():
    shown, clock, said = display()
    shown.progress("sample", Amount(1), Amount(4))
    for part in range(100):
        shown.progress("capture", Amount(part, 2048 * part), Amount(100, 204800))
        clock.now += 4.0
    assert len(said) == 12
    assert said[0] == (
        "progress   step 3/9: sample 1/4 batches; capture 8/100 chunks, 512 tokens/s, 06:08 left"
    )
    clock.now += 29.0
    shown.quiet("step 4/9")
    clock.now += 29.0
    shown.progress("capture", Amount(50), Amount(100))
    assert len(said) == 12


def test_an_ended_phase_is_gone():
    shown, clock, said = display(interval_s=1.0)
    shown.progress("capture", Amount(0), Amount(4))
    shown.end("capture")
    shown.end("never began")
    clock.now += 5.0
    shown.progress("rollout", Amount(3, 12), Amount(8, 32))
    assert said == ["progress   step 3/9: rollout 3/8 tokens a response"]


@pytest.fixture
def terminal():
    """(stream to write to, what was written so far)"""
    leader, follower = pty.openpty()
    poll = select.poll()
    poll.register(leader, select.POLLIN)

    def written():
        stream.flush()
        data = b""
        while poll.poll(200):  # a terminal hands out a few thousand bytes at a time
            data += os.read(leader, 1 << 16)
        return data.decode()

    with os.fdopen(follower, "w") as stream:
        yield stream, written
    os.close(leader)


def test_a_terminal_gets_bars_that_vanish(terminal):
    stream, written = terminal
    termios.tcsetwinsize(stream.fileno(), (24, 100))
    shown, clock, said = display(stream)
    for part in range(20):
        shown.progress("capture", Amount(part, 2048 * part), Amount(20, 40960))
        clock.now += 0.5
    drawn = written()
    assert "step 3/9" in drawn and "10/20 chunks, 4,096 tokens/s, 00:05 left" in drawn
    assert " 1/20 chunks" not in drawn, "no bar within the first second"
    assert "it/s" not in drawn
    shown.end("capture")
    assert written().strip(" \r") == "" and said == []


def test_a_terminal_without_columns_gets_lines(terminal):
    stream, written = terminal
    shown, clock, said = display(stream, interval_s=1.0)
    for part in range(2):
        shown.progress("capture", Amount(part), Amount(4))
        clock.now += 1.0
    assert said == ["progress   step 3/9: capture 1/4 chunks, 00:03 left"]
    assert written() == ""


class Heard:
    def __init__(self):
        self.events = []

    def progress(self, phase, done, total):
        self.events.append((phase, done.parts, total.parts))

    def end(self, phase):
        self.events.append((phase, "end"))


def test_the_meter_tells_what_runs_inside_what():
    meter, heard = Meter(), Heard()
    meter.watcher = heard
    meter.progress(Amount(0), Amount(1))  # nothing is being measured
    for item in meter.track("update", "ab"):
        with meter.measure("replay"):
            meter.progress(Amount(0), Amount(3))
    assert heard.events == [
        ("update", 0, 2),
        ("replay", 0, 3),
        ("replay", "end"),
        ("update", 1, 2),
        ("replay", 0, 3),
        ("replay", "end"),
        ("update", "end"),
    ]
    heard.events.clear()
    with pytest.raises(KeyError), meter.measure("replay"):
        raise KeyError
    assert heard.events == [("replay", "end")]
    assert list(meter.track("update", "a")) == ["a"] and len(heard.events) == 1


def test_peaks_are_the_largest_since_the_reset():
    meter = Meter()
    for value in (3, 7, 5):
        meter.peak("prefix/state_bytes", value)
    assert meter.peaks == {"prefix/state_bytes": 7}
    meter.reset()
    assert meter.peaks == {}
