"""What happens while a decode quantum runs: arrivals, cancellations, ends. Nothing waits for more than a step."""

from __future__ import annotations

import queue
import threading
import time

import numpy as np
import pytest

from north_jax.sampling import SamplingParams
from serve.engine.scheduler import QUANTUM
from serve.engine.types import EngineRequest, FinishReason
from tests.serve.engine.tiny import alone, jax_decoder, started_engine


class Watched:
    """A decoder that counts the steps of each quantum and can be held before one begins."""

    def __init__(self):
        self._inner = jax_decoder()
        self.backend, self.max_rows, self.compile = "watched", self._inner.max_rows, self._inner.compile
        self.sizes = self._inner.sizes
        self.quanta = []  # steps asked for, and those taken, of each
        self.told = []  # by which threads it was told to stop or to cancel
        self.deaf = False  # to that
        self.pause = 0.0  # seconds after a step
        self.entered, self.may_begin = threading.Event(), threading.Event()
        self.may_begin.set()

    def decode(self, cache, tables, rows, steps, deliver):
        quantum = [steps, 0]
        self.quanta.append(quantum)
        self.entered.set()
        assert self.may_begin.wait(60)

        def counting(records):
            quantum[1] += 1
            deliver(records)
            time.sleep(self.pause)

        return self._inner.decode(cache, tables, rows, steps, counting)

    def stop(self):
        self.told.append(threading.current_thread())
        if not self.deaf:
            self._inner.stop()

    def cancel(self, slot):
        self.told.append(threading.current_thread())
        if not self.deaf:
            self._inner.cancel(slot)

    def hold(self):
        self.may_begin.clear()
        self.entered.clear()


class Log:
    """Events of all requests in the order in which they came, and actions to take at some of them."""

    def __init__(self, engine):
        self.engine = engine
        self.events = []  # (request id, event)
        self.at = {}  # (request id, number of its event) → what to do in the engine's thread as it comes
        self._ended = queue.Queue()
        self._counts = {}

    def submit(self, name, prompt, max_tokens, stop=(), **sampling):
        def deliver(event):
            self.events.append((name, event))
            self._counts[name] = self._counts.get(name, 0) + 1
            if event.finish_reason is not None:
                self._ended.put(name)
            if action := self.at.get((name, self._counts[name])):
                action()

        one = EngineRequest(name, tuple(prompt), max_tokens, SamplingParams(**sampling), frozenset(stop))
        self.engine.submit(one, deliver)
        return one

    def fill_behind(self, name, **others):
        """The other slots go to requests of so many tokens, submitted when `name` has its first."""
        self.at[name, 1] = lambda: [self.submit(other, prompt(), count) for other, count in others.items()]

    def wait(self, count):
        """Waits until `count` requests have ended."""
        for _ in range(count):
            self._ended.get(timeout=60)

    def of(self, name):
        """Tokens, and how the request ended."""
        events = [event for owner, event in self.events if owner == name]
        return [event.token for event in events if event.token is not None], events[-1].finish_reason

    def before(self, name, other):
        """Events of `other` before the first one of `name`."""
        names = [owner for owner, _ in self.events]
        return names[: names.index(name)].count(other)


@pytest.fixture
def watched():
    return Watched()


@pytest.fixture
def log(watched):
    engine = started_engine(decoder=watched)
    yield Log(engine)
    engine.shutdown(0)
    assert engine.stats().failure is None
    assert engine.stats().pages_used == 0


def prompt(length=7):
    return [int(token) for token in np.random.default_rng().integers(4, 199, length)]


def test_a_lone_request_takes_whole_quanta(log, watched):
    one = log.submit("a", prompt(100), 2 * QUANTUM + 6, seed=1)
    log.wait(1)
    assert log.of("a") == (alone(one), FinishReason.LENGTH)
    assert watched.quanta == [[QUANTUM, QUANTUM], [QUANTUM, QUANTUM], [5, 5]]  # the first token comes from the prefill


def test_tokens_come_step_by_step(log, watched):
    """Not at the end of their quantum."""
    steps = []
    for number in range(2, 12):
        log.at["a", number] = lambda: steps.append(watched.quanta[-1][1])
    log.submit("a", prompt(), 40)
    log.wait(1)
    assert steps == list(range(1, 11))


def test_an_arrival_is_prefilled_after_the_current_step(log, watched):
    later = []
    log.at["a", 5] = lambda: later.append(log.submit("b", prompt(30), 3, temperature=0))
    first = log.submit("a", prompt(), 60, seed=4)
    log.wait(2)
    assert log.before("b", "a") == 5
    assert watched.quanta[0] == [59, 4]
    assert log.of("a")[0] == alone(first)
    assert log.of("b")[0] == alone(later[0])


def test_an_arrival_from_another_thread_is_not_lost(log, watched):
    """It comes after the engine chose a quantum and before the decoder began it, which forgets what it was told."""
    watched.hold()
    log.submit("a", prompt(), 100)
    assert watched.entered.wait(60)
    log.submit("b", prompt(), 3)
    assert watched.told == [threading.current_thread()]
    watched.may_begin.set()
    log.wait(2)
    assert log.before("b", "a") == 2  # the token of the prefill and one step
    assert watched.quanta[0] == [99, 1]


