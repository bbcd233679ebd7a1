"""The first signal asks, the second one ends."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from hetero.run.stopping import StopRequested, stop_signals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_seen_at_the_next_check(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with stop_signals() as stop:
        stop.check()
        os.kill(os.getpid(), number)
        with pytest.raises(StopRequested) as caught:
            stop.check()
        assert caught.value.number == number
        assert signal.getsignal(number) is before, "a second signal must act as usual"
    assert signal.getsignal(number) is before


def test_handlers_are_put_back_without_a_signal() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with stop_signals():
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before


def test_other_threads_may_run_too() -> None:
    failed: list[BaseException] = []

    def work() -> None:
        try:
            with stop_signals() as stop:
                stop.check()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not failed
