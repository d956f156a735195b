"""The library as an application uses it: stream, cancel, several threads, asyncio, close."""

import asyncio
import contextlib
import copy
import gc
import io
import json
import logging
import os
import pickle
import platform
import random
import signal
import subprocess
import sys
import threading
import time
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from spmoe_lite import Engine, SamplingParams, device, library
from spmoe_lite.converters import convert, repack
from spmoe_lite.errors import (
    BusyError,
    Cancelled,
    CapacityError,
    DamagedError,
    NotFoundError,
    SpmoeError,
    UnsupportedError,
    UsageError,
)
from spmoe_lite.pack import Pack
from tests import tiny
from tests.interrupt import Interrupt
from tests.make_pack import files_of

PROMPT = [1, 17, 300, 42, 42, 5, 99, 250, 3, 8, 120]
MESSAGES = [{"role": "user", "content": "hello there"}]
HOLDING = ("/spmoe_lite/engine.py", "/spmoe_lite/generation.py", "/spmoe_lite/progress.py")


@pytest.fixture(scope="module")
def packs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("packs")
    hf = tiny.tiny_mixtral(folder / "t", layers=3, experts=8, scale_head=4.0)
    target = convert(hf, out=folder / "target.spmoe").path
    return target, tiny.tiny_pack(folder / "d", kind="mistral", layers=3)


@pytest.fixture
def engine(packs):
    with Engine.load(*packs, device="cpu", slots=6) as engine:
        yield engine


def slow_down(engine, seconds):
    """Every target pass takes longer until `go` is set; it says when the first has `begun`, and the `count`."""
    passes = SimpleNamespace(begun=threading.Event(), go=threading.Event(), count=0)
    forward = engine.decoder.target.forward

    def slow(*args, **kwargs):
        passes.count += 1
        passes.begun.set()
        passes.go.wait(seconds)
        return forward(*args, **kwargs)

    engine.decoder.target.forward = slow
    return passes


def test_pieces_add_up_to_the_result(engine):
    answer = engine.generate("a story", max_tokens=24)
    pieces = list(answer)
    assert len(pieces) > 3
    assert "".join(pieces) == answer.result.text
    assert answer.result.completion_tokens == len(answer.result.token_ids) == 24
    assert answer.result.finish_reason == "length"
    assert list(answer) == []  # exhausted, and says so again


def test_an_answer_on_the_cpu_warns_of_nothing(packs, caplog, monkeypatch):
    monkeypatch.setattr(device, "_said_unpinned", threading.Event())  # which is said once a process
    with Engine.load(*packs, device="cpu", slots=6, cutoff=3) as engine:
        assert engine.generate(PROMPT, max_tokens=20).result.stats.counters.loads > 0
    assert caplog.messages == []


def test_result_runs_what_was_not_read(engine):
    whole = engine.generate(PROMPT, max_tokens=20).result
    answer = engine.generate(PROMPT, max_tokens=20)
    next(answer)
    assert answer.result.text == whole.text


def test_chat_renders_the_template_and_reuses_the_prefix(engine):
    first = engine.chat(MESSAGES, max_tokens=10).result
    assert first.prompt_tokens == len(engine.template.encode(MESSAGES))
    again = [
        *MESSAGES,
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": "?"},
    ]
    assert engine.chat(again, max_tokens=5).result.completion_tokens == 5


def test_stop_strings_end_the_text_before_them(engine):
    whole = engine.generate(PROMPT, max_tokens=40).result.text
    stop = next(
        whole[i : i + 2] for i in range(10, len(whole)) if whole.index(whole[i : i + 2]) == i
    )
    got = engine.generate(PROMPT, max_tokens=40, stop=[stop])
    pieces = list(got)
    assert "".join(pieces) == got.result.text == whole[: whole.index(stop)]
    assert got.result.finish_reason == "stop"


def test_one_stop_string_is_not_taken_for_its_letters(engine):
    whole = engine.generate(PROMPT, max_tokens=40).result.text
    assert engine.generate(PROMPT, max_tokens=40, stop=whole[3:5]).result.text.startswith(whole[:3])
    with pytest.raises(UsageError, match="a stop string must be text"):
        engine.generate(PROMPT, stop=[""])


def test_kind_e_o11_a_continued_text_keeps_its_space_and_an_answer_has_none(tmp_path):
    """SentencePiece text begins with a space that is dropped; a continuation does not begin."""
    pack = tiny.tiny_pack(tmp_path, tokenizer="byte-fallback", scale_head=4.0)
    with Engine.load(pack, device="cpu") as engine:
        texts = set()
        for seed in range(30):
            sampling = SamplingParams(temperature=2.0, seed=seed)
            prompt = engine.tokenizer.encode("the")
            result = engine.generate("the", max_tokens=4, sampling=sampling).result
            whole = engine.tokenizer.decode([*prompt, *result.token_ids])
            assert "the" + result.text == whole
            answer = engine.chat(MESSAGES, max_tokens=4, sampling=sampling).result
            assert answer.text == engine.tokenizer.decode(answer.token_ids)
            texts.add(result.text[:1])
        assert " " in texts


# --- one caller at a time, kind L -----------------------------------------------------------------


def test_kind_l_o37_two_threads_are_queued_and_each_gets_its_own_text(engine):
    prompts = [PROMPT, PROMPT[::-1], [1, 5, 6], [1, 90, 91, 92]]
    alone = [engine.generate(p, max_tokens=15).result.token_ids for p in prompts]
    got = [None] * len(prompts)

    def ask(i):
        got[i] = engine.generate(prompts[i], max_tokens=15).result.token_ids

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == alone


def test_kind_l_o37_who_does_not_want_to_wait_is_told(engine):
    first = engine.generate(PROMPT, max_tokens=10)
    next(first)
    answers = []

    def ask():
        try:
            engine.generate(PROMPT, max_tokens=5, wait=False).result
        except BusyError as error:
            answers.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert len(answers) == 1
    assert first.result.completion_tokens == 10  # the first caller noticed nothing
    assert engine.generate(PROMPT, max_tokens=5, wait=False).result.completion_tokens == 5


def test_the_thread_that_holds_the_engine_is_not_left_waiting_for_itself(engine):
    first = engine.generate(PROMPT, max_tokens=10)
    next(first)
    with pytest.raises(BusyError, match="this thread"):
        next(engine.generate(PROMPT, max_tokens=5))
    first.close()
    assert engine.generate(PROMPT, max_tokens=5).result.completion_tokens == 5


