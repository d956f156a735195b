"""Ctrl-C at a chosen moment: KeyboardInterrupt where the interpreter could deliver the signal.

CPython looks for signals when a call returns, a function begins and a loop goes round. `Interrupt` counts
these moments in the product's own code, in the thread that uses it, and raises at the one it is given.
"""

import dis
import functools
import sys

MOMENTS = {"CALL", "CALL_FUNCTION_EX", "CALL_KW", "RESUME", "JUMP_BACKWARD"}


@functools.cache
def _operations(code):
    return {i.offset: i.opname for i in dis.get_instructions(code)}


class Interrupt:
    """Context manager; `seen` moments went by, and `struck` says whether it raised (and swallowed)."""

    def __init__(self, moment=0, files=("/spmoe_lite/",)):
        self.seen, self.struck, self.where = 0, False, ""
        self._moment = moment
        self._files = files
        self._before = {}

    def _enter(self, frame, event, arg):
        if not any(name in frame.f_code.co_filename.replace("\\", "/") for name in self._files):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._step

    def _step(self, frame, event, arg):
        if event == "opcode":
            before = self._before.get(id(frame))
            self._before[id(frame)] = _operations(frame.f_code)[frame.f_lasti]
            self.seen += before in MOMENTS
            if before in MOMENTS and self.seen == self._moment:
                self.struck, self.where = True, f"{frame.f_code.co_name}:{frame.f_lineno}"
                sys.settrace(None)
                raise KeyboardInterrupt
        return self._step

    def __enter__(self):
        self._outer = sys.gettrace()
        sys.settrace(self._enter)
        return self

    def __exit__(self, kind, error, traceback):
        sys.settrace(self._outer)
        return kind is KeyboardInterrupt and self.struck
