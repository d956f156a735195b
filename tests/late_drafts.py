"""Captured drafts on a device that is as late as its streams allow, without one.

What `DraftSteps` orders waits in its stream: replays, and copies that need not be waited for. It is done,
from any stream that may go on, when somebody waits for something, and some of it before, as `draw` says:
inside a pass too, where an event is recorded. What else runs, runs at once, after all of the main stream.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections import deque
from collections.abc import Callable

import torch

from spmoe_lite import draftgraphs
from spmoe_lite.model import Transformer


class _Done:
    """Whether something that was ordered has been done."""

    def __init__(self, done: bool = True):
        self.done = done


class Late:
    """The device: streams of what is still to do. `install` puts it in place of torch.cuda's."""

    def __init__(self, seed: int):
        self.draw, self.lock = random.Random(seed), threading.RLock()
        self.streams: list[deque] = []  # the main one first
        self.busy: list[deque] = []
        self.recording: dict | None = None  # external event -> what a graph that runs has to mark

    def order(self, what: Callable[[], object]) -> None:
        with self.lock:
            self.current.append(what)
            while self.draw.random() < 0.3 and self.go_on():
                pass

    def go_on(self) -> bool:
        """Do one thing of one stream; False where each has ended or waits for another."""
        with self.lock, torch.inference_mode():
            for stream in self.streams:
                while stream and isinstance(stream[0], _Done) and stream[0].done:
                    stream.popleft()
            ready = [s for s in self.streams if s and callable(s[0]) and s not in self.busy]
            if ready:
                stream = self.draw.choice(ready)
                self.busy.append(stream)
                stream.popleft()()
                self.busy.remove(stream)
            return bool(ready)

    def wait(self, mark: _Done) -> None:
        while not mark.done:
            with self.lock:
                assert mark.done or self.go_on(), "waits for what nothing does"

    def finish(self) -> None:
        """Do all of the main stream."""
        with self.lock:  # the worker may be doing the last of it
            while self.main:
                self.go_on()

    def install(self, monkeypatch) -> None:
        device = self

        class Stream(deque):
            __hash__ = object.__hash__
            __eq__ = object.__eq__

            def __init__(self, *_, **__):
                super().__init__()
                device.streams.append(self)

            def wait_event(self, event):
                with device.lock:
                    self.append(event.mark)

            def wait_stream(self, other):
                event = Event()
                event.record(other)
                self.wait_event(event)

        class Event:
            def __init__(self, external=False):
                self.external, self.mark = external, _Done()

            def record(self, stream=None):
                if self.external:
                    if device.recording is not None:
                        device.recording[self].done = True
                        while device.draw.random() < 0.5 and device.go_on():
                            pass
                    return
                with device.lock:
                    self.mark = mark = _Done(False)
                    (device.current if stream is None else stream).append(
                        lambda: setattr(mark, "done", True)
                    )

            def synchronize(self):
                device.wait(self.mark)

            def query(self):
                device.go_on()
                return self.mark.done

        class Graph:
            def __init__(self, run, rows, kept, events):
                self.run, self.rows, self.kept, self.events = run, rows, kept, events

            def replay(self):
                marks = {event: _Done(False) for event in self.events}
                for event, mark in marks.items():
                    event.mark = mark

                def run():
                    device.recording = marks
                    self.kept.copy_(self.run(self.rows))
                    device.recording = None

                device.order(run)

        def capture(run, rows, reset, pool):
            reset()
            device.recording = events = _Noted()
            kept = run(rows)
            device.recording = None
            return Graph(run, rows, kept, list(events)), kept

        @contextlib.contextmanager
        def inside(stream):
            before, device.current = device.current, stream
            yield
            device.current = before

        copy, forward = torch.Tensor.copy_, Transformer.forward

        def copy_late(self, source, non_blocking=False):
            if not non_blocking:
                return copy(self, source)
            device.order(lambda: copy(self, source))
            return self

        def read_back(values):
            device.finish()
            return values

        def in_order(*args, **how):
            device.finish()
            return forward(*args, **how)

        self.main = self.current = Stream()
        for name, value in {"Stream": Stream, "Event": Event, "stream": inside}.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: device.main)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
        monkeypatch.setattr(torch.Tensor, "copy_", copy_late)
        monkeypatch.setattr(Transformer, "forward", in_order)
        monkeypatch.setattr(draftgraphs, "capture", capture)
        monkeypatch.setattr(draftgraphs, "read_back", read_back)


class _Noted(dict):
    """External events that a pass records, while it is captured."""

    def __missing__(self, event):
        self[event] = mark = _Done()
        return mark
