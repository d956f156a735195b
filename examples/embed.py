"""An app with a model in it: python examples/embed.py demo demo-draft "Name three rivers." """

import sys
import threading

from spmoe_lite import Engine, Progress, Result, SamplingParams, SpmoeError

stop = threading.Event()  # set from any thread: loading and answering end within one piece of work


def show(progress: Progress) -> None:
    print(f"\r{progress.stage}: {progress.done} of {progress.total} {progress.unit}", end="")


def answer(engine: Engine, question: str) -> Result:
    greedy = SamplingParams(temperature=0.0)
    messages = [{"role": "user", "content": question}]
    generation = engine.chat(messages, sampling=greedy, max_tokens=100, cancel=stop)
    for piece in generation:
        print(piece, end="", flush=True)
    return generation.result


if len(sys.argv) != 4:
    sys.exit(__doc__)
target, draft, question = sys.argv[1:]
try:
    with Engine.load(target, draft=draft, cancel=stop, on_progress=show) as engine:
        print()
        result = answer(engine, question)
    print(f"\n{result.finish_reason}: {result.stats.line()}")
except SpmoeError as error:
    sys.exit(f"{error} (code {error.exit_code})")