def test_kind_l_o37_a_thread_of_a_pool_waits_for_an_answer_it_read_before(engine):
    """As in a web server: every piece of an answer may be read in another thread of the pool."""
    slow_down(engine, 0.01)
    first, pieces = engine.generate(PROMPT, max_tokens=12), []
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as two:
        pieces.append(one.submit(next, first).result())
        second = one.submit(lambda: engine.generate(PROMPT, max_tokens=12).result.text)
        pieces += two.submit(list, first).result()
        assert second.result() == "".join(pieces)


def test_a_loop_left_early_frees_the_engine(engine):
    for _ in engine.generate(PROMPT, max_tokens=30):
        break
    assert engine.generate(PROMPT, max_tokens=5, wait=False).result.completion_tokens == 5


@pytest.mark.parametrize("where", ["this thread", "another thread", "a task"])
def test_kind_l_o37_an_answer_in_a_circle_of_garbage_does_not_keep_the_engine(engine, where):
    answer = engine.generate(PROMPT, max_tokens=30)
    next(answer)
    circle = [answer]
    circle.append(circle)
    gc.collect()  # what comes now is too little for another one
    del answer, circle

    def ask():
        return engine.generate(PROMPT, max_tokens=5).result.completion_tokens

    async def ask_in_task():
        return len([piece async for piece in engine.generate(PROMPT, max_tokens=5)]) and 5

    if where == "this thread":
        assert ask() == 5
    elif where == "a task":
        assert asyncio.run(asyncio.wait_for(ask_in_task(), 10)) == 5
    else:
        found = []
        thread = threading.Thread(target=lambda: found.append(ask()), daemon=True)
        thread.start()
        thread.join(10)
        assert found == [5]


def test_kind_l_o37_a_task_that_fails_over_its_answer_does_not_keep_the_engine(engine):
    async def fail():
        answer = engine.generate(PROMPT, max_tokens=30)
        async for _ in answer:
            raise ConnectionResetError

    async def main():
        try:
            await asyncio.wait_for(fail(), 10)
        except ConnectionResetError:
            pass
        answer = engine.generate(PROMPT, max_tokens=5)
        async with asyncio.timeout(10):
            return "".join([piece async for piece in answer])

    assert asyncio.run(main()) == engine.generate(PROMPT, max_tokens=5).result.text


def test_an_answer_that_is_read_slowly_keeps_the_engine(engine, monkeypatch):
    collected = []
    monkeypatch.setattr(gc, "collect", lambda: collected.append(1))
    answer = engine.generate(PROMPT, max_tokens=30)
    next(answer)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(lambda: engine.generate(PROMPT, max_tokens=5).result.completion_tokens)
        with contextlib.suppress(TimeoutError):
            other.result(0.9)
        assert not other.done()
        assert len(collected) == 1  # seldom
        assert answer.result.completion_tokens == 30
        assert other.result(10) == 5


def test_an_answer_that_its_own_on_progress_keeps_does_not_keep_the_engine(engine):
    class Window:
        def __init__(self):
            self.answer = engine.generate(PROMPT, max_tokens=30, on_progress=self.show)

        def show(self, progress):
            pass

    next(Window().answer)
    gc.collect()
    assert engine.generate(PROMPT, max_tokens=5, wait=False).result.completion_tokens == 5


def test_an_event_set_between_two_steps_frees_the_engine(engine):
    stop = threading.Event()
    answer = engine.generate(PROMPT, max_tokens=30, cancel=stop)
    next(answer)
    stop.set()
    assert engine.generate(PROMPT, max_tokens=5, wait=False).result.completion_tokens == 5
    assert answer.result.finish_reason == "cancelled"


def test_an_answer_that_another_thread_reads_to_its_end_does_not_keep_the_engine(engine):
    answer = engine.generate(PROMPT, max_tokens=6)
    next(answer)
    try_hold = engine.try_hold

    def late(run, task):
        engine.try_hold = try_hold
        list(answer)
        return try_hold(run, task)

    engine.try_hold = late
    assert list(answer) == []
    assert engine.generate(PROMPT, max_tokens=5, wait=False).result.completion_tokens == 5


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_kind_l_o36_ctrl_c_at_any_moment_of_dropping_an_answer_frees_the_engine(engine):
    moment, moments = 0, 1
    while moment <= moments:
        answer = engine.generate(PROMPT, max_tokens=6)
        next(answer)
        with Interrupt(moment, HOLDING) as interrupt:
            del answer
        moments = moments if moment else interrupt.seen
        got = engine.generate(PROMPT, max_tokens=2, wait=False).result.completion_tokens
        assert got == 2, interrupt.where
        moment += 1
    assert moments > 10


def test_nobody_is_told_to_finish_an_answer_that_another_one_is_about_to_collect(
    engine, monkeypatch
):
    collecting, go, collect = threading.Event(), threading.Event(), gc.collect

    def slow():
        collecting.set()
        go.wait(10)
        return collect()

    answer = engine.generate(PROMPT, max_tokens=30)
    next(answer)
    circle = [answer]
    circle.append(circle)
    collect()
    del answer, circle
    monkeypatch.setattr(gc, "collect", slow)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(lambda: engine.generate(PROMPT, max_tokens=5).result.completion_tokens)
        assert collecting.wait(10)
        threading.Timer(1.0, go.set).start()
        assert engine.generate(PROMPT, max_tokens=5).result.completion_tokens == 5
        assert other.result(10) == 5


def test_ctrl_c_at_any_moment_of_a_collection_leaves_captures_to_other_threads(engine, monkeypatch):
    monkeypatch.setattr(gc, "collect", lambda: None)
    answer = engine.generate(PROMPT, max_tokens=30)
    next(answer)
    answer._run.rests = lambda: True
    moment, moments = 0, 1
    while moment <= moments:
        with Interrupt(moment, HOLDING) as interrupt:
            engine.collect_dropped(at_once=True)
        moments = moments if moment else interrupt.seen
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(device.capturing.acquire, False).result(), interrupt.where
            pool.submit(device.capturing.release).result()
        moment += 1
    assert moments > 5


def test_kind_l_o37_asyncio_callers_share_the_engine(engine):
    alone = engine.generate(PROMPT, max_tokens=12).result.text

    async def ask():
        return "".join([piece async for piece in engine.generate(PROMPT, max_tokens=12)])

    async def both():
        return await asyncio.gather(ask(), ask(), ask())

    assert asyncio.run(both()) == [alone] * 3


