"""Executor with daemon threads."""

import threading
from concurrent.futures import wait

import pytest

from serve_app.serving.process import DaemonThreads


def test_one_thread_runs_calls_in_order_and_returns_results_and_errors() -> None:
    threads, order = DaemonThreads(1, "a test"), list[int]()
    wait([threads.submit(order.append, number) for number in range(50)], timeout=10)
    failing = threads.submit(int, "x")
    assert order == list(range(50))
    with pytest.raises(ValueError, match="invalid literal"):
        failing.result(10)
    assert repr(threads) == "<DaemonThreads a test threads=1>"


def test_calls_that_hang_occupy_one_thread_each_and_others_run_beside_them() -> None:
    threads, hangs = DaemonThreads(3, "a test"), threading.Event()
    hanging = [threads.submit(hangs.wait, 60) for _ in range(2)]
    for number in range(20):
        assert threads.submit(str, number).result(10) == str(number)
    assert not any(future.done() for future in hanging)
    hangs.set()
    assert all(future.result(10) for future in hanging)


def test_a_cancelled_call_is_not_made() -> None:
    threads, may_continue, called = DaemonThreads(1, "a test"), threading.Event(), list[int]()
    first = threads.submit(may_continue.wait, 60)
    cancelled = threads.submit(called.append, 1)
    assert cancelled.cancel()
    may_continue.set()
    assert first.result(10)
    threads.submit(called.append, 2).result(10)
    assert called == [2]


def test_threads_end_after_a_shutdown() -> None:
    threads = DaemonThreads(2, "threads that end")
    wait([threads.submit(threading.Event().wait, 0.05) for _ in range(2)], timeout=10)
    threads.shutdown()
    for thread in threading.enumerate():
        if thread.name == "threads that end":
            thread.join(10)
            assert not thread.is_alive()
