"""A limit of time interrupts what waits, and within another one leaves the other one as it was."""

from __future__ import annotations

import signal
import threading
import time

import pytest

pytest.importorskip("prefect")

from flows.run.interrupts import time_limit
from virnucpro.errors import ConfigurationError, TimeLimitError


def test_what_waits_is_interrupted_and_nothing_is_left_of_the_clock():
    handler, (left_s, again_s) = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)
    began_s = time.monotonic()
    with pytest.raises(TimeLimitError, match=r"the time limit of 0\.002 minutes has passed"), time_limit(0.002):
        threading.Event().wait(20)
    assert 0.1 < time.monotonic() - began_s < 5
    assert signal.getsignal(signal.SIGALRM) is handler
    now_left_s, now_again_s = signal.getitimer(signal.ITIMER_REAL)  # the tests themselves have a limit of time
    assert (now_left_s, now_again_s) == (pytest.approx(left_s - 0.12, abs=4), again_s)


def test_without_a_limit_nothing_is_set():
    handler = signal.getsignal(signal.SIGALRM)
    with time_limit(0):
        assert signal.getsignal(signal.SIGALRM) is handler


def test_after_an_inner_limit_the_outer_one_goes_on_where_it_was():
    with time_limit(1):
        time.sleep(0.2)
        with time_limit(2):
            time.sleep(0.2)
        assert 50 < signal.getitimer(signal.ITIMER_REAL)[0] < 59.6


def test_an_outer_limit_that_passed_meanwhile_rings_after_the_inner_one():
    def run():
        with time_limit(0.002):
            with time_limit(1):
                time.sleep(0.3)
            time.sleep(20)

    began_s = time.monotonic()
    with pytest.raises(TimeLimitError) as caught:
        run()
    assert (caught.value.minutes, time.monotonic() - began_s < 5) == (0.002, True)


def test_only_the_main_thread_can_be_limited():
    caught = []

    def limited():
        try:
            with time_limit(1):
                pass
        except ConfigurationError as error:
            caught.append(str(error))

    thread = threading.Thread(target=limited)
    thread.start()
    thread.join()
    assert caught == ["a time limit needs a flow that runs in the main thread of its process"]