def test_kind_l_o37_callers_who_wait_in_the_loop_s_pool_do_not_hold_up_who_is_answered(engine):
    """They may be as many as its threads."""
    passes, threads = slow_down(engine, 10), set(threading.enumerate())

    def ask():
        return engine.generate(PROMPT, max_tokens=3).result.completion_tokens

    async def read():
        return len([piece async for piece in engine.generate(PROMPT, max_tokens=12)])

    async def main():
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
        first = asyncio.create_task(read())
        while not passes.begun.is_set():
            await asyncio.sleep(0.01)
        others = [asyncio.create_task(asyncio.to_thread(ask)) for _ in range(4)]
        await asyncio.sleep(0.1)
        passes.go.set()
        try:
            return await asyncio.wait_for(first, 10), await asyncio.gather(*others)
        finally:
            first.cancel()

    pieces, counts = asyncio.run(main())
    assert pieces and counts == [3] * 4
    engine.close()
    until = time.monotonic() + 10
    while set(threading.enumerate()) - threads and time.monotonic() < until:
        time.sleep(0.01)
    assert not set(threading.enumerate()) - threads


def test_kind_l_o36_a_cancelled_task_frees_the_engine(engine):
    passes = slow_down(engine, 0.05)

    async def main():
        async def read():
            async for _ in engine.generate(PROMPT, max_tokens=200):
                pass

        task = asyncio.create_task(read())
        await asyncio.to_thread(passes.begun.wait)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert engine.generate(PROMPT, max_tokens=1).result.completion_tokens == 1
    assert passes.count < 20  # 40 and more for all that was asked for


def test_an_asyncio_task_is_not_left_waiting_for_itself(engine):
    async def nested():
        async for _ in engine.generate(PROMPT, max_tokens=10):
            async for _ in engine.generate(PROMPT, max_tokens=5):
                pass

    with pytest.raises(BusyError, match="this task"):
        asyncio.run(asyncio.wait_for(nested(), 10))
    assert engine.generate(PROMPT, max_tokens=5, wait=False).result.completion_tokens == 5


def test_a_task_that_reads_without_async_is_not_left_waiting_for_itself(engine):
    async def nested():
        for _ in engine.generate(PROMPT, max_tokens=10):
            async for _ in engine.generate(PROMPT, max_tokens=5):
                pass

    with pytest.raises(BusyError, match="this task"):
        asyncio.run(asyncio.wait_for(nested(), 10))


def test_a_task_cancelled_while_it_waits_leaves_the_engine_to_the_other(engine):
    passes = slow_down(engine, 60)

    async def main():
        async def read():
            return [piece async for piece in engine.generate(PROMPT, max_tokens=8)]

        first = asyncio.create_task(read())
        await asyncio.to_thread(passes.begun.wait)
        second = asyncio.create_task(read())
        await asyncio.sleep(0.02)
        second.cancel()
        passes.go.set()
        assert await first
        with pytest.raises(asyncio.CancelledError):
            await second

    asyncio.run(main())
    assert engine.generate(PROMPT, max_tokens=5, wait=False).result.completion_tokens == 5


# --- cancel ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["cancel", "close"])
def test_kind_l_o36_an_answer_can_be_ended_from_inside_its_own_step(engine, how):
    prompt = [1] + [5 + i % 200 for i in range(400)]
    engine.decoder.target.forward, forward = None, engine.decoder.target.forward

    def ending(*args, **kwargs):
        getattr(answer, how)()
        with pytest.raises(BusyError, match="inside"):
            next(answer)
        with pytest.raises(BusyError, match="this thread"):
            next(engine.generate(PROMPT))
        return forward(*args, **kwargs)

    answer = engine.generate(prompt, max_tokens=5)
    engine.decoder.target.forward = ending
    assert len(list(answer)) <= 1
    assert answer.result.finish_reason == "cancelled"
    engine.decoder.target.forward = forward
    assert engine.generate(prompt, max_tokens=5, wait=False).result.completion_tokens == 5


def test_kind_l_o36_a_cancel_that_comes_as_a_step_ends_is_not_lost(engine):
    """Nobody reads on, and nobody drops the answer: the engine is free all the same."""
    answer = engine.generate(PROMPT, max_tokens=30)
    lock = answer._run._stepping

    class Late:
        acquire, release, __enter__ = lock.acquire, lock.release, lock.__enter__

        def __exit__(self, *error):
            answer._run._stepping = lock
            answer.cancel()  # finds the step still running
            lock.release()

    answer._run._stepping = Late()
    next(answer)
    assert engine.generate(PROMPT, max_tokens=5, wait=False).result.completion_tokens == 5
    assert answer.result.finish_reason == "cancelled"