def test_quanta_are_short_while_a_long_prompt_is_prefilled(log, watched):
    log.at["a", 3] = lambda: log.submit("b", prompt(500), 2)  # two chunks
    log.submit("a", prompt(), 30)
    log.wait(2)
    assert watched.quanta[:2] == [[29, 2], [2, 2]]  # the second step is one without a chunk before it
    assert log.before("b", "a") == 5


def test_an_arrival_that_must_wait_stops_nothing_until_a_slot_is_free(log, watched):
    log.fill_behind("a", b=20, x=100, y=100)
    log.at["a", 4] = lambda: log.submit("c", prompt(), 2)
    log.submit("a", prompt(), 100)
    log.wait(5)
    owners = [name for name, _ in log.events]
    first = owners.index("c")
    assert owners[first - 4 : first] == ["a", "b", "x", "y"]
    assert owners[:first].count("b") == 20
    assert watched.quanta[:2] == [[2, 2], [99, 19]]


def test_a_cancelled_row_ends_at_the_next_step_and_its_neighbour_goes_on(log, watched):
    log.at["a", 6] = lambda: log.engine.cancel("a")
    log.submit("a", prompt(), 100)
    other = log.submit("b", prompt(90), 40, seed=9)
    log.wait(2)
    tokens, reason = log.of("a")
    assert (len(tokens), reason) == (6, FinishReason.CANCELLED)
    assert log.of("b") == (alone(other), FinishReason.LENGTH)


def test_a_cancellation_from_another_thread_is_not_lost(log, watched):
    watched.hold()
    log.submit("a", prompt(), 100)
    assert watched.entered.wait(60)
    log.engine.cancel("a")
    assert watched.told == [threading.current_thread()]
    watched.may_begin.set()
    log.wait(1)
    tokens, reason = log.of("a")
    assert (len(tokens), reason) == (2, FinishReason.CANCELLED)


def test_a_waiting_request_is_cancelled_while_a_quantum_runs(log, watched):
    log.fill_behind("a", b=100, x=100, y=100)
    log.at["a", 5] = lambda: (log.submit("c", prompt(), 5), log.engine.cancel("c"))
    log.submit("a", prompt(), 100)
    log.wait(5)
    assert log.of("c") == ([], FinishReason.CANCELLED)
    assert log.before("c", "a") == 5
    assert watched.quanta[1] == [99, 99]


def test_a_cancellation_that_came_too_late_does_not_reach_the_next_of_the_name(log, watched):
    """The decoder ends the row before it hears of the cancellation; the same id is used again at once."""
    watched.deaf = True
    again = []
    log.at["a", 3] = lambda: log.engine.cancel("a")
    log.at["a", 4] = lambda: again.append(log.submit("a", prompt(), 6))
    log.submit("a", prompt(), 4)
    log.wait(2)
    reasons = [event.finish_reason for _, event in log.events if event.finish_reason is not None]
    assert reasons == [FinishReason.LENGTH, FinishReason.LENGTH]


def test_a_deaf_decoder_s_row_is_cancelled_after_the_quantum(log, watched):
    watched.deaf = True
    log.at["a", 3] = lambda: log.engine.cancel("a")
    log.submit("a", prompt(), 200)
    log.wait(1)
    tokens, reason = log.of("a")
    assert (len(tokens), reason) == (1 + QUANTUM, FinishReason.CANCELLED)


def test_a_receiver_that_fails_ends_its_row_alone(log):
    def fail():
        raise RuntimeError("the receiver is gone")

    log.at["a", 4] = fail
    log.submit("a", prompt(), 100)
    other = log.submit("b", prompt(), 30, seed=2)
    log.wait(1)
    assert log.of("b") == (alone(other), FinishReason.LENGTH)
    assert len(log.of("a")[0]) == 4


def test_a_stop_token_ends_its_row_alone(log):
    one = log.submit("a", prompt(), 40, seed=3)
    log.wait(1)
    stop = log.of("a")[0][20]
    log.submit("stopped", one.prompt, 40, stop=[stop], seed=3)
    other = log.submit("b", prompt(), 35, seed=2)
    log.wait(2)
    tokens = log.of("a")[0]
    assert log.of("stopped") == (tokens[: tokens.index(stop)], FinishReason.STOP)
    assert log.of("b")[0] == alone(other)


def test_rows_that_fit_a_smaller_size_decode_in_it(log, watched):
    """A row's end ends the quantum where the others are faster by themselves, and only there."""
    watched.sizes = (1, 2, 4)
    log.fill_behind("a", b=20, x=40, y=80)
    log.submit("a", prompt(), 100)
    log.wait(4)
    # All four (b ends among them, the three others need the same size), then two, then one.
    assert [taken for _, taken in watched.quanta] == [2, 39, 40, 18]


def test_the_end_of_the_engine_ends_the_quantum(log, watched):
    reached, down = threading.Event(), []

    def shut_down():
        thread = threading.Thread(target=log.engine.shutdown, args=(0,))
        thread.start()
        down.append(thread)
        reached.set()

    watched.pause = 0.02
    log.at["a", 3] = shut_down
    log.submit("a", prompt(), 400)
    log.wait(1)
    assert reached.wait(60)
    down[0].join(60)
    assert log.of("a")[1] is FinishReason.CANCELLED
    assert len(watched.quanta) == 1 and watched.quanta[0][1] < QUANTUM
