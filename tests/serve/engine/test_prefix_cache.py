"""The prefix cache: what a request finds, what it must compute, who is evicted, and interruptions for want of pages."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest

from serve.engine.types import FinishReason
from tests.serve.engine.imaginary import CONFIG, Model, answer, pages_are_all_free, request, scheduler


def run(plan, model, *requests):
    for one in requests:
        plan.add(one)
    model.run()


def found(model, name):
    """Tokens of a request's prompt that were in the cache."""
    return model.events[name][0].cached_tokens


def plenty(**sizes):
    return scheduler(**{"full_pages": 60, "sliding_pages": 60, "chunk": 128, **sizes})


def test_a_request_finds_what_an_earlier_one_with_its_beginning_left():
    plan = plenty()
    model = Model(plan)
    run(plan, model, request("a", 300, 3))
    assert (found(model, "a"), model.computed) == (0, 300)
    run(plan, model, request("b", 300, 3), request("c", 200, 3), request("other", 200, 3, family=1))
    assert [found(model, name) for name in ("b", "c", "other")] == [256, 192, 0]
    assert model.computed == 300 + 44 + 8 + 200
    assert plan.stats().cached_tokens == 256 + 192
    assert pages_are_all_free(plan)


def test_a_salt_keeps_prefixes_apart():
    plan = plenty()
    model = Model(plan)
    salted = [replace(request(name, 300, 3), cache_salt=salt) for name, salt in (("b", "x"), ("c", "x"), ("d", "y"))]
    for one in (request("a", 300, 3), *salted, replace(request("short", 20, 1), cache_salt="z")):
        run(plan, model, one)
    assert [found(model, name) for name in "abcd"] == [0, 0, 256, 0]
    assert set(plan._rows._roots) == {b"", b"x", b"y"}
    run(plan, model, *(request(f"other{i}", 390, 3, family=1 + i) for i in range(12)))  # evict all of those
    assert set(plan._rows._roots) == {b""}
    assert pages_are_all_free(plan)


def test_one_token_at_least_is_computed():
    plan = plenty()
    model = Model(plan)
    run(plan, model, request("a", 256, 3), request("b", 256, 3))
    assert found(model, "b") == 192


def test_an_answer_is_found_by_the_next_turn():
    plan = plenty()
    model = Model(plan)
    first = request("a", 100, 60)
    run(plan, model, first)
    spoken = [answer("a", count) for count in range(60)]
    run(plan, model, request("b", [*first.prompt, *spoken, 5, 6, 7], 3))
    assert found(model, "b") == 128  # of 159 in the cache: the last token was never put there


def test_choices_of_one_prompt_compute_it_once():
    """The first computes a block, the others wait for it, and join in at its end."""
    plan = plenty(slots=4, rows=4)
    model = Model(plan)
    run(plan, model, *(request(name, 300, 3) for name in "abcd"))
    assert model.computed == 300 + 3 * (300 - 256)
    assert pages_are_all_free(plan)


def test_a_hit_keeps_the_window_of_the_sliding_layers():
    """Where the pages of the window before a prefix's end are gone, the prefix is found as far as they are there."""
    plan = plenty()
    model = Model(plan)
    run(plan, model, request("a", 400 - 3, 3))
    sliding = plan._rows._sliding.allocator
    blocks = {block.tokens: block for block in plan._rows._of_full.values()}
    # The fifth block of six: a hit after five or six blocks sees it (70 positions reach back over two pages).
    fifth = blocks[array("i", request("a", 397, 3).prompt[256:320]).tobytes()]
    plan._rows._drop_sliding(fifth)
    run(plan, model, request("b", 397, 3))
    assert found(model, "b") == 256
    assert sliding.idle > 0
    assert CONFIG.sliding_window == 70


def test_the_longest_idle_is_evicted_and_a_prefix_s_end_before_its_beginning():
    plan = scheduler(slots=1, full_pages=7, sliding_pages=12, chunk=128)
    model = Model(plan)
    run(plan, model, request("a", 256, 3))  # four blocks remain
    run(plan, model, request("x", 200, 3, family=1))  # three more pages are free: none of a's goes
    run(plan, model, request("b", 130, 3))
    assert found(model, "b") == 128
    run(plan, model, request("y", 300, 3, family=2))  # takes five pages: the last blocks of a, and x's
    run(plan, model, request("c", 256, 3))
    assert found(model, "c") == 128
    run(plan, model, request("z", 200, 3, family=1))
    assert found(model, "z") == 0
    assert pages_are_all_free(plan)


def test_without_the_cache_everything_is_computed():
    plan = plenty(prefix_cache=False)
    model = Model(plan)
    run(plan, model, request("a", 300, 3), request("b", 300, 3))
    assert model.computed == 600
    assert plan.stats().pages_cached == 0


def test_a_lost_device_is_forgotten():
    plan = plenty()
    model = Model(plan)
    run(plan, model, request("a", 300, 3))
    assert plan.stats().pages_cached > 0
    plan.add(request("b", 300, 3))
    plan.next_work()
    plan.fail_running("boom")
    assert plan.stats().pages_cached == 0
    run(plan, model, request("c", 300, 3))
    assert found(model, "c") == 0


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_the_newest_is_interrupted_and_loses_nothing(prefix_cache):
    """Two requests that fit as prompts but not with what they generate."""
    plan = scheduler(slots=2, full_pages=6, sliding_pages=12, chunk=128, prefix_cache=prefix_cache)
    model = Model(plan)
    run(plan, model, request("old", 120, 160), request("new", 120, 160, family=1))
    assert plan.stats().preemptions >= 1
    assert list(model.ended) == ["old", "new"]
    for name in ("old", "new"):
        assert model.received[name] == [answer(name, count) for count in range(160)]
        assert model.ended[name] is FinishReason.LENGTH
    computed = plan.stats().prompt_tokens
    assert computed < 120 + 280 + 100 if prefix_cache else computed > 120 + 240
    assert pages_are_all_free(plan)


def test_who_was_interrupted_is_the_first_to_be_admitted_again():
    plan = scheduler(slots=3, full_pages=6, sliding_pages=15, chunk=128)
    model = Model(plan)
    for name, family in (("a", 0), ("b", 1), ("c", 2)):
        plan.add(request(name, 100, 100, family))
    while not plan.stats().preemptions:
        model.step()
    plan.add(request("late", 10, 1))
    model.run()
    assert next(iter(model.ended)) == "a"
    assert all(model.ended[name] is FinishReason.LENGTH for name in ("a", "b", "c", "late"))


def test_an_interrupted_request_can_be_cancelled():
    plan = scheduler(slots=2, full_pages=6, sliding_pages=12, chunk=128)
    model = Model(plan)
    plan.add(request("old", 120, 160))
    plan.add(request("new", 120, 160, family=1))
    while not plan.stats().preemptions:
        model.step()
    model.take(plan.cancel("new"))
    model.run()
    assert model.ended == {"new": FinishReason.CANCELLED, "old": FinishReason.LENGTH}
    assert pages_are_all_free(plan)