def test_kind_l_o36_ctrl_c_at_any_moment_leaves_the_engine_usable_and_the_text_right(packs):
    with Engine.load(*packs, device="cpu", slots=6, cutoff=3) as engine:
        text = engine.generate(PROMPT, max_tokens=6).result.token_ids
        longer = [*PROMPT, *text, 7]  # goes on from every row the interrupted answer left
        expected = engine.generate(longer, max_tokens=3).result.token_ids

        def interrupted(moment):
            engine.generate([1, 9], max_tokens=1).result
            answer = engine.generate(PROMPT, max_tokens=6)
            with Interrupt(moment) as interrupt:
                list(answer)
            answer.close()
            begun = answer.result.token_ids
            assert begun == text[: len(begun)], interrupt.where
            got = engine.generate(longer, max_tokens=3, wait=False).result.token_ids
            assert got == expected, interrupt.where
            return interrupt

        moments = interrupted(0).seen
        for moment in range(1, moments + 1, moments // 20):
            interrupted(moment)


@pytest.mark.parametrize("what", ["next", "cancel", "close"])
def test_kind_l_o36_ctrl_c_at_any_moment_of_a_call_leaves_the_answer_to_be_closed(engine, what):
    """And the engine to others: no lock is left taken, and nobody is taken for its reader."""
    text = engine.generate(PROMPT, max_tokens=2).result.token_ids
    moment, moments = 0, 1
    while moment <= moments:
        answer = engine.generate(PROMPT, max_tokens=6)
        next(answer)
        with Interrupt(moment, HOLDING) as interrupt:
            next(answer) if what == "next" else getattr(answer, what)()
        moments = moments if moment else interrupt.seen
        assert not answer._run._stepping.locked(), interrupt.where
        answer.close()
        got = engine.generate(PROMPT, max_tokens=2, wait=False).result.token_ids
        assert got == text, interrupt.where
        moment += 1
    assert moments > 10


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timer signal here")
def test_kind_l_o36_real_signals_leave_no_lock_taken_and_the_text_right(packs):
    """What the test before cannot reach: the standard library's own locks and queues."""

    def strike(number, frame):
        raise KeyboardInterrupt

    def read(answer, seconds):
        try:
            signal.setitimer(signal.ITIMER_REAL, seconds)
            list(answer)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    before = signal.signal(signal.SIGALRM, strike)
    rng, struck = random.Random(5), 0
    try:
        with Engine.load(*packs, device="cpu", slots=2, cutoff=3) as engine:
            text = engine.generate(PROMPT, max_tokens=6).result.token_ids
            until = time.monotonic() + 2.0
            while time.monotonic() < until:
                answer = engine.generate(PROMPT, max_tokens=6)
                try:
                    read(answer, rng.uniform(1e-5, 0.02))
                except KeyboardInterrupt:
                    struck += 1
                answer.close()
                assert engine.generate(PROMPT, max_tokens=6, wait=False).result.token_ids == text
    finally:
        signal.signal(signal.SIGALRM, before)
    assert struck


def test_kind_l_o36_a_cancelled_draft_is_copied_for_no_longer(packs):
    with Engine.load(*packs, device="cpu", slots=9, cutoff=3) as engine:
        store, stop, copied = engine.decoder.store, threading.Event(), []
        prefetch, draft = store.prefetch, engine.decoder.draft
        forward, calls = draft.forward, []

        def slow(layer, expert):
            time.sleep(0.05)
            copied.append(expert)
            prefetch(layer, expert)

        def cancelling(*args, **kwargs):
            calls.append(1)
            if len(calls) == 3:
                stop.set()
            return forward(*args, **kwargs)

        store.prefetch, draft.forward = slow, cancelling
        assert engine.generate(PROMPT, cancel=stop).result.finish_reason == "cancelled"
        before = len(copied)
        time.sleep(0.3)
        assert len(copied) <= before + 1


@pytest.mark.parametrize("how", ["event", "method", "close"])
def test_kind_l_o36_cancel_from_another_thread_takes_effect_within_a_pass(engine, how):
    passes = slow_down(engine, 0.2)
    event = threading.Event()
    answer = engine.generate(PROMPT, max_tokens=300, cancel=event)
    asked = []

    def stop():
        passes.begun.wait()
        {"event": event.set, "method": answer.cancel, "close": answer.close}[how]()
        asked.append(passes.count)

    thread = threading.Thread(target=stop)
    thread.start()
    list(answer)
    thread.join()
    assert answer.result.finish_reason == "cancelled"
    assert passes.count <= min(asked[0] + 1, 20)  # 20: close returns when the answer has ended
    passes.go.set()
    assert engine.generate(PROMPT, max_tokens=3).result.completion_tokens == 3


def test_kind_l_o36_cancel_in_prefill_takes_effect_within_a_chunk(engine, monkeypatch):
    from spmoe_lite import decoder

    monkeypatch.setattr(decoder, "PREFILL_CHUNK", 40)
    stop, seen = threading.Event(), []

    def progress(p):
        seen.append(p.done)
        assert (p.stage, p.total, p.unit) == ("prefill", 201, "tokens")
        if p.done > 40:  # in the second chunk
            stop.set()

    prompt = [1] + [5 + i % 200 for i in range(200)]
    answer = engine.generate(prompt, max_tokens=5, cancel=stop, on_progress=progress)
    assert list(answer) == []
    assert seen[:3] == [13, 26, 40]  # at each of the three layers
    assert 40 < seen[-1] <= 80
    assert answer.result.finish_reason == "cancelled"
    assert answer.result.completion_tokens == 0
    whole = engine.generate(prompt, max_tokens=5).result  # goes on where it stopped
    with Engine.load(engine.target_pack.path, device="cpu") as fresh:
        assert fresh.generate(prompt, max_tokens=5).result.token_ids == whole.token_ids


def test_an_event_set_beforehand_computes_nothing(engine):
    stop = threading.Event()
    stop.set()
    before = engine.counters.copy()
    answer = engine.generate(PROMPT, max_tokens=5, cancel=stop)
    assert list(answer) == []
    assert answer.result.finish_reason == "cancelled"
    assert engine.counters == before


def test_kind_l_o36_an_error_in_the_engine_reaches_the_reader_and_the_engine_goes_on(engine):
    expected = engine.generate(PROMPT, max_tokens=8).result.token_ids
    forward = engine.decoder.target.forward
    calls = []

    def failing(*args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("kernel stub")
        return forward(*args, **kwargs)

    engine.decoder.target.forward = failing
    answer = engine.generate(PROMPT, max_tokens=8)
    with pytest.raises(RuntimeError, match="kernel stub"):
        list(answer)
    assert answer.result.finish_reason == "error"
    assert engine.generate(PROMPT, max_tokens=8).result.token_ids == expected


def test_kind_l_o36_an_error_in_the_worker_reaches_the_reader(packs):
    with Engine.load(*packs, device="cpu", slots=6, cutoff=3) as engine:

        def broken(layer, expert):
            raise OSError("the disk is gone")

        engine.decoder.store.prefetch = broken
        with pytest.raises(OSError, match="disk is gone"):
            engine.generate(PROMPT, max_tokens=50).result
        del engine.decoder.store.prefetch
        assert engine.generate(PROMPT, max_tokens=5).result.completion_tokens == 5


def test_load_reports_and_can_be_cancelled(packs):
    seen = []
    Engine.load(*packs, device="cpu", on_progress=seen.append).close()
    assert seen[-1].stage == "load"
    assert seen[-1].unit == "bytes"
    assert [p.done for p in seen[-2:]] == sorted(p.done for p in seen[-2:])
    threads = set(threading.enumerate())  # which, not how many: some of an earlier test may end
    for last in range(1, len(seen) + 1):
        stop, calls = threading.Event(), []

        def progress(p, last=last, stop=stop, calls=calls):
            calls.append(p)
            if len(calls) == last:
                stop.set()

        with pytest.raises(Cancelled):
            Engine.load(*packs, device="cpu", cancel=stop, on_progress=progress)
        assert len(calls) == last
    assert threads >= set(threading.enumerate())
    folder = os.fspath(packs[0])
    assert not any(file.path.startswith(folder) for file in psutil.Process().open_files())


# --- close -----------------------------------------------------------------------------------------


def test_close_ends_a_running_answer_and_is_idempotent(packs):
    engine = Engine.load(*packs, device="cpu", slots=6)
    passes = slow_down(engine, 0.1)
    answer, pieces = engine.generate(PROMPT, max_tokens=300), []
    thread = threading.Thread(target=lambda: pieces.extend(answer))
    thread.start()
    passes.begun.wait()
    engine.close()
    engine.close()
    thread.join(60)
    assert not thread.is_alive()
    assert answer.result.finish_reason == "cancelled"
    for use in (lambda: engine.generate(PROMPT), lambda: engine.chat(MESSAGES), engine.stats):
        with pytest.raises(BusyError, match="closed"):
            use()


def test_kind_l_o36_close_from_inside_a_step_is_refused_and_works_afterwards(packs):
    engine = Engine.load(*packs, device="cpu", slots=6)
    forward = engine.decoder.target.forward

    def closing(*args, **kwargs):
        engine.close()
        return forward(*args, **kwargs)

    engine.decoder.target.forward = closing
    answer = engine.generate(PROMPT, max_tokens=5)
    with pytest.raises(BusyError, match="this very thread"):
        list(answer)
    with pytest.raises(BusyError, match="closed"):
        engine.generate(PROMPT)
    engine.close()
    with pytest.raises(BusyError, match="closed"):
        engine.decoder  # noqa: B018


def test_kind_l_o36_closed_from_many_threads_while_others_wait(packs):
    engine = Engine.load(*packs, device="cpu", slots=6, cutoff=3)
    passes = slow_down(engine, 0.05)
    ends = []

    def ask():
        try:
            ends.append(engine.generate(PROMPT, max_tokens=300).result.finish_reason)
        except BusyError as error:
            ends.append(str(error))

    readers = [threading.Thread(target=ask) for _ in range(3)]
    for thread in readers:
        thread.start()
    passes.begun.wait()
    closers = [threading.Thread(target=engine.close) for _ in range(3)]
    for thread in closers:
        thread.start()
    for thread in readers + closers:
        thread.join(60)
        assert not thread.is_alive()
    assert sorted(ends) == ["cancelled"] + ["the engine is closed"] * 2


@pytest.mark.parametrize("failing", [False, True])
def test_kind_l_o36_close_frees_the_memory_itself_not_the_garbage_collector(packs, failing):
    engine = Engine.load(*packs, device="cpu", slots=6, cutoff=3)
    gc.collect()
    gc.disable()
    try:
        decoder = engine.decoder
        if failing:
            decoder.store.prefetch = lambda layer, expert: 1 / 0
        with contextlib.suppress(ZeroDivisionError):
            engine.generate(PROMPT, max_tokens=12).result
        held = [
            weakref.ref(thing)
            for thing in (decoder.store, decoder.target, decoder.draft, decoder.session.target_kv)
        ]
        del decoder
        engine.close()
        assert [ref() for ref in held] == [None] * 4
    finally:
        gc.enable()


def test_kind_l_o36_a_dropped_engine_takes_its_worker_and_its_memory_along(packs):
    threads = set(threading.enumerate())
    engine = Engine.load(*packs, device="cpu", slots=6, cutoff=3)
    engine.generate(PROMPT, max_tokens=3).result
    store = weakref.ref(engine.decoder.store)
    assert len(set(threading.enumerate()) - threads) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # its files
        del engine
    for _ in range(1500):
        if store() is None and threads >= set(threading.enumerate()):
            return
        time.sleep(0.02)
    raise AssertionError("still there")


def test_figures_asked_for_while_another_thread_closes_are_there_or_refused(engine):
    """Whenever the engine's parts go: at most once between two looks at them."""

    class Closing:
        def __init__(self, parts, looks):
            self.parts, self.looks = parts, looks

        def __getattr__(self, name):
            self.looks -= name == "decoder"
            return None if name == "decoder" and self.looks < 0 else getattr(self.parts, name)

    parts, ends = engine._parts, []
    for looks in range(4):
        engine._parts = Closing(parts, looks)
        try:
            ends.append(engine.stats()["slots"])
        except BusyError as error:
            ends.append(str(error))
    engine._parts = parts
    assert ends == ["the engine is closed", 6, 6, 6]


def test_close_after_an_answer_nobody_finished(packs):
    engine = Engine.load(*packs, device="cpu", slots=6)
    answer = engine.generate(PROMPT, max_tokens=30)
    next(answer)
    engine.close()
    assert answer.result.finish_reason == "cancelled"


def test_kind_l_o36_rounds_leave_nothing_behind(tmp_path):
    """Threads 0, files and mappings gone, resident memory steady, the folder can be deleted.

    What is kept makes memory grow in every round, by more than 1 MB; an allocator takes more once.
    """
    hf = tiny.tiny_mixtral(tmp_path / "hf", hidden=256, intermediate=512, layers=4, experts=8)
    target = convert(hf, out=tmp_path / "t.spmoe").path
    draft = tiny.tiny_pack(tmp_path / "d", kind="mistral", layers=4, hidden=256)
    process, threads = psutil.Process(), set(threading.enumerate())
    sizes = []
    for _ in range(8):
        with Engine.load(target, draft, device="cpu", slots=16) as engine:
            engine.generate(PROMPT, max_tokens=6).result
            assert set(threading.enumerate()) - threads
        sizes.append(process.memory_info().rss)
        assert threads >= set(threading.enumerate())
        assert not any(str(tmp_path) in file.path for file in process.open_files())
    assert sum(after - before > 1 << 20 for before, after in pairwise(sizes[1:])) < 4, sizes
    if sys.platform == "linux":
        with open("/proc/self/maps", encoding="utf-8") as maps:
            assert str(tmp_path) not in maps.read()


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator")
def test_kind_l_o36_close_gives_freed_memory_to_the_system(tmp_path):
    """glibc keeps freed blocks below a live one: 50 of these 75 MB, and half of a real pair's gigabytes.

    In a process of its own: what other tests have freed would be used again.
    """
    target = tiny.tiny_pack(tmp_path / "t", hidden=256, intermediate=512, layers=4)
    large = {"layers": 16, "hidden": 256, "intermediate": 512}
    draft = tiny.tiny_pack(tmp_path / "d", kind="mistral", **large)
    code = (
        "import ctypes, sys, psutil\nfrom spmoe_lite import Engine\n"
        "rss = lambda: psutil.Process().memory_info().rss >> 20\n"
        "for _ in range(2):\n"  # the first loads libraries
        "    ctypes.CDLL(None).malloc_trim(0)\n"
        "    before = rss()\n"
        "    engine = Engine.load(*sys.argv[1:], device='cpu', slots=16)\n"
        "    engine.generate([5, 7, 11], max_tokens=6).result\n"
        "    loaded = rss() - before\n"
        "    engine.close()\n"
        "print(loaded, rss() - before)\n"
    )
    loaded, left = map(int, run_alone(code, (target, draft)).stdout.split())
    assert loaded > 50 and left < 20


# --- what a host must not notice -------------------------------------------------------------------


def test_the_library_leaves_its_host_alone(packs, capfd):
    environment, threads = dict(os.environ), torch.get_num_threads()
    grad, dtype = torch.is_grad_enabled(), torch.get_default_dtype()
    with Engine.load(*packs, device="cpu", slots=6) as engine:
        for _ in engine.generate(PROMPT, max_tokens=10):
            assert torch.is_grad_enabled()
            assert not torch.is_inference_mode_enabled()
    assert dict(os.environ) == environment
    assert (torch.get_num_threads(), torch.is_grad_enabled(), torch.get_default_dtype()) == (
        threads,
        grad,
        dtype,
    )
    assert capfd.readouterr() == ("", "")
    handlers = logging.getLogger("spmoe_lite").handlers
    assert all(
        isinstance(h, logging.NullHandler) for h in handlers if type(h).__module__ == "logging"
    )


def test_the_host_s_default_device_is_not_ours(packs, tmp_path):
    source = tiny.tiny_mixtral(tmp_path / "hf", intermediate=64)
    expected = convert(source, out=tmp_path / "a.spmoe", experts="int8", dense="int4").path
    with Engine.load(*packs, device="cpu", slots=6) as engine:
        answer = engine.generate(PROMPT, max_tokens=12).result.token_ids
    with torch.device("meta"):  # where tensors have no values
        again = convert(source, out=tmp_path / "b.spmoe", experts="int8", dense="int4").path
        repack(again, embed="int8")
        with Engine.load(*packs, device="cpu", slots=6) as engine:
            assert engine.generate(PROMPT, max_tokens=12).result.token_ids == answer
        assert torch.empty(1).is_meta
    repack(expected, embed="int8")
    assert files_of(again) == files_of(expected)


def test_it_works_with_no_standard_streams(packs, monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    with Engine.load(*packs, device="cpu", slots=6) as engine:
        assert engine.generate(PROMPT, max_tokens=5).result.completion_tokens == 5


def test_kind_l_o37_import_touches_no_device_and_survives_a_fork():
    code = (
        "import os, spmoe_lite.engine, torch\n"
        "assert not torch.cuda.is_initialized()\n"
        "pid = os.fork()\n"
        "if pid == 0: os._exit(0 if not torch.cuda.is_initialized() else 1)\n"
        "assert os.waitpid(pid, 0)[1] == 0\n"
    )
    if not hasattr(os, "fork"):
        pytest.skip("no fork here")
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root, timeout=60)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_kind_l_o37_a_forked_child_is_told_and_its_parent_goes_on(engine):
    """torch's threads are not forked: a child that computed would hang."""
    answer = engine.generate(PROMPT, max_tokens=6)
    next(answer)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        try:
            for attempt in (answer, engine.generate(PROMPT, max_tokens=2)):
                try:
                    next(attempt)
                except UnsupportedError as error:
                    os.write(writer, f"{error}\n".encode())
            engine.close()
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as told:
        lines = told.read().splitlines()
    assert os.waitpid(child, 0)[1] == 0
    assert len(lines) == 2 and all("forked" in line for line in lines)
    assert answer.result.completion_tokens == 6


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_an_engine_in_a_child_forked_during_a_step_is_left_without_waiting(engine):
    passes = slow_down(engine, 60)
    answer = engine.generate(PROMPT, max_tokens=6)
    thread = threading.Thread(target=list, args=(answer,))
    thread.start()
    passes.begun.wait()
    child = os.fork()
    if child == 0:
        signal.alarm(10)
        try:
            engine.close()
            os._exit(0)
        finally:
            os._exit(1)
    ended = os.waitpid(child, 0)[1]
    passes.go.set()
    thread.join()
    assert ended == 0
    assert answer.result.completion_tokens == 6


def run_alone(code, packs):
    """`code` in a process of its own, which ends within a minute."""
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    command = [sys.executable, "-c", code, *packs]
    return subprocess.run(command, cwd=root, timeout=60, capture_output=True)


def test_a_daemon_thread_that_is_answered_does_not_abort_the_end_of_the_process(packs):
    code = (
        "import sys, threading\n"
        "from spmoe_lite import Engine\n"
        "engine, seen = Engine.load(*sys.argv[1:], device='cpu', slots=6), threading.Semaphore(0)\n"
        "def read():\n"
        "    while True:\n"
        "        for piece in engine.generate([1, 17, 300], max_tokens=100): seen.release()\n"
        "threading.Thread(target=read, daemon=True).start()\n"
        "for _ in range(20): seen.acquire()\n"
    )
    done = run_alone(code, packs)
    assert (done.returncode, done.stderr) == (0, b"")


def test_an_answer_that_waits_for_the_end_of_the_process_holds_it_up_for_a_while(packs):
    """`on_progress` may ask for something of the main thread, which is on its way out."""
    code = (
        "import sys, threading, spmoe_lite.engine as e\n"
        "e.EXIT_SECONDS = 0.2\n"
        "engine, inside = e.Engine.load(*sys.argv[1:], device='cpu', slots=6), threading.Event()\n"
        "def wait(progress): inside.set(); threading.Event().wait()\n"
        "answer = engine.generate(list(range(3, 300)), max_tokens=9, on_progress=wait)\n"
        "threading.Thread(target=list, args=(answer,), daemon=True).start()\n"
        "inside.wait()\n"
    )
    done = run_alone(code, packs)
    assert b"Traceback" not in done.stderr


# --- bad input -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, error, words",
    [
        ({"device": "tpu"}, UsageError, "--device tpu"),
        ({"device": None}, UsageError, "--device None"),
        ({"device": torch.device("cpu"), "policy": "mru"}, UsageError, "--policy mru"),
        ({"device": torch.device("cpu"), "slots": 1}, CapacityError, "at least 2"),
        ({"device": "cpu", "policy": "mru"}, UsageError, "--policy mru"),
        ({"device": "cpu", "draft_tokens": 99}, UsageError, "--draft-tokens 99"),
        ({"device": "cpu", "cutoff": -1}, UsageError, "--cutoff -1"),
        ({"device": "cpu", "critical_experts": 0}, UsageError, "critical_experts 0"),
        ({"device": "cpu", "critical_experts": 9}, UsageError, "critical_experts 9"),
        ({"device": "cpu", "ctx_size": 100000}, UsageError, "--ctx-size 100000"),
        ({"device": "cpu", "kv_type": "q8_0"}, UsageError, "--kv-type q8_0: one of auto, int8"),
        ({"device": "cpu", "vram": "much"}, UsageError, "--vram much"),
        ({"device": "cpu", "vram": 1000}, CapacityError, "raise --vram"),
        ({"device": "cpu", "slots": 1}, CapacityError, "at least 2"),
    ],
)
def test_load_refuses_in_one_line(packs, options, error, words):
    with pytest.raises(error, match=words) as info:
        Engine.load(packs[0], **options)
    assert "\n" not in str(info.value)


def test_load_names_what_is_missing(packs, tmp_path):
    with pytest.raises(NotFoundError, match="nowhere"):
        Engine.load("nowhere")
    with pytest.raises(NotFoundError, match="nodraft"):
        Engine.load(packs[0], "nodraft")


def test_kind_j_o28_a_short_pack_is_refused_at_load(tmp_path):
    pack = tiny.tiny_pack(tmp_path)
    file = pack / "experts" / "layer-001.safetensors"
    with open(file, "r+b") as f:
        f.truncate(file.stat().st_size - 1)
    with pytest.raises(DamagedError, match="layer-001"):
        Engine.load(pack, device="cpu")


def test_kind_d_o15_a_draft_of_another_vocabulary_is_refused(packs, tmp_path):
    other = tiny.tiny_pack(tmp_path, kind="mistral", tokenizer="byte-fallback")
    with pytest.raises(UnsupportedError, match=r"id \d+|differ"):
        Engine.load(packs[0], other, device="cpu")


@pytest.mark.parametrize(
    "prompt, error",
    [
        ([], UsageError),
        ([1, 5000], UsageError),
        ([1, -1], UsageError),
        ([1, 2.5], UsageError),
        (["a"], UsageError),
        ("\ud800", UsageError),
        ([1] * 600, CapacityError),
    ],
)
def test_prompts_that_cannot_be_answered(engine, prompt, error):
    with pytest.raises(error) as info:
        engine.generate(prompt)
    assert "\n" not in str(info.value)
    assert engine.generate(PROMPT, max_tokens=2).result.completion_tokens == 2


def test_a_longer_context_is_advised_where_the_model_takes_one(packs):
    with Engine.load(packs[0], device="cpu", ctx_size=300) as engine:
        longest = engine.target_pack.config.max_position_embeddings
        for length, advice in {
            300: "shorten the prompt or raise --ctx-size",
            longest - 1: "shorten the prompt or raise --ctx-size",
            longest: "shorten the prompt, the model takes no more",
        }.items():
            with pytest.raises(CapacityError, match=f"has {length} tokens, .*: {advice}$"):
                engine.generate([1] * length)


def test_prompts_of_any_whole_numbers(engine):
    expected = engine.generate(PROMPT, max_tokens=4).result.token_ids
    for prompt in (tuple(PROMPT), np.array(PROMPT, dtype=np.uint16), torch.tensor(PROMPT)):
        assert engine.generate(prompt, max_tokens=4).result.token_ids == expected
    few = engine.generate(PROMPT, max_tokens=np.int64(4)).result.token_ids
    assert few == expected
    for bad in (0, 2.5, True):
        with pytest.raises(UsageError, match="--max-tokens"):
            engine.generate(PROMPT, max_tokens=bad)
    with pytest.raises(UsageError, match="decode"):  # its bytes are no token ids
        engine.generate(b"hello")


@pytest.mark.parametrize(
    "messages",
    ["hi", b"hi", None, 5, {"role": "user", "content": "hi"}, [None], ["hi"], [["a", "b"]]],
)
def test_what_is_no_conversation_is_refused_in_one_line(engine, messages):
    with pytest.raises(UsageError, match=r"must be .*\{\"role\": \"user\"") as info:
        engine.chat(messages)
    assert "\n" not in str(info.value)
    assert engine.chat(iter(MESSAGES), max_tokens=2).result.completion_tokens == 2


@pytest.mark.parametrize(
    "options",
    [
        {"stop": None},
        {"stop": 5},
        {"sampling": {"temperature": 0}},
        {"cancel": True},
        {"on_progress": True},
    ],
)
def test_an_option_of_an_answer_of_the_wrong_kind_is_refused_at_once(engine, options):
    with pytest.raises(UsageError) as info:
        engine.generate(PROMPT, **options)
    assert str(info.value).startswith(next(iter(options))) and "\n" not in str(info.value)


def test_a_model_of_one_expert_runs(tmp_path):
    hf = tiny.tiny_mixtral(tmp_path / "hf", layers=1, experts=1, top_k=1)
    draft = tiny.tiny_pack(tmp_path / "d", kind="mistral", layers=1)
    pack = convert(hf, out=tmp_path / "p.spmoe").path
    with (
        Engine.load(pack, device="cpu") as engine,
        Engine.load(pack, draft, device="cpu", slots=2) as other,
    ):
        expected = engine.generate(PROMPT, max_tokens=5).result.token_ids
        assert other.generate(PROMPT, max_tokens=5).result.token_ids == expected


def test_a_model_without_a_template_is_refused_by_chat_only(tmp_path):
    hf = tiny.tiny_mixtral(tmp_path / "hf")
    config = hf / "tokenizer_config.json"
    import json

    values = json.loads(config.read_text(encoding="utf-8"))
    values.pop("chat_template", None)
    config.write_text(json.dumps(values), encoding="utf-8")
    (hf / "chat_template.jinja").unlink(missing_ok=True)
    with Engine.load(convert(hf, out=tmp_path / "p.spmoe").path, device="cpu") as engine:
        with pytest.raises(UnsupportedError, match="no chat template"):
            engine.chat(MESSAGES)
        assert engine.generate("hello", max_tokens=3).result.completion_tokens == 3


def test_default_sampling_comes_from_the_checkpoint(tmp_path):
    hf = tiny.tiny_mixtral(tmp_path / "hf")
    (hf / "generation_config.json").write_text(
        '{"do_sample": true, "temperature": 0.5, "top_p": 0.9, "eos_token_id": 2}', encoding="utf-8"
    )
    with Engine.load(convert(hf, out=tmp_path / "p.spmoe").path, device="cpu") as engine:
        assert engine.default_sampling == SamplingParams(
            temperature=0.5, top_p=0.9, top_k=50
        )  # Hugging Face's default k


@pytest.mark.parametrize("kv_type", ["auto", "int8"])
def test_kind_i_o26_the_plan_counts_the_draft_and_is_what_is_used(packs, kv_type):
    with Engine.load(*packs, device="cpu", slots=6, kv_type=kv_type) as engine:
        plan, decoder = engine.plan, engine.decoder
        assert plan.draft_bytes > 0
        kv = decoder.session.target_kv.nbytes + decoder.session.draft_kv.nbytes
        assert plan.kv_bytes == kv
        slab = decoder.store._slab.slots.nbytes
        assert slab == plan.slots * plan.slot_bytes
        smaller = plan.total_bytes - plan.slot_bytes
    with pytest.raises(CapacityError, match="lower --slots to 5"):
        Engine.load(*packs, device="cpu", slots=6, kv_type=kv_type, vram=smaller)
    with Engine.load(*packs, device="cpu", kv_type=kv_type, vram=smaller) as engine:
        assert engine.plan.slots == 5


def test_kind_i_o26_ram_that_is_refused_is_said_in_a_line(packs, monkeypatch):
    def refuse(*_, **__):
        torch.empty(1 << 62, dtype=torch.uint8)

    with Engine.load(*packs, device="cpu", slots=6) as engine:
        expected = engine.generate(PROMPT, max_tokens=5).result.text
        with monkeypatch.context() as patch:
            patch.setattr(engine.decoder.target, "run", refuse)
            with pytest.raises(CapacityError, match="cpu has no room left for a pass: lower"):
                engine.generate(PROMPT, max_tokens=5).result
        assert engine.generate(PROMPT, max_tokens=5).result.text == expected
    monkeypatch.setattr(Pack, "load_dense", refuse)
    with pytest.raises(CapacityError, match="weights of target do not fit on cpu; free"):
        Engine.load(*packs, device="cpu", slots=6)


def test_redirected_output_is_not_needed(packs):
    sys_stdout, sys.stdout = sys.stdout, io.StringIO()
    try:
        with Engine.load(*packs, device="cpu") as engine:
            engine.generate(PROMPT, max_tokens=3).result
        assert sys.stdout.getvalue() == ""
    finally:
        sys.stdout = sys_stdout


@pytest.mark.parametrize(
    "options",
    [
        {"slots": "4"},
        {"ctx_size": "8"},
        {"cutoff": 1.5},
        {"slots": True},
        {"pin": "abc"},
        {"pin": -1},
        {"draft_tokens": True},
        {"policy": np.array([1, 2])},
        {"critical_experts": 1.5},
        {"critical_experts": "2"},
        {"prefetch": "off"},
        {"template": 5},
        {"home": 5},
        {"home": b"packs"},
        {"cancel": 5},
        {"cancel": threading.Event},
        {"on_plan": 5},
        {"on_progress": "print"},
    ],
)
def test_an_option_of_the_wrong_kind_is_refused_in_one_line(options, tmp_path):
    with pytest.raises(UsageError) as refusal:
        Engine.load(tmp_path / "none.spmoe", device="cpu", **options)
    name = next(iter(options))
    said = (f"--{name.replace('_', '-')} ", f"{name} ")
    assert str(refusal.value).startswith(said) and "\n" not in str(refusal.value)


def test_numpy_s_numbers_are_numbers(packs, tmp_path):
    numbers = {"slots": 6, "ctx_size": 64, "critical_experts": 2, "cutoff": 1, "draft_tokens": 2}
    numbers = {name: np.int64(value) for name, value in numbers.items()}
    with Engine.load(*packs, device="cpu", trace=tmp_path / "trace", **numbers) as engine:
        engine.generate(PROMPT, max_tokens=np.uint8(3)).result
        json.dumps(engine.plan.context + engine.stats()["slots"])
    assert (tmp_path / "trace").stat().st_size > 0


@pytest.mark.parametrize("spelled", [str, Path])
def test_a_home_of_its_own_is_all_that_is_touched(packs, tmp_path, monkeypatch, spelled):
    monkeypatch.setenv("SPMOE_HOME", str(tmp_path / "other"))
    home = tmp_path / "home"
    home.mkdir()
    os.symlink(packs[0], home / "target.spmoe")
    with Engine.load("target", device="cpu", slots=6, home=spelled(home)) as engine:
        assert engine.profile_path.parent == home / "profiles"
    assert not (tmp_path / "other").exists() and library.last_used(home)


def test_what_lives_in_this_process_is_not_copied(engine, recwarn):
    answer = engine.generate(PROMPT, max_tokens=4)
    for thing in (engine, answer):
        for make in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(UsageError, match="cannot be copied or sent to a process"):
                make(thing)
    assert pickle.loads(pickle.dumps(answer.result)) == answer.result


def test_int8_caches_refuse_what_they_cannot_hold_and_name_the_way_out(tmp_path):
    """Keys of 1e7 times the usual size: beyond the scale of a code, and no harm in a float."""
    source = tiny.tiny_mixtral(tmp_path / "t", layers=2, experts=3)
    for file in source.glob("*.safetensors"):
        tensors = load_file(file)
        for name in tensors:
            if "k_proj" in name or "v_proj" in name:
                tensors[name] *= 1e7
        save_file(tensors, file, metadata={"format": "pt"})
    pack = convert(source, out=tmp_path / "t.spmoe").path
    with Engine.load(pack, device="cpu") as engine:
        assert len(engine.generate([1, 5, 9], max_tokens=3).result.token_ids) > 0
    with Engine.load(pack, device="cpu", kv_type="int8") as engine:
        with pytest.raises(SpmoeError, match="--kv-type auto"):
            engine.generate([1, 5, 9], max_tokens=3).result  # noqa: B018


def test_a_draft_is_named_where_rounding_may_show_it_in_the_text(packs, tmp_path):
    """On the CPU more rows at once may change a last bit: fp32 hides that, bf16 and int8 keys do not."""
    rough = tiny.tiny_pack(tmp_path, name="rough", experts="bf16", dense="bf16")
    for target, draft, kv_type, named in (
        (rough, packs[1], "auto", "rough in bf16 on the CPU"),
        (packs[0], packs[1], "int8", "--kv-type int8 on the CPU"),
        (packs[0], packs[1], "auto", None),
        (rough, None, "auto", None),
    ):
        with Engine.load(target, draft, device="cpu", kv_type=kv_type) as engine:
            said = [n for n in engine.notices if "the text may depend on the draft" in n]
        assert [n.partition(":")[0] for n in said] == ([named] if named else [])
